// A plan: a checked and resolved desc, and what it takes to run it. Immutable.
#pragma once

#include <cstddef>
#include <optional>

#include "include/sageattn.h"
#include "src/core/config.h"
#include "src/core/context.h"
#include "src/cuda/backend.h"

namespace sageattn {

// A desc as the context would plan it: what sageattn_plan_query needs, without making a plan.
struct PlanSpec {
  PlanConfig config;
  sageattn_plan_info info;
};
PlanSpec specify_plan(const Context& context, const sageattn_attn_desc& desc);

class Plan {
 public:
  static Plan* create(Context& context, const sageattn_attn_desc& desc);
  void destroy();

  const sageattn_plan_info& info() const { return spec_.info; }
  // Null with the CPU backend.
  const cuda::Program* program() const { return program_ ? &*program_ : nullptr; }
  Context& context() const { return context_; }
  void execute(const sageattn_execute_args& args, void* workspace, size_t workspace_size,
               CUstream_st* stream, cuda::Observer* observer = nullptr) const;

 private:
  friend HostMemory;
  Plan(Context& context, const PlanSpec& spec);
  ~Plan() = default;

  Context& context_;  // holds a reference
  PlanSpec spec_;
  std::optional<cuda::Program> program_;  // BACKEND_CUDA
};

}  // namespace sageattn
