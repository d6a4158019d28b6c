// Every rule of sageattn.h about arguments. What passes here is safe and meaningful; what does not
// fails with the field, its value and the limit. Structs arrive copied in (src/api/structs.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "include/sageattn.h"
#include "src/core/config.h"

namespace sageattn {

void check_context_desc(const sageattn_context_desc& desc);

// The desc with every default and AUTO resolved, for a backend and an arch that exist.
PlanConfig check_attn_desc(const sageattn_attn_desc& desc, int32_t backend, int32_t arch);

// Workspace an execute must bring.
struct WorkspaceNeed {
  int64_t bytes;
  int32_t alignment;
};

Launch check_execute_args(const PlanConfig& plan, const WorkspaceNeed& need,
                          const sageattn_execute_args& args, void* workspace,
                          size_t workspace_size);

struct Comparison {
  sageattn_compare_args args;
  Strides out_strides, ref_strides;
  std::array<Operand, 2> operands;
};

Comparison check_compare_args(const sageattn_compare_args& args);

}  // namespace sageattn
