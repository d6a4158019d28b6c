#include "src/cpu/layout.h"

#include <algorithm>
#include <bit>

#include "include/sageattn.h"

namespace sageattn::cpu {

namespace {

// Tiles of `size` that sequences of at most max_len and total tokens in all can have.
int64_t max_tiles(int64_t batch, int64_t max_len, int64_t total, int64_t size) {
  return std::min(batch * ceil_div(max_len, size), total / size + batch);
}

Scratch carve_exact(const PlanConfig& plan, Carver& c) {
  Scratch s{};
  const int64_t rows = plan.tile.b_q, keys = plan.tile.b_k;
  s.exact_q = c.take<double>(rows * plan.head_dim);
  s.exact_k = c.take<double>(keys * plan.head_dim);
  s.exact_v = c.take<double>(keys * plan.head_dim_v);
  s.exact_s = c.take<double>(keys);
  s.exact_out = c.take<double>(rows * plan.head_dim_v);
  s.exact_max = c.take<double>(rows);
  s.exact_sum = c.take<double>(rows);
  return s;
}

Scratch carve_quantized(const PlanConfig& plan, const Shape& shape, Carver& c) {
  Scratch s{};
  const int64_t b_q = plan.tile.b_q, b_k = plan.tile.b_k;
  const int64_t dim = std::max(shape.rotated_dim, shape.channels);
  s.rows = c.take<float>(std::max(b_q, b_k) * shape.rotated_dim);
  s.lanes = c.take<float>(48 * dim);
  s.row = c.take<float>(dim);
  s.channel_a = c.take<float>(dim);
  s.channel_b = c.take<float>(dim);
  s.q_mean = c.take<float>(dim);
  s.q_scale = c.take<float>(b_q);
  s.visible = c.take<int32_t>(2 * b_q);
  if (shape.fp8_scores) {
    s.q_values = c.take<float>(b_q * shape.qk_channels);
    s.q_powers = c.take<float>(b_q * shape.qk_channels);
    s.k_values = c.take<float>(b_k * shape.qk_channels);
    s.k_powers = c.take<float>(b_k * shape.qk_channels);
  } else {
    s.q_pairs = c.take<int32_t>(b_q * shape.pairs);
  }
  if (plan.smooth_q == SAGEATTN_SMOOTH_ON) {
    s.ds = c.take<float>(b_k);
    s.smooth_k = c.take<float>(b_k * plan.head_dim);
  }
  s.v_values = c.take<float>(b_k * shape.channels);
  s.v_powers = c.take<float>(b_k * shape.channels);
  s.zeros = c.take<float>(shape.channels);
  s.row_max = c.take<float>(b_q);
  s.flushed_max = c.take<float>(b_q);
  s.group_sum = c.take<float>(b_q);
  s.row_sum = c.take<float>(b_q);
  s.acc = c.take<float>(b_q * shape.channels);
  s.out = c.take<float>(b_q * shape.channels);
  s.scores = c.take<float>(2 * b_k);
  return s;
}

}  // namespace

Shape::Shape(const PlanConfig& plan) {
  rotated_dim = plan.head_dim;
  if (plan.rotation == SAGEATTN_ROTATION_HADAMARD) {
    rotated_dim = static_cast<int>(std::bit_ceil(static_cast<unsigned>(plan.head_dim)));
  }
  fp8_scores = plan.qk_format == SAGEATTN_QK_E4M3;
  pairs = static_cast<int>(ceil_div(rotated_dim, 2));
  qk_channels = static_cast<int>(round_up(rotated_dim, 32));
  k_tile_bytes = int64_t{plan.tile.b_k} * (fp8_scores ? qk_channels : pairs * 4);
  channels = static_cast<int>(round_up(plan.head_dim_v, kLanes));
  v_code_bytes = plan.pv_format == SAGEATTN_PV_F16 ? 2 : 1;
  grouped = plan.v_scale == SAGEATTN_V_SCALE_GROUP || plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP;
  max_k_tiles = max_tiles(plan.max_batch, plan.max_kv_len, plan.max_total_kv, plan.tile.b_k);
  max_v_groups = grouped ? max_tiles(plan.max_batch, plan.max_kv_len, plan.max_total_kv,
                                     plan.promotion_interval)
                         : plan.max_batch;
}

Areas carve(const PlanConfig& plan, int threads, Carver& c) {
  Areas areas{};
  areas.sequences = c.take<Sequence>(plan.max_batch);
  areas.scratch = c.take<Scratch>(threads);
  const bool exact = plan.qk_format == SAGEATTN_QK_NONE;
  const Shape shape(plan);
  if (!exact) {
    const int64_t kv_heads = plan.num_kv_heads;
    const int64_t per_head = int64_t{plan.max_batch} * plan.head_dim;
    areas.k_mean = c.take<float>(kv_heads * per_head);
    if (plan.rotation == SAGEATTN_ROTATION_SMOOTHATTN) {
      areas.k_factor = c.take<float>(kv_heads * per_head);
    }
    if (plan.qk_granularity == SAGEATTN_GRANULARITY_PER_TENSOR) {
      areas.q_scale = c.take<float>(int64_t{plan.num_qo_heads} * plan.max_batch);
    }
    // Heads times tiles times the bytes of a tile (below 2^20) can pass 2^63.
    constexpr int64_t kMost = INT64_MAX >> 20;
    int64_t tiles, groups;
    if (__builtin_mul_overflow(kv_heads, shape.max_k_tiles, &tiles) || tiles > kMost ||
        __builtin_mul_overflow(kv_heads, shape.max_v_groups, &groups) || groups > kMost) {
      c.fail();
      return areas;
    }
    areas.k_codes = c.take<uint8_t>(tiles * shape.k_tile_bytes);
    areas.k_scale = c.take<float>(tiles * plan.tile.b_k);
    if (plan.smooth_q == SAGEATTN_SMOOTH_ON) {
      areas.k_smooth = c.take<uint16_t>(tiles * plan.tile.b_k * plan.head_dim);
    }
    areas.v_codes = c.take<uint8_t>(tiles * plan.tile.b_k * shape.channels * shape.v_code_bytes);
    areas.v_scale = c.take<float>(groups * shape.channels);
    areas.v_mean = c.take<float>(groups * shape.channels);
  }
  for (int i = 0; i < threads; ++i) {
    const Scratch scratch = exact ? carve_exact(plan, c) : carve_quantized(plan, shape, c);
    if (areas.scratch != nullptr) areas.scratch[i] = scratch;
  }
  return areas;
}

}  // namespace sageattn::cpu
