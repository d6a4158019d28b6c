// 16 lanes in one AVX-512 register. See simd_generic.h for what each function does.
#pragma once

// GCC 12 warns of its own intrinsics' deliberately undefined operands (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

namespace sageattn::cpu {
namespace {

struct Vf {
  __m512 x;
};
struct Vi {
  __m512i x;
};
struct Vm {
  __mmask16 x;
};

constexpr int kChannelBlock = 4;  // vectors of channels that the registers hold at once

inline Vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vf v) { _mm512_storeu_ps(p, v.x); }
inline Vf splat(float v) { return {_mm512_set1_ps(v)}; }
inline Vf add(Vf a, Vf b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vf sub(Vf a, Vf b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vf mul(Vf a, Vf b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vf fma(Vf a, Vf b, Vf c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Vf max_or_b(Vf a, Vf b) { return {_mm512_max_ps(a.x, b.x)}; }
inline Vf round_to_int(Vf a) {
  return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vf round_to_f16(Vf a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
inline Vf load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vi load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vi load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Vi splat(int32_t v) { return {_mm512_set1_epi32(v)}; }
inline Vi add(Vi a, Vi b) { return {_mm512_add_epi32(a.x, b.x)}; }
inline Vi sub(Vi a, Vi b) { return {_mm512_sub_epi32(a.x, b.x)}; }
inline Vi bit_and(Vi a, Vi b) { return {_mm512_and_si512(a.x, b.x)}; }
inline Vi bit_or(Vi a, Vi b) { return {_mm512_or_si512(a.x, b.x)}; }
inline Vi max_int(Vi a, Vi b) { return {_mm512_max_epi32(a.x, b.x)}; }
template <int n>
inline Vi shift_left(Vi a) {
  return {_mm512_slli_epi32(a.x, n)};
}
template <int n>
inline Vi shift_right(Vi a) {
  return {_mm512_srli_epi32(a.x, n)};
}
inline Vi add_dot_pairs(Vi acc, Vi a, Vi b) {
  return {_mm512_add_epi32(acc.x, _mm512_madd_epi16(a.x, b.x))};
}
inline Vi truncate(Vf a) { return {_mm512_cvttps_epi32(a.x)}; }
inline Vf to_float(Vi a) { return {_mm512_cvtepi32_ps(a.x)}; }
inline Vi bits(Vf a) { return {_mm512_castps_si512(a.x)}; }
inline Vf from_bits(Vi a) { return {_mm512_castsi512_ps(a.x)}; }
inline Vm less(Vf a, Vf b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ)}; }
inline Vm equal(Vf a, Vf b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_EQ_OQ)}; }
inline Vm less(Vi a, Vi b) { return {_mm512_cmplt_epi32_mask(a.x, b.x)}; }
inline Vf select(Vm m, Vf a, Vf b) { return {_mm512_mask_blend_ps(m.x, b.x, a.x)}; }

}  // namespace
}  // namespace sageattn::cpu
