// Compiled kernels on a device.
#pragma once

#include <span>

#include "src/cuda/device.h"
#include "src/cuda/driver.h"

namespace sageattn::cuda {

struct LoadedKernel {
  Function function;
  int registers;      // a thread
  int local_bytes;    // a thread: spills and arrays
  int static_shared;  // bytes a block
};

// The function `entry` of a cubin, ready to be launched with blocks of `threads` threads and
// `dynamic_shared` bytes: loaded by the first call for a device and the same bytes, never unloaded.
// Nothing is left to be done lazily at the first launch, which could be inside a stream capture.
LoadedKernel load_kernel(const Driver& driver, const DeviceInfo& device,
                         std::span<const unsigned char> cubin, const char* entry, int threads,
                         int dynamic_shared);

}  // namespace sageattn::cuda
