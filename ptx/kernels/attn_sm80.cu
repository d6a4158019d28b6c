// Attention with INT8 or INT4 Q K^T and FP16 P V by mma.sync, every arch from sm_80.
//
// Macros: HEAD_DIMS (ptx/tile/dims.h), QK_INT4, SMOOTH_Q, PV_ACCUM_F16 (0 or 1).
//
// One block: 64 kMt queries of one head, 4 warps. Registers (d = 128, a thread): output 128, scores
// 64, operands 12; so two blocks an SM at 255. Shared memory: Q, two stages of K, V.
// Schedule of one key tile: wait for K(j) and V(j) | copy K(j + 1), V(j + 1) | Q K^T | softmax | P V.
#include "ptx/tile/attention.h"
#include "ptx/tile/pv_16.h"

namespace sageattn {
namespace {

constexpr int kMt = row_fragments(kDqk, kDv);
constexpr int kBq = kMt * 64;
constexpr int kRowBytes = QK_INT4 ? kDqk / 2 : kDqk;
constexpr int kQBytes = kBq * kRowBytes;
constexpr int kKBytes = kBk * kRowBytes;
constexpr int kVBytes = kBk * kDv * 2;
// Beyond 128 channels two stages of V do not fit in 99 KB: then V(j) is copied while Q K^T runs.
constexpr int kVStages = kDqk > 128 || kDv > 128 ? 1 : 2;
constexpr int kVFragments = kDv / 8;
constexpr int kBlocks = kDqk > 128 || kDv > 128 ? 1 : 2;  // an SM, by registers

struct Shared {  // byte offsets
  static constexpr int q = 0;
  static constexpr int k = kQBytes;
  static constexpr int v = k + 2 * kKBytes;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kAttnThreads, kBlocks)
    sageattn_attn_sm80(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);

  // In shared memory, so that what only the edges need holds no registers in the loop.
  __shared__ Work<kMt> work;
  if (threadIdx.x == 0) work.find(p);
  __syncthreads();
  if (work.rows <= 0) return;
  if (work.sequence.bad) return fill_rows(p, work, quiet_nan(), quiet_nan());
  if (work.first_key_tile >= work.end_key_tile) return fill_rows(p, work, 0.0f, -infinity());

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Addresses are made anew for each tile: pointers kept across the loop would cost registers.
  const auto copy_k = [&](i32 tile, int stage) {
    copy_tile<kKBytes>(base + Shared::k + stage * kKBytes,
                       p.k_codes + (work.k_row + tile) * kKBytes);
  };
  const auto copy_v = [&](i32 tile, int stage) {
    copy_tile<kVBytes>(base + Shared::v + stage * kVBytes,
                       p.v_codes + (work.k_row + tile) * kVBytes);
  };
  const auto k_scale_of = [&](i32 tile) {
    return p.k_scale[(work.k_row + tile) * kKGroupsPerTile + lane % 4];
  };
  const float q_scale =
      p.q_scale[work.q_row * (4 * kQGroupsPerWarp) + warp * kQGroupsPerWarp + lane / 4] *
      p.score_scale;
  const float* ds = nullptr;
  if constexpr (SMOOTH_Q) {
    const i64 q_tiles_before = (work.head - p.first_head) * p.heads.q_tiles;
    ds = p.ds + (q_tiles_before + work.sequence.first_q_tile + work.q_tile) * p.ds_pitch +
         lane % 4 * 2;
  }

  copy_tile<kQBytes>(base + Shared::q, p.q_codes + work.q_row * kQBytes);
  copy_k(work.first_key_tile, 0);
  if constexpr (kVStages == 2) copy_v(work.first_key_tile, 0);
  cp_async_commit();

  RowState<kMt> state;
  state.reset();
  float o[kMt][kVFragments][4] = {};
  float k_scale = k_scale_of(work.first_key_tile);
  int stage = 0;

#pragma unroll 1
  for (i32 tile = work.first_key_tile; tile < work.end_key_tile; ++tile, stage ^= 1) {
    const float f = q_scale * k_scale;
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kVStages == 1) {
      copy_v(tile, 0);
      cp_async_commit();
    }
    if (tile + 1 < work.end_key_tile) {
      copy_k(tile + 1, stage ^ 1);
      if constexpr (kVStages == 2) copy_v(tile + 1, stage ^ 1);
      k_scale = k_scale_of(tile + 1);
    }
    cp_async_commit();

    int s[kMt][kKeyFragments][4];
    integer_scores<kMt, kRowBytes, QK_INT4 != 0>(base + Shared::q,
                                                 base + Shared::k + stage * kKBytes, s);
    const bool masked = tile < work.full_begin || tile >= work.full_end;
    const bool integers =
        __all_sync(0xffffffffu, !SMOOTH_Q && !masked && f >= 0.0f && f < kLargestIntegerScale);
    if (!integers) {
      finish_scores(work, tile, masked, f, SMOOTH_Q ? ds + static_cast<i64>(tile) * kBk : nullptr,
                    p.score_scale, s);
    }
    const Exponents<kMt> exponents =
        raise_maxima(s, integers, f, 0.0f, PV_ACCUM_F16 ? 0.0f : 8.0f, state);
    if (exponents.rescales()) rescale(exponents, state, o);
    if constexpr (kVStages == 1) {
      cp_async_wait<1>();
      __syncthreads();
    }
    const unsigned v = base + Shared::v + (kVStages == 2 ? stage * kVBytes : 0);
    if constexpr (PV_ACCUM_F16) {
      accumulate_acc16<kMt, kDv>(s, exponents, p.row_sum_rounded != 0, v, state, o);
    } else {
      accumulate_16<kMt, kDv, false>(s, exponents, p.row_sum_rounded != 0, v, state, o);
    }
  }

#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.sum[mt][h] = quad_sum(state.sum[mt][h]);
    }
  }
  const i64 at = work.sequence_row * kDv;
  store_rows<kMt, kDv>(p, work, state, o, p.v_scale + at, p.v_smooth ? p.v_mean + at : nullptr,
                       0.0f);
}

}  // namespace sageattn
