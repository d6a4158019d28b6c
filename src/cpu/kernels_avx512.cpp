// Processors with AVX-512 F, BW, DQ and VL; compiled with these enabled.
#include "src/cpu/simd_avx512.h"

#include "src/cpu/kernels_impl.h"

namespace sageattn::cpu {

extern const Kernels kAvx512Kernels = SAGEATTN_KERNELS("avx512");

}  // namespace sageattn::cpu
