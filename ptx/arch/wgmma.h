// Warpgroup matrix products of Hopper: operands in shared memory (or A in registers), results in
// registers, complete only after a wait. sm_90a.
//
// A warpgroup is four warps. Warp w holds rows 16 w .. + 15 of the 64 x n result; lane t of it rows
// t / 4 and t / 4 + 8 and columns 8 j + 2 (t % 4) and + 1: d[4 j .. 4 j + 3] in the order of mma.sync.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// Describes a matrix in shared memory: rows of 128 or 64 bytes along k, swizzled (ptx/tile/swizzle.h),
// from an address that is a multiple of 1024. Add 2 for each 32 bytes along k.
template <int kRowBytes>
__device__ __forceinline__ u64 matrix_at(unsigned address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr u64 kEightRows = 8 * kRowBytes / 16;
  return u64{(address & 0x3ffffu) >> 4} | u64{1} << 16 | kEightRows << 32 | kSwizzle << 62;
}

// A matrix whose elements are all alike: 256 bytes from a multiple of 16, in whatever order.
__device__ __forceinline__ u64 uniform_matrix_at(unsigned address) {
  return u64{(address & 0x3ffffu) >> 4} | u64{8} << 16 | u64{8} << 32;
}

// wgmma.fence: before the first product that takes registers which other instructions have written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: the products since the last one become a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: all but the newest `pending` groups are complete.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Operands of the instructions below: registers from d[i] on, and their names.
#define SAGEATTN_D8(c, d, i)                                                                      \
  c((d)[i]), c((d)[(i) + 1]), c((d)[(i) + 2]), c((d)[(i) + 3]), c((d)[(i) + 4]), c((d)[(i) + 5]), \
      c((d)[(i) + 6]), c((d)[(i) + 7])
#define SAGEATTN_D32(c, d, i)                                                    \
  SAGEATTN_D8(c, d, i), SAGEATTN_D8(c, d, (i) + 8), SAGEATTN_D8(c, d, (i) + 16), \
      SAGEATTN_D8(c, d, (i) + 24)
#define SAGEATTN_N32                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define SAGEATTN_N64                                                                              \
  SAGEATTN_N32                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"

// wgmma.mma_async.m64nNk32.s32.s8.s8: d = a b^T, + d if accumulate. N = 2 * size of d.
__device__ __forceinline__ void wgmma_s8(int (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" SAGEATTN_N64 "}, %64, %65, p;}"
      : SAGEATTN_D32("+r", d, 0), SAGEATTN_D32("+r", d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// wgmma.mma_async.m64nNk32.f32.e4m3.e4m3: d = a b^T, + d if accumulate. a: bytes 4 (t % 4) .. + 3 of
// row t / 4 of the warp, of row t / 4 + 8, and the same 16 bytes further along k.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], const unsigned (&a)[4], u64 b,
                                           bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SAGEATTN_N64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1;}"
      : SAGEATTN_D32("+f", d, 0), SAGEATTN_D32("+f", d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const unsigned (&a)[4], u64 b,
                                           bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" SAGEATTN_N32
      "}, {%32,%33,%34,%35}, %36, p, 1, 1;}"
      : SAGEATTN_D32("+f", d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[4], const unsigned (&a)[4], u64 b,
                                           bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %9, 0;"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, "
      "1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef SAGEATTN_D8
#undef SAGEATTN_D32
#undef SAGEATTN_N32
#undef SAGEATTN_N64

}  // namespace sageattn
