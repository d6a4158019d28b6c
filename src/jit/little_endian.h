// Integers in files.
#pragma once

#include <cstdint>

#include "src/util/file.h"

namespace sageattn::jit {

template <class Integer>
void append_integer(Bytes& bytes, Integer value) {
  for (unsigned shift = 0; shift < sizeof(Integer) * 8; shift += 8) {
    bytes.push_back(static_cast<uint8_t>(value >> shift));
  }
}

template <class Integer>
Integer read_integer(const uint8_t* bytes) {
  Integer value = 0;
  for (unsigned i = 0; i < sizeof(Integer); ++i) {
    value |= static_cast<Integer>(static_cast<Integer>(bytes[i]) << (8 * i));
  }
  return value;
}

}  // namespace sageattn::jit
