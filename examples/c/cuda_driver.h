/* The few functions of the CUDA driver that the examples call, declared by hand and found at run
 * time: no CUDA header or library is needed to build them. Real programs include <cuda.h>, or use
 * the runtime API: a cudaStream_t is a CUstream. Needs POSIX for dlopen. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct CUstream_st *CUstream;
typedef uint64_t CUdeviceptr;

/* Symbols carry the version of their ABI: cuda.h makes cuMemAlloc cuMemAlloc_v2, and so on. */
#define CUDA_FUNCTIONS(F)                                                       \
  F(cuInit, (unsigned int flags))                                               \
  F(cuGetErrorString, (int result, const char **text))                          \
  F(cuDevicePrimaryCtxRetain, (void **context, int device))                     \
  F(cuCtxSetCurrent, (void *context))                                           \
  F(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                       \
  F(cuMemFree_v2, (CUdeviceptr address))                                        \
  F(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t, CUstream)) \
  F(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t, CUstream))       \
  F(cuStreamCreate, (CUstream * stream, unsigned int flags))                    \
  F(cuStreamDestroy_v2, (CUstream stream))                                      \
  F(cuStreamSynchronize, (CUstream stream))                                     \
  F(cuStreamBeginCapture_v2, (CUstream stream, int mode))                       \
  F(cuStreamEndCapture, (CUstream stream, void **graph))                        \
  F(cuGraphInstantiateWithFlags, (void **executable, void *graph, uint64_t))    \
  F(cuGraphLaunch, (void *executable, CUstream stream))                         \
  F(cuGraphExecDestroy, (void *executable))                                     \
  F(cuGraphDestroy, (void *graph))

#define F(name, arguments) static int(*name) arguments;
CUDA_FUNCTIONS(F)
#undef F

/* Ends the program if a call of the driver failed. */
static void cuda(int result) {
  const char *text = NULL;
  if (result == 0) return;
  cuGetErrorString(result, &text);
  fprintf(stderr, "CUDA error %d: %s\n", result, text ? text : "unknown");
  exit(EXIT_FAILURE);
}

/* Makes the primary context of device 0, which libsageattn uses as well, the thread's. */
static void cuda_open(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *symbol, *context;
#define F(name, arguments)                                             \
  symbol = library ? dlsym(library, #name) : NULL;                     \
  if (!symbol) fprintf(stderr, "%s\n", dlerror()), exit(EXIT_FAILURE); \
  memcpy(&name, &symbol, sizeof name);
  CUDA_FUNCTIONS(F)
#undef F
  cuda(cuInit(0));
  cuda(cuDevicePrimaryCtxRetain(&context, 0));
  cuda(cuCtxSetCurrent(context));
}

/* Device memory, as the pointer that libsageattn takes. */
static void *cuda_allocate(size_t bytes) {
  CUdeviceptr address;
  cuda(cuMemAlloc_v2(&address, bytes));
  return (void *)(uintptr_t)address;
}

static void cuda_free(void *memory) { cuda(cuMemFree_v2((uintptr_t)memory)); }

static void cuda_upload(void *to, const void *from, size_t bytes, CUstream stream) {
  cuda(cuMemcpyHtoDAsync_v2((uintptr_t)to, from, bytes, stream));
}

static void cuda_download(void *to, const void *from, size_t bytes, CUstream stream) {
  cuda(cuMemcpyDtoHAsync_v2(to, (uintptr_t)from, bytes, stream));
  cuda(cuStreamSynchronize(stream));
}

#endif
