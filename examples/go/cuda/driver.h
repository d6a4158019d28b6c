/* Entry points of libcuda.so.1, found at run time. Each function returns NULL or what went wrong. */
#include <stddef.h>
#include <stdint.h>

const char *driver_open(void); /* on the first device, in its primary context */
const char *driver_allocate(uint64_t *address, size_t size);
const char *driver_free(uint64_t address);
const char *driver_upload(uint64_t to, const void *from, size_t size);
const char *driver_download(void *to, uint64_t from, size_t size);
const char *driver_stream(uintptr_t *stream);
const char *driver_synchronize(uintptr_t stream);
const char *driver_begin_capture(uintptr_t stream);
const char *driver_end_capture(uintptr_t stream, uintptr_t *exec);
const char *driver_launch(uintptr_t exec, uintptr_t stream);
