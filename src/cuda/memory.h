// Device memory, streams and events of the self-test, the tests and the program: an execute uses none.
#pragma once

#include <cstddef>
#include <utility>

#include "src/cuda/driver.h"

namespace sageattn::cuda {

// Memory of the current context. What is copied or filled is there when the call returns, also for
// streams that do not wait for the default one.
class DeviceMemory {
 public:
  DeviceMemory(const Driver& api, size_t bytes) : api_(&api), bytes_(bytes) {
    // An empty tensor has an address, too.
    check(api, api.MemAlloc(&pointer_, bytes != 0 ? bytes : 1), "cuMemAlloc(%zu)", bytes);
  }
  // A copy of anything contiguous.
  template <class Content>
  static DeviceMemory copy_of(const Driver& api, const Content& content) {
    DeviceMemory memory(api, content.size() * sizeof content.data()[0]);
    memory.upload(content.data(), memory.size());
    return memory;
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : api_(other.api_), bytes_(other.bytes_), pointer_(std::exchange(other.pointer_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory() {
    if (pointer_ != 0) api_->MemFree(pointer_);  // waits for what is using it
  }

  void upload(const void* from, size_t bytes, size_t offset = 0) {
    if (bytes == 0) return;
    check(*api_, api_->MemcpyHtoD(pointer_ + offset, from, bytes), "cuMemcpyHtoD(%zu)", bytes);
    wait();
  }
  void fill(unsigned char value) {
    if (bytes_ == 0) return;
    check(*api_, api_->MemsetD8(pointer_, value, bytes_), "cuMemsetD8(%zu)", bytes_);
    wait();
  }
  void download(void* to, size_t bytes, size_t offset = 0) const {
    if (bytes == 0) return;
    check(*api_, api_->MemcpyDtoH(to, pointer_ + offset, bytes), "cuMemcpyDtoH(%zu)", bytes);
  }

  // An address of the device; T may be void.
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(pointer_);  // NOLINT(performance-no-int-to-ptr)
  }
  unsigned char* data() const { return as<unsigned char>(); }
  size_t size() const { return bytes_; }

 private:
  // A copy from pageable memory and a fill may still be under way when the driver returns.
  void wait() const {
    check(*api_, api_->StreamSynchronize(nullptr), "cuStreamSynchronize(default stream)");
  }

  const Driver* api_;
  size_t bytes_;
  DevicePointer pointer_ = 0;
};

// A stream that does not wait for the default one.
class StreamOwner {
 public:
  explicit StreamOwner(const Driver& api) : api_(api) {
    check(api, api.StreamCreate(&stream_, kStreamNonBlocking), "cuStreamCreate");
  }
  ~StreamOwner() { api_.StreamDestroy(stream_); }
  StreamOwner(const StreamOwner&) = delete;
  StreamOwner& operator=(const StreamOwner&) = delete;

  Stream get() const { return stream_; }
  void wait() const { check(api_, api_.StreamSynchronize(stream_), "cuStreamSynchronize"); }

 private:
  const Driver& api_;
  Stream stream_ = nullptr;
};

// A point in a stream, and the time when it was reached.
class EventOwner {
 public:
  explicit EventOwner(const Driver& api) : api_(&api) {
    check(api, api.EventCreate(&event_, 0), "cuEventCreate");
  }
  EventOwner(EventOwner&& other) noexcept
      : api_(other.api_), event_(std::exchange(other.event_, nullptr)) {}
  EventOwner& operator=(EventOwner&&) = delete;
  ~EventOwner() {
    if (event_ != nullptr) api_->EventDestroy(event_);
  }

  void record(Stream stream) { check(*api_, api_->EventRecord(event_, stream), "cuEventRecord"); }
  void wait() const { check(*api_, api_->EventSynchronize(event_), "cuEventSynchronize"); }
  double ms_since(const EventOwner& start) const {
    float ms = 0;
    check(*api_, api_->EventElapsedTime(&ms, start.event_, event_), "cuEventElapsedTime");
    return static_cast<double>(ms);
  }

 private:
  const Driver* api_;
  Event event_ = nullptr;
};

}  // namespace sageattn::cuda
