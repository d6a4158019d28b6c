// How a sequence is cut into tiles of queries and of keys: for attention, whose registers decide, and for
// all that writes what it reads.
#pragma once

#include "ptx/common/params.h"
#include "ptx/tile/dims.h"

namespace sageattn {

struct TileShape {
  i32 b_q, rows_per_warp, b_k;  // queries, of these a warp's, and keys
};

// mma.sync: four warps. 32 x 128 outputs of a warp take 128 registers a thread and 32 x 64 scores 64, so
// neither more keys nor more channels fit; up to 256 channels it is half the rows. wgmma: a warpgroup of
// four warps holds 64 rows; 64 x 128 outputs and 64 x 128 scores take 128 of the 255 registers.
SAGEATTN_HD constexpr TileShape tile_shape(HeadDims dims, bool wgmma) {
  if (wgmma) return {64, 16, 128};
  return dims.qk > 128 || dims.v > 128 ? TileShape{64, 16, 64} : TileShape{128, 32, 64};
}

// What a block of `prepare` takes: a tile of keys, K and V, or a tile of queries. Where tiles of keys are
// twice as large and those of queries half, that is K or V of a tile, or two tiles of queries.
struct PrepareTask {
  i32 chunks;     // of 64 tokens of K or V that it has room for
  i32 key_tasks;  // for each tile of keys
  i32 q_tiles;

  SAGEATTN_HD constexpr PrepareTask(HeadDims dims, bool wgmma)
      : chunks(dims.qk > 128 || dims.v > 128 ? 1 : 2),
        key_tasks(wgmma ? 2 : 1),
        q_tiles(wgmma ? 2 : 1) {}

  // That write the tiles of a kv head, whose queries have `group` heads.
  template <typename T>
  SAGEATTN_HD constexpr T tile_tasks(T k_tiles, T group_size, T q_tile_count) const {
    return k_tiles * key_tasks + group_size * q_tasks(q_tile_count);
  }
  template <typename T>
  SAGEATTN_HD constexpr T q_tasks(T q_tile_count) const {
    return (q_tile_count + q_tiles - 1) / q_tiles;
  }
};

// What a block of `score_correction` takes of a run: keys, and for these tiles of queries of one head, or
// all tiles of several heads that read the same keys.
struct CorrectionTask {
  i32 group, first_head, end_head;
  i32 heads;        // that a block takes, at most
  i32 group_parts;  // blocks that share the heads of a group
  i32 parts;        // of the run's heads
  i32 chunks;       // of kCorrectionTiles tiles

  SAGEATTN_HD constexpr CorrectionTask(i32 group_size, i32 first, i32 head_count, i32 q_tile_count)
      : group(group_size),
        first_head(first),
        end_head(first + head_count),
        heads(q_tile_count >= kCorrectionTiles ? 1 : kCorrectionTiles / q_tile_count),
        group_parts((group_size + heads - 1) / heads),
        parts(part_of(end_head - 1) - part_of(first_head) + 1),
        chunks((q_tile_count + kCorrectionTiles - 1) / kCorrectionTiles) {}

  SAGEATTN_HD constexpr i32 part_of(i32 head) const {
    return head / group * group_parts + head % group / heads;
  }
  SAGEATTN_HD constexpr void heads_of(i32 part, i32& begin, i32& end) const {
    part += part_of(first_head);
    const i32 kv_head = part / group_parts;
    begin = kv_head * group + part % group_parts * heads;
    end = begin + heads;
    if (end > (kv_head + 1) * group) end = (kv_head + 1) * group;
    if (begin < first_head) begin = first_head;
    if (end > end_head) end = end_head;
  }
  // Of kCorrectionKeys keys.
  template <typename T>
  static SAGEATTN_HD constexpr T pieces(T keys) {
    return (keys + kCorrectionKeys - 1) / kCorrectionKeys;
  }
};

}  // namespace sageattn
