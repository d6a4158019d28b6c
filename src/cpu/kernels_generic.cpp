// Any processor. Also the place that chooses among the builds.
#include "src/cpu/simd_generic.h"

#include "src/cpu/kernels_impl.h"

#ifdef SAGEATTN_X86
#include <cpuid.h>
#endif

namespace sageattn::cpu {

#ifdef SAGEATTN_X86
namespace {

// Clang 14 knows no __builtin_cpu_supports("f16c").
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

extern const Kernels kGenericKernels = SAGEATTN_KERNELS("generic");

const Kernels& kernels() {
#ifdef SAGEATTN_X86
  static const Kernels* const best = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return &kAvx512Kernels;
    }
    return avx2 ? &kAvx2Kernels : &kGenericKernels;
  }();
  return *best;
#else
  return kGenericKernels;
#endif
}

}  // namespace sageattn::cpu
