#include "src/cuda/kernels.h"

#include <algorithm>

#include "include/sageattn.h"
#include "ptx/common/params.h"
#include "ptx/tile/attn_shared.h"
#include "ptx/tile/sm90_block.h"
#include "ptx/tile/tiles.h"
#include "src/core/error.h"
#include "src/core/select.h"
#include "src/cpu/formats.h"
#include "src/cuda/layout.h"

namespace sageattn::cuda {
namespace {

constexpr int kSequencesThreads = 32;  // a block

bool is_exact(const PlanConfig& plan) { return plan.qk_format == SAGEATTN_QK_NONE; }

const char* attention_kernel(const PlanConfig& plan) {
  if (is_exact(plan)) return "attn_f16";
  if (plan.kernel == SAGEATTN_KERNEL_WGMMA) return "attn_sm90a";
  return plan.pv_format == SAGEATTN_PV_E4M3 ? "attn_sm89" : "attn_sm80";
}

int attention_shared_bytes(const PlanConfig& plan) {
  const Shape shape(plan);
  if (shape.wgmma) {
    return Sm90Block({shape.d_tile, shape.dv_tile}, plan.smooth_q == SAGEATTN_SMOOTH_ON).bytes;
  }
  return AttnShared({shape.d_tile, shape.dv_tile}, shape.qk_row_bytes * 8 / shape.d_tile,
                    shape.v_row_bytes * 8 / shape.dv_tile, plan.smooth_q == SAGEATTN_SMOOTH_ON)
      .bytes;
}

// The tokens of one task: tiles of queries, or chunks of keys.
int prepare_shared_bytes(const PlanConfig& plan) {
  const Shape shape(plan);
  const auto bytes = [](int elements, int32_t dtype) {
    return elements * static_cast<int>(dtype_size(dtype));
  };
  const PrepareTask task({shape.d_tile, shape.dv_tile}, shape.wgmma);
  return std::max(
      bytes(task.q_tiles * plan.tile.b_q * shape.d_tile, plan.q_dtype),
      bytes(task.chunks * kChunkTokens * std::max(shape.d_tile, shape.dv_tile), plan.kv_dtype));
}

}  // namespace

std::vector<KernelUse> kernels_of(const PlanConfig& plan) {
  const Shape shape(plan);
  const jit::Macro d_qk{"D_QK", shape.d_tile};
  const jit::Macro int4{"QK_INT4", plan.qk_format == SAGEATTN_QK_I4};

  std::vector<KernelUse> list;
  list.push_back({Kernel::kSequences, "sequences", {}, kSequencesThreads, 0});
  const int v_bits = shape.v_row_bytes * 8 / shape.dv_tile;
  list.push_back({Kernel::kPrepare,
                  shape.wgmma   ? "prepare_wgmma"
                  : v_bits == 8 ? "prepare_e4m3"
                                : "prepare",
                  {{"HEAD_DIMS", HeadDims{shape.d_tile, shape.dv_tile}.code()},
                   {"QK_BITS", shape.qk_row_bytes * 8 / shape.d_tile},
                   {"V_BITS", v_bits},
                   {"WGMMA", shape.wgmma}},
                  kPrepareThreads,
                  prepare_shared_bytes(plan)});
  const bool smooth_q = plan.smooth_q == SAGEATTN_SMOOTH_ON;
  if (smooth_q) {
    list.push_back({Kernel::kCorrection, "score_correction", {d_qk}, kCorrectionThreads, 0});
  }

  KernelUse attention{Kernel::kAttention,
                      attention_kernel(plan),
                      {{"HEAD_DIMS", HeadDims{shape.d_tile, shape.dv_tile}.code()}},
                      kAttnThreads,
                      attention_shared_bytes(plan)};
  if (is_exact(plan)) {
    attention.macros.push_back({"BF16", plan.kv_dtype == SAGEATTN_BF16});
  } else if (shape.wgmma) {
    attention.macros.push_back({"SMOOTH_Q", smooth_q});
    attention.threads = Sm90Block::kThreads;
    attention.stays = true;
  } else {
    attention.macros.push_back(int4);
    attention.macros.push_back({"SMOOTH_Q", smooth_q});
    attention.macros.push_back({"PV_ACCUM_F16", plan.pv_accum == SAGEATTN_PV_ACCUM_F16});
    if (plan.pv_format == SAGEATTN_PV_E4M3) {
      attention.macros.push_back({"V_GROUPED", shape.grouped});
    }
  }
  list.push_back(attention);
  return list;
}

std::string kernel_name(const PlanConfig& plan) {
  if (is_exact(plan)) return attention_kernel(plan);
  return std::string(attention_kernel(plan)) + (plan.qk_format == SAGEATTN_QK_I4 ? "_i4" : "_i8") +
         (plan.pv_format == SAGEATTN_PV_E4M3 ? "_e4m3" : "_f16");
}

void check_supported(const PlanConfig& plan) {
  const auto unsupported = [](const char* field, int32_t value, const char* instead) {
    fail(SAGEATTN_E_UNSUPPORTED, "%s = %d: the CUDA backend does not run it; %s", field, value,
         instead);
  };
  if (is_exact(plan)) {
    if (plan.q_dtype != plan.kv_dtype || plan.q_dtype == SAGEATTN_F32) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "q_dtype = %d, kv_dtype = %d: with SAGEATTN_QK_NONE the CUDA backend takes SAGEATTN_F16 "
           "or BF16, the same for both; convert the inputs or use SAGEATTN_BACKEND_CPU",
           plan.q_dtype, plan.kv_dtype);
    }
    return;
  }

  if (plan.qk_format != SAGEATTN_QK_I8 && plan.qk_format != SAGEATTN_QK_I4) {
    unsupported("qk_format", plan.qk_format, "use SAGEATTN_QK_I8, I4 or NONE");
  }
  if (plan.qk_granularity > SAGEATTN_GRANULARITY_PER_BLOCK) {
    unsupported("qk_granularity", plan.qk_granularity,
                "use SAGEATTN_GRANULARITY_PER_THREAD, PER_WARP or PER_BLOCK");
  }
  if (plan.rotation == SAGEATTN_ROTATION_SMOOTHATTN) {
    unsupported("rotation", plan.rotation, "use SAGEATTN_ROTATION_NONE or HADAMARD");
  }
  if (plan.row_sum != SAGEATTN_ROW_SUM_ROUNDED_P) {
    unsupported("row_sum", plan.row_sum, "use SAGEATTN_ROW_SUM_AUTO or ROUNDED_P");
  }
  const int32_t accum = plan.pv_accum;
  if (plan.pv_format == SAGEATTN_PV_F16) {
    if (accum != SAGEATTN_PV_ACCUM_F32 && accum != SAGEATTN_PV_ACCUM_F16) {
      unsupported("pv_accum", accum, "with SAGEATTN_PV_F16 use SAGEATTN_PV_ACCUM_F32 or F16");
    }
    if (plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP) {
      unsupported("smooth_v", plan.smooth_v,
                  "with SAGEATTN_PV_F16 use SAGEATTN_SMOOTH_V_OFF or SEQUENCE");
    }
    if (plan.v_scale == SAGEATTN_V_SCALE_GROUP) {
      unsupported("v_scale", plan.v_scale, "with SAGEATTN_PV_F16 use SAGEATTN_V_SCALE_CHANNEL");
    }
  } else if (plan.pv_format == SAGEATTN_PV_E4M3) {
    if (accum != SAGEATTN_PV_ACCUM_TWO_LEVEL && accum != SAGEATTN_PV_ACCUM_F16) {
      unsupported("pv_accum", accum,
                  "with SAGEATTN_PV_E4M3 use SAGEATTN_PV_ACCUM_TWO_LEVEL or F16");
    }
    if (std::max(plan.head_dim, plan.head_dim_v) > 128) {
      fail(SAGEATTN_E_UNSUPPORTED,
           "head_dim = %d, head_dim_v = %d: with SAGEATTN_PV_E4M3 the CUDA backend has at most 128 "
           "channels; use SAGEATTN_PV_F16",
           plan.head_dim, plan.head_dim_v);
    }
    // Sequences have scales and means of their own, or promotion groups have both.
    if (plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP && plan.v_scale != SAGEATTN_V_SCALE_GROUP) {
      unsupported("v_scale", plan.v_scale,
                  "with SAGEATTN_SMOOTH_V_GROUP use SAGEATTN_V_SCALE_GROUP");
    }
    if (plan.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE && plan.v_scale == SAGEATTN_V_SCALE_GROUP) {
      unsupported("v_scale", plan.v_scale,
                  "with SAGEATTN_SMOOTH_V_SEQUENCE use SAGEATTN_V_SCALE_CHANNEL");
    }
  } else {
    unsupported("pv_format", plan.pv_format, "use SAGEATTN_PV_E4M3, F16 or NONE");
  }
  const int32_t interval = plan.promotion_interval;
  if (plan.kernel == SAGEATTN_KERNEL_WGMMA) {
    if (accum != SAGEATTN_PV_ACCUM_TWO_LEVEL) {
      unsupported("pv_accum", accum, "with SAGEATTN_KERNEL_WGMMA use TWO_LEVEL");
    }
    if (interval % plan.tile.b_k != 0) {
      unsupported("promotion_interval", interval, "use a multiple of 128, or 0");
    }
  } else if (interval != 0 && interval != plan.tile.b_k) {
    unsupported("promotion_interval", interval, "use 64, or 0");
  }
}

}  // namespace sageattn::cuda
