// A block's share of the work: which sequence, head and tile.
#pragma once

#include "ptx/common/params.h"

namespace sageattn {

__device__ __forceinline__ SequenceEntry sequence_at(const Sequences& s, i32 index) {
  if (s.table != nullptr) return s.table[index];
  SequenceEntry e;
  e.q_start = e.kv_start = 0;
  e.first_q_tile = static_cast<i64>(index) * s.q_tiles;
  e.first_k_tile = static_cast<i64>(index) * s.k_tiles;
  e.first_v_group = static_cast<i64>(index) * s.v_groups;
  e.qo_len = s.qo_len;
  e.kv_len = s.kv_len;
  e.bad = 0;
  return e;
}

// Offset of channel 0 of one token. With packed sequences the batch stride is 0.
__device__ __forceinline__ i64 token_offset(const View& v, i32 sequence, i64 token, i32 head) {
  return sequence * v.batch + token * v.token + head * v.head;
}

}  // namespace sageattn
