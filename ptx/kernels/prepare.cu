// Q, K and V to the codes and scales that the attention kernels read, in one launch.
//
// Macros: HEAD_DIMS; QK_BITS 8, 4, or 16 (EXACT: packed as they are); V_BITS 8 (E4M3) or 16 (FP16, or
// packed).
//
// A block takes one task. Statistics of K, and of V where its scale spans the sequence, come first: of
// 32 tasks a head, task r adds up chunks r, r + 32, .. of 64 tokens and leaves its sums where the codes
// of chunk r will stand; the last to arrive folds the 32. (Long sequences have 32 tasks for K and 32 for
// V.) Then a task is a tile of keys, K and V, or of
// queries: smoothed, rotated, measured and written. Either reads its tokens into shared memory first, as
// they are, by asynchronous copies: enough bytes are under way with few registers, and odd strides
// matter to nothing else. Heads follow one another, a head's statistics `lag` heads before its tiles, so
// that the second read finds its tokens in L2: memory sees K and V once.
//
// A tile waits for tasks with lower block indices only, which the hardware starts first.
//
// Everything is computed in the order and precision of docs/numerics.md: no fused multiply-add.
#include "ptx/arch/memory.h"
#include "ptx/tile/attn_shared.h"
#include "ptx/tile/groups.h"
#include "ptx/tile/quantizer.h"
#include "ptx/tile/rows.h"
#include "ptx/tile/swizzle.h"

namespace sageattn {
namespace {

constexpr int kBq = row_fragments(HeadDims{kDqk, kDv}) * 64;
constexpr int kRowsPerWarp = kBq / 4;
constexpr int kRowBytes = kDqk * QK_BITS / 8;
constexpr int kQBytes = kBq * kRowBytes, kKBytes = kBk * kRowBytes;
constexpr int kVBytes = kBk * kDv * V_BITS / 8;
constexpr int kMaxCode = QK_BITS == 4 ? 7 : 127;
constexpr int kThreads = kPrepareThreads;
constexpr int kWarps = kThreads / 32;
using KRows = Rows<kDqk, kThreads>;  // of Q, too
using VRows = Rows<kDv, kThreads>;
constexpr int kWide = kDqk > kDv ? kDqk : kDv;

// Blocks an SM: as many as registers and shared memory hold where there is plenty of it; where it has
// 100 KB, two.
constexpr bool kPlenty = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900;
constexpr int kBlocks = kWide > 128 ? 1 : !kPlenty ? 2 : kWide > 64 ? 6 : 7;

// Tokens of K, and of V, that are staged at a time.
constexpr int kSlots = prepare_slots(HeadDims{kDqk, kDv});

struct alignas(16) Shared {
  float mean[kWide];       // of a tile
  float inverse[kDv];      // scales of V
  unsigned v_absmax[kDv];  // as bits
  unsigned absmax[32];     // of the units of a tile
  int last;
};

// |x| as bits: they order as magnitudes do, infinities and NaN above all.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ float absmax_of(unsigned bits) {
  return bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : __uint_as_float(bits);
}

// What a block does. In shared memory, where it holds no registers.
struct Task {
  SequenceEntry sequence;
  i32 batch, kv_head;
  i32* counter;  // of the pair of sequence and kv head
  enum Kind { kStatistics, kKeys, kQueries } kind;
  i32 index;  // of the task among the pair's statistics, or of the tile in its sequence
  i32 head;   // of queries
  i64 row;    // among what each pair has one of: means, scales
  i64 tile;   // in the workspace; of statistics, the pair's first

  // Pairs of sequence and kv head: the statistics of the first `lag`; then the tiles of pair 0 and the
  // statistics of pair `lag`, and so on; then the tiles of the last pairs.
  __device__ __forceinline__ void find(const PrepareParams& p, unsigned block) {
    // Unsigned: divisions are shorter.
    const unsigned stats = p.stats_tasks, heads = p.heads.kv, lag = p.lag;
    const unsigned group = static_cast<unsigned>(p.heads.qo) / heads;
    const unsigned k_tiles = p.sequences.k_tiles, q_tiles = p.sequences.q_tiles;
    const unsigned tiles = k_tiles + group * q_tiles;
    const unsigned pairs = p.sequences.batch * heads;
    // Blocks that only take statistics; that take either; that only write tiles.
    const unsigned alone = lag * stats, both = (pairs - lag) * (tiles + stats);
    const unsigned kinds = block < alone ? stats : block < alone + both ? tiles + stats : tiles;
    const unsigned begin = block < alone ? 0 : block < alone + both ? alone : alone + both;
    unsigned pair = (block - begin) / kinds, at = (block - begin) % kinds;
    if (block < alone) {
      at += tiles;
    } else if (block >= alone + both) {
      pair += pairs - lag;
    } else if (at >= tiles) {
      pair += lag;
    }
    batch = static_cast<i32>(pair / heads);
    kv_head = static_cast<i32>(pair % heads);
    sequence = sequence_at(p.sequences, batch);
    counter = p.counters + pair;
    row = kv_head * p.heads.sequences + batch;
    tile = kv_head * p.heads.k_tiles + sequence.first_k_tile;
    if (at >= tiles) {
      kind = kStatistics;
      at -= tiles;
    } else if (at < k_tiles) {
      kind = kKeys;
      tile += at;
    } else {
      kind = kQueries;
      at -= k_tiles;
      head = static_cast<i32>(kv_head * group + at / q_tiles);
      at %= q_tiles;
      tile = head * p.heads.q_tiles + sequence.first_q_tile + at;
    }
    index = static_cast<i32>(at);
  }
};

__device__ __forceinline__ unsigned slot(unsigned stage, int i, i32 dtype) {
  return stage + i % kSlots * (kBk * kWide) * bytes_of(dtype);
}

// Stages up to `most` tokens from `first` on of K or V of the task's sequence and head.
template <int kDim>
__device__ __forceinline__ Rows<kDim, kThreads> stage_keys(const PrepareParams& p, const Task& task,
                                                           bool is_v, i32 first, i32 most, L2 evict,
                                                           unsigned to) {
  const i32 count = min(most, task.sequence.kv_len - first);
  stage_rows<kDim, kThreads>(is_v ? p.v : p.k,
                             (p.irregular & (is_v ? kIrregularV : kIrregularK)) != 0, task.batch,
                             task.sequence.kv_start + first, task.kv_head, count, evict, to);
  return {to, count, p.k.dtype};
}

// ---- Statistics ----

// Where a task leaves its sums; with V, the largest value and the negative of the least follow.
__device__ __forceinline__ float* partial_of(const PrepareParams& p, const Task& task, bool is_v,
                                             i32 index) {
  unsigned char* codes = is_v ? p.v_codes + task.tile * kVBytes : p.k_codes + task.tile * kKBytes;
  return reinterpret_cast<float*>(codes +
                                  index * ((is_v ? kVBytes : kKBytes) / (kBk / kChunkTokens)));
}

// What `count` tasks left to K's mean, and to V's scale and mean.
__device__ __forceinline__ void fold_partials(const PrepareParams& p, const Task& task, i32 count,
                                              float* folded) {
  const bool has_k = p.k_mean != nullptr, has_v = p.v_group == 0;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kMost = kDqk + kDv, kLeast = kMost + kDv;  // in folded, behind K's sums and V's
#pragma unroll 1
  for (int i = has_k ? thread : kDqk + thread; i < (has_v ? kLeast + kDv : kDqk); i += kThreads) {
    const bool is_v = i >= kDqk, is_sum = i < kMost;
    const float* from = partial_of(p, task, is_v, 0) + (is_v ? i - kDqk : i);
    const i32 pitch = (is_v ? kVBytes : kKBytes) / (kBk / kChunkTokens * 4);
    float x[kStatsTasks];
#pragma unroll
    for (int r = 0; r < kStatsTasks; ++r) {
      x[r] = r < count ? from[r * pitch] : is_sum ? 0.0f : __int_as_float(0xff800000);
    }
    if (is_sum) {
      fold<kStatsTasks>(x, [](float a, float b) { return a + b; });
    } else {
      fold<kStatsTasks>(x, [](float a, float b) { return max_nan(a, b); });
    }
    folded[i] = x[0];
  }
  __syncthreads();
  const auto tokens = static_cast<float>(task.sequence.kv_len);
#pragma unroll 1
  for (int c = thread; has_k && c < kDqk; c += kThreads) {
    p.k_mean[task.row * kDqk + c] = folded[c] / tokens;
  }
#pragma unroll 1
  for (int c = thread; has_v && c < kDv; c += kThreads) {
    // Subtraction rounds monotonically, so the extremes of V give those of V less its mean.
    const float shift = p.v_smooth ? folded[kDqk + c] / tokens : 0.0f;
    const float absmax = absmax_of(
        max(magnitude(folded[kMost + c] - shift), magnitude(-folded[kLeast + c] - shift)));
    const Quantizer q =
        V_BITS == 16 ? make_f16_quantizer(absmax) : make_quantizer(absmax, p.v_max_code);
    const i64 at = task.row * kDv + c;
    p.v_scale[at] = q.scale;
    p.v_scale[p.heads.kv * p.heads.sequences * kDv + at] = q.inverse;
    p.v_mean[at] = shift;
  }
}

// Chunks of K and of V by turns; while one is added up, the next arrives.
__device__ __forceinline__ void take_statistics(const PrepareParams& p, const Task& task,
                                                Shared& shared, unsigned stage) {
  using K = Columns<kDqk, kThreads>;
  using V = Columns<kDv, kThreads>;
  const i32 lane = task.index % kStatsTasks;
  const i32 chunks = (task.sequence.kv_len + kChunkTokens - 1) / kChunkTokens;
  if (lane >= chunks) return;
  const bool of_v = task.index >= kStatsTasks;
  const bool has_k = p.k_mean != nullptr && !of_v;
  const bool has_v = p.v_group == 0 && (of_v || p.stats_split == 0);
  const bool both = has_k && has_v;
  const i32 steps = ((chunks - 1 - lane) / kStatsTasks + 1) << both;
  const auto is_v = [&](i32 step) { return both ? step % 2 != 0 : has_v; };
  const auto first_of = [&](i32 step) {
    return (lane + (step >> both) * kStatsTasks) * kChunkTokens;
  };
  const auto start = [&](i32 step) {
    const i32 first = first_of(step);
    const unsigned to = slot(stage, step, p.k.dtype);
    if (step >= steps) {
      cp_async_commit();
    } else if (kDqk == kDv || !is_v(step)) {
      stage_keys<kDqk>(p, task, is_v(step), first, kChunkTokens, L2::kLast, to);
    } else {
      stage_keys<kDv>(p, task, true, first, kChunkTokens, L2::kLast, to);
    }
  };
  const float2 zero = make_float2(0.0f, 0.0f);
  float2 k_sum = zero, v_sum = zero;
  float2 most = make_float2(__int_as_float(0xff800000), __int_as_float(0xff800000)), least = most;
#pragma unroll 1
  for (i32 step = -kSlots; step < steps; ++step) {
    if (step >= 0) {
      const unsigned from = slot(stage, step, p.k.dtype);
      const i32 count = min(kChunkTokens, task.sequence.kv_len - first_of(step));
      cp_async_wait<kSlots - 1>();
      __syncthreads();
      float2 sum;
      if (kDqk == kDv || !is_v(step)) {
        sum = K::chunk_sums({from, count, p.k.dtype}, 0, is_v(step), most, least);
      } else {
        sum = V::chunk_sums({from, count, p.k.dtype}, 0, true, most, least);
      }
      if (is_v(step)) {
        v_sum = v_sum + sum;
      } else {
        k_sum = k_sum + sum;
      }
      __syncthreads();
    }
    start(step + kSlots);
  }
  if (has_k && K::sharer() == 0) {
    *reinterpret_cast<float2*>(partial_of(p, task, false, lane) + K::channel()) = k_sum;
  }
  if (has_v) {
    const auto larger = [](float2 a, float2 b) { return max_nan(a, b); };
    most = V::across(most, larger);
    least = V::across(least, larger);
    if (V::sharer() == 0) {
      float* const to = partial_of(p, task, true, lane) + V::channel();
      *reinterpret_cast<float2*>(to) = v_sum;
      *reinterpret_cast<float2*>(to + kDv) = most;
      *reinterpret_cast<float2*>(to + 2 * kDv) = least;
    }
  }

  // The last of the pair's tasks folds.
  const i32 lanes = min(chunks, kStatsTasks), tasks = lanes << p.stats_split;
  __syncthreads();
  if (threadIdx.x == 0) shared.last = add_acq_rel(task.counter, 1) == tasks - 1;
  __syncthreads();
  if (!shared.last) return;
  fold_partials(p, task, lanes, shared_pointer<float>(stage));
  __syncthreads();
  if (threadIdx.x == 0) add_acq_rel(task.counter, kFolded);
}

// Until the pair's statistics are there. The whole block.
__device__ __forceinline__ void wait_folded(const Task& task) {
  if (threadIdx.x == 0) {
    while (load_acquire(task.counter) < kFolded) __nanosleep(100);
  }
  __syncthreads();
}

// Means of the channels of a tile of one or two chunks into shared.mean.
template <int kDim>
__device__ __noinline__ void tile_mean(Rows<kDim, kThreads> rows, Shared& shared) {
  using Tile = Columns<kDim, kThreads>;
  float2 unused = make_float2(0.0f, 0.0f);
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (i32 first = 0; first < rows.count; first += kChunkTokens) {
    sum = sum + Tile::chunk_sums(rows, first, false, unused, unused);
  }
  if (Tile::sharer() == 0) {
    const auto count = static_cast<float>(rows.count);
    *reinterpret_cast<float2*>(shared.mean + Tile::channel()) =
        make_float2(sum.x / count, sum.y / count);
  }
  __syncthreads();
}

__device__ __forceinline__ void subtract(float (&x)[8], const float (&mean)[8]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] -= mean[c];
}

// Codes leave L2 first, for it had better hold tokens that will be read again.
template <typename T>
__device__ __forceinline__ void store(unsigned char* to, T codes) {
  __stcs(reinterpret_cast<T*>(to), codes);
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

// Codes of eight channels of a row; the whole group's inverse scale. Half to even, by adding 1.5 * 2^23,
// which leaves the integer in the low bits. No clamp: |x| is at most the group's absmax, so the product
// is at most kMaxCode, but for an ulp.
__device__ __forceinline__ void store_piece(const float (&x)[8], float inverse, i32 bf16, int row,
                                            int first, unsigned char* tile) {
  if constexpr (QK_BITS == 16) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = bf16 ? pack_bf16x2(x[2 * w], x[2 * w + 1]) : pack_f16x2(x[2 * w], x[2 * w + 1]);
    }
    store(tile + swizzled(row, first / 8, kRowBytes),
          make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    const unsigned mask = inverse == 0.0f ? 0u : ~0u;  // the group is NaN or as good as 0
    unsigned code[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) code[c] = __float_as_uint(x[c] * inverse + 12582912.0f);
    if constexpr (QK_BITS == 8) {
      unsigned words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        words[w] = __byte_perm(__byte_perm(code[4 * w], code[4 * w + 1], 0x0040),
                               __byte_perm(code[4 * w + 2], code[4 * w + 3], 0x0040), 0x5410);
      }
      store(tile + swizzled(row, first / 16, kRowBytes) + first % 16,
            make_uint2(words[0] & mask, words[1] & mask));
    } else {
      // One sum of shifted codes, less what the 1.5 * 2^23 add up to. With 8 in each code none borrows
      // from the next; flipping bit 3 of it leaves two's complement.
      unsigned word = 0;
#pragma unroll
      for (int c = 7; c >= 0; --c) word = (word << 4) + code[c];
      constexpr unsigned kSum = 0x4b400000u * 0x11111111u, kEights = 0x88888888u;
      store(tile + swizzled(row, first / 32, kRowBytes) + first % 32 / 2,
            ((word - kSum + kEights) ^ kEights) & mask);
    }
  }
}

constexpr int kPieces = kDqk / 8;  // threads a row
constexpr int kWarpRows = 32 / kPieces;

// sm_scale q . k_mean of each query of a tile, to where its LSE will stand.
__device__ __forceinline__ void bias_lse(const PrepareParams& p, const Task& task,
                                         const KRows& rows) {
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread % kPieces * 8;
  const i64 at = task.batch * p.lse_batch + task.head * p.lse_head +
                 (task.sequence.q_start + task.index * kBq) * p.lse_token;
  float mean[8];
  load_8(p.k_mean + task.row * kDqk + first, mean);
#pragma unroll 1
  for (int row = thread / kPieces; row < kBq; row += kThreads / kPieces) {
    float x[1][8], dot = 0.0f;
    load_8(rows.dtype, {rows.at(row, first)}, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) dot = __fmaf_rn(x[0][c], mean[c], dot);
#pragma unroll
    for (int offset = kPieces / 2; offset > 0; offset /= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    }
    if (thread % kPieces == 0 && row < rows.count) {
      p.lse[at + row * p.lse_token] = p.sm_scale * dot;
    }
  }
}

// A warp takes units of kUnitRows rows of one group, eight channels a thread; twice: for the absmax of
// the group, and for codes. The mean is null or 16-byte aligned.
__device__ __forceinline__ void quantize_rows(const PrepareParams& p, const Task& task,
                                              const KRows& rows, const float* mean_from,
                                              Shared& shared) {
  constexpr int kUnitRows = kBq / 32;
  constexpr int kLoads = kUnitRows / kWarpRows;
  static_assert(kLoads * kWarpRows == kUnitRows && kBk / kUnitRows <= 32);
  static_assert(kWarps == kKGroupsPerTile && kUnitRows * 8 == kRowsPerWarp);
  const bool is_q = task.kind == Task::kQueries;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = lane % kPieces * 8;
  const int units = is_q ? 32 : kBk / kUnitRows;
  unsigned char* const codes =
      is_q ? p.q_codes + task.tile * kQBytes : p.k_codes + task.tile * kKBytes;
  // Unit warp + 4 turn has the rows begin(turn) + row[]: every eighth of Q, pairs of K.
  const auto begin = [&](int turn) {
    return is_q ? turn / 2 * kRowsPerWarp + turn % 2 * 4 : turn * (4 * kUnitRows);
  };
  int row[kLoads];
  unsigned from[kLoads];
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const int i = load * kWarpRows + lane / kPieces;
    row[load] = is_q ? warp + 8 * i : warp * 2 + i / 2 * 8 + i % 2;
    from[load] = rows.at(row[load], first);
  }
  const bool partial = rows.count < (is_q ? kBq : kBk);
  const i32 pitch = rows.pitch();
  float mean[8] = {};
  if (mean_from != nullptr) load_8(mean_from + first, mean);
  float inverse = 1.0f;  // of unit `lane`

#pragma unroll 1
  for (int pass = QK_BITS == 16 ? 1 : 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int turn = 0; turn < units / kWarps; ++turn) {
      float x[kLoads][8];
      unsigned at[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) at[load] = from[load] + begin(turn) * pitch;
      load_8(rows.dtype, at, x);
      if (mean_from != nullptr) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) subtract(x[load], mean);
      }
      if (partial || p.hadamard_dim != 0) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          if (begin(turn) + row[load] >= rows.count) {
#pragma unroll
            for (int c = 0; c < 8; ++c) x[load][c] = 0.0f;
          }
          if (p.hadamard_dim != 0) hadamard(x[load], first, p.hadamard_dim, p.hadamard_norm);
        }
      }
      if (pass == 0) {
        float absmax = 0.0f;
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
#pragma unroll
          for (int c = 0; c < 8; ++c) absmax = max_nan(absmax, fabsf(x[load][c]));
        }
        const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(absmax));
        if (lane == 0) shared.absmax[warp + turn * kWarps] = bits;
      } else {
        const float unit_inverse = __shfl_sync(0xffffffffu, inverse, warp + turn * kWarps);
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          store_piece(x[load], unit_inverse, p.product_bf16, begin(turn) + row[load], first, codes);
        }
      }
    }
    if (pass == 0) {
      // Every warp finds the inverse scales of all units, one a lane. Units whose numbers agree in the
      // bits of `share` share a scale.
      __syncthreads();
      const int granularity = p.granularity == 1 ? 31 : p.granularity == 2 ? 24 : 0;
      const int share = is_q ? granularity : granularity & (kKGroupsPerTile - 1);
      unsigned bits = lane < units ? shared.absmax[lane] : 0u;
#pragma unroll 1
      for (int bit = 1; bit < 32; bit *= 2) {
        if ((share & bit) == 0) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, bit));
      }
      const Quantizer quantizer = make_quantizer(absmax_of(bits), kMaxCode);
      inverse = quantizer.inverse;
      if (warp == 0 && is_q) p.q_scale[task.tile * 32 + lane] = quantizer.scale;
      if (warp == 0 && !is_q && lane < kKGroupsPerTile) {
        p.k_scale[task.tile * kKGroupsPerTile + lane] = quantizer.scale;
      }
    }
  }
}

// ---- V ----

#if V_BITS == 16
// Rows as they are, each channel by the sequence's scale.
__device__ __forceinline__ void write_v(const PrepareParams& p, const Task& task, const VRows& rows,
                                        Shared&) {
  constexpr int kAcross = kDv / 8;  // threads a row
  const int first = static_cast<int>(threadIdx.x) % kAcross * 8;
  const bool partial = rows.count < kBk;
  unsigned char* const to = p.v_codes + task.tile * kVBytes;
  const bool bf16 = QK_BITS == 16 && p.product_bf16 != 0;
  float inverse[8], mean[8];
  unsigned masks[4];  // of channels that are NaN or as good as 0
  if constexpr (QK_BITS != 16) {
    const float* const inverses = p.v_scale + p.heads.kv * p.heads.sequences * kDv;
    load_8(inverses + task.row * kDv + first, inverse);
    load_8(p.v_mean + task.row * kDv + first, mean);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      masks[w] =
          (inverse[2 * w] != 0.0f ? 0xffffu : 0u) | (inverse[2 * w + 1] != 0.0f ? 0xffff0000u : 0u);
    }
  }
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kAcross; row < kBk;
       row += 2 * kThreads / kAcross) {
    float x[2][8];
    load_8(rows.dtype, {rows.at(row, first), rows.at(row + kThreads / kAcross, first)}, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int here = row + i * (kThreads / kAcross);
      if constexpr (QK_BITS != 16) {
        subtract(x[i], mean);
#pragma unroll
        for (int c = 0; c < 8; ++c) x[i][c] *= inverse[c];
      }
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = bf16 ? pack_bf16x2(x[i][2 * w], x[i][2 * w + 1])
                        : pack_f16x2(x[i][2 * w], x[i][2 * w + 1]);
        if constexpr (QK_BITS != 16) words[w] &= masks[w];
      }
      if (partial && here >= rows.count) words[0] = words[1] = words[2] = words[3] = 0;
      store(to + swizzled(here, first / 8, kDv * 2),
            make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

#else
// A group of 64 tokens in E4M3, turned round: a thread takes eight channels of the four tokens that
// stand side by side.
__device__ __forceinline__ void write_v_group(const PrepareParams& p, const Task& task,
                                              const VRows& rows, i32 group, Shared& shared) {
  constexpr int kColumns = kDv / 64;               // warps side by side, 64 channels each
  constexpr int kTokens = kWarps / kColumns * 16;  // at a time; v_token_slot keeps to 32
  constexpr int kPiecesEach = kChunkTokens / 16;   // of a channel
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first = (warp % kColumns * 8 + lane % 8) * 8;
  const int quad = warp / kColumns * 4 + lane / 8;  // slots 4 quad .. 4 quad + 3
  const bool grouped = p.v_group != 0;
  // Where scale and mean of each channel stand: of this group or of the sequence.
  const i64 stats = (grouped ? task.kv_head * p.heads.v_groups + task.sequence.first_v_group +
                                   task.index * (kBk / kChunkTokens) + group
                             : task.row) *
                    kDv;
  if (grouped && p.v_smooth) tile_mean<kDv>(rows, shared);
  if (thread < kDv) {
    if (!grouped) {
      shared.mean[thread] = p.v_mean[stats + thread];
      shared.inverse[thread] = p.v_scale[p.heads.kv * p.heads.sequences * kDv + stats + thread];
    } else if (!p.v_smooth) {
      shared.mean[thread] = 0.0f;
    }
    shared.v_absmax[thread] = 0;
  }
  __syncthreads();

  // A channel's codes go through the stage, over tokens that are done with: kTokens bytes, and 16 more
  // after each eighth so that banks differ.
  const auto at = [&](i32 token, int c) {
    return rows.stage + token * rows.pitch() + c * kTokens + c / 8 * 16;
  };
  unsigned word[8] = {};  // of each channel: the absmax, then four codes
#pragma unroll 1
  for (int pass = grouped ? 0 : 1; pass < 2; ++pass) {
    float mean[8], inverse[8];
    load_8(shared.mean + first, mean);
    load_8(shared.inverse + first, inverse);
#pragma unroll 1
    for (int token = 0; token < kChunkTokens; token += kTokens) {
#pragma unroll 1
      for (int i = 0; i < 4; i += 2) {
        const int row = token + token_of_v_slot(quad * 4 + i);
        float x[2][8];
        load_8(rows.dtype, {rows.at(row, first), rows.at(row + 1, first)}, x);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          subtract(x[j], mean);
          if (row + j >= rows.count) {
#pragma unroll
            for (int c = 0; c < 8; ++c) x[j][c] = 0.0f;
          }
        }
        if (pass == 0) {
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            word[c] = max(word[c], max(magnitude(x[0][c]), magnitude(x[1][c])));
          }
        } else {
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const unsigned pair = pack_e4m3x2(x[0][c] * inverse[c], x[1][c] * inverse[c]);
            word[c] = __byte_perm(word[c], pair, 0x5432);
          }
        }
      }
      if (pass == 0) continue;
      __syncthreads();
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        *shared_pointer<unsigned>(at(token, first + c) + quad * 4) =
            inverse[c] == 0.0f ? 0u : word[c];
      }
    }
    if (pass == 1) break;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      word[c] = max(word[c], __shfl_xor_sync(0xffffffffu, word[c], 8));
      word[c] = max(word[c], __shfl_xor_sync(0xffffffffu, word[c], 16));
      if (lane < 8) atomicMax(&shared.v_absmax[first + c], word[c]);
    }
    __syncthreads();
    if (thread < kDv) {
      const Quantizer quantizer = make_quantizer(absmax_of(shared.v_absmax[thread]), p.v_max_code);
      p.v_scale[stats + thread] = quantizer.scale;
      p.v_mean[stats + thread] = shared.mean[thread];
      shared.inverse[thread] = quantizer.inverse;
    }
    __syncthreads();
  }
  __syncthreads();
  for (int i = thread; i < kDv * kPiecesEach; i += kThreads) {
    const int c = i / kPiecesEach, piece = i % kPiecesEach;
    const i32 token = piece * 16 / kTokens * kTokens;
    store(p.v_codes + task.tile * kVBytes + swizzled(c, group * kPiecesEach + piece, kBk),
          *shared_pointer<const uint4>(at(token, c) + piece * 16 % kTokens));
  }
}

__device__ __forceinline__ void write_v(const PrepareParams& p, const Task& task, const VRows& rows,
                                        Shared& shared) {
#pragma unroll 1
  for (i32 group = 0; group < kBk / kChunkTokens; ++group) {
    const i32 first = group * kChunkTokens;
    write_v_group(p, task, {rows.stage + first * rows.pitch(), rows.count - first, rows.dtype},
                  group, shared);
  }
}
#endif

// ---- Tiles ----

__device__ __forceinline__ void write_tile(const PrepareParams& p, const Task& task, Shared& shared,
                                           unsigned stage) {
  const bool is_q = task.kind == Task::kQueries;
  const i32 size = is_q ? kBq : kBk;
  const i32 begin = task.index * size;
  const i32 count = min(size, (is_q ? task.sequence.qo_len : task.sequence.kv_len) - begin);
  if (count <= 0 || task.sequence.kv_len <= 0) return;
  KRows rows;
  VRows v_rows;
  const float* mean = nullptr;
  if (is_q) {
    rows = {stage, count, p.q.dtype};
    stage_rows<kDqk, kThreads>(p.q, (p.irregular & kIrregularQ) != 0, task.batch,
                               task.sequence.q_start + begin, task.head, count, L2::kFirst, stage);
    if (p.lse != nullptr) wait_folded(task);
    cp_async_wait<0>();
    __syncthreads();
    if (p.lse != nullptr) bias_lse(p, task, rows);
    if (p.smooth_q) {
      tile_mean<kDqk>(rows, shared);
      mean = shared.mean;
#pragma unroll 1
      for (int c = static_cast<int>(threadIdx.x); c < kDqk; c += kThreads) {
        shared.mean[c] = round_product(shared.mean[c], p.product_bf16);
        p.q_mean[task.tile * kDqk + c] = shared.mean[c];
      }
      __syncthreads();
    }
  } else {
    rows = stage_keys<kDqk>(p, task, false, begin, kBk, L2::kFirst, stage);
    if (kSlots > 1) {
      v_rows = stage_keys<kDv>(p, task, true, begin, kBk, L2::kFirst, slot(stage, 1, p.v.dtype));
    }
    if (p.stats_tasks != 0) wait_folded(task);
    if (p.k_mean != nullptr) mean = p.k_mean + task.row * kDqk;
    cp_async_wait<kSlots - 1>();
    __syncthreads();
  }
  quantize_rows(p, task, rows, mean, shared);
  if (is_q) return;
  if (kSlots == 1) {
    __syncthreads();
    v_rows = stage_keys<kDv>(p, task, true, begin, kBk, L2::kFirst, stage);
  }
  cp_async_wait<0>();
  __syncthreads();
  write_v(p, task, v_rows, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPrepareThreads, kBlocks)
    sageattn_prepare(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(32) unsigned char dynamic[];  // tokens of one task
  __shared__ Shared shared;
  __shared__ Task task;
  if (threadIdx.x == 0) task.find(p, blockIdx.x);
  __syncthreads();
  if (QK_BITS != 16 && task.kind == Task::kStatistics) {
    take_statistics(p, task, shared, shared_address(dynamic));
  } else {
    write_tile(p, task, shared, shared_address(dynamic));
  }
}

}  // namespace sageattn
