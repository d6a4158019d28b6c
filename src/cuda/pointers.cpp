#include "src/cuda/pointers.h"

#include <atomic>
#include <cstdint>
#include <iterator>

#include "include/sageattn.h"
#include "src/core/error.h"

namespace sageattn::cuda {
namespace {

DevicePointer address_of(const Operand& operand) {
  return reinterpret_cast<uintptr_t>(operand.data);
}

// Memory of any kind that the device's kernels can reach has an address there, which may be another one
// (memory registered on a system where the two differ).
struct OnDevice {
  unsigned type = 0;  // 0: the driver knows nothing of the memory
  int ordinal = 0;
  DevicePointer address = 0;
};

[[noreturn]] void fail_on_device(const DeviceInfo& device, const Operand& operand,
                                 const OnDevice& found) {
  if (found.type == kMemoryTypeDevice) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "%s = %p: must be memory that device %d can access; it is on device %d, which it "
         "has no access to",
         operand.field, operand.data, device.ordinal, found.ordinal);
  }
  if (found.address != 0) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "%s = %p: must be the address that device %d has for this registered host memory, 0x%llx "
         "(cuMemHostGetDevicePointer)",
         operand.field, operand.data, device.ordinal, found.address);
  }
  fail(SAGEATTN_E_INVALID_ARGUMENT,
       "%s = %p: must be memory that device %d can access; it is host memory: copy it to the "
       "device, or make it pinned (cudaHostRegister, cudaHostAlloc) or managed",
       operand.field, operand.data, device.ordinal);
}

// Of a driver in the process, which stays there from then on; null until one is found.
PointerGetAttributes loaded_query() {
  static std::atomic<PointerGetAttributes> found{nullptr};
  PointerGetAttributes query = found.load(std::memory_order_relaxed);
  if (query != nullptr) return query;
  query = find_loaded_pointer_query();
  found.store(query, std::memory_order_relaxed);
  return query;
}

}  // namespace

void check_on_device(const Driver& driver, const DeviceInfo& device,
                     std::span<const Operand> operands) {
  for (const Operand& operand : operands) {
    if (operand.data == nullptr) continue;
    OnDevice found;
    PointerAttribute which[] = {kPointerMemoryType, kPointerDeviceOrdinal, kPointerDevicePointer};
    void* values[] = {&found.type, &found.ordinal, &found.address};
    const DevicePointer address = address_of(operand);
    // A driver that cannot answer leaves it to the launch to fail.
    if (driver.PointerGetAttributes(std::size(which), which, values, address) != kSuccess) continue;
    if (found.address == address) continue;
    if (found.type == 0 && device.pageable_memory) continue;
    // Mapped with cuMemSetAccess, or from a pool with cuMemPoolSetAccess.
    unsigned access = 0;
    if (found.type == kMemoryTypeDevice && driver.PointerGetAttribute != nullptr &&
        driver.PointerGetAttribute(&access, kPointerAccessFlags, address) == kSuccess &&
        access != 0) {
      continue;
    }
    fail_on_device(device, operand, found);
  }
}

void check_on_host(std::span<const Operand> operands) {
  const PointerGetAttributes query = loaded_query();
  if (query == nullptr) return;
  for (const Operand& operand : operands) {
    if (operand.data == nullptr) continue;
    unsigned type = 0;
    int ordinal = 0;
    void* host = nullptr;
    PointerAttribute which[] = {kPointerMemoryType, kPointerDeviceOrdinal, kPointerHostPointer};
    void* values[] = {&type, &ordinal, &host};
    if (query(std::size(which), which, values, address_of(operand)) != kSuccess) continue;
    if (type != kMemoryTypeDevice || host != nullptr) continue;  // managed memory has both
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "%s = %p: must be host memory; it is on CUDA device %d: copy it to the host, or use "
         "SAGEATTN_BACKEND_CUDA",
         operand.field, operand.data, ordinal);
  }
}

}  // namespace sageattn::cuda
