// The CPU backend: the specification of the numerics (docs/numerics.md), on host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/core/config.h"
#include "src/cpu/pool.h"

namespace sageattn::cpu {

// Alignment that execute needs of its workspace, in bytes.
inline constexpr int32_t kWorkspaceAlignment = 64;

// Workspace bytes for any execute of this plan by at most `threads` threads; -1 if the size does
// not fit in an int64.
int64_t workspace_bytes(const PlanConfig& plan, int threads);

// Runs one checked launch on the pool and the calling thread. Does not allocate.
void execute(const PlanConfig& plan, const Launch& launch, Pool& pool);

// Instruction set in use: "avx512", "avx2" or "generic".
const char* isa_name();

}  // namespace sageattn::cpu
