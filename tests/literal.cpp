#include "tests/literal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace sageattn_test {
namespace {

const float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();
const float kTiny = std::ldexp(1.0f, -100);

// Rounds x to a binary format with `mantissa` fraction bits and least normal exponent `min_exp`.
double round_to_grid(float x, int mantissa, int min_exp) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), min_exp);
  const double step = std::ldexp(1.0, exponent - mantissa);
  return std::nearbyint(x / step) * step;
}

float overflow_to_infinity(double x, double largest) {
  if (std::fabs(x) > largest) return std::copysign(kInf, static_cast<float>(x));
  return static_cast<float>(x);
}

float saturate(double x, double largest) {
  if (std::fabs(x) > largest) return static_cast<float>(std::copysign(largest, x));
  return static_cast<float>(x);
}

}  // namespace

float round_fp16(float x) { return overflow_to_infinity(round_to_grid(x, 10, -14), 65504); }

float round_bf16(float x) {
  return overflow_to_infinity(round_to_grid(x, 7, -126), std::ldexp(255.0, 120));
}

float round_e4m3(float x) { return saturate(round_to_grid(x, 3, -6), 448); }

float round_e5m2(float x) { return saturate(round_to_grid(x, 2, -14), 57344); }

float round_dtype(float x, int32_t dtype) {
  if (dtype == SAGEATTN_F16) return round_fp16(x);
  if (dtype == SAGEATTN_BF16) return round_bf16(x);
  return x;
}

// ---------------------------------------------------------------------------------------------
// Section 1: tiles and lane maps.
// ---------------------------------------------------------------------------------------------
namespace {

struct TileShape {
  int b_q, rows_a_warp, b_k;
};

TileShape tile_shape(int32_t kernel, int head_dim, int head_dim_v) {
  const int d = std::max(head_dim, head_dim_v);
  if (kernel == SAGEATTN_KERNEL_WGMMA) return {64, 16, 128};
  if (d <= 128) return {128, 32, 64};
  return {64, 16, 64};
}

// A number that tells the Q groups of one (sequence, head) apart.
int q_group(int32_t granularity, TileShape tile, int query) {
  const int block = query / tile.b_q;
  const int i = query % tile.b_q;
  switch (granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return block * tile.b_q + (i / tile.rows_a_warp) * 8 + i % 8;
    case SAGEATTN_GRANULARITY_PER_WARP:
      return block * tile.b_q + i / tile.rows_a_warp;
    case SAGEATTN_GRANULARITY_PER_BLOCK:
      return block;
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return query;
    case SAGEATTN_GRANULARITY_PER_TENSOR:
      return 0;
    default:
      throw std::invalid_argument("granularity");
  }
}

int k_group(int32_t granularity, TileShape tile, int key) {
  const int block = key / tile.b_k;
  const int t = key % tile.b_k;
  switch (granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return block * tile.b_k + (t % 8) / 2;
    case SAGEATTN_GRANULARITY_PER_WARP:
    case SAGEATTN_GRANULARITY_PER_BLOCK:
      return block;
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return key;
    case SAGEATTN_GRANULARITY_PER_TENSOR:
      return 0;
    default:
      throw std::invalid_argument("granularity");
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Section 2: statistics.
// ---------------------------------------------------------------------------------------------

float literal_mean(const std::vector<float>& x) {
  const int n = static_cast<int>(x.size());
  if (n == 0) return 0;

  std::vector<float> chunk_sums;
  for (int begin = 0; begin < n; begin += 64) {
    float lane[16] = {};
    for (int r = 0; r < 16; ++r) {
      for (int t = r; t < 64; t += 16) {
        if (begin + t < n) lane[r] += x[begin + t];
      }
    }
    for (int fold = 8; fold >= 1; fold /= 2) {
      for (int r = 0; r < fold; ++r) lane[r] += lane[r + fold];
    }
    chunk_sums.push_back(lane[0]);
  }

  float lane[32] = {};
  const int chunks = static_cast<int>(chunk_sums.size());
  for (int r = 0; r < 32; ++r) {
    for (int c = r; c < chunks; c += 32) lane[r] += chunk_sums[c];
  }
  for (int fold = 16; fold >= 1; fold /= 2) {
    for (int r = 0; r < fold; ++r) lane[r] += lane[r + fold];
  }
  return lane[0] / static_cast<float>(n);
}

namespace {

// Extends the absmax of a group by one element.
float extend_absmax(float absmax, float x) {
  if (std::isnan(absmax) || !std::isfinite(x)) return kNaN;
  return std::max(absmax, std::fabs(x));
}

struct Matrix {
  int rows = 0, cols = 0;
  std::vector<float> a;

  Matrix() = default;
  Matrix(int r, int c) : rows(r), cols(c), a(static_cast<size_t>(r) * c) {}
  float& at(int r, int c) { return a[static_cast<size_t>(r) * cols + c]; }
  float at(int r, int c) const { return a[static_cast<size_t>(r) * cols + c]; }
};

Matrix take_head(const std::vector<float>& x, int tokens, int heads, int head, int channels) {
  Matrix m(tokens, channels);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < channels; ++c) {
      m.at(t, c) = x[(static_cast<size_t>(t) * heads + head) * channels + c];
    }
  }
  return m;
}

// Mean of each channel over rows begin .. end-1.
std::vector<float> row_means(const Matrix& x, int begin, int end) {
  std::vector<float> means;
  for (int c = 0; c < x.cols; ++c) {
    std::vector<float> column;
    for (int t = begin; t < end; ++t) column.push_back(x.at(t, c));
    means.push_back(literal_mean(column));
  }
  return means;
}

// ---------------------------------------------------------------------------------------------
// Section 3: smoothing, rotation.
// ---------------------------------------------------------------------------------------------

void hadamard_rows(Matrix& x) {
  int n = 1;
  while (n < x.cols) n *= 2;
  Matrix y(x.rows, n);
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (int row = 0; row < x.rows; ++row) {
    for (int c = 0; c < x.cols; ++c) {
      const uint32_t hash = static_cast<uint32_t>(c + 1) * 0x9E3779B1u;
      y.at(row, c) = (hash >> 31) != 0 ? -x.at(row, c) : x.at(row, c);
    }
    for (int h = 1; h < n; h *= 2) {
      for (int c = 0; c < n; ++c) {
        if ((c & h) != 0) continue;
        const float a = y.at(row, c);
        const float b = y.at(row, c + h);
        y.at(row, c) = a + b;
        y.at(row, c + h) = a - b;
      }
    }
    for (int c = 0; c < n; ++c) y.at(row, c) *= factor;
  }
  x = y;
}

// `queries` are the heads that read `keys`.
void smoothattn(std::vector<Matrix>& queries, Matrix& keys) {
  for (int c = 0; c < keys.cols; ++c) {
    float mq = 0;
    for (const Matrix& q : queries) {
      for (int i = 0; i < q.rows; ++i) mq = extend_absmax(mq, q.at(i, c));
    }
    float mk = 0;
    for (int j = 0; j < keys.rows; ++j) mk = extend_absmax(mk, keys.at(j, c));

    float f;
    if (std::isnan(mq) || std::isnan(mk)) {
      f = kNaN;
    } else if (mq < kTiny || mk < kTiny) {
      f = 1;
    } else {
      f = std::sqrt(mq) / std::sqrt(mk);
    }
    for (Matrix& q : queries) {
      for (int i = 0; i < q.rows; ++i) q.at(i, c) /= f;
    }
    for (int j = 0; j < keys.rows; ++j) keys.at(j, c) *= f;
  }
}

// ---------------------------------------------------------------------------------------------
// Section 4: quantization.
// ---------------------------------------------------------------------------------------------

enum class Codes { I8, I4, E4M3, E4M3Small, E5M2 };

float largest_code(Codes codes) {
  switch (codes) {
    case Codes::I8:
      return 127;
    case Codes::I4:
      return 7;
    case Codes::E4M3:
      return 448;
    case Codes::E4M3Small:
      return 2.25f;
    case Codes::E5M2:
      return 57344;
  }
  return 0;
}

float encode(Codes codes, float x) {
  switch (codes) {
    case Codes::I8:
      return std::clamp(std::nearbyint(x), -127.0f, 127.0f);
    case Codes::I4:
      return std::clamp(std::nearbyint(x), -7.0f, 7.0f);
    case Codes::E4M3:
    case Codes::E4M3Small:
      return round_e4m3(x);
    case Codes::E5M2:
      return round_e5m2(x);
  }
  return 0;
}

bool has_codes(float absmax) { return !std::isnan(absmax) && absmax >= kTiny; }

// Quantizes the rows of x; group[r] is the group of row r. Returns each row's scale.
std::vector<float> quantize_rows(Matrix& x, const std::vector<int>& group, Codes codes) {
  int groups = 0;
  for (int g : group) groups = std::max(groups, g + 1);
  std::vector<float> absmax(groups, 0.0f);
  for (int r = 0; r < x.rows; ++r) {
    for (int c = 0; c < x.cols; ++c) {
      absmax[group[r]] = extend_absmax(absmax[group[r]], x.at(r, c));
    }
  }

  const float m = largest_code(codes);
  std::vector<float> scale(x.rows);
  for (int r = 0; r < x.rows; ++r) {
    const float a = absmax[group[r]];
    if (has_codes(a)) {
      scale[r] = a / m;
    } else {
      scale[r] = std::isnan(a) ? kNaN : 0.0f;
    }
    for (int c = 0; c < x.cols; ++c) {
      x.at(r, c) = has_codes(a) ? encode(codes, x.at(r, c) * (m / a)) : 0.0f;
    }
  }
  return scale;
}

// Quantizes rows begin .. end-1 of channel c of V'. Returns their scale.
float quantize_v(Matrix& v, int c, int begin, int end, int32_t pv_format, int32_t pv_accum) {
  float a = 0;
  for (int j = begin; j < end; ++j) a = extend_absmax(a, v.at(j, c));
  if (!has_codes(a)) {
    for (int j = begin; j < end; ++j) v.at(j, c) = 0;
    return std::isnan(a) ? kNaN : 0.0f;
  }

  if (pv_format == SAGEATTN_PV_F16) {
    int e = -100;
    while (std::ldexp(static_cast<double>(a), -e) > 512) ++e;
    for (int j = begin; j < end; ++j) v.at(j, c) = round_fp16(std::ldexp(v.at(j, c), -e));
    return std::ldexp(1.0f, e);
  }

  Codes codes = Codes::E4M3;
  if (pv_format == SAGEATTN_PV_E4M3 && pv_accum == SAGEATTN_PV_ACCUM_F16) codes = Codes::E4M3Small;
  if (pv_format == SAGEATTN_PV_E5M2) codes = Codes::E5M2;
  if (pv_format == SAGEATTN_PV_I8) codes = Codes::I8;
  const float m = largest_code(codes);
  for (int j = begin; j < end; ++j) v.at(j, c) = encode(codes, v.at(j, c) * (m / a));
  return a / m;
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Section 7: accumulation models.
// ---------------------------------------------------------------------------------------------

float literal_fp8_step(const float* p, const float* v, int n, float acc, bool e5m2) {
  const int least = e5m2 ? -14 : -6;
  if (std::isnan(acc)) return kNaN;
  for (int j = 0; j < n; ++j) {
    if (std::isnan(p[j])) return kNaN;
  }

  // 1. The largest exponent of the addends.
  bool any = false;
  int e = 0;
  for (int j = 0; j < n; ++j) {
    if (p[j] == 0 || v[j] == 0) continue;
    const int exponent = std::max(std::ilogb(p[j]), least) + std::max(std::ilogb(v[j]), least);
    e = any ? std::max(e, exponent) : exponent;
    any = true;
  }
  if (acc != 0) {
    const int exponent = std::max(std::ilogb(acc), -126);
    e = any ? std::max(e, exponent) : exponent;
    any = true;
  }
  if (!any) return 0;
  e = std::max(e, -100);

  // 2. Addends in units of 2^(e - 13), truncated toward zero; the products are exact in fp64.
  // 3. Their exact sum.
  const double unit_inverse = std::ldexp(1.0, 13 - e);
  int64_t sum = 0;
  for (int j = 0; j < n; ++j) {
    sum += static_cast<int64_t>(static_cast<double>(p[j]) * v[j] * unit_inverse);
  }
  sum += static_cast<int64_t>(acc * unit_inverse);

  // Truncated toward zero to 13 fraction bits: to 14 significant bits.
  int64_t magnitude = sum < 0 ? -sum : sum;
  int64_t dropped = 1;
  while (magnitude / dropped >= (int64_t{1} << 14)) dropped *= 2;
  magnitude = magnitude / dropped * dropped;
  const double result = std::ldexp(static_cast<double>(magnitude), e - 13);
  return static_cast<float>(sum < 0 ? -result : result);
}

float literal_fp32_step(const float* p, const float* v, int n, float acc) {
  for (int j = 0; j < n; ++j) acc = std::fma(p[j], v[j], acc);
  return acc;
}

float literal_fp16_step(const float* p, const float* v, int n, float acc) {
  const float t = literal_fp32_step(p, v, n, 0);
  return round_fp16(acc + t);
}

float literal_i8_step(const float* p, const float* v, int n, float acc) {
  int64_t sum = 0;
  for (int j = 0; j < n; ++j) {
    if (std::isnan(p[j])) return kNaN;
    sum += static_cast<int64_t>(p[j]) * static_cast<int64_t>(v[j]);
  }
  return acc + static_cast<float>(sum);
}

// ---------------------------------------------------------------------------------------------
// Section 6: softmax and output.
// ---------------------------------------------------------------------------------------------

float literal_exp2(float x) {
  if (std::isnan(x)) return kNaN;
  if (x < -126) return 0;
  static const std::vector<float> coefficient = [] {
    std::vector<float> c;
    long double term = 1;
    for (int k = 0; k < 8; ++k) {
      c.push_back(static_cast<float>(term));
      term *= 0.693147180559945309417232121458176568L / (k + 1);
    }
    return c;
  }();
  const float n = std::nearbyint(x);
  const float r = x - n;
  float y = coefficient[7];
  for (int k = 6; k >= 0; --k) y = std::fma(y, r, coefficient[k]);
  return std::ldexp(y, static_cast<int>(std::min(n, 1000.0f)));
}

namespace {

bool sees(MaskSpec mask, int qo_len, int kv_len, int i, int j) {
  const int diagonal = i + kv_len - qo_len;
  switch (mask.kind) {
    case SAGEATTN_MASK_NONE:
      return true;
    case SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT:
      return j <= diagonal;
    case SAGEATTN_MASK_CAUSAL_TOP_LEFT:
      return j <= i;
    case SAGEATTN_MASK_WINDOW:
      return (mask.left < 0 || -mask.left <= j - diagonal) &&
             (mask.right < 0 || j - diagonal <= mask.right);
    default:
      throw std::invalid_argument("mask");
  }
}

// Sum of x[0 .. n-1] as the row sum adds it.
float row_sum(const float* x, int n) {
  float lane[16] = {};
  for (int r = 0; r < 16; ++r) {
    for (int t = r; t < n; t += 16) lane[r] += x[t];
  }
  for (int fold = 8; fold >= 1; fold /= 2) {
    for (int r = 0; r < fold; ++r) lane[r] += lane[r + fold];
  }
  return lane[0];
}

float p_factor(int32_t pv_format) {
  switch (pv_format) {
    case SAGEATTN_PV_E4M3:
      return 448;
    case SAGEATTN_PV_E5M2:
      return 57344;
    case SAGEATTN_PV_I8:
      return 127;
    case SAGEATTN_PV_F16:
      return 1;
    default:
      throw std::invalid_argument("pv_format");
  }
}

float round_p(int32_t pv_format, float p) {
  if (std::isnan(p)) return p;
  switch (pv_format) {
    case SAGEATTN_PV_E4M3:
      return round_e4m3(p);
    case SAGEATTN_PV_E5M2:
      return round_e5m2(p);
    case SAGEATTN_PV_I8:
      return std::min(std::nearbyint(p), 127.0f);
    default:
      return round_fp16(p);
  }
}

// One step of at most 32 keys (16 for fp16 accumulators with F16).
float accumulate(const sageattn_plan_info& info, const float* p, const float* v, int n, float acc) {
  for (int j = 0; j < n; ++j) {
    if (std::isnan(p[j])) return kNaN;
  }
  const bool fp8 = info.pv_format == SAGEATTN_PV_E4M3 || info.pv_format == SAGEATTN_PV_E5M2;
  if (info.pv_format == SAGEATTN_PV_I8) return literal_i8_step(p, v, n, acc);
  if (info.pv_accum == SAGEATTN_PV_ACCUM_F16) return literal_fp16_step(p, v, n, acc);
  if (fp8 && info.pv_accum != SAGEATTN_PV_ACCUM_F32 && info.pv_model != SAGEATTN_PV_MODEL_HMMA) {
    return literal_fp8_step(p, v, n, acc, info.pv_format == SAGEATTN_PV_E5M2);
  }
  return literal_fp32_step(p, v, n, acc);
}

// The operands of one query head, after sections 3 and 4.
struct Head {
  const sageattn_plan_info* info;
  TileShape tile;
  int qo_len, kv_len, interval;
  MaskSpec mask;
  Matrix original_q;
  Matrix q, k;                // codes
  std::vector<float> sq, sk;  // scales of rows
  Matrix ds;                  // [q tile][key], with smooth_q
  std::vector<float> kbar;    // zeros without smooth_k
  Matrix v_codes;             // [channel][key]
  Matrix v_scale;             // [promotion group, or 1][channel]
  Matrix v_mean;              // [promotion group, or 1][channel]
};

// Section 5: the product of codes.
float code_product(const Head& h, int i, int j) {
  const int n = h.q.cols;
  if (h.info->qk_format == SAGEATTN_QK_E4M3) {
    float acc = 0;
    for (int c = 0; c < n; c += 32) {
      acc =
          literal_fp8_step(&h.q.a[static_cast<size_t>(i) * n + c],
                           &h.k.a[static_cast<size_t>(j) * n + c], std::min(32, n - c), acc, false);
    }
    return acc;
  }
  int64_t sum = 0;
  for (int c = 0; c < n; ++c) {
    sum += static_cast<int64_t>(h.q.at(i, c)) * static_cast<int64_t>(h.k.at(j, c));
  }
  return static_cast<float>(sum);
}

void attend(const Head& h, int i, float* out, float* lse) {
  const sageattn_plan_info& info = *h.info;
  const bool smooth_q = info.smooth_q == SAGEATTN_SMOOTH_ON;
  const bool group_scaled =
      info.smooth_v == SAGEATTN_SMOOTH_V_GROUP || info.v_scale == SAGEATTN_V_SCALE_GROUP;
  const bool group_mean = info.smooth_v == SAGEATTN_SMOOTH_V_GROUP;
  const bool group_scale = info.v_scale == SAGEATTN_V_SCALE_GROUP;
  const bool accumulators_f16 = info.pv_accum == SAGEATTN_PV_ACCUM_F16;
  const int dv = info.head_dim_v;
  const int b_k = h.tile.b_k;
  const int chunk = h.interval != 0 ? std::min(b_k, h.interval) : b_k;
  const int step = accumulators_f16 && info.pv_format == SAGEATTN_PV_F16 ? 16 : 32;
  const float pm = p_factor(info.pv_format);
  const float log2_pm = static_cast<float>(std::log2(static_cast<double>(pm)));
  const float k0 = info.sm_scale * 1.44269504088896340735992468100189214f;

  float m = -kInf, mf = -kInf, n = 0;
  float lg = 0, l = 0;
  std::vector<float> acc(dv, 0.0f), o(dv, 0.0f);
  int g = 0;  // promotion group of the chunk at hand

  const auto flush = [&] {
    if (lg == 0) return;
    const float f = mf == -kInf ? 0.0f : literal_exp2(mf - n);
    for (int c = 0; c < dv; ++c) {
      if (group_scaled) {
        const float sv = h.v_scale.at(group_scale ? g : 0, c);
        const float vbar = group_mean ? h.v_mean.at(g, c) : 0.0f;
        o[c] = std::fma(o[c], f, std::fma(acc[c], sv, lg * vbar));
      } else {
        o[c] = std::fma(o[c], f, acc[c]);
      }
      acc[c] = 0;
    }
    l = std::fma(l, f, lg);
    lg = 0;
    mf = m;
  };

  for (int first = 0; first < h.kv_len; first += b_k) {
    const int keys = std::min(b_k, h.kv_len - first);
    std::vector<bool> visible(keys);
    std::vector<float> a(keys), f(keys), s(keys), p(keys), rounded(keys);
    // 1.
    float mt = m;
    for (int t = 0; t < keys; ++t) {
      const int j = first + t;
      visible[t] = sees(h.mask, h.qo_len, h.kv_len, i, j);
      if (!visible[t]) continue;
      a[t] = code_product(h, i, j);
      f[t] = (h.sq[i] * k0) * h.sk[j];
      s[t] = smooth_q ? std::fma(a[t], f[t], h.ds.at(i / h.tile.b_q, j) * k0) : a[t] * f[t];
      if (s[t] > mt) mt = s[t];
    }
    n = mt == -kInf ? 0.0f : mt;
    // 2.
    const float alpha = m == -kInf ? 0.0f : literal_exp2(m - n);
    for (float& x : acc) x *= alpha;
    lg *= alpha;
    m = mt;
    // 3.
    const float c0 = log2_pm - n;
    for (int t = 0; t < keys; ++t) {
      if (!visible[t]) continue;
      const float x = s[t] + c0;
      p[t] = literal_exp2(x > log2_pm ? log2_pm : x);
      rounded[t] = round_p(info.pv_format, p[t]);
    }
    // 4.
    for (int begin = 0; begin < keys; begin += chunk) {
      const int end = std::min(begin + chunk, keys);
      g = h.interval != 0 ? (first + begin) / h.interval : 0;
      const std::vector<float>& summed = info.row_sum == SAGEATTN_ROW_SUM_P ? p : rounded;
      lg += row_sum(&summed[begin], end - begin);
      for (int c = 0; c < dv; ++c) {
        const float* codes = &h.v_codes.a[static_cast<size_t>(c) * h.kv_len];
        for (int t = begin; t < end; t += step) {
          acc[c] =
              accumulate(info, &rounded[t], codes + first + t, std::min(step, end - t), acc[c]);
        }
      }
      if (h.interval != 0 && (first + begin + chunk) % h.interval == 0) flush();
    }
  }
  flush();

  if (l == 0) {
    for (int c = 0; c < dv; ++c) out[c] = 0;
    *lse = -kInf;
    return;
  }
  const float inv = 1 / l;
  for (int c = 0; c < dv; ++c) {
    const float sv = group_scaled ? 1.0f : h.v_scale.at(0, c);
    const float vbar = info.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE ? h.v_mean.at(0, c) : 0.0f;
    out[c] = round_dtype(std::fma(o[c] * inv, sv, vbar), info.out_dtype);
  }
  double value = (m + std::log2(static_cast<double>(l) / pm)) * 0.693147180559945309417;
  if (info.smooth_k == SAGEATTN_SMOOTH_ON) {
    double dot = 0;
    for (int c = 0; c < h.original_q.cols; ++c) {
      dot += static_cast<double>(h.original_q.at(i, c)) * h.kbar[c];
    }
    value += static_cast<double>(info.sm_scale) * dot;
  }
  *lse = static_cast<float>(value);
}

}  // namespace

LiteralOutput literal_attention(const sageattn_plan_info& info, int head_dim, int num_qo_heads,
                                MaskSpec mask, const LiteralInput& input) {
  const int qo_len = input.qo_len, kv_len = input.kv_len;
  const int dv = info.head_dim_v;
  const TileShape tile = tile_shape(info.kernel, head_dim, dv);
  if (tile.b_q != info.b_q || tile.b_k != info.b_k) {
    throw std::logic_error("the plan's tile is not the one of docs/numerics.md, section 1");
  }
  const int interval = info.promotion_interval;
  if (interval == 0 &&
      (info.smooth_v == SAGEATTN_SMOOTH_V_GROUP || info.v_scale == SAGEATTN_V_SCALE_GROUP)) {
    throw std::logic_error("groups of V without a promotion interval");
  }
  const int v_groups = interval != 0 ? (kv_len + interval - 1) / interval : 1;

  LiteralOutput output;
  output.out.resize(static_cast<size_t>(qo_len) * num_qo_heads * dv);
  output.lse.resize(static_cast<size_t>(qo_len) * num_qo_heads);

  std::vector<int> q_groups, k_groups;
  for (int i = 0; i < qo_len; ++i) q_groups.push_back(q_group(info.qk_granularity, tile, i));
  for (int j = 0; j < kv_len; ++j) k_groups.push_back(k_group(info.qk_granularity, tile, j));
  Codes qk_codes = Codes::I8;
  if (info.qk_format == SAGEATTN_QK_I4) qk_codes = Codes::I4;
  if (info.qk_format == SAGEATTN_QK_E4M3) qk_codes = Codes::E4M3;

  const int q_tiles = (qo_len + tile.b_q - 1) / tile.b_q;
  const bool product_fp16 = info.q_dtype == SAGEATTN_F16 && info.kv_dtype == SAGEATTN_F16;
  const auto product_type = [&](float x) { return product_fp16 ? round_fp16(x) : round_bf16(x); };

  const int heads_a_group = num_qo_heads / info.num_kv_heads;
  for (int kv_head = 0; kv_head < info.num_kv_heads; ++kv_head) {
    Head shared;
    shared.info = &info;
    shared.tile = tile;
    shared.qo_len = qo_len;
    shared.kv_len = kv_len;
    shared.interval = interval;
    shared.mask = mask;

    // Smoothing of K.
    shared.k = take_head(input.k, kv_len, info.num_kv_heads, kv_head, head_dim);
    shared.kbar.assign(head_dim, 0.0f);
    if (info.smooth_k == SAGEATTN_SMOOTH_ON) {
      shared.kbar = row_means(shared.k, 0, kv_len);
      for (int j = 0; j < kv_len; ++j) {
        for (int c = 0; c < head_dim; ++c) shared.k.at(j, c) -= shared.kbar[c];
      }
    }

    // Smoothing of Q, head by head, and its correction.
    std::vector<Matrix> original_q, q, ds;
    for (int h = 0; h < heads_a_group; ++h) {
      const int head = kv_head * heads_a_group + h;
      original_q.push_back(take_head(input.q, qo_len, num_qo_heads, head, head_dim));
      q.push_back(original_q.back());
      ds.emplace_back();
      if (info.smooth_q != SAGEATTN_SMOOTH_ON) continue;
      ds[h] = Matrix(q_tiles, kv_len);
      for (int qt = 0; qt < q_tiles; ++qt) {
        const int begin = qt * tile.b_q, end = std::min(begin + tile.b_q, qo_len);
        std::vector<float> qbar = row_means(q[h], begin, end);
        for (float& x : qbar) x = product_type(x);
        for (int i = begin; i < end; ++i) {
          for (int c = 0; c < head_dim; ++c) q[h].at(i, c) -= qbar[c];
        }
        for (int j = 0; j < kv_len; ++j) {
          float acc = 0;
          for (int c = 0; c < head_dim; ++c) {
            acc = std::fma(qbar[c], product_type(shared.k.at(j, c)), acc);
          }
          ds[h].at(qt, j) = acc;
        }
      }
    }

    // Rotation.
    if (info.rotation == SAGEATTN_ROTATION_HADAMARD) {
      hadamard_rows(shared.k);
      for (Matrix& x : q) hadamard_rows(x);
    } else if (info.rotation == SAGEATTN_ROTATION_SMOOTHATTN) {
      smoothattn(q, shared.k);
    }
    shared.sk = quantize_rows(shared.k, k_groups, qk_codes);

    // V.
    Matrix v = take_head(input.v, kv_len, info.num_kv_heads, kv_head, dv);
    shared.v_mean = Matrix(std::max(v_groups, 1), dv);
    shared.v_scale = Matrix(std::max(v_groups, 1), dv);
    if (info.smooth_v != SAGEATTN_SMOOTH_V_OFF) {
      const int size = info.smooth_v == SAGEATTN_SMOOTH_V_GROUP ? interval : kv_len;
      for (int g = 0, begin = 0; begin < kv_len; ++g, begin += size) {
        const int end = std::min(begin + size, kv_len);
        const std::vector<float> mean = row_means(v, begin, end);
        for (int c = 0; c < dv; ++c) {
          shared.v_mean.at(g, c) = mean[c];
          for (int j = begin; j < end; ++j) v.at(j, c) -= mean[c];
        }
      }
    }
    const int scale_size = info.v_scale == SAGEATTN_V_SCALE_GROUP ? interval : kv_len;
    for (int g = 0, begin = 0; begin < kv_len; ++g, begin += scale_size) {
      const int end = std::min(begin + scale_size, kv_len);
      for (int c = 0; c < dv; ++c) {
        shared.v_scale.at(g, c) = quantize_v(v, c, begin, end, info.pv_format, info.pv_accum);
      }
    }
    shared.v_codes = Matrix(dv, kv_len);
    for (int j = 0; j < kv_len; ++j) {
      for (int c = 0; c < dv; ++c) shared.v_codes.at(c, j) = v.at(j, c);
    }

    for (int h = 0; h < heads_a_group; ++h) {
      const int head = kv_head * heads_a_group + h;
      shared.original_q = original_q[h];
      shared.q = q[h];
      shared.sq = quantize_rows(shared.q, q_groups, qk_codes);
      shared.ds = ds[h];
      for (int i = 0; i < qo_len; ++i) {
        const size_t row = static_cast<size_t>(i) * num_qo_heads + head;
        attend(shared, i, &output.out[row * dv], &output.lse[row]);
      }
    }
  }
  return output;
}

}  // namespace sageattn_test
