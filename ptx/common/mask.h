// Which keys a query sees. Every mask is a band around a diagonal, so one pair of questions (first
// and end key of a query) serves kernels and the CPU backend alike.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// Values of SAGEATTN_MASK_*, which the host asserts to be equal.
enum class MaskKind : i32 { kNone = 0, kCausalBottomRight = 1, kCausalTopLeft = 2, kWindow = 3 };

// Query i sees key j when i + lo <= j <= i + hi and 0 <= j < kv_len.
struct Band {
  i32 lo, hi;
  i32 kv_len;

  SAGEATTN_HD i32 first_key(i32 query) const {
    const i32 j = query + lo;
    return j < 0 ? 0 : j;
  }
  // One past the last visible key; at or below first_key if the query sees none.
  SAGEATTN_HD i32 end_key(i32 query) const {
    const i32 j = query + hi + 1;
    return j < kv_len ? j : kv_len;
  }
};

// Lengths are at most 2^30, so a reach of 2^30 - 1 is unlimited and no 32-bit sum above overflows.
SAGEATTN_HD Band make_band(MaskKind kind, i32 window_left, i32 window_right, i32 qo_len,
                           i32 kv_len) {
  const i64 unlimited = (1 << 30) - 1;
  i64 lo = -unlimited, hi = unlimited;
  const i64 diagonal = static_cast<i64>(kv_len) - qo_len;
  if (kind == MaskKind::kCausalBottomRight) hi = diagonal;
  if (kind == MaskKind::kCausalTopLeft) hi = 0;
  if (kind == MaskKind::kWindow) {
    if (window_left >= 0 && diagonal - window_left > lo) lo = diagonal - window_left;
    if (window_right >= 0 && diagonal + window_right < hi) hi = diagonal + window_right;
  }
  return {static_cast<i32>(lo), static_cast<i32>(hi), kv_len};
}

}  // namespace sageattn
