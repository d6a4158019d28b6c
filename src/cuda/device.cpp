#include "src/cuda/device.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "include/sageattn.h"
#include "src/core/error.h"

namespace sageattn::cuda {
namespace {

int attribute(const Driver& driver, DeviceAttribute which, Device device) {
  int value = 0;
  check(driver, driver.DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute(%d)",
        which);
  return value;
}

DeviceInfo open(const Driver& driver, int32_t ordinal) {
  int count = 0;
  check(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
  if (count == 0) fail(SAGEATTN_E_NO_DEVICE, "the NVIDIA driver reports no device");
  if (ordinal >= count) {
    fail(SAGEATTN_E_NO_DEVICE, "device = %d: must be 0..%d, of %d devices", ordinal, count - 1,
         count);
  }

  DeviceInfo info{};
  info.ordinal = ordinal;
  check(driver, driver.DeviceGet(&info.handle, ordinal), "cuDeviceGet(%d)", ordinal);
  check(driver, driver.DeviceGetName(info.name, sizeof info.name - 1, info.handle),
        "cuDeviceGetName(%d)", ordinal);
  info.capability = attribute(driver, kDeviceMajor, info.handle) * 10 +
                    attribute(driver, kDeviceMinor, info.handle);
  info.choice = choose_arch(info.capability);
  if (info.choice.arch == 0) {
    fail(SAGEATTN_E_UNSUPPORTED, "device = %d: %s is sm_%d; sm_80 or newer is needed", ordinal,
         info.name, info.capability);
  }
  info.multiprocessors = attribute(driver, kDeviceMultiprocessorCount, info.handle);
  info.max_shared_bytes = attribute(driver, kDeviceMaxSharedMemoryOptin, info.handle);
  info.pageable_memory = attribute(driver, kDevicePageableMemoryAccess, info.handle) != 0;
  check(driver, driver.DevicePrimaryCtxRetain(&info.context, info.handle),
        "cuDevicePrimaryCtxRetain(%d)", ordinal);
  return info;
}

// Never destroyed: other threads may still use a device while the process ends.
struct OpenDevices {
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<const DeviceInfo>> devices;
};

OpenDevices& open_devices() {
  static OpenDevices& devices = *new OpenDevices;
  return devices;
}

}  // namespace

ArchChoice choose_arch(int32_t capability) {
  struct Known {
    int32_t capability, arch, binary;
  };
  // A cubin runs on later minor versions of its major version, so one serves each line.
  static constexpr Known kKnown[] = {{80, 80, 80}, {86, 86, 86}, {87, 86, 86},
                                     {89, 89, 89}, {90, 90, 90}, {120, 120, 120}};
  for (const Known& known : kKnown) {
    if (known.capability == capability) return {known.arch, known.binary, true};
  }
  if (capability / 10 == 12) return {120, 120, true};
  const Known* const after =
      std::upper_bound(std::begin(kKnown), std::end(kKnown), capability,
                       [](int32_t c, const Known& known) { return c < known.capability; });
  if (after == std::begin(kKnown)) return {0, 0, false};
  return {after[-1].arch, capability, false};
}

bool runs_on(int32_t binary, int32_t capability) {
  return binary / 10 == capability / 10 && binary <= capability;
}

bool has_dependents(int32_t capability, int driver_version) {
  // Drivers from 11.8 on launch them, but not in a stream that is captured: graphs have programmatic edges
  // only since CUDA 12.3.
  return capability >= 90 && driver_version >= 12030;
}

const DeviceInfo& open_device(int32_t ordinal) {
  OpenDevices& open_ones = open_devices();
  const std::lock_guard<std::mutex> lock(open_ones.mutex);
  std::unique_ptr<const DeviceInfo>& slot = open_ones.devices[ordinal];
  if (slot == nullptr) slot = std::make_unique<const DeviceInfo>(open(driver(), ordinal));
  return *slot;
}

CurrentContext::CurrentContext(const Driver& driver, const DeviceInfo& device) : driver_(driver) {
  check(driver, driver.CtxPushCurrent(device.context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  Context popped = nullptr;
  driver_.CtxPopCurrent(&popped);  // can only fail if the driver is shutting down
}

}  // namespace sageattn::cuda
