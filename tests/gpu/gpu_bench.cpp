// How fast the CUDA backend is, end to end: from 16-bit Q, K, V in memory to 16-bit O in memory.
// Not a test.
//
//   gpu_bench [--preset NAME]... [--dims 128,64] [--seqs 1024,2048,..] [--batch 4] [--heads 32]
//             [--kv-heads N] [--mask full|causal]... [--dtype bf16|f16] [--kernel auto|mma_sync]
//             [--repeat N] [--per-launch] [--device N]
//
// TOPS = 4 batch heads seq^2 d / (2 if causal) / time, the median of --repeat runs of one execute,
// each between two CUDA events, after warming up. --per-launch times each kernel of an execute alone,
// with events round every launch, which forbids overlap: the sum is larger than the execute.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sageattn.h"
#include "src/core/error.h"
#include "src/core/plan.h"
#include "tests/gpu/device_memory.h"

using namespace sageattn_test;

namespace {

struct Options {
  std::vector<std::string> presets;
  std::vector<int> dims = {128, 64};
  std::vector<int> seqs = {1024, 2048, 4096, 8192, 16384, 32768};
  std::vector<std::string> masks;
  int batch = 4, heads = 32, kv_heads = 0, repeat = 30, device = 0;
  int32_t dtype = SAGEATTN_BF16, kernel = SAGEATTN_KERNEL_AUTO;
  bool per_launch = false;
};

const struct {
  const char* name;
  int32_t value;
} kPresets[] = {{"auto", SAGEATTN_PRESET_AUTO},         {"sage1", SAGEATTN_PRESET_SAGE1},
                {"sage2_8b", SAGEATTN_PRESET_SAGE2_8B}, {"sage2_4b", SAGEATTN_PRESET_SAGE2_4B},
                {"sage2pp", SAGEATTN_PRESET_SAGE2PP},   {"exact", SAGEATTN_PRESET_EXACT}};

int32_t preset_value(const std::string& name) {
  for (const auto& preset : kPresets) {
    if (name == preset.name) return preset.value;
  }
  throw std::runtime_error("--preset: must be auto, sage1, sage2_8b, sage2_4b, sage2pp or exact");
}

std::vector<int> numbers(const std::string& text) {
  std::vector<int> list;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    list.push_back(std::atoi(text.substr(at, comma - at).c_str()));
    at = comma + 1;
  }
  return list;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--per-launch") {
      o.per_launch = true;
      continue;
    }
    if (i + 1 == argc) throw std::runtime_error("unknown flag or missing value: " + flag);
    const std::string value = argv[++i];
    if (flag == "--preset") {
      preset_value(value);
      o.presets.push_back(value);
    } else if (flag == "--dims") {
      o.dims = numbers(value);
    } else if (flag == "--seqs") {
      o.seqs = numbers(value);
    } else if (flag == "--mask") {
      if (value != "full" && value != "causal") throw std::runtime_error("--mask: full or causal");
      o.masks.push_back(value);
    } else if (flag == "--batch") {
      o.batch = std::atoi(value.c_str());
    } else if (flag == "--heads") {
      o.heads = std::atoi(value.c_str());
    } else if (flag == "--kv-heads") {
      o.kv_heads = std::atoi(value.c_str());
    } else if (flag == "--repeat") {
      o.repeat = std::max(1, std::atoi(value.c_str()));
    } else if (flag == "--device") {
      o.device = std::atoi(value.c_str());
    } else if (flag == "--dtype") {
      o.dtype = value == "f16" ? SAGEATTN_F16 : SAGEATTN_BF16;
    } else if (flag == "--kernel") {
      o.kernel = value == "mma_sync" ? SAGEATTN_KERNEL_MMA_SYNC : SAGEATTN_KERNEL_AUTO;
    } else {
      throw std::runtime_error("unknown flag: " + flag);
    }
  }
  if (o.presets.empty()) o.presets = {"sage1", "sage2_8b", "sage2_4b", "sage2pp"};
  if (o.masks.empty()) o.masks = {"full", "causal"};
  return o;
}

class EventOwner {
 public:
  explicit EventOwner(const cuda::Driver& api) : api_(&api) {
    cuda::check(api, api.EventCreate(&event_, 0), "cuEventCreate");
  }
  EventOwner(EventOwner&& other) noexcept
      : api_(other.api_), event_(std::exchange(other.event_, nullptr)) {}
  EventOwner& operator=(EventOwner&&) = delete;
  ~EventOwner() {
    if (event_ != nullptr) api_->EventDestroy(event_);
  }
  void record(cuda::Stream stream) {
    cuda::check(*api_, api_->EventRecord(event_, stream), "cuEventRecord");
  }
  void wait() { cuda::check(*api_, api_->EventSynchronize(event_), "cuEventSynchronize"); }
  float ms_since(const EventOwner& start) const {
    float ms = 0;
    cuda::check(*api_, api_->EventElapsedTime(&ms, start.event_, event_), "cuEventElapsedTime");
    return ms;
  }

 private:
  const cuda::Driver* api_;
  cuda::Event event_ = nullptr;
};

// Records an event on either side of each launch.
class Stopwatch final : public cuda::Observer {
 public:
  Stopwatch(const cuda::Driver& api, cuda::Stream stream) : api_(api), stream_(stream) {}
  void before(const std::string& kernel, int64_t blocks) override {
    laps_.push_back({kernel, blocks, EventOwner(api_), EventOwner(api_)});
    laps_.back().start.record(stream_);
  }
  void after() override { laps_.back().end.record(stream_); }

  void print() {
    double sum = 0;
    for (Lap& lap : laps_) {
      lap.end.wait();
      const float ms = lap.end.ms_since(lap.start);
      sum += ms;
      std::printf("      %-18s %10lld blocks %9.4f ms\n", lap.kernel.c_str(),
                  static_cast<long long>(lap.blocks), static_cast<double>(ms));
    }
    std::printf("      %-18s %17s %9.4f ms\n", "sum", "", sum);
  }

 private:
  struct Lap {
    std::string kernel;
    int64_t blocks;
    EventOwner start, end;
  };
  const cuda::Driver& api_;
  cuda::Stream stream_;
  std::vector<Lap> laps_;
};

// 16-bit values, nearly normal, of a period that no tile shares.
std::vector<unsigned char> noise(int32_t dtype, uint64_t seed) {
  constexpr size_t kCount = 1 << 20;
  std::vector<unsigned char> bytes(kCount * 2);
  uint64_t state = seed;
  for (size_t i = 0; i < kCount; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<int>(state >> (16 + 12 * j) & 0xfff);
    const float x = static_cast<float>(sum - 2 * 4095) / 2365.0f;  // unit variance
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t half;
    if (dtype == SAGEATTN_BF16) {
      half = static_cast<uint16_t>(bits >> 16);
    } else {
      const int exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
      half = exponent <= 0 ? 0
                           : static_cast<uint16_t>((bits >> 16 & 0x8000) | (exponent << 10) |
                                                   (bits >> 13 & 0x3ff));
    }
    std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

void fill_noise(const cuda::Driver& api, DeviceMemory& memory, int32_t dtype, uint64_t seed) {
  const std::vector<unsigned char> period = noise(dtype, seed);
  for (size_t at = 0; at < memory.size(); at += period.size()) {
    const size_t bytes = std::min(period.size(), memory.size() - at);
    cuda::check(api,
                api.MemcpyHtoD(reinterpret_cast<cuda::DevicePointer>(memory.data() + at),
                               period.data(), bytes),
                "cuMemcpyHtoD");
  }
}

void must(int32_t status, const sageattn_error& error) {
  if (status != SAGEATTN_OK) throw std::runtime_error(error.message);
}

struct Timing {
  double ms;
  sageattn_plan_info info;
};

Timing time_one(const Options& o, sageattn_context* context, const std::string& preset, int dim,
                int seq, bool causal) {
  const cuda::Driver& api = cuda::driver();
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_attn_desc desc;
  must(sageattn_attn_desc_init(&desc, sizeof desc, preset_value(preset), &error), error);
  desc.q_dtype = o.dtype;
  desc.mask = causal ? SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT : SAGEATTN_MASK_NONE;
  desc.head_dim = dim;
  desc.num_qo_heads = o.heads;
  desc.num_kv_heads = o.kv_heads;
  desc.max_batch = o.batch;
  desc.max_qo_len = desc.max_kv_len = seq;
  if (desc.qk_format != SAGEATTN_QK_NONE) desc.kernel = o.kernel;
  sageattn_plan* raw = nullptr;
  must(sageattn_plan_create(context, &desc, &raw, &error), error);
  const std::unique_ptr<sageattn_plan, void (*)(sageattn_plan*)> plan(raw, sageattn_plan_destroy);
  Timing timing{};
  timing.info.struct_size = sizeof timing.info;
  must(sageattn_plan_get_info(raw, &timing.info, &error), error);

  const int kv_heads = timing.info.num_kv_heads;
  const auto bytes = [&](int heads) {
    return static_cast<size_t>(o.batch) * static_cast<size_t>(seq) * static_cast<size_t>(heads) *
           static_cast<size_t>(dim) * 2;
  };
  DeviceMemory q(api, bytes(o.heads)), k(api, bytes(kv_heads)), v(api, bytes(kv_heads)),
      out(api, bytes(o.heads)),
      workspace(api, static_cast<size_t>(timing.info.preferred_workspace));
  fill_noise(api, q, o.dtype, 1);
  fill_noise(api, k, o.dtype, 2);
  fill_noise(api, v, o.dtype, 3);
  sageattn_execute_args args = {};
  args.struct_size = sizeof args;
  args.batch = o.batch;
  args.qo_len = args.kv_len = seq;
  args.q.data = q.data();
  args.k.data = k.data();
  args.v.data = v.data();
  args.out.data = out.data();

  const StreamOwner stream(api);
  const auto execute = [&] {
    must(sageattn_execute(raw, &args, workspace.data(), workspace.size(), stream.get(), &error),
         error);
  };
  EventOwner start(api), end(api);
  std::vector<double> times;
  for (int i = -3; i < o.repeat; ++i) {
    start.record(stream.get());
    execute();
    end.record(stream.get());
    end.wait();
    if (i >= 0) times.push_back(static_cast<double>(end.ms_since(start)));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2),
                   times.end());
  timing.ms = times[times.size() / 2];

  if (o.per_launch) {
    Stopwatch stopwatch(api, stream.get());
    reinterpret_cast<const sageattn::Plan*>(raw)->execute(args, workspace.data(), workspace.size(),
                                                          stream.get(), &stopwatch);
    std::printf("    %s d%d %d %s\n", timing.info.kernel_name, dim, seq,
                causal ? "causal" : "full");
    stopwatch.print();
  }
  return timing;
}

int run(const Options& o) {
  sageattn_context_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.device = o.device;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_context* raw = nullptr;
  const int32_t status = sageattn_context_create(&desc, &raw, &error);
  if (status == SAGEATTN_E_NO_DEVICE || status == SAGEATTN_E_DRIVER_TOO_OLD) {
    std::printf("skipped: %s\n", error.message);
    return 77;
  }
  must(status, error);
  const std::unique_ptr<sageattn_context, void (*)(sageattn_context*)> context(
      raw, sageattn_context_destroy);
  const cuda::DeviceInfo& device = cuda::open_device(o.device);
  const cuda::CurrentContext current(cuda::driver(), device);
  std::printf("%s, b%d h%d/%d, TOPS end to end (ms)\n", device.name, o.batch, o.heads,
              o.kv_heads != 0 ? o.kv_heads : o.heads);
  for (const std::string& preset : o.presets) {
    for (const int dim : o.dims) {
      for (const std::string& mask : o.masks) {
        std::printf("%-9s d%-3d %-6s", preset.c_str(), dim, mask.c_str());
        if (o.per_launch) std::printf("\n");
        std::string row;
        for (const int seq : o.seqs) {
          const bool causal = mask == "causal";
          char cell[64];
          try {
            const Timing t = time_one(o, raw, preset, dim, seq, causal);
            const double operations =
                4.0 * o.batch * o.heads * static_cast<double>(seq) * seq * dim / (causal ? 2 : 1);
            std::snprintf(cell, sizeof cell, " %6d: %6.1f (%.3f)", seq, operations / t.ms / 1e9,
                          t.ms);
          } catch (const sageattn::Error& e) {
            std::snprintf(cell, sizeof cell, " %6d: %.40s", seq, e.message);
          } catch (const std::exception& e) {
            std::snprintf(cell, sizeof cell, " %6d: %.40s", seq, e.what());
          }
          row += cell;
        }
        std::printf("%s\n", row.c_str());
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const sageattn::Error& error) {
    std::fprintf(stderr, "%s\n", error.message);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
  }
  return 2;
}
