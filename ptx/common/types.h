// Types and decorations shared by device code and the host. Device code includes nothing outside
// ptx/, so it names its own integers.
#pragma once

#ifdef __CUDACC_RTC__
#define SAGEATTN_HD __device__ __forceinline__
#else
#define SAGEATTN_HD inline
#endif

namespace sageattn {
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;
}  // namespace sageattn
