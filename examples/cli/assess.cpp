#include "assess.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "half.h"
#include "library.h"
#include "options.h"

namespace sageattn_cli {
namespace {

constexpr AssessVariant kVariants[] = {
    {"sage2_4b", SAGEATTN_PRESET_SAGE2_4B, false},
    {"sage2_8b", SAGEATTN_PRESET_SAGE2_8B, false},
    {"sage2pp", SAGEATTN_PRESET_SAGE2PP, false},
    {"sage1", SAGEATTN_PRESET_SAGE1, false},
    {"sage2_4b, V unsmoothed", SAGEATTN_PRESET_SAGE2_4B, true},
    {"sage2_8b, V unsmoothed", SAGEATTN_PRESET_SAGE2_8B, true},
};
constexpr size_t kVariantCount = std::size(kVariants);

// From the fewest bits to the most. SAGE2PP is another arithmetic for the bits of SAGE2_8B.
constexpr int32_t kLadder[] = {SAGEATTN_PRESET_SAGE2_4B, SAGEATTN_PRESET_SAGE2_8B,
                               SAGEATTN_PRESET_SAGE1, SAGEATTN_PRESET_EXACT};

constexpr int kBins = 48;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Root mean square of the relative error of rounding to `fraction_bits`, the logarithm of what is
// rounded being uniform: 2^-bits / sqrt(12) * sqrt(3 / (8 ln 2)).
double rounding_error(int fraction_bits) { return std::ldexp(0.21234, -fraction_bits); }

// ---- One head in fp32 --------------------------------------------------------------------------

struct Matrix {
  int64_t tokens;
  int32_t channels;
  std::vector<float> values;  // [token, channel]

  const float* row(int64_t token) const { return values.data() + token * channels; }
  float* row(int64_t token) { return values.data() + token * channels; }
};

float read(const void* data, int64_t index, int32_t dtype) {
  if (dtype == SAGEATTN_F32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == SAGEATTN_F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

Matrix matrix_of(const sageattn_const_tensor& from, int32_t dtype, int32_t batch, int32_t head,
                 int64_t tokens, int32_t channels) {
  Matrix to{tokens, channels, std::vector<float>(tokens * channels)};
  const int64_t start = batch * from.stride_batch + head * from.stride_head;
  for (int64_t i = 0; i < tokens; ++i) {
    for (int32_t c = 0; c < channels; ++c) {
      to.row(i)[c] = read(from.data, start + i * from.stride_token + c, dtype);
    }
  }
  return to;
}

double dot(const float* a, const float* b, int32_t channels) {
  double sum = 0;
  for (int32_t c = 0; c < channels; ++c) sum += double{a[c]} * b[c];
  return sum;
}

std::vector<double> squared_norms(const Matrix& x) {
  std::vector<double> norms(x.tokens);
  for (int64_t i = 0; i < x.tokens; ++i) norms[i] = dot(x.row(i), x.row(i), x.channels);
  return norms;
}

// Without the mean of each run of `tile` tokens; 0: as it is.
Matrix smoothed(Matrix x, int64_t tile) {
  if (tile <= 0) return x;
  std::vector<double> mean(x.channels);
  for (int64_t begin = 0; begin < x.tokens; begin += tile) {
    const int64_t end = std::min(begin + tile, x.tokens);
    std::fill(mean.begin(), mean.end(), 0.0);
    for (int64_t i = begin; i < end; ++i) {
      for (int32_t c = 0; c < x.channels; ++c) mean[c] += x.row(i)[c];
    }
    for (int64_t i = begin; i < end; ++i) {
      for (int32_t c = 0; c < x.channels; ++c) {
        x.row(i)[c] -= static_cast<float>(mean[c] / static_cast<double>(end - begin));
      }
    }
  }
  return x;
}

// ---- Statistics --------------------------------------------------------------------------------

std::vector<Range> channel_ranges(const Matrix& x) {
  std::vector<Range> ranges(x.channels, {HUGE_VAL, -HUGE_VAL});
  for (int64_t i = 0; i < x.tokens; ++i) {
    for (int32_t c = 0; c < x.channels; ++c) {
      const double value = x.row(i)[c];
      if (!std::isfinite(value)) continue;
      ranges[c] = {std::min(ranges[c].min, value), std::max(ranges[c].max, value)};
    }
  }
  for (Range& range : ranges) {
    if (range.min > range.max) range = {0, 0};
  }
  return ranges;
}

double absmax(const Range& range) { return std::max(std::abs(range.min), std::abs(range.max)); }

// As a ratio of nothing to nothing is none: 0.
double ratio(double one, double other) { return one == 0 ? 0 : one / other; }

ValueStats stats_of(const Matrix& x) {
  ValueStats stats{};
  double mean_energy = 0, energy = 0;
  for (int32_t c = 0; c < x.channels; ++c) {
    double count = 0, sum = 0, squares = 0;
    for (int64_t i = 0; i < x.tokens; ++i) {
      const double value = x.row(i)[c];
      if (!std::isfinite(value)) {
        ++stats.nonfinite;
        continue;
      }
      ++count, sum += value, squares += value * value;
    }
    if (count == 0) continue;
    const double mean = sum / count;
    double deviation = 0;  // in a pass of its own: the difference of squares would cancel
    for (int64_t i = 0; i < x.tokens; ++i) {
      const double value = x.row(i)[c];
      if (std::isfinite(value)) deviation += (value - mean) * (value - mean);
    }
    stats.mean_over_std =
        std::max(stats.mean_over_std, ratio(std::abs(mean), std::sqrt(deviation / count)));
    mean_energy += mean * mean;
    energy += squares / count;
  }
  stats.mean_share = ratio(mean_energy, energy);

  const std::vector<Range> ranges = channel_ranges(x);
  stats.min = ranges[0].min;
  stats.max = ranges[0].max;
  std::vector<double> largest;
  for (const Range& range : ranges) {
    stats.min = std::min(stats.min, range.min);
    stats.max = std::max(stats.max, range.max);
    largest.push_back(absmax(range));
  }
  stats.absmax = absmax({stats.min, stats.max});
  const auto median = largest.begin() + static_cast<std::ptrdiff_t>(largest.size() / 2);
  std::nth_element(largest.begin(), median, largest.end());
  stats.channel_ratio = ratio(stats.absmax, *median);
  return stats;
}

std::vector<int64_t> histogram(const Matrix& x, const Range& bins) {
  std::vector<int64_t> counts(kBins);
  for (const float value : x.values) {
    if (!std::isfinite(value)) continue;
    const double at = ratio(value - bins.min, bins.max - bins.min) * kBins;
    ++counts[std::clamp(static_cast<int>(at), 0, kBins - 1)];
  }
  return counts;
}

KeyDistribution distribution_of(const Matrix& k, const Matrix& k_smoothed, int32_t batch,
                                int32_t kv_head) {
  KeyDistribution keys{batch, kv_head, {}, {}, {}, channel_ranges(k), channel_ranges(k_smoothed)};
  for (const auto* ranges : {&keys.channels_before, &keys.channels_after}) {
    for (const Range& range : *ranges) {
      keys.bins = {std::min(keys.bins.min, range.min), std::max(keys.bins.max, range.max)};
    }
  }
  keys.before = histogram(k, keys.bins);
  keys.after = histogram(k_smoothed, keys.bins);
  return keys;
}

// ---- The softmax of sampled rows ---------------------------------------------------------------

struct SampledRow {
  int64_t query;
  std::vector<double> p;         // of the visible keys, which come first
  std::vector<double> distance;  // of their values from the output, squared
  double output;                 // its squared norm
};

SampledRow sampled_row(const AssessInput& in, const Matrix& q, const Matrix& k, const Matrix& v,
                       int64_t query) {
  int64_t visible = in.kv_len;
  if (in.mask != SAGEATTN_MASK_NONE) {
    visible = std::clamp<int64_t>(query + in.kv_len - in.qo_len + 1, 0, in.kv_len);
  }
  SampledRow row{query, std::vector<double>(visible), std::vector<double>(visible), 0};
  double largest = -HUGE_VAL, total = 0;
  for (int64_t j = 0; j < visible; ++j) {
    row.p[j] = in.sm_scale * dot(q.row(query), k.row(j), q.channels);
    largest = std::max(largest, row.p[j]);
  }
  for (double& p : row.p) total += p = std::exp(p - largest);
  std::vector<double> output(v.channels);
  for (int64_t j = 0; j < visible; ++j) {
    row.p[j] /= total;
    for (int32_t c = 0; c < v.channels; ++c) output[c] += row.p[j] * v.row(j)[c];
  }
  for (int64_t j = 0; j < visible; ++j) {
    for (int32_t c = 0; c < v.channels; ++c) {
      const double difference = v.row(j)[c] - output[c];
      row.distance[j] += difference * difference;
    }
  }
  for (const double value : output) row.output += value * value;
  return row;
}

std::vector<SampledRow> sampled_rows(const AssessInput& in, const Matrix& q, const Matrix& k,
                                     const Matrix& v, int32_t limit) {
  const int64_t count = std::min(limit, in.qo_len);
  std::vector<SampledRow> rows;
  for (int64_t i = 0; i < count; ++i) {
    rows.push_back(sampled_row(in, q, k, v, (2 * i + 1) * in.qo_len / (2 * count)));
  }
  return rows;
}

// Rows that see no key take no part.
SoftmaxStats softmax_stats(const std::vector<SampledRow>& rows) {
  SoftmaxStats stats{};
  double count = 0;
  for (const SampledRow& row : rows) {
    if (row.p.empty()) continue;
    double entropy = 0;
    for (const double p : row.p) entropy -= p == 0 ? 0 : p * std::log(p);
    stats.max_probability += *std::max_element(row.p.begin(), row.p.end());
    stats.effective_keys += std::exp(entropy);
    stats.visible_keys += static_cast<double>(row.p.size());
    ++count;
  }
  stats.max_probability = ratio(stats.max_probability, count);
  stats.effective_keys = ratio(stats.effective_keys, count);
  stats.visible_keys = ratio(stats.visible_keys, count);
  return stats;
}

// ---- The predicted error -----------------------------------------------------------------------

// Which elements share a scale: docs/numerics.md, section 1.
int64_t query_group(const sageattn_plan_info& plan, int64_t query) {
  const int64_t tile = query / plan.b_q, in_tile = query % plan.b_q;
  const int64_t warp = in_tile / (plan.b_q / 4);
  switch (plan.qk_granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return (tile * 4 + warp) * 8 + in_tile % 8;
    case SAGEATTN_GRANULARITY_PER_WARP:
      return tile * 4 + warp;
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return query;
    case SAGEATTN_GRANULARITY_PER_TENSOR:
      return 0;
    default:
      return tile;
  }
}

int64_t key_group(const sageattn_plan_info& plan, int64_t key) {
  const int64_t tile = key / plan.b_k;
  switch (plan.qk_granularity) {
    case SAGEATTN_GRANULARITY_PER_THREAD:
      return tile * 4 + key % 8 / 2;
    case SAGEATTN_GRANULARITY_PER_TOKEN:
      return key;
    case SAGEATTN_GRANULARITY_PER_TENSOR:
      return 0;
    default:
      return tile;
  }
}

// For each token the mean square of what rounding to a step of its group's scale costs an element.
template <typename GroupOf>
std::vector<double> step_noise(const Matrix& x, int32_t qk_format, GroupOf group_of) {
  const double codes = qk_format == SAGEATTN_QK_I4 ? 7 : 127;
  std::map<int64_t, double> largest;
  for (int64_t i = 0; i < x.tokens; ++i) {
    double& of_group = largest[group_of(i)];
    for (int32_t c = 0; c < x.channels; ++c) {
      of_group = std::max(of_group, std::abs(double{x.row(i)[c]}));
    }
  }
  std::vector<double> noise(x.tokens);
  for (int64_t i = 0; i < x.tokens; ++i) {
    const double step = largest[group_of(i)] / codes;
    noise[i] = step * step / 12;
  }
  return noise;
}

int64_t v_tile(const sageattn_plan_info& plan, int64_t tokens) {
  if (plan.smooth_v == SAGEATTN_SMOOTH_V_SEQUENCE) return tokens;
  return plan.smooth_v == SAGEATTN_SMOOTH_V_GROUP ? plan.promotion_interval : 0;
}

double predict(const AssessInput& in, const sageattn_plan_info& plan, const Matrix& q,
               const Matrix& k, const Matrix& v, const std::vector<SampledRow>& rows) {
  const Matrix gq = smoothed(q, plan.smooth_q == SAGEATTN_SMOOTH_ON ? plan.b_q : 0);
  const Matrix gk = smoothed(k, plan.smooth_k == SAGEATTN_SMOOTH_ON ? k.tokens : 0);
  const auto q_noise =
      step_noise(gq, plan.qk_format, [&](int64_t query) { return query_group(plan, query); });
  const auto k_noise =
      step_noise(gk, plan.qk_format, [&](int64_t key) { return key_group(plan, key); });
  const std::vector<double> q_norms = squared_norms(gq);
  const std::vector<double> k_norms = squared_norms(gk);
  const std::vector<double> v_norms = squared_norms(smoothed(v, v_tile(plan, v.tokens)));
  const double pv = rounding_error(plan.pv_format == SAGEATTN_PV_F16 ? 10 : 3);
  const double scale = double{in.sm_scale} * in.sm_scale;

  double error = 0, output = 0;
  for (const SampledRow& row : rows) {
    for (size_t j = 0; j < row.p.size(); ++j) {
      const double score =
          scale * (q_norms[row.query] * k_noise[j] + q_noise[row.query] * k_norms[j]);
      error += row.p[j] * row.p[j] * ((score + pv * pv) * row.distance[j] + pv * pv * v_norms[j]);
    }
    output += row.output;
  }
  return std::sqrt(ratio(error, output));
}

// ---- The measured error ------------------------------------------------------------------------

sageattn_attn_desc desc_of(const AssessInput& in, int32_t preset, bool smooth_v_off) {
  sageattn_attn_desc desc = preset_desc(preset);
  if (smooth_v_off) desc.smooth_v = SAGEATTN_SMOOTH_V_OFF;
  desc.q_dtype = in.q_dtype;
  desc.kv_dtype = in.kv_dtype;
  desc.out_dtype = SAGEATTN_F32;  // rounding to 16 bits would hide small errors
  desc.layout = SAGEATTN_LAYOUT_HND;
  desc.mask = in.mask;
  desc.head_dim = in.head_dim;
  desc.head_dim_v = in.head_dim_v;
  desc.num_qo_heads = in.num_qo_heads;
  desc.num_kv_heads = in.num_kv_heads;
  desc.sm_scale_set = 1;
  desc.sm_scale = in.sm_scale;
  desc.max_batch = in.batch;
  desc.max_qo_len = in.qo_len;
  desc.max_kv_len = in.kv_len;
  return desc;
}

struct Output {
  std::vector<float> values;  // [batch, head, query, channel]
  sageattn_plan_info plan;
};

// With a copy of its own if the backend has a device.
sageattn_const_tensor placed(Device* device, sageattn_const_tensor tensor, int32_t dtype,
                             int32_t batch, int32_t heads, int64_t tokens, int32_t channels) {
  if (device == nullptr) return tensor;
  const int64_t elements = (batch - 1) * tensor.stride_batch + (heads - 1) * tensor.stride_head +
                           (tokens - 1) * tensor.stride_token + channels;
  tensor.data = device->copy_of(tensor.data, elements * (dtype == SAGEATTN_F32 ? 4 : 2));
  return tensor;
}

Output compute(const Context& context, const AssessInput& in, const sageattn_attn_desc& desc) {
  Plan plan(context, desc);
  Output output{std::vector<float>(int64_t{in.batch} * in.num_qo_heads * in.qo_len * in.head_dim_v),
                plan.info()};
  Device* const device = plan.device();
  const size_t bytes = output.values.size() * sizeof(float);
  auto args = sized<sageattn_execute_args>();
  args.batch = in.batch;
  args.qo_len = in.qo_len;
  args.kv_len = in.kv_len;
  args.q = placed(device, in.q, in.q_dtype, in.batch, in.num_qo_heads, in.qo_len, in.head_dim);
  args.k = placed(device, in.k, in.kv_dtype, in.batch, in.num_kv_heads, in.kv_len, in.head_dim);
  args.v = placed(device, in.v, in.kv_dtype, in.batch, in.num_kv_heads, in.kv_len, in.head_dim_v);
  args.out.data =
      device == nullptr ? output.values.data() : device->copy_of(output.values.data(), bytes);
  plan.execute(args);
  if (device != nullptr) device->read(args.out.data, output.values.data(), bytes);
  return output;
}

// Of `heads` heads, [head, query, channel], that begin at `start`.
VariantResult compare(const AssessInput& in, const Output& out, const Output& exact, int64_t start,
                      int32_t heads) {
  auto args = sized<sageattn_compare_args>();
  args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  args.layout = SAGEATTN_LAYOUT_HND;
  args.batch = 1;
  args.len = in.qo_len;
  args.num_heads = heads;
  args.head_dim = in.head_dim_v;
  args.out.data = out.values.data() + start;
  args.ref.data = exact.values.data() + start;
  auto result = sized<sageattn_compare_result>();
  check([&](sageattn_error* error) { return sageattn_compare(&args, &result, error); });
  return {"", kNaN, result.rel_error, result.cos_sim, result.nonfinite_out + result.nonfinite_ref};
}

// ---- Recommendations ---------------------------------------------------------------------------

using Heads = std::span<const HeadAssessment* const>;

bool meets(const VariantResult& result, const AssessTarget& target) {
  return result.unsupported.empty() && result.nonfinite == 0 &&
         result.rel_error <= target.max_rel_error && result.cos_sim >= target.min_cos_sim;
}

int64_t nonfinite_inputs(const HeadAssessment& head) {
  return head.q.nonfinite + head.k.nonfinite + head.v.nonfinite;
}

size_t rung(int32_t preset) {
  return std::find(std::begin(kLadder), std::end(kLadder), preset) - std::begin(kLadder);
}

// Whether a variant is within the target in every head.
bool all_meet(Heads heads, size_t variant, const AssessTarget& target) {
  return std::all_of(heads.begin(), heads.end(), [&](const HeadAssessment* head) {
    return nonfinite_inputs(*head) == 0 && meets(head->variants[variant], target);
  });
}

std::string reason_of_one(const HeadAssessment& head, int32_t preset, bool smooth_v, bool biased) {
  if (nonfinite_inputs(head) > 0) {
    return std::to_string(nonfinite_inputs(head)) + " elements of q, k and v are not finite";
  }
  if (preset == SAGEATTN_PRESET_EXACT) return "no preset that quantizes is within the target";
  if (!smooth_v) return "within the target, V need not be smoothed";
  return biased ? "within the target, V is biased" : "within the target only with V smoothed";
}

// Of several, whose own recommendations are known.
std::string reason_of(Heads heads, int32_t preset) {
  const auto needing = std::count_if(heads.begin(), heads.end(), [&](const HeadAssessment* head) {
    return rung(head->recommendation.preset) >= rung(preset);
  });
  if (needing == 0) return "heads differ in whether V must or may not be smoothed";
  return std::to_string(needing) + " of " + std::to_string(heads.size()) + " need it";
}

// ---- A layer -----------------------------------------------------------------------------------

// All of one kv head that does not depend on the query head.
struct KeyHead {
  Matrix k, v;
  ValueStats k_stats, k_smoothed_stats, v_stats;
};

}  // namespace

std::span<const AssessVariant> assess_variants() { return kVariants; }

// SAGE1 does not: its fp16 holds an offset well enough.
bool smooths_v(int32_t preset) {
  return preset == SAGEATTN_PRESET_SAGE2_4B || preset == SAGEATTN_PRESET_SAGE2_8B;
}

LayerAssessment assess(const Context& context, const AssessInput& in, const AssessTarget& target,
                       int32_t limit, const std::function<void()>& advance) {
  const auto compute_and_advance = [&](int32_t preset, bool smooth_v_off) {
    Output output = compute(context, in, desc_of(in, preset, smooth_v_off));
    if (advance) advance();
    return output;
  };
  const Output exact = compute_and_advance(SAGEATTN_PRESET_EXACT, false);

  const int32_t head_count = in.batch * in.num_qo_heads;
  const int64_t head_size = int64_t{in.qo_len} * in.head_dim_v;
  LayerAssessment layer;
  std::vector<sageattn_plan_info> plans(kVariantCount);
  std::vector<std::vector<VariantResult>> measured(kVariantCount);  // of each variant and head
  for (size_t i = 0; i < kVariantCount; ++i) {
    try {
      const Output output = compute_and_advance(kVariants[i].preset, kVariants[i].smooth_v_off);
      plans[i] = output.plan;
      layer.variants.push_back(compare(in, output, exact, 0, head_count));
      for (int32_t head = 0; head < head_count; ++head) {
        measured[i].push_back(compare(in, output, exact, head * head_size, 1));
      }
    } catch (const LibraryFailure& failure) {
      if (failure.status() != SAGEATTN_E_UNSUPPORTED) throw;
      if (advance) advance();
      layer.variants.push_back({failure.what(), kNaN, kNaN, kNaN, 0});
      measured[i].assign(head_count, layer.variants.back());
    }
  }

  const int32_t group = in.num_qo_heads / in.num_kv_heads;
  std::vector<double> squares(kVariantCount);  // of what is predicted
  KeyHead keys;
  for (int32_t at = 0; at < head_count; ++at) {
    HeadAssessment head{};
    head.batch = at / in.num_qo_heads;
    head.head = at % in.num_qo_heads;
    head.kv_head = head.head / group;
    if (head.head % group == 0) {
      keys.k = matrix_of(in.k, in.kv_dtype, head.batch, head.kv_head, in.kv_len, in.head_dim);
      keys.v = matrix_of(in.v, in.kv_dtype, head.batch, head.kv_head, in.kv_len, in.head_dim_v);
      const Matrix k_smoothed = smoothed(keys.k, in.kv_len);
      keys.k_stats = stats_of(keys.k);
      keys.k_smoothed_stats = stats_of(k_smoothed);
      keys.v_stats = stats_of(keys.v);
      layer.keys.push_back(distribution_of(keys.k, k_smoothed, head.batch, head.kv_head));
    }
    const Matrix q = matrix_of(in.q, in.q_dtype, head.batch, head.head, in.qo_len, in.head_dim);
    head.q = stats_of(q);
    head.q_smoothed = stats_of(smoothed(q, plans[0].b_q));
    head.k = keys.k_stats;
    head.k_smoothed = keys.k_smoothed_stats;
    head.v = keys.v_stats;

    const std::vector<SampledRow> rows = sampled_rows(in, q, keys.k, keys.v, limit);
    head.softmax = softmax_stats(rows);
    for (size_t i = 0; i < kVariantCount; ++i) {
      VariantResult& result = head.variants.emplace_back(measured[i][at]);
      if (!result.unsupported.empty()) continue;
      result.predicted = predict(in, plans[i], q, keys.k, keys.v, rows);
      squares[i] += result.predicted * result.predicted;
    }
    const HeadAssessment* const one = &head;
    head.recommendation = recommend({&one, 1}, target);
    layer.heads.push_back(std::move(head));
  }
  for (size_t i = 0; i < kVariantCount; ++i) {
    if (layer.variants[i].unsupported.empty()) {
      layer.variants[i].predicted = std::sqrt(squares[i] / head_count);
    }
  }
  std::vector<const HeadAssessment*> heads;
  for (const HeadAssessment& head : layer.heads) heads.push_back(&head);
  layer.recommendation = recommend(heads, target);
  return layer;
}

Recommendation recommend(Heads heads, const AssessTarget& target) {
  const bool biased = std::any_of(heads.begin(), heads.end(), [](const HeadAssessment* head) {
    return head->v.mean_over_std >= kBiasedV;
  });
  Recommendation chosen{SAGEATTN_PRESET_EXACT, false, ""};
  for (const int32_t preset : kLadder) {
    bool smoothed = false, unsmoothed = false;
    for (size_t i = 0; i < kVariantCount; ++i) {
      if (kVariants[i].preset != preset || !all_meet(heads, i, target)) continue;
      const bool off = kVariants[i].smooth_v_off || !smooths_v(preset);
      (off ? unsmoothed : smoothed) = true;
    }
    if (!smoothed && !unsmoothed) continue;
    chosen = {preset, smoothed && (biased || !unsmoothed), ""};
    break;
  }
  chosen.reason = heads.size() == 1
                      ? reason_of_one(*heads[0], chosen.preset, chosen.smooth_v, biased)
                      : reason_of(heads, chosen.preset);
  return chosen;
}

}  // namespace sageattn_cli
