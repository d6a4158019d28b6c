// How the kernels of one execute follow each other in a stream without a gap: programmatic dependent
// launch, from sm_90 (PTX 7.8). Before, both do nothing, and a kernel starts when the last one has ended.
//
// A kernel that the host launched as dependent may start when every block of the kernel before it has
// called start_dependents or ended. So every block of every kernel calls wait_for_grids before it
// touches global memory: then no kernel ends before those ahead of it have, and waiting for one is
// waiting for all.
#pragma once

namespace sageattn {

// griddepcontrol.wait: the kernel before this one has ended, and this thread sees what it wrote. Returns at
// once in a kernel that is not launched as dependent.
__device__ __forceinline__ void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: once all blocks have said so or ended, the next kernel may start.
// It takes no room from blocks of this one, which run by then.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sageattn
