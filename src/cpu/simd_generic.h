// 16 lanes in plain C++: the definition of the vector operations. The AVX headers offer the same
// names and give the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "src/cpu/formats.h"

namespace sageattn::cpu {
namespace {

struct Vf {
  float x[16];
};
struct Vi {
  int32_t x[16];
};
struct Vm {
  bool x[16];
};

constexpr int kChannelBlock = 1;

template <typename V, typename F>
inline V lanes(F f) {
  V v;
  for (int i = 0; i < 16; ++i) v.x[i] = f(i);
  return v;
}
// Wrapping arithmetic: signed overflow would be undefined.
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline uint32_t raw(int32_t x) { return static_cast<uint32_t>(x); }

inline Vf load(const float* p) {
  return lanes<Vf>([&](int i) { return p[i]; });
}
inline void store(float* p, Vf v) {
  for (int i = 0; i < 16; ++i) p[i] = v.x[i];
}
inline Vf splat(float v) {
  return lanes<Vf>([&](int) { return v; });
}
inline Vf add(Vf a, Vf b) {
  return lanes<Vf>([&](int i) { return a.x[i] + b.x[i]; });
}
inline Vf sub(Vf a, Vf b) {
  return lanes<Vf>([&](int i) { return a.x[i] - b.x[i]; });
}
inline Vf mul(Vf a, Vf b) {
  return lanes<Vf>([&](int i) { return a.x[i] * b.x[i]; });
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return lanes<Vf>([&](int i) { return std::fma(a.x[i], b.x[i], c.x[i]); });
}
// The larger; b if either is NaN.
inline Vf max_or_b(Vf a, Vf b) {
  return lanes<Vf>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
// Half to even.
inline Vf round_to_int(Vf a) {
  return lanes<Vf>([&](int i) { return std::nearbyint(a.x[i]); });
}
inline Vf round_to_f16(Vf a) {
  return lanes<Vf>([&](int i) { return f16_to_float(float_to_f16(a.x[i])); });
}
inline Vf load_f16(const uint16_t* p) {
  return lanes<Vf>([&](int i) { return f16_to_float(p[i]); });
}
inline Vi load_u8(const uint8_t* p) {
  return lanes<Vi>([&](int i) { return int32_t{p[i]}; });
}
inline Vi load(const int32_t* p) {
  return lanes<Vi>([&](int i) { return p[i]; });
}
inline Vi splat(int32_t v) {
  return lanes<Vi>([&](int) { return v; });
}
inline Vi add(Vi a, Vi b) {
  return lanes<Vi>([&](int i) { return wrap(raw(a.x[i]) + raw(b.x[i])); });
}
inline Vi sub(Vi a, Vi b) {
  return lanes<Vi>([&](int i) { return wrap(raw(a.x[i]) - raw(b.x[i])); });
}
inline Vi bit_and(Vi a, Vi b) {
  return lanes<Vi>([&](int i) { return a.x[i] & b.x[i]; });
}
inline Vi bit_or(Vi a, Vi b) {
  return lanes<Vi>([&](int i) { return a.x[i] | b.x[i]; });
}
inline Vi max_int(Vi a, Vi b) {
  return lanes<Vi>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
template <int n>
inline Vi shift_left(Vi a) {
  return lanes<Vi>([&](int i) { return wrap(raw(a.x[i]) << n); });
}
template <int n>
inline Vi shift_right(Vi a) {
  return lanes<Vi>([&](int i) { return wrap(raw(a.x[i]) >> n); });
}
// acc plus the dot product of the two int16 halves of each lane.
inline Vi add_dot_pairs(Vi acc, Vi a, Vi b) {
  return lanes<Vi>([&](int i) {
    const auto lo = static_cast<int16_t>(a.x[i]) * static_cast<int16_t>(b.x[i]);
    const auto hi = static_cast<int16_t>(a.x[i] >> 16) * static_cast<int16_t>(b.x[i] >> 16);
    return acc.x[i] + lo + hi;
  });
}
// Toward zero. What does not fit in 31 bits, NaN too, gives the most negative number.
inline Vi truncate(Vf a) {
  return lanes<Vi>([&](int i) {
    return std::fabs(a.x[i]) < 0x1p31f ? static_cast<int32_t>(a.x[i]) : INT32_MIN;
  });
}
inline Vf to_float(Vi a) {
  return lanes<Vf>([&](int i) { return static_cast<float>(a.x[i]); });
}
inline Vi bits(Vf a) {
  return lanes<Vi>([&](int i) { return std::bit_cast<int32_t>(a.x[i]); });
}
inline Vf from_bits(Vi a) {
  return lanes<Vf>([&](int i) { return std::bit_cast<float>(a.x[i]); });
}
inline Vm less(Vf a, Vf b) {
  return lanes<Vm>([&](int i) { return a.x[i] < b.x[i]; });
}
inline Vm equal(Vf a, Vf b) {
  return lanes<Vm>([&](int i) { return a.x[i] == b.x[i]; });
}
inline Vm less(Vi a, Vi b) {
  return lanes<Vm>([&](int i) { return a.x[i] < b.x[i]; });
}
inline Vf select(Vm m, Vf a, Vf b) {
  return lanes<Vf>([&](int i) { return m.x[i] ? a.x[i] : b.x[i]; });
}

}  // namespace
}  // namespace sageattn::cpu
