// Quantization groups per thread: which rows of a Q tile, and which keys of a K tile, share the
// scale that one thread of the tensor core's accumulator layout holds.
//
// In the 16 x 8 accumulator fragment of mma.sync and wgmma alike, lane t holds rows t / 4 and
// t / 4 + 8 and columns 2 * (t % 4) and 2 * (t % 4) + 1. A warp holds several such fragments one
// below the other (mma.sync: 32 rows a warp, wgmma: 16) and side by side.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

inline constexpr i32 kQGroupsPerWarp = 8;  // one for each value of lane / 4
inline constexpr i32 kKGroupsPerTile = 4;  // one for each value of lane % 4

SAGEATTN_HD i32 q_group_of_row(i32 row_in_tile, i32 rows_per_warp) {
  return row_in_tile / rows_per_warp * kQGroupsPerWarp + row_in_tile % 8;
}

SAGEATTN_HD i32 k_group_of_key(i32 key_in_tile) { return key_in_tile % 8 / 2; }

}  // namespace sageattn
