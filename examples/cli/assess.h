// Which precision suits an attention: what its inputs look like, what each preset is expected to err
// and does err, and what to choose for a target. Knows of no files and prints nothing;
// docs/assess.md has the formulas.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sageattn.h"

namespace sageattn_cli {

class Context;

// One layer, in host memory. Every stride counts as given, and none is negative; the channels are
// adjacent.
struct AssessInput {
  int32_t q_dtype, kv_dtype;  // SAGEATTN_F16, BF16 or F32
  int32_t batch, qo_len, kv_len;
  int32_t num_qo_heads, num_kv_heads;
  int32_t head_dim, head_dim_v;
  int32_t mask;  // SAGEATTN_MASK_NONE or _CAUSAL_BOTTOM_RIGHT
  float sm_scale;
  sageattn_const_tensor q, k, v;
};

struct AssessTarget {
  double max_rel_error = 0.05;
  double min_cos_sim = -1;  // -1: any
};

// One way to compute that is measured: a preset, with V smoothed as it is by default or not.
struct AssessVariant {
  const char* name;
  int32_t preset;
  bool smooth_v_off;
};

std::span<const AssessVariant> assess_variants();

// Whether a preset that is recommended smooths V unless told not to.
bool smooths_v(int32_t preset);

// Of one head of one sequence. Elements that are not finite are counted and left out.
struct ValueStats {
  double min, max, absmax;
  double mean_over_std;  // the largest |mean| / std over tokens of a channel
  double mean_share;     // of the energy, in the means of channels
  double channel_ratio;  // the largest absmax of a channel / their median
  int64_t nonfinite;
};

// Of sampled rows of the softmax.
struct SoftmaxStats {
  double max_probability;  // mean over rows of the largest
  double effective_keys;   // mean over rows of exp(entropy)
  double visible_keys;     // mean over rows
};

struct VariantResult {
  std::string unsupported;  // why the backend cannot run it; else empty
  double predicted;         // relative error; NaN where it cannot be told
  double rel_error, cos_sim;
  int64_t nonfinite;  // outputs
};

struct Recommendation {
  int32_t preset;
  bool smooth_v;
  std::string reason;
};

struct HeadAssessment {
  int32_t batch, head, kv_head;
  ValueStats q, q_smoothed, k, k_smoothed, v;
  SoftmaxStats softmax;
  std::vector<VariantResult> variants;  // as assess_variants()
  Recommendation recommendation;
};

struct Range {
  double min, max;
};

// Of K of one sequence and head, before and after its mean over the keys is subtracted.
struct KeyDistribution {
  int32_t batch, kv_head;
  Range bins;  // of both histograms, in steps of equal width
  std::vector<int64_t> before, after;
  std::vector<Range> channels_before, channels_after;
};

struct LayerAssessment {
  std::vector<HeadAssessment> heads;  // query heads of the first sequence, of the second, ..
  std::vector<KeyDistribution> keys;
  std::vector<VariantResult> variants;  // over all heads; `predicted` is their mean square's root
  Recommendation recommendation;
};

// The largest |mean| / std of a channel from which on V counts as biased.
inline constexpr double kBiasedV = 1;

// `sampled_rows`: queries of each head whose softmax is looked at. `advance`, if any, is called once
// for each variant and once for EXACT. Lengths and heads are at least 1.
LayerAssessment assess(const Context& context, const AssessInput& input, const AssessTarget& target,
                       int32_t sampled_rows, const std::function<void()>& advance = {});

// For heads that are computed by one plan: what is within the target in every one of them. Of more
// than one, the heads' own recommendations are known.
Recommendation recommend(std::span<const HeadAssessment* const> heads, const AssessTarget& target);

}  // namespace sageattn_cli
