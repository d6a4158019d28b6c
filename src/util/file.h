// Files through descriptors. Functions return false and leave the reason in errno.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace sageattn {

using Bytes = std::vector<uint8_t>;

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

bool write_all(int fd, const void* data, size_t size);

// From the current position to the end; EFBIG if that is more than `limit` bytes.
bool read_all(int fd, size_t limit, Bytes& bytes);

// Makes `path` and whatever is missing above it, readable by nobody else.
bool make_folders(const std::string& path);

// Names in a folder, sorted; none if it cannot be read.
std::vector<std::string> list_folder(const std::string& path);

// What errno = `code` means, without the data races of strerror.
std::string error_text(int code);

}  // namespace sageattn
