#include "tests/exact_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sageattn_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// First and last key that query i sees; none if first > last.
struct KeyRange {
  int64_t first, last;
};

KeyRange visible_keys(MaskSpec mask, int64_t qo_len, int64_t kv_len, int64_t i) {
  KeyRange range{0, kv_len - 1};
  const int64_t bottom_right = i + kv_len - qo_len;
  if (mask.kind == SAGEATTN_MASK_CAUSAL_TOP_LEFT) range.last = std::min(range.last, i);
  if (mask.kind == SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT) {
    range.last = std::min(range.last, bottom_right);
  }
  if (mask.kind == SAGEATTN_MASK_WINDOW) {
    if (mask.left >= 0) range.first = std::max<int64_t>(0, bottom_right - mask.left);
    if (mask.right >= 0) range.last = std::min(range.last, bottom_right + mask.right);
  }
  return range;
}

// Row r of head h in [row][heads][channels].
template <typename T>
const T* row_of(const std::vector<T>& x, int row, int heads, int head, int channels) {
  return x.data() + (static_cast<size_t>(row) * heads + head) * channels;
}

// Softmax of scores over a row of V. scores[j - first] are natural logarithms; p_of rounds exp().
template <typename RoundP, typename ValueAt>
void softmax_row(const std::vector<double>& scores, int dv, RoundP round_p, ValueAt value_at,
                 double* out, double* magnitude, double* lse) {
  if (scores.empty()) {
    for (int c = 0; c < dv; ++c) out[c] = magnitude[c] = 0;
    *lse = -kInfinity;
    return;
  }
  double largest = -kInfinity;
  bool saw_nan = false;
  for (double s : scores) {
    if (s > largest) largest = s;
    saw_nan = saw_nan || std::isnan(s);
  }
  std::vector<double> o(dv, 0.0), o_magnitude(dv, 0.0);
  double l = 0;
  for (size_t t = 0; t < scores.size(); ++t) {
    const double p = round_p(std::exp(scores[t] - largest));
    l += p;
    for (int c = 0; c < dv; ++c) {
      const double value = value_at(static_cast<int>(t), c);
      o[c] += p * value;
      o_magnitude[c] += p * std::fabs(value);
    }
  }
  for (int c = 0; c < dv; ++c) {
    out[c] = o[c] / l;
    magnitude[c] = o_magnitude[c] / l;
  }
  // The logarithm of a sum of zeros, whose quotients above are NaN.
  *lse = largest == -kInfinity && !saw_nan ? largest : largest + std::log(l);
}

ExactOutput make_output(const AttentionShape& shape, int qo_len) {
  const size_t rows = static_cast<size_t>(qo_len) * shape.num_qo_heads;
  ExactOutput output;
  output.out.resize(rows * shape.head_dim_v);
  output.magnitude.resize(rows * shape.head_dim_v);
  output.lse.resize(rows);
  return output;
}

// A grid of floating-point or integer codes.
struct Format {
  bool integer;
  int mantissa, min_exponent;
  double largest;

  double round(double x) const {
    if (!std::isfinite(x) || x == 0) return x;
    double step = 1;
    if (!integer) step = std::ldexp(1.0, std::max(std::ilogb(x), min_exponent) - mantissa);
    return std::clamp(std::nearbyint(x / step) * step, -largest, largest);
  }
};

constexpr Format kI8{true, 0, 0, 127};
constexpr Format kI4{true, 0, 0, 7};
constexpr Format kE4M3{false, 3, -6, 448};
constexpr Format kE5M2{false, 2, -14, 57344};
constexpr Format kF16{false, 10, -14, 65504};

Format qk_format(int32_t format) {
  if (format == SAGEATTN_QK_I4) return kI4;
  if (format == SAGEATTN_QK_E4M3) return kE4M3;
  return kI8;
}

Format pv_format(int32_t format) {
  if (format == SAGEATTN_PV_F16) return kF16;
  if (format == SAGEATTN_PV_E5M2) return kE5M2;
  if (format == SAGEATTN_PV_I8) return kI8;
  return kE4M3;
}

using Rows = std::vector<std::vector<double>>;

Rows rows_of_head(const std::vector<float>& x, int tokens, int heads, int head, int channels) {
  Rows rows;
  for (int t = 0; t < tokens; ++t) {
    const float* row = row_of(x, t, heads, head, channels);
    rows.emplace_back(row, row + channels);
  }
  return rows;
}

// Subtracts from rows begin .. end-1 their mean, and returns it.
std::vector<double> subtract_mean(Rows& rows, int begin, int end, int channels) {
  std::vector<double> mean(channels, 0.0);
  for (int c = 0; c < channels && end > begin; ++c) {
    for (int t = begin; t < end; ++t) mean[c] += rows[t][c] / (end - begin);
    for (int t = begin; t < end; ++t) rows[t][c] -= mean[c];
  }
  return mean;
}

// Quantizes groups of adjacent rows, one scale each, and multiplies them back.
void round_rows(Rows& rows, int rows_a_group, const Format& format) {
  const size_t size = static_cast<size_t>(rows_a_group);
  for (size_t begin = 0; begin < rows.size(); begin += size) {
    const size_t end = std::min(begin + size, rows.size());
    double absmax = 0;
    for (size_t r = begin; r < end; ++r) {
      for (const double x : rows[r]) absmax = std::max(absmax, std::fabs(x));
    }
    if (absmax == 0) continue;
    const double scale = absmax / format.largest;
    for (size_t r = begin; r < end; ++r) {
      for (double& x : rows[r]) x = format.round(x / scale) * scale;
    }
  }
}

// As many rows as share a scale in the plan, of Q and of K. A tile of queries has four warps, a
// warp of them eight groups, a tile of keys four.
struct GroupSizes {
  int q, k;
};

GroupSizes group_sizes(const sageattn_plan_info& info, int qo_len, int kv_len) {
  switch (info.qk_granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return {info.b_q / 32, info.b_k / 4};
    case SAGEATTN_GRANULARITY_PER_WARP:
      return {info.b_q / 4, info.b_k};
    case SAGEATTN_GRANULARITY_PER_BLOCK:
      return {info.b_q, info.b_k};
    case SAGEATTN_GRANULARITY_PER_TENSOR:
      return {std::max(qo_len, 1), std::max(kv_len, 1)};
    default:
      return {1, 1};
  }
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

}  // namespace

ExactOutput exact_attention(const AttentionShape& shape, double sm_scale, MaskSpec mask,
                            const LiteralInput& input) {
  ExactOutput output = make_output(shape, input.qo_len);
  const int d = shape.head_dim, dv = shape.head_dim_v;
  for (int head = 0; head < shape.num_qo_heads; ++head) {
    const int kv_head = head / (shape.num_qo_heads / shape.num_kv_heads);
    for (int i = 0; i < input.qo_len; ++i) {
      const KeyRange keys = visible_keys(mask, input.qo_len, input.kv_len, i);
      const float* q = row_of(input.q, i, shape.num_qo_heads, head, d);
      std::vector<double> scores;
      for (int64_t j = keys.first; j <= keys.last; ++j) {
        const float* k = row_of(input.k, static_cast<int>(j), shape.num_kv_heads, kv_head, d);
        double sum = 0;
        for (int c = 0; c < d; ++c) sum += static_cast<double>(q[c]) * k[c];
        scores.push_back(sum * sm_scale);
      }
      const auto value_at = [&](int t, int c) {
        const int j = static_cast<int>(keys.first) + t;
        return static_cast<double>(row_of(input.v, j, shape.num_kv_heads, kv_head, dv)[c]);
      };
      const size_t row = static_cast<size_t>(i) * shape.num_qo_heads + head;
      softmax_row(
          scores, dv, [](double p) { return p; }, value_at, &output.out[row * dv],
          &output.magnitude[row * dv], &output.lse[row]);
    }
  }
  return output;
}

ExactOutput plain_attention(const sageattn_plan_info& info, const AttentionShape& shape,
                            MaskSpec mask, const LiteralInput& input) {
  ExactOutput output = make_output(shape, input.qo_len);
  const int d = shape.head_dim, dv = shape.head_dim_v;
  const int qo_len = input.qo_len, kv_len = input.kv_len;
  const Format qk = qk_format(info.qk_format);
  const Format pv = pv_format(info.pv_format);
  const double pv_largest = info.pv_format == SAGEATTN_PV_F16 ? 1 : pv.largest;

  for (int head = 0; head < shape.num_qo_heads; ++head) {
    const int kv_head = head / (shape.num_qo_heads / shape.num_kv_heads);
    const Rows original_q = rows_of_head(input.q, qo_len, shape.num_qo_heads, head, d);
    Rows q = original_q;
    Rows k = rows_of_head(input.k, kv_len, shape.num_kv_heads, kv_head, d);
    Rows v = rows_of_head(input.v, kv_len, shape.num_kv_heads, kv_head, dv);

    std::vector<double> kbar(d, 0.0);
    if (info.smooth_k == SAGEATTN_SMOOTH_ON) kbar = subtract_mean(k, 0, kv_len, d);
    const Rows smooth_k = k;
    Rows qbar;  // one a q tile
    if (info.smooth_q == SAGEATTN_SMOOTH_ON) {
      for (int begin = 0; begin < qo_len; begin += info.b_q) {
        qbar.push_back(subtract_mean(q, begin, std::min(begin + info.b_q, qo_len), d));
      }
    }
    const GroupSizes sizes = group_sizes(info, qo_len, kv_len);
    round_rows(q, sizes.q, qk);
    round_rows(k, sizes.k, qk);

    // V: smoothed over the sequence or a group, rounded with one scale a channel and group.
    const bool group_mean = info.smooth_v == SAGEATTN_SMOOTH_V_GROUP;
    const bool group_scale = info.v_scale == SAGEATTN_V_SCALE_GROUP;
    Rows vbar(kv_len, std::vector<double>(dv, 0.0));
    if (info.smooth_v != SAGEATTN_SMOOTH_V_OFF) {
      const int size = group_mean ? info.promotion_interval : kv_len;
      for (int begin = 0; begin < kv_len; begin += size) {
        const int end = std::min(begin + size, kv_len);
        const std::vector<double> mean = subtract_mean(v, begin, end, dv);
        for (int j = begin; j < end; ++j) vbar[j] = mean;
      }
    }
    const bool small_v =
        info.pv_format == SAGEATTN_PV_E4M3 && info.pv_accum == SAGEATTN_PV_ACCUM_F16;
    const double v_largest = small_v ? 2.25 : pv.largest;
    const int size = group_scale ? info.promotion_interval : kv_len;
    for (int begin = 0; begin < kv_len; begin += size) {
      const int end = std::min(begin + size, kv_len);
      for (int c = 0; c < dv; ++c) {
        double absmax = 0;
        for (int j = begin; j < end; ++j) absmax = std::max(absmax, std::fabs(v[j][c]));
        if (absmax == 0) continue;
        double scale = absmax / v_largest;
        if (info.pv_format == SAGEATTN_PV_F16)
          scale = std::exp2(std::ceil(std::log2(absmax / 512)));
        for (int j = begin; j < end; ++j) v[j][c] = pv.round(v[j][c] / scale) * scale;
      }
    }

    for (int i = 0; i < qo_len; ++i) {
      const KeyRange keys = visible_keys(mask, qo_len, kv_len, i);
      std::vector<double> scores;
      for (int64_t j = keys.first; j <= keys.last; ++j) {
        double s = dot(q[i], k[j]);
        if (!qbar.empty()) s += dot(qbar[i / info.b_q], smooth_k[j]);
        scores.push_back(s * info.sm_scale);
      }
      const auto round_p = [&](double p) { return pv.round(p * pv_largest) / pv_largest; };
      const auto value_at = [&](int t, int c) {
        const int64_t j = keys.first + t;
        return v[j][c] + vbar[j][c];
      };
      const size_t row = static_cast<size_t>(i) * shape.num_qo_heads + head;
      softmax_row(scores, dv, round_p, value_at, &output.out[row * dv], &output.magnitude[row * dv],
                  &output.lse[row]);
      output.lse[row] += info.sm_scale * dot(original_q[i], kbar);
    }
  }
  return output;
}

double error_bound(const sageattn_plan_info& info, const ExactOutput& exact,
                   const ExactOutput& plain) {
  double floor = std::ldexp(1.0, -20);  // fp32 arithmetic
  if (info.out_dtype == SAGEATTN_F16) floor += std::ldexp(1.0, -11);
  if (info.out_dtype == SAGEATTN_BF16) floor += std::ldexp(1.0, -8);

  // The FP8 tensor core keeps 13 fraction bits and truncates, the fp16 accumulator keeps 10: an
  // error relative to the sum of magnitudes.
  double accumulator = 0;
  if (info.pv_format == SAGEATTN_PV_E4M3) accumulator = std::ldexp(1.0, -12);
  if (info.pv_accum == SAGEATTN_PV_ACCUM_F16) accumulator = std::ldexp(1.0, -10);
  double magnitude = 0, norm = 0;
  for (const double x : exact.magnitude) magnitude += x * x;
  for (const double x : exact.out) norm += x * x;
  const double cancellation = norm > 0 ? std::sqrt(magnitude / norm) : 0;

  // Few rows have few independent errors, and the naive ones may be small by luck.
  const double factor = exact.lse.size() < 16 ? 4 : 2;
  return factor * relative_error(plain.out, exact.out) + floor + accumulator * cancellation;
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) {  // also equal infinities: rows that see nothing
      if (std::isfinite(b[i])) norm += b[i] * b[i];
      continue;
    }
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / norm);
}

std::vector<double> widen(const std::vector<float>& x) { return {x.begin(), x.end()}; }

}  // namespace sageattn_test
