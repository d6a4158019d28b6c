// EXACT on the GPU: attention with 16-bit Q, K, P and V and fp32 accumulation, every arch from sm_80.
//
// Macros: HEAD_DIMS (ptx/tile/dims.h), BF16 (0 or 1).
//
// The structure of attn_sm80 without its scales. Shared memory bounds the stages: at 128 channels two
// of K and V (96 KB), at 256 one of each, K(j + 1) being copied while P V runs.
#include "ptx/tile/attention.h"
#include "ptx/tile/pv_16.h"

namespace sageattn {
namespace {

constexpr HeadDims kDims{kDqk, kDv};
constexpr AttnShared kShared(kDims, 16, 16, false);
constexpr int kMt = row_fragments(kDims);
constexpr int kRowBytes = kDqk * 2;
constexpr int kVFragments = kDv / 8;
constexpr int kBlocks = kMt == 2 ? 2 : 1;  // an SM, by registers

// S = Q K^T for one tile.
__device__ __forceinline__ void scores(unsigned q, unsigned k, float (&s)[kMt][kKeyFragments][4]) {
  const unsigned thread = thread_anew();
  const unsigned lane = thread % 32, warp = thread / 32;
  const unsigned a0 = operand_address<kRowBytes>(q, warp * kMt * 16 + lane % 16, lane / 16);
  const unsigned b0 = operand_address<kRowBytes>(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kRowBytes / 32; ++step) {
    unsigned a[kMt][4];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) ldmatrix_x4(a[mt], (a0 ^ (step * 32)) + mt * 16 * kRowBytes);
#pragma unroll
    for (int n = 0; n < kKeyFragments; n += 2) {
      unsigned b[4];
      ldmatrix_x4(b, (b0 ^ (step * 32)) + n * 8 * kRowBytes);
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        mma_16<BF16 != 0>(s[mt][n], a[mt], b[0], b[1]);
        mma_16<BF16 != 0>(s[mt][n + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kAttnThreads, kBlocks)
    sageattn_attn_f16(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);

  // In shared memory, so that what only the edges need holds no registers in the loop.
  __shared__ Work<kMt> work;
  if (!begin(p, work)) return;

  // Addresses are made anew for each tile: pointers kept across the loop would cost registers.
  const auto copy_k = [&](i32 tile, int stage) {
    copy_tile<kShared.k_bytes>(base + kShared.k + stage * kShared.k_bytes,
                               p.k_codes + (work.k_row + tile) * kShared.k_bytes);
  };
  const auto copy_v = [&](i32 tile, int stage) {
    copy_tile<kShared.v_bytes>(base + kShared.v + stage * kShared.v_bytes,
                               p.v_codes + (work.k_row + tile) * kShared.v_bytes);
  };

  copy_tile<kShared.q_bytes>(base + kShared.q, p.q_codes + work.q_row * kShared.q_bytes);
  copy_k(work.first_key_tile, 0);
  if constexpr (kShared.k_stages == 2) copy_v(work.first_key_tile, 0);
  cp_async_commit();

  RowState<kMt> state;
  state.reset();
  float o[kMt][kVFragments][4] = {};
  int stage = 0;

#pragma unroll 1
  for (i32 tile = work.first_key_tile; tile < work.end_key_tile;
       ++tile, stage ^= kShared.k_stages == 2 ? 1 : 0) {
    const bool last = tile + 1 == work.end_key_tile;
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kShared.k_stages == 1) {
      copy_v(tile, 0);
    } else if (!last) {
      copy_k(tile + 1, stage ^ 1);
      copy_v(tile + 1, stage ^ 1);
    }
    cp_async_commit();

    float s[kMt][kKeyFragments][4] = {};
    scores(base + kShared.q, base + kShared.k + stage * kShared.k_bytes, s);

    // Finished scores as bits, the form that the shared softmax takes.
    int bits[kMt][kKeyFragments][4];
    const bool masked = tile < work.full_begin || tile >= work.full_end;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) bits[mt][n][e] = __float_as_int(s[mt][n][e] * p.score_scale);
      }
    }
    if (masked) hide_scores(work, tile, &bits[0][0][0]);
    const Exponents<kMt> exponents = raise_maxima(bits, false, 1.0f, 0.0f, 8.0f, state);
    if (exponents.rescales()) rescale(exponents, state, o);

    if constexpr (kShared.k_stages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (!last) copy_k(tile + 1, 0);
      cp_async_commit();
    }
    accumulate_16<kMt, kDv, BF16 != 0, 2>(
        bits, exponents, base + kShared.v + stage * kShared.v_bytes, work, tile, state, o);
  }

  store_rows<kMt, kDv>(p, work, state, o, nullptr, nullptr, 0.0f, shared);
}

}  // namespace sageattn
