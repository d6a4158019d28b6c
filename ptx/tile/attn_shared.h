// How a block of attention by mma.sync divides its dynamic shared memory: for the kernels and for the
// host, which launches them with `bytes`.
//
// Stages: while a tile of keys is worked on, the next is copied. Two of each, but beyond 128 channels
// one of V, and of 16-bit K too, so that a block fits in the 99 KB that sm_86, sm_89 and sm_120 have. One
// of E4M3 V, so that two blocks fit there.
#pragma once

#include "ptx/tile/tiles.h"

namespace sageattn {

#if defined(WGMMA) && WGMMA
inline constexpr i32 kBk = tile_shape({128, 128}, true).b_k;  // keys a tile, whatever the dims
#else
inline constexpr i32 kBk = tile_shape({256, 256}, false).b_k;
#endif

// Rows a warp, of 16: 32 while the output fits in registers. Four warps a block.
SAGEATTN_HD constexpr i32 row_fragments(HeadDims dims) {
  return tile_shape(dims, false).rows_per_warp / 16;
}

// Where each of the four warps turns 16 rows of the output round, when the rest is done with.
struct OutStage {
  i32 columns, pitch,
      bytes;  // channels at a time; floats a row, without bank conflicts; of all warps

  SAGEATTN_HD explicit constexpr OutStage(i32 d_v)
      : columns(d_v < 128 ? d_v : 128), pitch(columns + 8), bytes(4 * 16 * pitch * 4) {}
};

struct AttnShared {
  i32 q_bytes, k_bytes, v_bytes;  // codes of a tile
  i32 k_stages, v_stages;
  i32 ds_bytes, stat_bytes;  // of a tile: corrections of scores; V's scales, or means, of channels
  // Byte offsets. Only codes of 8 bits and less have scales, only E4M3 V has those of each tile. K's
  // scales and corrections have the stages of K, V's scales and means those of V.
  i32 q, k, v, k_scale, ds, v_scale, v_mean, bytes;

  // Bits of the codes of Q and K: 4, 8 or 16; of V: 8 or 16.
  SAGEATTN_HD constexpr AttnShared(HeadDims dims, i32 qk_bits, i32 v_bits, bool smooth_q)
      : q_bytes(row_fragments(dims) * 64 * dims.qk * qk_bits / 8),
        k_bytes(kBk * dims.qk * qk_bits / 8),
        v_bytes(kBk * dims.v * v_bits / 8),
        k_stages(row_fragments(dims) == 1 && qk_bits == 16 ? 1 : 2),
        v_stages(row_fragments(dims) == 1 || v_bits == 8 ? 1 : 2),
        ds_bytes(smooth_q ? kBk * 4 : 0),
        stat_bytes(v_bits == 8 ? dims.v * 4 : 0),
        q(0),
        k(q + q_bytes),
        v(k + k_stages * k_bytes),
        k_scale(v + v_stages * v_bytes),
        ds(k_scale + (qk_bits < 16 ? k_stages * kKScaleBytes : 0)),
        v_scale(ds + k_stages * ds_bytes),
        v_mean(v_scale + v_stages * stat_bytes),
        bytes(larger(v_mean + v_stages * stat_bytes, OutStage(dims.v).bytes)) {}

  static constexpr i32 kKScaleBytes = 16;  // of a tile

 private:
  SAGEATTN_HD static constexpr i32 larger(i32 a, i32 b) { return a > b ? a : b; }
};

}  // namespace sageattn
