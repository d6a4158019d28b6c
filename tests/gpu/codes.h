// What a GPU execute left in its workspace, bit by bit, against the quantization of the CPU backend.
#pragma once

#include <cstdint>
#include <string>

#include "tests/gpu/run.h"

namespace sageattn_test {

struct CodesReport {
  std::string message;   // the first difference, or empty
  int64_t compared = 0;  // values, padding included
};

// The lengths that the kernels resolved; codes, scales and means of Q, K and V, with the zeros that
// pad codes to whole rows and channels. EXACT: the inputs as they are. `gpu` holds the workspace of an
// execute of `plan`; `cpu_plan` has the same numerics. Nothing is compared where there is nothing:
// of sequences without keys or with nonsense lengths.
CodesReport compare_codes(const Problem& problem, const Buffers& buffers, const PlanResult& plan,
                          Outcome& gpu, const PlanResult& cpu_plan);

}  // namespace sageattn_test
