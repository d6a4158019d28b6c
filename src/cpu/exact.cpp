#include "src/cpu/exact.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "include/sageattn.h"
#include "src/cpu/formats.h"
#include "src/cpu/kernels.h"

namespace sageattn::cpu {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// x as fp32 such that rounding on to a 16-bit type rounds once: inexact results get an odd last bit.
float narrow(double x, int32_t dtype) {
  const auto nearest = static_cast<float>(x);
  if (dtype == SAGEATTN_F32 || nearest == x || !std::isfinite(nearest)) return nearest;
  const float toward_zero =
      std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(toward_zero) | 1u);
}

struct KeyRange {
  int64_t first, end;
};

// The keys a query sees, straight from the definitions in the header.
KeyRange visible_keys(const PlanConfig& plan, const Sequence& s, int64_t query) {
  const int64_t diagonal = query + s.kv_len - s.qo_len;
  int64_t first = 0, end = s.kv_len;
  switch (plan.mask) {
    case SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT:
      end = diagonal + 1;
      break;
    case SAGEATTN_MASK_CAUSAL_TOP_LEFT:
      end = query + 1;
      break;
    case SAGEATTN_MASK_WINDOW:
      if (plan.window_left >= 0) first = diagonal - plan.window_left;
      if (plan.window_right >= 0) end = diagonal + plan.window_right + 1;
      break;
    default:
      break;
  }
  return {std::max<int64_t>(first, 0), std::min<int64_t>(end, s.kv_len)};
}

// Rows first .. first + n - 1 of one head to fp64: [token][channel], or [channel][width] with the
// tokens side by side.
struct Source {
  const void* data;
  int32_t dtype;
  int64_t at, token_stride, channel_stride;
  int dim;

  void rows(int64_t first, int64_t n, double* to) const {
    for (int64_t t = 0; t < n; ++t) {
      for (int c = 0; c < dim; ++c) to[t * dim + c] = element(first + t, c);
    }
  }
  void columns(int64_t first, int64_t n, int64_t width, double* to) const {
    std::fill_n(to, dim * width, 0.0);
    for (int64_t t = 0; t < n; ++t) {
      for (int c = 0; c < dim; ++c) to[c * width + t] = element(first + t, c);
    }
  }
  double element(int64_t token, int64_t c) const {
    return load_element(dtype, data, at + token * token_stride + c * channel_stride);
  }
};

Source source(const void* data, int32_t dtype, const Strides& s, int64_t batch, int64_t start,
              int64_t head, int dim) {
  return {data, dtype, batch * s.batch + start * s.token + head * s.head, s.token, s.dim, dim};
}

}  // namespace

void exact_q_tile(const PlanConfig& plan, const Launch& launch, const Sequence& sequence, int batch,
                  int head, int64_t q_tile, Scratch& scratch) {
  const int dim = plan.head_dim, dim_v = plan.head_dim_v;
  const int b_k = plan.tile.b_k;
  const int64_t b = plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : batch;
  const int64_t kv_head = head / (plan.num_qo_heads / plan.num_kv_heads);
  const Source q = source(launch.q, plan.q_dtype, launch.q_strides, b, sequence.q_start, head, dim);
  const Source k =
      source(launch.k, plan.kv_dtype, launch.k_strides, b, sequence.kv_start, kv_head, dim);
  const Source v =
      source(launch.v, plan.kv_dtype, launch.v_strides, b, sequence.kv_start, kv_head, dim_v);

  const int64_t first_row = q_tile * plan.tile.b_q;
  const int64_t rows = std::min<int64_t>(plan.tile.b_q, sequence.qo_len - first_row);
  q.rows(first_row, rows, scratch.exact_q);
  std::fill_n(scratch.exact_out, rows * dim_v, 0.0);
  std::fill_n(scratch.exact_max, rows, -kInfinity);
  std::fill_n(scratch.exact_sum, rows, 0.0);

  int64_t first_key = sequence.kv_len, end_key = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const KeyRange range = visible_keys(plan, sequence, first_row + i);
    if (range.first >= range.end) continue;
    first_key = std::min(first_key, range.first);
    end_key = std::max(end_key, range.end);
  }

  for (int64_t start = first_key; start < end_key; start += b_k) {
    const int64_t n = std::min<int64_t>(b_k, end_key - start);
    k.columns(start, n, b_k, scratch.exact_k);
    v.rows(start, n, scratch.exact_v);
    for (int64_t i = 0; i < rows; ++i) {
      const KeyRange range = visible_keys(plan, sequence, first_row + i);
      const int64_t lo = std::max(range.first - start, int64_t{0});
      const int64_t hi = std::min(range.end - start, n);
      if (lo >= hi) continue;
      double* s = scratch.exact_s;
      double* out = scratch.exact_out + i * dim_v;
      double& max = scratch.exact_max[i];
      double& sum = scratch.exact_sum[i];
      kernels().exact_scores(scratch.exact_q + i * dim, scratch.exact_k, dim, b_k, s);
      double largest = max;
      for (int64_t j = lo; j < hi; ++j) {
        s[j] *= static_cast<double>(plan.sm_scale);
        if (s[j] > largest) largest = s[j];
      }
      // A row of NaN or -inf scores only: no shift, so that they stay what they are.
      const double shift = largest == -kInfinity ? 0.0 : largest;
      if (largest != max && max != -kInfinity) {
        const double shrink = std::exp(max - shift);
        sum *= shrink;
        for (int c = 0; c < dim_v; ++c) out[c] *= shrink;
      }
      max = largest;
      for (int64_t j = lo; j < hi; ++j) {
        s[j] = std::exp(s[j] - shift);
        sum += s[j];
      }
      kernels().exact_accumulate(s + lo, scratch.exact_v + lo * dim_v, static_cast<int>(hi - lo),
                                 dim_v, out);
    }
  }

  const Strides& o = launch.out_strides;
  const Strides& l = launch.lse_strides;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = sequence.q_start + first_row + i;
    const KeyRange range = visible_keys(plan, sequence, first_row + i);
    const bool sees_any = range.first < range.end;
    const double sum = scratch.exact_sum[i];
    for (int c = 0; c < dim_v; ++c) {
      const double x = sees_any ? scratch.exact_out[i * dim_v + c] / sum : 0.0;
      store_element(plan.out_dtype, launch.out,
                    b * o.batch + token * o.token + head * o.head + c * o.dim,
                    narrow(x, plan.out_dtype));
    }
    if (launch.lse != nullptr) {
      const double lse = sees_any ? scratch.exact_max[i] + std::log(sum) : -kInfinity;
      launch.lse[b * l.batch + token * l.token + head * l.head] = static_cast<float>(lse);
    }
  }
}

}  // namespace sageattn::cpu
