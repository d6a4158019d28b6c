// Q, K and V to the codes and scales that the attention kernels read, in one launch.
//
// Macros: HEAD_DIMS; QK_BITS 8, 4, or 16 (EXACT: packed as they are); V_BITS 8 (E4M3) or 16 (FP16, or
// packed); WGMMA 1 for its tiles, with E4M3 V and codes in bytes.
//
// A block takes one task. Statistics come first: of K, and of V where its scale spans the sequence or,
// with wgmma, a group of several tiles. Of 32 tasks a head, task r adds up chunks r, r + 32, .. of 64
// tokens and leaves the sums where the codes of chunk r will stand; the last to arrive folds the 32. Of
// V's groups every chunk's sums are left so. (Long sequences have 32 tasks for K and 32 for V.) Then a task
// is a tile of keys, K and V, or of queries: smoothed, rotated, measured and written. With wgmma, K or V
// of a tile, or two tiles of queries. Either reads its tokens into shared memory first, as they are, by
// asynchronous copies: enough bytes are under way with few registers, and odd strides matter to nothing
// else. Heads follow one another, a head's statistics `lag` heads before its tiles, so that the second
// read finds its tokens in L2: memory sees K and V once.
//
// A tile waits for tasks with lower block indices only, which the hardware starts first.
//
// Everything is computed in the order and precision of docs/numerics.md: no fused multiply-add.
#include "ptx/arch/barrier.h"
#include "ptx/arch/grid.h"
#include "ptx/arch/memory.h"
#include "ptx/tile/groups.h"
#include "ptx/tile/quantizer.h"
#include "ptx/tile/rows.h"
#include "ptx/tile/swizzle.h"
#include "ptx/tile/tiles.h"

namespace sageattn {
namespace {

constexpr TileShape kShape = tile_shape(HeadDims{kDqk, kDv}, WGMMA != 0);
constexpr PrepareTask kTask(HeadDims{kDqk, kDv}, WGMMA != 0);
constexpr int kBq = kShape.b_q, kBk = kShape.b_k, kRowsPerWarp = kShape.rows_per_warp;
constexpr bool kApart = kTask.key_tasks == 2;  // K and V of a tile
static_assert(WGMMA == 0 || (QK_BITS == 8 && V_BITS == 8));
constexpr int kRowBytes = kDqk * QK_BITS / 8;
constexpr int kQBytes = kBq * kRowBytes, kKBytes = kBk * kRowBytes;
constexpr int kVBytes = kBk * kDv * V_BITS / 8;
constexpr int kThreads = kPrepareThreads;
constexpr int kWarps = kThreads / 32;
constexpr bool kBulk = WGMMA != 0;  // tokens are copied in bulk, for it is sm_90
static_assert(!kBulk || kApart);
using KRows = Rows<kDqk, kThreads, kBulk>;  // of Q, too
using VRows = Rows<kDv, kThreads, kBulk>;
constexpr int kWide = kDqk > kDv ? kDqk : kDv;

// Blocks an SM: as many as registers and shared memory hold where there is plenty of it; where it has
// 100 KB, two.
constexpr bool kPlenty = __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900;
constexpr int kBlocks = kWide > 128 ? 1 : !kPlenty ? 2 : kWide > 64 ? 5 : 7;

// Chunks that are staged at a time, and what a chunk's codes take.
constexpr int kSlots = kTask.chunks;
constexpr int kKChunkBytes = kChunkTokens * kRowBytes;
constexpr int kVChunkBytes = kChunkTokens * kDv * V_BITS / 8;

struct alignas(16) Shared {
  float mean[kTask.q_tiles * kWide];    // of each tile
  float inverse[kDv];                   // scales of V
  unsigned v_absmax[kDv];               // as bits
  unsigned absmax[32 * kTask.q_tiles];  // of the units of a task; then their inverse scales
  int last;
  u64 arrived[kSlots];  // kBulk: barriers of what is staged
};

// Stage `i` of kSlots: what was staged there the `time`-th time has arrived, as have all threads.
// kPending: how many stages may still be under way.
template <int kPending>
__device__ __forceinline__ void wait_staged(Shared& shared, int i, int time) {
  cp_async_wait<kPending>();
  if constexpr (kBulk) barrier_wait(shared_address(&shared.arrived[i]), time & 1);
  __syncthreads();
}

// |x| as bits: they order as magnitudes do, infinities and NaN above all.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ float absmax_of(unsigned bits) {
  return bits >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : __uint_as_float(bits);
}

// What a block does. In shared memory, where it holds no registers.
struct Task {
  SequenceEntry sequence;
  i32 batch, kv_head;
  enum Kind {
    kStatistics,
    kKeys,
    kValues,
    kQueries
  } kind;     // kKeys: and values, unless they are apart
  i32 index;  // of the task among the pair's statistics, or of the (first) tile in its sequence
  i32 head;   // of queries
  i64 row;    // among what each pair of sequence and kv head has one of: means, scales
  i64 v_row;  // of a tile: which of V's scales and means it takes
  i64 tile;   // in the workspace; of statistics, the pair's first

  // Pairs of sequence and kv head: the statistics of the first `lag`; then the tiles of pair 0 and the
  // statistics of pair `lag`, and so on; then the tiles of the last pairs.
  __device__ __forceinline__ void find(const PrepareParams& p, unsigned block) {
    // Unsigned: divisions are shorter.
    const unsigned stats = p.stats_tasks, heads = p.heads.kv, lag = p.lag;
    const unsigned group = static_cast<unsigned>(p.heads.qo) / heads;
    const unsigned k_tiles = p.sequences.k_tiles, q_tiles = p.sequences.q_tiles;
    const unsigned tiles = kTask.tile_tasks(k_tiles, group, q_tiles);
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
    row = kv_head * p.heads.sequences + batch;
    tile = kv_head * p.heads.k_tiles + sequence.first_k_tile;
    if (at >= tiles) {
      kind = kStatistics;
      at -= tiles;
    } else if (at < kTask.key_tasks * k_tiles) {
      kind = at < k_tiles ? kKeys : kValues;
      if (kind == kValues) at -= k_tiles;
      tile += at;
    } else {
      kind = kQueries;
      at -= kTask.key_tasks * k_tiles;
      const unsigned tasks = kTask.q_tasks(q_tiles);
      head = static_cast<i32>(kv_head * group + at / tasks);
      at = at % tasks * kTask.q_tiles;
      tile = head * p.heads.q_tiles + sequence.first_q_tile + at;
    }
    index = static_cast<i32>(at);
    v_row = p.v_group == 0 ? row
                           : kv_head * p.heads.v_groups + sequence.first_v_group +
                                 at * kBk / static_cast<unsigned>(p.v_group);
  }
};

// Which of V's scales and means a group takes.
__device__ __forceinline__ i64 v_row(const PrepareParams& p, const Task& task, i32 group) {
  return task.kv_head * p.heads.v_groups + task.sequence.first_v_group + group;
}

__device__ __forceinline__ i32* k_counter(const PrepareParams& p, const Task& task) {
  return p.counters + task.row;
}
__device__ __forceinline__ i32* v_counter(const PrepareParams& p, i64 row) {
  return p.counters + p.heads.kv * p.heads.sequences + row;
}

__device__ __forceinline__ unsigned slot(unsigned stage, int i, i32 dtype) {
  return stage + i % kSlots * (kChunkTokens * kWide) * bytes_of(dtype);
}

// Stages up to `most` tokens from `first` on of K or V of the task's sequence and head in slot `i`.
template <L2 kEvict, int kDim>
__device__ __forceinline__ Rows<kDim, kThreads, kBulk> stage_keys(const PrepareParams& p,
                                                                  const Task& task, Shared& shared,
                                                                  bool is_v, i32 first, i32 most,
                                                                  unsigned stage, int i) {
  const i32 count = min(most, task.sequence.kv_len - first);
  const unsigned to = slot(stage, i, p.k.dtype);
  stage_rows<kEvict, kDim, kThreads, kBulk>(
      is_v ? p.v : p.k, (p.irregular & (is_v ? kIrregularV : kIrregularK)) != 0, task.batch,
      task.sequence.kv_start + first, task.kv_head, count, to,
      shared_address(&shared.arrived[i % kSlots]));
  return {to, count, p.k.dtype};
}

// ---- Statistics ----

// Where the sums of the pair's chunk `chunk` stand, or of a task that began with it; with V, the largest
// value and the negative of the least follow.
__device__ __forceinline__ float* partial_of(const PrepareParams& p, const Task& task, bool is_v,
                                             i32 chunk) {
  return reinterpret_cast<float*>(
      is_v ? p.v_codes + task.tile * kVBytes + static_cast<i64>(chunk) * kVChunkBytes
           : p.k_codes + task.tile * kKBytes + static_cast<i64>(chunk) * kKChunkBytes);
}

// What `count` tasks or chunks left for one channel, `pitch` floats apart: the sum, or the largest.
__device__ __forceinline__ float fold_partials(float* from, i32 count, i32 pitch, bool sum) {
  const auto join = [&](float a, float b) { return sum ? a + b : max_nan(a, b); };
  // Lane r of 32 takes in r, r + 32, ..: more than one only in groups of more than 2048 tokens.
#pragma unroll 1
  for (i32 i = kStatsTasks; i < count; ++i) {
    float& lane = from[i % kStatsTasks * pitch];
    lane = join(lane, from[static_cast<i64>(i) * pitch]);
  }
  const float none = sum ? 0.0f : __int_as_float(0xff800000);
  float lanes[kStatsTasks / 2];
#pragma unroll
  for (int r = 0; r < kStatsTasks / 2; ++r) {
    const int other = r + kStatsTasks / 2;
    lanes[r] = join(r < count ? from[r * pitch] : none, other < count ? from[other * pitch] : none);
  }
  fold<kStatsTasks / 2>(lanes, join);
  return lanes[0];
}

// To the mean of K, or scale and mean of V, of `tokens` tokens whose sums begin with those of chunk
// `first`; row: among means and scales.
__device__ __forceinline__ void fold_statistics(const PrepareParams& p, const Task& task, bool is_v,
                                                i64 row, i32 first, i32 count, i32 tokens) {
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < (is_v ? kDv : kDqk); c += kThreads) {
    float* const from = partial_of(p, task, is_v, first) + c;
    float sum = 0.0f, most = 0.0f, least = 0.0f;
#pragma unroll 1
    for (int i = is_v ? 2 : 0; i >= 0; --i) {
      least = most, most = sum;
      sum = fold_partials(from + i * kDv, count, (is_v ? kVChunkBytes : kKChunkBytes) / 4, i == 0);
    }
    const float mean = sum / static_cast<float>(tokens);
    if (!is_v) {
      p.k_mean[row * kDqk + c] = mean;
      continue;
    }
    // Subtraction rounds monotonically, so the extremes of V give those of V less its mean.
    const float shift = p.v_smooth ? mean : 0.0f;
    const float absmax = absmax_of(max(magnitude(most - shift), magnitude(-least - shift)));
    const Quantizer q =
        V_BITS == 16 ? make_f16_quantizer(absmax) : make_quantizer(absmax, p.v_max_code);
    const i64 at = row * kDv + c;
    p.v_scale[at] = q.scale;
    p.v_scale[p.heads.kv * p.heads.v_groups * kDv + at] = q.inverse;
    p.v_mean[at] = shift;
  }
}

// Chunks of K and of V by turns; while one is added up, the next arrives.
__device__ __forceinline__ void take_statistics(const PrepareParams& p, const Task& task,
                                                Shared& shared, unsigned stage) {
  using K = Columns<kDqk, kThreads, kBulk>;
  using V = Columns<kDv, kThreads, kBulk>;
  const i32 lane = task.index % kStatsTasks;
  const i32 chunks = (task.sequence.kv_len + kChunkTokens - 1) / kChunkTokens;
  if (lane >= chunks) return;
  const bool of_v = task.index >= kStatsTasks;
  const bool has_k = p.k_mean != nullptr && !of_v;
  const bool has_v = (kApart || p.v_group == 0) && (of_v || p.stats_split == 0);
  const bool both = has_k && has_v;
  const i32 steps = ((chunks - 1 - lane) / kStatsTasks + 1) << both;
  const auto is_v = [&](i32 step) { return both ? step % 2 != 0 : has_v; };
  const auto chunk_of = [&](i32 step) { return lane + (step >> both) * kStatsTasks; };
  const auto start = [&](i32 step) {
    const i32 first = chunk_of(step) * kChunkTokens;
    if (step >= steps) {
      cp_async_commit();
    } else if (kDqk == kDv || !is_v(step)) {
      stage_keys<L2::kLast, kDqk>(p, task, shared, is_v(step), first, kChunkTokens, stage, step);
    } else {
      stage_keys<L2::kLast, kDv>(p, task, shared, true, first, kChunkTokens, stage, step);
    }
  };
  const auto zero = V::Kept::all(0.0f), none = V::Kept::all(__int_as_float(0xff800000));
  auto k_sum = K::Kept::all(0.0f);
  auto v_sum = zero, most = none, least = none;
#pragma unroll 1
  for (i32 step = -kSlots; step < steps; start(step + kSlots), ++step) {
    if (step < 0) continue;
    const unsigned from = slot(stage, step, p.k.dtype);
    const i32 chunk = chunk_of(step);
    const i32 count = min(kChunkTokens, task.sequence.kv_len - chunk * kChunkTokens);
    wait_staged<kSlots - 1>(shared, step % kSlots, step / kSlots);
    const bool v = is_v(step);
    if (v) {
      v_sum = v_sum + V::chunk_sums<true>({from, count, p.k.dtype}, 0, most, least);
    } else {
      K::Kept unused;
      k_sum = k_sum + K::chunk_sums<false>({from, count, p.k.dtype}, 0, unused, unused);
    }
    // Of a group each chunk leaves its sums, of a sequence each task.
    const bool grouped = kApart && v && p.v_group != 0;
    if (grouped || step + (1 << both) >= steps) {
      float* const to = partial_of(p, task, v, grouped ? chunk : lane);
      if (!v) {
        *reinterpret_cast<K::Kept*>(to + K::kept()) = k_sum;
      } else {
        *reinterpret_cast<V::Kept*>(to + V::kept()) = v_sum;
        *reinterpret_cast<V::Kept*>(to + kDv + V::kept()) = most;
        *reinterpret_cast<V::Kept*>(to + 2 * kDv + V::kept()) = least;
        v_sum = zero;
        most = least = none;
      }
      // The last to arrive folds.
      const i32 group =
          grouped ? static_cast<unsigned>(chunk * kChunkTokens) / static_cast<unsigned>(p.v_group)
                  : 0;
      const i32 first = group * p.v_group;
      const i32 left = task.sequence.kv_len - first, tokens = grouped ? min(p.v_group, left) : left;
      const i32 parts = (tokens + kChunkTokens - 1) / kChunkTokens;
      const i32 arriving = grouped ? parts : min(parts, kStatsTasks);
      const i64 row = grouped ? v_row(p, task, group) : task.row;
      i32* const counter = v ? v_counter(p, row) : k_counter(p, task);
      __syncthreads();
      if (threadIdx.x == 0) shared.last = add_acq_rel(counter, 1) == arriving - 1;
      __syncthreads();
      if (shared.last) {
        fold_statistics(p, task, v, row, first / kChunkTokens, arriving, tokens);
        __syncthreads();
        if (threadIdx.x == 0) add_acq_rel(counter, kFolded);
      }
    }
    __syncthreads();
  }
}

// Until statistics are there. The whole block.
__device__ __forceinline__ void wait_folded(const i32* counter) {
  if (threadIdx.x == 0) {
    while (load_acquire(counter) < kFolded) __nanosleep(100);
  }
  __syncthreads();
}

// Means of the channels of a tile of one or two chunks.
template <int kDim>
__device__ __noinline__ void tile_mean(Rows<kDim, kThreads, kBulk> rows, float* mean) {
  using Tile = Columns<kDim, kThreads, kBulk>;
  typename Tile::Kept sum = Tile::Kept::all(0.0f), unused;
#pragma unroll 1
  for (i32 first = 0; first < rows.count; first += kChunkTokens) {
    sum = sum + Tile::template chunk_sums<false>(rows, first, unused, unused);
  }
#pragma unroll
  for (int c = 0; c < Tile::kKept; ++c) {
    mean[Tile::kept() + c] = sum.x[c] / static_cast<float>(rows.count);
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

// Where the codes of eight channels of a row stand in a tile.
__device__ __forceinline__ unsigned code_offset(unsigned row, unsigned first) {
  constexpr int kInPiece = 128 / QK_BITS;  // codes
  return swizzled(static_cast<i32>(row), static_cast<i32>(first / kInPiece), kRowBytes) +
         first % kInPiece * QK_BITS / 8;
}

// Codes of eight channels of a row; the whole group's inverse scale. Half to even, by adding 1.5 * 2^23,
// which leaves the integer in the low bits. No clamp: |x| is at most the group's absmax, so the product
// is at most qk_max_code, but for an ulp.
__device__ __forceinline__ void store_piece(const float (&x)[8], float inverse, i32 bf16,
                                            unsigned char* to) {
  if constexpr (QK_BITS == 16) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = bf16 ? pack_bf16x2(x[2 * w], x[2 * w + 1]) : pack_f16x2(x[2 * w], x[2 * w + 1]);
    }
    store(to, make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    const bool none = inverse == 0.0f;  // the group is NaN or as good as 0
    unsigned code[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) code[c] = __float_as_uint(x[c] * inverse + 12582912.0f);
    if constexpr (QK_BITS == 8) {
      // The lowest bytes of two; for none their sign bits, which even of NaN are 0.
      const unsigned lowest = none ? 0xbbbbu : 0x0040u;
      unsigned words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        words[w] = permute(permute(code[4 * w], code[4 * w + 1], lowest),
                           permute(code[4 * w + 2], code[4 * w + 3], lowest), 0x5410);
      }
      store(to, make_uint2(words[0], words[1]));
    } else {
      // One sum of shifted codes, less what the 1.5 * 2^23 add up to. With 8 in each code none borrows
      // from the next; flipping bit 3 of it leaves two's complement.
      unsigned word = 0;
#pragma unroll
      for (int c = 7; c >= 0; --c) word = (word << 4) + code[c];
      constexpr unsigned kSum = 0x4b400000u * 0x11111111u, kEights = 0x88888888u;
      store(to, none ? 0u : (word - kSum + kEights) ^ kEights);
    }
  }
}

constexpr int kPieces = kDqk / 8;  // threads a row
constexpr int kWarpRows = 32 / kPieces;

// The largest of kLanes lanes that stand together.
template <int kLanes>
__device__ __forceinline__ unsigned max_of_lanes(unsigned x) {
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(0xffffffffu, x);
  } else {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
  }
}

// sm_scale q . k_mean of each query of a task, to where its LSE will stand.
__device__ __forceinline__ void bias_lse(const PrepareParams& p, const Task& task,
                                         const KRows& rows) {
  const unsigned thread = threadIdx.x;
  const int first = static_cast<int>(thread % kPieces * 8);
  const i64 at = task.batch * p.lse_batch + task.head * p.lse_head +
                 (task.sequence.q_start + task.index * kBq) * p.lse_token;
  float mean[8];
  load_8(p.k_mean + task.row * kDqk + first, mean);
#pragma unroll 1
  for (int row = static_cast<int>(thread / kPieces); row < kTask.q_tiles * kBq;
       row += kThreads / kPieces) {
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

// How a warp shares rows of Q or K: it takes units of kUnitRows rows of one group, eight channels a
// thread. Unit warp + 4 n has every eighth row of Q, or pairs of rows of K. In a turn a warp takes the
// units of kTurnUnits successive n, an even number or one; the thread's rows are begin(turn) + row[].
struct Share {
  static constexpr int kUnitRows = kRowsPerWarp / 8;  // a unit of Q is a group
  static constexpr int kUnitLanes = kUnitRows < kWarpRows ? kUnitRows * kPieces : 32;
  static constexpr int kUnitLoads = kUnitRows < kWarpRows ? 1 : kUnitRows / kWarpRows;
  static constexpr int kTurnRows = kDqk > 128 ? 2 : 4;  // of a warp
  static constexpr int kTurnUnits = kTurnRows / kUnitRows, kLoads = kTurnRows / kWarpRows;
  static constexpr int kTurns = 32 / (kWarps * kTurnUnits);  // for 32 units
  static_assert(kLoads % kUnitLoads == 0 && kBq / kUnitRows == 32 &&
                kBk / kUnitRows <= 32 * kTask.q_tiles);
  static_assert(kWarps == kKGroupsPerTile);

  // Unsigned, so that divisions are shifts.
  unsigned lane, warp, first;  // first: channel
  bool is_q;
  unsigned units, turns;
  unsigned row[kLoads];
  unsigned from[kLoads];

  __device__ __forceinline__ Share(const Task& task, const KRows& rows)
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        first(lane % kPieces * 8),
        is_q(task.kind == Task::kQueries),
        units(is_q ? static_cast<unsigned>(rows.count + kBq - 1) / kBq * 32 : kBk / kUnitRows),
        turns(units / (kWarps * kTurnUnits)) {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const unsigned in_turn = load * kWarpRows + lane / kPieces;
      const unsigned n = in_turn / kUnitRows, i = in_turn % kUnitRows;
      row[load] = unit_begin(n) + (is_q ? warp + 8 * i : warp * 2 + i / 2 * 8 + i % 2);
      from[load] = rows.at(row[load], first);
    }
  }
  __device__ __forceinline__ unsigned unit_begin(unsigned n) const {
    return is_q ? n / 2 * kRowsPerWarp + n % 2 * 4 : n * (4 * kUnitRows);
  }
  __device__ __forceinline__ unsigned begin(unsigned turn) const {
    return kTurnUnits % 2 == 0 ? turn * (kTurnUnits * 4 * kUnitRows)
                               : unit_begin(turn * kTurnUnits);
  }
  __device__ __forceinline__ unsigned unit(unsigned turn, unsigned load) const {  // n
    return turn * kTurnUnits + load / kUnitLoads * (32 / kUnitLanes) + lane / kUnitLanes;
  }
  __device__ __forceinline__ unsigned code_at(unsigned turn, unsigned load) const {
    return kTurnUnits % 2 == 0 ? code_offset(row[load], first) + begin(turn) * kRowBytes
                               : code_offset(begin(turn) + row[load], first);
  }
};

// The absmax of units of whole tiles of 16-bit tokens, two channels at once. Q as it is; of K a warp's
// units share a scale, and subtraction rounds monotonically, so that the extremes of K give those of K
// less its mean.
template <bool kF16>
__device__ __forceinline__ void measure(const Share& share, const float (&mean)[8],
                                        Shared& shared) {
  constexpr int kPitch = kDqk * 2;
  const auto words_of = [&](unsigned turn, int load, unsigned(&words)[4]) {
    const uint4 four = *shared_pointer<const uint4>(share.from[load] + share.begin(turn) * kPitch);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  };
  if (share.is_q) {
#pragma unroll 1
    for (unsigned turn = 0; turn < share.turns; ++turn) {
#pragma unroll
      for (int head = 0; head < Share::kLoads; head += Share::kUnitLoads) {
        unsigned most = 0;
#pragma unroll
        for (int load = head; load < head + Share::kUnitLoads; ++load) {
          unsigned words[4];
          words_of(turn, load, words);
#pragma unroll
          for (int w = 0; w < 4; ++w) most = max_nan_x2<kF16>(most, words[w] & 0x7fff7fffu);
        }
        most = max_nan_x2<kF16>(most, permute(most, most, 0x1032));  // both halves alike
        most = max_of_lanes<Share::kUnitLanes>(most);
        if (share.lane % Share::kUnitLanes == 0) {
          shared.absmax[share.warp + kWarps * share.unit(turn, head)] =
              magnitude(widen(most, kF16).y);
        }
      }
    }
  } else {
    unsigned high[4], low[4];
    words_of(0, 0, high);
    words_of(0, 0, low);
#pragma unroll 2
    for (unsigned turn = 0; turn < share.turns; ++turn) {
#pragma unroll
      for (int load = 0; load < Share::kLoads; ++load) {
        unsigned words[4];
        words_of(turn, load, words);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          high[w] = max_nan_x2<kF16>(high[w], words[w]);
          low[w] = min_nan_x2<kF16>(low[w], words[w]);
        }
      }
    }
    unsigned most = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 a = widen(high[w], kF16), b = widen(low[w], kF16);
      const float m = mean[2 * w], n = mean[2 * w + 1];
      most = max(most, max(max(magnitude(a.x - m), magnitude(b.x - m)),
                           max(magnitude(a.y - n), magnitude(b.y - n))));
    }
    most = max_of_lanes<32>(most);
    if (share.lane < share.units / kWarps) shared.absmax[share.warp + kWarps * share.lane] = most;
  }
}

// The codes of whole tiles of 16-bit tokens, whose means are `mean`, or with kMean unset nothing.
// inverse: of unit n = `lane` of the warp.
template <bool kF16, bool kMean>
__device__ __forceinline__ void encode(const Share& share, const float (&mean)[8], float inverse,
                                       unsigned char* codes) {
  constexpr int kPitch = kDqk * 2;
  if (kMean) inverse = __shfl_sync(0xffffffffu, inverse, 0);  // K: a warp's units share it
#pragma unroll 1
  for (unsigned two = 0; two < share.turns; two += 2) {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned turn = two + i;
#pragma unroll
      for (int load = 0; load < Share::kLoads; ++load) {
        float x[8];
        load_8<kF16>(share.from[load] + share.begin(turn) * kPitch, x);
        if (kMean) subtract(x, mean);
        const float unit_inverse =
            kMean ? inverse : __shfl_sync(0xffffffffu, inverse, share.unit(turn, load));
        store_piece(x, unit_inverse, 0, codes + share.code_at(turn, load));
      }
    }
  }
}

// Twice: for the absmax of groups, and for codes. The mean is null or 16-byte aligned.
__device__ __forceinline__ void quantize_rows(const PrepareParams& p, const Task& task,
                                              const KRows& rows, const float* mean_from,
                                              Shared& shared) {
  const Share share(task, rows);
  constexpr int kLoads = Share::kLoads, kUnitLoads = Share::kUnitLoads;
  const unsigned lane = share.lane, warp = share.warp, first = share.first, units = share.units;
  const bool is_q = share.is_q;
  // Two tiles of queries are like one: their rows and groups follow one another.
  unsigned char* const codes =
      is_q ? p.q_codes + task.tile * kQBytes : p.k_codes + task.tile * kKBytes;
  const bool partial = rows.count < (is_q ? kTask.q_tiles * kBq : kBk);
  // What is common is done by code for nothing else.
  const bool plain = QK_BITS != 16 && rows.dtype != 3 && !partial && p.hadamard_dim == 0 &&
                     (!is_q || mean_from == nullptr);
  const unsigned pitch = rows.pitch();
  float mean[8] = {};
  if (mean_from != nullptr) load_8(mean_from + first, mean);
  float inverse = 1.0f;  // of unit n = `lane` of the warp

#pragma unroll 1
  for (int pass = QK_BITS == 16 ? 1 : 0; pass < 2; ++pass) {
    if (plain && pass == 0) {
      if (rows.dtype == 1) {
        measure<true>(share, mean, shared);
      } else {
        measure<false>(share, mean, shared);
      }
    } else if (plain) {
      if (rows.dtype == 1 && mean_from != nullptr) {
        encode<true, true>(share, mean, inverse, codes);
      } else if (rows.dtype == 1) {
        encode<true, false>(share, mean, inverse, codes);
      } else if (mean_from != nullptr) {
        encode<false, true>(share, mean, inverse, codes);
      } else {
        encode<false, false>(share, mean, inverse, codes);
      }
    }
#pragma unroll 1
    for (unsigned turn = plain ? share.turns : 0; turn < share.turns; ++turn) {
      const unsigned begin = share.begin(turn);
      float x[kLoads][8];
      unsigned at[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) at[load] = share.from[load] + begin * pitch;
      load_8(rows.dtype, at, x);
      if (kTask.q_tiles > 1 && p.smooth_q && is_q && turn % Share::kTurns == 0) {
        load_8(mean_from + turn / Share::kTurns * kDqk + first, mean);
      }
      if (mean_from != nullptr) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) subtract(x[load], mean);
      }
      if (partial || p.hadamard_dim != 0) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          if (static_cast<i32>(begin + share.row[load]) >= rows.count) {
#pragma unroll
            for (int c = 0; c < 8; ++c) x[load][c] = 0.0f;
          }
          if (p.hadamard_dim != 0)
            hadamard(x[load], static_cast<int>(first), p.hadamard_dim, p.hadamard_norm);
        }
      }
      if (pass == 0) {
#pragma unroll
        for (int head = 0; head < kLoads; head += kUnitLoads) {
          float absmax = 0.0f;
#pragma unroll
          for (int load = head; load < head + kUnitLoads; ++load) {
#pragma unroll
            for (int c = 0; c < 8; ++c) absmax = max_nan(absmax, fabsf(x[load][c]));
          }
          const unsigned bits = max_of_lanes<Share::kUnitLanes>(__float_as_uint(absmax));
          if (lane % Share::kUnitLanes == 0) {
            shared.absmax[warp + kWarps * share.unit(turn, head)] = bits;
          }
        }
      } else {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          const float unit_inverse = __shfl_sync(0xffffffffu, inverse, share.unit(turn, load));
          store_piece(x[load], unit_inverse, p.product_bf16, codes + share.code_at(turn, load));
        }
      }
    }
    if (pass == 0) {
      // A warp finds the scales of 32 units, one a lane. Units whose numbers agree in the bits of `common`
      // share a scale.
      __syncthreads();
      const int granularity = p.granularity == 1 ? 31 : p.granularity == 2 ? 24 : 0;
      const int common = is_q ? granularity : granularity & (kKGroupsPerTile - 1);
      if (warp < (is_q ? kTask.q_tiles : 1)) {
        const unsigned mine = 32 * warp + lane;
        unsigned bits = mine < units ? shared.absmax[mine] : 0u;
        // Of K, units 32 apart share a scale, too.
        if (kTask.q_tiles > 1 && !is_q) bits = max(bits, shared.absmax[lane + 32]);
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
          if ((common & bit) == 0) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, bit));
        }
        const Quantizer quantizer = make_quantizer(absmax_of(bits), p.qk_max_code);
        shared.absmax[mine] = __float_as_uint(quantizer.inverse);
        if (is_q && mine < units) p.q_scale[task.tile * 32 + mine] = quantizer.scale;
        if (!is_q && lane < kKGroupsPerTile) {
          p.k_scale[task.tile * kKGroupsPerTile + lane] = quantizer.scale;
        }
      }
      __syncthreads();
      const unsigned unit = warp + kWarps * lane;
      inverse = __uint_as_float(shared.absmax[unit % (is_q ? 32 * kTask.q_tiles : 32)]);
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
    const float* const inverses = p.v_scale + p.heads.kv * p.heads.v_groups * kDv;
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
// Codes of eight channels of the 16-bit tokens that take four slots.
template <bool kF16>
__device__ __forceinline__ void encode_tokens(const VRows& rows, int first_token, int first,
                                              const float (&mean)[8], const float (&inverse)[8],
                                              unsigned (&word)[8]) {
  // Tokens eight apart change places alike.
  const unsigned from[2] = {VRows::at_16(rows.stage, first_token, first),
                            VRows::at_16(rows.stage, first_token + 1, first)};
  float x[4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_8<kF16>(from[i % 2] + i / 2 * (8 * kDv * 2), x[i]);
    subtract(x[i], mean);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[i][c] *= inverse[c];
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) word[c] = pack_e4m3x4(x[0][c], x[1][c], x[2][c], x[3][c]);
}

// A tile in E4M3, turned round: a thread takes eight channels of the four tokens that stand side by side.
__device__ __forceinline__ void write_v(const PrepareParams& p, const Task& task, const VRows& rows,
                                        Shared& shared) {
  constexpr int kColumns = kDv / 64;               // warps side by side, 64 channels each
  constexpr int kTokens = kWarps / kColumns * 16;  // at a time; v_token_slot keeps to 32
  constexpr int kPiecesEach = kBk / 16;            // of a channel
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first = static_cast<int>((warp % kColumns * 8 + lane % 8) * 8);
  const int quad = static_cast<int>(warp / kColumns * 4 + lane / 8);  // slots 4 quad .. 4 quad + 3
  // Whether the tile is a group, so that scale and mean are found here.
  const bool grouped = !kApart && p.v_group != 0;
  const i64 stats = task.v_row * kDv;
  if (grouped && p.v_smooth) tile_mean<kDv>(rows, shared.mean);
  if (thread < kDv) {
    if (!grouped) {
      shared.mean[thread] = p.v_mean[stats + thread];
      shared.inverse[thread] = p.v_scale[p.heads.kv * p.heads.v_groups * kDv + stats + thread];
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
  const int quad_token = token_of_v_slot(quad * 4);
  const bool partial = rows.count < kBk;
  unsigned word[8] = {};  // of each channel: the absmax, then four codes
#pragma unroll 1
  for (int pass = grouped ? 0 : 1; pass < 2; ++pass) {
    float mean[8], inverse[8];
    load_8(shared.mean + first, mean);
    load_8(shared.inverse + first, inverse);
    unsigned masks[8];  // of channels that are NaN or as good as 0
#pragma unroll
    for (int c = 0; c < 8; ++c) masks[c] = inverse[c] == 0.0f ? 0u : ~0u;
#pragma unroll 1
    for (int token = 0; token < kBk; token += kTokens) {
      if (pass == 1 && !partial && rows.dtype != 3) {
        if (rows.dtype == 1) {
          encode_tokens<true>(rows, token + quad_token, first, mean, inverse, word);
        } else {
          encode_tokens<false>(rows, token + quad_token, first, mean, inverse, word);
        }
      } else {
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
      }
      if (pass == 0) continue;
      __syncthreads();
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        *shared_pointer<unsigned>(at(token, first + c) + quad * 4) = word[c] & masks[c];
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
  // A thread's pieces are kStep channels apart, which change places alike.
  constexpr int kStep = kThreads / kPiecesEach;
  static_assert(kStep % 8 == 0);
  const int c = static_cast<int>(thread / kPiecesEach),
            piece = static_cast<int>(thread % kPiecesEach);
  const unsigned from = at(piece * 16 / kTokens * kTokens, c) + piece * 16 % kTokens;
  unsigned char* const to = p.v_codes + task.tile * kVBytes + swizzled(c, piece, kBk);
#pragma unroll
  for (int i = 0; i < kDv / kStep; ++i) {
    store(to + i * (kStep * kBk),
          *shared_pointer<const uint4>(from + i * (kStep * kTokens + kStep / 8 * 16)));
  }
}
#endif

// ---- Tiles ----

// V's tokens arrive while its statistics do.
__device__ __forceinline__ void finish_v(const PrepareParams& p, const Task& task,
                                         const VRows& rows, Shared& shared) {
  if (QK_BITS != 16 && (kApart || p.v_group == 0)) {
    wait_folded(v_counter(p, task.v_row));
  }
  wait_staged<0>(shared, 0, 0);
  write_v(p, task, rows, shared);
}

__device__ __forceinline__ void write_tile(const PrepareParams& p, const Task& task, Shared& shared,
                                           unsigned stage) {
  const bool is_q = task.kind == Task::kQueries;
  const i32 size = is_q ? kBq : kBk;
  const i32 begin = task.index * size;
  const i32 count = min(is_q ? kTask.q_tiles * kBq : kBk,
                        (is_q ? task.sequence.qo_len : task.sequence.kv_len) - begin);
  if (count <= 0 || task.sequence.kv_len <= 0) return;
  VRows v_rows;
  const auto stage_v = [&](int i) {
    v_rows = stage_keys<L2::kFirst, kDv>(p, task, shared, true, begin, kBk, stage, i);
  };
  if (kApart && task.kind == Task::kValues) {
    stage_v(0);
    finish_v(p, task, v_rows, shared);
    return;
  }
  KRows rows;
  const float* mean = nullptr;
  if (is_q) {
    rows = {stage, count, p.q.dtype};
    stage_rows<L2::kFirst, kDqk, kThreads, kBulk>(p.q, (p.irregular & kIrregularQ) != 0, task.batch,
                                                  task.sequence.q_start + begin, task.head, count,
                                                  stage, shared_address(&shared.arrived[0]));
    if (p.lse != nullptr) wait_folded(k_counter(p, task));
    wait_staged<0>(shared, 0, 0);
    if (p.lse != nullptr) bias_lse(p, task, rows);
    if (p.smooth_q) {
      mean = shared.mean;
#pragma unroll 1
      for (i32 row = 0; row < count; row += kBq) {
        tile_mean<kDqk>({rows.stage + row * rows.pitch(), min(kBq, count - row), rows.dtype},
                        shared.mean + row / kBq * kDqk);
      }
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < (count + kBq - 1) / kBq * kDqk;
           i += kThreads) {
        shared.mean[i] = round_product(shared.mean[i], p.product_bf16);
        p.q_mean[task.tile * kDqk + i] = shared.mean[i];
      }
      __syncthreads();
    }
  } else {
    rows = stage_keys<L2::kFirst, kDqk>(p, task, shared, false, begin, kBk, stage, 0);
    constexpr bool kTogether = !kApart && kSlots > 1;
    if (kTogether) stage_v(1);
    if (p.k_mean != nullptr) {
      wait_folded(k_counter(p, task));
      mean = p.k_mean + task.row * kDqk;
    }
    wait_staged<kTogether ? 1 : 0>(shared, 0, 0);
  }
  quantize_rows(p, task, rows, mean, shared);
  if (is_q || kApart) return;
  if (kSlots == 1) {
    __syncthreads();
    stage_v(0);
  }
  finish_v(p, task, v_rows, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPrepareThreads, kBlocks)
    sageattn_prepare(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(32) unsigned char dynamic[];  // tokens of one task
  __shared__ Shared shared;
  __shared__ Task task;
  start_dependents();
  if (threadIdx.x == 0) {
    if constexpr (kBulk) {
      for (u64& barrier : shared.arrived) barrier_init(shared_address(&barrier), 1);
      fence_async();
    }
    if (p.sequences.table != nullptr) wait_for_grids();  // else parameters tell all
    task.find(p, blockIdx.x);
  }
  wait_for_grids();
  __syncthreads();
  if (QK_BITS != 16 && task.kind == Task::kStatistics) {
    take_statistics(p, task, shared, shared_address(dynamic));
  } else {
    write_tile(p, task, shared, shared_address(dynamic));
  }
}

}  // namespace sageattn
