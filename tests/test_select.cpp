// What AUTO becomes, over archs, presets and head dimensions; and the tiles.
#include <string>
#include <vector>

#include "src/core/error.h"
#include "src/core/select.h"
#include "src/core/validate.h"
#include "tests/catch.h"

namespace {

using sageattn::PlanConfig;

sageattn_attn_desc make_desc(int32_t preset, int32_t head_dim, int32_t head_dim_v = 0) {
  sageattn_attn_desc desc = sageattn::preset_desc(preset);
  desc.q_dtype = SAGEATTN_F16;
  desc.head_dim = head_dim;
  desc.head_dim_v = head_dim_v;
  desc.num_qo_heads = 1;
  desc.max_qo_len = desc.max_kv_len = 1000;
  return desc;
}

PlanConfig resolve(const sageattn_attn_desc& desc, int32_t arch) {
  return sageattn::check_attn_desc(desc, SAGEATTN_BACKEND_CPU, arch);
}

// Short names, so that a table fits in a line.
enum { kNone = 0 };
enum { kMma = SAGEATTN_KERNEL_MMA_SYNC, kWgmma = SAGEATTN_KERNEL_WGMMA };
enum { kI8 = SAGEATTN_QK_I8, kI4 = SAGEATTN_QK_I4 };
enum { kE4M3 = SAGEATTN_PV_E4M3, kF16 = SAGEATTN_PV_F16 };
enum {
  kTwoLevel = SAGEATTN_PV_ACCUM_TWO_LEVEL,
  kF16Accum = SAGEATTN_PV_ACCUM_F16,
  kF32Accum = SAGEATTN_PV_ACCUM_F32
};
enum {
  kOff = SAGEATTN_SMOOTH_V_OFF,
  kSeq = SAGEATTN_SMOOTH_V_SEQUENCE,
  kGroup = SAGEATTN_SMOOTH_V_GROUP
};
enum { kQmma = SAGEATTN_PV_MODEL_QMMA13, kHmma = SAGEATTN_PV_MODEL_HMMA };

TEST_CASE("presets over archs and head dimensions") {
  struct Row {
    int32_t preset, arch, head_dim, head_dim_v;
    int32_t qk, pv, kernel, accum, interval, model;
    int32_t smooth_v;
    bool smooth_q;
  };
  const Row rows[] = {
      // preset, arch, d, dv, qk, pv, kernel, accum, interval, model, smooth_v, smooth_q
      {SAGEATTN_PRESET_AUTO, 80, 64, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_AUTO, 86, 128, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_AUTO, 89, 128, 0, kI8, kE4M3, kMma, kTwoLevel, 64, kQmma, kGroup, false},
      {SAGEATTN_PRESET_AUTO, 89, 129, 64, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_AUTO, 90, 128, 0, kI8, kE4M3, kWgmma, kTwoLevel, 1024, kQmma, kGroup, false},
      {SAGEATTN_PRESET_AUTO, 90, 1, 128, kI8, kE4M3, kWgmma, kTwoLevel, 1024, kQmma, kGroup, false},
      {SAGEATTN_PRESET_AUTO, 90, 64, 129, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_AUTO, 90, 256, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_AUTO, 120, 64, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_SAGE1, 80, 64, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_SAGE1, 90, 64, 0, kI8, kF16, kMma, kF32Accum, 0, kHmma, kOff, false},
      {SAGEATTN_PRESET_SAGE2_8B, 89, 64, 0, kI8, kE4M3, kMma, kTwoLevel, 64, kQmma, kGroup, false},
      {SAGEATTN_PRESET_SAGE2_8B, 90, 64, 0, kI8, kE4M3, kWgmma, kTwoLevel, 1024, kQmma, kGroup,
       false},
      {SAGEATTN_PRESET_SAGE2_8B, 90, 192, 0, kI8, kE4M3, kMma, kTwoLevel, 64, kHmma, kGroup, false},
      {SAGEATTN_PRESET_SAGE2_8B, 120, 64, 0, kI8, kE4M3, kMma, kTwoLevel, 64, kQmma, kGroup, false},
      {SAGEATTN_PRESET_SAGE2_4B, 89, 64, 0, kI4, kE4M3, kMma, kTwoLevel, 64, kQmma, kGroup, true},
      {SAGEATTN_PRESET_SAGE2_4B, 90, 64, 0, kI4, kE4M3, kWgmma, kTwoLevel, 1024, kQmma, kGroup,
       true},
      {SAGEATTN_PRESET_SAGE2PP, 89, 64, 0, kI8, kE4M3, kMma, kF16Accum, 64, kHmma, kSeq, false},
      {SAGEATTN_PRESET_SAGE2PP, 90, 64, 0, kI8, kE4M3, kMma, kF16Accum, 64, kHmma, kSeq, false},
  };
  for (const Row& row : rows) {
    CAPTURE(row.preset, row.arch, row.head_dim, row.head_dim_v);
    const PlanConfig plan = resolve(make_desc(row.preset, row.head_dim, row.head_dim_v), row.arch);
    CHECK(plan.qk_format == row.qk);
    CHECK(plan.pv_format == row.pv);
    CHECK(plan.kernel == row.kernel);
    CHECK(plan.pv_accum == row.accum);
    CHECK(plan.promotion_interval == row.interval);
    CHECK(plan.pv_model == row.model);
    CHECK(plan.smooth_v == row.smooth_v);
    CHECK(plan.v_scale ==
          (row.smooth_v == kGroup ? SAGEATTN_V_SCALE_GROUP : SAGEATTN_V_SCALE_CHANNEL));
    CHECK(plan.smooth_q == (row.smooth_q ? SAGEATTN_SMOOTH_ON : SAGEATTN_SMOOTH_OFF));
    CHECK(plan.smooth_k == SAGEATTN_SMOOTH_ON);
    CHECK(plan.row_sum == SAGEATTN_ROW_SUM_ROUNDED_P);
    CHECK(plan.qk_granularity == (row.preset == SAGEATTN_PRESET_SAGE1
                                      ? SAGEATTN_GRANULARITY_PER_BLOCK
                                      : SAGEATTN_GRANULARITY_PER_THREAD));
    CHECK(plan.rotation == SAGEATTN_ROTATION_NONE);
  }
}

TEST_CASE("presets of FP8 need an arch that has it") {
  for (const int32_t preset :
       {SAGEATTN_PRESET_SAGE2_8B, SAGEATTN_PRESET_SAGE2_4B, SAGEATTN_PRESET_SAGE2PP}) {
    for (const int32_t arch : {80, 86}) {
      CHECK_THROWS_AS(resolve(make_desc(preset, 64), arch), sageattn::Error);
    }
  }
  CHECK_FALSE(sageattn::arch_has_fp8(80));
  CHECK_FALSE(sageattn::arch_has_fp8(86));
  CHECK(sageattn::arch_has_fp8(89));
  CHECK(sageattn::arch_has_fp8(90));
  CHECK(sageattn::arch_has_fp8(120));
}

TEST_CASE("EXACT: fields that do not apply are 0") {
  for (const int32_t arch : {80, 86, 89, 90, 120}) {
    sageattn_attn_desc by_qk = make_desc(SAGEATTN_PRESET_AUTO, 64), by_pv = by_qk, off = by_qk;
    by_qk.qk_format = SAGEATTN_QK_NONE;
    by_pv.pv_format = SAGEATTN_PV_NONE;
    off.pv_format = SAGEATTN_PV_NONE;
    off.smooth_q = off.smooth_k = SAGEATTN_SMOOTH_OFF;
    off.smooth_v = SAGEATTN_SMOOTH_V_OFF;
    for (const sageattn_attn_desc& desc :
         {make_desc(SAGEATTN_PRESET_EXACT, 64), by_qk, by_pv, off}) {
      const PlanConfig plan = resolve(desc, arch);
      CHECK(plan.qk_format == SAGEATTN_QK_NONE);
      CHECK(plan.pv_format == SAGEATTN_PV_NONE);
      CHECK(plan.smooth_q == SAGEATTN_SMOOTH_OFF);
      CHECK(plan.smooth_k == SAGEATTN_SMOOTH_OFF);
      CHECK(plan.smooth_v == SAGEATTN_SMOOTH_V_OFF);
      for (const int32_t field :
           {plan.qk_granularity, plan.v_scale, plan.rotation, plan.row_sum, plan.pv_accum,
            plan.promotion_interval, plan.kernel, plan.pv_model}) {
        CHECK(field == kNone);
      }
      CHECK(plan.tile.b_q == 128);
      CHECK(plan.tile.b_k == 64);
    }
  }
}

TEST_CASE("kernel AUTO") {
  sageattn_attn_desc desc = make_desc(SAGEATTN_PRESET_AUTO, 64);
  desc.kernel = SAGEATTN_KERNEL_MMA_SYNC;  // on sm_90 E4M3 mma.sync is emulated: F16
  CHECK(resolve(desc, 90).pv_format == SAGEATTN_PV_F16);
  CHECK(resolve(desc, 89).pv_format == SAGEATTN_PV_E4M3);
  desc.pv_format = SAGEATTN_PV_E4M3;
  CHECK(resolve(desc, 90).pv_model == SAGEATTN_PV_MODEL_HMMA);
  desc.pv_model = SAGEATTN_PV_MODEL_QMMA13;
  CHECK(resolve(desc, 90).pv_model == SAGEATTN_PV_MODEL_QMMA13);

  // What only the CPU backend computes follows the tiles of the arch's own kernel.
  const auto variant = [](void (*change)(sageattn_attn_desc&)) {
    sageattn_attn_desc changed = make_desc(SAGEATTN_PRESET_AUTO, 128);
    change(changed);
    return resolve(changed, 90).kernel;
  };
  CHECK(variant([](auto& d) { d.qk_format = SAGEATTN_QK_E4M3; }) == SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.pv_format = SAGEATTN_PV_E5M2; }) == SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.pv_format = SAGEATTN_PV_I8; }) == SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F32; }) == SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL; }) ==
        SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.qk_granularity = SAGEATTN_GRANULARITY_PER_TOKEN; }) ==
        SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.rotation = SAGEATTN_ROTATION_HADAMARD; }) == SAGEATTN_KERNEL_WGMMA);
  CHECK(variant([](auto& d) { d.pv_format = SAGEATTN_PV_F16; }) == SAGEATTN_KERNEL_MMA_SYNC);
  CHECK(variant([](auto& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16; }) == SAGEATTN_KERNEL_MMA_SYNC);
  CHECK(variant([](auto& d) { d.head_dim_v = 129; }) == SAGEATTN_KERNEL_MMA_SYNC);
}

TEST_CASE("smoothing, scales and promotion of V") {
  struct Row {
    const char* what;
    int32_t pv, accum, given_smooth, given_scale, given_interval;
    int32_t smooth, scale, interval;
  };
  enum { kChannel = SAGEATTN_V_SCALE_CHANNEL, kByGroup = SAGEATTN_V_SCALE_GROUP };
  enum { kSingle = SAGEATTN_PV_ACCUM_SINGLE_LEVEL };
  enum { kE5M2 = SAGEATTN_PV_E5M2, kPvI8 = SAGEATTN_PV_I8 };
  const Row rows[] = {
      {"E4M3", kE4M3, 0, 0, 0, 0, kGroup, kByGroup, 1024},
      {"E5M2", kE5M2, 0, 0, 0, 0, kGroup, kByGroup, 1024},
      {"I8 is never truncated", kPvI8, 0, 0, 0, 0, kOff, kChannel, 128},
      {"F16", kF16, 0, 0, 0, 0, kOff, kChannel, 0},
      {"F16 two-level", kF16, kTwoLevel, 0, 0, 0, kOff, kChannel, 64},
      {"explicit scale, AUTO mean", kE4M3, 0, 0, kChannel, 0, kGroup, kChannel, 1024},
      {"sequence mean", kE4M3, 0, kSeq, 0, 0, kSeq, kChannel, 128},
      {"no mean, group scale", kE4M3, 0, kOff, kByGroup, 0, kOff, kByGroup, 1024},
      {"no mean", kE4M3, 0, kOff, 0, 0, kOff, kChannel, 128},
      {"no mean, rarely promoted", kE4M3, 0, kOff, 0, 1024, kOff, kChannel, 1024},
      {"half a tile", kE4M3, 0, kOff, 0, 64, kOff, kChannel, 64},
      {"explicit interval", kE4M3, 0, 0, 0, 256, kGroup, kByGroup, 256},
      {"never promoted", kE4M3, kSingle, 0, 0, 0, kOff, kChannel, 0},
      {"fp32", kE4M3, kF32Accum, 0, 0, 0, kOff, kChannel, 0},
      {"fp32 in groups", kE4M3, kF32Accum, kGroup, 0, 0, kGroup, kByGroup, 1024},
      {"fp32 in small groups", kE4M3, kF32Accum, 0, kByGroup, 32, kOff, kByGroup, 32},
      {"F16 in groups", kF16, kF32Accum, kGroup, 0, 0, kGroup, kByGroup, 64},
      {"fp16 accumulators", kE4M3, kF16Accum, 0, 0, 0, kSeq, kChannel, 64},
      {"FP16 V in fp16 accumulators", kF16, kF16Accum, 0, 0, 0, kOff, kChannel, 64},
      {"fp16 accumulators in groups", kF16, kF16Accum, kGroup, 0, 0, kGroup, kByGroup, 64},
      {"fp16 accumulators, often", kE4M3, kF16Accum, 0, 0, 32, kSeq, kChannel, 32},
  };
  for (const Row& row : rows) {
    INFO(row.what);
    sageattn_attn_desc desc = make_desc(SAGEATTN_PRESET_AUTO, 64);
    desc.pv_format = row.pv;
    desc.pv_accum = row.accum;
    desc.smooth_v = row.given_smooth;
    desc.v_scale = row.given_scale;
    desc.promotion_interval = row.given_interval;
    const PlanConfig plan = resolve(desc, 90);
    CHECK(plan.smooth_v == row.smooth);
    CHECK(plan.v_scale == row.scale);
    CHECK(plan.promotion_interval == row.interval);
  }
}

TEST_CASE("given values are kept") {
  sageattn_attn_desc desc = make_desc(SAGEATTN_PRESET_AUTO, 64);
  desc.qk_format = SAGEATTN_QK_I4;
  desc.smooth_q = SAGEATTN_SMOOTH_OFF;
  desc.smooth_k = SAGEATTN_SMOOTH_OFF;
  desc.qk_granularity = SAGEATTN_GRANULARITY_PER_TENSOR;
  desc.rotation = SAGEATTN_ROTATION_SMOOTHATTN;
  desc.row_sum = SAGEATTN_ROW_SUM_P;
  const PlanConfig plan = resolve(desc, 90);
  CHECK(plan.smooth_q == SAGEATTN_SMOOTH_OFF);
  CHECK(plan.smooth_k == SAGEATTN_SMOOTH_OFF);
  CHECK(plan.qk_granularity == SAGEATTN_GRANULARITY_PER_TENSOR);
  CHECK(plan.rotation == SAGEATTN_ROTATION_SMOOTHATTN);
  CHECK(plan.row_sum == SAGEATTN_ROW_SUM_P);
}

TEST_CASE("tiles") {
  struct Row {
    int32_t kernel, head_dim, head_dim_v;
    int b_q, rows_per_warp, b_k;
  };
  const Row rows[] = {
      {kMma, 1, 1, 128, 32, 64},       {kMma, 128, 128, 128, 32, 64},  {kMma, 129, 1, 64, 16, 64},
      {kMma, 64, 129, 64, 16, 64},     {kMma, 256, 256, 64, 16, 64},   {kWgmma, 1, 1, 64, 16, 128},
      {kWgmma, 128, 128, 64, 16, 128}, {kNone, 128, 128, 128, 32, 64}, {kNone, 256, 64, 64, 16, 64},
  };
  for (const Row& row : rows) {
    CAPTURE(row.kernel, row.head_dim, row.head_dim_v);
    const sageattn::Tile tile = sageattn::select_tile(row.kernel, row.head_dim, row.head_dim_v);
    CHECK(tile.b_q == row.b_q);
    CHECK(tile.rows_per_warp == row.rows_per_warp);
    CHECK(tile.b_k == row.b_k);
    CHECK(tile.b_q == 4 * tile.rows_per_warp);  // 4 warps
  }
}

TEST_CASE("types, heads, scale and limits") {
  sageattn_attn_desc desc = make_desc(SAGEATTN_PRESET_AUTO, 64);
  desc.max_batch = 1 << 24;
  desc.max_qo_len = desc.max_kv_len = 1 << 30;
  PlanConfig plan = resolve(desc, 90);
  CHECK(plan.kv_dtype == SAGEATTN_F16);
  CHECK(plan.out_dtype == SAGEATTN_F16);
  CHECK(plan.head_dim_v == 64);
  CHECK(plan.num_kv_heads == 1);
  CHECK(plan.sm_scale == 0.125f);
  CHECK(plan.max_total_qo == int64_t{1} << 54);
  CHECK(plan.max_total_kv == int64_t{1} << 54);

  desc.batch_mode = SAGEATTN_BATCH_VARLEN;
  desc.max_batch = 0;
  desc.max_total_kv = 7;
  desc.kv_dtype = SAGEATTN_BF16;
  desc.out_dtype = SAGEATTN_F32;
  desc.num_qo_heads = 6;
  desc.num_kv_heads = 2;
  desc.sm_scale_set = 1;  // and sm_scale is 0
  plan = resolve(desc, 90);
  CHECK(plan.max_batch == 1);
  CHECK(plan.max_total_qo == 1 << 30);
  CHECK(plan.max_total_kv == 7);
  CHECK(plan.kv_dtype == SAGEATTN_BF16);
  CHECK(plan.out_dtype == SAGEATTN_F32);
  CHECK(plan.num_kv_heads == 2);
  CHECK(plan.sm_scale == 0.0f);
}

}  // namespace
