// Resolves the lengths of the sequences of a launch from device memory: one warp walks over them in
// runs of 32, scanning tile counts and the highest entry seen. Nonsense lengths are what
// include/sageattn.h says at cu_seqlens_q.
#include "ptx/arch/grid.h"
#include "ptx/common/params.h"

namespace sageattn {
namespace {

struct Cut {
  i64 start, end;
  bool good;
};

// Sequence b of a cu_seqlens array; highest: the largest entry before it, 0 at least.
__device__ __forceinline__ Cut cut_at(i64 start, i64 end, i64 highest, i64 total, i64 max_len) {
  Cut cut;
  cut.good = start >= highest && end >= start && end <= total && end - start <= max_len;
  cut.start = min(max(start, highest), total);
  cut.end = max(cut.start, min(end, min(total, cut.start + max_len)));
  return cut;
}

// Of up to `size` tokens; size may be any positive number.
__device__ __forceinline__ i64 tiles_of(i32 tokens, i32 size) {
  return (i64{tokens} + size - 1) / size;
}

template <typename T>
__device__ __forceinline__ T inclusive_sum(T x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

__device__ __forceinline__ i64 inclusive_max(i64 x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const i64 other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x = max(x, other);
  }
  return x;
}

// The largest entry before each lane's, carried from run to run.
__device__ __forceinline__ i64 highest_before(i64 entry, int lane, i64& carry) {
  const i64 upto = max(inclusive_max(entry, lane), carry);
  i64 before = __shfl_up_sync(0xffffffffu, upto, 1);
  if (lane == 0) before = carry;
  carry = __shfl_sync(0xffffffffu, upto, 31);
  return before;
}

__device__ __forceinline__ i64 sum_before(i64 x, int lane, i64& carry) {
  const i64 upto = carry + inclusive_sum(x, lane);
  const i64 before = upto - x;
  carry = __shfl_sync(0xffffffffu, upto, 31);
  return before;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    sageattn_sequences(const __grid_constant__ SequencesParams p) {
  if (p.followed) start_dependents();
  wait_for_grids();
  const int lane = static_cast<int>(threadIdx.x);
  for (i32 i = lane; i < p.counter_count; i += 32) p.counters[i] = 0;
  if (p.table == nullptr && p.status == nullptr) return;
  i64 highest_q = 0, highest_kv = 0, q_tiles = 0, k_tiles = 0, v_groups = 0;
  for (i32 first = 0; first < p.batch; first += 32) {
    const i32 b = first + lane;
    const bool real = b < p.batch;
    Cut q = {0, real ? p.qo_len : 0, true}, kv = {0, real ? p.kv_len : 0, true};
    if (p.cu_seqlens_q != nullptr) {
      const i64 q_start = real ? p.cu_seqlens_q[b] : 0;
      const i64 kv_start = real ? p.cu_seqlens_kv[b] : 0;
      const i64 q_before = highest_before(q_start, lane, highest_q);
      const i64 kv_before = highest_before(kv_start, lane, highest_kv);
      if (real) {
        q = cut_at(q_start, p.cu_seqlens_q[b + 1], q_before, p.total_q, p.max_qo_len);
        kv = cut_at(kv_start, p.cu_seqlens_kv[b + 1], kv_before, p.total_kv, p.max_kv_len);
      }
    }
    SequenceEntry e;
    e.q_start = q.start;
    e.kv_start = kv.start;
    e.qo_len = static_cast<i32>(q.end - q.start);
    e.kv_len = static_cast<i32>(kv.end - kv.start);
    bool bad = !q.good || !kv.good;
    if (real && p.seqused_kv != nullptr) {
      const i32 used = p.seqused_kv[b];
      bad |= used < 0 || used > e.kv_len;
      if (!bad) e.kv_len = used;
    }
    if (bad) e.kv_len = 0;
    e.bad = bad;
    e.unused = 0;
    e.first_q_tile = sum_before(tiles_of(e.qo_len, p.b_q), lane, q_tiles);
    e.first_k_tile = sum_before(tiles_of(e.kv_len, p.b_k), lane, k_tiles);
    const i64 groups = p.v_group > 0 ? tiles_of(e.kv_len, p.v_group) : 1;
    e.first_v_group = sum_before(groups, lane, v_groups);
    if (!real) continue;
    if (p.table != nullptr) p.table[b] = e;
    if (p.status != nullptr) p.status[b] = bad;
  }
}

}  // namespace sageattn
