// Attention with INT8 or INT4 Q K^T and FP16 P V by mma.sync, every arch from sm_80.
//
// Macros: HEAD_DIMS (ptx/tile/dims.h), QK_INT4, SMOOTH_Q, PV_ACCUM_F16 (0, 1).
//
// One block: 64 kMt queries of one head, 4 warps. Registers (d = 128, a thread): output 128, scores
// 64, operands 24; so two blocks an SM at 255. Shared memory: Q, two stages of K with its scales, V.
// Schedule of one key tile: wait for K(j) and V(j) | copy K(j + 1), V(j + 1) | Q K^T | softmax | P V.
#include "ptx/tile/attention.h"
#include "ptx/tile/pv_16.h"

namespace sageattn {
namespace {

constexpr HeadDims kDims{kDqk, kDv};
constexpr AttnShared kShared(kDims, QK_INT4 ? 4 : 8, 16, SMOOTH_Q != 0);
constexpr int kMt = row_fragments(kDims);
constexpr int kRowBytes = QK_INT4 ? kDqk / 2 : kDqk;
constexpr int kVFragments = kDv / 8;
// Blocks an SM, by registers. At 64 channels three of 168 hold the plainest specialisation without a
// spill; shared memory has room for three where an SM has more than 100 KB.
constexpr bool kThree = kDqk == 64 && !QK_INT4 && !SMOOTH_Q && !PV_ACCUM_F16 &&
                        (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900);
constexpr int kBlocks = kMt == 1 ? 1 : kThree ? 3 : 2;

}  // namespace

extern "C" __global__ void __launch_bounds__(kAttnThreads, kBlocks)
    sageattn_attn_sm80(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);

  // In shared memory, so that what only the edges need holds no registers in the loop.
  __shared__ Work<kMt> work;
  __shared__ float q_scale[kAttnThreads / 4];
  if (!begin(p, work)) return;
  load_q_scales<QK_INT4 != 0>(p, work, q_scale);

  // Addresses are made anew for each tile: pointers kept across the loop would cost registers.
  const auto copy_k = [&](i32 tile, i64 row, int stage) {
    copy_tile<kShared.k_bytes>(base + kShared.k + stage * kShared.k_bytes,
                               p.k_codes + row * kShared.k_bytes);
    copy_scales<SMOOTH_Q != 0>(work, tile,
                               base + kShared.k_scale + stage * AttnShared::kKScaleBytes,
                               base + kShared.ds + stage * kShared.ds_bytes);
  };
  const auto copy_v = [&](i64 row, int stage) {
    copy_tile<kShared.v_bytes>(base + kShared.v + stage * kShared.v_bytes,
                               p.v_codes + row * kShared.v_bytes);
  };

  copy_tile<kShared.q_bytes>(base + kShared.q, p.q_codes + work.q_row * kShared.q_bytes);
  const i64 first_row = work.k_row + work.first_key_tile;
  copy_k(work.first_key_tile, first_row, 0);
  if constexpr (kShared.v_stages == 2) copy_v(first_row, 0);
  cp_async_commit();

  RowState<kMt> state;
  state.reset();
  float o[kMt][kVFragments][4] = {};
  int stage = 0;

#pragma unroll 1
  for (i32 tile = work.first_key_tile; tile < work.end_key_tile; ++tile, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kShared.v_stages == 1) {
      copy_v(work.k_row + tile, 0);
      cp_async_commit();
    }
    if (tile + 1 < work.end_key_tile) {
      const i64 row = work.k_row + tile + 1;
      copy_k(tile + 1, row, stage ^ 1);
      if constexpr (kShared.v_stages == 2) copy_v(row, stage ^ 1);
    }
    cp_async_commit();

    int s[kMt][kKeyFragments][4];
    integer_scores<kMt, kRowBytes, QK_INT4 != 0>(base + kShared.q,
                                                 base + kShared.k + stage * kShared.k_bytes, s);
    const float f =
        score_factor(q_scale, floats(shared, kShared.k_scale + stage * AttnShared::kKScaleBytes));
    const bool masked = tile < work.full_begin || tile >= work.full_end;
    const bool integers =
        __all_sync(0xffffffffu, !SMOOTH_Q && !masked && f >= 0.0f && f < kLargestIntegerScale);
    if (!integers) {
      finish_scores<SMOOTH_Q != 0>(work, tile, masked, f,
                                   floats(shared, kShared.ds + stage * kShared.ds_bytes), s);
    }
    const Exponents<kMt> exponents =
        raise_maxima(s, integers, f, 0.0f, PV_ACCUM_F16 ? 0.0f : 8.0f, state);
    if (exponents.rescales()) rescale(exponents, state, o);
    if constexpr (kShared.v_stages == 1) {
      cp_async_wait<1>();
      __syncthreads();
    }
    const unsigned v = base + kShared.v + (kShared.v_stages == 2 ? stage * kShared.v_bytes : 0);
    if constexpr (PV_ACCUM_F16) {
      accumulate_acc16<kMt, kDv>(s, exponents, v, work, tile, state, o);
    } else {
      accumulate_16<kMt, kDv, false, 1>(s, exponents, v, work, tile, state, o);
    }
  }

  const i64 at = work.sequence_row * kDv;
  store_rows<kMt, kDv>(p, work, state, o, p.v_scale + at, p.v_smooth ? p.v_mean + at : nullptr,
                       0.0f, shared);
}

}  // namespace sageattn
