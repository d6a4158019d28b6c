// What a plan is after every default and AUTO has been resolved, and what an execute is after its
// arguments have been checked. Validation writes these two structs, backends read them; nothing
// past validation looks at the public structs again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sageattn {

// Tile shape and the lane map that quantization groups follow (ptx/tile/groups.h).
struct Tile {
  int b_q;            // queries a tile
  int rows_per_warp;  // of these, rows that one warp holds
  int b_k;            // keys a tile
};

// Fields named as in sageattn_attn_desc hold SAGEATTN_* constants, resolved: never AUTO.
struct PlanConfig {
  int32_t backend;  // SAGEATTN_BACKEND_CUDA or _CPU
  int32_t arch;     // 80, 86, 89, 90, 120

  int32_t q_dtype, kv_dtype, out_dtype;
  int32_t layout;
  int32_t batch_mode;
  int32_t mask;
  int32_t window_left, window_right;
  int32_t head_dim, head_dim_v;
  int32_t num_qo_heads, num_kv_heads;
  float sm_scale;
  int32_t max_batch, max_qo_len, max_kv_len;
  int64_t max_total_qo, max_total_kv;  // DENSE: max_batch * max_*_len

  int32_t qk_format, qk_granularity;
  int32_t smooth_q, smooth_k;  // SMOOTH_ON or SMOOTH_OFF
  int32_t smooth_v, v_scale;
  int32_t rotation;
  int32_t pv_format, row_sum, pv_accum;
  int32_t promotion_interval;  // keys; 0: never promoted
  int32_t kernel, pv_model;
  Tile tile;
};

// In elements, as given or as the layout implies; 0 for a dimension of size 1.
struct Strides {
  int64_t batch, token, head, dim;
};

// Memory that an execute touches: the caller's name for it and its first element.
struct Operand {
  const char* field;
  const void* data;  // null: nothing is touched
};

struct Launch {
  int32_t batch;
  int32_t qo_len, kv_len;      // DENSE
  int64_t total_qo, total_kv;  // VARLEN
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                                                         // may be null
  Strides q_strides, k_strides, v_strides, out_strides, lse_strides;  // lse: dim unused
  const int32_t* cu_seqlens_q;                                        // VARLEN
  const int32_t* cu_seqlens_kv;                                       // VARLEN
  const int32_t* seqused_kv;                                          // may be null
  int32_t* status;                                                    // may be null
  void* workspace;
  size_t workspace_size;
  std::array<Operand, 10> operands;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace sageattn
