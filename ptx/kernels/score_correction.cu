// dS = qbar gK^T, what smoothing Q takes out of the scores, by score_scale: one row for each tile of
// queries.
//
// Macros: D_QK. A product of the tensor core, of means of queries as rows and keys as columns. A block
// has kCorrectionKeys keys and the rows that CorrectionTask gives it, a warp 32 of the keys. These come
// from global memory into the registers that hold them as operands until the block ends; rows pass by in
// shared memory, kRows at a time, the next ones on their way.
//
// Which of the 16 channels of a product stands where is free as long as both operands agree. Of 32
// channels lane i of a quad holds 8 i .. + 7, which are one or two pieces of 16 bytes in memory, and all
// that it has to hold of two products. And of 16 keys, columns of two products, lane i has 4 i .. + 3 of
// the result, 16 bytes.
#include "ptx/arch/grid.h"
#include "ptx/arch/mma.h"
#include "ptx/common/sequences.h"
#include "ptx/tile/quantizer.h"
#include "ptx/tile/rows.h"
#include "ptx/tile/tiles.h"

namespace sageattn {
namespace {

constexpr int kThreads = kCorrectionThreads;
constexpr int kWarpKeys = kCorrectionKeys / (kThreads / 32);
constexpr int kColumns = kWarpKeys / 8;              // fragments of 8 keys
constexpr int kSpans = D_QK / 32;                    // of channels
constexpr int kRows = D_QK > 64 ? 16 : 32;           // tiles of queries at a time
constexpr int kUnits = kRows * D_QK / 8 / kThreads;  // of 8 numbers, that a thread brings
constexpr int kPitch = D_QK * 2;
static_assert(kUnits * kThreads * 8 == kRows * D_QK && kWarpKeys == 32);

// A lane's channels of a key: of product 2 s + h words [s][2 h] and [s][2 h + 1].
using Keys = unsigned[kColumns][kSpans][4];

// Keys of the warp: that which is column 0 of fragment n, and how far from there others are.
__device__ __forceinline__ constexpr i32 key_of(int n) { return n / 2 * 16 + n % 2 * 2; }
__device__ __forceinline__ i32 key_within(unsigned column) {
  return static_cast<i32>(column / 2 * 4 + column % 2);
}

__device__ __forceinline__ unsigned pack_product(float lo, float hi, bool bf16) {
  return bf16 ? pack_bf16x2(lo, hi) : pack_f16x2(lo, hi);
}

__device__ __forceinline__ void round_8(const float (&x)[8], bool bf16, unsigned (&words)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = pack_product(x[2 * w], x[2 * w + 1], bf16);
}

// What a lane loads keys with.
struct Source {
  i64 first;          // element of its key of fragment 0
  i32 left;           // keys from that one on
  const float* mean;  // of K; may be null

  __device__ __forceinline__ bool exists(int n) const { return key_of(n) < left; }
  __device__ __forceinline__ i64 at(const View& k, int n) const {
    return first + key_of(n) * k.token;
  }
  // K's mean in eight channels.
  __device__ __forceinline__ void shift(i32 c, float (&x)[8]) const {
    if (mean != nullptr) {
      load_8(mean + c, x);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    }
  }
};

// The first channel of a lane's in a span.
__device__ __forceinline__ i32 channel_of(int span) {
  return span * 32 + static_cast<i32>(threadIdx.x % 4 * 8);
}

// Keys of 16 bits, as they were loaded, less their mean.
template <bool kF16, bool kProductBf16>
__device__ __forceinline__ void smooth_keys(const Source& source, Keys& keys) {
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    float mean[8];
    source.shift(channel_of(s), mean);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = widen(keys[n][s][w], kF16);
        const unsigned y = pack_product(x.x - mean[2 * w], x.y - mean[2 * w + 1], kProductBf16);
        keys[n][s][w] = source.exists(n) ? y : 0;
      }
    }
  }
}

__device__ __forceinline__ void load_halves(const CorrectionParams& p, const Source& source,
                                            Keys& keys) {
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    const i32 c = channel_of(s);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint4 words = {};
      if (source.exists(n) && c < p.k.channels) {
        words = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(p.k.data) +
                                                source.at(p.k, n) + c);
      }
      keys[n][s][0] = words.x, keys[n][s][1] = words.y;
      keys[n][s][2] = words.z, keys[n][s][3] = words.w;
    }
  }
  if (p.k.dtype == 2) {
    smooth_keys<false, true>(source, keys);
  } else if (p.product_bf16) {
    smooth_keys<true, true>(source, keys);
  } else {
    smooth_keys<true, false>(source, keys);
  }
}

__device__ __forceinline__ void load_floats(const CorrectionParams& p, const Source& source,
                                            Keys& keys) {
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    const i32 c = channel_of(s);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int w = 0; w < 4; ++w) keys[n][s][w] = 0;
    }
    // A branch for each span also keeps the compiler from loading all ahead, for want of registers.
    if (s * 32 >= p.k.channels) continue;
    float mean[8];
    source.shift(c, mean);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float x[8] = {};
      const bool exists = source.exists(n) && c < p.k.channels;
      if (exists) load_8(static_cast<const float*>(p.k.data) + source.at(p.k, n) + c, x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = exists ? x[i] - mean[i] : 0.0f;
      round_8(x, true, keys[n][s]);  // with such a K the product is bf16
    }
  }
}

// Eight channels of one key, of which channel 0 is at `at`, element by element.
__device__ __noinline__ uint4 irregular_piece(const View& view, i64 at, i32 c, const float* mean,
                                              bool product_bf16) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = 0.0f;
    if (c + i < view.channels) {
      const i64 from = at + (c + i) * view.dim;
      if (view.dtype == 3) {
        x[i] = static_cast<const float*>(view.data)[from];
      } else {
        x[i] = widen(static_cast<const unsigned short*>(view.data)[from], view.dtype == 1).x;
      }
    }
    if (mean != nullptr) x[i] -= mean[c + i];
  }
  unsigned words[4];
  round_8(x, product_bf16, words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void load_irregular(const CorrectionParams& p, const Source& source,
                                               Keys& keys) {
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint4 words = {};
      if (source.exists(n)) {
        words = irregular_piece(p.k, source.at(p.k, n), channel_of(s), source.mean,
                                p.product_bf16 != 0);
      }
      keys[n][s][0] = words.x, keys[n][s][1] = words.y;
      keys[n][s][2] = words.z, keys[n][s][3] = words.w;
    }
  }
}

// Rows are kept as lanes load them, 16 at a time: [span][h][lane] what it has of product 2 s + h in 16
// bytes, rows lane / 4 and + 8. Lanes that write together have both h, so every other pair of rows of
// h = 1 changes places.
__device__ __forceinline__ int operand_offset(int span, int h, int row, int lane_in_quad) {
  return ((span * 2 + h) * 32 + (row ^ h) * 4 + lane_in_quad) * 16;
}

// Rows on their way to shared memory: a thread's unit is four channels of two rows.
struct Staged {
  float4 x[kUnits][2];

  // from: the first of kRows, of which `count` exist.
  __device__ __forceinline__ void load(const float* from, i32 count) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = unit_of(i), row = row_of(unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[i][half] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row + half * 8 < count) {
          x[i][half] =
              *reinterpret_cast<const float4*>(from + (row + half * 8) * D_QK + unit % kQuads * 4);
        }
      }
    }
  }
  __device__ __forceinline__ void store(unsigned means, bool bf16) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = unit_of(i), row = row_of(unit), quad = unit % kQuads;
      const float4 &u = x[i][0], &v = x[i][1];
      *shared_pointer<uint4>(means + row / 16 * 16 * kPitch +
                             operand_offset(quad / 8, quad % 2, row % 16, quad % 8 / 2)) =
          make_uint4(pack_product(u.x, u.y, bf16), pack_product(v.x, v.y, bf16),
                     pack_product(u.z, u.w, bf16), pack_product(v.z, v.w, bf16));
    }
  }

 private:
  static constexpr int kQuads = D_QK / 4;
  static __device__ __forceinline__ int unit_of(int i) {
    return static_cast<int>(threadIdx.x) + i * kThreads;
  }
  static __device__ __forceinline__ int row_of(int unit) {
    return unit / kQuads % 8 + unit / kQuads / 8 * 16;
  }
};

// 16 rows by the warp's keys. means: the lane's operand of span 0, h = 0.
template <bool kBf16>
__device__ __forceinline__ void multiply(unsigned means, const Keys& keys,
                                         float (&sum)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 x =
          *shared_pointer<const uint4>((means ^ operand_offset(0, 0, h, 0)) + (s * 2 + h) * 512);
      const unsigned a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if constexpr (kBf16) {
          mma_bf16(sum[n], a, keys[n][s][2 * h], keys[n][s][2 * h + 1]);
        } else {
          mma_f16(sum[n], a, keys[n][s][2 * h], keys[n][s][2 * h + 1]);
        }
      }
    }
  }
}

// kRows rows, of which `count` exist. to: the lane's first results in row lane / 4.
__device__ __forceinline__ void multiply_rows(const CorrectionParams& p, unsigned means,
                                              const Keys& keys, i32 count, float* to) {
  const i32 row = static_cast<i32>(threadIdx.x % 32 / 4);
#pragma unroll 1
  for (int m = 0; m < kRows && m < count; m += 16) {
    float sum[kColumns][4];
    if (p.product_bf16) {
      multiply<true>(means + m * kPitch, keys, sum);
    } else {
      multiply<false>(means + m * kPitch, keys, sum);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (m + row + 8 * h >= count) break;
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        const float *x = &sum[n][2 * h], *y = &sum[n + 1][2 * h];
        *reinterpret_cast<float4*>(to + (m + 8 * h) * p.ds_pitch + n * 8) = make_float4(
            x[0] * p.score_scale, x[1] * p.score_scale, y[0] * p.score_scale, y[1] * p.score_scale);
      }
    }
  }
}

// What a block does once it has its keys. In shared memory, where it holds no registers until then.
struct Work {
  i64 means;  // of q_mean, the first of the first head
  i64 ds;     // of ds, its results, from the block's first key on
  i32 count, heads;
  i32 keys;  // in tiles of keys from the first on
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kCorrectionThreads, D_QK > 128 ? 1 : 2)
    sageattn_score_correction(const __grid_constant__ CorrectionParams p) {
  start_dependents();
  wait_for_grids();
  __shared__ __align__(128) unsigned char means[2][kRows * kPitch];
  const unsigned block = blockIdx.x;
  if (p.next_item != nullptr && block == 0 && threadIdx.x == 0) *p.next_item = 0;

  const i32 group = p.heads.qo / p.heads.kv;
  const CorrectionTask task(group, p.first_head, p.head_count, p.q_tile_count);
  const unsigned pieces = task.pieces(p.sequences.k_tiles * p.b_k);
  const i32 first_key = static_cast<i32>(block % pieces) * kCorrectionKeys;
  unsigned rest = block / pieces;
  const i32 begin = p.first_q_tile + static_cast<i32>(rest % task.chunks) * kCorrectionTiles;
  rest /= task.chunks;
  const i32 batch = static_cast<i32>(rest / task.parts);
  i32 head, end_head;
  task.heads_of(static_cast<i32>(rest % task.parts), head, end_head);

  const SequenceEntry sequence = sequence_at(p.sequences, batch);
  const i32 q_tiles = (sequence.qo_len + p.b_q - 1) / p.b_q;
  const i32 end = min(q_tiles, min(p.first_q_tile + p.q_tile_count, begin + kCorrectionTiles));
  // Of absent keys in a tile 0 is written.
  const i32 end_key = (sequence.kv_len + p.b_k - 1) / p.b_k * p.b_k;
  if (first_key >= end_key || begin >= end) return;

  __shared__ Work work;
  if (threadIdx.x == 0) {
    work.means = (head * p.heads.q_tiles + sequence.first_q_tile + begin) * D_QK;
    work.ds = (i64{head - p.first_head} * p.q_tile_count + begin - p.first_q_tile) * p.ds_pitch +
              sequence.first_k_tile * p.b_k + first_key;
    work.count = end - begin;
    work.heads = end_head - head;
    work.keys = end_key - first_key;
  }
  const i32 warp_key = first_key + static_cast<i32>(threadIdx.x / 32) * kWarpKeys;
  const unsigned lane = threadIdx.x % 32;
  Keys keys;
  {
    const i32 kv_head = head / group;
    Source source;
    source.mean =
        p.k_mean == nullptr ? nullptr : p.k_mean + (kv_head * p.heads.sequences + batch) * D_QK;
    const i32 key = warp_key + key_within(lane / 4);
    source.first = token_offset(p.k, batch, sequence.kv_start + key, kv_head);
    source.left = sequence.kv_len - key;
    if (p.irregular_k) {
      load_irregular(p, source, keys);
    } else if (p.k.dtype == 3) {
      load_floats(p, source, keys);
    } else {
      load_halves(p, source, keys);
    }
  }

  __syncthreads();
  const float* next = p.q_mean + work.means;  // what threads load next
  float* to = p.ds + work.ds + lane / 4 * p.ds_pitch + threadIdx.x / 32 * kWarpKeys + lane % 4 * 4;
  const i32 count = work.count;
  i32 heads = work.heads;
  const bool has_keys = static_cast<i32>(threadIdx.x / 32 * kWarpKeys) < work.keys;
  const unsigned from = shared_address(means) + lane * 16;
  i32 rows = count;  // of this head, from those in shared memory on
  Staged staged;
  staged.load(next, rows);
#pragma unroll 1
  for (unsigned stage = 0;; stage ^= kRows * kPitch) {
    staged.store(shared_address(means) + stage, p.product_bf16 != 0);
    // The last readers of what comes here next are past the barrier by then.
    __syncthreads();
    const i32 here = rows;
    rows -= kRows;
    next += kRows * D_QK;
    if (rows <= 0) {
      next += (p.heads.q_tiles - (count - rows)) * D_QK;
      rows = count;
      --heads;
    }
    const bool more = heads > 0;
    if (more) staged.load(next, rows);
    if (has_keys) multiply_rows(p, from + stage, keys, here, to);
    if (!more) break;
    to += kRows * p.ds_pitch;
    if (here <= kRows) to += (p.q_tile_count - (count - here + kRows)) * p.ds_pitch;
  }
}

}  // namespace sageattn
