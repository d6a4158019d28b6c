// One problem on the GPU against the CPU backend.
//
// What may differ. Codes and integer scores are the same bits on both, so P before it is rounded
// differs by the relative error e of the exponential (its argument is rounded in fp32: |score| times
// a few 2^-24, and ex2.approx adds 2^-22). P is then rounded to a format of relative step u; where
// the two fall on different sides of a boundary they differ by u. An output is the mean of V (its
// codes, with what smoothing took out) weighted with P: sum p v / sum p. Numerator and row sum
// differ by at most e + u, so an output by at most 2 (e + u) M, where M = sum p |v| / sum p. Since a
// boundary lies between the two with probability 2 e / u only, the difference is in root mean square
// over many rows about sqrt(2 e u) M. Added to both: how the tensor core accumulates, where the model
// is an assumption, and the rounding of the output, alike.
//
// M is that of the rounded P, which with INT4 and outliers is far from the P of exact attention: it
// is what the CPU backend puts out for |V|, with the same plan but V unsmoothed.
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
