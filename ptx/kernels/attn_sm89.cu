// Attention with INT8 or INT4 Q K^T and E4M3 P V by mma.sync, from sm_89.
//
// Macros: HEAD_DIMS (64064, 128128), QK_INT4, SMOOTH_Q, PV_ACCUM_F16 (0 or 1: SAGE2PP), V_GROUPED (V has a
// scale and a mean of each tile; otherwise of the sequence, applied at the end).
//
// One block: 128 queries of one head, 4 warps of 32 rows. The FP8 tensor core truncates, so its
// accumulator lives for one tile of 64 keys and one fragment of 8 channels at a time, 4 registers (2
// with fp16) a row fragment, and is then promoted to the fp32 output: two-level accumulation without
// a second output in registers. V's scale and mean of a tile enter there, too.
// Registers (d = 128, a thread): output 128, scores 64 whose places P takes. Shared memory: Q, two
// stages of K, one of V and of its scales and means: 42 KB, so that two blocks fit in 100 KB.
#include "ptx/tile/attention.h"

namespace sageattn {
namespace {

constexpr HeadDims kDims{kDqk, kDv};
constexpr AttnShared kShared(kDims, QK_INT4 ? 4 : 8, 8, SMOOTH_Q != 0);
constexpr int kMt = row_fragments(kDims);
constexpr int kRowBytes = QK_INT4 ? kDqk / 2 : kDqk;
constexpr int kVFragments = kDv / 8;
constexpr float kPLog2 = kLog2OfLargestE4m3;

// P of one tile as E4M3, the A operand of P V.
__device__ __forceinline__ void probabilities(const int (&s)[kMt][kKeyFragments][4],
                                              const Exponents<kMt>& exponents,
                                              unsigned (&a)[kMt][kBk / 32][4]) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int n = 0; n < kKeyFragments; n += 2) {
        // Fragments n and n + 1 make the four bytes of a row: see v_token_slot.
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = exp2_approx(exponents.at(s[mt][n + i / 2][2 * h + i % 2], mt, h));
        }
        a[mt][n / 4][n % 4 + h] = pack_e4m3x2(x[0], x[1]) | pack_e4m3x2(x[2], x[3]) << 16;
      }
    }
  }
}

// O = alpha O + (P V) v_scale + sum v_mean for a quarter of the channels, from fragment first_n, one
// fragment at a time.
__device__ __forceinline__ void accumulate(const unsigned (&a)[kMt][kBk / 32][4],
                                           const Exponents<kMt>& exponents,
                                           const float (&sum)[kMt][2], const unsigned char* shared,
                                           int first_n, float (&o)[kMt][kVFragments][4]) {
  const unsigned lane = thread_anew() % 32;
  const unsigned v0 = operand_address<kBk>(shared_address(shared) + kShared.v, lane % 8, lane / 8);
  const float* scales = floats(shared, kShared.v_scale) + lane % 4 * 2;
  const float* means = floats(shared, kShared.v_mean) + lane % 4 * 2;
#pragma unroll
  for (int n = first_n; n < first_n + kVFragments / 4; ++n) {
    unsigned b[4];
    ldmatrix_x4(b, v0 + n * 8 * kBk);
    float2 scale, mean;
    if constexpr (V_GROUPED) {
      scale = *reinterpret_cast<const float2*>(scales + n * 8);
      mean = *reinterpret_cast<const float2*>(means + n * 8);
    }
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      float acc[4] = {};
      if constexpr (PV_ACCUM_F16) {
        unsigned acc16[2] = {};
        mma_e4m3_acc16(acc16, a[mt][0], b[0], b[1]);
        mma_e4m3_acc16(acc16, a[mt][1], b[2], b[3]);
        acc[0] = f16_lo(acc16[0]);
        acc[1] = f16_hi(acc16[0]);
        acc[2] = f16_lo(acc16[1]);
        acc[3] = f16_hi(acc16[1]);
      } else {
        mma_e4m3(acc, a[mt][0], b[0], b[1]);
        mma_e4m3(acc, a[mt][1], b[2], b[3]);
      }
      if constexpr (V_GROUPED) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc[e] =
              fmaf(acc[e], e % 2 ? scale.y : scale.x, sum[mt][e / 2] * (e % 2 ? mean.y : mean.x));
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[mt][n][e] = fmaf(o[mt][n][e], exponents.alpha[mt][e / 2], acc[e]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kAttnThreads, 2)
    sageattn_attn_sm89(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);

  // In shared memory, so that what only the edges need holds no registers in the loop.
  __shared__ Work<kMt> work;
  __shared__ float q_scale[kAttnThreads / 4];
  if (!begin(p, work)) return;
  load_q_scales<QK_INT4 != 0>(p, work, q_scale);

  // Addresses are made anew for each tile: pointers kept across the loop would cost registers.
  const auto copy_k = [&](i32 tile, int stage) {
    copy_tile<kShared.k_bytes>(base + kShared.k + stage * kShared.k_bytes,
                               p.k_codes + (work.k_row + tile) * kShared.k_bytes);
    copy_scales<SMOOTH_Q != 0>(work, tile,
                               base + kShared.k_scale + stage * AttnShared::kKScaleBytes,
                               base + kShared.ds + stage * kShared.ds_bytes);
  };
  const auto copy_v = [&](i32 tile) {
    copy_tile<kShared.v_bytes>(base + kShared.v, p.v_codes + (work.k_row + tile) * kShared.v_bytes);
    const unsigned thread = thread_anew();
    if (!V_GROUPED || thread >= kDv / 2) return;
    // V's scales and means, 16 bytes by each of the first threads.
    const bool is_scale = thread < kDv / 4;
    const unsigned piece = thread % (kDv / 4);
    const float* from = (is_scale ? p.v_scale : p.v_mean) + (work.sequence_row + tile) * kDv;
    cp_async_16(base + (is_scale ? kShared.v_scale : kShared.v_mean) + piece * 16,
                from + piece * 4);
  };

  copy_tile<kShared.q_bytes>(base + kShared.q, p.q_codes + work.q_row * kShared.q_bytes);
  copy_k(work.first_key_tile, 0);
  cp_async_commit();

  RowState<kMt> state;
  state.reset();
  float o[kMt][kVFragments][4] = {};
  int stage = 0;

#pragma unroll 1
  for (i32 tile = work.first_key_tile; tile < work.end_key_tile; ++tile, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    copy_v(tile);
    cp_async_commit();
    if (tile + 1 < work.end_key_tile) copy_k(tile + 1, stage ^ 1);
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
    const Exponents<kMt> exponents = raise_maxima(s, integers, f, kPLog2, 0.0f, state);
    unsigned a[kMt][kBk / 32][4];
    probabilities(s, exponents, a);

    // Row sums of rounded P: a column of ones, complete in every lane.
    float sum[kMt][2];
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
      float acc[4] = {};
#pragma unroll
      for (int step = 0; step < kBk / 32; ++step)
        mma_e4m3(acc, a[mt][step], kFourE4m3Ones, kFourE4m3Ones);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[mt][h] = acc[2 * h];
        state.sum[mt][h] = fmaf(state.sum[mt][h], exponents.alpha[mt][h], sum[mt][h]);
      }
    }

    cp_async_wait<1>();  // V is there
    __syncthreads();

#pragma unroll
    for (int n = 0; n < kVFragments; n += kVFragments / 4) {
      if (in_parts(work, tile)) accumulate(a, exponents, sum, shared, n, o);
    }
  }

  const i64 at = work.sequence_row * kDv;
  store_rows<kMt, kDv>(p, work, state, o, V_GROUPED ? nullptr : p.v_scale + at,
                       !V_GROUPED && p.v_smooth ? p.v_mean + at : nullptr, kPLog2, shared);
}

}  // namespace sageattn
