// The kernel of tests/test_jit_nvrtc.cpp: small, but with what real ones have: includes by the
// path below the root, macros, static shared memory.
#include "ptx/common/types.h"
#include "tests/nvrtc/small.h"

extern "C" __global__ void __launch_bounds__(128) sageattn_small(float* data, sageattn::i32 n) {
  __shared__ float tile[128];
  const unsigned i = threadIdx.x;
  tile[i] = data[i];
  __syncthreads();
  data[i] = scaled(tile[(i + static_cast<unsigned>(n)) % 128u]);
}
