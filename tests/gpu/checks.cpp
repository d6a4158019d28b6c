// What is not a comparison of one case with the CPU backend.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "src/core/error.h"
#include "tests/gpu/check_table.h"
#include "tests/gpu/compare.h"

namespace sageattn_test {

namespace {

// A problem of a useful size that every test below can share.
Problem medium_problem(int32_t batch_mode) {
  Problem p;
  p.id = 1;
  p.seed = 4711;
  p.shape = {4, 2, 128, 128};
  p.q_dtype = p.kv_dtype = p.out_dtype = SAGEATTN_BF16;
  p.batch_mode = batch_mode;
  p.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  p.qo_lens =
      batch_mode == SAGEATTN_BATCH_VARLEN ? std::vector{300, 17, 0, 200} : std::vector{300, 300};
  p.kv_lens =
      batch_mode == SAGEATTN_BATCH_VARLEN ? std::vector{500, 200, 30, 200} : std::vector{500, 500};
  return p;
}

std::string check_workspace(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const cuda::CurrentContext current(gpu.api, gpu.device);
  DeviceCase on_device(gpu, p, buffers, plan.info);
  const sageattn_execute_args args = on_device.args();
  const auto size = static_cast<size_t>(plan.info.min_workspace);
  auto* const workspace = static_cast<unsigned char*>(on_device.workspace());
  const auto status = [&](void* at, size_t bytes) {
    return sageattn_execute(plan.plan.get(), &args, at, bytes, nullptr, nullptr);
  };
  if (status(workspace, size - 1) != SAGEATTN_E_WORKSPACE) return "size - 1 was not refused";
  if (status(nullptr, size) != SAGEATTN_E_WORKSPACE) return "NULL was not refused";
  if (status(workspace + 16, size) != SAGEATTN_E_WORKSPACE) return "misalignment was not refused";
  Outcome outcome;
  on_device.collect(outcome);
  if (outcome.out != buffers.out.image) return "a refused call wrote to out";
  return {};
}

std::string check_same_bits(const Gpu& gpu, const Numerics& numerics) {
  for (const int32_t mode : {SAGEATTN_BATCH_DENSE, SAGEATTN_BATCH_VARLEN}) {
    const Problem p = medium_problem(mode);
    const PlanResult plan = must_plan(gpu, p, numerics);
    const Buffers buffers = make_buffers(p, make_data(p));
    const Outcome first = must_run(gpu, p, buffers, plan);
    const Outcome second = must_run(gpu, p, buffers, plan);
    if (first.out != second.out || first.lse != second.lse) return "two runs differ";
  }
  return {};
}

// Without queries' scores every P is the same, exactly, so P V has the same operands on both backends:
// what the tensor core adds up, truncates and promotes is what the CPU's model of it does, and only the
// few fp32 operations around it may round otherwise.
std::string check_same_operands(const Gpu& gpu, const Numerics& numerics) {
  Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  p.shape = {2, 1, 128, 128};
  p.out_dtype = SAGEATTN_F32;
  p.mask.kind = SAGEATTN_MASK_NONE;
  p.qo_lens = {70};
  p.kv_lens = {2300};
  const PlanResult plan = must_plan(gpu, p, numerics);
  if (plan.config.kernel != SAGEATTN_KERNEL_WGMMA) throw Skipped("not wgmma: E4M3 is emulated");
  const Numerics same = same_numerics(numerics, plan.info);
  const PlanResult cpu_plan = make_plan(shared_context(same.arch, 1), p, same);
  if (cpu_plan.status != SAGEATTN_OK) return "CPU backend: " + cpu_plan.message;
  Data data = make_data(p);
  std::fill(data[0].q.begin(), data[0].q.end(), 0.0F);
  const Buffers buffers = make_buffers(p, data);
  const Outcome got = must_run(gpu, p, buffers, plan), want = run_cpu(p, buffers, cpu_plan);
  float largest = 0;
  for (const float v : data[0].v) largest = std::max(largest, std::fabs(v));
  for (int64_t row = 0; row < p.qo_lens[0]; ++row) {
    for (int h = 0; h < p.shape.num_qo_heads; ++h) {
      for (int c = 0; c < p.shape.head_dim_v; ++c) {
        const size_t at = buffers.out.at(0, row, h, c);
        const float a = load(&got.out[at], SAGEATTN_F32), b = load(&want.out[at], SAGEATTN_F32);
        if (!(std::fabs(a - b) <= std::ldexp(largest, -20))) {
          return "row " + std::to_string(row) + " head " + std::to_string(h) + " channel " +
                 std::to_string(c) + ": got " + std::to_string(a) + ", want " + std::to_string(b);
        }
      }
    }
  }
  return {};
}

// Hidden keys must not win, however far down the scores of those that are seen lie: lanes of a row have
// scales of their own (wgmma hides keys among integers), and a maximum must start below every score.
std::string check_low_scores(const Gpu& gpu, const Numerics& numerics) {
  Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  p.shape = {1, 1, 128, 128};
  p.qo_lens = p.kv_lens = {128};
  for (const int32_t smooth_k : {SAGEATTN_SMOOTH_OFF, SAGEATTN_SMOOTH_ON}) {
    for (const float large : {4.0F, 5.0F}) {
      Numerics low = numerics;
      low.desc.smooth_k = smooth_k;
      Data data = make_data(p);
      std::fill(data[0].q.begin(), data[0].q.end(), large);
      for (size_t i = 0; i < data[0].k.size(); ++i) {
        data[0].k[i] = i / 128 % 8 / 2 == 0 ? -7.25F : 0.5078125F;  // exact in bf16
      }
      const CaseReport report = check_case(gpu, p, low, data);
      if (report.verdict == CaseReport::kFailed) return report.message;
    }
  }
  if (must_plan(gpu, p, numerics).config.kernel != SAGEATTN_KERNEL_WGMMA) return {};
  p.sm_scale_set = true;
  p.sm_scale = 1e30F;
  const CaseReport report = check_case(gpu, p, numerics, make_data(p));
  return report.verdict == CaseReport::kFailed ? "sm_scale 1e30: " + report.message : "";
}

// With the smallest workspace the corrections of a long head are made for some tiles of its queries at
// a time, with the preferred one for all: the same bits.
std::string check_runs(const Gpu& gpu, const Numerics& numerics) {
  Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  p.shape = {1, 1, 64, 64};
  p.qo_lens = p.kv_lens = {32768};
  const PlanResult plan = must_plan(gpu, p, numerics);
  if (plan.info.min_workspace == plan.info.preferred_workspace) {
    throw Skipped("nothing is made in runs");
  }
  const Buffers buffers = make_buffers(p, make_data(p));
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const Outcome runs = must_run(gpu, p, buffers, plan);

  DeviceCase on_device(gpu, p, buffers, plan.info);
  const sageattn_execute_args args = on_device.args();
  const cuda::DeviceMemory workspace(gpu.api, static_cast<size_t>(plan.info.preferred_workspace));
  sageattn_error error = {};
  error.struct_size = sizeof error;
  must(
      sageattn_execute(plan.plan.get(), &args, workspace.data(), workspace.size(), nullptr, &error),
      error);
  cuda::check(gpu.api, gpu.api.StreamSynchronize(nullptr), "cuStreamSynchronize");
  Outcome whole;
  on_device.collect(whole);
  if (runs.out != whole.out) return "out differs between runs and the whole";
  if (runs.lse != whole.lse) return "lse differs between runs and the whole";
  return {};
}

// An execute, captured.
class CapturedGraph {
 public:
  CapturedGraph(const cuda::Driver& api, cuda::Stream stream, DeviceCase& on_device,
                const sageattn_plan* plan)
      : api_(api) {
    cuda::check(api, api.StreamBeginCapture(stream, cuda::kCaptureModeThreadLocal),
                "cuStreamBeginCapture");
    std::string message;
    const int32_t status = on_device.execute(plan, stream, &message);
    cuda::check(api, api.StreamEndCapture(stream, &graph_), "cuStreamEndCapture");
    if (status == SAGEATTN_OK) {
      cuda::check(api, api.GraphInstantiateWithFlags(&executable_, graph_, 0),
                  "cuGraphInstantiate");
    }
    if (executable_ == nullptr) {
      api.GraphDestroy(graph_);
      throw std::runtime_error("in capture: " + message);
    }
  }
  ~CapturedGraph() {
    api_.GraphExecDestroy(executable_);
    api_.GraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(cuda::Stream stream) const {
    cuda::check(api_, api_.GraphLaunch(executable_, stream), "cuGraphLaunch");
  }

 private:
  const cuda::Driver& api_;
  cuda::Graph graph_ = nullptr;
  cuda::GraphExec executable_ = nullptr;
};

std::string check_graph(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  Problem other = p;
  other.seed = 4712;
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers first = make_buffers(p, make_data(p)), second = make_buffers(p, make_data(other));
  const Outcome want_first = must_run(gpu, p, first, plan);
  const Outcome want_second = must_run(gpu, p, second, plan);

  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::StreamOwner stream(gpu.api);
  DeviceCase on_device(gpu, p, first, plan.info);
  const CapturedGraph graph(gpu.api, stream.get(), on_device, plan.plan.get());
  for (int i = 0; i < 4; ++i) {
    on_device.replace_inputs(i % 2 == 0 ? first : second);
    on_device.clear_outputs();
    graph.launch(stream.get());
    stream.wait();
    Outcome outcome;
    on_device.collect(outcome);
    const Outcome& want = i % 2 == 0 ? want_first : want_second;
    if (outcome.out != want.out || outcome.lse != want.lse) {
      return "replay " + std::to_string(i) + " differs from a direct execute";
    }
  }
  return {};
}

// A plan's very first execute: nothing may be left to be loaded or set up then.
std::string check_first_capture(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::StreamOwner stream(gpu.api);
  DeviceCase on_device(gpu, p, buffers, plan.info);
  const CapturedGraph graph(gpu.api, stream.get(), on_device, plan.plan.get());
  graph.launch(stream.get());
  stream.wait();
  Outcome outcome;
  on_device.collect(outcome);
  const Outcome want = must_run(gpu, p, buffers, plan);
  if (outcome.out != want.out || outcome.lse != want.lse) {
    return "the replay differs from a direct execute";
  }
  return {};
}

std::string check_threads(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const Outcome want = must_run(gpu, p, buffers, plan);
  std::vector<std::string> reports(8);
  std::vector<std::thread> threads;
  for (std::string& report : reports) {
    threads.emplace_back([&] {
      try {
        for (int i = 0; i < 10 && report.empty(); ++i) {
          const Outcome outcome = must_run(gpu, p, buffers, plan);
          if (outcome.out != want.out || outcome.lse != want.lse) report = "a thread's bits differ";
        }
      } catch (const sageattn::Error& error) {
        report = error.message;
      } catch (const std::exception& exception) {
        report = exception.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& report : reports) {
    if (!report.empty()) return report;
  }
  return {};
}

std::string check_streams(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const Outcome want = must_run(gpu, p, buffers, plan);
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::StreamOwner a(gpu.api), b(gpu.api);
  DeviceCase first(gpu, p, buffers, plan.info);
  DeviceCase second(gpu, p, buffers, plan.info);
  for (int i = 0; i < 20; ++i) {
    std::string message;
    if (first.execute(plan.plan.get(), a.get(), &message) != SAGEATTN_OK ||
        second.execute(plan.plan.get(), b.get(), &message) != SAGEATTN_OK) {
      return message;
    }
  }
  a.wait();
  b.wait();
  for (const DeviceCase* on_device : {&first, &second}) {
    Outcome outcome;
    on_device->collect(outcome);
    if (!outcome.violation.empty()) return outcome.violation;
    if (outcome.out != want.out || outcome.lse != want.lse) return "a stream's bits differ";
  }
  return {};
}

std::string check_current_context(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  if (gpu.api.CtxGetCurrent == nullptr) throw Skipped("the driver has no cuCtxGetCurrent");
  const PlanResult plan = must_plan(gpu, p, numerics);
  cuda::Context before = nullptr, after = nullptr;
  gpu.api.CtxGetCurrent(&before);
  must_run(gpu, p, make_buffers(p, make_data(p)), plan);
  gpu.api.CtxGetCurrent(&after);
  return before == after ? std::string() : "the current context changed";
}

// NaN and infinities of one head stay there, and stand where the CPU backend has them.
std::string check_nonfinite(const Gpu& gpu, const Numerics& numerics) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const Problem p = medium_problem(SAGEATTN_BATCH_DENSE);
  const Data clean = make_data(p);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers clean_buffers = make_buffers(p, clean);
  const Outcome clean_run = must_run(gpu, p, clean_buffers, plan);
  for (const float value : {nan, infinity, -infinity}) {
    for (int which = 0; which < 3; ++which) {
      Data data = clean;
      const int heads = which == 0 ? p.shape.num_qo_heads : p.shape.num_kv_heads;
      std::vector<float>& x = which == 0 ? data[0].q : which == 1 ? data[0].k : data[0].v;
      x[(static_cast<size_t>(100) * heads + 0) * 128 + 7] = value;  // token 100, head 0, channel 7
      const CaseReport report = check_case(gpu, p, numerics, data);
      const std::string name = std::string(1, "qkv"[which]) + " = " + std::to_string(value) + ": ";
      if (report.verdict == CaseReport::kFailed) return name + report.message;
      const Outcome run = must_run(gpu, p, make_buffers(p, data), plan);
      const int first_clean_head = which == 0 ? 1 : p.shape.num_qo_heads / p.shape.num_kv_heads;
      for (int b = 0; b < p.batch(); ++b) {
        for (int64_t row = 0; row < p.qo_lens[0]; ++row) {
          for (int h = b == 0 ? first_clean_head : 0; h < p.shape.num_qo_heads; ++h) {
            const size_t at = clean_buffers.out.at(b, row, h, 0);
            if (std::memcmp(&run.out[at], &clean_run.out[at], 128 * 2) != 0) {
              return name + "another head or sequence changed";
            }
          }
        }
      }
    }
  }
  return {};
}

std::string check_hostile(const Gpu& gpu, const Numerics& numerics) {
  Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  const Data data = make_data(p);
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const Lengths cases[] = {
      {{0, 300, 200, 317, 517}, {}, {}},    {{-5, 300, 317, 317, 517}, {}, {}},
      {{0, 300, 317, 317, 100000}, {}, {}}, {{kMax, kMin, kMax, kMin, kMax}, {}, {}},
      {{517, 317, 317, 300, 0}, {}, {}},    {{0, 517, 517, 517, 517}, {}, {}},
      {{}, {0, 500, 400, 730, 930}, {}},    {{}, {kMin, kMin, 0, kMax, kMax}, {}},
      {{}, {0, 930, 930, 930, 930}, {}},    {{}, {}, {-1, 200, 30, 200}},
      {{}, {}, {500, kMax, 31, kMin}},      {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, {}},
  };
  for (const Lengths& hostile : cases) {
    const CaseReport report = check_case(gpu, p, numerics, data, hostile);
    if (report.verdict == CaseReport::kFailed) {
      return "case " + std::to_string(&hostile - cases) + ": " + report.message;
    }
  }
  return {};
}

// Memory of the host that the device can access too.
class SharedMemory {
 public:
  SharedMemory(const cuda::Driver& api, size_t bytes, bool managed) : api_(api), managed_(managed) {
    cuda::check(api,
                managed ? api.MemAllocManaged(&pointer_, bytes, cuda::kMemAttachGlobal)
                        : api.MemHostAlloc(&host_, bytes, 0),
                managed ? "cuMemAllocManaged" : "cuMemHostAlloc");
    if (managed) host_ = reinterpret_cast<void*>(pointer_);  // NOLINT(performance-no-int-to-ptr)
  }
  ~SharedMemory() { managed_ ? api_.MemFree(pointer_) : api_.MemFreeHost(host_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(host_); }

 private:
  const cuda::Driver& api_;
  bool managed_;
  cuda::DevicePointer pointer_ = 0;
  void* host_ = nullptr;
};

// A stream of a context that is not the primary one.
class ForeignStream {
 public:
  ForeignStream(const cuda::Driver& api, const cuda::DeviceInfo& device) : api_(api) {
    cuda::check(api, api.CtxCreate(&context_, 0, device.handle), "cuCtxCreate");
    stream_.emplace(api);
    cuda::Context popped = nullptr;
    api.CtxPopCurrent(&popped);
  }
  ~ForeignStream() {
    stream_.reset();
    api_.CtxDestroy(context_);
  }
  ForeignStream(const ForeignStream&) = delete;
  ForeignStream& operator=(const ForeignStream&) = delete;

  cuda::Stream get() const { return stream_->get(); }

 private:
  const cuda::Driver& api_;
  cuda::Context context_ = nullptr;
  std::optional<cuda::StreamOwner> stream_;
};

// What is out of reach is named; what the device reaches outside its own memory gives the same bits.
std::string check_foreign_memory(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = medium_problem(SAGEATTN_BATCH_VARLEN);
  const PlanResult plan = must_plan(gpu, p, numerics);
  Buffers buffers = make_buffers(p, make_data(p));
  const Outcome want = must_run(gpu, p, buffers, plan);
  const cuda::CurrentContext current(gpu.api, gpu.device);
  DeviceCase on_device(gpu, p, buffers, plan.info);
  sageattn_error error = {};
  error.struct_size = sizeof error;
  // What is wrong, or nothing. During the call no context is current, as in a new thread.
  const auto run = [&](const sageattn_plan* of, const sageattn_execute_args& args, void* workspace,
                       size_t size, cuda::Stream stream, const char* refused) -> std::string {
    cuda::Context popped = nullptr;
    gpu.api.CtxPopCurrent(&popped);
    const int32_t status = sageattn_execute(of, &args, workspace, size, stream, &error);
    gpu.api.CtxPushCurrent(popped);
    Outcome outcome;
    cuda::check(gpu.api, gpu.api.StreamSynchronize(nullptr), "cuStreamSynchronize");
    on_device.collect(outcome);
    on_device.clear_outputs();
    if (refused == nullptr) {
      if (status != SAGEATTN_OK) return error.message;
      return outcome.out == want.out ? "" : "other bits";
    }
    if (status != SAGEATTN_E_INVALID_ARGUMENT ||
        std::string(error.message).find(refused) == std::string::npos) {
      return std::string("not refused with '") + refused + "': " + error.message;
    }
    return outcome.out == buffers.out.image ? "" : "a refused call wrote to out";
  };
  const auto run_on_device = [&](const sageattn_execute_args& args, cuda::Stream stream,
                                 const char* refused) {
    return run(plan.plan.get(), args, on_device.workspace(), on_device.workspace_size(), stream,
               refused);
  };
  const sageattn_execute_args on_host = make_args(p, buffers, addresses_of(buffers));
  const auto offset = static_cast<const unsigned char*>(on_host.q.data) - buffers.q.image.data();
  const auto with_q = [&](unsigned char* image) {
    sageattn_execute_args args = on_device.args();
    args.q.data = image + offset;
    return args;
  };

  const char* const refused = gpu.device.pageable_memory ? nullptr : "q.data = 0x";
  std::string wrong = run_on_device(with_q(buffers.q.image.data()), nullptr, refused);
  if (!wrong.empty()) return "host memory: " + wrong;
  for (const bool managed : {false, true}) {
    const SharedMemory memory(gpu.api, buffers.q.image.size(), managed);
    std::memcpy(memory.data(), buffers.q.image.data(), buffers.q.image.size());
    wrong = run_on_device(with_q(memory.data()), nullptr, nullptr);
    if (!wrong.empty()) return (managed ? "managed memory: " : "pinned memory: ") + wrong;
  }
  const ForeignStream stream(gpu.api, gpu.device);
  wrong = run_on_device(on_device.args(), stream.get(), "stream = 0x");
  if (!wrong.empty()) return "stream of another context: " + wrong;

  const PlanResult cpu_plan =
      make_plan(shared_context(plan.info.arch, 1), p, same_numerics(numerics, plan.info));
  if (cpu_plan.status != SAGEATTN_OK) return "CPU backend: " + cpu_plan.message;
  const auto alignment = static_cast<size_t>(cpu_plan.info.workspace_alignment);
  std::vector<unsigned char> arena(static_cast<size_t>(cpu_plan.info.min_workspace) + alignment);
  void* workspace = arena.data();
  size_t room = arena.size();
  std::align(alignment, static_cast<size_t>(cpu_plan.info.min_workspace), workspace, room);
  wrong = run(cpu_plan.plan.get(), on_device.args(), workspace, room, nullptr, "q.data = 0x");
  return wrong.empty() ? wrong : "device memory and the CPU backend: " + wrong;
}

}  // namespace

std::vector<NamedCheck> first_checks() {
  return {{"#32 first execute in capture", check_first_capture}};
}

std::vector<NamedCheck> general_checks() {
  return {{"workspace size", check_workspace},
          {"same bits", check_same_bits},
          {"same operands of P V", check_same_operands},
          {"low scores", check_low_scores},
          {"runs of query tiles", check_runs},
          {"graph capture", check_graph},
          {"eight threads", check_threads},
          {"two streams", check_streams},
          {"current context", check_current_context},
          {"foreign memory", check_foreign_memory},
          {"NaN and Inf", check_nonfinite},
          {"hostile lengths", check_hostile}};
}

}  // namespace sageattn_test
