// The library's handles as C++ objects. A status other than SAGEATTN_OK becomes LibraryFailure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "failure.h"
#include "sageattn.h"
#include "src/core/error.h"

namespace sageattn::cuda {
class Observer;
}

namespace sageattn_cli {

class LibraryFailure : public Failure {
 public:
  LibraryFailure(int32_t status, const sageattn_error& error);
  int32_t status() const { return status_; }

 private:
  int32_t status_;
};

// Zeros, with struct_size set.
template <typename Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

// check([&](sageattn_error* error) { return sageattn_...(..., error); })
template <typename Call>
void check(Call call) {
  auto error = sized<sageattn_error>();
  const int32_t status = call(&error);
  if (status != SAGEATTN_OK) throw LibraryFailure(status, error);
}

// What a call into the library's insides returns; what it throws becomes a LibraryFailure.
template <typename Call>
auto guarded(Call call) {
  try {
    return call();
  } catch (const sageattn::Error& failure) {
    auto error = sized<sageattn_error>();
    error.status = failure.status;
    std::copy(std::begin(failure.message), std::end(failure.message), error.message);
    throw LibraryFailure(failure.status, error);
  }
}

class Context {
 public:
  explicit Context(const sageattn_context_desc& desc);

  std::string report() const;  // lines "key: value"
  sageattn_plan_info query(const sageattn_attn_desc& desc) const;
  void selftest() const;
  std::vector<std::byte> export_blob() const;
  sageattn_context* handle() const { return handle_.get(); }
  int32_t device() const { return device_; }

 private:
  struct Destroy {
    void operator()(sageattn_context* context) const { sageattn_context_destroy(context); }
  };
  std::unique_ptr<sageattn_context, Destroy> handle_;
  int32_t device_;
};

// A plan with the workspace of one execute, in host memory or, with the CUDA backend, on a device.
class Plan {
 public:
  Plan(const Context& context, const sageattn_attn_desc& desc);

  const sageattn_plan_info& info() const { return info_; }
  const sageattn_plan* handle() const { return handle_.get(); }
  Device* device() const { return device_.get(); }  // where operands must be; null: host memory
  void execute(const sageattn_execute_args& args);  // returns when it is done
  // With the CUDA backend. Returns when it is enqueued; `observer`, if any, sees each launch.
  void enqueue(const sageattn_execute_args& args, CUstream_st* stream,
               sageattn::cuda::Observer* observer = nullptr);

 private:
  struct Destroy {
    void operator()(sageattn_plan* plan) const { sageattn_plan_destroy(plan); }
  };
  std::unique_ptr<sageattn_plan, Destroy> handle_;
  sageattn_plan_info info_;
  std::unique_ptr<Device> device_;
  std::vector<std::byte> memory_;
  void* workspace_;  // in memory_, aligned, or on the device
};

}  // namespace sageattn_cli
