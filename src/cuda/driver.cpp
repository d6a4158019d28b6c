#include "src/cuda/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "include/sageattn.h"
#include "src/core/error.h"

namespace sageattn::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// cuGetProcAddress, of CUDA 11.3 and, with a last argument more, of CUDA 12.0.
using GetProcAddress = Result (*)(const char*, void**, int, uint64_t);
using GetProcAddressV2 = Result (*)(const char*, void**, int, uint64_t, int*);

class Resolver {
 public:
  explicit Resolver(void* library)
      : v2_(reinterpret_cast<GetProcAddressV2>(dlsym(library, "cuGetProcAddress_v2"))),
        v1_(reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress"))) {}

  bool usable() const { return v2_ != nullptr || v1_ != nullptr; }

  // Null if the driver lacks the function.
  void* find(const char* symbol, int version) const {
    void* address = nullptr;
    int status = 0;
    const Result result = v2_ != nullptr ? v2_(symbol, &address, version, kLegacyStream, &status)
                                         : v1_(symbol, &address, version, kLegacyStream);
    return result == kSuccess ? address : nullptr;
  }

 private:
  GetProcAddressV2 v2_;
  GetProcAddress v1_;
};

[[noreturn]] void fail_too_old(const Driver& driver, const char* what) {
  fail(SAGEATTN_E_DRIVER_TOO_OLD,
       "the NVIDIA driver %s supports CUDA %d.%d%s%s; a driver for CUDA %d.%d or newer is needed",
       driver.library, driver.version / 1000, driver.version % 1000 / 10,
       what[0] != '\0' ? " and lacks " : "", what, kMinDriverVersion / 1000,
       kMinDriverVersion % 1000 / 10);
}

// What is no driver has no version. A toolkit's stub, there to be linked against, has every
// function, and none of them works.
void read_version(Driver& driver) {
  if (driver.DriverGetVersion != nullptr && driver.DriverGetVersion(&driver.version) == kSuccess) {
    return;
  }
  fail(SAGEATTN_E_NO_DEVICE,
       "%s is not a CUDA driver, perhaps a toolkit's stub: its cuDriverGetVersion is missing or "
       "fails",
       driver.library);
}

struct Text {
  const char *name, *description;
};

Text text_of(const Driver& driver, Result result) {
  Text text{"unknown error", "no description"};
  driver.GetErrorName(result, &text.name);
  driver.GetErrorString(result, &text.description);
  if (text.name == nullptr) text.name = "unknown error";  // what the driver gives for no such code
  if (text.description == nullptr) text.description = "no description";
  return text;
}

void initialise(const Driver& driver) {
  const Result result = driver.Init(0);
  if (result == kSuccess) return;
  const Text text = text_of(driver, result);
  const bool mismatch = result == kErrorSystemDriverMismatch || result == kErrorCompatNotSupported;
  fail(mismatch ? SAGEATTN_E_DRIVER_TOO_OLD : SAGEATTN_E_NO_DEVICE, "cuInit: %s (%d): %s%s",
       text.name, result, text.description,
       mismatch ? "; the kernel module and libcuda must be of one version" : "");
}

void name_library(void* handle, char (&name)[256]) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return;
  std::snprintf(name, sizeof name, "%s", map->l_name);
}

}  // namespace

Driver load_driver(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    fail(SAGEATTN_E_NO_DEVICE, "no NVIDIA driver: %s", dlerror());
  }
  const Resolver resolver(handle);
  Driver driver{};
  name_library(handle, driver.library);
  if (!resolver.usable()) {
    // Older than CUDA 11.3. This one has been there from the start.
    driver.DriverGetVersion =
        reinterpret_cast<Result (*)(int*)>(dlsym(handle, "cuDriverGetVersion"));
    read_version(driver);
    fail_too_old(driver, "");
  }

  const char* missing = nullptr;
#define CUDA_FUNCTION(name, since, required, arguments)                                  \
  driver.name = reinterpret_cast<Result(*) arguments>(resolver.find("cu" #name, since)); \
  if (required && driver.name == nullptr && missing == nullptr) missing = "cu" #name;
#include "src/cuda/driver.def"
#undef CUDA_FUNCTION
  // The version first: it explains what is missing.
  read_version(driver);
  if (driver.version < kMinDriverVersion) fail_too_old(driver, "");
  if (missing != nullptr) fail_too_old(driver, missing);
  initialise(driver);
  return driver;
}

const Driver& driver() {
  // Neither type has a destructor, so nothing of this ends before the process does.
  struct Loaded {
    Driver driver;
    Error error;  // status OK: the driver is there
  };
  static_assert(std::is_trivially_destructible_v<Loaded>);
  static const Loaded loaded = [] {
    Loaded result{};
    try {
      result.driver = load_driver(kLibrary);
    } catch (const Error& error) {
      result.error = error;
    }
    return result;
  }();
  if (loaded.error.status != SAGEATTN_OK) throw loaded.error;
  return loaded.driver;
}

PointerGetAttributes find_loaded_pointer_query() {
  // dlopen with RTLD_NOLOAD alone would search the disk.
  const auto is_driver = [](dl_phdr_info* info, size_t, void*) {
    return std::strstr(info->dlpi_name, "libcuda.so") != nullptr ? 1 : 0;
  };
  if (dl_iterate_phdr(is_driver, nullptr) == 0) return nullptr;
  void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  const Resolver resolver(handle);
  if (!resolver.usable()) return nullptr;
  return reinterpret_cast<PointerGetAttributes>(resolver.find("cuPointerGetAttributes", 7000));
}

void check(const Driver& driver, Result result, const char* call, ...) {
  if (result == kSuccess) return;
  char what[256];
  va_list arguments;
  va_start(arguments, call);
  std::vsnprintf(what, sizeof what, call, arguments);
  va_end(arguments);
  const Text text = text_of(driver, result);
  fail(result == kErrorOutOfMemory ? SAGEATTN_E_OUT_OF_MEMORY : SAGEATTN_E_CUDA, "%s: %s (%d): %s",
       what, text.name, result, text.description);
}

}  // namespace sageattn::cuda
