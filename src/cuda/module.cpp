#include "src/cuda/module.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "include/sageattn.h"
#include "src/core/error.h"

namespace sageattn::cuda {
namespace {

struct Entry {
  LoadedKernel kernel;
  int max_threads;
  int dynamic_shared;  // what the function may use; only ever raised
};

// Keyed by content: contexts come and go, and each of them may hold a copy of the same kernel.
struct Cache {
  std::mutex mutex;
  std::map<std::tuple<int, std::string, std::vector<unsigned char>>, Entry> entries;
};

// Never destroyed, as the modules are not unloaded: the driver may be gone before we are.
Cache& cache() {
  static Cache& instance = *new Cache;
  return instance;
}

int attribute(const Driver& driver, FunctionAttribute which, Function function, const char* entry) {
  int value = 0;
  check(driver, driver.FuncGetAttribute(&value, which, function), "cuFuncGetAttribute(%s, %d)",
        entry, which);
  return value;
}

Entry load(const Driver& driver, const DeviceInfo& device, std::span<const unsigned char> cubin,
           const char* entry) {
  Module module = nullptr;
  const Result result = driver.ModuleLoadData(&module, cubin.data());
  if (result == kErrorNoBinaryForGpu || result == kErrorInvalidImage) {
    // What a driver says of a cubin that is newer than itself.
    fail(SAGEATTN_E_DRIVER_TOO_OLD,
         "cuModuleLoadData(%s): the driver (CUDA %d.%d) refuses the kernel for sm_%d; it may be "
         "older than the NVRTC that compiled the kernel: update it or use an older NVRTC",
         entry, driver.version / 1000, driver.version % 1000 / 10, device.choice.binary);
  }
  check(driver, result, "cuModuleLoadData(%s)", entry);

  Entry loaded{};
  LoadedKernel& kernel = loaded.kernel;
  check(driver, driver.ModuleGetFunction(&kernel.function, module, entry),
        "cuModuleGetFunction(%s)", entry);
  // Asking for an attribute is what makes a lazily loading driver load the code.
  kernel.registers = attribute(driver, kFunctionRegisters, kernel.function, entry);
  kernel.local_bytes = attribute(driver, kFunctionLocalSize, kernel.function, entry);
  kernel.static_shared = attribute(driver, kFunctionSharedSize, kernel.function, entry);
  loaded.max_threads = attribute(driver, kFunctionMaxThreads, kernel.function, entry);
  return loaded;
}

}  // namespace

LoadedKernel load_kernel(const Driver& driver, const DeviceInfo& device,
                         std::span<const unsigned char> cubin, const char* entry, int threads,
                         int dynamic_shared) {
  Cache& known = cache();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto key = std::tuple(device.ordinal, std::string(entry),
                              std::vector<unsigned char>(cubin.begin(), cubin.end()));
  auto found = known.entries.find(key);
  if (found == known.entries.end()) {
    found = known.entries.emplace(key, load(driver, device, cubin, entry)).first;
  }

  Entry& loaded = found->second;
  if (threads > loaded.max_threads) {
    fail(SAGEATTN_E_INTERNAL, "%s: needs %d threads a block, but can have %d", entry, threads,
         loaded.max_threads);
  }
  if (loaded.kernel.static_shared + dynamic_shared > device.max_shared_bytes) {
    fail(SAGEATTN_E_UNSUPPORTED,
         "%s: needs %d bytes of shared memory a block, %s has %d; use smaller head dimensions",
         entry, loaded.kernel.static_shared + dynamic_shared, device.name, device.max_shared_bytes);
  }
  if (dynamic_shared > loaded.dynamic_shared) {
    check(
        driver,
        driver.FuncSetAttribute(loaded.kernel.function, kFunctionMaxDynamicShared, dynamic_shared),
        "cuFuncSetAttribute(%s, shared memory %d)", entry, dynamic_shared);
    loaded.dynamic_shared = dynamic_shared;
  }
  return loaded.kernel;
}

}  // namespace sageattn::cuda
