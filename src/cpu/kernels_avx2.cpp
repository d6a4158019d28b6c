// Processors with AVX2, FMA and F16C; compiled with these enabled.
#include "src/cpu/simd_avx2.h"

#include "src/cpu/kernels_impl.h"

namespace sageattn::cpu {

extern const Kernels kAvx2Kernels = SAGEATTN_KERNELS("avx2");

}  // namespace sageattn::cpu
