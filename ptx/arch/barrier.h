// Bulk copies from global to shared memory, the barriers that they complete, and how registers are
// divided among warpgroups. sm_90.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// mbarrier.init: a phase ends after `count` arrivals and all bytes that they announced.
__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// fence.proxy.async: what was written to shared memory so far is seen by bulk copies and wgmma.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// mbarrier.arrive.expect_tx: one arrival that announces `bytes`.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase with that parity.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra wait;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// cp.async.bulk: addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, int bytes,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same with a policy for L2 (policy_of).
__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, int bytes,
                                          unsigned barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// mbarrier.arrive: one arrival; orders this thread's accesses before it.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// elect.sync: true in one lane of a converged warp.
__device__ __forceinline__ bool elect_lane() {
  int elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p;}"
               : "=r"(elected)::"memory");
  return elected != 0;
}

// setmaxnreg: registers of each thread of the warpgroup from here on, a multiple of 8.
template <int kRegisters, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

}  // namespace sageattn
