// Q, K and V to the codes and scales that the attention kernels read, in one launch.
//
// Macros: HEAD_DIMS; QK_BITS 8, 4, or 16 (EXACT: packed as they are); V_BITS 8 (E4M3) or 16 (FP16, or
// packed).
//
// A block takes one task. Statistics of K, and of V where its scale spans the sequence, come first:
// tasks of two chunks of 64 tokens leave partial sums where the chunk's codes will stand, and the last
// to arrive folds them. Tiles, one a task, are smoothed, rotated, measured and written. Either reads
// its tokens into shared memory first, as they are, by asynchronous copies: enough bytes are under way
// with few registers, and odd strides matter to nothing else. Heads follow one another, a head's
// statistics `lag` heads before its tiles, so that the second read finds its tokens in L2: memory sees
// K and V once.
//
// A tile waits for tasks with lower block indices only, which the hardware starts first.
//
// Everything is computed in the order and precision of docs/numerics.md: no fused multiply-add.
#include "ptx/arch/memory.h"
#include "ptx/tile/attn_shared.h"
#include "ptx/tile/groups.h"
#include "ptx/tile/rows.h"
#include "ptx/tile/swizzle.h"

namespace sageattn {
namespace {

constexpr int kBq = row_fragments(HeadDims{kDqk, kDv}) * 64;
constexpr int kRowsPerWarp = kBq / 4;
constexpr int kRowBytes = kDqk * QK_BITS / 8;
constexpr int kKBytes = kBk * kRowBytes;
constexpr int kVBytes = kBk * kDv * V_BITS / 8;
constexpr int kMaxCode = QK_BITS == 4 ? 7 : 127;
constexpr int kThreads = kPrepareThreads;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == 8);
constexpr int kWide = kDqk > kDv ? kDqk : kDv;

// How a warp covers rows of Q and K: kPieces threads a row, kWarpRows rows at once.
constexpr int kPieces = kDqk / 8;
constexpr int kWarpRows = 32 / kPieces;

// Blocks an SM. Where it has 100 KB of shared memory two fit.
constexpr int kBlocks = kWide > 128 ? 1 : __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 ? 4 : 2;

constexpr int kVPitch = 17;  // words of a channel's 64 tokens in the buffer: spreads banks

struct alignas(16) Shared {
  float buffer[16 * (kWide < 128 ? 128 : kWide) + kDv];  // sums of chunks; V on its way out
  float sums[2][kWide];                                  // of the chunks of a tile
  float folded[3][kWide];                                // of all chunks: kSum, kLeast, kLargest
  float mean[kWide];                                     // of a tile
  float inverse[kDv];                                    // scales of V
  unsigned absmax[kWide];  // as bits: of groups of Q and K, of channels of V
  int last;
};
static_assert(kVPitch * kDv <= 16 * 128 + kDv || V_BITS == 16);

// |x| as bits: they order as magnitudes do, infinities and NaN above all.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ float absmax_of(unsigned bits) {
  return bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : __uint_as_float(bits);
}

// Which sequence and heads a task belongs to.
struct Place {
  SequenceEntry sequence;
  i32 batch, kv_head;
};

// ---- Statistics ----

// Partial statistics of a chunk: the sums of each channel; with V, the least and the largest value
// of a whole task behind the sums of its first chunk.
__device__ __forceinline__ float* partial_of(const PrepareParams& p, bool is_v, i64 tile) {
  return reinterpret_cast<float*>(is_v ? p.v_codes + tile * kVBytes : p.k_codes + tile * kKBytes);
}

enum Fold { kSum, kLeast, kLargest };

__device__ __forceinline__ float join(int fold, float a, float b) {
  return fold == kSum ? a + b : fold == kLeast ? min_nan(a, b) : max_nan(a, b);
}

// Partial statistics of the chunks to K's mean; or to V's scale and mean. Lane r of 32 joins chunks
// r, r + 32, .., then lanes fold by 16, 8, 4, 2, 1. lanes: [32][kDim], in shared memory.
template <int kDim>
__device__ __forceinline__ void fold_chunks(const PrepareParams& p, const Place& place, bool is_v,
                                            Shared& shared, float* lanes) {
  constexpr int kJam = 8;  // sums that a thread makes at a time, so that loads overlap
  const int thread = static_cast<int>(threadIdx.x);
  const i64 tile = place.kv_head * p.heads.k_tiles + place.sequence.first_k_tile;
  const i64 pitch = (is_v ? kVBytes : kKBytes) / 4;
#pragma unroll 1
  for (int fold = kSum; fold <= (is_v ? kLargest : kSum); ++fold) {
    // Least and largest values stand once for all chunks of a task.
    const i32 every = fold == kSum ? 1 : kStatsChunks;
    const float* const from = partial_of(p, is_v, tile) + fold * kDim + thread % kDim;
    const i32 count = (place.sequence.kv_len - 1) / (kChunkTokens * every) + 1;
#pragma unroll 1
    for (int first = thread; first < 32 * kDim; first += kJam * kThreads) {
      const float start =
          fold == kSum ? 0.0f : __int_as_float(fold == kLeast ? 0x7f800000 : 0xff800000);
      float x[kJam];
#pragma unroll
      for (int j = 0; j < kJam; ++j) x[j] = start;
#pragma unroll 1
      for (i32 base = first / kDim; base < count; base += 32) {
#pragma unroll
        for (int j = 0; j < kJam; ++j) {
          const i32 i = base + j * (kThreads / kDim);
          if (i < count) x[j] = join(fold, x[j], from[i * every * pitch]);
        }
      }
#pragma unroll
      for (int j = 0; j < kJam; ++j) lanes[first + j * kThreads] = x[j];
    }
#pragma unroll 1
    for (int half = 16; half > 0; half /= 2) {
      __syncthreads();
      for (int i = thread; i < half * kDim; i += kThreads) {
        lanes[i] = join(fold, lanes[i], lanes[i + half * kDim]);
      }
    }
    if (thread < kDim) shared.folded[fold][thread] = lanes[thread];  // its own
    __syncthreads();
  }

  if (thread >= kDim) return;
  const float mean = shared.folded[kSum][thread] / static_cast<float>(place.sequence.kv_len);
  const i64 row = place.kv_head * p.heads.sequences + place.batch;
  if (!is_v) {
    p.k_mean[row * kDim + thread] = mean;
    return;
  }
  // Subtraction rounds monotonically, so the extremes of V give those of V less its mean.
  const float shift = p.v_smooth ? mean : 0.0f;
  const float absmax = absmax_of(max(magnitude(shared.folded[kLeast][thread] - shift),
                                     magnitude(shared.folded[kLargest][thread] - shift)));
  const Quantizer q =
      V_BITS == 16 ? make_f16_quantizer(absmax) : make_quantizer(absmax, p.v_max_code);
  p.v_scale[row * kDim + thread] = q.scale;
  p.v_scale[(p.heads.kv * p.heads.sequences + row) * kDim + thread] = q.inverse;
  p.v_mean[row * kDim + thread] = shift;
}

template <int kDim>
__device__ __forceinline__ void take_statistics(const PrepareParams& p, const Place& place,
                                                bool is_v, i32 task, i32 counter, Shared& shared,
                                                unsigned char* stage) {
  constexpr i32 kTokens = kStatsChunks * kChunkTokens;
  constexpr i32 kStep = stats_stage_tokens(kDim);
  const i32 first = task * kTokens;
  const i32 count = min(kTokens, place.sequence.kv_len - first);
  if (count <= 0) return;
  const i64 tile =
      place.kv_head * p.heads.k_tiles + place.sequence.first_k_tile + task * kStatsChunks;
  float* const partial = partial_of(p, is_v, tile);
  const i64 pitch = (is_v ? kVBytes : kKBytes) / 4;
  float least[8], largest[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    least[c] = __int_as_float(0x7f800000);
    largest[c] = -least[c];
  }
#pragma unroll 1
  for (i32 at = 0; at < count; at += kStep) {
    const Rows rows = stage_rows<kDim, kThreads>(
        is_v ? p.v : p.k, (p.irregular & (is_v ? kIrregularV : kIrregularK)) != 0, place.batch,
        place.sequence.kv_start + first + at, place.kv_head, min(kStep, count - at), stage);
    cp_async_wait<0>();
    __syncthreads();
    ChunkSums<kDim, kThreads>::run(
        rows, shared.buffer,
        [&](const float(&x)[8]) {
          if (!is_v) return;
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            least[c] = min_nan(least[c], x[c]);
            largest[c] = max_nan(largest[c], x[c]);
          }
        },
        [&](i32 chunk, i32 c, float sum) {
          partial[(at / kChunkTokens + chunk) * pitch + c] = sum;
        });
  }
  if (is_v) {
    // Threads of one column of pieces meet in the buffer: least values, then largest.
    constexpr int kColumn = kThreads * 8 / kDim;
    float* const to = shared.buffer + static_cast<int>(threadIdx.x) * 8;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int c = 0; c < 8; ++c) to[c] = kind == 0 ? least[c] : largest[c];
      __syncthreads();
      for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kThreads) {
        float x = shared.buffer[c];
#pragma unroll 4
        for (int r = 1; r < kColumn; ++r) {
          const float y = shared.buffer[r * kDim + c];
          x = kind == 0 ? min_nan(x, y) : max_nan(x, y);
        }
        partial[(1 + kind) * kDim + c] = x;
      }
      __syncthreads();
    }
  }

  // The last of the sequence's tasks folds.
  __syncthreads();
  if (threadIdx.x == 0) {
    const i32 tasks = (place.sequence.kv_len + kTokens - 1) / kTokens;
    shared.last = add_acq_rel(p.counters + counter, 1) == tasks - 1;
  }
  __syncthreads();
  if (!shared.last) return;
  fold_chunks<kDim>(p, place, is_v, shared, reinterpret_cast<float*>(stage));
  __syncthreads();
  if (threadIdx.x == 0) add_acq_rel(p.counters + counter, kFolded);
}

// Until the statistics that a counter stands for are there. The whole block.
__device__ __forceinline__ void wait_folded(const i32* counter) {
  if (threadIdx.x == 0) {
    while (load_acquire(counter) < kFolded) __nanosleep(100);
  }
  __syncthreads();
}

// ---- Q and K ----

// The channels of a row, padded with zeros to a power of two n, rotated by a normalised Hadamard
// matrix with random signs; first: the thread's first channel.
__device__ __forceinline__ void hadamard(float (&x)[8], int first, i32 n, float norm) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const unsigned sign =
        first + c < n ? static_cast<unsigned>(first + c + 1) * 0x9E3779B1u & 0x80000000u : 0u;
    x[c] = __uint_as_float(__float_as_uint(x[c]) ^ sign);
  }
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
    if (h >= n) continue;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (c & h) continue;
      const float a = x[c], b = x[c + h];
      x[c] = a + b;
      x[c + h] = a - b;
    }
  }
#pragma unroll 1
  for (int h = 8; h < n; h *= 2) {  // the other channel of a pair is another lane's
    const bool upper = (first & h) != 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float other = __shfl_xor_sync(0xffffffffu, x[c], h / 8);
      x[c] = (upper ? -x[c] : x[c]) + other;
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] *= norm;  // channels from n on are 0
}

__device__ __forceinline__ unsigned piece_absmax(const float (&x)[8], unsigned absmax) {
#pragma unroll
  for (int c = 0; c < 8; ++c) absmax = max(absmax, magnitude(x[c]));
  return absmax;
}

// Half to even. No clamp: |x| is at most the group's absmax, so the product is at most kMaxCode, but
// for an ulp. Adding 1.5 * 2^23 leaves the integer in the low bits.
__device__ __forceinline__ unsigned integer_bits(float x, float inverse) {
  return __float_as_uint(x * inverse + 12582912.0f);
}

// Codes of eight channels of a row; the whole group's inverse scale.
__device__ __forceinline__ void store_piece(const float (&x)[8], float inverse, i32 bf16, int row,
                                            int first, unsigned char* tile) {
  if constexpr (QK_BITS == 16) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = bf16 ? pack_bf16x2(x[2 * w], x[2 * w + 1]) : pack_f16x2(x[2 * w], x[2 * w + 1]);
    }
    *reinterpret_cast<uint4*>(tile + swizzled(row, first / 8, kRowBytes)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    const unsigned mask = inverse == 0.0f ? 0u : ~0u;  // the group is NaN or as good as 0
    unsigned code[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) code[c] = integer_bits(x[c], inverse);
    if constexpr (QK_BITS == 8) {
      unsigned words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        words[w] = __byte_perm(__byte_perm(code[4 * w], code[4 * w + 1], 0x0040),
                               __byte_perm(code[4 * w + 2], code[4 * w + 3], 0x0040), 0x5410);
      }
      *reinterpret_cast<uint2*>(tile + swizzled(row, first / 16, kRowBytes) + first % 16) =
          make_uint2(words[0] & mask, words[1] & mask);
    } else {
      unsigned word = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) word |= (code[c] & 15u) << (4 * c);
      *reinterpret_cast<unsigned*>(tile + swizzled(row, first / 32, kRowBytes) + first % 32 / 2) =
          word & mask;
    }
  }
}

__device__ __forceinline__ void subtract(float (&x)[8], const float* mean) {
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] -= mean[c];
}

// Means of the channels of a tile into shared.mean.
template <int kDim>
__device__ __noinline__ void tile_mean(Rows rows, Shared& shared) {
  const i32 chunks = (rows.count + kChunkTokens - 1) / kChunkTokens;
  ChunkSums<kDim, kThreads>::run(
      rows, shared.buffer, [](const float(&)[8]) {},
      [&](i32 chunk, i32 c, float sum) { shared.sums[chunk][c] = sum; });
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kThreads) {
    const float sum = shared.sums[0][c] + (chunks > 1 ? shared.sums[1][c] : 0.0f);
    shared.mean[c] = sum / static_cast<float>(rows.count);
  }
  __syncthreads();
}

// Scale of a group from the absmax of all that share it: groups first .. first + count - 1, 32 at
// most. The whole warp.
__device__ __forceinline__ Quantizer quantizer_of(const Shared& shared, int first, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned absmax = lane < count ? shared.absmax[first + lane] : 0u;
  return make_quantizer(absmax_of(__reduce_max_sync(0xffffffffu, absmax)), kMaxCode);
}

// A warp takes four of the tile's 32 groups, one after another, each with all its rows.
__device__ __forceinline__ void quantize_q(const PrepareParams& p, const Place& place, i32 head,
                                           i32 q_tile, const i32* k_counter, Shared& shared,
                                           unsigned char* stage) {
  constexpr int kGroups = 32, kGroupsEach = kGroups / kWarps;
  constexpr int kLoads = kBq / kGroups / kWarpRows;
  static_assert(kLoads * kWarpRows * kGroups == kBq);
  const SequenceEntry& sequence = place.sequence;
  const i32 count = min(kBq, sequence.qo_len - q_tile * kBq);
  if (count <= 0 || sequence.kv_len <= 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = lane % kPieces * 8;
  const i64 at = head * p.heads.q_tiles + sequence.first_q_tile + q_tile;
  const Rows rows = stage_rows<kDqk, kThreads>(p.q, (p.irregular & kIrregularQ) != 0, place.batch,
                                               sequence.q_start + q_tile * kBq, head, count, stage);
  const float* k_mean = nullptr;
  float* lse = nullptr;  // of the tile's first row
  if (p.lse != nullptr) {
    lse = p.lse + place.batch * p.lse_batch + head * p.lse_head +
          (sequence.q_start + q_tile * kBq) * p.lse_token;
    wait_folded(k_counter);
    k_mean = p.k_mean + (place.kv_head * p.heads.sequences + place.batch) * kDqk + first;
  }
  cp_async_wait<0>();
  __syncthreads();
  if (p.smooth_q) {
    tile_mean<kDqk>(rows, shared);
    for (int c = static_cast<int>(threadIdx.x); c < kDqk; c += kThreads) {
      shared.mean[c] = round_product(shared.mean[c], p.product_bf16);
      p.q_mean[at * kDqk + c] = shared.mean[c];
    }
    __syncthreads();
  }

  const auto row_of = [&](int group, int load) {
    return group / 8 * kRowsPerWarp + group % 8 + 8 * (load * kWarpRows + lane / kPieces);
  };
  const auto smooth = [&](int row, float(&x)[8]) {
    if (p.smooth_q && row < count) subtract(x, shared.mean + first);
    if (p.hadamard_dim != 0) hadamard(x, first, p.hadamard_dim, p.hadamard_norm);
  };
  if (QK_BITS != 16 || k_mean != nullptr) {
#pragma unroll 1
    for (int i = 0; i < kGroupsEach; ++i) {
      const int group = warp * kGroupsEach + i;
      unsigned absmax = 0;
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const int row = row_of(group, load);
        float x[8];
        load_8<kDqk>(rows, row, first, x);
        if (k_mean != nullptr) {
          float dot = 0.0f;
#pragma unroll
          for (int c = 0; c < 8; ++c) dot = __fmaf_rn(x[c], k_mean[c], dot);
#pragma unroll
          for (int offset = kPieces / 2; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
          }
          if (lane % kPieces == 0 && row < count) lse[row * p.lse_token] = p.sm_scale * dot;
        }
        smooth(row, x);
        absmax = piece_absmax(x, absmax);
      }
      absmax = __reduce_max_sync(0xffffffffu, absmax);
      if (lane == 0) shared.absmax[group] = absmax;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int i = 0; i < kGroupsEach; ++i) {
    const int group = warp * kGroupsEach + i;
    Quantizer quantizer = {1.0f, 1.0f};
    if constexpr (QK_BITS != 16) {
      const int share = p.granularity == 1 ? 1 : p.granularity == 2 ? 8 : kGroups;
      quantizer = quantizer_of(shared, group / share * share, share);
      if (lane == 0) p.q_scale[at * kGroups + group] = quantizer.scale;
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int row = row_of(group, load);
      float x[8];
      load_8<kDqk>(rows, row, first, x);
      smooth(row, x);
      store_piece(x, quantizer.inverse, p.product_bf16, row, first,
                  p.q_codes + at * (kBq * kRowBytes));
    }
  }
}

// Two neighbouring warps share each of the tile's four groups, eight keys each.
__device__ __forceinline__ void quantize_k(const PrepareParams& p, const Place& place, i32 k_tile,
                                           const i32* k_counter, Shared& shared,
                                           unsigned char* stage) {
  constexpr int kLoads = 8 / kWarpRows;
  constexpr int kWarpsEach = kWarps / kKGroupsPerTile;
  const SequenceEntry& sequence = place.sequence;
  const i32 count = min(kBk, sequence.kv_len - k_tile * kBk);
  if (count <= 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = lane % kPieces * 8;
  const int group = warp / kWarpsEach;
  const i64 at = place.kv_head * p.heads.k_tiles + sequence.first_k_tile + k_tile;
  const Rows rows =
      stage_rows<kDqk, kThreads>(p.k, (p.irregular & kIrregularK) != 0, place.batch,
                                 sequence.kv_start + k_tile * kBk, place.kv_head, count, stage);
  float mean[8] = {};
  if (p.k_mean != nullptr) {
    wait_folded(k_counter);
    const float* from = p.k_mean + (place.kv_head * p.heads.sequences + place.batch) * kDqk + first;
#pragma unroll
    for (int c = 0; c < 8; ++c) mean[c] = from[c];
  }
  cp_async_wait<0>();
  __syncthreads();

  const auto row_of = [&](int load) {
    const int i = load * kWarpRows + lane / kPieces;
    return 8 * (warp % kWarpsEach * 4 + i / 2) + 2 * group + i % 2;
  };
  const auto smoothed = [&](int row, float(&x)[8]) {
    load_8<kDqk>(rows, row, first, x);
    if (row < count) subtract(x, mean);
    if (p.hadamard_dim != 0) hadamard(x, first, p.hadamard_dim, p.hadamard_norm);
  };
  Quantizer quantizer = {1.0f, 1.0f};
  if constexpr (QK_BITS != 16) {
    unsigned absmax = 0;
#pragma unroll 2
    for (int load = 0; load < kLoads; ++load) {
      float x[8];
      smoothed(row_of(load), x);
      absmax = piece_absmax(x, absmax);
    }
    absmax = __reduce_max_sync(0xffffffffu, absmax);
    if (lane == 0) shared.absmax[warp] = absmax;
    __syncthreads();
    quantizer = p.granularity == 1 ? quantizer_of(shared, group * kWarpsEach, kWarpsEach)
                                   : quantizer_of(shared, 0, kWarps);
    if (lane == 0) p.k_scale[at * kKGroupsPerTile + group] = quantizer.scale;
  }
#pragma unroll 2
  for (int load = 0; load < kLoads; ++load) {
    float x[8];
    smoothed(row_of(load), x);
    store_piece(x, quantizer.inverse, p.product_bf16, row_of(load), first,
                p.k_codes + at * kKBytes);
  }
}

// ---- V ----

#if V_BITS == 16
// Rows as they are, each channel by the sequence's scale.
__device__ __forceinline__ void pack_v(const PrepareParams& p, const Rows& rows, i64 stats,
                                       unsigned char* to) {
  constexpr int kVPieces = kDv / 8, kRows = kThreads / kVPieces, kLoads = kBk / kRows;
  const int first = static_cast<int>(threadIdx.x) % kVPieces * 8;
  const int row0 = static_cast<int>(threadIdx.x) / kVPieces;
  float inverse[8], mean[8];
  unsigned masks[4];  // of channels that are NaN or as good as 0
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    inverse[c] = 1.0f;
    mean[c] = 0.0f;
    if constexpr (QK_BITS != 16) {
      inverse[c] = p.v_scale[(p.heads.kv * p.heads.sequences + stats) * kDv + first + c];
      mean[c] = p.v_mean[stats * kDv + first + c];
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    masks[w] =
        (inverse[2 * w] != 0.0f ? 0xffffu : 0u) | (inverse[2 * w + 1] != 0.0f ? 0xffff0000u : 0u);
  }
  cp_async_wait<0>();
  __syncthreads();
  const bool bf16 = QK_BITS == 16 && p.product_bf16 != 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int row = row0 + i * kRows;
    float x[8];
    load_8<kDv>(rows, row, first, x);
    if (row < rows.count) subtract(x, mean);
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float lo = x[2 * w] * inverse[2 * w], hi = x[2 * w + 1] * inverse[2 * w + 1];
      words[w] = (bf16 ? pack_bf16x2(lo, hi) : pack_f16x2(lo, hi)) & masks[w];
    }
    *reinterpret_cast<uint4*>(to + swizzled(row, first / 8, kDv * 2)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

#else
// E4M3, turned round: a thread takes eight channels of the four tokens that stand side by side.
__device__ __forceinline__ void turn_v(const PrepareParams& p, const Rows& rows, i64 stats,
                                       Shared& shared, unsigned char* to) {
  constexpr int kColumns = kDv / 64;  // warps side by side, 64 channels each
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = (warp % kColumns * 8 + lane % 8) * 8;
  const int quad = warp / kColumns * 4 + lane / 8;  // of 16; slots 4 quad .. 4 quad + 3
  const bool works = quad < kBk / 4;
  const auto row_of = [&](int i) { return token_of_v_slot(quad * 4 + i); };

  cp_async_wait<0>();
  __syncthreads();
  const bool grouped = p.v_group != 0;
  if (grouped) {
    if (p.v_smooth) tile_mean<kDv>(rows, shared);
    for (int c = static_cast<int>(threadIdx.x); c < kDv; c += kThreads) {
      if (!p.v_smooth) shared.mean[c] = 0.0f;
      shared.absmax[c] = 0;
    }
  } else {
    for (int c = static_cast<int>(threadIdx.x); c < kDv; c += kThreads) {
      shared.mean[c] = p.v_mean[stats * kDv + c];
      shared.inverse[c] = p.v_scale[(p.heads.kv * p.heads.sequences + stats) * kDv + c];
    }
  }
  __syncthreads();

  const auto smoothed = [&](int i, float(&x)[8]) {
    load_8<kDv>(rows, row_of(i), first, x);
    if (row_of(i) < rows.count) subtract(x, shared.mean + first);
  };
  if (grouped) {
    if (works) {
      unsigned absmax[8] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[8];
        smoothed(i, x);
#pragma unroll
        for (int c = 0; c < 8; ++c) absmax[c] = max(absmax[c], magnitude(x[c]));
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        absmax[c] = max(absmax[c], __shfl_xor_sync(0xffffffffu, absmax[c], 8));
        absmax[c] = max(absmax[c], __shfl_xor_sync(0xffffffffu, absmax[c], 16));
        if (lane < 8) atomicMax(&shared.absmax[first + c], absmax[c]);
      }
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < kDv; c += kThreads) {
      const Quantizer quantizer = make_quantizer(absmax_of(shared.absmax[c]), p.v_max_code);
      p.v_scale[stats * kDv + c] = quantizer.scale;
      p.v_mean[stats * kDv + c] = shared.mean[c];
      shared.inverse[c] = quantizer.inverse;
    }
    __syncthreads();
  }
  // Pairs of tokens are half-words of the buffer's words.
  unsigned short* const halves = reinterpret_cast<unsigned short*>(shared.buffer);
  if (works) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float x[8], y[8];
      smoothed(i, x);
      smoothed(i + 1, y);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float inverse = shared.inverse[first + c];
        const unsigned pair = pack_e4m3x2(x[c] * inverse, y[c] * inverse);
        halves[((first + c) * kVPitch + quad) * 2 + i / 2] =
            static_cast<unsigned short>(inverse == 0.0f ? 0u : pair);
      }
    }
  }
  const unsigned* const words = reinterpret_cast<const unsigned*>(shared.buffer);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kDv * (kBk / 16); i += kThreads) {
    const int c = i / (kBk / 16), piece = i % (kBk / 16);
    const unsigned* from = words + c * kVPitch + piece * 4;
    *reinterpret_cast<uint4*>(to + swizzled(c, piece, kBk)) =
        make_uint4(from[0], from[1], from[2], from[3]);
  }
}
#endif

__device__ __forceinline__ void quantize_v(const PrepareParams& p, const Place& place, i32 k_tile,
                                           const i32* v_counter, Shared& shared,
                                           unsigned char* stage) {
  const SequenceEntry& sequence = place.sequence;
  const i32 count = min(kBk, sequence.kv_len - k_tile * kBk);
  if (count <= 0) return;
  const i64 at = place.kv_head * p.heads.k_tiles + sequence.first_k_tile + k_tile;
  // Where scale and mean of each channel stand: of this tile or of the sequence.
  const i64 stats = p.v_group != 0
                        ? place.kv_head * p.heads.v_groups + sequence.first_v_group + k_tile
                        : place.kv_head * p.heads.sequences + place.batch;
  const Rows rows =
      stage_rows<kDv, kThreads>(p.v, (p.irregular & kIrregularV) != 0, place.batch,
                                sequence.kv_start + k_tile * kBk, place.kv_head, count, stage);
  if (p.v_stats_tasks != 0) wait_folded(v_counter);
#if V_BITS == 8
  turn_v(p, rows, stats, shared, p.v_codes + at * kVBytes);
#else
  pack_v(p, rows, stats, p.v_codes + at * kVBytes);
#endif
}

// What a block does. In shared memory, where it holds no registers.
struct Task {
  Place place;
  i32 pair;
  bool is_stats;
  i32 index;  // of the task among the pair's statistics or tiles

  // Pairs of sequence and kv head: the statistics of the first `lag`; then the tiles of pair 0 and the
  // statistics of pair `lag`, and so on; then the tiles of the last pairs.
  __device__ __forceinline__ void find(const PrepareParams& p, i32 block) {
    const i32 stats = p.k_stats_tasks + p.v_stats_tasks;
    const i32 tiles = 2 * p.sequences.k_tiles + p.heads.qo / p.heads.kv * p.sequences.q_tiles;
    const i32 pairs = p.sequences.batch * p.heads.kv;
    is_stats = block < p.lag * stats;
    if (is_stats) {
      pair = block / stats;
      index = block % stats;
    } else {
      block -= p.lag * stats;
      const i32 both = (pairs - p.lag) * (tiles + stats);
      const i32 size = block < both ? tiles + stats : tiles;
      pair = block < both ? block / size : pairs - p.lag + (block - both) / size;
      index = block < both ? block % size : (block - both) % size;
      is_stats = index >= tiles;
      if (is_stats) {
        pair += p.lag;
        index -= tiles;
      }
    }
    place.batch = pair / p.heads.kv;
    place.kv_head = pair % p.heads.kv;
    place.sequence = sequence_at(p.sequences, place.batch);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kPrepareThreads, kBlocks)
    sageattn_prepare(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(16) unsigned char stage[];  // tokens of one task
  __shared__ Shared shared;
  __shared__ Task task;
  if (threadIdx.x == 0) task.find(p, static_cast<i32>(blockIdx.x));
  __syncthreads();
  const Place& place = task.place;
  const i32* const counters = p.counters + 2 * task.pair;  // K, V
  i32 index = task.index;

  if (task.is_stats) {
    if constexpr (QK_BITS != 16) {
      const bool is_v = index >= p.k_stats_tasks;
      if (is_v) index -= p.k_stats_tasks;
      if (kDqk == kDv || !is_v) {
        take_statistics<kDqk>(p, place, is_v, index, 2 * task.pair + is_v, shared, stage);
      } else {
        take_statistics<kDv>(p, place, true, index, 2 * task.pair + 1, shared, stage);
      }
    }
  } else if (index < p.sequences.k_tiles) {
    quantize_k(p, place, index, counters, shared, stage);
  } else if (index < 2 * p.sequences.k_tiles) {
    quantize_v(p, place, index - p.sequences.k_tiles, counters + 1, shared, stage);
  } else {
    index -= 2 * p.sequences.k_tiles;
    const i32 group = p.heads.qo / p.heads.kv;
    quantize_q(p, place, place.kv_head * group + index / p.sequences.q_tiles,
               index % p.sequences.q_tiles, counters, shared, stage);
  }
}

}  // namespace sageattn
