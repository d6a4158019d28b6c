// Attention with INT8 or INT4 Q K^T and E4M3 P V by mma.sync, from sm_89.
//
// Macros: HEAD_DIMS (64064, 128128), QK_INT4, SMOOTH_Q, PV_ACCUM_F16 (0 or 1: SAGE2PP).
//
// One block: 128 queries of one head, 4 warps of 32 rows. The FP8 tensor core truncates, so its
// accumulator lives for one tile of 64 keys and one fragment of 8 channels at a time, 4 registers (2
// with fp16) a row fragment, and is then promoted to the fp32 output: two-level accumulation without
// a second output in registers. V's scale and mean of a tile enter there, too.
// Registers (d = 128, a thread): output 128, scores 64 whose places P takes. Shared memory: Q, two
// stages of K and V and of V's scales and means: 53 KB.
#include "ptx/tile/attention.h"

namespace sageattn {
namespace {

constexpr int kMt = row_fragments(kDqk, kDv);
constexpr int kBq = kMt * 64;
constexpr int kRowBytes = QK_INT4 ? kDqk / 2 : kDqk;
constexpr int kQBytes = kBq * kRowBytes;
constexpr int kKBytes = kBk * kRowBytes;
constexpr int kVBytes = kBk * kDv;
constexpr int kStatBytes = kDv * 4;
constexpr int kVFragments = kDv / 8;
constexpr float kPLog2 = 8.807354922057604f;  // log2(448)
constexpr unsigned kOnes = 0x38383838u;       // four E4M3 ones

struct Shared {  // byte offsets
  static constexpr int q = 0;
  static constexpr int k = kQBytes;
  static constexpr int v = k + 2 * kKBytes;
  static constexpr int scale = v + 2 * kVBytes;
  static constexpr int mean = scale + 2 * kStatBytes;
};

// P of one tile as E4M3, the A operand of P V, and the sums of unrounded P.
__device__ __forceinline__ void probabilities(const int (&s)[kMt][kKeyFragments][4],
                                              const Exponents<kMt>& exponents, float (&sum)[kMt][2],
                                              unsigned (&a)[kMt][kBk / 32][4]) {
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[mt][h] = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeyFragments; n += 2) {
        // Fragments n and n + 1 make the four bytes of a row: see v_token_slot.
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = exp2_approx(exponents.at(s[mt][n + i / 2][2 * h + i % 2], mt, h));
        }
        sum[mt][h] += (x[0] + x[1]) + (x[2] + x[3]);
        a[mt][n / 4][n % 4 + h] = pack_e4m3x2(x[0], x[1]) | pack_e4m3x2(x[2], x[3]) << 16;
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kAttnThreads, 2)
    sageattn_attn_sm89(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned base = shared_address(shared);

  __shared__ Work<kMt> work;
  if (threadIdx.x == 0) work.find(p);
  __syncthreads();
  if (work.rows <= 0) return;
  if (work.sequence.bad) return fill_rows(p, work, quiet_nan(), quiet_nan());
  if (work.first_key_tile >= work.end_key_tile) return fill_rows(p, work, 0.0f, -infinity());

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Addresses are made anew for each tile: pointers kept across the loop would cost registers.
  const auto copy_kv = [&](i32 tile, int stage) {
    const i64 at = work.k_row + tile;
    copy_tile<kKBytes>(base + Shared::k + stage * kKBytes, p.k_codes + at * kKBytes);
    copy_tile<kVBytes>(base + Shared::v + stage * kVBytes, p.v_codes + at * kVBytes);
    if (!p.v_grouped || threadIdx.x >= kDv / 2) return;
    // V's scales and means, 16 bytes by each of the first threads.
    const bool is_scale = threadIdx.x < kDv / 4;
    const unsigned piece = threadIdx.x % (kDv / 4);
    const float* from = (is_scale ? p.v_scale : p.v_mean) + (work.sequence_row + tile) * kDv;
    cp_async_16(base + (is_scale ? Shared::scale : Shared::mean) + stage * kStatBytes + piece * 16,
                from + piece * 4);
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
  copy_kv(work.first_key_tile, 0);
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
    if (tile + 1 < work.end_key_tile) {
      copy_kv(tile + 1, stage ^ 1);
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
    const Exponents<kMt> exponents = raise_maxima(s, integers, f, kPLog2, 0.0f, state);
    unsigned a[kMt][kBk / 32][4];
    float sum[kMt][2];
    probabilities(s, exponents, sum, a);

    // Row sums of rounded P: a column of ones, complete in every lane.
    if (p.row_sum_rounded) {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        float acc[4] = {};
#pragma unroll
        for (int step = 0; step < kBk / 32; ++step) mma_e4m3(acc, a[mt][step], kOnes, kOnes);
        sum[mt][0] = acc[0];
        sum[mt][1] = acc[2];
      }
    } else {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        sum[mt][0] = quad_sum(sum[mt][0]);
        sum[mt][1] = quad_sum(sum[mt][1]);
      }
    }
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.sum[mt][h] = fmaf(state.sum[mt][h], exponents.alpha[mt][h], sum[mt][h]);
      }
    }

    // O = alpha O + (P V) v_scale + sum v_mean, one fragment of channels at a time.
    const unsigned v0 =
        operand_address<kBk>(base + Shared::v + stage * kVBytes, lane % 8, lane / 8);
    const float* scales =
        reinterpret_cast<const float*>(shared + Shared::scale + stage * kStatBytes);
    const float* means = reinterpret_cast<const float*>(shared + Shared::mean + stage * kStatBytes);
#pragma unroll
    for (int n = 0; n < kVFragments; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, v0 + n * 8 * kBk);
      float2 scale = make_float2(1.0f, 1.0f), mean = make_float2(0.0f, 0.0f);
      if (p.v_grouped) {
        scale = *reinterpret_cast<const float2*>(scales + n * 8 + lane % 4 * 2);
        mean = *reinterpret_cast<const float2*>(means + n * 8 + lane % 4 * 2);
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
        if (p.v_grouped) {
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

  const i64 at = work.sequence_row * kDv;
  const bool scale_at_end = !p.v_grouped;
  store_rows<kMt, kDv>(p, work, state, o, scale_at_end ? p.v_scale + at : nullptr,
                       scale_at_end && p.v_smooth ? p.v_mean + at : nullptr, kPLog2);
}

}  // namespace sageattn
