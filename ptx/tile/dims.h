// Channels of attention's tiles. HEAD_DIMS names both as one number, d_qk * 1000 + d_v, so that
// kernels.def lists the pairs that there are: 64064, 128128, 256128, 256256.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

struct HeadDims {
  i32 qk, v;  // of Q and K, of V and the output

  SAGEATTN_HD constexpr i32 code() const { return qk * 1000 + v; }
};

// The pair of tiles that head dims of up to 256 are padded to.
SAGEATTN_HD constexpr HeadDims head_dims(i32 qk, i32 v) {
  const i32 larger = qk > v ? qk : v;
  if (larger <= 64) return {64, 64};
  if (larger <= 128) return {128, 128};
  return {256, v <= 128 ? 128 : 256};
}

#ifdef HEAD_DIMS
inline constexpr i32 kDqk = HEAD_DIMS / 1000, kDv = HEAD_DIMS % 1000;
#endif

}  // namespace sageattn
