// C++17 for sageattn.h: handles that free themselves, and exceptions. Copy it into your program.
//
//   Error      a failed call: status() and, as what(), the library's message
//   Context    sageattn_context, Plan: sageattn_plan; both can be moved. get() is the C handle
//   Workspace  host memory as a plan of the CPU backend wants it; on a GPU, allocate your own
//   sized      a struct of sageattn.h, all zero but for its struct_size
//   preset     a sageattn_attn_desc with a preset's numerics
#pragma once

#include <sageattn.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace sageattn {

class Error : public std::runtime_error {
 public:
  Error(int32_t status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  int32_t status() const noexcept { return status_; }  // SAGEATTN_E_*

 private:
  int32_t status_;
};

template <typename Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof value;
  return value;
}

// Calls function(arguments..., &error), throwing Error unless it returns SAGEATTN_OK.
template <typename Function, typename... Arguments>
void call(Function function, Arguments... arguments) {
  auto error = sized<sageattn_error>();
  const int32_t status = function(arguments..., &error);
  if (status != SAGEATTN_OK) throw Error(status, error.message);
}

inline sageattn_attn_desc preset(int32_t preset) {
  sageattn_attn_desc desc;
  call(sageattn_attn_desc_init, &desc, uint32_t{sizeof desc}, preset);
  return desc;
}

// What a function with the arguments (handle, buffer, capacity, needed, error) writes. The size may
// grow between two calls, when another thread makes plans.
template <typename Bytes, typename Function, typename Handle>
Bytes read_all(Function function, Handle handle) {
  Bytes bytes;
  for (;;) {
    auto error = sized<sageattn_error>();
    std::size_t needed = 0;
    const int32_t status = function(handle, bytes.data(), bytes.size(), &needed, &error);
    if (status == SAGEATTN_OK) return bytes.resize(needed), bytes;
    if (status != SAGEATTN_E_BUFFER_TOO_SMALL) throw Error(status, error.message);
    bytes.resize(needed);
  }
}

class Context {
 public:
  explicit Context(const sageattn_context_desc& desc = sized<sageattn_context_desc>()) {
    sageattn_context* handle = nullptr;
    call(sageattn_context_create, &desc, &handle);
    handle_.reset(handle);
  }

  std::string report() const {
    auto text = read_all<std::string>(sageattn_context_report, get());
    text.pop_back();  // its NUL
    return text;
  }
  void import_blob(const void* data, std::size_t size) {
    call(sageattn_context_import_blob, get(), data, size);
  }
  std::vector<char> export_blob() const {
    return read_all<std::vector<char>>(sageattn_context_export_blob, get());
  }
  void selftest() const { call(sageattn_selftest, get()); }
  sageattn_context* get() const noexcept { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(sageattn_context* handle) const { sageattn_context_destroy(handle); }
  };
  std::unique_ptr<sageattn_context, Destroy> handle_;
};

class Plan {
 public:
  Plan(const Context& context, const sageattn_attn_desc& desc) {
    sageattn_plan* handle = nullptr;
    call(sageattn_plan_create, context.get(), &desc, &handle);
    handle_.reset(handle);
    call(sageattn_plan_get_info, get(), &info_);
  }

  const sageattn_plan_info& info() const noexcept { return info_; }
  std::vector<char> export_blob() const {
    return read_all<std::vector<char>>(sageattn_plan_export_blob, get());
  }
  void execute(const sageattn_execute_args& args, void* workspace, std::size_t size,
               CUstream_st* stream = nullptr) const {
    call(sageattn_execute, get(), &args, workspace, size, stream);
  }
  const sageattn_plan* get() const noexcept { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(sageattn_plan* handle) const { sageattn_plan_destroy(handle); }
  };
  std::unique_ptr<sageattn_plan, Destroy> handle_;
  sageattn_plan_info info_ = sized<sageattn_plan_info>();
};

// Each execute in flight needs one of its own.
class Workspace {
 public:
  explicit Workspace(const Plan& plan)
      : size_(static_cast<std::size_t>(plan.info().preferred_workspace)),
        alignment_{static_cast<std::size_t>(plan.info().workspace_alignment)},
        data_(::operator new(size_, alignment_)) {}
  ~Workspace() { ::operator delete(data_, alignment_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  std::size_t size_;
  std::align_val_t alignment_;
  void* data_;
};

}  // namespace sageattn
