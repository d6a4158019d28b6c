// CUDA devices, and the context that calls run in.
#pragma once

#include <cstdint>

#include "src/cuda/driver.h"

namespace sageattn::cuda {

// What a compute capability means for plans and for the compiler.
struct ArchChoice {
  int32_t arch;    // features: 80, 86, 89, 90 or 120; 0: too old, nothing runs
  int32_t binary;  // sm_<binary>: what kernels are compiled for
  bool known;      // false: an arch newer than this library, given the nearest older features
};

// capability: major * 10 + minor.
ArchChoice choose_arch(int32_t capability);

// Whether a cubin for sm_<binary> runs on the capability.
bool runs_on(int32_t binary, int32_t capability);

// Whether kernels can be launched as dependent (ptx/arch/grid.h): on that compute capability, by a driver
// of that CUDA version.
bool has_dependents(int32_t capability, int driver_version);

// A device whose primary context is retained, for ever: modules live in it.
struct DeviceInfo {
  int32_t ordinal;
  Device handle;
  Context context;
  char name[128];
  int32_t capability;  // major * 10 + minor
  ArchChoice choice;
  int32_t multiprocessors;
  int32_t max_shared_bytes;  // a block can have, opted in
  bool pageable_memory;      // kernels can access any host memory
};

// The device of an ordinal, opened by the first call for it. Fails with E_NO_DEVICE (no driver, no
// device, no such ordinal), E_DRIVER_TOO_OLD or E_UNSUPPORTED (older than sm_80).
const DeviceInfo& open_device(int32_t ordinal);

// Makes the device's primary context current; the end of the scope restores what was.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, const DeviceInfo& device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

}  // namespace sageattn::cuda
