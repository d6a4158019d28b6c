// What quantized attention is measured against: plain fp64 attention, and the naive quantized
// attention that the derived bounds take as their unit (docs/testing.md).
#pragma once

#include <cstdint>
#include <vector>

#include "sageattn.h"
#include "tests/literal.h"

namespace sageattn_test {

struct AttentionShape {
  int num_qo_heads = 1, num_kv_heads = 1;
  int head_dim = 1, head_dim_v = 1;
};

struct ExactOutput {
  std::vector<double> out;        // [qo_len][num_qo_heads][head_dim_v]
  std::vector<double> lse;        // [qo_len][num_qo_heads], natural logarithm
  std::vector<double> magnitude;  // as out: the same sum with |v|, for error bounds
};

ExactOutput exact_attention(const AttentionShape& shape, double sm_scale, MaskSpec mask,
                            const LiteralInput& input);

// Naive attention of a plan's precision: Q and K after the plan's smoothing, with as many rows to a
// scale as in the plan, but adjacent ones; V per channel (or group) after the plan's smoothing; P
// in pv_format; everything else in fp64. No rotation, no lane maps, no accumulation model.
ExactOutput plain_attention(const sageattn_plan_info& info, const AttentionShape& shape,
                            MaskSpec mask, const LiteralInput& input);

// What error of a quantized result is allowed, relative to |exact|: twice that of the naive
// implementation (four times below 16 rows), plus the rounding of the output type and of the
// documented accumulator.
double error_bound(const sageattn_plan_info& info, const ExactOutput& exact,
                   const ExactOutput& plain);

// |a - b|_F / |b|_F; 0 if both are zero, infinity if only b is.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);
std::vector<double> widen(const std::vector<float>& x);

}  // namespace sageattn_test
