// What the mma.sync attention kernels share: one block takes one tile of queries of one head, four
// warps of kMt x 16 rows each, and walks over the tiles of keys that it sees.
//
// Lane t of a warp holds, of every 16 x 8 fragment, rows t / 4 and t / 4 + 8 and columns 2 (t % 4)
// and + 1. So all its scores of one key tile share one scale of Q and one of K (ptx/tile/groups.h).
#pragma once

#include "ptx/arch/convert.h"
#include "ptx/arch/grid.h"
#include "ptx/arch/memory.h"
#include "ptx/arch/mma.h"
#include "ptx/common/mask.h"
#include "ptx/common/params.h"
#include "ptx/common/sequences.h"
#include "ptx/tile/attn_shared.h"
#include "ptx/tile/groups.h"
#include "ptx/tile/swizzle.h"

namespace sageattn {

inline constexpr i32 kKeyFragments = kBk / 8;

// E4M3: what P is multiplied by so that it reaches the largest value, and four ones.
inline constexpr float kLog2OfLargestE4m3 = 8.807354922057604f;  // log2(448)
inline constexpr unsigned kFourE4m3Ones = 0x38383838u;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fc00000); }

// threadIdx.x, but what follows from it is computed where it is used: the compiler would keep it in
// registers across the loop, which has none to spare.
__device__ __forceinline__ unsigned thread_anew() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % kAttnThreads;
}

// Memory is read again from here on, instead of values kept in registers.
__device__ __forceinline__ void read_anew() { asm volatile("" ::: "memory"); }

// ---- The block's work ----

template <int kMt>
struct Work {
  SequenceEntry sequence;
  i32 batch, head, kv_head, q_tile;
  i32 rows;  // of this tile
  i32 first_key_tile, end_key_tile;
  i32 full_begin, full_end;  // of these, tiles in which every row sees every key
  Band band;
  i64 q_row, k_row, sequence_row;  // index of this q tile, of key tile 0, of the sequence's V stats
  const float* k_scale;            // of key tile 0
  const float* ds;                 // corrections of this q tile's scores, from key 0 on

  // rows is 0 or less if the block has nothing to do. In steps, each from memory: the warp of attn_sm90a
  // that comes here has 32 registers a thread.
  __device__ __forceinline__ void find(const AttnParams& p, unsigned pair, i32 in_run) {
    constexpr i32 b_q = kMt * 64;
    q_tile = p.first_q_tile + in_run;
    head = p.first_head + static_cast<i32>(pair % static_cast<unsigned>(p.head_count));
    batch = static_cast<i32>(pair / static_cast<unsigned>(p.head_count));
    kv_head = head / (p.heads.qo / p.heads.kv);
    read_anew();
    sequence = sequence_at(p.sequences, batch);
    read_anew();
    const i32 first_row = q_tile * b_q;
    rows = sequence.qo_len - first_row;
    if (rows <= 0) return;
    if (rows > b_q) rows = b_q;
    q_row = head * p.heads.q_tiles + sequence.first_q_tile + q_tile;
    read_anew();
    k_row = kv_head * p.heads.k_tiles + sequence.first_k_tile;
    read_anew();
    sequence_row = p.v_grouped ? kv_head * p.heads.v_groups + sequence.first_v_group
                               : kv_head * p.heads.sequences + batch;
    read_anew();
    k_scale = p.k_scale + k_row * kKGroupsPerTile;
    read_anew();
    ds = p.ds + (i64{head - p.first_head} * p.q_tile_count + in_run) * p.ds_pitch +
         sequence.first_k_tile * kBk;

    read_anew();
    band = make_band(static_cast<MaskKind>(p.mask), p.window_left, p.window_right, sequence.qo_len,
                     sequence.kv_len);
    read_anew();
    // Both ends of a band grow with the query, so the first and the last row bound all.
    const i32 last_row = first_row + rows - 1;
    const i32 first_key = band.first_key(first_row);
    const i32 end_key = band.end_key(last_row);
    first_key_tile = first_key / kBk;
    end_key_tile = end_key <= first_key ? first_key_tile : (end_key + kBk - 1) / kBk;
    read_anew();
    full_begin = (band.first_key(last_row) + kBk - 1) / kBk;
    read_anew();
    const i32 common_end = band.end_key(first_row);
    full_end = common_end < 0 ? 0 : common_end / kBk;
  }
};

// Whether a key tile of the loop is one of the loop's: true, which the compiler cannot know. Code in
// parts, each under this condition, stays in parts: in one basic block the compiler moves so much ahead
// that registers run out.
template <int kMt>
__device__ __forceinline__ bool in_parts(const Work<kMt>& work, i32 tile) {
  const volatile i32& end = work.end_key_tile;
  return tile < end;
}

// Row of the tile that a thread holds: fragment mt, half h.
template <int kMt>
__device__ __forceinline__ i32 row_of(unsigned thread, int mt, int h) {
  return static_cast<i32>(thread / 32 * (kMt * 16) + thread % 32 / 4) + mt * 16 + h * 8;
}

// Column of element e of fragment n.
__device__ __forceinline__ i32 column_of(unsigned thread, int n, int e) {
  return n * 8 + static_cast<i32>(thread % 4 * 2) + e % 2;
}

// Copies a tile from global to shared memory, flat: 16 bytes a thread at a time.
template <int kBytes>
__device__ __forceinline__ void copy_tile(unsigned to, const unsigned char* from) {
  constexpr int kStep = kAttnThreads * 16;
  static_assert(kBytes % kStep == 0);
  const unsigned first = thread_anew() * 16;
  to += first;
  from += first;
#pragma unroll
  for (int at = 0; at < kBytes; at += kStep) cp_async_16(to + at, from + at);
}

__device__ __forceinline__ const float* floats(const unsigned char* shared, int offset) {
  return reinterpret_cast<const float*>(shared + offset);
}

// Scales of Q, by sm_scale and log2(e), for score_factor.
template <bool kInt4, int kMt>
__device__ __forceinline__ void load_q_scales(const AttnParams& p, const Work<kMt>& work,
                                              float (&q_scale)[kAttnThreads / 4]) {
  constexpr int kGroups = kAttnThreads / 4;
  if (threadIdx.x < kGroups) {
    const float scale = p.q_scale[work.q_row * kGroups + threadIdx.x] * p.score_scale;
    q_scale[threadIdx.x] = kInt4 ? scale / kS4Sum : scale;  // exact: a power of two
  }
}

// Copies K's scales of a tile, and, with kSmoothQ, the corrections of its scores.
template <bool kSmoothQ, int kMt>
__device__ __forceinline__ void copy_scales(const Work<kMt>& work, i32 tile, unsigned k_scale,
                                            unsigned ds) {
  const unsigned thread = thread_anew();
  if (thread == 0) cp_async_16(k_scale, work.k_scale + i64{tile} * kKGroupsPerTile);
  if (kSmoothQ && thread < kBk / 4) {
    cp_async_16(ds + thread * 16, work.ds + i64{tile} * kBk + thread * 4);
  }
}

// What a lane's integer sums of a tile are multiplied by: it has one group of Q and one of K.
__device__ __forceinline__ float score_factor(const float (&q_scale)[kAttnThreads / 4],
                                              const float* k_scale) {
  const unsigned thread = thread_anew();
  return q_scale[thread / 4] * k_scale[thread % 4];
}

// ---- Scores ----

// Integer sums start here, so that their bits are the float kMagicFloat + sum, exactly: |sum| < 2^22.
inline constexpr int kMagic = 0x4B400000;
inline constexpr float kMagicFloat = 12582912.0f;
// Up to this scale an exponent may start from such bits: its constant then holds kMagicFloat times the
// scale, less than 2^12, and rounds by less than 2^-12 (a quarter of what FP16 P rounds by). And a
// score is below 2^10 in base 2, where rounding a maximum moves it by next to nothing.
inline constexpr float kLargestIntegerScale = 0x1p-12f;

// Addresses of a lane's pieces for ldmatrix: rows of 16 codes a matrix row.
template <int kRowBytes>
__device__ __forceinline__ unsigned operand_address(unsigned base, unsigned row, unsigned piece) {
  return base + static_cast<unsigned>(swizzled(row, piece, kRowBytes));
}

// S = Q K^T for one tile: the warp's kMt x 16 rows by 64 keys.
template <int kMt, int kRowBytes, bool kInt4>
__device__ __forceinline__ void integer_scores(unsigned q, unsigned k,
                                               int (&s)[kMt][kKeyFragments][4]) {
  const unsigned thread = thread_anew();
  const unsigned lane = thread % 32, warp = thread / 32;
  const int start[4] = {kMagic, kMagic, kMagic, kMagic};
  // A: rows 0-7 and 8-15 of the fragment, then both again 16 bytes on. B: 8 keys, 16 bytes on, then
  // the next 8 keys. A step of 32 bytes flips bits of the swizzled offset: an exclusive or.
  const unsigned a0 = operand_address<kRowBytes>(q, warp * kMt * 16 + lane % 16, lane / 16);
  const unsigned b0 = operand_address<kRowBytes>(k, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  // Operands are loaded one fragment ahead of the products that use them: ldmatrix takes as long as
  // several products.
  constexpr int kSteps = kRowBytes / 32, kLoads = kSteps * (kKeyFragments / 2);
  constexpr bool kAhead = !kInt4;
  unsigned a[2][kMt][4], b[2][4];
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) ldmatrix_x4(a[0][mt], a0 + mt * 16 * kRowBytes);
  ldmatrix_x4(b[0], b0);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int step = i / (kKeyFragments / 2), n = i % (kKeyFragments / 2) * 2;
    if (i + 1 < kLoads) {
      const int next_step = (i + 1) / (kKeyFragments / 2),
                next_n = (i + 1) % (kKeyFragments / 2) * 2;
      ldmatrix_x4(b[(i + 1) & 1], (b0 ^ (next_step * 32)) + next_n * 8 * kRowBytes);
      if (kAhead && next_step != step) {
#pragma unroll
        for (int mt = 0; mt < kMt; ++mt) {
          ldmatrix_x4(a[next_step & 1][mt], (a0 ^ (next_step * 32)) + mt * 16 * kRowBytes);
        }
      }
    }
    if (!kAhead && i > 0 && n == 0) {
#pragma unroll
      for (int mt = 0; mt < kMt; ++mt) {
        ldmatrix_x4(a[step & 1][mt], (a0 ^ (step * 32)) + mt * 16 * kRowBytes);
      }
    }
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int(&d)[4] = s[mt][n + h];
        const int(&sum)[4] = d;
        const int(&c)[4] = step == 0 ? start : sum;
        if constexpr (kInt4) {
          mma_s4(d, a[step & 1][mt], b[i & 1][2 * h], b[i & 1][2 * h + 1], c);
        } else {
          mma_s8(d, a[step & 1][mt], b[i & 1][2 * h], b[i & 1][2 * h + 1], c);
        }
      }
    }
  }
}

// ---- Softmax ----

// Running state of the rows of a lane.
template <int kMt>
struct RowState {
  float max[kMt][2];
  float sum[kMt][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max[mt][h] = -infinity();
        sum[mt][h] = 0.0f;
      }
    }
  }
};

__device__ __forceinline__ float quad_max(float x) {  // over the four lanes that share rows
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Scores of a tile in the form that the exponentials take: x = fma(score, factor, offset[row]), where
// score is the bit pattern in s.
//   integers   s as the tensor core left it, factor f, -kMagicFloat f in the offset
//   floats     s holds finished scores in base 2, -inf for hidden keys; factor 1
// Integers cost nothing to convert. Floats are needed where a key is hidden, where dS is added, where
// sm_scale is negative, and where scores are so large that a rounded maximum could lie below one.
template <int kMt>
struct Exponents {
  float factor;
  float offset[kMt][2];
  float alpha[kMt][2];  // factor of everything accumulated before this tile

  __device__ __forceinline__ float at(int score, int mt, int h) const {
    return fmaf(__int_as_float(score), factor, offset[mt][h]);
  }
  __device__ __forceinline__ bool rescales() const {
    bool any = false;
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) any |= alpha[mt][0] != 1.0f || alpha[mt][1] != 1.0f;
    return __any_sync(0xffffffffu, any) != 0;
  }
};

// Hides the keys of a tile that the lane's rows do not see. scores: in base 2, as bits,
// [kMt][kKeyFragments][4].
template <int kMt>
__device__ __forceinline__ void hide_scores(const Work<kMt>& work, i32 tile, int* scores) {
  const unsigned thread = thread_anew();
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i32 query = work.q_tile * kMt * 64 + row_of<kMt>(thread, mt, h);
      const i32 first = work.band.first_key(query) - tile * kBk;
      const i32 end = work.band.end_key(query) - tile * kBk;
#pragma unroll
      for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const i32 column = column_of(thread, n, e);
          if (column < first || column >= end) {
            scores[(mt * kKeyFragments + n) * 4 + 2 * h + e] = __float_as_int(-infinity());
          }
        }
      }
    }
  }
}

// Turns integer sums into finished scores. ds: with kSmoothQ, this tile's corrections.
template <bool kSmoothQ, int kMt>
__device__ __forceinline__ void finish_scores(const Work<kMt>& work, i32 tile, bool masked, float f,
                                              const float* ds, int (&s)[kMt][kKeyFragments][4]) {
  const unsigned thread = thread_anew();
#pragma unroll
  for (int n = 0; n < kKeyFragments; ++n) {
    float add[2] = {};
    if constexpr (kSmoothQ) {
      const float2 pair = *reinterpret_cast<const float2*>(ds + column_of(thread, n, 0));
      add[0] = pair.x;
      add[1] = pair.y;
    }
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = __int_as_float(s[mt][n][e]) - kMagicFloat;
        s[mt][n][e] = __float_as_int(kSmoothQ ? fmaf(sum, f, add[e % 2]) : sum * f);
      }
    }
  }
  if (masked) hide_scores(work, tile, &s[0][0][0]);
}

// Raises the maxima of the lane's rows by one tile. A NaN score is dropped here; it comes back
// through P. slack: how far, in base 2, scores may exceed the maximum that P refers to before it is
// raised. P is then at most 2^slack: formats with room above 1 lose nothing by it, and the output
// hardly ever needs rescaling.
template <int kMt>
__device__ __forceinline__ Exponents<kMt> raise_maxima(const int (&s)[kMt][kKeyFragments][4],
                                                       bool integers, float f, float p_log2,
                                                       float slack, RowState<kMt>& state) {
  float largest[kMt][2];
  if (__builtin_expect(
          integers,
          1)) {  // one scale, not negative, for all the lane's scores: the largest integer
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int most = s[mt][0][2 * h];
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
          most = max(most, max(s[mt][n][2 * h], s[mt][n][2 * h + 1]));
        }
        largest[mt][h] = (__int_as_float(most) - kMagicFloat) * f;
      }
    }
  } else {
#pragma unroll
    for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        largest[mt][h] = -infinity();
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
          largest[mt][h] = fmaxf(largest[mt][h], fmaxf(__int_as_float(s[mt][n][2 * h]),
                                                       __int_as_float(s[mt][n][2 * h + 1])));
        }
      }
    }
  }
  Exponents<kMt> x;
  x.factor = integers ? f : 1.0f;
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float grown = fmaxf(state.max[mt][h], quad_max(largest[mt][h]));
      if (grown - state.max[mt][h] <= slack) grown = state.max[mt][h];
      const float reference = grown == -infinity() ? 0.0f : grown;
      x.alpha[mt][h] = exp2_approx(state.max[mt][h] - reference);
      x.offset[mt][h] = p_log2 - reference;
      if (integers) x.offset[mt][h] = fmaf(-kMagicFloat, f, x.offset[mt][h]);
      state.max[mt][h] = grown;
    }
  }
  return x;
}

// ---- End of a tile of queries ----

__device__ __forceinline__ void store_out(const View& out, i64 at, float x) {
  if (out.dtype == 3) {
    static_cast<float*>(out.data)[at] = x;
  } else {
    const unsigned code = out.dtype == 1 ? pack_f16x2(x, 0.0f) : pack_bf16x2(x, 0.0f);
    static_cast<unsigned short*>(out.data)[at] = static_cast<unsigned short>(code);
  }
}

// Channels c .. c + 3 of the row at `at`, those that exist.
__device__ __forceinline__ void store_out_4(const View& out, i64 at, i32 c, const float (&x)[4]) {
  at += c * out.dim;
  const bool whole = out.dim == 1 && c + 4 <= out.channels;
  if (out.dtype == 3) {
    float* to = static_cast<float*>(out.data) + at;
    if (whole && (reinterpret_cast<unsigned long long>(to) & 15u) == 0) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
      return;
    }
  } else {
    unsigned short* to = static_cast<unsigned short*>(out.data) + at;
    if (whole && (reinterpret_cast<unsigned long long>(to) & 7u) == 0) {
      const bool f16 = out.dtype == 1;
      *reinterpret_cast<uint2*>(to) =
          make_uint2(f16 ? pack_f16x2(x[0], x[1]) : pack_bf16x2(x[0], x[1]),
                     f16 ? pack_f16x2(x[2], x[3]) : pack_bf16x2(x[2], x[3]));
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (c + e < out.channels) store_out(out, at + e * out.dim, x[e]);
  }
}

// Writes one value to every channel of the tile's rows, and one to their LSE.
template <int kMt>
__device__ __forceinline__ void fill_rows(const AttnParams& p, const Work<kMt>& work, float x,
                                          float lse) {
  const i32 first_row = work.q_tile * kMt * 64;
  const i32 thread = static_cast<i32>(thread_anew());
  for (i32 i = thread; i < work.rows * p.out.channels; i += kAttnThreads) {
    const i64 token = work.sequence.q_start + first_row + i / p.out.channels;
    store_out(p.out,
              token_offset(p.out, work.batch, token, work.head) + i % p.out.channels * p.out.dim,
              x);
  }
  if (p.lse == nullptr) return;
  for (i32 i = thread; i < work.rows; i += kAttnThreads) {
    p.lse[work.batch * p.lse_batch + work.head * p.lse_head +
          (work.sequence.q_start + first_row + i) * p.lse_token] = lse;
  }
}

// Finds the block's work, first of all. False: there is nothing to attend to, and what needs writing is
// written.
template <int kMt>
__device__ __forceinline__ bool begin(const AttnParams& p, Work<kMt>& work) {
  if (p.followed) start_dependents();
  wait_for_grids();
  if (threadIdx.x == 0) {
    const unsigned tiles = static_cast<unsigned>(p.q_tile_count);
    // Later tiles see more keys under a causal mask: longest first.
    work.find(p, blockIdx.x / tiles, static_cast<i32>(tiles - 1 - blockIdx.x % tiles));
  }
  __syncthreads();
  if (work.rows <= 0) return false;
  if (work.sequence.bad) {
    fill_rows(p, work, quiet_nan(), quiet_nan());
    return false;
  }
  if (work.first_key_tile >= work.end_key_tile) {
    fill_rows(p, work, 0.0f, -infinity());
    return false;
  }
  return true;
}

// Writes the LSE of a row, from its maximum in base 2 and its sum of P, which is scaled by 2^p_log2.
template <int kMt>
__device__ __forceinline__ void store_lse(const AttnParams& p, const Work<kMt>& work, i64 token,
                                          float max, float sum, float p_log2) {
  float& lse = p.lse[work.batch * p.lse_batch + work.head * p.lse_head + token * p.lse_token];
  const float bias = p.lse_biased ? lse : 0.0f;
  const float base2 = max + (log2_approx(sum) - p_log2);
  lse = sum == 0.0f ? -infinity() : fmaf(base2, 0.693147180559945f, bias);
}

// Normalises and writes the rows: o[kMt][dv / 8][4] of each lane. v_scale and v_mean: of the
// sequence, or null. Each warp turns 16 rows at a time round in shared memory, so that rows are written
// whole and the code stays short.
template <int kMt, int kDv>
__device__ __forceinline__ void store_rows(const AttnParams& p, const Work<kMt>& work,
                                           const RowState<kMt>& state,
                                           const float (&o)[kMt][kDv / 8][4], const float* v_scale,
                                           const float* v_mean, float p_log2,
                                           unsigned char* shared) {
  constexpr OutStage kStage(kDv);
  const unsigned thread = thread_anew();
  const int lane = static_cast<int>(thread) % 32, warp = static_cast<int>(thread) / 32;
  const i32 first_row = work.q_tile * kMt * 64;
  float* stage = reinterpret_cast<float*>(shared) + warp * 16 * kStage.pitch;
  const int column = lane * 4 % kStage.columns;
  __syncthreads();  // other warps may still read the last tile
#pragma unroll
  for (int mt = 0; mt < kMt; ++mt) {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float l = state.sum[mt][h];
      const bool empty = l == 0.0f;
      inverse[h] = empty ? 0.0f : 1.0f / l;
      const i32 row = row_of<kMt>(thread, mt, h);
      if (lane % 4 != 0) continue;
      stage[(h * 8 + lane / 4) * kStage.pitch + kStage.columns] = empty ? 0.0f : 1.0f;
      if (p.lse == nullptr || row >= work.rows) continue;
      store_lse(p, work, work.sequence.q_start + first_row + row, state.max[mt][h], l, p_log2);
    }
#pragma unroll
    for (int half = 0; half < kDv / kStage.columns; ++half) {
#pragma unroll
      for (int n = 0; n < kStage.columns / 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* x = &o[mt][half * kStage.columns / 8 + n][2 * h];
          *reinterpret_cast<float2*>(stage + (h * 8 + lane / 4) * kStage.pitch + n * 8 +
                                     lane % 4 * 2) =
              make_float2(x[0] * inverse[h], x[1] * inverse[h]);
        }
      }
      __syncwarp();
      const i32 c = half * kStage.columns + column;
      float scale[4], mean[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scale[e] = v_scale != nullptr ? v_scale[c + e] : 1.0f;
        mean[e] = v_mean != nullptr ? v_mean[c + e] : 0.0f;
      }
#pragma unroll 1
      for (int r = lane * 4 / kStage.columns; r < 16; r += 128 / kStage.columns) {
        const i32 row = warp * kMt * 16 + mt * 16 + r;
        if (row >= work.rows) break;
        const float* from = stage + r * kStage.pitch;
        const float4 y = *reinterpret_cast<const float4*>(from + column);
        // A row that saw no key is 0, whatever V's scales and means are.
        const bool seen = from[kStage.columns] != 0.0f;
        const float x[4] = {
            seen ? fmaf(y.x, scale[0], mean[0]) : 0.0f, seen ? fmaf(y.y, scale[1], mean[1]) : 0.0f,
            seen ? fmaf(y.z, scale[2], mean[2]) : 0.0f, seen ? fmaf(y.w, scale[3], mean[3]) : 0.0f};
        const i64 token = work.sequence.q_start + first_row + row;
        store_out_4(p.out, token_offset(p.out, work.batch, token, work.head), c, x);
      }
      __syncwarp();
    }
  }
}

}  // namespace sageattn
