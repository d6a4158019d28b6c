// Any processor. Also the place that chooses among the builds.
#include "src/cpu/simd_generic.h"

#include "src/cpu/kernels_impl.h"

namespace sageattn::cpu {

extern const Kernels kGenericKernels = SAGEATTN_KERNELS("generic");

const Kernels& kernels() {
#ifdef SAGEATTN_X86
  static const Kernels& best = []() -> const Kernels& {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return kAvx512Kernels;
    }
    return avx2 ? kAvx2Kernels : kGenericKernels;
  }();
  return best;
#else
  return kGenericKernels;
#endif
}

}  // namespace sageattn::cpu
