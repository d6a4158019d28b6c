// Number formats by bit manipulation: decoding is exact, encoding rounds half to even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "include/sageattn.h"

namespace sageattn {

inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Inf and NaN keep their payload
    return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // As an fp32 pattern the value is 2^112 too small, also where it is subnormal.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline uint16_t float_to_f16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
  if (u < 0x38800000u) {  // below 2^-14: adding 1/2 rounds to a multiple of 2^-24
    const float shifted = std::bit_cast<float>(u) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  u += 0xfffu + (u >> 13 & 1u);
  return static_cast<uint16_t>(sign | (u - 0x38000000u) >> 13);
}

inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t{h} << 16); }

inline uint16_t float_to_bf16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(u >> 16 | 0x40u);
  u += 0x7fffu + (u >> 16 & 1u);
  return static_cast<uint16_t>(u >> 16);
}

// An 8-bit float: sign, exponent, `kMantissa` fraction bits. E4M3 has no infinities (0x7f is NaN),
// E5M2 is the upper byte of fp16.
template <int kMantissa>
struct Float8 {
  static constexpr int kBias = kMantissa == 3 ? 7 : 15;
  static constexpr float kMax = kMantissa == 3 ? 448.0f : 57344.0f;
  static constexpr uint8_t kMaxCode = kMantissa == 3 ? 0x7e : 0x7b;
  static constexpr uint8_t kNan = 0x7f;

  static bool is_nan(uint8_t code) { return (code & 0x7fu) > (kMantissa == 3 ? 0x7eu : 0x7cu); }

  static float decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7fu;
    uint32_t bits;
    if (is_nan(code)) {
      bits = 0x7fc00000u;
    } else if (kMantissa == 2 && magnitude == 0x7cu) {
      bits = 0x7f800000u;
    } else {
      const float scale = std::bit_cast<float>(static_cast<uint32_t>(254 - kBias) << 23);
      const float value = std::bit_cast<float>(magnitude << (23 - kMantissa)) * scale;
      bits = std::bit_cast<uint32_t>(value);
    }
    return std::bit_cast<float>(bits | sign);
  }

  // Saturates at kMax; NaN becomes NaN.
  static uint8_t encode(float x) {
    uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t sign = u >> 24 & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return static_cast<uint8_t>(sign | kNan);
    constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;
    uint32_t code;
    if (u < kMinNormal) {
      // Adding a power of two whose last place is the subnormal step rounds to that step.
      constexpr uint32_t kShift = static_cast<uint32_t>(127 + 1 - kBias - kMantissa + 23) << 23;
      const float shifted = std::bit_cast<float>(u) + std::bit_cast<float>(kShift);
      code = std::bit_cast<uint32_t>(shifted) - kShift;
    } else {
      constexpr int kDrop = 23 - kMantissa;
      u += (1u << (kDrop - 1)) - 1u + (u >> kDrop & 1u);
      code = (u >> kDrop) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
      if (code > kMaxCode) code = kMaxCode;
    }
    return static_cast<uint8_t>(sign | code);
  }
};
using E4M3 = Float8<3>;
using E5M2 = Float8<2>;

// x rounded half to even to an integer; |x| < 2^22.
inline float round_half_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

inline int64_t dtype_size(int32_t dtype) { return dtype == SAGEATTN_F32 ? 4 : 2; }

// Element `index` of an array of SAGEATTN_F16, BF16 or F32. Goes through memcpy: a caller's
// pointer has no C++ type.
inline float load_element(int32_t dtype, const void* base, int64_t index) {
  const char* at = static_cast<const char*>(base) + index * dtype_size(dtype);
  if (dtype == SAGEATTN_F32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, at, sizeof h);
  return dtype == SAGEATTN_F16 ? f16_to_float(h) : bf16_to_float(h);
}

inline void store_element(int32_t dtype, void* base, int64_t index, float x) {
  char* at = static_cast<char*>(base) + index * dtype_size(dtype);
  if (dtype == SAGEATTN_F32) {
    std::memcpy(at, &x, sizeof x);
    return;
  }
  const uint16_t h = dtype == SAGEATTN_F16 ? float_to_f16(x) : float_to_bf16(x);
  std::memcpy(at, &h, sizeof h);
}

// x rounded to a 16-bit type and back.
inline float round_to_dtype(int32_t dtype, float x) {
  if (dtype == SAGEATTN_F16) return f16_to_float(float_to_f16(x));
  if (dtype == SAGEATTN_BF16) return bf16_to_float(float_to_bf16(x));
  return x;
}

}  // namespace sageattn
