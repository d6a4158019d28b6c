// Order of 16-byte pieces in a tile, the same in global and shared memory: eight consecutive rows at
// one column fall into different banks, so that ldmatrix reads without conflicts.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// Byte offset of piece `column` (of 16 bytes) of `row` in a tile of rows of row_bytes, a power of
// two from 32 to 512.
SAGEATTN_HD i32 swizzled(i32 row, i32 column, i32 row_bytes) {
  // Rows of less than 128 bytes share a line of banks.
  const i32 mask = row_bytes >= 128 ? 7 : row_bytes / 16 - 1;
  const i32 rows_a_line = row_bytes >= 128 ? 1 : 128 / row_bytes;
  return row * row_bytes + ((column ^ (row / rows_a_line & mask)) * 16);
}

// Where a token of a tile stands in E4M3 V rows. A lane's scores in columns 8n + 2i, + 1 (n even) and
// 8(n + 1) + 2i, + 1 become four adjacent bytes of the P operand of the product, so V's tokens take
// the places of those bytes.
SAGEATTN_HD i32 v_token_slot(i32 token) {
  const i32 n = token / 8, i = token % 8 / 2;
  return token / 32 * 32 + n % 4 / 2 * 16 + i * 4 + n % 2 * 2 + token % 2;
}

// The inverse.
SAGEATTN_HD i32 token_of_v_slot(i32 slot) {
  const i32 n = slot % 32 / 16 * 2 + slot % 4 / 2, i = slot % 16 / 4;
  return slot / 32 * 32 + n * 8 + i * 2 + slot % 2;
}

}  // namespace sageattn
