#include "src/core/error.h"

#include <cstdarg>
#include <cstdio>

namespace sageattn {

void fail(int32_t status, const char* format, ...) {
  Error error{};
  error.status = status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error.message, sizeof error.message, format, arguments);
  va_end(arguments);
  throw error;
}

}  // namespace sageattn
