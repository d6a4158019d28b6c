#include "src/cpu/quantize.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "include/sageattn.h"
#include "ptx/tile/groups.h"
#include "src/cpu/formats.h"

namespace sageattn::cpu {

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastAbsmax = 0x1p-100f;

int kv_head_of(const Task& task, int qo_head) {
  return qo_head / (task.plan.num_qo_heads / task.plan.num_kv_heads);
}

// Offset of token 0, channel 0 of one head of one sequence.
int64_t head_offset(const Task& task, const Strides& s, int batch, int64_t start, int head) {
  const int64_t b = task.plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : batch;
  return b * s.batch + start * s.token + head * s.head;
}

// Reads rows of one head of one sequence, widened to fp32.
class Rows {
 public:
  Rows(const void* data, int32_t dtype, int64_t offset, const Strides& s, int dim)
      : data_(data), dtype_(dtype), offset_(offset), token_(s.token), channel_(s.dim), dim_(dim) {}

  void load(int64_t token, float* row) const {
    const int64_t at = offset_ + token * token_;
    for (int c = 0; c < dim_; ++c) row[c] = load_element(dtype_, data_, at + c * channel_);
  }

 private:
  const void* data_;
  int32_t dtype_;
  int64_t offset_, token_, channel_;
  int dim_;
};

Rows q_rows(const Task& t, int batch, int head) {
  const Sequence& s = t.areas.sequences[batch];
  return {t.launch.q, t.plan.q_dtype, head_offset(t, t.launch.q_strides, batch, s.q_start, head),
          t.launch.q_strides, t.plan.head_dim};
}
Rows k_rows(const Task& t, int batch, int head) {
  const Sequence& s = t.areas.sequences[batch];
  return {t.launch.k, t.plan.kv_dtype, head_offset(t, t.launch.k_strides, batch, s.kv_start, head),
          t.launch.k_strides, t.plan.head_dim};
}
Rows v_rows(const Task& t, int batch, int head) {
  const Sequence& s = t.areas.sequences[batch];
  return {t.launch.v, t.plan.kv_dtype, head_offset(t, t.launch.v_strides, batch, s.kv_start, head),
          t.launch.v_strides, t.plan.head_dim_v};
}

// ---- Statistics ----

// lanes[r] += lanes[r + half] for half = count / 2 .. 1.
void fold_lanes(float* lanes, int count, int dim) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half * dim; ++i) lanes[i] += lanes[half * dim + i];
  }
}

// Mean of tokens first .. first + n - 1 in the order that docs/numerics.md fixes.
void mean_of(const Rows& rows, int64_t first, int64_t n, int dim, Scratch& scratch, float* mean) {
  constexpr int kChunk = 64, kChunkLanes = 16, kSumLanes = 32;
  float* chunk_lanes = scratch.lanes;
  float* sum_lanes = scratch.lanes + kChunkLanes * dim;
  std::fill(sum_lanes, sum_lanes + kSumLanes * dim, 0.0f);
  for (int64_t start = 0; start < n; start += kChunk) {
    std::fill(chunk_lanes, chunk_lanes + kChunkLanes * dim, 0.0f);
    const int64_t end = std::min(start + kChunk, n);
    for (int64_t t = start; t < end; ++t) {
      rows.load(first + t, scratch.row);
      float* lane = chunk_lanes + (t - start) % kChunkLanes * dim;
      for (int c = 0; c < dim; ++c) lane[c] += scratch.row[c];
    }
    fold_lanes(chunk_lanes, kChunkLanes, dim);
    float* lane = sum_lanes + start / kChunk % kSumLanes * dim;
    for (int c = 0; c < dim; ++c) lane[c] += chunk_lanes[c];
  }
  fold_lanes(sum_lanes, kSumLanes, dim);
  for (int c = 0; c < dim; ++c) mean[c] = n > 0 ? sum_lanes[c] / static_cast<float>(n) : 0.0f;
}

// NaN sticks: no comparison with it is true.
void take_absmax(float& absmax, float x) {
  const float magnitude = std::fabs(x);
  if (!(magnitude <= FLT_MAX)) {
    absmax = kNan;
  } else if (magnitude > absmax) {
    absmax = magnitude;
  }
}

// How a group maps to codes: code = encode(x * inverse), x ~ code * scale. inverse is 0 where all
// codes are 0.
struct Quantizer {
  float scale, inverse;

  Quantizer(float absmax, float max_code) {
    if (std::isnan(absmax)) {
      scale = kNan;
      inverse = 0.0f;
    } else if (absmax < kLeastAbsmax) {
      scale = inverse = 0.0f;
    } else {
      scale = absmax / max_code;
      inverse = max_code / absmax;
    }
  }

  // The power of two that brings absmax into (256, 512].
  static Quantizer for_f16(float absmax) {
    Quantizer q(absmax, 1.0f);
    if (q.inverse == 0.0f) return q;
    int exponent;
    const float fraction = std::frexp(absmax, &exponent);
    const int e = std::max(exponent - (fraction == 0.5f ? 10 : 9), -100);
    q.scale = std::ldexp(1.0f, e);
    q.inverse = std::ldexp(1.0f, -e);
    return q;
  }

  float scaled(float x) const { return inverse == 0.0f ? 0.0f : x * inverse; }
};

float max_qk_code(int32_t format) {
  return format == SAGEATTN_QK_I8 ? 127.0f : format == SAGEATTN_QK_I4 ? 7.0f : E4M3::kMax;
}

int integer_code(float scaled, float max_code) {
  return static_cast<int>(std::clamp(round_half_even(scaled), -max_code, max_code));
}

// ---- Smoothing and rotation of Q and K ----

float* k_mean_at(const Task& t, int batch, int kv_head) {
  return t.areas.k_mean + (int64_t{kv_head} * t.plan.max_batch + batch) * t.plan.head_dim;
}
float* factor_at(const Task& t, int batch, int kv_head) {
  return t.areas.k_factor + (int64_t{kv_head} * t.plan.max_batch + batch) * t.plan.head_dim;
}

// Normalised Hadamard transform, Sylvester order, with the sign of each channel flipped first
// where bit 31 of (c + 1) * 0x9E3779B1 is set. n is a power of two.
void hadamard(float* row, int n) {
  for (int c = 0; c < n; ++c) {
    const uint32_t hash = (static_cast<uint32_t>(c) + 1) * 0x9E3779B1u;
    if ((hash & 0x80000000u) != 0) row[c] = -row[c];
  }
  for (int h = 1; h < n; h *= 2) {
    for (int c = 0; c < n; ++c) {
      if ((c & h) != 0) continue;
      const float a = row[c], b = row[c + h];
      row[c] = a + b;
      row[c + h] = a - b;
    }
  }
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (int c = 0; c < n; ++c) row[c] *= norm;
}

// Finishes a smoothed row: factors, then rotation; row has room for rotated_dim channels.
void rotate(const Task& t, int batch, int kv_head, bool is_query, float* row) {
  if (t.plan.rotation == SAGEATTN_ROTATION_SMOOTHATTN) {
    const float* f = factor_at(t, batch, kv_head);
    for (int c = 0; c < t.plan.head_dim; ++c) row[c] = is_query ? row[c] / f[c] : row[c] * f[c];
  } else if (t.plan.rotation == SAGEATTN_ROTATION_HADAMARD) {
    std::fill(row + t.plan.head_dim, row + t.shape.rotated_dim, 0.0f);
    hadamard(row, t.shape.rotated_dim);
  }
}

void load_smooth_k(const Task& t, const Rows& rows, int batch, int kv_head, int64_t token,
                   float* row) {
  rows.load(token, row);
  if (t.plan.smooth_k == SAGEATTN_SMOOTH_ON) {
    const float* mean = k_mean_at(t, batch, kv_head);
    for (int c = 0; c < t.plan.head_dim; ++c) row[c] -= mean[c];
  }
}

// dS is a 16-bit product: its type is fp16 if both sides have it, else bf16.
int32_t product_dtype(const PlanConfig& plan) {
  return plan.q_dtype == SAGEATTN_F16 && plan.kv_dtype == SAGEATTN_F16 ? SAGEATTN_F16
                                                                       : SAGEATTN_BF16;
}

// Smoothed queries of one tile into scratch.rows, one every `stride` floats; the tile's mean into
// scratch.q_mean. Returns their number.
int load_smooth_q_tile(const Task& t, int batch, int qo_head, int64_t tile, Scratch& scratch,
                       int stride) {
  const int64_t first = tile * t.plan.tile.b_q;
  const auto n =
      static_cast<int>(std::min<int64_t>(t.plan.tile.b_q, t.areas.sequences[batch].qo_len - first));
  const Rows rows = q_rows(t, batch, qo_head);
  const int dim = t.plan.head_dim;
  const bool smooth = t.plan.smooth_q == SAGEATTN_SMOOTH_ON;
  if (smooth) {
    mean_of(rows, first, n, dim, scratch, scratch.q_mean);
    const int32_t dtype = product_dtype(t.plan);
    for (int c = 0; c < dim; ++c) scratch.q_mean[c] = round_to_dtype(dtype, scratch.q_mean[c]);
  }
  for (int i = 0; i < n; ++i) {
    float* row = scratch.rows + int64_t{i} * stride;
    rows.load(first + i, row);
    if (smooth) {
      for (int c = 0; c < dim; ++c) row[c] -= scratch.q_mean[c];
    }
  }
  return n;
}

// SMOOTHATTN's factors: the query heads of the group share them.
void compute_factors(const Task& t, const Rows& k, int batch, int kv_head, Scratch& scratch) {
  const int dim = t.plan.head_dim;
  const Sequence& sequence = t.areas.sequences[batch];
  float* q_max = scratch.channel_a;
  float* k_max = scratch.channel_b;
  std::fill(q_max, q_max + dim, 0.0f);
  std::fill(k_max, k_max + dim, 0.0f);
  const int ratio = t.plan.num_qo_heads / t.plan.num_kv_heads;
  for (int head = kv_head * ratio; head < (kv_head + 1) * ratio; ++head) {
    for (int64_t tile = 0; tile * t.plan.tile.b_q < sequence.qo_len; ++tile) {
      const int n = load_smooth_q_tile(t, batch, head, tile, scratch, dim);
      for (int i = 0; i < n * dim; ++i) take_absmax(q_max[i % dim], scratch.rows[i]);
    }
  }
  for (int64_t j = 0; j < sequence.kv_len; ++j) {
    load_smooth_k(t, k, batch, kv_head, j, scratch.row);
    for (int c = 0; c < dim; ++c) take_absmax(k_max[c], scratch.row[c]);
  }
  float* f = factor_at(t, batch, kv_head);
  for (int c = 0; c < dim; ++c) {
    const bool tiny = q_max[c] < kLeastAbsmax || k_max[c] < kLeastAbsmax;
    const bool nan = std::isnan(q_max[c]) || std::isnan(k_max[c]);
    f[c] = nan ? kNan : tiny ? 1.0f : std::sqrt(q_max[c]) / std::sqrt(k_max[c]);
  }
}

// ---- Groups ----

// Group of a row within its tile; the caller keeps one absmax for each.
int q_group(const PlanConfig& plan, int row) {
  switch (plan.qk_granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return q_group_of_row(row, plan.tile.rows_per_warp);
    case SAGEATTN_GRANULARITY_PER_WARP:
      return row / plan.tile.rows_per_warp;
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return row;
    default:
      return 0;
  }
}
int k_group(const PlanConfig& plan, int key) {
  switch (plan.qk_granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return k_group_of_key(key);
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return key;
    default:
      return 0;
  }
}
constexpr int kMaxTile = 128;

// Tile of K as codes, and the scale of each key.
void store_k_tile(const Task& t, const float* rows, int n, const float (&absmax)[kMaxTile],
                  uint8_t* codes, float* scales) {
  const PlanConfig& plan = t.plan;
  const int dim = t.shape.rotated_dim, b_k = plan.tile.b_k;
  const float max_code = max_qk_code(plan.qk_format);
  std::fill(codes, codes + t.shape.k_tile_bytes, uint8_t{0});
  std::fill(scales, scales + b_k, 0.0f);
  for (int j = 0; j < n; ++j) {
    const Quantizer quantizer(absmax[k_group(plan, j)], max_code);
    scales[j] = quantizer.scale;
    for (int c = 0; c < dim; ++c) {
      const float x = quantizer.scaled(rows[int64_t{j} * dim + c]);
      if (t.shape.fp8_scores) {
        codes[int64_t{c} * b_k + j] = E4M3::encode(x);
      } else {
        const auto code = static_cast<int16_t>(integer_code(x, max_code));
        std::memcpy(codes + ((int64_t{c / 2} * b_k + j) * 2 + c % 2) * 2, &code, sizeof code);
      }
    }
  }
}

// One key of gK in the product type, as score_correction reads it: [tile][channel][key].
void store_smooth_k(const Task& t, const Sequence& sequence, int kv_head, int64_t token,
                    const float* row) {
  const int dim = t.plan.head_dim, b_k = t.plan.tile.b_k;
  const int64_t tile = k_tile_index(t, sequence, kv_head, token / b_k);
  uint16_t* at = t.areas.k_smooth + tile * dim * b_k + token % b_k;
  const bool f16 = product_dtype(t.plan) == SAGEATTN_F16;
  for (int c = 0; c < dim; ++c) {
    at[int64_t{c} * b_k] = f16 ? float_to_f16(row[c]) : float_to_bf16(row[c]);
  }
}

}  // namespace

float score_scale(const PlanConfig& plan) { return plan.sm_scale * 1.44269504088896340736f; }

int64_t k_tile_index(const Task& t, const Sequence& sequence, int kv_head, int64_t tile) {
  return kv_head * t.shape.max_k_tiles + sequence.first_k_tile + tile;
}

int64_t v_group_index(const Task& t, int batch, int kv_head, int64_t group) {
  const int64_t first = t.shape.grouped ? t.areas.sequences[batch].first_v_group : batch;
  return kv_head * t.shape.max_v_groups + first + group;
}

void quantize_k(const Task& t, int batch, int kv_head, Scratch& scratch) {
  const PlanConfig& plan = t.plan;
  const Sequence& sequence = t.areas.sequences[batch];
  const Rows rows = k_rows(t, batch, kv_head);
  if (plan.smooth_k == SAGEATTN_SMOOTH_ON) {
    mean_of(rows, 0, sequence.kv_len, plan.head_dim, scratch, k_mean_at(t, batch, kv_head));
  }
  if (plan.rotation == SAGEATTN_ROTATION_SMOOTHATTN) {
    compute_factors(t, rows, batch, kv_head, scratch);
  }
  const int dim = t.shape.rotated_dim;
  const auto load_tile = [&](int64_t tile) {
    const int64_t first = tile * plan.tile.b_k;
    const auto n = static_cast<int>(std::min<int64_t>(plan.tile.b_k, sequence.kv_len - first));
    for (int j = 0; j < n; ++j) {
      float* row = scratch.rows + int64_t{j} * dim;
      load_smooth_k(t, rows, batch, kv_head, first + j, row);
      if (t.areas.k_smooth != nullptr) store_smooth_k(t, sequence, kv_head, first + j, row);
      rotate(t, batch, kv_head, /*is_query=*/false, row);
    }
    return n;
  };
  const bool per_tensor = plan.qk_granularity == SAGEATTN_GRANULARITY_PER_TENSOR;
  const int64_t tiles = ceil_div(sequence.kv_len, plan.tile.b_k);
  float tensor_absmax = 0.0f;
  for (int64_t tile = 0; per_tensor && tile < tiles; ++tile) {
    const int n = load_tile(tile);
    for (int i = 0; i < n * dim; ++i) take_absmax(tensor_absmax, scratch.rows[i]);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float absmax[kMaxTile] = {};
    if (t.areas.k_smooth != nullptr) {  // padding keys take part in dS, though nobody sees them
      const int64_t size = int64_t{plan.head_dim} * plan.tile.b_k;
      std::fill_n(t.areas.k_smooth + k_tile_index(t, sequence, kv_head, tile) * size, size,
                  uint16_t{0});
    }
    const int n = load_tile(tile);
    if (per_tensor) {
      absmax[0] = tensor_absmax;
    } else {
      for (int i = 0; i < n * dim; ++i) {
        take_absmax(absmax[k_group(plan, i / dim)], scratch.rows[i]);
      }
    }
    const int64_t at = k_tile_index(t, sequence, kv_head, tile);
    store_k_tile(t, scratch.rows, n, absmax, t.areas.k_codes + at * t.shape.k_tile_bytes,
                 t.areas.k_scale + at * plan.tile.b_k);
  }
}

void quantize_v(const Task& t, int batch, int kv_head, Scratch& scratch) {
  const PlanConfig& plan = t.plan;
  const Sequence& sequence = t.areas.sequences[batch];
  const Rows rows = v_rows(t, batch, kv_head);
  const int dim = plan.head_dim_v, channels = t.shape.channels;
  const int64_t n = sequence.kv_len;
  const bool group_means = plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP;
  const bool group_scales = plan.v_scale == SAGEATTN_V_SCALE_GROUP;
  const int64_t group_len = t.shape.grouped ? plan.promotion_interval : std::max<int64_t>(n, 1);
  const int64_t groups = ceil_div(n, group_len);
  const auto mean_at = [&](int64_t group) {
    return t.areas.v_mean + v_group_index(t, batch, kv_head, group) * channels;
  };
  const auto scale_at = [&](int64_t group) {
    return t.areas.v_scale + v_group_index(t, batch, kv_head, group) * channels;
  };

  // Means: one for each group, also where the whole sequence shares its value.
  if (plan.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE) {
    mean_of(rows, 0, n, dim, scratch, scratch.channel_b);
  }
  for (int64_t g = 0; g < groups; ++g) {
    float* mean = mean_at(g);
    std::fill(mean, mean + channels, 0.0f);
    if (group_means) {
      mean_of(rows, g * group_len, std::min(group_len, n - g * group_len), dim, scratch, mean);
    } else if (plan.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE) {
      std::copy(scratch.channel_b, scratch.channel_b + dim, mean);
    }
  }

  const auto load = [&](int64_t token) {
    rows.load(token, scratch.row);
    const float* mean = mean_at(token / group_len);
    for (int c = 0; c < dim; ++c) scratch.row[c] -= mean[c];
  };

  // Scales, first as absmax: of each group, or of the sequence.
  for (int64_t g = 0; g < groups; ++g) std::fill(scale_at(g), scale_at(g) + channels, 0.0f);
  for (int64_t j = 0; j < n; ++j) {
    load(j);
    float* absmax = scale_at(group_scales ? j / group_len : 0);
    for (int c = 0; c < dim; ++c) take_absmax(absmax[c], scratch.row[c]);
  }
  if (!group_scales) {
    for (int64_t g = 1; g < groups; ++g) std::copy(scale_at(0), scale_at(0) + dim, scale_at(g));
  }
  const auto quantizer_of = [&](float absmax) {
    switch (plan.pv_format) {
      case SAGEATTN_PV_F16:
        return Quantizer::for_f16(absmax);
      case SAGEATTN_PV_I8:
        return Quantizer(absmax, 127.0f);
      case SAGEATTN_PV_E5M2:
        return Quantizer(absmax, E5M2::kMax);
      default:
        // fp16 accumulators: 64 products of at most 448 x 2.25 stay below 65504.
        return Quantizer(absmax, plan.pv_accum == SAGEATTN_PV_ACCUM_F16 ? 2.25f : E4M3::kMax);
    }
  };

  // Codes, group by group, while the scales still hold absmax; padding keys and channels are 0.
  const int64_t padded = round_up(n, plan.tile.b_k);
  uint8_t* codes = t.areas.v_codes + k_tile_index(t, sequence, kv_head, 0) * plan.tile.b_k *
                                         channels * t.shape.v_code_bytes;
  std::fill(codes, codes + padded * channels * t.shape.v_code_bytes, uint8_t{0});
  for (int64_t g = 0; g < groups; ++g) {
    float* inverse = scratch.channel_a;
    float* scale = scale_at(g);
    for (int c = 0; c < dim; ++c) {
      const Quantizer quantizer = quantizer_of(scale[c]);
      scale[c] = quantizer.scale;
      inverse[c] = quantizer.inverse;
    }
    for (int64_t j = g * group_len; j < std::min((g + 1) * group_len, n); ++j) {
      load(j);
      for (int c = 0; c < dim; ++c) {
        const float x = inverse[c] == 0.0f ? 0.0f : scratch.row[c] * inverse[c];
        const int64_t at = j * channels + c;
        if (plan.pv_format == SAGEATTN_PV_F16) {
          const uint16_t code = float_to_f16(x);
          std::memcpy(codes + at * 2, &code, sizeof code);
        } else if (plan.pv_format == SAGEATTN_PV_I8) {
          codes[at] = static_cast<uint8_t>(integer_code(x, 127.0f));
        } else {
          codes[at] = plan.pv_format == SAGEATTN_PV_E5M2 ? E5M2::encode(x) : E4M3::encode(x);
        }
      }
    }
  }
}

void scale_q(const Task& t, int batch, int qo_head, Scratch& scratch) {
  const Sequence& sequence = t.areas.sequences[batch];
  const int dim = t.shape.rotated_dim;
  float absmax = 0.0f;
  for (int64_t tile = 0; tile * t.plan.tile.b_q < sequence.qo_len; ++tile) {
    const int n = load_smooth_q_tile(t, batch, qo_head, tile, scratch, dim);
    for (int i = 0; i < n; ++i) {
      float* row = scratch.rows + int64_t{i} * dim;
      rotate(t, batch, kv_head_of(t, qo_head), /*is_query=*/true, row);
      for (int c = 0; c < dim; ++c) take_absmax(absmax, row[c]);
    }
  }
  t.areas.q_scale[int64_t{qo_head} * t.plan.max_batch + batch] = absmax;
}

void quantize_q_tile(const Task& t, int batch, int qo_head, int64_t tile, Scratch& scratch) {
  const PlanConfig& plan = t.plan;
  const int dim = t.shape.rotated_dim;
  const float max_code = max_qk_code(plan.qk_format);
  const int n = load_smooth_q_tile(t, batch, qo_head, tile, scratch, dim);
  float absmax[kMaxTile] = {};
  for (int i = 0; i < n; ++i) {
    float* row = scratch.rows + int64_t{i} * dim;
    rotate(t, batch, kv_head_of(t, qo_head), /*is_query=*/true, row);
    for (int c = 0; c < dim; ++c) take_absmax(absmax[q_group(plan, i)], row[c]);
  }
  if (plan.qk_granularity == SAGEATTN_GRANULARITY_PER_TENSOR) {
    absmax[0] = t.areas.q_scale[int64_t{qo_head} * plan.max_batch + batch];
  }
  for (int i = 0; i < n; ++i) {
    const float* row = scratch.rows + int64_t{i} * dim;
    const Quantizer quantizer(absmax[q_group(plan, i)], max_code);
    scratch.q_scale[i] = quantizer.scale;
    if (t.shape.fp8_scores) {
      float* values = scratch.q_values + int64_t{i} * t.shape.qk_channels;
      float* powers = scratch.q_powers + int64_t{i} * t.shape.qk_channels;
      uint8_t codes[256 + kLanes] = {};
      for (int c = 0; c < dim; ++c) codes[c] = E4M3::encode(quantizer.scaled(row[c]));
      kernels().expand(PFormat::kE4M3, codes, t.shape.qk_channels, values, powers);
    } else {
      int32_t* pairs = scratch.q_pairs + int64_t{i} * t.shape.pairs;
      for (int c = 0; c < dim; c += 2) {
        const int lo = integer_code(quantizer.scaled(row[c]), max_code);
        const int hi = c + 1 < dim ? integer_code(quantizer.scaled(row[c + 1]), max_code) : 0;
        pairs[c / 2] = static_cast<int32_t>(static_cast<uint32_t>(hi) << 16 |
                                            (static_cast<uint32_t>(lo) & 0xffffu));
      }
    }
  }
}

void score_correction(const Task& t, int batch, int kv_head, int64_t tile, Scratch& scratch) {
  const int dim = t.plan.head_dim, b_k = t.plan.tile.b_k;
  const int64_t at = k_tile_index(t, t.areas.sequences[batch], kv_head, tile);
  const uint16_t* smooth_k = t.areas.k_smooth + at * dim * b_k;
  const int64_t count = int64_t{dim} * b_k;
  if (product_dtype(t.plan) == SAGEATTN_F16) {
    kernels().expand(PFormat::kF16, smooth_k, count, scratch.smooth_k, nullptr);
  } else {
    for (int64_t i = 0; i < count; ++i) scratch.smooth_k[i] = bf16_to_float(smooth_k[i]);
  }
  kernels().project(scratch.q_mean, scratch.smooth_k, dim, b_k, scratch.ds);
}

double k_mean_score(const Task& t, int batch, int qo_head, int64_t query) {
  if (t.plan.smooth_k != SAGEATTN_SMOOTH_ON) return 0.0;
  const Sequence& sequence = t.areas.sequences[batch];
  const Strides& s = t.launch.q_strides;
  const int64_t at = head_offset(t, s, batch, sequence.q_start + query, qo_head);
  const float* mean = k_mean_at(t, batch, kv_head_of(t, qo_head));
  double dot = 0.0;
  for (int c = 0; c < t.plan.head_dim; ++c) {
    dot += static_cast<double>(load_element(t.plan.q_dtype, t.launch.q, at + c * s.dim)) * mean[c];
  }
  return static_cast<double>(t.plan.sm_scale) * dot;
}

}  // namespace sageattn::cpu
