// Conversions and elementary functions.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// ex2.approx.ftz.f32: 2^x, at most 2 units in the last place off; 0 below 2^-126.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz.f32: log2(x), absolute error 2^-22 near 1.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1 / x, at most 1 unit in the last place off.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max.NaN.f32: NaN if either is; sm_80.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// min.NaN and max.NaN of two fp16 or bf16, half by half: NaN if either is; sm_80.
template <bool kF16>
__device__ __forceinline__ unsigned min_nan_x2(unsigned a, unsigned b) {
  unsigned y;
  if constexpr (kF16) {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}
template <bool kF16>
__device__ __forceinline__ unsigned max_nan_x2(unsigned a, unsigned b) {
  unsigned y;
  if constexpr (kF16) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// prmt.b32: nibble i of `selector` names the byte of b:a that becomes byte i, or, from 8 on, that byte's
// sign bit eight times.
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
  unsigned y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

// cvt.rn.f16x2.f32: lo in the lower half; sm_80.
__device__ __forceinline__ unsigned pack_f16x2(float lo, float hi) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// cvt.rn.bf16x2.f32: lo in the lower half; sm_80.
__device__ __forceinline__ unsigned pack_bf16x2(float lo, float hi) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// cvt.rn.satfinite.e4m3x2.f32: lo in the lower byte; sm_89, PTX 8.1.
__device__ __forceinline__ unsigned pack_e4m3x2(float lo, float hi) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}

// Four codes, a in the lowest byte: the second conversion puts its two beside those of the first.
__device__ __forceinline__ unsigned pack_e4m3x4(float a, float b, float c, float d) {
  unsigned word;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// cvt.f32.f16 of the lower and upper half.
__device__ __forceinline__ float f16_lo(unsigned x) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float f16_hi(unsigned x) {
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float bf16_lo(unsigned x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_hi(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

}  // namespace sageattn
