// How a call fails: fail() throws an Error, and the boundary in src/api turns it into a status and
// a message. Nothing between catches it, so an object that is half made cleans up by destructors.
#pragma once

#include <cstdint>

#include "include/sageattn.h"

namespace sageattn {

// No std::string: an error must be possible when memory is not.
struct Error {
  int32_t status;
  char message[900];  // "field = value: limit"; the boundary puts the function in front
};

[[noreturn, gnu::format(printf, 2, 3)]] void fail(int32_t status, const char* format, ...);

}  // namespace sageattn
