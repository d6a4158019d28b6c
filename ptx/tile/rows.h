// Rows of one head of a caller's tensor in shared memory, as they are: [rows][kDim] elements, channels
// that do not exist 0. The 16-byte pieces of a row change places so that both ways of reading meet all
// banks: along rows, eight channels a thread, and down columns, two channels a thread.
#pragma once

#include "ptx/arch/convert.h"
#include "ptx/arch/memory.h"
#include "ptx/common/sequences.h"

namespace sageattn {

__device__ __forceinline__ i32 bytes_of(i32 dtype) { return dtype == 3 ? 4 : 2; }

// How kThreads threads share columns: each takes two channels of every kSharers-th row; those that share
// a pair of channels stand in one warp.
template <int kDim, int kThreads>
struct ColumnShares {
  static constexpr int kSharers = 2 * kThreads / kDim;
  static constexpr int kPairs = 32 / kSharers;  // of channels, a warp
  static_assert(kSharers >= 1 && kSharers <= 8);
};

template <int kDim, int kThreads>
struct Rows {
  unsigned stage;  // address in shared memory, a multiple of 32
  i32 count;
  i32 dtype;

  // Where eight channels from c on start.
  __device__ __forceinline__ unsigned at(i32 row, i32 c) const {
    const i32 size = bytes_of(dtype);
    return stage + piece_offset(row, c * size / 16, kDim / 16 * size);
  }
  __device__ __forceinline__ i32 pitch() const { return kDim * bytes_of(dtype); }

  // Byte offset of a piece of a row of `pieces`. Rows that are kSharers apart are alike.
  static __device__ __forceinline__ i32 piece_offset(i32 row, i32 piece, i32 pieces) {
    constexpr int kTurn = 8 / ColumnShares<kDim, kThreads>::kSharers;
    return (row * pieces + (piece ^ (row * kTurn & 7))) * 16;
  }
};

// Starts to copy tokens token .. token + count - 1; cp_async_wait and __syncthreads finish it. The
// stage must be free. irregular: rows cannot be read in 16-byte pieces (an odd stride or address, or
// channels that are no multiple of 8).
template <int kDim, int kThreads>
__device__ __noinline__ void stage_rows(const View view, bool irregular, i32 sequence, i64 token,
                                        i32 head, i32 count, L2 evict, unsigned stage) {
  const i32 size = bytes_of(view.dtype);
  const i64 at = token_offset(view, sequence, token, head);
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i32 pieces = kDim / 16 * size;  // 16 bytes each, a row
  if (!irregular) {
    const i32 row = size == 4 ? thread / (kDim / 4) : thread / (kDim / 8);
    const i32 piece = thread - row * pieces;
    const unsigned long long policy = policy_of(evict);
    const bool exists = piece * 16 < view.channels * size;
    const char* from = static_cast<const char*>(view.data) + (at + row * view.token) * size +
                       (exists ? piece * 16 : 0);
    const i64 step = view.token * (kThreads * 16 / kDim);
    // A thread's rows are a multiple of kSharers apart.
    unsigned to = stage + Rows<kDim, kThreads>::piece_offset(row, piece, pieces);
#pragma unroll 4
    for (i32 left = count - row; left > 0; left -= kThreads * 16 / kDim / size) {
      cp_async_16(to, from, exists ? 16 : 0, policy);
      from += step;
      to += kThreads * 16;
    }
  } else {
#pragma unroll 1
    for (i32 i = thread; i < count * kDim; i += kThreads) {
      const i32 row = i / kDim, c = i % kDim;
      const i64 from = at + row * view.token + c * view.dim;
      const bool exists = c < view.channels;
      const unsigned to =
          stage + Rows<kDim, kThreads>::piece_offset(row, c * size / 16, pieces) + c * size % 16;
      if (size == 4) {
        *shared_pointer<float>(to) = exists ? static_cast<const float*>(view.data)[from] : 0.0f;
      } else {
        *shared_pointer<unsigned short>(to) =
            exists ? static_cast<const unsigned short*>(view.data)[from] : 0;
      }
    }
  }
  cp_async_commit();
}

// Two channels from 32 bits of fp16 or bf16.
__device__ __forceinline__ float2 widen(unsigned word, bool f16) {
  return f16 ? make_float2(f16_lo(word), f16_hi(word)) : make_float2(bf16_lo(word), bf16_hi(word));
}

// Eight channels each, that start at from[i] of some Rows.
template <int kCount>
__device__ __forceinline__ void load_8(i32 dtype, const unsigned (&from)[kCount],
                                       float (&x)[kCount][8]) {
  if (dtype == 3) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 u = *shared_pointer<const float4>(from[i]),
                   v = *shared_pointer<const float4>(from[i] ^ 16);
      x[i][0] = u.x, x[i][1] = u.y, x[i][2] = u.z, x[i][3] = u.w;
      x[i][4] = v.x, x[i][5] = v.y, x[i][6] = v.z, x[i][7] = v.w;
    }
    return;
  }
  uint4 words[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = *shared_pointer<const uint4>(from[i]);
  const auto widen_all = [&](bool f16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float2 a = widen(words[i].x, f16), b = widen(words[i].y, f16),
                   c = widen(words[i].z, f16), d = widen(words[i].w, f16);
      x[i][0] = a.x, x[i][1] = a.y, x[i][2] = b.x, x[i][3] = b.y;
      x[i][4] = c.x, x[i][5] = c.y, x[i][6] = d.x, x[i][7] = d.y;
    }
  };
  if (dtype == 1) {
    widen_all(true);
  } else {
    widen_all(false);
  }
}

// Eight floats, 16-byte aligned.
__device__ __forceinline__ void load_8(const float* from, float (&x)[8]) {
  const float4 u = reinterpret_cast<const float4*>(from)[0],
               v = reinterpret_cast<const float4*>(from)[1];
  x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
  x[4] = v.x, x[5] = v.y, x[6] = v.z, x[7] = v.w;
}

// Folds kLanes values, a power of two, in halves: value r joins value r + half, down to one.
template <int kLanes, typename T, typename Join>
__device__ __forceinline__ void fold(T* lanes, Join join) {
  if constexpr (kLanes > 1) {
#pragma unroll
    for (int r = 0; r < kLanes / 2; ++r) lanes[r] = join(lanes[r], lanes[r + kLanes / 2]);
    fold<kLanes / 2>(lanes, join);
  }
}

__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 max_nan(float2 a, float2 b) {
  return make_float2(max_nan(a.x, b.x), max_nan(a.y, b.y));
}
__device__ __forceinline__ float2 negative(float2 a) { return make_float2(-a.x, -a.y); }

// Statistics down columns.
template <int kDim, int kThreads>
struct Columns : ColumnShares<kDim, kThreads> {
  using ColumnShares<kDim, kThreads>::kSharers;
  using ColumnShares<kDim, kThreads>::kPairs;

  static __device__ __forceinline__ int channel() {
    const int thread = static_cast<int>(threadIdx.x);
    return (thread / 32 * kPairs + thread % kPairs) * 2;
  }
  static __device__ __forceinline__ int sharer() {
    return static_cast<int>(threadIdx.x) % 32 / kPairs;
  }

  // The sharers' values, joined: for all of them.
  template <typename Join>
  static __device__ __forceinline__ float2 across(float2 x, Join join) {
#pragma unroll
    for (int half = kSharers / 2; half > 0; half /= 2) {
      x = join(x, make_float2(__shfl_xor_sync(0xffffffffu, x.x, half * kPairs),
                              __shfl_xor_sync(0xffffffffu, x.y, half * kPairs)));
    }
    return x;
  }

  // Sums over the chunk of 64 rows that begins with row `first`, in the order that docs/numerics.md
  // fixes: lane r of 16 adds rows r, r + 16, .., then lanes fold by 8, 4, 2, 1. With `extremes`, `most`
  // and `least` (its negative) take in every row that the thread sees.
  static __device__ __forceinline__ float2 chunk_sums(const Rows<kDim, kThreads>& rows, i32 first,
                                                      bool extremes, float2& most, float2& least) {
    return across(sum_lanes<kSharers>(rows, first + sharer(), extremes, most, least),
                  [](float2 a, float2 b) { return a + b; });
  }

 private:
  // The fold of lanes r, r + kStep, ..; row: the first of lane r.
  template <int kStep>
  static __device__ __forceinline__ float2 sum_lanes(const Rows<kDim, kThreads>& rows, i32 row,
                                                     bool extremes, float2& most, float2& least) {
    const float2 zero = make_float2(0.0f, 0.0f);
    if constexpr (kStep < 4) {
      float2 sum = zero;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        sum = sum + sum_lanes<2 * kStep>(rows, row + half * kStep, extremes, most, least);
      }
      return sum;
    } else {
      float2 lanes[16 / kStep];
#pragma unroll
      for (int lane = 0; lane < 16 / kStep; ++lane) {
        const i32 begin = row + lane * kStep;
        float2 x[4];
        load_column(rows, begin, x);
        lanes[lane] = zero;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (begin + 16 * i < rows.count) lanes[lane] = lanes[lane] + x[i];
        }
        if (extremes) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (begin + 16 * i >= rows.count) continue;
            most = max_nan(most, x[i]);
            least = max_nan(least, negative(x[i]));
          }
        }
      }
      fold<16 / kStep>(lanes, [](float2 a, float2 b) { return a + b; });
      return lanes[0];
    }
  }

  // Rows row, row + 16, + 32, + 48, whose pieces change places alike.
  static __device__ __forceinline__ void load_column(const Rows<kDim, kThreads>& rows, i32 row,
                                                     float2 (&x)[4]) {
    const i32 c = channel(), size = bytes_of(rows.dtype);
    const unsigned from =
        rows.stage + rows.piece_offset(row, c * size / 16, kDim / 16 * size) + c * size % 16;
    if (rows.dtype == 3) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *shared_pointer<const float2>(from + i * 16 * kDim * 4);
      return;
    }
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = *shared_pointer<const unsigned>(from + i * 16 * kDim * 2);
    }
    if (rows.dtype == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = widen(words[i], true);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = widen(words[i], false);
    }
  }
};

}  // namespace sageattn
