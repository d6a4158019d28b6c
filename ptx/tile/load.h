// Reading a caller's tensor, whatever its type and strides, widened to fp32; and the statistics that
// quantization takes, with NaN and infinities kept visible.
#pragma once

#include "ptx/arch/convert.h"
#include "ptx/common/params.h"

namespace sageattn {

__device__ __forceinline__ float load_element(const View& v, i64 at) {
  if (v.dtype == 3) return static_cast<const float*>(v.data)[at];
  const unsigned code = static_cast<const unsigned short*>(v.data)[at];
  return v.dtype == 1 ? f16_lo(code) : bf16_lo(code);
}

// kCount channels from `first` on of the token at `at`; channels that do not exist are 0.
template <int kCount>
__device__ __forceinline__ void load_channels(const View& v, i64 at, int first,
                                              float (&x)[kCount]) {
  constexpr int kVector = kCount < 8 ? kCount : 8;
  static_assert(kCount % kVector == 0 && (kVector == 8 || kVector == 4));
  const i64 element = at + first * v.dim;
  const unsigned short* from = static_cast<const unsigned short*>(v.data) + element;
  const bool whole = v.dtype != 3 && v.dim == 1 && first + kCount <= v.channels &&
                     (reinterpret_cast<unsigned long long>(from) & (kVector * 2 - 1)) == 0;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kCount; i += kVector) {
      unsigned words[kVector / 2];
      if constexpr (kVector == 8) {
        const uint4 u = *reinterpret_cast<const uint4*>(from + i);
        words[0] = u.x, words[1] = u.y, words[2] = u.z, words[3] = u.w;
      } else {
        const uint2 u = *reinterpret_cast<const uint2*>(from + i);
        words[0] = u.x, words[1] = u.y;
      }
#pragma unroll
      for (int w = 0; w < kVector / 2; ++w) {
        x[i + 2 * w] = v.dtype == 1 ? f16_lo(words[w]) : bf16_lo(words[w]);
        x[i + 2 * w + 1] = v.dtype == 1 ? f16_hi(words[w]) : bf16_hi(words[w]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = first + i < v.channels ? load_element(v, element + i * v.dim) : 0.0f;
  }
}

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
