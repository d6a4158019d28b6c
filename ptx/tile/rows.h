// Rows of one head of a caller's tensor in shared memory, as they are: [rows][kDim] elements, channels
// that do not exist 0. Threads read eight channels at a time, kDim / 8 neighbouring threads a row.
#pragma once

#include "ptx/arch/memory.h"
#include "ptx/common/sequences.h"
#include "ptx/tile/load.h"

namespace sageattn {

__device__ __forceinline__ i32 bytes_of(i32 dtype) { return dtype == 3 ? 4 : 2; }

struct Rows {
  const unsigned char* stage;
  i32 count;
  i32 dtype;
};

// Starts to copy tokens token .. token + count - 1; cp_async_wait and __syncthreads finish it. The
// stage must be free. irregular: rows cannot be read in 16-byte pieces (an odd stride or address, or
// channels that are no multiple of 8).
template <int kDim, int kThreads>
__device__ __forceinline__ Rows stage_rows(const View& view, bool irregular, i32 sequence,
                                           i64 token, i32 head, i32 count, unsigned char* stage) {
  const i32 size = bytes_of(view.dtype);
  const i64 at = token_offset(view, sequence, token, head);
  const i32 thread = static_cast<i32>(threadIdx.x);
  if (!irregular) {
    const i32 pieces = kDim / 16 * size;  // 16 bytes each, a row
    const char* base = static_cast<const char*>(view.data) + at * size;
    const i64 pitch = view.token * size;
    const i32 piece = thread % pieces;  // kThreads is a multiple of pieces
    const unsigned to = shared_address(stage) + thread * 16;
    const bool exists = piece * 16 < view.channels * size;
    base += piece * 16;
#pragma unroll 4
    for (i32 row = thread / pieces, i = 0; row < count; row += kThreads / pieces, ++i) {
      if (exists) {
        cp_async_16(to + i * kThreads * 16, base + row * pitch);
      } else {
        *reinterpret_cast<uint4*>(stage + thread * 16 + i * kThreads * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  } else {
    for (i32 i = thread; i < count * kDim; i += kThreads) {
      const i32 c = i % kDim;
      const i64 from = at + i / kDim * view.token + c * view.dim;
      const bool exists = c < view.channels;
      if (size == 4) {
        reinterpret_cast<float*>(stage)[i] =
            exists ? static_cast<const float*>(view.data)[from] : 0.0f;
      } else {
        reinterpret_cast<unsigned short*>(stage)[i] =
            exists ? static_cast<const unsigned short*>(view.data)[from] : 0;
      }
    }
  }
  cp_async_commit();
  return {stage, count, view.dtype};
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
    const float4* at = reinterpret_cast<const float4*>(rows.stage + (row * kDim + c) * 4);
    const float4 u = at[0], v = at[1];
    x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
    x[4] = v.x, x[5] = v.y, x[6] = v.z, x[7] = v.w;
    return;
  }
  const uint4 u = *reinterpret_cast<const uint4*>(rows.stage + (row * kDim + c) * 2);
  const unsigned words[4] = {u.x, u.y, u.z, u.w};
  if (rows.dtype == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = f16_lo(words[i]);
      x[2 * i + 1] = f16_hi(words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = bf16_lo(words[i]);
      x[2 * i + 1] = bf16_hi(words[i]);
    }
  }
}

// Folds kLanes values, a power of two, in halves: value r += value r + half, down to one.
template <int kLanes>
__device__ __forceinline__ void fold(float* lanes) {
  if constexpr (kLanes > 1) {
#pragma unroll
    for (int r = 0; r < kLanes / 2; ++r) lanes[r] += lanes[r + kLanes / 2];
    fold<kLanes / 2>(lanes);
  }
}

// Sums of each channel over chunks of 64 rows, in the order that docs/numerics.md fixes: in a chunk
// lane r of 16 adds rows r, r + 16, .., then lanes fold by 8, 4, 2, 1. Several chunks at once where
// rows are short.
template <int kDim, int kThreads>
struct ChunkSums {
  static constexpr int kPieces = kDim / 8;  // threads a row
  static constexpr int kRowsAtOnce = kThreads / kPieces;
  static constexpr int kAtOnce = kRowsAtOnce < 16 ? 1 : kRowsAtOnce / 16;  // chunks
  static constexpr int kLanesEach = kRowsAtOnce < 16 ? 16 / kRowsAtOnce : 1;

  // Calls see(x) for the eight channels of every row that exists and store(chunk, channel, sum) for
  // every channel of every chunk. The whole block takes part.
  template <typename See, typename Store>
  static __device__ __forceinline__ void run(const Rows& rows, float* buffer, See see,
                                             Store store) {
    const i32 chunks = (rows.count + kChunkTokens - 1) / kChunkTokens;
    const int thread = static_cast<int>(threadIdx.x);
    const int first_channel = thread % kPieces * 8;
    const int sub = thread / kPieces / 16 % kAtOnce;
    const int lane = thread / kPieces % 16;
#pragma unroll 1
    for (i32 first = 0; first < chunks; first += kAtOnce) {
#pragma unroll
      for (int l = 0; l < kLanesEach; ++l) {
        float sum[8] = {};
#pragma unroll
        for (int i = 0; i < kChunkTokens / 16; ++i) {
          const i32 row = (first + sub) * kChunkTokens + i * 16 + lane + l * kRowsAtOnce;
          if (row >= rows.count) continue;
          float x[8];
          load_8<kDim>(rows, row, first_channel, x);
          see(x);
#pragma unroll
          for (int c = 0; c < 8; ++c) sum[c] += x[c];
        }
        float* to = buffer + (sub * 16 + lane + l * kRowsAtOnce) * kDim + first_channel;
        *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *reinterpret_cast<float4*>(to + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
      }
      __syncthreads();
      for (int i = thread; i < kAtOnce * kDim; i += kThreads) {
        const float* from = buffer + i / kDim * 16 * kDim + i % kDim;
        float lanes[16];
#pragma unroll
        for (int r = 0; r < 16; ++r) lanes[r] = from[r * kDim];
        fold<16>(lanes);
        if (first + i / kDim < chunks) store(first + i / kDim, i % kDim, lanes[0]);
      }
      __syncthreads();
    }
  }
};

}  // namespace sageattn
