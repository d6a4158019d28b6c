// The CUDA backend on a driver that pretends (fake_libcuda.cpp): loading, devices, modules, contexts
// and launches, without a GPU. The build puts the fake's folder into LD_LIBRARY_PATH.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "include/sageattn.h"
#include "src/core/context.h"
#include "src/core/error.h"
#include "src/core/selftest.h"
#include "src/cuda/backend.h"
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#include "src/cuda/module.h"
#include "tests/catch.h"

using namespace sageattn;

namespace {

struct Counts {
  int launches, modules, pushes, pops, attribute_queries, max_dynamic_shared;
  unsigned last_grid, last_block, last_shared;
  void* last_stream;
  int allocations, streams;
  unsigned dependents;
  int pointer_queries;
};

template <class Function>
Function* fake_function(const char* name) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(library != nullptr);
  const auto function = reinterpret_cast<Function*>(dlsym(library, name));
  dlclose(library);
  REQUIRE(function != nullptr);  // else this is a real driver
  return function;
}

Counts counts() {
  Counts result{};
  fake_function<void(void*)>("fake_cuda_counts")(&result);
  return result;
}

// A variable that the fake reads, for a scope.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

Error error_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

bool contains(const auto& error, const char* text) {
  return std::string(error.message).find(text) != std::string::npos;
}

const std::vector<unsigned char> kCubin = {0x7f, 'E', 'L', 'F', 1};

}  // namespace

TEST_CASE("Driver: missing, too old, incomplete, without devices") {
  Error error = error_of([] { cuda::load_driver("libno-such-cuda.so.1"); });
  CHECK(error.status == SAGEATTN_E_NO_DEVICE);
  CHECK(contains(error, "libno-such-cuda.so.1"));

  // A library, but no driver.
  error = error_of([] { cuda::load_driver("libm.so.6"); });
  CHECK(error.status == SAGEATTN_E_NO_DEVICE);
  CHECK(contains(error, "cuDriverGetVersion"));
  {
    const Setting old("FAKE_CUDA_VERSION", "11040");
    error = error_of([] { cuda::load_driver("libcuda.so.1"); });
    CHECK(error.status == SAGEATTN_E_DRIVER_TOO_OLD);
    CHECK(contains(error, "CUDA 11.4"));
    CHECK(contains(error, "/libcuda.so.1"));  // where it is
    CHECK(contains(error, "CUDA 11.8 or newer"));
  }
  {
    const Setting stub("FAKE_CUDA_MISSING", "all");
    error = error_of([] { cuda::load_driver("libcuda.so.1"); });
    INFO(error.message);
    CHECK(error.status == SAGEATTN_E_NO_DEVICE);
    CHECK(contains(error, "/libcuda.so.1 is not a CUDA driver"));
    CHECK(contains(error, "stub"));
  }
  {
    const Setting missing("FAKE_CUDA_MISSING", "cuLaunchKernelEx");
    error = error_of([] { cuda::load_driver("libcuda.so.1"); });
    CHECK(error.status == SAGEATTN_E_DRIVER_TOO_OLD);
    CHECK(contains(error, "cuLaunchKernelEx"));
  }
  {
    const Setting optional("FAKE_CUDA_MISSING", "cuGraphLaunch");
    CHECK(cuda::load_driver("libcuda.so.1").GraphLaunch == nullptr);
  }
  {
    const Setting none("FAKE_CUDA_DEVICES", "0");
    error = error_of([] { cuda::load_driver("libcuda.so.1"); });
    CHECK(error.status == SAGEATTN_E_NO_DEVICE);
    CHECK(contains(error, "CUDA_ERROR_NO_DEVICE"));
  }
  CHECK(cuda::load_driver("libcuda.so.1").version == 13000);
}

TEST_CASE("Driver: a failed call names itself and quotes the driver") {
  const cuda::Driver& api = cuda::driver();
  CHECK_NOTHROW(cuda::check(api, cuda::kSuccess, "cuInit"));
  const Error error = error_of([&] { cuda::check(api, 400, "cuLaunchKernelEx(%s)", "stats"); });
  CHECK(error.status == SAGEATTN_E_CUDA);
  CHECK(std::string(error.message) ==
        "cuLaunchKernelEx(stats): CUDA_ERROR_INVALID_HANDLE (400): invalid resource handle");
  CHECK(error_of([&] { cuda::check(api, 2, "cuMemAlloc"); }).status == SAGEATTN_E_OUT_OF_MEMORY);
}

TEST_CASE("Devices: what is there, and what is not") {
  const cuda::DeviceInfo& device = cuda::open_device(1);
  CHECK(&device == &cuda::open_device(1));
  CHECK(std::string(device.name) == "Fake GPU 1");
  CHECK(device.choice.arch == 90);
  CHECK(device.multiprocessors == 132);
  const Error error = error_of([] { cuda::open_device(2); });
  CHECK(error.status == SAGEATTN_E_NO_DEVICE);
  CHECK(contains(error, "device = 2: must be 0..1"));

  // A target that the device does not run can be compiled for, not executed on.
  const cuda::Target target = cuda::find_target(0, 89);
  CHECK(target.device == nullptr);
  CHECK(target.no_device.status == SAGEATTN_E_UNSUPPORTED);
  CHECK(cuda::describe(target).find("sm_89") != std::string::npos);
  CHECK(cuda::find_target(0, 0).device != nullptr);
  for (const int32_t arch : {80, 86, 89, 90, 120}) {
    const cuda::Target asked = cuda::find_target(0, arch);
    CHECK(asked.arch == arch);
    CHECK(asked.binary == arch);
    CHECK((asked.device != nullptr) == (arch == 90));
  }
}

TEST_CASE("Contexts: the caller's own is current again afterwards, also after an error") {
  const cuda::Driver& api = cuda::driver();
  const auto own = reinterpret_cast<cuda::Context>(uintptr_t{0x77});
  api.CtxPushCurrent(own);
  const auto current = [&] {
    cuda::Context context = nullptr;
    api.CtxGetCurrent(&context);
    return context;
  };
  {
    const cuda::CurrentContext scope(api, cuda::open_device(0));
    CHECK(current() == cuda::open_device(0).context);
  }
  CHECK(current() == own);
  error_of([&] {
    const cuda::CurrentContext scope(api, cuda::open_device(0));
    fail(SAGEATTN_E_CUDA, "anything");
  });
  CHECK(current() == own);
  cuda::Context popped;
  api.CtxPopCurrent(&popped);
}

TEST_CASE("Modules: loaded once for a device and the same bytes, forced, within limits") {
  const cuda::Driver& api = cuda::driver();
  const cuda::DeviceInfo& device = cuda::open_device(0);
  const cuda::CurrentContext scope(api, device);
  const Counts before = counts();
  const auto load = [&](const cuda::DeviceInfo& on, const char* entry, int shared) {
    return cuda::load_kernel(api, on, kCubin, entry, 128, shared).function;
  };
  std::vector<std::thread> threads;
  std::vector<cuda::Function> functions(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const cuda::CurrentContext own_scope(api, device);
      functions[static_cast<size_t>(i)] = load(device, "sageattn_a", 60000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const cuda::Function function : functions) CHECK(function == functions[0]);
  CHECK(counts().modules == before.modules + 1);
  CHECK(counts().attribute_queries > before.attribute_queries);
  CHECK(counts().max_dynamic_shared == 60000);
  CHECK(load(cuda::open_device(1), "sageattn_a", 0) != functions[0]);
  CHECK(load(device, "sageattn_a", 1000) == functions[0]);
  CHECK(counts().max_dynamic_shared == 60000);  // never lowered: another plan may rely on it

  const Error error = error_of([&] { load(device, "sageattn_a", 300000); });
  CHECK(error.status == SAGEATTN_E_UNSUPPORTED);
  CHECK(contains(error, "300000"));
  const std::vector<unsigned char> garbage(16);
  CHECK(error_of([&] { cuda::load_kernel(api, device, garbage, "x", 128, 0); }).status ==
        SAGEATTN_E_DRIVER_TOO_OLD);
}

namespace {

std::string fake_nvrtc() {
  const char* const folder = std::getenv("LD_LIBRARY_PATH");  // where the build put the fakes
  REQUIRE(folder != nullptr);
  return std::string(folder) + "/libfake_nvrtc.so";
}

// On the fake device, with nothing on disk.
sageattn_context_desc fake_context(const std::string& nvrtc) {
  sageattn_context_desc desc{};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.flags = SAGEATTN_CONTEXT_NO_DISK_CACHE;
  desc.nvrtc_path = nvrtc.c_str();
  return desc;
}

// Host memory as the fake is told to see it.
enum MemoryKind { kUnknown = -1, kDevice, kPeer, kMapped, kPinned, kManaged, kDisjoint };

void declare_memory(const void* start, size_t bytes, MemoryKind kind, int device) {
  fake_function<void(const void*, size_t, int, int)>("fake_cuda_memory")(start, bytes, kind,
                                                                         device);
}

// What an execute of one sequence of one token of 64 16-bit channels needs, on a device.
class OneToken {
 public:
  explicit OneToken(const sageattn_plan* plan, int32_t device = 0, bool varlen = false)
      : plan_(plan), varlen_(varlen) {
    sageattn_plan_info info{};
    info.struct_size = sizeof info;
    REQUIRE(sageattn_plan_get_info(plan, &info, nullptr) == SAGEATTN_OK);
    workspace_.resize(static_cast<size_t>(info.min_workspace) + 256);
    workspace = workspace_.data();
    workspace_size = workspace_.size();
    REQUIRE(std::align(256, static_cast<size_t>(info.min_workspace), workspace, workspace_size) !=
            nullptr);
    args.struct_size = sizeof args;
    args.batch = 1;
    args.q.data = q_;
    args.k.data = k_;
    args.v.data = v_;
    args.out.data = out_;
    args.lse.data = lse_;
    args.seqused_kv = used_;
    args.status = status_;
    if (varlen) {
      args.total_qo = args.total_kv = 1;
      args.cu_seqlens_q = cu_q_;
      args.cu_seqlens_kv = cu_kv_;
    } else {
      args.qo_len = args.kv_len = 1;
    }
    for (const Field& field : fields()) declare(field, kDevice, device);
  }
  ~OneToken() {
    for (const Field& field : fields()) declare(field, kUnknown, 0);
  }
  OneToken(const OneToken&) = delete;
  OneToken& operator=(const OneToken&) = delete;

  struct Field {
    const char* name;
    const void* start;
    size_t bytes;
  };
  std::vector<Field> fields() const {
    std::vector<Field> all = {
        {"q.data", q_, sizeof q_},           {"k.data", k_, sizeof k_},
        {"v.data", v_, sizeof v_},           {"out.data", out_, sizeof out_},
        {"lse.data", lse_, sizeof lse_},     {"seqused_kv", used_, sizeof used_},
        {"status", status_, sizeof status_}, {"workspace", workspace_.data(), workspace_.size()}};
    if (varlen_) {
      all.push_back({"cu_seqlens_q", cu_q_, sizeof cu_q_});
      all.push_back({"cu_seqlens_kv", cu_kv_, sizeof cu_kv_});
    }
    return all;
  }
  static void declare(const Field& field, MemoryKind kind, int device) {
    declare_memory(field.start, field.bytes, kind, device);
  }
  bool untouched() const {
    const auto all = [](const auto& values) {
      for (const auto value : values) {
        if (value != 0) return false;
      }
      return true;
    };
    return all(out_) && all(lse_) && all(status_);
  }

  sageattn_error execute(cuda::Stream stream = nullptr) const {
    sageattn_error error{};
    error.struct_size = sizeof error;
    sageattn_execute(plan_, &args, workspace, workspace_size, stream, &error);
    return error;
  }

  sageattn_execute_args args{};
  void* workspace = nullptr;
  size_t workspace_size = 0;

 private:
  const sageattn_plan* plan_;
  bool varlen_;
  alignas(16) uint16_t q_[64] = {}, k_[64] = {}, v_[64] = {}, out_[64] = {};
  float lse_[1] = {};
  int32_t cu_q_[2] = {0, 1}, cu_kv_[2] = {0, 1}, used_[1] = {1}, status_[1] = {};
  std::vector<unsigned char> workspace_;
};

struct Release {
  void operator()(sageattn_context* context) const { sageattn_context_destroy(context); }
  void operator()(sageattn_plan* plan) const { sageattn_plan_destroy(plan); }
};
using ContextOwner = std::unique_ptr<sageattn_context, Release>;
using PlanOwner = std::unique_ptr<sageattn_plan, Release>;

// A plan for OneToken.
PlanOwner plan_one_token(const sageattn_context_desc& context_desc, bool varlen = false) {
  sageattn_context* context = nullptr;
  REQUIRE(sageattn_context_create(&context_desc, &context, nullptr) == SAGEATTN_OK);
  const ContextOwner owner(context);
  sageattn_attn_desc desc;
  sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE1, nullptr);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = 64;
  desc.batch_mode = varlen ? SAGEATTN_BATCH_VARLEN : SAGEATTN_BATCH_DENSE;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_plan_create(context, &desc, &plan, nullptr) == SAGEATTN_OK);
  return PlanOwner(plan);
}

}  // namespace

TEST_CASE("Plans tell of each kernel, in the order of an execute") {
  const std::string nvrtc = fake_nvrtc();
  const sageattn_context_desc context_desc = fake_context(nvrtc);
  sageattn_context* context = nullptr;
  REQUIRE(sageattn_context_create(&context_desc, &context, nullptr) == SAGEATTN_OK);
  sageattn_attn_desc desc;
  sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE1, nullptr);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = 64;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  desc.smooth_q = SAGEATTN_SMOOTH_ON;
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_plan_create(context, &desc, &plan, nullptr) == SAGEATTN_OK);
  sageattn_plan_info info{};
  info.struct_size = sizeof info;
  REQUIRE(sageattn_plan_get_info(plan, &info, nullptr) == SAGEATTN_OK);

  const char* const names[] = {"sequences", "prepare", "score_correction", "attn_sm80"};
  REQUIRE(info.num_kernels == 4);
  for (int32_t i = 0; i < 4; ++i) {
    sageattn_kernel_info kernel{};
    kernel.struct_size = sizeof kernel;
    CHECK(sageattn_plan_get_kernel(plan, i, &kernel, nullptr) == SAGEATTN_OK);
    CHECK(kernel.name == std::string(names[i]));
    CHECK(kernel.arch == info.arch);
    CHECK(kernel.origin == SAGEATTN_ORIGIN_COMPILED);
    CHECK(kernel.threads % 32 == 0);
    if (i < 3) continue;
    CHECK(kernel.macros == std::string("HEAD_DIMS=64064 QK_INT4=0 SMOOTH_Q=1 PV_ACCUM_F16=0"));
    CHECK(kernel.registers == info.registers);
    CHECK(kernel.smem_bytes == info.smem_bytes);  // the fake compiler reports nothing static
    CHECK(kernel.threads == info.threads);
    // Written as far as the caller's struct goes, and ours.
    for (uint32_t size = 4; size <= sizeof kernel + 16; size += 4) {
      alignas(sageattn_kernel_info) unsigned char bytes[sizeof kernel + 16];
      std::memset(bytes, 0x5a, sizeof bytes);
      std::memcpy(bytes, &size, sizeof size);
      CHECK(sageattn_plan_get_kernel(plan, i, reinterpret_cast<sageattn_kernel_info*>(bytes),
                                     nullptr) == SAGEATTN_OK);
      const size_t both = std::min<size_t>(size, sizeof kernel);
      CHECK(std::memcmp(bytes, &size, sizeof size) == 0);
      CHECK(std::memcmp(bytes + 4, reinterpret_cast<const char*>(&kernel) + 4, both - 4) == 0);
      for (size_t j = both; j < sizeof bytes; ++j) REQUIRE(bytes[j] == 0x5a);
    }
    for (const uint32_t size : {0u, 3u, 65537u, UINT32_MAX}) {
      const sageattn_kernel_info before = kernel;
      kernel.struct_size = size;
      CHECK(sageattn_plan_get_kernel(plan, i, &kernel, nullptr) == SAGEATTN_E_INVALID_ARGUMENT);
      CHECK(kernel.struct_size == size);
      kernel.struct_size = before.struct_size;
      CHECK(std::memcmp(&kernel, &before, sizeof kernel) == 0);
    }
  }
  sageattn_kernel_info none{};
  none.struct_size = sizeof none;
  CHECK(sageattn_plan_get_kernel(plan, 4, &none, nullptr) == SAGEATTN_E_INVALID_ARGUMENT);
  CHECK(none.arch == 0);
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
}

TEST_CASE("Execute: a plan for another arch than the device's launches nothing") {
  const std::string nvrtc = fake_nvrtc();
  sageattn_context_desc context_desc = fake_context(nvrtc);
  sageattn_attn_desc desc;
  sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE1, nullptr);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = 64;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  for (const int32_t arch : {0, 89}) {
    context_desc.target_arch = arch;
    sageattn_context* context = nullptr;
    sageattn_plan* plan = nullptr;
    REQUIRE(sageattn_context_create(&context_desc, &context, nullptr) == SAGEATTN_OK);
    REQUIRE(sageattn_plan_create(context, &desc, &plan, nullptr) == SAGEATTN_OK);
    const int before = counts().launches;
    const sageattn_error error = OneToken(plan).execute();
    INFO(error.message);
    CHECK(error.status == (arch == 0 ? SAGEATTN_OK : SAGEATTN_E_UNSUPPORTED));
    if (arch != 0) CHECK(contains(error, "target_arch = 89"));
    CHECK((counts().launches > before) == (arch == 0));
    sageattn_plan_destroy(plan);
    sageattn_context_destroy(context);
  }
}

namespace {

// How the kernels of an execute are launched on a device: a bit each, 1 if it need not wait for the last
// one to end. `number`: of kernels.
unsigned dependents_of(int32_t device, int number) {
  const std::string nvrtc = fake_nvrtc();
  sageattn_context_desc context_desc = fake_context(nvrtc);
  context_desc.device = device;
  sageattn_attn_desc desc;
  sageattn_attn_desc_init(&desc, sizeof desc, SAGEATTN_PRESET_SAGE1, nullptr);
  desc.q_dtype = SAGEATTN_BF16;
  desc.head_dim = 64;
  desc.smooth_q = number == 4 ? SAGEATTN_SMOOTH_ON : SAGEATTN_SMOOTH_OFF;
  desc.num_qo_heads = desc.max_qo_len = desc.max_kv_len = 1;
  sageattn_context* context = nullptr;
  sageattn_plan* plan = nullptr;
  REQUIRE(sageattn_context_create(&context_desc, &context, nullptr) == SAGEATTN_OK);
  REQUIRE(sageattn_plan_create(context, &desc, &plan, nullptr) == SAGEATTN_OK);
  const int before = counts().launches;
  CHECK(OneToken(plan, device).execute().status == SAGEATTN_OK);
  CHECK(counts().launches - before == number);
  const unsigned dependents = counts().dependents;
  sageattn_plan_destroy(plan);
  sageattn_context_destroy(context);
  return dependents & ((1u << number) - 1);
}

}  // namespace

TEST_CASE("Execute: each kernel but the first may start early, where the device can") {
  CHECK(dependents_of(0, 3) == 0b011);
  CHECK(dependents_of(0, 4) == 0b0111);
  CHECK(dependents_of(0, 4) == 0b0111);  // again the first waits
  // Devices of other archs: a device is looked at once, when it is opened.
  const Setting devices("FAKE_CUDA_DEVICES", "16");
  int32_t device = 8;
  for (const char* capability : {"80", "86", "89"}) {
    const Setting older("FAKE_CUDA_CC", capability);
    INFO(capability);
    CHECK(dependents_of(device++, 4) == 0);
  }
  const Setting newer("FAKE_CUDA_CC", "120");
  CHECK(dependents_of(device, 4) == 0b0111);

  CHECK(cuda::has_dependents(90, 12030));
  CHECK_FALSE(cuda::has_dependents(90, 12020));
  CHECK_FALSE(cuda::has_dependents(89, 13000));
}

TEST_CASE("Execute: memory that the device cannot access is refused by name, nothing is launched") {
  const std::string nvrtc = fake_nvrtc();
  for (const bool varlen : {false, true}) {
    const PlanOwner plan = plan_one_token(fake_context(nvrtc), varlen);
    const OneToken token(plan.get(), 0, varlen);
    const Counts before = counts();
    CHECK(token.execute().status == SAGEATTN_OK);
    CHECK(counts().launches > before.launches);
    CHECK(counts().pointer_queries - before.pointer_queries == (varlen ? 10 : 8));  // one for each

    const struct {
      MemoryKind kind;
      int device;
      const char* words;  // null: legal
    } rows[] = {{kUnknown, 0, "device 0 can access; it is host memory"},
                {kDevice, 1, "device 0 can access; it is on device 1"},
                {kDisjoint, 0, "cuMemHostGetDevicePointer"},
                {kPeer, 1, nullptr},
                {kMapped, 1, nullptr},
                {kPinned, 1, nullptr},
                {kManaged, 1, nullptr}};
    for (const OneToken::Field& field : token.fields()) {
      for (const auto& [kind, device, words] : rows) {
        OneToken::declare(field, kind, device);
        const Counts old = counts();
        const sageattn_error error = token.execute();
        INFO(field.name << ", kind " << kind << ": " << error.message);
        CHECK(error.status == (words == nullptr ? SAGEATTN_OK : SAGEATTN_E_INVALID_ARGUMENT));
        if (words != nullptr) {
          CHECK(
              contains(error, (std::string("sageattn_execute: ") + field.name + " = 0x").c_str()));
          CHECK(contains(error, words));
        }
        CHECK((counts().launches > old.launches) == (words == nullptr));
        CHECK(counts().pops - old.pops == counts().pushes - old.pushes);
        CHECK(token.untouched());
      }
      OneToken::declare(field, kDevice, 0);
    }
  }
}

TEST_CASE("Execute: memory that nothing touches may be anywhere") {
  const std::string nvrtc = fake_nvrtc();
  const PlanOwner plan = plan_one_token(fake_context(nvrtc));
  OneToken token(plan.get());
  for (const OneToken::Field& field : token.fields()) OneToken::declare(field, kUnknown, 0);
  CHECK(token.execute().status == SAGEATTN_E_INVALID_ARGUMENT);
  token.args.batch = 0;
  CHECK(token.execute().status == SAGEATTN_OK);
  token.args.batch = 1;
  token.args.qo_len = 0;  // q, out and lse have no elements; k is named first
  CHECK(contains(token.execute(), "k.data = 0x"));
}

TEST_CASE("Execute: a device that accesses all host memory takes any") {
  const std::string nvrtc = fake_nvrtc();
  const Setting devices("FAKE_CUDA_DEVICES", "32");
  const Setting pageable("FAKE_CUDA_PAGEABLE", "1");
  sageattn_context_desc desc = fake_context(nvrtc);
  desc.device = 20;  // no other test opens it
  const PlanOwner plan = plan_one_token(desc);
  const OneToken token(plan.get(), 20);
  const OneToken::Field q = token.fields()[0];
  OneToken::declare(q, kUnknown, 0);
  CHECK(token.execute().status == SAGEATTN_OK);
  OneToken::declare(q, kDevice, 1);
  CHECK(contains(token.execute(), "it is on device 1"));
}

TEST_CASE("Execute: a stream of another context is refused by name") {
  const std::string nvrtc = fake_nvrtc();
  const PlanOwner plan = plan_one_token(fake_context(nvrtc));
  const OneToken token(plan.get());
  const sageattn_error error = token.execute(reinterpret_cast<cuda::Stream>(uintptr_t{0xBAD}));
  CHECK(error.status == SAGEATTN_E_INVALID_ARGUMENT);
  INFO(error.message);
  CHECK(contains(error, "sageattn_execute: stream = 0xbad: "));
  CHECK(contains(error, "device 0"));
}

TEST_CASE("CPU backend: memory of a device is refused by name, what the host can read is not") {
  cuda::driver();  // in the process from here on
  sageattn_context_desc desc{};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.num_threads = 1;
  for (const bool varlen : {false, true}) {
    const PlanOwner plan = plan_one_token(desc, varlen);
    const OneToken token(plan.get(), 0, varlen);
    for (const OneToken::Field& field : token.fields()) OneToken::declare(field, kUnknown, 0);
    CHECK(token.execute().status == SAGEATTN_OK);
    for (const OneToken::Field& field : token.fields()) {
      for (const MemoryKind kind : {kDevice, kPeer, kMapped, kPinned, kManaged, kDisjoint}) {
        OneToken::declare(field, kind, 1);
        std::memset(token.args.out.data, 0, 128);
        const sageattn_error error = token.execute();
        INFO(field.name << ", kind " << kind << ": " << error.message);
        const bool refused = kind == kDevice || kind == kPeer || kind == kMapped;
        CHECK(error.status == (refused ? SAGEATTN_E_INVALID_ARGUMENT : SAGEATTN_OK));
        if (!refused) continue;
        CHECK(contains(error, (std::string(field.name) + " = 0x").c_str()));
        CHECK(contains(error, "must be host memory; it is on CUDA device 1"));
      }
      OneToken::declare(field, kUnknown, 0);
    }
  }
  const float values[2] = {1, 2};
  sageattn_compare_args args{};
  args.struct_size = sizeof args;
  args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  args.batch = args.len = args.num_heads = args.head_dim = 1;
  args.out.data = &values[0];
  args.ref.data = &values[1];
  sageattn_compare_result result{};
  result.struct_size = sizeof result;
  for (int i = 0; i < 2; ++i) {
    declare_memory(&values[i], sizeof(float), kDevice, 0);
    sageattn_error error{};
    error.struct_size = sizeof error;
    CHECK(sageattn_compare(&args, &result, &error) == SAGEATTN_E_INVALID_ARGUMENT);
    CHECK(contains(error, i == 0 ? "out.data = 0x" : "ref.data = 0x"));
    CHECK(result.count == 0);
    declare_memory(&values[i], sizeof(float), kUnknown, 0);
  }
  CHECK(sageattn_compare(&args, &result, nullptr) == SAGEATTN_OK);
}

TEST_CASE("Plans: limits beyond a launch or a workspace are refused at once, launches counted") {
  sageattn_context_desc context_desc{};
  context_desc.struct_size = sizeof context_desc;
  context_desc.backend = SAGEATTN_BACKEND_CUDA;
  context_desc.target_arch = 89;
  sageattn_context* context = nullptr;
  REQUIRE(sageattn_context_create(&context_desc, &context, nullptr) == SAGEATTN_OK);
  const auto query = [&](int32_t preset, auto change, sageattn_plan_info& info) {
    sageattn_attn_desc desc;
    sageattn_attn_desc_init(&desc, sizeof desc, preset, nullptr);
    desc.q_dtype = SAGEATTN_BF16;
    desc.head_dim = 64;
    desc.num_qo_heads = 128;
    change(desc);
    info = {};
    info.struct_size = sizeof info;
    sageattn_error error{};
    error.struct_size = sizeof error;
    sageattn_plan_query(context, &desc, &info, &error);
    return error;
  };
  sageattn_plan_info info;
  const auto seconds = [start = std::chrono::steady_clock::now()] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };

  // Too many to be counted one by one: each of 64 heads has 2^23 tiles of queries, that fit in the
  // workspace one at a time.
  const auto huge = [](auto& d) {
    d.max_qo_len = d.max_kv_len = 1 << 30;
    d.num_qo_heads = 64;
  };
  CHECK(query(SAGEATTN_PRESET_SAGE2_4B, huge, info).status == SAGEATTN_OK);
  CHECK(info.launches == (int64_t{1} << 30) + 2);
  const auto more = [](auto& d) {
    d.max_qo_len = 3 << 23;
    d.max_kv_len = 1 << 28;
    d.num_qo_heads = 1 << 13;
    d.num_kv_heads = 1;
  };
  CHECK(query(SAGEATTN_PRESET_SAGE2_4B, more, info).status == SAGEATTN_OK);
  CHECK(info.launches == INT32_MAX);

  // The grid of an execute is as large as if every sequence had the longest's tiles.
  sageattn_error error = query(
      SAGEATTN_PRESET_SAGE2_8B,
      [](auto& d) {
        d.batch_mode = SAGEATTN_BATCH_VARLEN;
        d.max_batch = 4096;
        d.max_qo_len = d.max_kv_len = 1 << 20;
        d.max_total_qo = d.max_total_kv = 1 << 20;
      },
      info);
  CHECK(error.status == SAGEATTN_E_UNSUPPORTED);
  for (const char* field : {"max_batch = 4096", "max_qo_len = 1048576", "max_kv_len = 1048576",
                            "num_qo_heads = 128", "num_kv_heads = 128", "lower the limits"}) {
    INFO(error.message);
    CHECK(contains(error, field));
  }
  // Beyond 64 bits, too.
  const auto most = [](auto& d) {
    d.batch_mode = SAGEATTN_BATCH_VARLEN;
    d.max_batch = 1 << 24;
    d.max_qo_len = d.max_kv_len = 1 << 30;
    d.max_total_qo = d.max_total_kv = 1 << 30;
    d.num_qo_heads = 65536;
    d.num_kv_heads = 1;
  };
  CHECK(query(SAGEATTN_PRESET_SAGE2_8B, most, info).status == SAGEATTN_E_UNSUPPORTED);
  CHECK(query(SAGEATTN_PRESET_EXACT, most, info).status == SAGEATTN_E_UNSUPPORTED);

  // More bytes than an address has, because of the queries.
  error = query(
      SAGEATTN_PRESET_SAGE2_8B,
      [](auto& d) {
        d.max_batch = 1 << 24;
        d.max_qo_len = 1 << 30;
        d.max_kv_len = 1;
        d.num_qo_heads = 65536;
        d.num_kv_heads = 1;
      },
      info);
  INFO(error.message);
  CHECK(error.status == SAGEATTN_E_INVALID_ARGUMENT);
  CHECK(contains(error, "max_qo_len = 1073741824"));
  CHECK(contains(error, "num_qo_heads = 65536"));
  CHECK(seconds() < 1);
  sageattn_context_destroy(context);
}

TEST_CASE("Self-test: a device that computes nothing fails it, and nothing stays behind") {
  const char* const folder = std::getenv("LD_LIBRARY_PATH");  // where the build put the fakes
  REQUIRE(folder != nullptr);
  const std::string nvrtc = std::string(folder) + "/libfake_nvrtc.so";
  struct Log {
    std::mutex mutex;  // kernels are compiled side by side, and each says so
    std::vector<std::string> lines;
  } log;
  sageattn_context_desc desc{};
  desc.backend = SAGEATTN_BACKEND_CUDA;
  desc.flags = SAGEATTN_CONTEXT_NO_DISK_CACHE;
  desc.nvrtc_path = nvrtc.c_str();
  desc.log_user = &log;
  desc.log = [](void* user, int32_t, const char* message) {
    Log& self = *static_cast<Log*>(user);
    const std::lock_guard<std::mutex> lock(self.mutex);
    self.lines.emplace_back(message);
  };
  const auto run = [&] {
    const std::unique_ptr<Context, void (*)(Context*)> context(Context::create(desc),
                                                               [](Context* c) { c->release(); });
    return error_of([&] { selftest(*context); });
  };
  const Counts before = counts();
  const auto check_nothing_left = [&] {
    CHECK(counts().allocations == before.allocations);
    CHECK(counts().streams == before.streams);
    CHECK(counts().pops - before.pops == counts().pushes - before.pushes);
  };

  Error error = run();
  INFO(error.message);
  CHECK(error.status == SAGEATTN_E_SELFTEST);
  CHECK(contains(error, "preset AUTO, dense: out has"));
  CHECK(counts().launches > before.launches);
  check_nothing_left();

  for (int allocations = 0; allocations < 8; ++allocations) {
    const Setting memory("FAKE_CUDA_MEMORY", std::to_string(allocations).c_str());
    error = run();
    INFO(error.message);
    CHECK(error.status == SAGEATTN_E_OUT_OF_MEMORY);
    CHECK(contains(error, "cuMemAlloc("));
    check_nothing_left();
  }

  desc.target_arch = 89;  // not the fake's
  error = run();
  CHECK(error.status == SAGEATTN_E_UNSUPPORTED);
  CHECK(contains(error, "target_arch = 89"));
  for (const std::string& line : log.lines) CHECK(line.find(": passed") == std::string::npos);
}
