// The memory of a GPU, through the table of driver functions that the library's self-test uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sageattn_cli {

// A GPU whose context is the thread's while this lives. Throws LibraryFailure.
class Device {
 public:
  explicit Device(int32_t ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Addresses on the device, of memory that lives as long as this.
  void* allocate(size_t bytes);
  void* copy_of(const void* data, size_t bytes);

  // The address is of `allocate`.
  void write(void* address, size_t offset, const void* data, size_t bytes);
  void read(const void* address, void* to, size_t bytes) const;
  void wait() const;  // for what was enqueued on the default stream

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sageattn_cli
