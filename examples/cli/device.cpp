#include "device.h"

#include <map>
#include <utility>

#include "library.h"
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#include "src/cuda/memory.h"

namespace sageattn_cli {
namespace {

namespace cuda = sageattn::cuda;

}  // namespace

struct Device::State {
  explicit State(int32_t ordinal) : current(api, cuda::open_device(ordinal)) {}

  const cuda::Driver& api = cuda::driver();
  cuda::CurrentContext current;
  std::map<const void*, cuda::DeviceMemory> memory;  // by address; freed before the context goes
};

Device::Device(int32_t ordinal)
    : state_(guarded([&] { return std::make_unique<State>(ordinal); })) {}

Device::~Device() = default;

void* Device::allocate(size_t bytes) {
  return guarded([&] {
    cuda::DeviceMemory memory(state_->api, bytes);
    void* const address = memory.as<void>();
    state_->memory.emplace(address, std::move(memory));
    return address;
  });
}

void* Device::copy_of(const void* data, size_t bytes) {
  void* const address = allocate(bytes);
  write(address, 0, data, bytes);
  return address;
}

void Device::write(void* address, size_t offset, const void* data, size_t bytes) {
  guarded([&] { state_->memory.at(address).upload(data, bytes, offset); });
}

void Device::read(const void* address, void* to, size_t bytes) const {
  guarded([&] { state_->memory.at(address).download(to, bytes); });
}

void Device::wait() const {
  guarded([&] {
    cuda::check(state_->api, state_->api.StreamSynchronize(nullptr), "cuStreamSynchronize");
  });
}

}  // namespace sageattn_cli
