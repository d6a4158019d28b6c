// Public structs across the boundary: the size rules of sageattn.h ("Structs"), in one place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "include/sageattn.h"
#include "src/core/error.h"

namespace sageattn {

// Larger than any struct will ever be; a struct_size beyond is garbage, not a newer header.
inline constexpr uint32_t kMaxStructSize = 65536;

// The caller's struct_size, checked. `name` is the parameter, for the message.
template <class T>
uint32_t struct_size_of(const T* user, const char* name) {
  if (user == nullptr) fail(SAGEATTN_E_INVALID_ARGUMENT, "%s = NULL: must not be NULL", name);
  uint32_t size;
  std::memcpy(&size, user, sizeof size);
  if (size < sizeof size || size > kMaxStructSize) {
    fail(SAGEATTN_E_INVALID_ARGUMENT,
         "%s->struct_size = %u: must be sizeof(the struct), 4..%u; here it is %zu", name, size,
         kMaxStructSize, sizeof(T));
  }
  return size;
}

// An input struct: what the caller's is too short for is zero; what it has beyond must be.
template <class T>
T copy_in(const T* user, const char* name) {
  const uint32_t size = struct_size_of(user, name);
  const char* bytes = reinterpret_cast<const char*>(user);
  for (size_t offset = sizeof(T); offset < size; ++offset) {
    if (bytes[offset] != 0) {
      fail(SAGEATTN_E_UNKNOWN_FIELD,
           "%s: the byte at offset %zu is not 0, and this library knows %zu bytes: a field that "
           "it does not have is set",
           name, offset, sizeof(T));
    }
  }
  T known{};
  std::memcpy(&known, user, std::min<size_t>(size, sizeof(T)));
  return known;
}

// An output struct whose size was checked: written as far as both sides know it.
template <class T>
void copy_out(T value, T* user) {
  const uint32_t size = struct_size_of(user, "output");
  value.struct_size = size;
  std::memcpy(user, &value, std::min<size_t>(size, sizeof(T)));
}

}  // namespace sageattn
