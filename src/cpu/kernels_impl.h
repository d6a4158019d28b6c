// The inner loops, written once over the vector operations of a simd_*.h that the including file
// has chosen. docs/numerics.md, sections 6 and 7, states what they compute.
//
// No header guard: each kernels_<isa>.cpp includes it once, and everything but the table has
// internal linkage, so that code for one instruction set can never be linked into another.

#include <algorithm>
#include <limits>

#include "src/cpu/kernels.h"

namespace sageattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kStep = 32;       // keys a tensor-core step, channels a step of FP8 scores
constexpr int kMaxVectors = 8;  // b_k / kLanes
constexpr int32_t kExponentMask = 0x7f800000;

constexpr int32_t kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ln(2)^k / k!, k = 0 .. 7.
constexpr float kExp2[8] = {1.0f,
                            0.6931471805599453f,
                            0.24022650695910072f,
                            0.05550410866482158f,
                            0.009618129107628477f,
                            0.0013333558146428443f,
                            0.00015403530393381608f,
                            0.000015252733804059841f};

// E(x) of docs/numerics.md.
inline Vf exp2(Vf x) {
  const Vf n = round_to_int(x);
  const Vf r = sub(x, n);
  Vf y = splat(kExp2[7]);
  for (int k = 6; k >= 0; --k) y = fma(y, r, splat(kExp2[k]));
  const Vf power = from_bits(shift_left<23>(add(truncate(n), splat(int32_t{127}))));
  return select(less(x, splat(-126.0f)), splat(0.0f), mul(y, power));
}

inline float exp2(float x) {
  float y[kLanes];
  store(y, exp2(splat(x)));
  return y[0];
}

// Lane r += lane r + 8, then + 4, + 2, + 1.
inline float fold(Vf v) {
  float x[kLanes];
  store(x, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int r = 0; r < half; ++r) x[r] += x[r + half];
  }
  return x[0];
}

inline float fma_scalar(float a, float b, float c) {
  float x[kLanes];
  store(x, fma(splat(a), splat(b), splat(c)));
  return x[0];
}

inline float fold_max(Vf v) {
  float x[kLanes];
  store(x, v);
  return *std::max_element(x, x + kLanes);
}

// ---- Formats ----

// x >= 0 rounded to `mantissa` fraction bits, to multiples of `subnormal_step` below `min_normal`.
template <int mantissa>
inline Vf round_float8(Vf x, float min_normal, float subnormal_step) {
  constexpr int drop = 23 - mantissa;
  const Vi u = bits(x);
  const Vi tie = bit_and(shift_right<drop>(u), splat(int32_t{1}));
  const Vi half_less_one = splat((int32_t{1} << (drop - 1)) - 1);
  const Vf normal =
      from_bits(bit_and(add(u, add(half_less_one, tie)), splat(~((int32_t{1} << drop) - 1))));
  const Vf shift = splat(subnormal_step * 0x1p23f);
  const Vf subnormal = sub(add(x, shift), shift);
  return select(less(x, splat(min_normal)), subnormal, normal);
}

inline Vf round_p(PFormat format, Vf p) {
  switch (format) {
    case PFormat::kE4M3:
      return round_float8<3>(p, 0x1p-6f, 0x1p-9f);
    case PFormat::kE5M2:
      return round_float8<2>(p, 0x1p-14f, 0x1p-16f);
    case PFormat::kI8:
      return round_to_int(p);
    case PFormat::kF16:
      return round_to_f16(p);
  }
  return p;
}

// The power of two of an FP8 value's exponent field: a subnormal has that of the least normal, a
// zero has none.
inline Vf exponent_power(Vf value, float min_normal) {
  const Vf power =
      from_bits(max_int(bit_and(bits(value), splat(kExponentMask)), bits(splat(min_normal))));
  return select(equal(value, splat(0.0f)), splat(0.0f), power);
}

inline float min_normal_of(PFormat format) { return format == PFormat::kE5M2 ? 0x1p-14f : 0x1p-6f; }

template <int mantissa>
inline void expand_float8(const uint8_t* codes, int64_t count, float* values, float* powers) {
  constexpr int bias = mantissa == 3 ? 7 : 15;
  const Vf rescale = splat(mantissa == 3 ? 0x1p120f : 0x1p112f);
  const float min_normal = mantissa == 3 ? 0x1p-6f : 0x1p-14f;
  static_assert(127 - bias == (mantissa == 3 ? 120 : 112));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vi code = load_u8(codes + i);
    const Vi magnitude = bit_and(code, splat(int32_t{0x7f}));
    const Vf value = mul(from_bits(shift_left<23 - mantissa>(magnitude)), rescale);
    const Vi sign = shift_left<24>(bit_and(code, splat(int32_t{0x80})));
    store(values + i, from_bits(bit_or(bits(value), sign)));
    store(powers + i, exponent_power(value, min_normal));
  }
}

void expand(PFormat format, const void* codes, int64_t count, float* values, float* powers) {
  switch (format) {
    case PFormat::kE4M3:
      return expand_float8<3>(static_cast<const uint8_t*>(codes), count, values, powers);
    case PFormat::kE5M2:
      return expand_float8<2>(static_cast<const uint8_t*>(codes), count, values, powers);
    case PFormat::kI8:
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<const int8_t*>(codes)[i];
      return;
    case PFormat::kF16:
      for (int64_t i = 0; i < count; i += kLanes) {
        store(values + i, load_f16(static_cast<const uint16_t*>(codes) + i));
      }
      return;
  }
}

// ---- Accumulation models ----

// The FP8 tensor core on `blocks` vectors of accumulators: see docs/numerics.md, QMMA13. Powers of
// two stand for exponents, so that the largest exponent is a maximum of products.
template <int blocks>
inline void tensor_fp8_step(const float* p, const float* p_powers, const float* v,
                            const float* v_powers, int64_t stride, float* acc) {
  Vf power[blocks], unit[blocks], sum_unit[blocks], a[blocks];
  Vi sum[blocks];
  for (int b = 0; b < blocks; ++b) {
    a[b] = load(acc + b * kLanes);
    const Vf least_normal = splat(0x1p-126f);
    const Vf own =
        from_bits(max_int(bit_and(bits(a[b]), splat(kExponentMask)), bits(least_normal)));
    power[b] = max_or_b(own, splat(0x1p-100f));
  }
  for (int k = 0; k < kStep; ++k) {
    const Vf pk = splat(p_powers[k]);
    for (int b = 0; b < blocks; ++b) {
      power[b] = max_or_b(mul(pk, load(v_powers + k * stride + b * kLanes)), power[b]);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    // 2^(13 - E) and 2^(E - 13): the grid that every addend is truncated to.
    const Vi e = bits(power[b]);
    unit[b] = from_bits(sub(splat(int32_t{(127 + 127 + 13) << 23}), e));
    sum_unit[b] = from_bits(sub(e, splat(int32_t{13 << 23})));
    sum[b] = truncate(mul(a[b], unit[b]));
  }
  for (int k = 0; k < kStep; ++k) {
    const Vf pk = splat(p[k]);
    for (int b = 0; b < blocks; ++b) {
      const Vf product = mul(pk, load(v + k * stride + b * kLanes));
      sum[b] = add(sum[b], truncate(mul(product, unit[b])));
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const Vi kept = bit_and(bits(to_float(sum[b])), splat(~((int32_t{1} << 10) - 1)));
    store(acc + b * kLanes, mul(from_bits(kept), sum_unit[b]));
  }
}

void fp8_step(const float* p, const float* p_powers, const float* v, const float* v_powers,
              int64_t v_stride, float* acc) {
  tensor_fp8_step<1>(p, p_powers, v, v_powers, v_stride, acc);
}

// acc = fma(p, v, acc) over `keys` keys, starting from `from`.
template <int blocks>
inline void chain(const float* p, const float* v, int keys, int64_t stride, Vf (&sum)[blocks]) {
  for (int k = 0; k < keys; ++k) {
    const Vf pk = splat(p[k]);
    for (int b = 0; b < blocks; ++b) {
      sum[b] = fma(pk, load(v + k * stride + b * kLanes), sum[b]);
    }
  }
}

// One row's P of `keys` keys times V, onto `blocks` vectors of acc.
template <int blocks>
inline void accumulate_block(const AttendTile& t, const float* p, const float* p_powers,
                             const float* v, const float* v_powers, int keys, float* acc) {
  const int64_t stride = t.channels;
  if (t.pv_model == PvModel::kTensorFp8) {
    for (int k = 0; k < keys; k += kStep) {
      tensor_fp8_step<blocks>(p + k, p_powers + k, v + k * stride, v_powers + k * stride, stride,
                              acc);
    }
    return;
  }
  Vf a[blocks];
  for (int b = 0; b < blocks; ++b) a[b] = load(acc + b * kLanes);
  if (t.pv_model == PvModel::kChainF32) {
    chain<blocks>(p, v, keys, stride, a);
  } else {
    const int step = t.pv_model == PvModel::kF16 ? t.f16_step : kStep;
    for (int k = 0; k < keys; k += step) {
      Vf sum[blocks];
      for (int b = 0; b < blocks; ++b) sum[b] = splat(0.0f);
      chain<blocks>(p + k, v + k * stride, step, stride, sum);
      for (int b = 0; b < blocks; ++b) {
        a[b] = add(a[b], sum[b]);
        if (t.pv_model == PvModel::kF16) a[b] = round_to_f16(a[b]);
      }
    }
  }
  for (int b = 0; b < blocks; ++b) store(acc + b * kLanes, a[b]);
}

inline void accumulate(const AttendTile& t, const float* p, const float* p_powers, int first_key,
                       int keys, float* acc) {
  const int64_t at = int64_t{first_key} * t.channels;
  int c = 0;
  for (; c + kChannelBlock * kLanes <= t.channels; c += kChannelBlock * kLanes) {
    accumulate_block<kChannelBlock>(t, p, p_powers, t.v_values + at + c, t.v_powers + at + c, keys,
                                    acc + c);
  }
  for (; c < t.channels; c += kLanes) {
    accumulate_block<1>(t, p, p_powers, t.v_values + at + c, t.v_powers + at + c, keys, acc + c);
  }
}

// ---- One row ----

template <int vectors>
inline void integer_scores(const AttendTile& t, int row, float* a) {
  const int32_t* q = t.q_pairs + int64_t{row} * t.pairs;
  Vi sum[vectors];
  for (int b = 0; b < vectors; ++b) sum[b] = splat(int32_t{0});
  for (int c = 0; c < t.pairs; ++c) {
    const Vi qc = splat(q[c]);
    const int32_t* k = t.k_pairs + int64_t{c} * t.b_k;
    for (int b = 0; b < vectors; ++b) sum[b] = add_dot_pairs(sum[b], qc, load(k + b * kLanes));
  }
  for (int b = 0; b < vectors; ++b) store(a + b * kLanes, to_float(sum[b]));
}

inline void fp8_scores(const AttendTile& t, int row, float* a) {
  std::fill(a, a + t.b_k, 0.0f);
  const int64_t at = int64_t{row} * t.qk_channels;
  for (int c = 0; c < t.qk_channels; c += kStep) {
    for (int j = 0; j < t.b_k; j += kLanes) {
      const int64_t k = int64_t{c} * t.b_k + j;
      tensor_fp8_step<1>(t.q_values + at + c, t.q_powers + at + c, t.k_values + k, t.k_powers + k,
                         t.b_k, a + j);
    }
  }
}

void flush(const AttendTile& t, int row, const float* v_scale, const float* v_mean) {
  float& lg = t.group_sum[row];
  if (lg == 0.0f) return;  // nothing was accumulated; NaN goes on
  const float m = t.row_max[row];
  const float mf = t.flushed_max[row];
  const float factor = mf == -kInfinity ? 0.0f : exp2(mf - (m == -kInfinity ? 0.0f : m));
  float* acc = t.acc + int64_t{row} * t.channels;
  float* out = t.out + int64_t{row} * t.channels;
  for (int c = 0; c < t.channels; c += kLanes) {
    Vf update = load(acc + c);
    if (t.grouped) {
      update = fma(update, load(v_scale + c), mul(splat(lg), load(v_mean + c)));
    }
    store(out + c, fma(load(out + c), splat(factor), update));
    store(acc + c, splat(0.0f));
  }
  t.row_sum[row] = fma_scalar(t.row_sum[row], factor, lg);
  t.flushed_max[row] = m;
  lg = 0.0f;
}

// Scores of one row in base 2 in place of a[]'s sums, then the running maximum: returns what to add
// to a score to get the exponent of its P.
template <int vectors>
inline float row_softmax(const AttendTile& t, int row, float* a) {
  const Vi first = splat(t.visible[2 * row]);
  const Vi end = splat(t.visible[2 * row + 1]);
  const Vf q_scale = splat(t.q_scale[row]);
  Vf largest = splat(-kInfinity);
  for (int b = 0; b < vectors; ++b) {
    const int j = b * kLanes;
    const Vf f = mul(q_scale, load(t.k_scale + j));
    Vf s;
    if (t.ds != nullptr) {
      s = fma(load(a + j), f, mul(load(t.ds + j), splat(t.ds_scale)));
    } else {
      s = mul(load(a + j), f);
    }
    store(a + j, s);
    const Vi key = add(load(kIota), splat(j));
    const Vm hidden_before = less(key, first);
    const Vm seen = less(key, end);
    s = select(hidden_before, splat(-kInfinity), select(seen, s, splat(-kInfinity)));
    largest = max_or_b(s, largest);  // a NaN score leaves the maximum as it is
  }
  const float m = t.row_max[row];
  const float grown = std::max(m, fold_max(largest));
  const float n = grown == -kInfinity ? 0.0f : grown;
  if (grown != m && m != -kInfinity) {  // else alpha is 1, or what it would scale is 0
    const Vf alpha = splat(exp2(m - n));
    float* acc = t.acc + int64_t{row} * t.channels;
    for (int c = 0; c < t.channels; c += kLanes) {
      store(acc + c, mul(load(acc + c), alpha));
    }
    t.group_sum[row] *= exp2(m - n);
  }
  t.row_max[row] = grown;
  return t.p_log2 - n;
}

template <int vectors>
inline void attend_row(const AttendTile& t, int row) {
  float* a = t.scratch;  // scores, then P
  float* p_powers = t.scratch + t.b_k;
  const int32_t first = t.visible[2 * row];
  const int32_t end = t.visible[2 * row + 1];
  const bool sees_any = first < end;
  float c0 = 0.0f;
  if (sees_any) {
    if (t.fp8_scores) {
      fp8_scores(t, row, a);
    } else {
      integer_scores<vectors>(t, row, a);
    }
    c0 = row_softmax<vectors>(t, row, a);
  }
  const float min_normal = min_normal_of(t.p_format);
  int flush_at = t.flush_at;
  int64_t group = 0;
  for (int start = 0; start < t.b_k; start += t.chunk) {
    if (sees_any) {
      Vf sum = splat(0.0f);
      for (int j = start; j < start + t.chunk; j += kLanes) {
        Vf x = add(load(a + j), splat(c0));
        // Rounding can lift huge scores above their maximum; NaN stays.
        x = select(less(splat(t.p_log2), x), splat(t.p_log2), x);
        const Vi key = add(load(kIota), splat(j));
        Vf p = select(less(key, splat(end)), exp2(x), splat(0.0f));
        p = select(less(key, splat(first)), splat(0.0f), p);
        const Vf rounded = round_p(t.p_format, p);
        sum = add(sum, t.sum_rounded ? rounded : p);
        store(a + j, rounded);
        if (t.pv_model == PvModel::kTensorFp8) {
          store(p_powers + j, exponent_power(rounded, min_normal));
        }
      }
      t.group_sum[row] += fold(sum);
      accumulate(t, a + start, p_powers + start, start, t.chunk, t.acc + int64_t{row} * t.channels);
    }
    if (start + t.chunk == flush_at) {
      flush(t, row, t.v_scale + group * t.v_scale_stride, t.v_mean + group * t.v_mean_stride);
      ++group;
      flush_at = t.flush_every > 0 ? flush_at + t.flush_every : t.b_k + 1;
    }
  }
}

// Rows that see nothing of this tile still flush: what they hold belongs to the group that ends.
void attend(const AttendTile& t) {
  for (int row = 0; row < t.rows; ++row) {
    if (t.b_k == 64) {
      attend_row<4>(t, row);
    } else {
      attend_row<kMaxVectors>(t, row);
    }
  }
}

void project(const float* x, const float* k, int dim, int keys, float* out) {
  for (int j = 0; j < keys; j += kLanes) {
    Vf sum[1] = {splat(0.0f)};
    chain<1>(x, k + j, dim, keys, sum);
    store(out + j, sum[0]);
  }
}

// ---- EXACT ----
// Plain element-wise fp64 loops: whatever the vector width, the same bits.

void exact_scores(const double* q, const double* k, int dim, int keys, double* s) {
  std::fill(s, s + keys, 0.0);
  for (int c = 0; c < dim; ++c) {
    const double qc = q[c];
    const double* kc = k + int64_t{c} * keys;
    for (int j = 0; j < keys; ++j) s[j] += qc * kc[j];
  }
}

void exact_accumulate(const double* p, const double* v, int keys, int dim, double* o) {
  for (int j = 0; j < keys; ++j) {
    const double pj = p[j];
    const double* vj = v + int64_t{j} * dim;
    for (int c = 0; c < dim; ++c) o[c] += pj * vj[c];
  }
}

}  // namespace
}  // namespace sageattn::cpu

#define SAGEATTN_KERNELS(isa_name) \
  { isa_name, attend, flush, expand, project, exact_scores, exact_accumulate, fp8_step }
