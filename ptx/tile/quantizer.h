// How a group's absmax becomes its scale, with NaN and infinities kept visible.
#pragma once

#include "ptx/arch/convert.h"
#include "ptx/common/types.h"

namespace sageattn {

// x rounded to the type of the 16-bit products of dS.
__device__ __forceinline__ float round_product(float x, i32 bf16) {
  return bf16 ? bf16_lo(pack_bf16x2(x, 0.0f)) : f16_lo(pack_f16x2(x, 0.0f));
}

// Scale and inverse scale of a group: code = round(x * inverse), x ~ code * scale.
struct Quantizer {
  float scale, inverse;
};

__device__ __forceinline__ Quantizer make_quantizer(float absmax, float max_code) {
  if (absmax != absmax) return {absmax, 0.0f};
  if (absmax < 7.888609052210118e-31f) return {0.0f, 0.0f};  // 2^-100
  return {absmax / max_code, max_code / absmax};
}

// The power of two that brings absmax into (256, 512], at least 2^-100.
__device__ __forceinline__ Quantizer make_f16_quantizer(float absmax) {
  if (absmax != absmax) return {absmax, 0.0f};
  if (absmax < 7.888609052210118e-31f) return {0.0f, 0.0f};
  const unsigned bits = __float_as_uint(absmax);
  int e = static_cast<int>(bits >> 23) - 127 - ((bits & 0x7fffffu) == 0 ? 9 : 8);
  if (e < -100) e = -100;
  return {__uint_as_float(static_cast<unsigned>(127 + e) << 23),
          __uint_as_float(static_cast<unsigned>(127 - e) << 23)};
}

}  // namespace sageattn
