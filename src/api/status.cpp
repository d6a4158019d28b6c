#include "include/sageattn.h"

// Every status of the header, once.
#define SAGEATTN_STATUSES(X)     \
  X(SAGEATTN_OK)                 \
  X(SAGEATTN_E_INVALID_ARGUMENT) \
  X(SAGEATTN_E_UNKNOWN_FIELD)    \
  X(SAGEATTN_E_MISALIGNED)       \
  X(SAGEATTN_E_ALIASED)          \
  X(SAGEATTN_E_LIMIT)            \
  X(SAGEATTN_E_WORKSPACE)        \
  X(SAGEATTN_E_BUFFER_TOO_SMALL) \
  X(SAGEATTN_E_UNSUPPORTED)      \
  X(SAGEATTN_E_NO_DEVICE)        \
  X(SAGEATTN_E_DRIVER_TOO_OLD)   \
  X(SAGEATTN_E_NVRTC_NOT_FOUND)  \
  X(SAGEATTN_E_NVRTC_TOO_OLD)    \
  X(SAGEATTN_E_KERNEL_MISSING)   \
  X(SAGEATTN_E_BAD_BLOB)         \
  X(SAGEATTN_E_OUT_OF_MEMORY)    \
  X(SAGEATTN_E_CUDA)             \
  X(SAGEATTN_E_COMPILE)          \
  X(SAGEATTN_E_SELFTEST)         \
  X(SAGEATTN_E_INTERNAL)

extern "C" const char* sageattn_status_name(int32_t status) {
  switch (status) {
#define SAGEATTN_CASE(name) \
  case name:                \
    return #name;
    SAGEATTN_STATUSES(SAGEATTN_CASE)
#undef SAGEATTN_CASE
    default:
      return "unknown status";
  }
}
