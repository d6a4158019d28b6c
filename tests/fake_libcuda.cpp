// A CUDA driver without a GPU: two devices whose kernels do nothing. It checks what it is called
// with, so that launches can be tested anywhere. Built as libcuda.so.1; the environment variables
// FAKE_CUDA_VERSION (e.g. 11040), FAKE_CUDA_CC (e.g. 89), FAKE_CUDA_DEVICES, FAKE_CUDA_NAME and
// FAKE_CUDA_MISSING (a symbol, or "all" as in a toolkit's stub) change what it pretends to be;
// FAKE_CUDA_MEMORY is how many allocations succeed, FAKE_CUDA_PAGEABLE=1 lets devices access all host
// memory. fake_cuda_memory() says what other memory is.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

using Result = int;

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// The contexts of the thread; the handles are small numbers.
thread_local std::vector<void*> stack;
void* handle(uintptr_t value) { return reinterpret_cast<void*>(value); }

struct Counts {
  int launches, modules, pushes, pops, attribute_queries, max_dynamic_shared;
  unsigned last_grid, last_block, last_shared;
  void* last_stream;
  int allocations, streams;  // that are held
  unsigned dependents;       // a bit for each launch, 1: as dependent; the last is the lowest
  int pointer_queries;
} counts;
// Memory by its start. What is not in it is host memory that the driver knows nothing of.
enum MemoryKind { kDevice, kPeer, kMapped, kPinned, kManaged, kDisjoint };
struct Memory {
  size_t bytes;
  int kind, device;
};
std::map<uintptr_t, Memory> memories;
std::mutex mutex;  // of both: any thread may call

struct LaunchAttribute {
  int id;
  alignas(8) int value;
  char pad[60];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

Result init(unsigned) { return number("FAKE_CUDA_DEVICES", 2) == 0 ? 100 : 0; }
Result driver_version(int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return 0;
}
Result error_name(Result error, const char** text) {
  *text = error == 100   ? "CUDA_ERROR_NO_DEVICE"
          : error == 400 ? "CUDA_ERROR_INVALID_HANDLE"
                         : nullptr;
  return *text != nullptr ? 0 : 1;
}
Result error_string(Result error, const char** text) {
  *text = error == 400   ? "invalid resource handle"
          : error == 100 ? "no CUDA-capable device is detected"
                         : "something else";
  return 0;
}
Result device_count(int* count) {
  *count = number("FAKE_CUDA_DEVICES", 2);
  return 0;
}
Result device_get(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
Result device_name(char* name, int size, int device) {
  const char* wanted = std::getenv("FAKE_CUDA_NAME");
  if (wanted != nullptr) {
    std::snprintf(name, static_cast<size_t>(size), "%s", wanted);
  } else {
    std::snprintf(name, static_cast<size_t>(size), "Fake GPU %d", device);
  }
  return 0;
}
Result device_attribute(int* value, int attribute, int) {
  const int cc = number("FAKE_CUDA_CC", 90);
  *value = attribute == 75   ? cc / 10
           : attribute == 76 ? cc % 10
           : attribute == 16 ? 132
           : attribute == 97 ? 232448
           : attribute == 13 ? 1980000
           : attribute == 38 ? 1 << 20
           : attribute == 88 ? number("FAKE_CUDA_PAGEABLE", 0)
                             : 0;
  return 0;
}
Result primary_retain(void** context, int device) {
  *context = handle(0x1000 + static_cast<uintptr_t>(device));
  return 0;
}
Result push(void* context) {
  const std::lock_guard lock(mutex);
  ++counts.pushes;
  stack.push_back(context);
  return 0;
}
Result pop(void** context) {
  const std::lock_guard lock(mutex);
  if (stack.empty()) return 201;
  ++counts.pops;
  *context = stack.back();
  stack.pop_back();
  return 0;
}
Result current(void** context) {
  *context = stack.empty() ? nullptr : stack.back();
  return 0;
}
Result module_load(void** module, const void* image) {
  const std::lock_guard lock(mutex);
  if (stack.empty()) return 201;
  if (std::memcmp(image,
                  "\x7f"
                  "ELF",
                  4) != 0) {
    return 200;
  }
  *module = handle(0x2000 + static_cast<uintptr_t>(++counts.modules));
  return 0;
}
Result module_function(void** function, void* module, const char*) {
  *function = module;
  return 0;
}
Result function_attribute(int* value, int attribute, void*) {
  const std::lock_guard lock(mutex);
  ++counts.attribute_queries;
  *value = attribute == 0 ? 1024 : attribute == 4 ? 128 : 0;
  return 0;
}
Result set_function_attribute(void*, int attribute, int value) {
  const std::lock_guard lock(mutex);
  if (attribute == 8) counts.max_dynamic_shared = value;
  return 0;
}
Result launch(const LaunchConfig* config, void* function, void** parameters, void**) {
  const std::lock_guard lock(mutex);
  if (stack.empty()) return 201;
  if (function == nullptr || parameters == nullptr || parameters[0] == nullptr) return 1;
  if (config->grid[0] == 0 || config->block[0] == 0) return 1;
  if (config->stream == handle(0xBAD)) return 400;
  const bool dependent = config->num_attributes != 0;
  // Programmatic stream serialization, allowed: nothing else is known.
  if (dependent && (config->num_attributes != 1 || config->attributes[0].id != 6 ||
                    config->attributes[0].value != 1)) {
    return 1;
  }
  ++counts.launches;
  counts.dependents = counts.dependents << 1 | (dependent ? 1 : 0);
  counts.last_grid = config->grid[0];
  counts.last_block = config->block[0];
  counts.last_shared = config->shared;
  counts.last_stream = config->stream;
  return 0;
}
// Device memory is host memory, and streams are always done.
Result allocate(unsigned long long* pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (stack.empty()) return 201;
  if (counts.allocations >= number("FAKE_CUDA_MEMORY", 1 << 30)) return 2;
  ++counts.allocations;
  *pointer = reinterpret_cast<uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  const auto device = static_cast<int>(reinterpret_cast<uintptr_t>(stack.back()) - 0x1000);
  memories[*pointer] = {bytes, kDevice, device};
  return *pointer != 0 ? 0 : 2;
}
Result release(unsigned long long pointer) {
  const std::lock_guard lock(mutex);
  --counts.allocations;
  memories.erase(pointer);
  std::free(reinterpret_cast<void*>(pointer));
  return 0;
}
// What the driver says of a pointer, by attribute: memory type, addresses on the device and the host,
// managed, ordinal, access flags.
Result pointer_attribute(void* value, int attribute, unsigned long long pointer) {
  const auto after = memories.upper_bound(pointer);
  const auto found = after == memories.begin() ? memories.end() : std::prev(after);
  const bool known = found != memories.end() && pointer < found->first + found->second.bytes;
  const Memory memory = known ? found->second : Memory{};
  const bool on_device = known && memory.kind != kPinned && memory.kind != kDisjoint;
  const bool own =
      !stack.empty() && stack.back() == handle(0x1000 + static_cast<uintptr_t>(memory.device));
  const unsigned type = !known ? 0 : on_device ? 2 : 1;
  switch (attribute) {
    case 2:
      std::memcpy(value, &type, sizeof type);
      return 0;
    case 9:
      std::memcpy(value, &memory.device, sizeof memory.device);
      return 0;
    case 4: {
      const uintptr_t address = known && (!on_device || memory.kind == kManaged) ? pointer : 0;
      std::memcpy(value, &address, sizeof address);
      return 0;
    }
    case 3: {
      if (stack.empty()) return 201;
      const bool reachable = known && (memory.kind == kDevice ? own : memory.kind != kMapped);
      const uintptr_t address = !reachable                 ? 0
                                : memory.kind == kDisjoint ? pointer + 0x100000
                                                           : pointer;
      std::memcpy(value, &address, sizeof address);
      return 0;
    }
    case 16: {
      const unsigned access = memory.kind == kMapped ? 3 : 0;
      std::memcpy(value, &access, sizeof access);
      return known ? 0 : 1;
    }
    default:
      return 1;
  }
}
Result pointer_attributes(unsigned count, const int* attributes, void** values,
                          unsigned long long pointer) {
  const std::lock_guard lock(mutex);
  ++counts.pointer_queries;
  Result result = 0;
  for (unsigned i = 0; i < count && result == 0; ++i) {
    result = pointer_attribute(values[i], attributes[i], pointer);
  }
  return result;
}
Result one_pointer_attribute(void* value, int attribute, unsigned long long pointer) {
  return pointer_attributes(1, &attribute, &value, pointer);
}
Result copy_in(unsigned long long to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
Result copy_out(void* to, unsigned long long from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}
Result fill(unsigned long long to, unsigned char value, size_t bytes) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
Result create(void** object, unsigned) {
  *object = handle(0x3000);
  return 0;
}
Result nothing(void*) { return 0; }
Result create_stream(void** stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  ++counts.streams;
  return create(stream, flags);
}
Result destroy_stream(void*) {
  const std::lock_guard lock(mutex);
  --counts.streams;
  return 0;
}
Result elapsed(float* ms, void*, void*) {
  *ms = 1;
  return 0;
}
Result record(void*, void*) { return 0; }
Result unused() { return 801; }

struct Symbol {
  const char* name;
  void* address;
};

template <class F>
Symbol symbol(const char* name, F* function) {
  return {name, reinterpret_cast<void*>(function)};
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) Result cuGetProcAddress_v2(const char* name, void** address,
                                                                  int version, uint64_t flags,
                                                                  int* status) {
  static const Symbol symbols[] = {symbol("cuInit", init),
                                   symbol("cuDriverGetVersion", driver_version),
                                   symbol("cuGetErrorName", error_name),
                                   symbol("cuGetErrorString", error_string),
                                   symbol("cuDeviceGetCount", device_count),
                                   symbol("cuDeviceGet", device_get),
                                   symbol("cuDeviceGetName", device_name),
                                   symbol("cuDeviceGetAttribute", device_attribute),
                                   symbol("cuDevicePrimaryCtxRetain", primary_retain),
                                   symbol("cuCtxPushCurrent", push),
                                   symbol("cuCtxPopCurrent", pop),
                                   symbol("cuCtxGetCurrent", current),
                                   symbol("cuModuleLoadData", module_load),
                                   symbol("cuModuleGetFunction", module_function),
                                   symbol("cuFuncGetAttribute", function_attribute),
                                   symbol("cuFuncSetAttribute", set_function_attribute),
                                   symbol("cuLaunchKernelEx", launch),
                                   symbol("cuPointerGetAttributes", pointer_attributes),
                                   symbol("cuPointerGetAttribute", one_pointer_attribute),
                                   symbol("cuMemAlloc", allocate),
                                   symbol("cuMemFree", release),
                                   symbol("cuMemcpyHtoD", copy_in),
                                   symbol("cuMemcpyDtoH", copy_out),
                                   symbol("cuMemsetD8", fill),
                                   symbol("cuStreamCreate", create_stream),
                                   symbol("cuStreamDestroy", destroy_stream),
                                   symbol("cuStreamSynchronize", nothing),
                                   symbol("cuEventCreate", create),
                                   symbol("cuEventDestroy", nothing),
                                   symbol("cuEventSynchronize", nothing),
                                   symbol("cuEventRecord", record),
                                   symbol("cuEventElapsedTime", elapsed)};
  *address = nullptr;
  *status = 1;
  if (version < 2000 || flags != 1) return 1;
  const char* missing = std::getenv("FAKE_CUDA_MISSING");
  if (missing != nullptr && std::strcmp(missing, name) == 0) return 0;
  if (missing != nullptr && std::strcmp(missing, "all") == 0) return 34;  // STUB_LIBRARY
  *address = reinterpret_cast<void*>(unused);
  for (const Symbol& s : symbols) {
    if (std::strcmp(s.name, name) == 0) *address = s.address;
  }
  *status = 0;
  return 0;
}

// For tests, through dlsym.
__attribute__((visibility("default"))) void fake_cuda_counts(void* to) {
  const std::lock_guard lock(mutex);
  std::memcpy(to, &counts, sizeof counts);
}
// Memory that is not from cuMemAlloc. kind: of MemoryKind, -1 to forget it.
__attribute__((visibility("default"))) void fake_cuda_memory(const void* start, size_t bytes,
                                                             int kind, int device) {
  const std::lock_guard lock(mutex);
  memories.erase(reinterpret_cast<uintptr_t>(start));
  if (kind >= 0) memories[reinterpret_cast<uintptr_t>(start)] = {bytes, kind, device};
}
}
