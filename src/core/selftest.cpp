// Small attentions of every preset, compared with the exact ones of the CPU backend.
//
// The error limits are derived. Inputs have unit variance and lie within 2 sqrt(3) of their mean
// (noise() below), and with the default sm_scale scores have unit variance, too.
//   Scores   A code is off by up to half a step of 2 sqrt(3) / M, M the largest code: uniform
//            rounding errors of standard deviation (2 sqrt(3) / M) / sqrt(12) = 1 / M in Q and in
//            K, so scores, and with them probabilities, are off by sqrt(2) / M.
//   P and V  Rounding x in [1, 2) to m fraction bits is off by 2^-m / sqrt(12); relative to x, in
//            root mean square over logarithmically uniform x, by 0.74 of that: 0.21 * 2^-m, in P
//            and in V.
// The errors are independent, so their squares add. The limit is twice the root: a sampled head
// scatters by a few per cent, a defect is off by far more.
#include "src/core/selftest.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "src/core/compare.h"
#include "src/core/error.h"
#include "src/core/plan.h"
#include "src/core/select.h"
#include "src/core/validate.h"
#include "src/cpu/formats.h"
#include "src/cuda/memory.h"

namespace sageattn {
namespace {

struct Preset {
  const char* name;
  int32_t value;
};
constexpr Preset kPresets[] = {
    {"AUTO", SAGEATTN_PRESET_AUTO},         {"SAGE1", SAGEATTN_PRESET_SAGE1},
    {"SAGE2_8B", SAGEATTN_PRESET_SAGE2_8B}, {"SAGE2_4B", SAGEATTN_PRESET_SAGE2_4B},
    {"SAGE2PP", SAGEATTN_PRESET_SAGE2PP},   {"EXACT", SAGEATTN_PRESET_EXACT},
};

struct Case {
  const char* name;
  int32_t dtype, layout, batch_mode, mask;
  int32_t head_dim, head_dim_v, num_qo_heads, num_kv_heads;
  std::vector<int32_t> qo_lens, kv_lens;  // all equal with BATCH_DENSE
};

std::vector<Case> make_cases() {
  constexpr int32_t kNone = SAGEATTN_MASK_NONE;
  constexpr int32_t kCausal = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  constexpr int32_t kDense = SAGEATTN_BATCH_DENSE, kVarlen = SAGEATTN_BATCH_VARLEN;
  constexpr int32_t kNhd = SAGEATTN_LAYOUT_NHD, kHnd = SAGEATTN_LAYOUT_HND;
  constexpr int32_t kF16 = SAGEATTN_F16, kBf16 = SAGEATTN_BF16;
  // clang-format off
  return {
      {"dense", kF16, kHnd, kDense, kNone, 64, 64, 2, 2, {70, 70}, {190, 190}},
      {"causal with GQA", kBf16, kNhd, kDense, kCausal, 128, 128, 4, 2, {150}, {150}},
      {"causal packed", kBf16, kNhd, kVarlen, kCausal, 80, 48, 2, 1, {5, 0, 90}, {77, 40, 60}},
      {"wide heads", kF16, kNhd, kDense, kNone, 192, 128, 1, 1, {70}, {190}},
  };
  // clang-format on
}

int64_t sum(const std::vector<int32_t>& lens) {
  int64_t total = 0;
  for (const int32_t len : lens) total += len;
  return total;
}

// Nearly normal, unit variance, within 2 sqrt(3): four uniform numbers summed.
class Noise {
 public:
  explicit Noise(uint64_t seed) : state_(seed) {}

  float next() {
    const uint64_t bits = next_bits();
    double total = -2;
    for (int i = 0; i < 4; ++i)
      total += (static_cast<double>(bits >> 16 * i & 0xffff) + 0.5) / 65536;
    return static_cast<float>(total * std::sqrt(3.0));
  }

 private:
  uint64_t next_bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }

  uint64_t state_;
};

// What an execute reads and writes, in host memory.
struct Operands {
  std::vector<uint16_t> q, k, v;
  std::vector<int32_t> cu_q, cu_kv;
  std::vector<float> out, lse;
};

Operands make_operands(const Case& c) {
  Noise noise(1);
  const auto fill = [&](int64_t tokens, int32_t heads, int32_t channels, float bias) {
    std::vector<uint16_t> values(static_cast<size_t>(tokens * heads * channels));
    for (size_t i = 0; i < values.size(); ++i) {
      // The channel is the innermost index in both layouts.
      const float x = noise.next() + (i % static_cast<size_t>(channels) % 16 == 0 ? bias : 0.0f);
      values[i] = c.dtype == SAGEATTN_F16 ? float_to_f16(x) : float_to_bf16(x);
    }
    return values;
  };
  const auto offsets = [](const std::vector<int32_t>& lens) {
    std::vector<int32_t> cu = {0};
    for (const int32_t len : lens) cu.push_back(cu.back() + len);
    return cu;
  };
  // What is not written stays NaN, which the reference never is.
  const auto nans = [](int64_t count) {
    return std::vector<float>(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
  };
  const int64_t rows = sum(c.qo_lens) * c.num_qo_heads;
  return {fill(sum(c.qo_lens), c.num_qo_heads, c.head_dim, 0.0f),
          fill(sum(c.kv_lens), c.num_kv_heads, c.head_dim, 8.0f),  // smoothing must remove it
          fill(sum(c.kv_lens), c.num_kv_heads, c.head_dim_v, 0.0f),
          offsets(c.qo_lens),
          offsets(c.kv_lens),
          nans(rows * c.head_dim_v),
          nans(rows)};
}

struct Release {
  void operator()(Context* context) const { context->release(); }
  void operator()(Plan* plan) const { plan->destroy(); }
};
using PlanOwner = std::unique_ptr<Plan, Release>;

PlanOwner make_plan(Context& context, const Case& c, const Preset& preset) {
  sageattn_attn_desc desc = preset_desc(preset.value);
  desc.q_dtype = c.dtype;
  desc.out_dtype = SAGEATTN_F32;  // rounding the output would add to the error
  desc.layout = c.layout;
  desc.batch_mode = c.batch_mode;
  desc.mask = c.mask;
  desc.head_dim = c.head_dim;
  desc.head_dim_v = c.head_dim_v;
  desc.num_qo_heads = c.num_qo_heads;
  desc.num_kv_heads = c.num_kv_heads;
  desc.max_batch = static_cast<int32_t>(c.qo_lens.size());
  desc.max_qo_len = *std::max_element(c.qo_lens.begin(), c.qo_lens.end());
  desc.max_kv_len = *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
  return PlanOwner(Plan::create(context, desc));
}

// Without pointers.
sageattn_execute_args lengths(const Case& c) {
  sageattn_execute_args args{};
  args.batch = static_cast<int32_t>(c.qo_lens.size());
  if (c.batch_mode == SAGEATTN_BATCH_VARLEN) {
    args.total_qo = sum(c.qo_lens);
    args.total_kv = sum(c.kv_lens);
  } else {
    args.qo_len = c.qo_lens[0];
    args.kv_len = c.kv_lens[0];
  }
  return args;
}

void execute_on_host(const Plan& plan, const Case& c, Operands& x) {
  sageattn_execute_args args = lengths(c);
  args.q.data = x.q.data();
  args.k.data = x.k.data();
  args.v.data = x.v.data();
  args.out.data = x.out.data();
  args.lse.data = x.lse.data();
  if (c.batch_mode == SAGEATTN_BATCH_VARLEN) {
    args.cu_seqlens_q = x.cu_q.data();
    args.cu_seqlens_kv = x.cu_kv.data();
  }
  const auto size = static_cast<size_t>(plan.info().min_workspace);
  const auto alignment = static_cast<size_t>(plan.info().workspace_alignment);
  std::vector<char> buffer(size + alignment);
  void* workspace = buffer.data();
  size_t space = buffer.size();
  std::align(alignment, size, workspace, space);
  plan.execute(args, workspace, size, nullptr);
}

// On a stream of its own, with copies in device memory that end with the call, however it ends.
void execute_on_device(const Plan& plan, const cuda::Target& target, const Case& c, Operands& x) {
  const cuda::Driver& api = cuda::driver();
  const cuda::CurrentContext current(api, *target.device);
  const cuda::StreamOwner stream(api);
  const auto copy = [&](const auto& content) { return cuda::DeviceMemory::copy_of(api, content); };
  const cuda::DeviceMemory q = copy(x.q), k = copy(x.k), v = copy(x.v), cu_q = copy(x.cu_q),
                           cu_kv = copy(x.cu_kv), out = copy(x.out), lse = copy(x.lse);
  cuda::DeviceMemory workspace(api, static_cast<size_t>(plan.info().min_workspace));
  workspace.fill(0xFF);  // NaN, should anything be read before it is written

  sageattn_execute_args args = lengths(c);
  args.q.data = q.as<void>();
  args.k.data = k.as<void>();
  args.v.data = v.as<void>();
  args.out.data = out.as<void>();
  args.lse.data = lse.as<float>();
  if (c.batch_mode == SAGEATTN_BATCH_VARLEN) {
    args.cu_seqlens_q = cu_q.as<int32_t>();
    args.cu_seqlens_kv = cu_kv.as<int32_t>();
  }
  plan.execute(args, workspace.as<void>(), workspace.size(), stream.get());
  stream.wait();
  out.download(x.out.data(), out.size());
  lse.download(x.lse.data(), lse.size());
}

// Fails unless the metric is at most `worst`; returns it.
double check(const Case& c, const Preset& preset, const char* what, const std::vector<float>& got,
             const std::vector<float>& want, int32_t channels, int32_t layout, double worst,
             double sageattn_compare_result::*metric) {
  const bool varlen = c.batch_mode == SAGEATTN_BATCH_VARLEN;
  sageattn_compare_args args{};
  args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  args.layout = layout;
  args.batch = varlen ? 1 : static_cast<int32_t>(c.qo_lens.size());
  args.len = varlen ? static_cast<int32_t>(sum(c.qo_lens)) : c.qo_lens[0];
  args.num_heads = c.num_qo_heads;
  args.head_dim = channels;
  args.out.data = got.data();
  args.ref.data = want.data();
  const sageattn_compare_result result = compare(check_compare_args(args));
  if (result.nonfinite_out != result.nonfinite_ref) {
    fail(SAGEATTN_E_SELFTEST, "preset %s, %s: %s has %lld non-finite elements, must have %lld",
         preset.name, c.name, what, static_cast<long long>(result.nonfinite_out),
         static_cast<long long>(result.nonfinite_ref));
  }
  if (!(result.*metric <= worst)) {
    fail(SAGEATTN_E_SELFTEST, "preset %s, %s: the error of %s is %.4f, must be at most %.4f",
         preset.name, c.name, what, result.*metric, worst);
  }
  return result.*metric;
}

// Null, with the reason in the log, if the backend does not run the preset.
PlanOwner plan_or_skip(Context& context, const Case& c, const Preset& preset) {
  try {
    return make_plan(context, c, preset);
  } catch (const Error& error) {
    if (error.status != SAGEATTN_E_UNSUPPORTED) throw;
    context.log(SAGEATTN_LOG_INFO, "selftest: %s, %s: skipped: %s", preset.name, c.name,
                error.message);
  }
  return nullptr;
}

}  // namespace

double error_limit(const sageattn_plan_info& info) {
  // Rounding error of x, relative to x, in root mean square: see above.
  const auto rounding = [](int fraction_bits) { return 0.21 * std::ldexp(1.0, -fraction_bits); };
  if (info.qk_format == SAGEATTN_QK_NONE) {
    const double sums = 1e-4;  // fp32 sums of a hundred products
    // The CUDA backend multiplies V with P rounded to V's type.
    if (info.backend != SAGEATTN_BACKEND_CUDA) return sums;
    return sums + 2 * rounding(info.kv_dtype == SAGEATTN_F16 ? 10 : 7);
  }
  const double max_code = info.qk_format == SAGEATTN_QK_I4 ? 7 : 127;
  const double scores = std::sqrt(2.0) / max_code;
  const double values = std::sqrt(2.0) * rounding(info.pv_format == SAGEATTN_PV_F16 ? 10 : 3);
  return 2 * std::sqrt(scores * scores + values * values);
}

void selftest(Context& context) {
  const bool cuda = context.backend() == SAGEATTN_BACKEND_CUDA;
  if (cuda && context.target().device == nullptr) throw context.target().no_device;
  sageattn_context_desc reference_desc{};
  reference_desc.backend = SAGEATTN_BACKEND_CPU;
  const std::unique_ptr<Context, Release> reference(Context::create(reference_desc));
  constexpr Preset kExact = {"EXACT", SAGEATTN_PRESET_EXACT};

  int checked = 0;
  for (const Case& c : make_cases()) {
    const Operands inputs = make_operands(c);
    Operands want = inputs;
    execute_on_host(*make_plan(*reference, c, kExact), c, want);
    for (const Preset& preset : kPresets) {
      const PlanOwner plan = plan_or_skip(context, c, preset);
      if (plan == nullptr) continue;
      Operands got = inputs;
      if (cuda) {
        execute_on_device(*plan, context.target(), c, got);
      } else {
        execute_on_host(*plan, c, got);
      }
      const double limit = error_limit(plan->info());
      const double out = check(c, preset, "out", got.out, want.out, c.head_dim_v, c.layout, limit,
                               &sageattn_compare_result::worst_rel_error);
      // lse is the logarithm of what probabilities sum to: their relative error is its absolute.
      const double lse = check(c, preset, "lse", got.lse, want.lse, 1, SAGEATTN_LAYOUT_HND, limit,
                               &sageattn_compare_result::worst_rmse);
      ++checked;
      context.log(SAGEATTN_LOG_INFO,
                  "selftest: %s, %s: passed: %s, error %.4f, of lse %.4f, limit %.4f", preset.name,
                  c.name, plan->info().kernel_name, out, lse, limit);
    }
  }
  if (checked == 0) fail(SAGEATTN_E_SELFTEST, "ctx: the backend runs no preset");
}

}  // namespace sageattn
