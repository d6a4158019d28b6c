// Attention with INT8 Q K^T and E4M3 P V by wgmma, for Hopper. INT4 codes come in bytes: the same sums.
//
// Macros: HEAD_DIMS (64064, 128128), SMOOTH_Q, WGMMA=1.
//
// A block stays on its SM and takes items one after another: three neighbouring tiles of 64 queries of
// one head, one for each warpgroup that computes. The fourth warpgroup looks for items and loads: a warp
// finds the next item while the last one is computed, a thread copies its queries, another its keys and
// values, three stages of 128 keys ahead. Nobody waits for the whole block.
//
// The FP8 tensor core truncates, so its accumulator holds one group of keys only, of which V has a scale
// and a mean, and is then promoted into an fp32 output in shared memory: two-level accumulation. Row
// sums come from a column of ones on the tensor core, promoted every tile.
#include "ptx/arch/barrier.h"
#include "ptx/arch/wgmma.h"
#include "ptx/tile/attention.h"
#include "ptx/tile/sm90_block.h"

namespace sageattn {
namespace {

constexpr Sm90Block kBlock(HeadDims{kDqk, kDv}, SMOOTH_Q != 0);
constexpr int kWarpgroups = Sm90Block::kWarpgroups;
constexpr int kStages = Sm90Block::kStages;
constexpr int kScores = kBk / 2;  // of a thread, in a tile
constexpr int kSteps = kBk / 32;  // products of P and V a tile
constexpr int kStepsAtOnce = 2;   // of these, issued together
// Maxima may grow by a factor of 2 before anything is rescaled, so P reaches 224 at a maximum, 448 above.
constexpr float kSlack = 1.0f;
constexpr float kPLog2 = kLog2OfLargestE4m3 - kSlack;
// A maximum before there is one. Finite, so that offsets are.
constexpr float kNothing = -0x1.fffffep127f;

// ---- What a block does ----

struct Item {
  Work<1> works[kWarpgroups];
  i32 first_tile, end_tile;  // of keys, for all; none: nobody has anything to do
  i64 k_row, sequence_row;   // of every busy work: they have the same keys
  unsigned tiles_before;     // of keys, in the block's items so far
  bool last;                 // there is no item: the block is done
};

__device__ __forceinline__ bool is_busy(const Work<1>& work) {
  return work.first_key_tile < work.end_key_tile;
}

// Static shared memory is padded to a kilobyte; 227 are what a block can have.
static_assert(2 * sizeof(Item) + sizeof(i32) <= 1024 && kBlock.bytes + 1024 <= 227 * 1024);

struct Barriers {
  unsigned at;

  __device__ __forceinline__ unsigned full(unsigned stage) const { return at + stage * 8; }
  __device__ __forceinline__ unsigned empty(unsigned stage) const { return full(kStages + stage); }
  __device__ __forceinline__ unsigned found(int n) const { return empty(kStages) + n % 2 * 8; }
  __device__ __forceinline__ unsigned done(int n) const { return empty(kStages + 2) + n % 2 * 8; }
  __device__ __forceinline__ unsigned q_full(int warpgroup) const {
    return empty(kStages + 4) + warpgroup * 8;
  }
  __device__ __forceinline__ unsigned q_empty(int warpgroup) const {
    return q_full(kWarpgroups + warpgroup);
  }

  __device__ __forceinline__ void init() const {
    for (unsigned i = 0; i < kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), kWarpgroups * 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(found(i), 1);
      barrier_init(done(i), kWarpgroups * 4 + 1);  // warps that compute, and load_keys
    }
    for (int i = 0; i < kWarpgroups; ++i) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), 4);
    }
  }
};

// ---- The warpgroup that loads ----

// One warp: descriptions of items. Little is kept in registers, of which there are 32: shared memory
// holds the rest, and what follows from parameters alone must not be computed before the loop.
__device__ __forceinline__ void find_items(const AttnParams& p, const Barriers& barriers,
                                           Item (&items)[2], i32& number) {
#pragma unroll 1
  for (int n = 0;; ++n) {
    Item& item = items[n % 2];
    barrier_wait(barriers.done(n), (n / 2 & 1) ^ 1);
    const AttnParams* anew = &p;
    asm volatile("" : "+l"(anew));
    const i32 at = n == 0 ? static_cast<i32>(blockIdx.x) : number;
    const i32 runs = (anew->q_tile_count + kWarpgroups - 1) / kWarpgroups;
    const bool last = at >= runs * anew->head_count * anew->sequences.batch;
    const unsigned lane = thread_anew() % 32;
    if (lane < kWarpgroups && !last) {
      // Later tiles see more keys under a causal mask: longest first, and what does not fill an item last.
      Work<1>& work = item.works[lane];
      const i32 in_run =
          anew->q_tile_count - (at % runs + 1) * kWarpgroups + static_cast<i32>(lane);
      if (in_run >= 0) {
        work.find(*anew, static_cast<unsigned>(at / runs), in_run);
      } else {
        work.rows = 0;
      }
      if (work.rows <= 0 || work.sequence.bad) work.first_key_tile = work.end_key_tile = 0;
    }
    __syncwarp();
    if (thread_anew() % 32 == 0) {
      item.last = last;
      item.first_tile = 1 << 30;
      item.end_tile = 0;
#pragma unroll 1
      for (int i = 0; i < kWarpgroups && !last; ++i) {
        const Work<1>& work = item.works[i];
        if (!is_busy(work)) continue;
        item.k_row = work.k_row;
        item.sequence_row = work.sequence_row;
        item.first_tile = min(item.first_tile, work.first_key_tile);
        item.end_tile = max(item.end_tile, work.end_key_tile);
      }
      const Item& before = items[(n + 1) % 2];
      item.tiles_before = n == 0 ? 0 : before.tiles_before;
      if (n > 0 && before.first_tile < before.end_tile) {
        item.tiles_before += static_cast<unsigned>(before.end_tile - before.first_tile);
      }
      barrier_arrive(barriers.found(n));
      number = static_cast<i32>(gridDim.x) + atomicAdd(anew->next_item, 1);
    }
    __syncwarp();
    if (last) return;
  }
}

// One thread: the queries of each warpgroup, as soon as it has done with those before.
__device__ __forceinline__ void load_queries(const AttnParams& p, const Barriers& barriers,
                                             const Item (&items)[2], unsigned base) {
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Item& item = items[n % 2];
    barrier_wait(barriers.found(n), n / 2 & 1);
    const bool last = item.last;
#pragma unroll 1
    for (int i = 0; i < kWarpgroups; ++i) {
      barrier_wait(barriers.q_empty(i), (n & 1) ^ 1);
      const unsigned barrier = barriers.q_full(i);
      if (last || !is_busy(item.works[i])) {
        barrier_arrive(barrier);
        continue;
      }
      const i64 row = item.works[i].q_row;
      barrier_expect(barrier, kBlock.q_bytes + kBlock.q_scale_bytes);
      copy_bulk(base + kBlock.q + i * kBlock.q_bytes, p.q_codes + row * kBlock.q_bytes,
                kBlock.q_bytes, barrier);
      copy_bulk(base + kBlock.q_scale + i * kBlock.q_scale_bytes,
                p.q_scale + row * (kBlock.q_scale_bytes / 4), kBlock.q_scale_bytes, barrier);
    }
    if (last) return;
  }
}

// One thread: keys and values, and what belongs to them.
__device__ __forceinline__ void load_keys(const AttnParams& p, const Barriers& barriers,
                                          const Item (&items)[2], unsigned base) {
  unsigned count = 0;  // tiles so far
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Item& item = items[n % 2];
    barrier_wait(barriers.found(n), n / 2 & 1);
    if (item.last) return;
    const i32 end_tile = item.end_tile;
#pragma unroll 1
    for (i32 tile = item.first_tile; tile < end_tile; ++tile, ++count) {
      const unsigned stage = count % kStages, barrier = barriers.full(stage);
      barrier_wait(barriers.empty(stage), (count / kStages & 1) ^ 1);
      const unsigned to = base + kBlock.stages + stage * kBlock.stage_bytes;
      const i64 at = item.k_row + tile;
      const i64 row = (item.sequence_row + (p.v_grouped ? tile / p.v_group_tiles : 0)) * kDv;
      int bytes = kBlock.k_bytes + kBlock.v_bytes + 2 * kBlock.stat_bytes + 16;
      if (SMOOTH_Q) {
        for (int i = 0; i < kWarpgroups; ++i) bytes += is_busy(item.works[i]) ? kBlock.ds_bytes : 0;
      }
      barrier_expect(barrier, bytes);
      copy_bulk(to + kBlock.k, p.k_codes + at * kBlock.k_bytes, kBlock.k_bytes, barrier);
      copy_bulk(to + kBlock.k_scale, p.k_scale + at * kKGroupsPerTile, 16, barrier);
      copy_bulk(to + kBlock.v, p.v_codes + at * kBlock.v_bytes, kBlock.v_bytes, barrier);
      copy_bulk(to + kBlock.v_scale, p.v_scale + row, kBlock.stat_bytes, barrier);
      copy_bulk(to + kBlock.v_mean, p.v_mean + row, kBlock.stat_bytes, barrier);
      if (SMOOTH_Q) {
#pragma unroll 1
        for (int i = 0; i < kWarpgroups; ++i) {
          if (!is_busy(item.works[i])) continue;
          copy_bulk(to + kBlock.ds + i * kBlock.ds_bytes, item.works[i].ds + i64{tile} * kBk,
                    kBlock.ds_bytes, barrier);
        }
      }
    }
    barrier_arrive(barriers.done(n));
  }
}

// ---- Warpgroups that compute ----

// P of 32 keys of a tile as E4M3: the A operand of P V. Scores: integers from the tensor core, to which
// the bits of a float are added that make them floats; or finished scores less those bits.
__device__ __forceinline__ void probabilities(const int* s, float factor, const float (&offset)[2],
                                              unsigned (&p)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int score = s[(j + i / 2) * 4 + 2 * h + i % 2] + (SMOOTH_Q ? 0 : kMagic);
        x[i] = exp2_approx(fmaf(__int_as_float(score), factor, offset[h]));
      }
      p[j + h] = pack_e4m3x2(x[0], x[1]) | pack_e4m3x2(x[2], x[3]) << 16;
    }
  }
}

// Turns sums into finished scores in base 2, -inf where a key is hidden. ds: the tile's corrections.
__device__ __forceinline__ void finish_scores(const AttnParams& p, const Work<1>& work, i32 tile,
                                              bool masked, float f, const float* ds,
                                              int (&s)[kScores]) {
  const auto part = [&](int begin, int end) {
    const unsigned thread = thread_anew();
#pragma unroll
    for (int n = begin; n < end; ++n) {
      float2 add = make_float2(0.0f, 0.0f);
      if (SMOOTH_Q) add = *reinterpret_cast<const float2*>(ds + column_of(thread, n, 0));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float sum = static_cast<float>(s[4 * n + e]);
        s[4 * n + e] = __float_as_int(SMOOTH_Q ? fmaf(sum, f, e % 2 ? add.y : add.x) : sum * f);
      }
    }
  };
#pragma unroll
  for (int n = 0; n < kBk / 8; n += 2) {
    if (!SMOOTH_Q || in_parts(work, tile)) part(n, n + 2);
  }
  if (masked) hide_scores(work, tile, s);
}

// The largest score of each of a thread's rows: of sums as they are, and of finished scores.
__device__ __forceinline__ void largest_of_integers(const int (&s)[kScores], float f,
                                                    float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int most = max(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int i = 4; i < kScores; i += 4) most = max(most, max(s[i + 2 * h], s[i + 2 * h + 1]));
    largest[h] = static_cast<float>(most) * f;
  }
}
__device__ __forceinline__ void largest_of_floats(const int (&s)[kScores], float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = -infinity();
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      largest[h] =
          fmaxf(largest[h], fmaxf(__int_as_float(s[i + 2 * h]), __int_as_float(s[i + 2 * h + 1])));
    }
  }
}

// A hidden key's score as an integer, below every sum. Its exponential is 0 in E4M3 where the row's maximum
// is so much above it, in base 2: what P is multiplied by, what E4M3 still holds, and the slack.
constexpr int kHidden = -(1 << 22);
constexpr float kFarBelow = 20.0f;
static_assert(kFarBelow > kLog2OfLargestE4m3 + 10.0f + kSlack);

// Hides the keys at the end of a tile that a row does not see.
__device__ __forceinline__ void hide_integers(const Work<1>& work, i32 tile, int (&s)[kScores]) {
  const unsigned thread = thread_anew();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 query = work.q_tile * Sm90Block::kRows + row_of<1>(thread, 0, h);
    const i32 end = work.band.end_key(query) - tile * kBk - column_of(thread, 0, 0);
#pragma unroll
    for (int n = 0; n < kBk / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (n * 8 + e >= end) s[4 * n + 2 * h + e] = kHidden;
      }
    }
  }
}

// Whether every row sees a key: the first one sees the fewest at the end.
__device__ __forceinline__ bool sees_a_key(const Work<1>& work) {
  return work.band.end_key(work.q_tile * Sm90Block::kRows) > 0;
}

// Writes a warp's 16 rows, normalised, turned round in shared memory of its own.
__device__ __forceinline__ void write_rows(const AttnParams& p, const Work<1>& work,
                                           const float (&maxima)[2], const float (&sum)[2],
                                           float (&o)[kDv / 2], unsigned char* stage) {
  constexpr int kPitch = kDv * 2 + 16;  // bytes a row: no bank conflicts
  static_assert(16 * kPitch <= kBlock.o_bytes / 4);
  const unsigned thread = thread_anew();
  const int lane = static_cast<int>(thread) % 32;
  const i32 first_row = static_cast<i32>(thread) / 32 * 16;  // of the tile
  const i32 rows = min(16, work.rows - first_row);
  const i64 token = work.sequence.q_start + work.q_tile * Sm90Block::kRows + first_row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float inverse = reciprocal_approx(sum[h]);
#pragma unroll
    for (int i = 0; i < kDv / 2; i += 4) {
      o[i + 2 * h] *= inverse;
      o[i + 2 * h + 1] *= inverse;
    }
    if (sum[h] == 0.0f) {  // no key was seen, and V's scales may be anything
#pragma unroll
      for (int i = 0; i < kDv / 2; i += 4) o[i + 2 * h] = o[i + 2 * h + 1] = 0.0f;
    }
    const i32 row = lane / 4 + 8 * h;
    if (p.lse == nullptr || lane % 4 != 0 || row >= rows) continue;
    store_lse(p, work, token + row, maxima[h], sum[h], kPLog2);
  }
  // fp32 rows are twice as long: half of the channels at a time.
  const bool f32 = p.out.dtype == 3;
  const i32 size = f32 ? 4 : 2;
  char* const out =
      static_cast<char*>(p.out.data) + token_offset(p.out, work.batch, token, work.head) * size;
  unsigned char* const to = stage + lane / 4 * kPitch + lane % 4 * (2 * size);
#pragma unroll 1
  for (int half = 0; half < (f32 ? 2 : 1); ++half) {
    if (f32) {
#pragma unroll
      for (int i = 0; i < kDv / 4; i += 2) {
        const float* x = o + i;
        *reinterpret_cast<float2*>(to + i / 2 % 2 * 8 * kPitch + i / 4 * 32) =
            half == 0 ? make_float2(x[0], x[1]) : make_float2(x[kDv / 4], x[kDv / 4 + 1]);
      }
    } else if (p.out.dtype == 1) {
#pragma unroll
      for (int i = 0; i < kDv / 2; i += 2) {
        *reinterpret_cast<unsigned*>(to + i / 2 % 2 * 8 * kPitch + i / 4 * 16) =
            pack_f16x2(o[i], o[i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kDv / 2; i += 2) {
        *reinterpret_cast<unsigned*>(to + i / 2 % 2 * 8 * kPitch + i / 4 * 16) =
            pack_bf16x2(o[i], o[i + 1]);
      }
    }
    __syncwarp();
    const i32 first = half * kDv / 2;  // channel
    const i32 channels = min(f32 ? kDv / 2 : kDv, p.out.channels - first);
    if (p.out_in_pieces) {
      constexpr int kPieces = kDv / 8;  // of 16 bytes, a row
      constexpr int kAtOnce = 32 / kPieces;
      const int piece = lane % kPieces, row = lane / kPieces;
      const unsigned char* const from = stage + row * kPitch + piece * 16;
      char* at = out + first * size + row * p.out.token * size + piece * 16;
      const i64 step = kAtOnce * p.out.token * size;
      const i32 left = piece * 16 < channels * size ? rows - row : 0;
#pragma unroll
      for (int r = 0; r < 16; r += kAtOnce, at += step) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + r * kPitch);
        if (r < left) *reinterpret_cast<uint4*>(at) = x;
      }
    } else {
#pragma unroll 1
      for (i32 i = lane; i < rows * channels && channels > 0; i += 32) {
        const i32 row = i / channels, c = i % channels;
        char* const at = out + (row * p.out.token + (first + c) * p.out.dim) * size;
        const unsigned char* const from = stage + row * kPitch + c * size;
        if (f32) {
          *reinterpret_cast<float*>(at) = *reinterpret_cast<const float*>(from);
        } else {
          *reinterpret_cast<unsigned short*>(at) = *reinterpret_cast<const unsigned short*>(from);
        }
      }
    }
    __syncwarp();
  }
}

// A warpgroup's tile of queries against all keys that it sees. All 128 threads.
__device__ __forceinline__ void attend(const AttnParams& p, const Barriers& barriers,
                                       const Item& item, const Work<1>& work, int warpgroup,
                                       unsigned char* shared, unsigned base) {
  // The stage of the tile that comes next, and the parity of its barrier; in uniform registers.
  const unsigned tiles_before = __shfl_sync(0xffffffffu, item.tiles_before, 0);
  unsigned slot = tiles_before % kStages, parity = tiles_before / kStages & 1;
  const auto stage_at = [&](unsigned of) { return kBlock.stages + of * kBlock.stage_bytes; };
  const auto advance = [&] {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  };
  const auto leave = [&](unsigned of) {
    __syncwarp();
    if (elect_lane()) barrier_arrive(barriers.empty(of));
  };
  const auto skip_to = [&](i32 tile, i32 end) {
    for (; tile < end; ++tile) {
      barrier_wait(barriers.full(slot), parity);
      leave(slot);
      advance();
    }
  };
  const auto leave_queries = [&] {
    __syncwarp();
    if (elect_lane()) barrier_arrive(barriers.q_empty(warpgroup));
  };
  // Where a warp keeps its promoted output.
  const auto promoted_at = [&](unsigned thread) {
    return shared + kBlock.o + warpgroup * kBlock.o_bytes + thread / 32 * (kBlock.o_bytes / 4);
  };

  if (!is_busy(work)) {
    skip_to(item.first_tile, item.end_tile);
    leave_queries();
    if (work.rows <= 0) return;
    const bool bad = work.sequence.bad != 0;
    fill_rows(p, work, bad ? quiet_nan() : 0.0f, bad ? quiet_nan() : -infinity());
    return;
  }
  const i32 first = work.first_key_tile;
  const volatile i32& end = work.end_key_tile;
  skip_to(item.first_tile, first);

  const float q_scale =
      floats(shared, kBlock.q_scale + warpgroup * kBlock.q_scale_bytes)[thread_anew() / 4] *
      p.score_scale;
  const u64 q = matrix_at<kDqk>(base + kBlock.q + warpgroup * kBlock.q_bytes);
  float max_now[2] = {kNothing, kNothing}, max_promoted[2] = {kNothing, kNothing};
  float sum[2] = {}, group_sum[2] = {}, tile_sum[4] = {};
  int s[kScores] = {};
  float o[kDv / 2] = {};
  // Tiles of the group that are left, and a mark while it is the first: no more registers hold it.
  constexpr i32 kFirstGroup = 1 << 28;
  i32 left_in_group = kFirstGroup + p.v_group_tiles;
  if (first != 0) left_in_group -= first % p.v_group_tiles;
  bool group_begins = true;

  const auto start_scores = [&](unsigned of) {
    const u64 k = matrix_at<kDqk>(base + stage_at(of) + kBlock.k);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDqk / 32; ++step) wgmma_s8(s, q + step * 2, k + step * 2, step != 0);
    wgmma_commit();
  };

  float f, factor, offset[2];
  bool masked, more;
  // What of a tile does not need its sums: while they are made.
  const auto look_at = [&](i32 tile, unsigned of) {
    masked = tile < work.full_begin || tile >= work.full_end;
    more = tile + 1 < end;
    f = q_scale * floats(shared, stage_at(of) + kBlock.k_scale)[thread_anew() % 4];
  };
  // Makes the sums ready for the exponentials, and raises maxima that have grown by more than the slack.
  const auto finish = [&](i32 tile, unsigned of) {
    float largest[2];
    largest_of_integers(s, f, largest);
    factor = f;
    if (__any_sync(0xffffffffu, SMOOTH_Q || masked || !(f >= 0.0f && f < kLargestIntegerScale) ||
                                    largest[0] > max_now[0] + kSlack ||
                                    largest[1] > max_now[1] + kSlack)) {
      // Where keys are hidden only at the end, every row has seen one in this tile or before.
      bool integers = __all_sync(0xffffffffu, !SMOOTH_Q && f >= 0.0f && f < kLargestIntegerScale) &&
                      (!masked || (tile >= work.full_begin && sees_a_key(work)));
      if (integers && masked) {
        hide_integers(work, tile, s);
        largest_of_integers(s, f, largest);
        // Lanes of a row have scales of their own, and so have the tiles before.
        const float hidden = kHidden * f;
        bool far_below = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (largest[h] == hidden) largest[h] = kNothing;
          far_below &= fmaxf(max_now[h], quad_max(largest[h])) >= hidden + kFarBelow;
        }
        integers = __all_sync(0xffffffffu, far_below);
      }
      if (!integers) {
        finish_scores(p, work, tile, masked, f,
                      floats(shared, stage_at(of) + kBlock.ds + warpgroup * kBlock.ds_bytes), s);
        largest_of_floats(s, largest);
        // As integers come: probabilities add the bits of kMagicFloat.
        if (!SMOOTH_Q) {
#pragma unroll
          for (int i = 0; i < kScores; ++i)
            s[i] = static_cast<int>(static_cast<unsigned>(s[i]) - kMagic);
        }
        factor = 1.0f;
      }
      if (__any_sync(0xffffffffu,
                     largest[0] > max_now[0] + kSlack || largest[1] > max_now[1] + kSlack)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float grown = fmaxf(max_now[h], quad_max(largest[h]));
          const float alpha = exp2_approx(max_now[h] - grown);
          max_now[h] = grown;
          group_sum[h] *= alpha;
#pragma unroll
          for (int i = 0; i < kDv / 2; i += 4) {
            o[i + 2 * h] *= alpha;
            o[i + 2 * h + 1] *= alpha;
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) offset[h] = kPLog2 - max_now[h];
    if (!SMOOTH_Q) {
      const float undo = factor == 1.0f ? 0.0f : -kMagicFloat;  // 1 is that of floats
      offset[0] = fmaf(undo, factor, offset[0]);
      offset[1] = fmaf(undo, factor, offset[1]);
    }
  };
  // Starts P V, and the row sums.
  const auto multiply = [&](unsigned of) {
    const u64 v = matrix_at<kBk>(base + stage_at(of) + kBlock.v);
    const u64 ones = uniform_matrix_at(base + kBlock.ones);
    unsigned a[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      probabilities(s + step * 16, factor, offset, a[step]);
      if (step % kStepsAtOnce != kStepsAtOnce - 1) continue;
      wgmma_fence();
#pragma unroll
      for (int i = step + 1 - kStepsAtOnce; i <= step; ++i) {
        wgmma_e4m3(o, a[i], v + i * 2, !group_begins || i != 0);
        wgmma_e4m3(tile_sum, a[i], ones, i != 0);
      }
      wgmma_commit();
    }
    group_begins = false;
  };
  const auto add_sums = [&] {
    group_sum[0] += tile_sum[0];
    group_sum[1] += tile_sum[2];
  };
  // Adds the group's accumulator, scaled and with the mean put back, to the promoted output: to the one
  // in shared memory, or, at the end, in place.
  const auto promote = [&](unsigned of, bool first_group, bool last) {
    const unsigned thread = thread_anew(), at = stage_at(of);
    float4* const promoted = reinterpret_cast<float4*>(promoted_at(thread)) + thread % 32;
    const float2* const scales =
        reinterpret_cast<const float2*>(floats(shared, at + kBlock.v_scale)) + thread % 4;
    const float2* const means =
        reinterpret_cast<const float2*>(floats(shared, at + kBlock.v_mean)) + thread % 4;
    float beta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      beta[h] = exp2_approx(max_promoted[h] - max_now[h]);
      sum[h] = fmaf(sum[h], beta[h], group_sum[h]);
      max_promoted[h] = max_now[h];
    }
#pragma unroll
    for (int i = 0; i < kDv / 8; ++i) {
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!first_group) x = promoted[i * 32];
      const float2 scale = scales[i * 4], mean = means[i * 4];
      float* y = o + 4 * i;
      y[0] = fmaf(x.x, beta[0], fmaf(y[0], scale.x, group_sum[0] * mean.x));
      y[1] = fmaf(x.y, beta[0], fmaf(y[1], scale.y, group_sum[0] * mean.y));
      y[2] = fmaf(x.z, beta[1], fmaf(y[2], scale.x, group_sum[1] * mean.x));
      y[3] = fmaf(x.w, beta[1], fmaf(y[3], scale.y, group_sum[1] * mean.y));
      if (!last) promoted[i * 32] = make_float4(y[0], y[1], y[2], y[3]);
    }
    group_sum[0] = group_sum[1] = 0.0f;
    group_begins = true;
  };

  // Tile by tile, so that no product is under way from one round to the next.
  barrier_wait(barriers.full(slot), parity);
  start_scores(slot);
  look_at(first, slot);
  wgmma_wait<0>();
  finish(first, slot);
#pragma unroll 1
  for (i32 tile = first; more; ++tile) {
    const unsigned now = slot;
    multiply(now);
    advance();
    barrier_wait(barriers.full(slot), parity);
    wgmma_wait<0>();
    start_scores(slot);
    add_sums();
    if ((--left_in_group & (kFirstGroup - 1)) == 0) {
      promote(now, left_in_group != 0, false);
      left_in_group = p.v_group_tiles;
    }
    look_at(tile + 1, slot);
    leave(now);
    wgmma_wait<0>();
    finish(tile + 1, slot);
  }
  leave_queries();
  multiply(slot);
  wgmma_wait<0>();
  add_sums();
  promote(slot, left_in_group >= kFirstGroup, true);
  leave(slot);
  advance();
  write_rows(p, work, max_now, sum, o, promoted_at(thread_anew()));

  skip_to(end, item.end_tile);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Sm90Block::kThreads, 1)
    sageattn_attn_sm90a(const __grid_constant__ AttnParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Item items[2];
  __shared__ i32 number;  // of the next item, among all blocks'

  const unsigned base = shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const Barriers barriers{base + kBlock.barriers};
  if (threadIdx.x == 0) barriers.init();
  if (threadIdx.x < 64)
    reinterpret_cast<unsigned*>(shared + kBlock.ones)[threadIdx.x] = kFourE4m3Ones;
  fence_async();
  if (p.followed) start_dependents();
  wait_for_grids();  // every role touches global memory
  __syncthreads();

  if (warpgroup == kWarpgroups) {
    set_registers<Sm90Block::kLoadRegisters, false>();
    const unsigned warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (warp == 0) find_items(p, barriers, items, number);
    if (warp == 1 && lane == 0) load_keys(p, barriers, items, base);
    if (warp == 2 && lane == 0) load_queries(p, barriers, items, base);
    return;
  }
  set_registers<Sm90Block::kComputeRegisters, true>();
#pragma unroll 1
  for (int n = 0;; ++n) {
    barrier_wait(barriers.q_full(warpgroup), n & 1);
    const Item& item = items[n % 2];
    if (item.last) break;
    attend(p, barriers, item, item.works[warpgroup], warpgroup, shared, base);
    __syncwarp();
    if (thread_anew() % 32 == 0) barrier_arrive(barriers.done(n));
  }
}

}  // namespace sageattn
