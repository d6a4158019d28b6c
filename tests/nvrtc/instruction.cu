// One instruction of the tensor cores, which not every arch has: a kernel of
// tests/test_jit_nvrtc.cpp. INSTRUCTION: 0 INT4 mma, 1 E4M3 mma, 2 wgmma.
extern "C" __global__ void sageattn_instruction(int* data) {
  int* d = data + 4 * threadIdx.x;
  const int a = d[0];
#if INSTRUCTION == 0
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, "
      "%4}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a));
#elif INSTRUCTION == 1
  float* f = reinterpret_cast<float*>(d);
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, "
      "{%4, %4}, {%0, %1, %2, %3};"
      : "+f"(f[0]), "+f"(f[1]), "+f"(f[2]), "+f"(f[3])
      : "r"(a));
#else
  const unsigned long long tile = static_cast<unsigned long long>(a);
  asm volatile(
      "wgmma.fence.sync.aligned;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0, %1, %2, %3}, %4, %4, 1;\n"
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "l"(tile));
#endif
}
