#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

typedef void *handle; /* CUcontext, CUstream, CUgraph, CUgraphExec */

/* X(name without "cu", symbol, parameters) */
#define FUNCTIONS(X)                                                                    \
  X(Init, "cuInit", (unsigned))                                                         \
  X(DeviceGet, "cuDeviceGet", (int *, int))                                             \
  X(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (handle *, int))                      \
  X(CtxSetCurrent, "cuCtxSetCurrent", (handle))                                         \
  X(MemAlloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                    \
  X(MemFree, "cuMemFree_v2", (uint64_t))                                                \
  X(MemcpyHtoD, "cuMemcpyHtoD_v2", (uint64_t, const void *, size_t))                    \
  X(MemcpyDtoH, "cuMemcpyDtoH_v2", (void *, uint64_t, size_t))                          \
  X(StreamCreate, "cuStreamCreate", (handle *, unsigned))                               \
  X(StreamSynchronize, "cuStreamSynchronize", (handle))                                 \
  X(BeginCapture, "cuStreamBeginCapture_v2", (handle, int))                             \
  X(EndCapture, "cuStreamEndCapture", (handle, handle *))                               \
  X(Instantiate, "cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long)) \
  X(GraphLaunch, "cuGraphLaunch", (handle, handle))

#define DECLARE(name, symbol, parameters) static int(*name) parameters;
FUNCTIONS(DECLARE)

static const char *check(const char *function, int result) {
  static char message[64]; /* main calls from one thread */
  if (result == 0) return NULL;
  snprintf(message, sizeof message, "%s: CUDA error %d", function, result);
  return message;
}
#define CALL(name, ...) check(#name, name(__VA_ARGS__))

const char *driver_open(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return dlerror();
#define FIND(name, symbol, parameters)      \
  *(void **)&name = dlsym(library, symbol); \
  if (!name) return "the driver lacks " symbol;
  FUNCTIONS(FIND)
  int device;
  handle context;
  const char *error = CALL(Init, 0);
  if (!error) error = CALL(DeviceGet, &device, 0);
  if (!error) error = CALL(PrimaryCtxRetain, &context, device);
  return error ? error : CALL(CtxSetCurrent, context);
}

const char *driver_allocate(uint64_t *address, size_t size) {
  return CALL(MemAlloc, address, size);
}

const char *driver_free(uint64_t address) { return CALL(MemFree, address); }

const char *driver_upload(uint64_t to, const void *from, size_t size) {
  return CALL(MemcpyHtoD, to, from, size);
}

const char *driver_download(void *to, uint64_t from, size_t size) {
  return CALL(MemcpyDtoH, to, from, size);
}

const char *driver_stream(uintptr_t *stream) {
  return CALL(StreamCreate, (handle *)stream, 0); /* waits for the copies, on the default stream */
}

const char *driver_synchronize(uintptr_t stream) { return CALL(StreamSynchronize, (handle)stream); }

const char *driver_begin_capture(uintptr_t stream) {
  return CALL(BeginCapture, (handle)stream, 2); /* relaxed: other threads may do as they like */
}

const char *driver_end_capture(uintptr_t stream, uintptr_t *exec) {
  handle graph;
  const char *error = CALL(EndCapture, (handle)stream, &graph);
  return error ? error : CALL(Instantiate, (handle *)exec, graph, 0);
}

const char *driver_launch(uintptr_t exec, uintptr_t stream) {
  return CALL(GraphLaunch, (handle)exec, (handle)stream);
}
