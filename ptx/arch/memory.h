// Moving data: shared-memory matrices to registers, global to shared memory.
#pragma once

#include "ptx/common/types.h"

namespace sageattn {

// cvta.to.shared: a generic pointer into shared memory as the 32-bit address that ldmatrix takes.
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// cvta.shared: the way back, which the compiler undoes to read with 32-bit addresses.
template <typename T>
__device__ __forceinline__ T* shared_pointer(unsigned address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane t gives the address of row t % 8 of matrix t / 8;
// r[i] of lane t holds bytes 4 (t % 4) .. + 3 of row t / 4 of matrix i; sm_75.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ldmatrix .trans: r[i] of lane t holds rows 2 (t % 4) and + 1 of column t / 4 of matrix i; sm_75.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// cp.async.cg.shared.global, 16 bytes past L1; both addresses 16-byte aligned; sm_80.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// createpolicy.fractional: how L2 treats lines; sm_80, PTX 7.4.
enum class L2 { kNormal, kFirst, kLast };  // to be evicted
__device__ __forceinline__ u64 policy_of(L2 evict) {
  u64 policy;
  if (evict == L2::kFirst) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  } else if (evict == L2::kLast) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  }
  return policy;
}

// The same with a policy; with bytes = 0, zeros. PTX 7.4.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from, int bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}

// cp.async.commit_group; sm_80.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: all but the newest `pending` groups have arrived; sm_80.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// atom.add.acq_rel.gpu: adds, and orders this thread's memory accesses with those of others that add
// to the same counter; returns what was there. sm_70.
__device__ __forceinline__ int add_acq_rel(int* counter, int x) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

// ld.acquire.gpu: what others wrote before they added to the counter is visible afterwards. sm_70.
__device__ __forceinline__ int load_acquire(const int* counter) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

}  // namespace sageattn
