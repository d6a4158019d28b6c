// Tensor-core instructions of a warp: D = A B + D, A row-major [16][k], B column-major [k][8].
// Lane t holds of D rows t / 4 and t / 4 + 8, columns 2 (t % 4) and + 1, in this order.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: d[4], a[4], b[2], c[4] (may be d); sm_80.
__device__ __forceinline__ void mma_s8(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1, const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

// INT4 tensor cores end with sm_89; later archs call a slow subroutine for mma.s4. There mma_s4 takes
// two products of bytes, even and odd codes moved to the upper half of a byte, which makes sums
// kS4Sum times as large.
#if __CUDA_ARCH__ < 900
inline constexpr int kS4Sum = 1;

// mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32: d[4], a[4], b[2], eight codes a register, c[4]
// (may be d); sm_80.
__device__ __forceinline__ void mma_s4(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1, const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}
#else
inline constexpr int kS4Sum = 256;

__device__ __forceinline__ void mma_s4(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1, const int (&c)[4]) {
  constexpr unsigned kUpper = 0xf0f0f0f0u;
  const unsigned odd[4] = {a[0] & kUpper, a[1] & kUpper, a[2] & kUpper, a[3] & kUpper};
  const unsigned even[4] = {a[0] << 4 & kUpper, a[1] << 4 & kUpper, a[2] << 4 & kUpper,
                            a[3] << 4 & kUpper};
  mma_s8(d, odd, b0 & kUpper, b1 & kUpper, c);
  mma_s8(d, even, b0 << 4 & kUpper, b1 << 4 & kUpper, d);
}
#endif

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: d[4], a[4], b[2]; sm_80.
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d[4], a[4], b[2]; sm_80.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16: d[2] (two halves each), a[4], b[2]; sm_80.
__device__ __forceinline__ void mma_f16_acc16(unsigned (&d)[2], const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32: d[4], a[4], b[2]; sm_89, PTX 8.4.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16: d[2], a[4], b[2]; sm_89, PTX 8.7.
__device__ __forceinline__ void mma_e4m3_acc16(unsigned (&d)[2], const unsigned (&a)[4],
                                               unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, "
      "{%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sageattn
