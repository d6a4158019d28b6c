// Rows of one head of a caller's tensor in shared memory, as they are: [rows][kDim] elements, channels
// that do not exist 0. The 16-byte pieces of a row change places so that both ways of reading meet all
// banks: along rows, eight channels a thread, and down columns, two channels a thread. 256 threads.
#pragma once

#include "ptx/arch/convert.h"
#include "ptx/arch/memory.h"
#include "ptx/common/sequences.h"

namespace sageattn {

inline constexpr int kRowThreads = 256;

__device__ __forceinline__ i32 bytes_of(i32 dtype) { return dtype == 3 ? 4 : 2; }

struct Rows {
  unsigned stage;  // address in shared memory
  i32 count;
  i32 dtype;
};

// Byte offset of a piece of a row of `pieces`.
template <int kDim>
__device__ __forceinline__ i32 piece_offset(i32 row, i32 piece, i32 pieces) {
  return (row * pieces + (piece ^ (row * (kDim / 64) & 7))) * 16;
}

// Starts to copy tokens token .. token + count - 1; cp_async_wait and __syncthreads finish it. The
// stage must be free. irregular: rows cannot be read in 16-byte pieces (an odd stride or address, or
// channels that are no multiple of 8).
template <int kDim>
__device__ __noinline__ void stage_rows(const View view, bool irregular, i32 sequence, i64 token,
                                        i32 head, i32 count, unsigned stage) {
  const i32 size = bytes_of(view.dtype);
  const i64 at = token_offset(view, sequence, token, head);
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i32 pieces = kDim / 16 * size;  // 16 bytes each, a row
  if (!irregular) {
    // Rows that a thread copies are a multiple of 8 / (kDim / 64) apart: pieces change places alike.
    const i32 piece = thread % pieces;
    const bool exists = piece * 16 < view.channels * size;
    const char* from = static_cast<const char*>(view.data) + at * size + piece * 16;
    const i64 pitch = view.token * size;
    unsigned to = stage + piece_offset<kDim>(thread / pieces, piece, pieces);
#pragma unroll 4
    for (i32 row = thread / pieces; row < count; row += kRowThreads / pieces) {
      if (exists) {
        cp_async_16(to, from + row * pitch);
      } else {
        *shared_pointer<uint4>(to) = make_uint4(0, 0, 0, 0);
      }
      to += kRowThreads * 16;
    }
  } else {
#pragma unroll 1
    for (i32 i = thread; i < count * kDim; i += kRowThreads) {
      const i32 row = i / kDim, c = i % kDim;
      const i64 from = at + row * view.token + c * view.dim;
      const bool exists = c < view.channels;
      const unsigned to = stage + piece_offset<kDim>(row, c * size / 16, pieces) + c * size % 16;
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

// Channels c .. c + 7 of a row, 0 where there is no row.
template <int kDim>
__device__ __forceinline__ void load_8(const Rows& rows, i32 row, i32 c, float (&x)[8]) {
  if (row >= rows.count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    return;
  }
  if (rows.dtype == 3) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 u =
          *shared_pointer<const float4>(rows.stage + piece_offset<kDim>(row, c / 4 + i, kDim / 4));
      x[4 * i] = u.x, x[4 * i + 1] = u.y, x[4 * i + 2] = u.z, x[4 * i + 3] = u.w;
    }
    return;
  }
  const uint4 u =
      *shared_pointer<const uint4>(rows.stage + piece_offset<kDim>(row, c / 8, kDim / 8));
  const unsigned words[4] = {u.x, u.y, u.z, u.w};
  const auto widen_all = [&](bool f16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = widen(words[i], f16);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  };
  if (rows.dtype == 1) {
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

// Statistics down columns. A thread takes two channels of every kSharers-th row; the threads that share
// a pair of channels stand in one warp.
template <int kDim>
struct Columns {
  static constexpr int kSharers = 2 * kRowThreads / kDim;
  static constexpr int kPairs = 32 / kSharers;  // of channels, a warp

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
  // fixes: lane r of 16 adds rows r, r + 16, .., then lanes fold by 8, 4, 2, 1. A thread has the lanes
  // sharer(), sharer() + kSharers, ... With `extremes`, `most` and `least` (its negative) take in every
  // row that the thread sees.
  static __device__ __forceinline__ float2 chunk_sums(const Rows& rows, i32 first, bool extremes,
                                                      float2& most, float2& least) {
    constexpr int kLanes = 16 / kSharers;
    const auto add = [](float2 a, float2 b) { return a + b; };
    float2 lanes[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const i32 row = first + sharer() + lane * kSharers;
      float2 x[4];
      load_column(rows, row, x);
      lanes[lane] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + 16 * i < rows.count) lanes[lane] = lanes[lane] + x[i];
      }
      if (extremes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row + 16 * i >= rows.count) continue;
          most = max_nan(most, x[i]);
          least = max_nan(least, negative(x[i]));
        }
      }
    }
    fold<kLanes>(lanes, add);
    return across(lanes[0], add);
  }

 private:
  // Rows row, row + 16, + 32, + 48, whose pieces change places alike.
  static __device__ __forceinline__ void load_column(const Rows& rows, i32 row, float2 (&x)[4]) {
    if (rows.dtype == 3) {
      const unsigned from =
          rows.stage + piece_offset<kDim>(row, channel() / 4, kDim / 4) + channel() % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *shared_pointer<const float2>(from + i * 16 * kDim * 4);
      return;
    }
    const unsigned from =
        rows.stage + piece_offset<kDim>(row, channel() / 8, kDim / 8) + channel() % 8 * 2;
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
