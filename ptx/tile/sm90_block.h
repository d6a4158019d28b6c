// How a block of attn_sm90a is made up, and how it divides its shared memory: for the kernel and for
// the host, which launches it.
#pragma once

#include "ptx/tile/tiles.h"

namespace sageattn {

struct Sm90Block {
  // Registers bind: 64 x 128 outputs and 64 x 128 scores take 128 a thread, so a block has three
  // warpgroups that compute, with 160 registers, and one that loads, with 32: 512 in all is what an SM has.
  static constexpr i32 kWarpgroups = 3;
  static constexpr i32 kThreads = (kWarpgroups + 1) * 128;
  static constexpr i32 kComputeRegisters = 160, kLoadRegisters = 32;
  static constexpr TileShape kTile = tile_shape({128, 128}, true);
  static constexpr i32 kRows = kTile.b_q;  // queries a warpgroup: one tile
  static constexpr i32 kKeys = kTile.b_k;  // keys a tile
  static constexpr i32 kStages = 3;        // tiles of keys: what shared memory holds

  i32 q_bytes, k_bytes, v_bytes;  // codes of a tile
  i32 q_scale_bytes;
  i32 stat_bytes;  // V's scales, or means, of a group
  i32 ds_bytes;    // corrections of a tile's scores, for one tile of queries
  i32 o_bytes;     // promoted output of a warpgroup
  // Byte offsets: of the block, and within a stage.
  i32 q, o, ones, barriers, q_scale, stages, bytes;
  i32 k, v, v_scale, v_mean, ds, k_scale, stage_bytes;

  SAGEATTN_HD explicit constexpr Sm90Block(HeadDims dims, bool smooth_q)
      : q_bytes(kRows * dims.qk),
        k_bytes(kKeys * dims.qk),
        v_bytes(kKeys * dims.v),
        q_scale_bytes(kRows / 2 * 4),
        stat_bytes(dims.v * 4),
        ds_bytes(smooth_q ? kKeys * 4 : 0),
        o_bytes(kRows * dims.v * 4),
        q(0),
        o(q + kWarpgroups * q_bytes),
        ones(o + kWarpgroups * o_bytes),
        barriers(ones + 256),
        q_scale(barriers + 256),
        stages(ones + 1024),
        bytes(0),
        k(0),
        v(k + k_bytes),
        v_scale(v + v_bytes),
        v_mean(v_scale + stat_bytes),
        ds(v_mean + stat_bytes),
        k_scale(ds + kWarpgroups * ds_bytes),
        stage_bytes((k_scale + 16 + 1023) / 1024 * 1024) {
    bytes = stages + kStages * stage_bytes;
  }
};
static_assert(Sm90Block::kWarpgroups * Sm90Block::kComputeRegisters + Sm90Block::kLoadRegisters <=
              65536 / 128);

}  // namespace sageattn
