// Device memory and streams for programs that test or time the CUDA backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/cuda/device.h"
#include "src/cuda/driver.h"

namespace sageattn_test {

namespace cuda = sageattn::cuda;

class DeviceMemory {
 public:
  DeviceMemory(const cuda::Driver& api, size_t bytes) : api_(&api), bytes_(bytes) {
    // An empty tensor has an address, too.
    cuda::check(api, api.MemAlloc(&pointer_, bytes != 0 ? bytes : 1), "cuMemAlloc(%zu)", bytes);
  }
  DeviceMemory(const cuda::Driver& api, const std::vector<unsigned char>& content)
      : DeviceMemory(api, content.size()) {
    upload(content.data(), content.size());
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : api_(other.api_), bytes_(other.bytes_), pointer_(std::exchange(other.pointer_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory() {
    if (pointer_ != 0) api_->MemFree(pointer_);
  }

  void upload(const void* from, size_t bytes) {
    if (bytes == 0) return;
    cuda::check(*api_, api_->MemcpyHtoD(pointer_, from, bytes), "cuMemcpyHtoD(%zu)", bytes);
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> content(bytes_);
    if (bytes_ != 0) {
      cuda::check(*api_, api_->MemcpyDtoH(content.data(), pointer_, bytes_), "cuMemcpyDtoH(%zu)",
                  bytes_);
    }
    return content;
  }
  void fill(unsigned char value) {
    if (bytes_ == 0) return;
    cuda::check(*api_, api_->MemsetD8(pointer_, value, bytes_), "cuMemsetD8(%zu)", bytes_);
  }

  unsigned char* data() const { return reinterpret_cast<unsigned char*>(pointer_); }
  size_t size() const { return bytes_; }

 private:
  const cuda::Driver* api_;
  size_t bytes_;
  cuda::DevicePointer pointer_ = 0;
};

class StreamOwner {
 public:
  explicit StreamOwner(const cuda::Driver& api) : api_(api) {
    cuda::check(api, api.StreamCreate(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
  }
  ~StreamOwner() { api_.StreamDestroy(stream_); }
  StreamOwner(const StreamOwner&) = delete;
  StreamOwner& operator=(const StreamOwner&) = delete;

  cuda::Stream get() const { return stream_; }
  void wait() const { cuda::check(api_, api_.StreamSynchronize(stream_), "cuStreamSynchronize"); }

 private:
  const cuda::Driver& api_;
  cuda::Stream stream_ = nullptr;
};

}  // namespace sageattn_test
