#include "src/cpu/backend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "include/sageattn.h"
#include "ptx/common/mask.h"
#include "src/cpu/exact.h"
#include "src/cpu/formats.h"
#include "src/cpu/kernels.h"
#include "src/cpu/layout.h"
#include "src/cpu/quantize.h"
#include "src/cpu/sequences.h"

namespace sageattn::cpu {

namespace {

static_assert(static_cast<int>(MaskKind::kNone) == SAGEATTN_MASK_NONE);
static_assert(static_cast<int>(MaskKind::kCausalBottomRight) == SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT);
static_assert(static_cast<int>(MaskKind::kCausalTopLeft) == SAGEATTN_MASK_CAUSAL_TOP_LEFT);
static_assert(static_cast<int>(MaskKind::kWindow) == SAGEATTN_MASK_WINDOW);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

PFormat format_of(int32_t pv_format) {
  switch (pv_format) {
    case SAGEATTN_PV_F16:
      return PFormat::kF16;
    case SAGEATTN_PV_E5M2:
      return PFormat::kE5M2;
    case SAGEATTN_PV_I8:
      return PFormat::kI8;
    default:
      return PFormat::kE4M3;
  }
}

// The factor that brings P from [0, 1] to its format's range.
float p_factor(PFormat format) {
  switch (format) {
    case PFormat::kE4M3:
      return E4M3::kMax;
    case PFormat::kE5M2:
      return E5M2::kMax;
    case PFormat::kI8:
      return 127.0f;
    case PFormat::kF16:
      break;
  }
  return 1.0f;
}

PvModel model_of(const PlanConfig& plan) {
  if (plan.pv_format == SAGEATTN_PV_I8) return PvModel::kI8;
  if (plan.pv_accum == SAGEATTN_PV_ACCUM_F16) return PvModel::kF16;
  const bool tensor_core = plan.pv_format != SAGEATTN_PV_F16 &&
                           plan.pv_accum != SAGEATTN_PV_ACCUM_F32 &&
                           plan.pv_model == SAGEATTN_PV_MODEL_QMMA13;
  return tensor_core ? PvModel::kTensorFp8 : PvModel::kChainF32;
}

// What does not change from tile to tile.
AttendTile make_tile(const Task& task, Scratch& scratch) {
  const PlanConfig& plan = task.plan;
  AttendTile t{};
  t.fp8_scores = task.shape.fp8_scores;
  t.pairs = task.shape.pairs;
  t.q_pairs = scratch.q_pairs;
  t.qk_channels = task.shape.qk_channels;
  t.q_values = scratch.q_values;
  t.q_powers = scratch.q_powers;
  t.k_values = scratch.k_values;
  t.k_powers = scratch.k_powers;
  t.b_k = plan.tile.b_k;
  t.ds = plan.smooth_q == SAGEATTN_SMOOTH_ON ? scratch.ds : nullptr;
  t.ds_scale = score_scale(plan);
  t.q_scale = scratch.q_scale;
  t.visible = scratch.visible;
  t.p_format = format_of(plan.pv_format);
  t.pv_model = model_of(plan);
  t.p_log2 = static_cast<float>(std::log2(static_cast<double>(p_factor(t.p_format))));
  t.sum_rounded = plan.row_sum == SAGEATTN_ROW_SUM_ROUNDED_P;
  t.f16_step = plan.pv_format == SAGEATTN_PV_F16 ? 16 : 32;
  t.chunk = plan.promotion_interval == 0 ? t.b_k : std::min(t.b_k, plan.promotion_interval);
  t.channels = task.shape.channels;
  t.v_values = scratch.v_values;
  t.v_powers = scratch.v_powers;
  t.grouped = task.shape.grouped;
  t.row_max = scratch.row_max;
  t.flushed_max = scratch.flushed_max;
  t.group_sum = scratch.group_sum;
  t.row_sum = scratch.row_sum;
  t.acc = scratch.acc;
  t.out = scratch.out;
  t.scratch = scratch.scores;
  return t;
}

void reset_rows(const AttendTile& t, int rows) {
  std::fill_n(t.row_max, rows, -kInfinity);
  std::fill_n(t.flushed_max, rows, -kInfinity);
  std::fill_n(t.group_sum, rows, 0.0f);
  std::fill_n(t.row_sum, rows, 0.0f);
  std::fill_n(t.acc, int64_t{rows} * t.channels, 0.0f);
  std::fill_n(t.out, int64_t{rows} * t.channels, 0.0f);
}

// V's scales and means as the flush of `group` wants them.
void set_group(const Task& task, int batch, int kv_head, int64_t group, Scratch& scratch,
               AttendTile& t) {
  if (!task.shape.grouped) return;
  const int64_t at = v_group_index(task, batch, kv_head, group) * t.channels;
  t.v_scale = task.areas.v_scale + at;
  t.v_scale_stride = t.v_mean_stride = t.channels;
  t.v_mean = task.areas.v_mean + at;
  if (task.plan.smooth_v != SAGEATTN_SMOOTH_V_GROUP) {
    t.v_mean = scratch.zeros;
    t.v_mean_stride = 0;
  }
}

// Loads one tile of K and V codes.
void load_kv_tile(const Task& task, int batch, int kv_head, int64_t tile, Scratch& scratch,
                  AttendTile& t) {
  const PlanConfig& plan = task.plan;
  const int64_t at = k_tile_index(task, task.areas.sequences[batch], kv_head, tile);
  const uint8_t* k = task.areas.k_codes + at * task.shape.k_tile_bytes;
  t.k_scale = task.areas.k_scale + at * t.b_k;
  if (t.fp8_scores) {
    kernels().expand(PFormat::kE4M3, k, task.shape.k_tile_bytes, scratch.k_values,
                     scratch.k_powers);
  } else {
    t.k_pairs = reinterpret_cast<const int32_t*>(k);
  }
  if (t.ds != nullptr) score_correction(task, batch, kv_head, tile, scratch);
  const int64_t count = int64_t{t.b_k} * t.channels;
  kernels().expand(t.p_format, task.areas.v_codes + at * count * task.shape.v_code_bytes, count,
                   scratch.v_values, scratch.v_powers);

  const int64_t first_key = tile * t.b_k;
  const int64_t interval = plan.promotion_interval;
  t.flush_at = t.b_k + 1;
  t.flush_every = 0;
  if (interval == 0) return;
  if (interval <= t.b_k) {
    t.flush_at = t.flush_every = static_cast<int>(interval);
  } else if ((first_key + t.b_k) % interval == 0) {
    t.flush_at = t.b_k;
  }
  set_group(task, batch, kv_head, first_key / interval, scratch, t);
}

struct RowWriter {
  const Task& task;
  int batch, head;

  int64_t out_at(int64_t row) const {
    const Sequence& s = task.areas.sequences[batch];
    const Strides& o = task.launch.out_strides;
    return batch_index() * o.batch + (s.q_start + row) * o.token + head * o.head;
  }
  void lse(int64_t row, float value) const {
    if (task.launch.lse == nullptr) return;
    const Sequence& s = task.areas.sequences[batch];
    const Strides& l = task.launch.lse_strides;
    task.launch.lse[batch_index() * l.batch + (s.q_start + row) * l.token + head * l.head] = value;
  }
  void fill(int64_t row, float value, float lse_value) const {
    for (int c = 0; c < task.plan.head_dim_v; ++c) {
      store_element(task.plan.out_dtype, task.launch.out,
                    out_at(row) + c * task.launch.out_strides.dim, value);
    }
    lse(row, lse_value);
  }

 private:
  int64_t batch_index() const { return task.plan.batch_mode == SAGEATTN_BATCH_VARLEN ? 0 : batch; }
};

void finish_row(const Task& task, const AttendTile& t, int kv_head, int64_t first_row, int row,
                const RowWriter& writer) {
  const PlanConfig& plan = task.plan;
  const float l = t.row_sum[row];
  if (l == 0.0f) {
    writer.fill(first_row + row, 0.0f, -kInfinity);
    return;
  }
  const float inverse = 1.0f / l;
  const int64_t sequence_row = v_group_index(task, writer.batch, kv_head, 0) * t.channels;
  const float* out = t.out + int64_t{row} * t.channels;
  for (int c = 0; c < plan.head_dim_v; ++c) {
    const float scale = t.grouped ? 1.0f : task.areas.v_scale[sequence_row + c];
    const bool add_mean = plan.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE;
    const float mean = add_mean ? task.areas.v_mean[sequence_row + c] : 0.0f;
    store_element(plan.out_dtype, task.launch.out,
                  writer.out_at(first_row + row) + c * task.launch.out_strides.dim,
                  std::fma(out[c] * inverse, scale, mean));
  }
  const double log_sum = static_cast<double>(t.row_max[row]) +
                         std::log2(static_cast<double>(l) / p_factor(t.p_format));
  writer.lse(first_row + row,
             static_cast<float>(log_sum * 0.69314718055994530942 +
                                k_mean_score(task, writer.batch, writer.head, first_row + row)));
}

// One tile of queries of one head against all the keys that it sees.
void attend_q_tile(const Task& task, int batch, int head, int64_t q_tile, Scratch& scratch) {
  const PlanConfig& plan = task.plan;
  const Sequence& sequence = task.areas.sequences[batch];
  const int kv_head = head / (plan.num_qo_heads / plan.num_kv_heads);
  const int64_t first_row = q_tile * plan.tile.b_q;
  const auto rows = static_cast<int>(std::min<int64_t>(plan.tile.b_q, sequence.qo_len - first_row));
  const RowWriter writer{task, batch, head};

  const Band band = make_band(static_cast<MaskKind>(plan.mask), plan.window_left, plan.window_right,
                              sequence.qo_len, sequence.kv_len);
  int32_t first_key = sequence.kv_len, end_key = 0;
  for (int i = 0; i < rows; ++i) {
    const auto query = static_cast<int32_t>(first_row + i);
    if (band.first_key(query) >= band.end_key(query)) continue;
    first_key = std::min(first_key, band.first_key(query));
    end_key = std::max(end_key, band.end_key(query));
  }
  if (first_key >= end_key) {
    for (int i = 0; i < rows; ++i) writer.fill(first_row + i, 0.0f, -kInfinity);
    return;
  }

  quantize_q_tile(task, batch, head, q_tile, scratch);
  for (int i = 0; i < rows; ++i) scratch.q_scale[i] *= score_scale(plan);
  std::fill_n(scratch.zeros, task.shape.channels, 0.0f);
  AttendTile t = make_tile(task, scratch);
  t.rows = rows;
  reset_rows(t, rows);
  const int64_t last_tile = (end_key - 1) / t.b_k;
  for (int64_t tile = first_key / t.b_k; tile <= last_tile; ++tile) {
    load_kv_tile(task, batch, kv_head, tile, scratch, t);
    const int64_t key = tile * t.b_k;
    for (int i = 0; i < rows; ++i) {
      const auto query = static_cast<int32_t>(first_row + i);
      const auto within = [&](int32_t j) {
        return static_cast<int32_t>(std::clamp<int64_t>(j - key, 0, t.b_k));
      };
      scratch.visible[2 * i] = within(band.first_key(query));
      scratch.visible[2 * i + 1] = within(band.end_key(query));
    }
    kernels().attend(t);
  }
  if (plan.promotion_interval != 0) {
    set_group(task, batch, kv_head, last_tile * t.b_k / plan.promotion_interval, scratch, t);
  }
  for (int i = 0; i < rows; ++i) {
    kernels().flush(t, i, t.v_scale, t.v_mean);
    finish_row(task, t, kv_head, first_row, i, writer);
  }
}

// ---- Items of the pool ----

void quantize_kv_item(void* self, int64_t index, int slot) {
  const Task& task = *static_cast<const Task*>(self);
  const int64_t pair = index / 2;
  const auto batch = static_cast<int>(pair / task.plan.num_kv_heads);
  const auto head = static_cast<int>(pair % task.plan.num_kv_heads);
  if (task.areas.sequences[batch].bad || task.areas.sequences[batch].kv_len == 0) return;
  const auto quantize = index % 2 == 0 ? quantize_k : quantize_v;
  quantize(task, batch, head, task.areas.scratch[slot]);
}

void scale_q_item(void* self, int64_t index, int slot) {
  const Task& task = *static_cast<const Task*>(self);
  const auto batch = static_cast<int>(index / task.plan.num_qo_heads);
  if (task.areas.sequences[batch].bad || task.areas.sequences[batch].kv_len == 0) return;
  scale_q(task, batch, static_cast<int>(index % task.plan.num_qo_heads), task.areas.scratch[slot]);
}

void attend_item(void* self, int64_t index, int slot) {
  const Task& task = *static_cast<const Task*>(self);
  const auto head = static_cast<int>(index / task.q_tiles);
  const int64_t tile = index % task.q_tiles;
  const int batch = sequence_of_q_tile(task.areas.sequences, task.launch.batch, tile);
  const Sequence& sequence = task.areas.sequences[batch];
  const int64_t own_tile = tile - sequence.first_q_tile;
  if (sequence.bad) {
    const RowWriter writer{task, batch, head};
    const int64_t end = std::min<int64_t>((own_tile + 1) * task.plan.tile.b_q, sequence.qo_len);
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = own_tile * task.plan.tile.b_q; i < end; ++i) writer.fill(i, nan, nan);
  } else if (task.plan.qk_format == SAGEATTN_QK_NONE) {
    exact_q_tile(task.plan, task.launch, sequence, batch, head, own_tile, task.areas.scratch[slot]);
  } else {
    attend_q_tile(task, batch, head, own_tile, task.areas.scratch[slot]);
  }
}

}  // namespace

int64_t workspace_bytes(const PlanConfig& plan, int threads) {
  Carver carver(nullptr);
  carve(plan, threads, carver);
  return carver.size();
}

void execute(const PlanConfig& plan, const Launch& launch, Pool& pool) {
  Carver carver(launch.workspace);
  Task task{plan, launch, Shape(plan), carve(plan, pool.threads(), carver), 0};
  task.q_tiles = resolve_sequences(plan, launch, task.areas.sequences);
  if (plan.qk_format != SAGEATTN_QK_NONE) {
    pool.run(int64_t{launch.batch} * plan.num_kv_heads * 2, quantize_kv_item, &task);
    if (plan.qk_granularity == SAGEATTN_GRANULARITY_PER_TENSOR) {
      pool.run(int64_t{launch.batch} * plan.num_qo_heads, scale_q_item, &task);
    }
  }
  pool.run(task.q_tiles * plan.num_qo_heads, attend_item, &task);
}

const char* isa_name() { return kernels().isa; }

}  // namespace sageattn::cpu
