// One problem on the GPU against the CPU backend.
//
// What may differ. Codes and integer scores are the same bits on both, so P before it is rounded
// differs by the relative error e of the exponential (its argument is rounded in fp32: |score| times
// a few 2^-24, and ex2.approx adds 2^-22). P is then rounded to a format of relative step u; where
// the two fall on different sides of a boundary they differ by u. So an output differs by at most
// (e + u) sum p |v|, and, since a boundary lies between the two with probability 2 e / u only, in
// root mean square over many rows by about sqrt(2 e u) of it. Added to both: how the tensor core
// accumulates, where the model is an assumption, and the rounding of the output, alike.
#pragma once

#include <cstdint>
#include <string>

#include "tests/gpu/run.h"

namespace sageattn_test {

// Differences relative to what is allowed.
struct Worst {
  double hard = 0, rms = 0, lse = 0;
  void take(const Worst& other);
};

struct CaseReport {
  enum { kPassed, kFailed, kSkipped } verdict = kPassed;
  std::string message;
  Worst worst;
  int64_t codes = 0;  // values of the workspace that were compared bit by bit
  Outcome gpu;
};

CaseReport check_case(const Gpu& gpu, const Problem& problem, const Numerics& numerics,
                      const Data& data, const Lengths& hostile = {});

}  // namespace sageattn_test
