// 16 lanes in two AVX registers. See simd_generic.h for what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sageattn::cpu {
namespace {

struct Vf {
  __m256 lo, hi;
};
struct Vi {
  __m256i lo, hi;
};
struct Vm {
  __m256 lo, hi;
};

constexpr int kChannelBlock = 1;

inline Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vf v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline Vf splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline Vf add(Vf a, Vf b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vf sub(Vf a, Vf b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vf mul(Vf a, Vf b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vf fma(Vf a, Vf b, Vf c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vf max_or_b(Vf a, Vf b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vf round_to_int(Vf a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline Vf round_to_f16(Vf a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.lo, mode)),
          _mm256_cvtph_ps(_mm256_cvtps_ph(a.hi, mode))};
}
inline Vf load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Vi load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Vi load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Vi splat(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline Vi add(Vi a, Vi b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Vi sub(Vi a, Vi b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Vi bit_and(Vi a, Vi b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline Vi bit_or(Vi a, Vi b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline Vi max_int(Vi a, Vi b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
template <int n>
inline Vi shift_left(Vi a) {
  return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
template <int n>
inline Vi shift_right(Vi a) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
inline Vi add_dot_pairs(Vi acc, Vi a, Vi b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
inline Vi truncate(Vf a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
inline Vf to_float(Vi a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Vi bits(Vf a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Vf from_bits(Vi a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Vm less(Vf a, Vf b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline Vm equal(Vf a, Vf b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
inline Vm less(Vi a, Vi b) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
inline Vf select(Vm m, Vf a, Vf b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

}  // namespace
}  // namespace sageattn::cpu
