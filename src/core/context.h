// A context: where objects live, who computes, which arch is meant. Immutable once made, apart from
// its reference count; the pool synchronises itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "include/sageattn.h"
#include "src/cpu/pool.h"
#include "src/cuda/backend.h"
#include "src/jit/store.h"

namespace sageattn {

// The caller's allocator hooks, or the heap.
class HostMemory final : public std::pmr::memory_resource {
 public:
  explicit HostMemory(const sageattn_context_desc& desc)
      : alloc_(desc.alloc), free_(desc.free), user_(desc.allocator_user) {}

  template <class T, class... Arguments>
  T* make(Arguments&&... arguments) {
    void* memory = allocate(sizeof(T), alignof(T));
    try {
      return new (memory) T(std::forward<Arguments>(arguments)...);
    } catch (...) {
      deallocate(memory, sizeof(T), alignof(T));
      throw;
    }
  }

  template <class T>
  void destroy(T* object) {
    object->~T();
    deallocate(object, sizeof(T), alignof(T));
  }

 private:
  void* do_allocate(size_t size, size_t alignment) override;
  void do_deallocate(void* memory, size_t size, size_t alignment) override;
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  void* (*alloc_)(void*, size_t, size_t);
  void (*free_)(void*, void*);
  void* user_;
};

class Context {
 public:
  // The caller holds the one reference.
  static Context* create(const sageattn_context_desc& desc);
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

  int32_t backend() const { return backend_; }
  int32_t arch() const { return arch_; }
  int threads() const { return pool_.threads(); }
  cpu::Pool& pool() { return pool_; }
  // With BACKEND_CUDA only.
  const cuda::Target& target() const { return *target_; }
  jit::KernelStore& store() { return *store_; }
  HostMemory& memory() { return memory_; }
  // Loads NVRTC, if it is there, to say which; so it is first made when it is asked for.
  const std::pmr::string& report();

  [[gnu::format(printf, 3, 4)]] void log(int32_t level, const char* format, ...) const;

 private:
  friend HostMemory;
  explicit Context(const sageattn_context_desc& desc);
  ~Context() = default;

  HostMemory memory_;
  std::atomic<int64_t> references_{1};
  void (*const log_)(void*, int32_t, const char*);
  void* const log_user_;
  std::string cuda_reason_;                   // why there is no CUDA backend, for the report
  const std::optional<cuda::Target> target_;  // BACKEND_CUDA
  const int32_t backend_;
  const int32_t arch_;
  const bool looked_for_cuda_;
  std::optional<jit::KernelStore> store_;  // BACKEND_CUDA
  cpu::Pool pool_;
  std::string nvrtc_path_;
  std::once_flag reported_;
  std::pmr::string report_;
};

}  // namespace sageattn
