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
#include <vector>

#include "sageattn.h"
#include "src/core/error.h"
#include "src/core/plan.h"
#include "tests/gpu/setup.h"

using namespace sageattn_test;

namespace {

struct Options {
  std::vector<std::string> presets;
  std::vector<int> dims, seqs;
  std::vector<std::string> masks;
  int batch, heads, kv_heads, repeat, device;
  int32_t dtype, kernel;
  bool per_launch;
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

Options parse(Flags& flags) {
  Options o{};
  o.presets = flags.values("--preset");
  for (const std::string& preset : o.presets) preset_value(preset);
  if (o.presets.empty()) o.presets = {"sage1", "sage2_8b", "sage2_4b", "sage2pp"};
  o.masks = flags.values("--mask");
  for (const std::string& mask : o.masks) {
    if (mask != "full" && mask != "causal") throw std::runtime_error("--mask: full or causal");
  }
  if (o.masks.empty()) o.masks = {"full", "causal"};
  o.dims = numbers(flags.value("--dims", "128,64"));
  o.seqs = numbers(flags.value("--seqs", "1024,2048,4096,8192,16384,32768"));
  o.batch = flags.number("--batch", 4);
  o.heads = flags.number("--heads", 32);
  o.kv_heads = flags.number("--kv-heads", 0);
  o.repeat = std::max(1, flags.number("--repeat", 30));
  o.device = flags.number("--device", 0);
  o.dtype = flags.value("--dtype", "bf16") == "f16" ? SAGEATTN_F16 : SAGEATTN_BF16;
  o.kernel = flags.value("--kernel", "auto") == "mma_sync" ? SAGEATTN_KERNEL_MMA_SYNC
                                                           : SAGEATTN_KERNEL_AUTO;
  o.per_launch = flags.take("--per-launch");
  flags.finish();
  return o;
}

// Records an event on either side of each launch.
class Stopwatch final : public cuda::Observer {
 public:
  Stopwatch(const cuda::Driver& api, cuda::Stream stream) : api_(api), stream_(stream) {}
  void before(const std::string& kernel, int64_t blocks) override {
    laps_.push_back({kernel, blocks, cuda::EventOwner(api_), cuda::EventOwner(api_)});
    laps_.back().start.record(stream_);
  }
  void after() override { laps_.back().end.record(stream_); }

  void print() {
    double sum = 0;
    for (Lap& lap : laps_) {
      lap.end.wait();
      const double ms = lap.end.ms_since(lap.start);
      sum += ms;
      std::printf("      %-18s %10lld blocks %9.4f ms\n", lap.kernel.c_str(),
                  static_cast<long long>(lap.blocks), ms);
    }
    std::printf("      %-18s %17s %9.4f ms\n", "sum", "", sum);
  }

 private:
  struct Lap {
    std::string kernel;
    int64_t blocks;
    cuda::EventOwner start, end;
  };
  const cuda::Driver& api_;
  cuda::Stream stream_;
  std::vector<Lap> laps_;
};

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
  const PlanOwner plan(raw);
  Timing timing{};
  timing.info.struct_size = sizeof timing.info;
  must(sageattn_plan_get_info(raw, &timing.info, &error), error);

  const int kv_heads = timing.info.num_kv_heads;
  const auto bytes = [&](int heads) {
    return static_cast<size_t>(o.batch) * static_cast<size_t>(seq) * static_cast<size_t>(heads) *
           static_cast<size_t>(dim) * 2;
  };
  cuda::DeviceMemory q(api, bytes(o.heads)), k(api, bytes(kv_heads)), v(api, bytes(kv_heads)),
      out(api, bytes(o.heads)),
      workspace(api, static_cast<size_t>(timing.info.preferred_workspace));
  const Noise noise(o.dtype);
  noise.fill(q, 0);
  noise.fill(k, 300000);
  noise.fill(v, 600000);
  sageattn_execute_args args = {};
  args.struct_size = sizeof args;
  args.batch = o.batch;
  args.qo_len = args.kv_len = seq;
  args.q.data = q.data();
  args.k.data = k.data();
  args.v.data = v.data();
  args.out.data = out.data();

  const cuda::StreamOwner stream(api);
  const auto execute = [&] {
    must(sageattn_execute(raw, &args, workspace.data(), workspace.size(), stream.get(), &error),
         error);
  };
  cuda::EventOwner start(api), end(api);
  std::vector<double> times;
  for (int i = -3; i < o.repeat; ++i) {
    start.record(stream.get());
    execute();
    end.record(stream.get());
    end.wait();
    if (i >= 0) times.push_back(end.ms_since(start));
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

int run(Flags& flags) {
  const Options o = parse(flags);
  const Gpu gpu(o.device);
  const cuda::CurrentContext current(gpu.api, gpu.device);
  std::printf("%s, b%d h%d/%d, TOPS end to end (ms)\n", gpu.device.name, o.batch, o.heads,
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
            const Timing t = time_one(o, gpu.context(), preset, dim, seq, causal);
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

int main(int argc, char** argv) { return guarded_main(argc, argv, run); }
