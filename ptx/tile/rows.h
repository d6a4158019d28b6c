// Rows of one head of a caller's tensor in shared memory, as they are: [rows][kDim] elements, channels
// that do not exist 0. The 16-byte pieces of a row change places so that both ways of reading meet all
// banks: along rows, eight channels a thread, and down columns, two or four channels a thread.
// Not so with kBulk: rows are copied as they are then, and columns meet half of the banks or fewer.
#pragma once

#include "ptx/arch/barrier.h"
#include "ptx/arch/convert.h"
#include "ptx/arch/memory.h"
#include "ptx/common/sequences.h"

namespace sageattn {

__device__ __forceinline__ i32 bytes_of(i32 dtype) { return dtype == 3 ? 4 : 2; }

// How kThreads threads share columns: each takes kEach channels of every kSharers-th row; those that
// share channels stand in one warp, and of what they found together each keeps kKept channels.
template <int kDim, int kThreads>
struct ColumnShares {
  static constexpr int kEach = kDim >= 128 ? 4 : 2;
  static constexpr int kSharers = kEach * kThreads / kDim;
  static constexpr int kAcross = 32 / kSharers;  // that stand side by side
  static constexpr int kKept = kEach > kSharers ? kEach / kSharers : 1;
  static_assert(kSharers >= 2 && kSharers <= 4);
};

template <int kDim, int kThreads, bool kBulk = false>
struct Rows {
  unsigned stage;  // address in shared memory, a multiple of 32
  i32 count;
  i32 dtype;

  // Where eight channels from c on start.
  __device__ __forceinline__ unsigned at(i32 row, i32 c) const {
    const i32 size = bytes_of(dtype);
    return stage + piece_offset(row, static_cast<unsigned>(c * size) / 16, kDim / 16 * size);
  }
  static __device__ __forceinline__ unsigned at_16(unsigned stage, i32 row, i32 c) {  // of 16 bits
    return stage + piece_offset(row, static_cast<unsigned>(c) / 8, kDim / 8);
  }
  __device__ __forceinline__ i32 pitch() const { return kDim * bytes_of(dtype); }

  // Byte offset of a piece of a row of `pieces`. Rows that are kSharers apart are alike.
  static __device__ __forceinline__ i32 piece_offset(i32 row, i32 piece, i32 pieces) {
    constexpr int kTurn = kBulk ? 0 : kDim == 64 ? 2 : kDim == 128 ? 4 : 0;
    return (row * pieces + (piece ^ (row * kTurn & 7))) * 16;
  }
};

// Starts to copy tokens token .. token + count - 1, in pieces of 16 bytes, or element by element.
template <int kDim, int kThreads, bool kBulk, L2 kEvict>
__device__ __noinline__ void stage_pieces(const View view, bool irregular, i32 sequence, i64 token,
                                          i32 head, i32 count, unsigned stage) {
  const i32 size = bytes_of(view.dtype);
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i64 at = token_offset(view, sequence, token, head);
  const i32 pieces = kDim / 16 * size;  // 16 bytes each, a row
  if (!irregular) {
    const i32 row = size == 4 ? thread / (kDim / 4) : thread / (kDim / 8);
    const i32 piece = thread - row * pieces;
    const u64 policy = policy_of(kEvict);
    const bool exists = piece * 16 < view.channels * size;
    const char* from = static_cast<const char*>(view.data) + (at + row * view.token) * size +
                       (exists ? piece * 16 : 0);
    const i64 step = view.token * (kThreads * 16 / kDim);
    // A thread's rows are a multiple of kSharers apart.
    unsigned to = stage + Rows<kDim, kThreads, kBulk>::piece_offset(row, piece, pieces);
    const i32 rows = size == 4 ? kThreads * 4 / kDim : kThreads * 8 / kDim;  // at a time
    i32 left = count - row;
    const auto next = [&] {
      cp_async_16(to, from, exists ? 16 : 0, policy);
      from += step;
      to += kThreads * 16;
    };
#pragma unroll 1
    for (; left > 3 * rows; left -= 4 * rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) next();
    }
#pragma unroll 1
    for (; left > 0; left -= rows) next();
  } else {
#pragma unroll 1
    for (i32 i = thread; i < count * kDim; i += kThreads) {
      const i32 row = i / kDim, c = i % kDim;
      const i64 from = at + row * view.token + c * view.dim;
      const bool exists = c < view.channels;
      const unsigned to = stage +
                          Rows<kDim, kThreads, kBulk>::piece_offset(row, c * size / 16, pieces) +
                          c * size % 16;
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

// Starts to copy tokens token .. token + count - 1; cp_async_wait and __syncthreads finish it, and with
// kBulk the next phase of the barrier, which takes one arrival. The stage must be free. irregular: rows
// cannot be read in 16-byte pieces (an odd stride or address, or channels that are no multiple of 8).
template <L2 kEvict, int kDim, int kThreads, bool kBulk = false>
__device__ __forceinline__ void stage_rows(const View view, bool irregular, i32 sequence, i64 token,
                                           i32 head, i32 count, unsigned stage,
                                           unsigned barrier = 0) {
  if constexpr (kBulk) {
    // Rows that follow one another are one copy. (A copy a row takes as many instructions as pieces do.)
    const bool one = !irregular && view.channels == kDim && view.token == kDim;
    if (threadIdx.x == 0) {
      const i32 size = bytes_of(view.dtype), bytes = one ? count * kDim * size : 0;
      barrier_expect(barrier, bytes);
      if (one) {
        const i64 at = token_offset(view, sequence, token, head) * size;
        copy_bulk(stage, static_cast<const char*>(view.data) + at, bytes, barrier,
                  policy_of(kEvict));
      }
    }
    if (one) {
      cp_async_commit();
      return;
    }
  }
  stage_pieces<kDim, kThreads, kBulk, kEvict>(view, irregular, sequence, token, head, count, stage);
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

// Eight channels of 16 bits.
template <bool kF16>
__device__ __forceinline__ void load_8(unsigned from, float (&x)[8]) {
  const uint4 words = *shared_pointer<const uint4>(from);
  const float2 a = widen(words.x, kF16), b = widen(words.y, kF16), c = widen(words.z, kF16),
               d = widen(words.w, kF16);
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
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

// A thread's channels.
template <int kCount>
struct alignas(4 * kCount) Floats {
  float x[kCount];

  static __device__ __forceinline__ Floats all(float value) {
    Floats y;
#pragma unroll
    for (int c = 0; c < kCount; ++c) y.x[c] = value;
    return y;
  }
};
template <int kCount>
__device__ __forceinline__ Floats<kCount> operator+(Floats<kCount> a, const Floats<kCount>& b) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) a.x[c] += b.x[c];
  return a;
}
template <int kCount>
__device__ __forceinline__ Floats<kCount> max_nan(Floats<kCount> a, const Floats<kCount>& b) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) a.x[c] = max_nan(a.x[c], b.x[c]);
  return a;
}

// Channels of fp16 or bf16 as they are.
template <int kCount>
struct alignas(2 * kCount) Halves {
  unsigned words[kCount / 2];
};
template <bool kF16, int kCount>
__device__ __forceinline__ Floats<kCount> widen(const Halves<kCount>& x) {
  Floats<kCount> y;
#pragma unroll
  for (int c = 0; c < kCount; c += 2) {
    const float2 two = widen(x.words[c / 2], kF16);
    y.x[c] = two.x, y.x[c + 1] = two.y;
  }
  return y;
}
template <bool kF16, int kCount>
__device__ __forceinline__ Halves<kCount> larger(Halves<kCount> a, const Halves<kCount>& b) {
#pragma unroll
  for (int w = 0; w < kCount / 2; ++w) a.words[w] = max_nan_x2<kF16>(a.words[w], b.words[w]);
  return a;
}
template <bool kF16, int kCount>
__device__ __forceinline__ Halves<kCount> smaller(Halves<kCount> a, const Halves<kCount>& b) {
#pragma unroll
  for (int w = 0; w < kCount / 2; ++w) a.words[w] = min_nan_x2<kF16>(a.words[w], b.words[w]);
  return a;
}

// Statistics down columns.
template <int kDim, int kThreads, bool kBulk = false>
struct Columns : ColumnShares<kDim, kThreads> {
  using ColumnShares<kDim, kThreads>::kEach;
  using ColumnShares<kDim, kThreads>::kSharers;
  using ColumnShares<kDim, kThreads>::kAcross;
  using ColumnShares<kDim, kThreads>::kKept;
  using Kept = Floats<kKept>;
  using Values = Floats<kEach>;
  using Channels = Halves<kEach>;

  // The first channel that the thread keeps. (With 64 channels two threads keep the same.)
  static __device__ __forceinline__ int kept() {
    return channel() + static_cast<int>(threadIdx.x % 32 / kAcross * kEach / kSharers);
  }

  // Sums over the chunk of 64 rows that begins with row `first`, in the order that docs/numerics.md
  // fixes: lane r of 16 adds rows r, r + 16, .., then lanes fold by 8, 4, 2, 1. A sum of nothing but -0
  // may be -0: to be added to 0. With kExtremes, `most` and `least` (the largest negative) take in every
  // row.
  template <bool kExtremes>
  static __device__ __forceinline__ Kept chunk_sums(const Rows<kDim, kThreads, kBulk>& rows,
                                                    i32 first, Kept& most, Kept& least) {
    if (rows.dtype == 3 || rows.count - first < 64) {
      return some<kExtremes>(rows, first, most, least);
    }
    return rows.dtype == 1 ? whole<kExtremes, true>(rows, first, most, least)
                           : whole<kExtremes, false>(rows, first, most, least);
  }

 private:
  static __device__ __forceinline__ int channel() {
    return static_cast<int>((threadIdx.x / 32 * kAcross + threadIdx.x % kAcross) * kEach);
  }
  static __device__ __forceinline__ int sharer() {
    return static_cast<int>(threadIdx.x % 32 / kAcross);
  }

  // The sharers' values, joined. Two threads halve what they have, the one with the upper number keeps the
  // upper half, until each has what it keeps.
  template <int kHalf, int kCount, typename Join>
  static __device__ __forceinline__ auto across(const Floats<kCount>& x, Join join) {
    if constexpr (kHalf == 0) {
      return x;
    } else if constexpr (kCount == 1) {
      const float other = __shfl_xor_sync(0xffffffffu, x.x[0], kHalf * kAcross);
      return across<kHalf / 2>(Floats<1>{join(x.x[0], other)}, join);
    } else {
      const bool upper = (sharer() & kHalf) != 0;
      Floats<kCount / 2> half;
#pragma unroll
      for (int c = 0; c < kCount / 2; ++c) {
        const float low = x.x[c], high = x.x[c + kCount / 2];
        const float other = __shfl_xor_sync(0xffffffffu, upper ? low : high, kHalf * kAcross);
        half.x[c] = join(upper ? high : low, other);
      }
      return across<kHalf / 2>(half, join);
    }
  }
  template <int kHalf, bool kF16, int kCount, typename Join>
  static __device__ __forceinline__ Kept packed_across(const Halves<kCount>& x, Join join) {
    if constexpr (kHalf == 0 && kKept > 1) {
      return widen<kF16>(x);
    } else if constexpr (kHalf == 0) {
      return {widen(kept() % 2 != 0 ? x.words[0] >> 16 : x.words[0], kF16).x};
    } else if constexpr (kCount == 2) {
      const unsigned other = __shfl_xor_sync(0xffffffffu, x.words[0], kHalf * kAcross);
      return packed_across<kHalf / 2, kF16>(Halves<2>{join(x.words[0], other)}, join);
    } else {
      static_assert(kCount == 4);
      const bool upper = (sharer() & kHalf) != 0;
      const unsigned low = x.words[0], high = x.words[1];
      const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? low : high, kHalf * kAcross);
      return packed_across<kHalf / 2, kF16>(Halves<2>{join(upper ? high : low, other)}, join);
    }
  }
  static __device__ __forceinline__ Kept sum_across(const Values& x) {
    return across<kSharers / 2>(x, [](float a, float b) { return a + b; });
  }

  // Where a row's channels are. Rows row, row + 16, .. change places alike.
  static __device__ __forceinline__ unsigned address(const Rows<kDim, kThreads, kBulk>& rows,
                                                     i32 row, i32 size) {
    const i32 c = channel();
    return rows.stage +
           rows.piece_offset(row, static_cast<unsigned>(c * size) / 16, kDim / 16 * size) +
           static_cast<unsigned>(c * size) % 16;
  }

  // A whole chunk of 16 bits: no row is asked whether it exists, extremes are found two channels at once.
  template <bool kExtremes, bool kF16>
  static __device__ __forceinline__ Kept whole(const Rows<kDim, kThreads, kBulk>& rows, i32 first,
                                               Kept& most, Kept& least) {
    const unsigned from = address(rows, first + sharer(), 2);
    Channels high = *shared_pointer<const Channels>(from), low = high;
    const Kept sum = sum_across(whole_lanes<kExtremes, kF16, kSharers>(from, high, low));
    if constexpr (kExtremes) {
      const Kept highest = packed_across<kSharers / 2, kF16>(
          high, [](unsigned a, unsigned b) { return max_nan_x2<kF16>(a, b); });
      const Kept lowest = packed_across<kSharers / 2, kF16>(
          low, [](unsigned a, unsigned b) { return min_nan_x2<kF16>(a, b); });
      most = max_nan(most, highest);
#pragma unroll
      for (int c = 0; c < kKept; ++c) least.x[c] = max_nan(least.x[c], -lowest.x[c]);
    }
    return sum;
  }

  // The fold of lanes r, r + kStep, ..; from: the first row of lane r.
  template <bool kExtremes, bool kF16, int kStep>
  static __device__ __forceinline__ Values whole_lanes(unsigned from, Channels& high,
                                                       Channels& low) {
    constexpr int kPitch = kDim * 2;
    if constexpr (kStep < 8) {
      Values sum = Values::all(0.0f);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        sum =
            sum + whole_lanes<kExtremes, kF16, 2 * kStep>(from + half * kStep * kPitch, high, low);
      }
      return sum;
    } else {
      Values lanes[16 / kStep];
#pragma unroll
      for (int lane = 0; lane < 16 / kStep; ++lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Channels x =
              *shared_pointer<const Channels>(from + (lane * kStep + 16 * i) * kPitch);
          lanes[lane] = i == 0 ? widen<kF16>(x) : lanes[lane] + widen<kF16>(x);
          if constexpr (kExtremes) {
            high = larger<kF16>(high, x);
            low = smaller<kF16>(low, x);
          }
        }
      }
      fold<16 / kStep>(lanes, [](const Values& a, const Values& b) { return a + b; });
      return lanes[0];
    }
  }

  // Any chunk.
  template <bool kExtremes>
  static __device__ __forceinline__ Kept some(const Rows<kDim, kThreads, kBulk>& rows, i32 first,
                                              Kept& most, Kept& least) {
    Values high = Values::all(__int_as_float(0xff800000)), low = high;
    const Kept sum = sum_across(some_lanes<kExtremes, kSharers>(rows, first + sharer(), high, low));
    if constexpr (kExtremes) {
      const auto larger_of = [](float a, float b) { return max_nan(a, b); };
      most = max_nan(most, across<kSharers / 2>(high, larger_of));
      least = max_nan(least, across<kSharers / 2>(low, larger_of));
    }
    return sum;
  }

  template <bool kExtremes, int kStep>
  static __device__ __forceinline__ Values some_lanes(const Rows<kDim, kThreads, kBulk>& rows,
                                                      i32 row, Values& most, Values& least) {
    Values sum = Values::all(0.0f);
    if constexpr (kStep < 16) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        sum = sum + some_lanes<kExtremes, 2 * kStep>(rows, row + half * kStep, most, least);
      }
    } else {
      const i32 size = bytes_of(rows.dtype);
      unsigned from = address(rows, row, size);
#pragma unroll 1
      for (i32 here = row; here < rows.count && here < row + 64; here += 16) {
        const Values x = load(from, rows.dtype);
        sum = sum + x;
        if constexpr (kExtremes) {
          most = max_nan(most, x);
#pragma unroll
          for (int c = 0; c < kEach; ++c) least.x[c] = max_nan(least.x[c], -x.x[c]);
        }
        from += 16 * kDim * size;
      }
    }
    return sum;
  }

  static __device__ __forceinline__ Values load(unsigned from, i32 dtype) {
    if (dtype == 3) return *shared_pointer<const Values>(from);
    const Channels x = *shared_pointer<const Channels>(from);
    return dtype == 1 ? widen<true>(x) : widen<false>(x);
  }
};

}  // namespace sageattn
