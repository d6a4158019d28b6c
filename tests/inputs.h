// The eight accuracy inputs, generated without Python.
//
// Each kind stresses one weakness of quantized attention. The values equal, bit for bit, what
// NumPy 2 gives for the definitions in goldens/make_input_hashes.py; goldens/inputs.json holds a
// hash of every default case. Compile with -ffp-contract=off: a fused multiply-add changes values.
#pragma once

#include <vector>

namespace sageattn_test {

struct Inputs {
  int heads, s, d;
  std::vector<float> q, k, v;  // [heads][s][d], every value already rounded to bf16
};

// In order: normal, outlier_elements, outlier_channels, biased_v, peaked, v_channels, sink, drift.
extern const char* const kInputKinds[8];

// `kind` indexes kInputKinds. Throws std::invalid_argument for an unknown kind, for a size that is
// not positive and for an odd d with "drift" (which pairs its channels).
Inputs make_inputs(int kind, int d, int heads = 8, int s = 4096);

}  // namespace sageattn_test
