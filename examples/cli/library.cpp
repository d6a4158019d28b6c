#include "library.h"

#include "src/core/plan.h"

namespace sageattn_cli {
namespace {

std::string describe(int32_t status, const sageattn_error& error) {
  return std::string(error.message) + " (" + sageattn_status_name(status) + ")";
}

}  // namespace

LibraryFailure::LibraryFailure(int32_t status, const sageattn_error& error)
    : Failure(status == SAGEATTN_E_SELFTEST ? kFailed : kLibraryError, describe(status, error)),
      status_(status) {}

Context::Context(const sageattn_context_desc& desc) : device_(desc.device) {
  sageattn_context* context = nullptr;
  check([&](sageattn_error* error) { return sageattn_context_create(&desc, &context, error); });
  handle_.reset(context);
}

std::string Context::report() const {
  size_t size = 0;
  // The size is what this call is for, so a buffer too small is its success.
  sageattn_context_report(handle(), nullptr, 0, &size, nullptr);
  std::string text(size, '\0');
  check([&](sageattn_error* error) {
    return sageattn_context_report(handle(), text.data(), text.size(), &size, error);
  });
  return text.c_str();
}

sageattn_plan_info Context::query(const sageattn_attn_desc& desc) const {
  auto info = sized<sageattn_plan_info>();
  check([&](sageattn_error* error) { return sageattn_plan_query(handle(), &desc, &info, error); });
  return info;
}

void Context::selftest() const {
  check([&](sageattn_error* error) { return sageattn_selftest(handle(), error); });
}

std::vector<std::byte> Context::export_blob() const {
  size_t size = 0;
  sageattn_context_export_blob(handle(), nullptr, 0, &size, nullptr);  // as in report()
  std::vector<std::byte> blob(size);
  check([&](sageattn_error* error) {
    return sageattn_context_export_blob(handle(), blob.data(), blob.size(), &size, error);
  });
  return blob;
}

Plan::Plan(const Context& context, const sageattn_attn_desc& desc)
    : info_(sized<sageattn_plan_info>()) {
  sageattn_plan* plan = nullptr;
  check([&](sageattn_error* error) {
    return sageattn_plan_create(context.handle(), &desc, &plan, error);
  });
  handle_.reset(plan);
  check([&](sageattn_error* error) { return sageattn_plan_get_info(plan, &info_, error); });

  const auto alignment = static_cast<size_t>(info_.workspace_alignment);
  const auto size = static_cast<size_t>(info_.preferred_workspace);
  if (info_.backend == SAGEATTN_BACKEND_CUDA) {
    device_ = std::make_unique<Device>(context.device());
    workspace_ = device_->allocate(size);
    return;
  }
  memory_.resize(size + alignment);
  size_t available = memory_.size();
  workspace_ = memory_.data();
  std::align(alignment, size, workspace_, available);
}

void Plan::execute(const sageattn_execute_args& args) {
  const auto size = static_cast<size_t>(info_.preferred_workspace);
  check([&](sageattn_error* error) {
    return sageattn_execute(handle_.get(), &args, workspace_, size, nullptr, error);
  });
  if (device_) device_->wait();
}

void Plan::enqueue(const sageattn_execute_args& args, CUstream_st* stream,
                   sageattn::cuda::Observer* observer) {
  const auto size = static_cast<size_t>(info_.preferred_workspace);
  guarded([&] {
    reinterpret_cast<const sageattn::Plan*>(handle_.get())
        ->execute(args, workspace_, size, stream, observer);
  });
}

}  // namespace sageattn_cli
