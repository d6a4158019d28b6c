// What gpu_check stands on: flags, the library's context on a device, exit codes, and values to fill
// device memory with.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sageattn.h"
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#include "src/cuda/memory.h"

namespace sageattn_test {

namespace cuda = sageattn::cuda;

// --name value and --name. What nobody asks for is an error.
class Flags {
 public:
  Flags(int argc, char** argv) : words_(argv + 1, argv + argc) {}

  bool take(const std::string& name);
  std::vector<std::string> values(const std::string& name);  // one for each time it is given
  std::string value(const std::string& name, const std::string& otherwise);
  int number(const std::string& name, int otherwise);
  void finish() const;

 private:
  std::vector<std::string> words_;
};

// There is no GPU, or what is asked of it does not apply here.
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws the message of a call that failed.
void must(int32_t status, const sageattn_error& error);

struct DestroyContext {
  void operator()(sageattn_context* context) const { sageattn_context_destroy(context); }
};
struct DestroyPlan {
  void operator()(sageattn_plan* plan) const { sageattn_plan_destroy(plan); }
};
using ContextOwner = std::unique_ptr<sageattn_context, DestroyContext>;
using PlanOwner = std::unique_ptr<sageattn_plan, DestroyPlan>;

// A device and a context of the CUDA backend on it. Throws Skipped where there is none.
class Gpu {
 public:
  explicit Gpu(int ordinal);
  sageattn_context* context() const { return context_.get(); }

 private:
  ContextOwner context_;

 public:
  const cuda::Driver& api;
  const cuda::DeviceInfo& device;
};

// Exit code: that of `run`, 77 if it throws Skipped, 2 for any other exception.
int guarded_main(int argc, char** argv, int (*run)(Flags& flags));

// 16-bit values of nearly normal distribution and unit variance, within 2 sqrt(3), repeated with a
// period that is prime: so an address that is wrong by any power of two gives other values.
class Noise {
 public:
  explicit Noise(int32_t dtype);

  // Where up to 256 values from `index` on stand.
  const float* at(int64_t index) const { return &values_[static_cast<size_t>(index % kPeriod)]; }
  const uint16_t* bits(int64_t index) const { return &bits_[static_cast<size_t>(index % kPeriod)]; }
  // The first element of the memory becomes *bits(first).
  void fill(cuda::DeviceMemory& memory, int64_t first = 0) const;

 private:
  static constexpr int64_t kPeriod = 1000003;
  std::vector<float> values_;  // a period, and the start of the next
  std::vector<uint16_t> bits_;
};

}  // namespace sageattn_test
