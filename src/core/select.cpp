#include "src/core/select.h"

#include <algorithm>

#include "ptx/tile/tiles.h"

namespace sageattn {
namespace {

// Channels up to which Q, K, V and the accumulator of a tile fit the fast tiles' budgets.
constexpr int32_t kFastHeadDim = 128;

// Keys a V group when its mean and scale are taken per group. Promotion every 1024 keys costs
// attn_sm90a some 10 % less time than every 512, and accumulation still costs less than rounding V
// does, but where V drifts along the sequence: 0.56 % instead of 0.36 (docs/numerics.md, section 9).
constexpr int32_t kGroupInterval = 1024;

// Keys an fp16 accumulator can take: 64 * 512 (FP16 V) and 64 * 448 * 2.25 (E4M3) stay below 65504.
constexpr int32_t kF16Interval = 64;

bool is_fp8(int32_t pv_format) {
  return pv_format == SAGEATTN_PV_E4M3 || pv_format == SAGEATTN_PV_E5M2;
}

int32_t resolve_pv_format(const sageattn_attn_desc& desc, const PlanConfig& plan) {
  if (desc.pv_format != SAGEATTN_PV_AUTO) return desc.pv_format;
  if (plan.qk_format == SAGEATTN_QK_NONE) return SAGEATTN_PV_NONE;
  // Above kFastHeadDim there is no WGMMA kernel, and on sm_90 the E4M3 mma.sync is emulated: FP16
  // is faster there, and more accurate. sm_120 runs E4M3, but has not been measured.
  const bool wgmma = desc.kernel != SAGEATTN_KERNEL_MMA_SYNC;
  const bool fast = plan.arch == 89 || (plan.arch == 90 && wgmma);
  return fast && std::max(plan.head_dim, plan.head_dim_v) <= kFastHeadDim ? SAGEATTN_PV_E4M3
                                                                          : SAGEATTN_PV_F16;
}

// Group means take out what the truncating FP8 accumulator would lose, so that it can be promoted
// rarely. fp16 accumulators are promoted every 64 keys, too short for a mean of their own; the
// sequence's takes out V's constant part at no cost in the loop. fp32 sums lose nothing.
int32_t automatic_smooth_v(bool fp8, int32_t pv_accum) {
  if (fp8 && pv_accum == SAGEATTN_PV_ACCUM_TWO_LEVEL) return SAGEATTN_SMOOTH_V_GROUP;
  if (fp8 && pv_accum == SAGEATTN_PV_ACCUM_F16) return SAGEATTN_SMOOTH_V_SEQUENCE;
  return SAGEATTN_SMOOTH_V_OFF;
}

int32_t resolve_kernel(const sageattn_attn_desc& desc, const PlanConfig& plan) {
  if (desc.kernel != SAGEATTN_KERNEL_AUTO) return desc.kernel;
  // V must be 8 bit (wgmma wants it transposed in shared memory, which is done while quantizing)
  // and the accumulator fp32. What only the CPU backend has follows the tiles of its neighbours, so
  // that a comparison changes one thing at a time.
  const bool wgmma = plan.arch == 90 && std::max(plan.head_dim, plan.head_dim_v) <= kFastHeadDim &&
                     plan.pv_format != SAGEATTN_PV_F16 && plan.pv_accum != SAGEATTN_PV_ACCUM_F16;
  return wgmma ? SAGEATTN_KERNEL_WGMMA : SAGEATTN_KERNEL_MMA_SYNC;
}

int32_t resolve_promotion_interval(const sageattn_attn_desc& desc, const PlanConfig& plan) {
  if (desc.promotion_interval != 0) return desc.promotion_interval;
  if (plan.pv_accum == SAGEATTN_PV_ACCUM_F16) return kF16Interval;
  if (plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP || plan.v_scale == SAGEATTN_V_SCALE_GROUP) {
    // A warp of mma.sync holds 32 rows: registers leave no room for an accumulator beside the
    // output, so it lives for one tile only.
    return plan.kernel == SAGEATTN_KERNEL_WGMMA ? kGroupInterval : plan.tile.b_k;
  }
  return plan.pv_accum == SAGEATTN_PV_ACCUM_TWO_LEVEL ? plan.tile.b_k : 0;
}

// SAGEATTN_QK_NONE: nothing is quantized, so nothing else applies.
void resolve_exact(PlanConfig& plan) {
  plan.qk_format = SAGEATTN_QK_NONE;
  plan.pv_format = SAGEATTN_PV_NONE;
  plan.smooth_q = plan.smooth_k = SAGEATTN_SMOOTH_OFF;
  plan.smooth_v = SAGEATTN_SMOOTH_V_OFF;
  plan.rotation = SAGEATTN_ROTATION_NONE;
  plan.qk_granularity = plan.v_scale = plan.row_sum = plan.pv_accum = 0;
  plan.promotion_interval = plan.kernel = plan.pv_model = 0;
  plan.tile = select_tile(0, plan.head_dim, plan.head_dim_v);
}

}  // namespace

sageattn_attn_desc preset_desc(int32_t preset) {
  sageattn_attn_desc desc{};
  switch (preset) {
    case SAGEATTN_PRESET_SAGE1:
      desc.qk_format = SAGEATTN_QK_I8;
      desc.qk_granularity = SAGEATTN_GRANULARITY_PER_BLOCK;
      desc.smooth_k = SAGEATTN_SMOOTH_ON;
      desc.pv_format = SAGEATTN_PV_F16;
      desc.pv_accum = SAGEATTN_PV_ACCUM_F32;
      break;
    case SAGEATTN_PRESET_SAGE2_8B:
      desc.qk_format = SAGEATTN_QK_I8;
      desc.qk_granularity = SAGEATTN_GRANULARITY_PER_THREAD;
      desc.smooth_k = SAGEATTN_SMOOTH_ON;
      desc.pv_format = SAGEATTN_PV_E4M3;
      desc.pv_accum = SAGEATTN_PV_ACCUM_TWO_LEVEL;
      break;
    case SAGEATTN_PRESET_SAGE2_4B:
      desc.qk_format = SAGEATTN_QK_I4;
      desc.qk_granularity = SAGEATTN_GRANULARITY_PER_THREAD;
      desc.smooth_q = SAGEATTN_SMOOTH_ON;
      desc.smooth_k = SAGEATTN_SMOOTH_ON;
      desc.pv_format = SAGEATTN_PV_E4M3;
      desc.pv_accum = SAGEATTN_PV_ACCUM_TWO_LEVEL;
      break;
    case SAGEATTN_PRESET_SAGE2PP:
      desc.qk_format = SAGEATTN_QK_I8;
      desc.qk_granularity = SAGEATTN_GRANULARITY_PER_THREAD;
      desc.smooth_k = SAGEATTN_SMOOTH_ON;
      desc.pv_format = SAGEATTN_PV_E4M3;
      desc.pv_accum = SAGEATTN_PV_ACCUM_F16;
      break;
    case SAGEATTN_PRESET_EXACT:
      desc.qk_format = SAGEATTN_QK_NONE;
      desc.pv_format = SAGEATTN_PV_NONE;
      break;
    default:  // SAGEATTN_PRESET_AUTO
      break;
  }
  return desc;
}

bool arch_has_fp8(int32_t arch) { return arch >= 89; }

bool has_pv_model(int32_t pv_format, int32_t pv_accum) {
  return is_fp8(pv_format) &&
         (pv_accum == SAGEATTN_PV_ACCUM_TWO_LEVEL || pv_accum == SAGEATTN_PV_ACCUM_SINGLE_LEVEL);
}

void resolve_numerics(const sageattn_attn_desc& desc, PlanConfig& plan) {
  const auto pick = [](int32_t given, int32_t automatic) { return given != 0 ? given : automatic; };

  plan.qk_format =
      pick(desc.qk_format, desc.pv_format == SAGEATTN_PV_NONE ? SAGEATTN_QK_NONE : SAGEATTN_QK_I8);
  plan.pv_format = resolve_pv_format(desc, plan);
  if (plan.qk_format == SAGEATTN_QK_NONE) return resolve_exact(plan);

  const bool fp8 = is_fp8(plan.pv_format);
  plan.qk_granularity = pick(desc.qk_granularity, SAGEATTN_GRANULARITY_PER_THREAD);
  plan.smooth_q = pick(desc.smooth_q,
                       plan.qk_format == SAGEATTN_QK_I4 ? SAGEATTN_SMOOTH_ON : SAGEATTN_SMOOTH_OFF);
  plan.smooth_k = pick(desc.smooth_k, SAGEATTN_SMOOTH_ON);
  plan.rotation = desc.rotation;
  plan.pv_accum =
      pick(desc.pv_accum,
           plan.pv_format == SAGEATTN_PV_F16 ? SAGEATTN_PV_ACCUM_F32 : SAGEATTN_PV_ACCUM_TWO_LEVEL);
  plan.smooth_v = pick(desc.smooth_v, automatic_smooth_v(fp8, plan.pv_accum));
  plan.v_scale =
      pick(desc.v_scale, plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP ? SAGEATTN_V_SCALE_GROUP
                                                                  : SAGEATTN_V_SCALE_CHANNEL);
  plan.row_sum = pick(desc.row_sum, SAGEATTN_ROW_SUM_ROUNDED_P);
  plan.kernel = resolve_kernel(desc, plan);
  // mma.sync E4M3 is unpacked to fp16 on sm_90. Where no model applies the sums are plain, too.
  const bool hmma = !has_pv_model(plan.pv_format, plan.pv_accum) ||
                    (plan.kernel == SAGEATTN_KERNEL_MMA_SYNC && plan.arch == 90);
  plan.pv_model = pick(desc.pv_model, hmma ? SAGEATTN_PV_MODEL_HMMA : SAGEATTN_PV_MODEL_QMMA13);
  plan.tile = select_tile(plan.kernel, plan.head_dim, plan.head_dim_v);
  plan.promotion_interval = resolve_promotion_interval(desc, plan);
}

Tile select_tile(int32_t kernel, int32_t head_dim, int32_t head_dim_v) {
  const TileShape shape =
      tile_shape(head_dims(head_dim, head_dim_v), kernel == SAGEATTN_KERNEL_WGMMA);
  return {.b_q = shape.b_q, .rows_per_warp = shape.rows_per_warp, .b_k = shape.b_k};
}

}  // namespace sageattn
