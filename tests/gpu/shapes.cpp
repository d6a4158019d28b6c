// Shapes that users of attention libraries reported as wrong: each name says what was, and its number
// after # only tells it from the others. And sizes at which 32-bit arithmetic ends. Where a reference of the
// CPU backend would take too long, some rows are computed exactly.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "src/core/selftest.h"
#include "tests/exact_reference.h"
#include "tests/gpu/check_table.h"
#include "tests/gpu/compare.h"

namespace sageattn_test {

namespace {

constexpr int32_t kBottomRight = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
constexpr int32_t kTopLeft = SAGEATTN_MASK_CAUSAL_TOP_LEFT;

// ---- Small: against the CPU backend --------------------------------------------------------------

Problem problem(std::vector<int> qo_lens, std::vector<int> kv_lens,
                int32_t mask = SAGEATTN_MASK_NONE) {
  Problem p;
  p.id = 1;
  p.seed = 1234;
  p.shape = {4, 2, 128, 128};
  p.q_dtype = p.kv_dtype = p.out_dtype = SAGEATTN_BF16;
  p.mask.kind = mask;
  p.qo_lens = std::move(qo_lens);
  p.kv_lens = std::move(kv_lens);
  return p;
}

Problem with(Problem p, const std::function<void(Problem&)>& change) {
  change(p);
  return p;
}

// An element of out as the GPU left it.
using OutAt = std::function<float(int sequence, int row, int head, int channel)>;
using Extra = std::function<std::string(const Problem&, const OutAt&)>;

// Rows that see no key hold 0, and minus infinity as their LSE: not what the CPU backend says, but
// what the header does.
std::string check_empty_rows(const Problem& p, const Data& data, const Buffers& buffers,
                             const Outcome& gpu) {
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const std::vector<int32_t> cu = cumulative(p.qo_lens, p.gap);
  for (int b = 0; b < p.batch(); ++b) {
    const auto n = static_cast<size_t>(b);
    const ExactOutput exact = exact_attention(p.shape, p.scale(), p.mask, data[n]);
    for (int row = 0; row < p.qo_lens[n]; ++row) {
      for (int h = 0; h < p.shape.num_qo_heads; ++h) {
        const bool empty = std::isinf(
            exact.lse[static_cast<size_t>(row) * static_cast<size_t>(p.shape.num_qo_heads) +
                      static_cast<size_t>(h)]);
        const int64_t token = varlen ? cu[n] + row : row;
        const float lse = load(&gpu.lse[buffers.lse.at(varlen ? 0 : b, token, h, 0)], SAGEATTN_F32);
        if (std::isinf(lse) != empty || (empty && lse > 0)) {
          return "lse of row " + std::to_string(row) + " is " + std::to_string(lse);
        }
        for (int c = 0; empty && c < p.shape.head_dim_v; ++c) {
          if (load(&gpu.out[buffers.out.at(varlen ? 0 : b, token, h, c)], p.out_dtype) != 0) {
            return "row " + std::to_string(row) + " sees no key and is not 0";
          }
        }
      }
    }
  }
  return {};
}

NamedCheck compared(const char* name, std::vector<Problem> problems, Extra extra = {}) {
  return {name, [=](const Gpu& gpu, const Numerics& numerics) -> std::string {
            for (const Problem& p : problems) {
              const Data data = make_data(p);
              const CaseReport report = check_case(gpu, p, numerics, data);
              if (report.verdict == CaseReport::kSkipped) throw Skipped(report.message);
              if (report.verdict == CaseReport::kFailed) return describe(p) + ": " + report.message;
              const Buffers buffers = make_buffers(p, data);
              std::string message = check_empty_rows(p, data, buffers, report.gpu);
              if (message.empty() && extra) {
                message = extra(p, [&](int b, int row, int h, int c) {
                  return load(&report.gpu.out[buffers.out.at(b, row, h, c)], p.out_dtype);
                });
              }
              if (!message.empty()) return describe(p) + ": " + message;
            }
            return {};
          }};
}

std::string first_channel_is_zero(const Problem& p, const OutAt& out) {
  for (int row = 0; row < p.qo_lens[0]; ++row) {
    for (int h = 0; h < p.shape.num_qo_heads; ++h) {
      if (out(0, row, h, 0) != 0) return "the channel of zeros is not zero";
    }
  }
  return {};
}

std::string all_finite(const Problem& p, const OutAt& out) {
  for (int row = 0; row < p.qo_lens[0]; ++row) {
    for (int h = 0; h < p.shape.num_qo_heads; ++h) {
      for (int c = 0; c < p.shape.head_dim_v; ++c) {
        if (!std::isfinite(out(0, row, h, c))) return "out is not finite";
      }
    }
  }
  return {};
}

std::string check_heads(const Gpu& gpu, const Numerics& numerics) {
  for (const int heads : {33, 3}) {
    const Problem p = with(problem({9}, {9}), [&](Problem& x) { x.shape.num_qo_heads = heads; });
    const PlanResult plan = make_plan(gpu.context(), p, numerics);
    if (plan.status != SAGEATTN_E_INVALID_ARGUMENT) return "not refused: " + plan.message;
  }
  return {};
}

std::string check_reserved(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = problem({9}, {9});
  using Desc = sageattn_attn_desc;
  const std::function<void(Desc&)> changes[] = {
      [](Desc& d) { d.bias = 1; }, [](Desc& d) { d.num_sinks = 1; },
      [](Desc& d) { d.kv_storage = 1; }, [](Desc& d) { d.softcap = 1; }};
  for (const auto& change : changes) {
    sageattn_attn_desc desc = make_desc(p, numerics);
    set_limits(p, desc);
    change(desc);
    if (sageattn_plan_query(gpu.context(), &desc, nullptr, nullptr) != SAGEATTN_E_UNSUPPORTED) {
      return "a reserved field was not refused";
    }
  }
  return {};
}

std::string check_twice(const Gpu& gpu, const Numerics& numerics) {
  const Problem p = problem({130}, {300}, kBottomRight);
  const PlanResult plan = must_plan(gpu, p, numerics);
  const Buffers buffers = make_buffers(p, make_data(p));
  const cuda::CurrentContext current(gpu.api, gpu.device);
  const cuda::StreamOwner stream(gpu.api);
  DeviceCase on_device(gpu, p, buffers, plan.info);
  Outcome outcomes[2];
  for (Outcome& outcome : outcomes) {
    std::string message;
    if (on_device.execute(plan.plan.get(), stream.get(), &message) != SAGEATTN_OK) return message;
    stream.wait();
    on_device.collect(outcome);
    if (!outcome.violation.empty()) return outcome.violation;
  }
  if (outcomes[0].out == buffers.out.image) return "nothing was written";
  if (outcomes[0].out != outcomes[1].out) return "a second call with the same K differs";
  return {};
}

// Two halves of the keys, merged by their LSE, are the whole: so it is a natural logarithm, with
// what smoothing took from K added back.
std::string check_merged(const Gpu& gpu, const Numerics& numerics) {
  const Problem whole = problem({130}, {300});
  const Data data = make_data(whole);
  const AttentionShape& s = whole.shape;
  const ExactOutput exact = exact_attention(s, whole.scale(), whole.mask, data[0]);
  std::vector<float> out[2], lse[2];
  double limit = 0;
  for (int half = 0; half < 2; ++half) {
    const Problem p = with(whole, [](Problem& x) { x.kv_lens = {150}; });
    Data part = data;
    const auto cut = [&](std::vector<float>& x) {
      const auto middle = x.begin() + static_cast<int64_t>(x.size() / 2);
      x = half == 0 ? std::vector<float>(x.begin(), middle) : std::vector<float>(middle, x.end());
    };
    part[0].kv_len = 150;
    cut(part[0].k);
    cut(part[0].v);
    const PlanResult plan = must_plan(gpu, p, numerics);
    limit = sageattn::error_limit(plan.info) + std::ldexp(1.0, -8);  // and out is bf16
    const Buffers buffers = make_buffers(p, part);
    const Outcome outcome = must_run(gpu, p, buffers, plan);
    for (int64_t row = 0; row < p.qo_lens[0]; ++row) {
      for (int h = 0; h < s.num_qo_heads; ++h) {
        lse[half].push_back(load(&outcome.lse[buffers.lse.at(0, row, h, 0)], SAGEATTN_F32));
        for (int c = 0; c < s.head_dim_v; ++c) {
          out[half].push_back(load(&outcome.out[buffers.out.at(0, row, h, c)], p.out_dtype));
        }
      }
    }
  }
  double lse_error = 0;
  std::vector<double> merged;
  for (size_t i = 0; i < lse[0].size(); ++i) {
    const double a = std::exp(lse[0][i] - exact.lse[i]), b = std::exp(lse[1][i] - exact.lse[i]);
    lse_error += std::pow(std::log(a + b), 2);
    for (size_t c = 0; c < static_cast<size_t>(s.head_dim_v); ++c) {
      const size_t at = i * static_cast<size_t>(s.head_dim_v) + c;
      merged.push_back((a * out[0][at] + b * out[1][at]) / (a + b));
    }
  }
  lse_error = std::sqrt(lse_error / static_cast<double>(lse[0].size()));
  const double error = relative_error(merged, exact.out);
  if (!(error <= limit)) return "error " + std::to_string(error) + " of out";
  if (!(lse_error <= limit)) return "error " + std::to_string(lse_error) + " of lse";
  return {};
}

// ---- Large: noise in device memory, some rows computed exactly --------------------------------------

// Tensors of one shape and, but for their starts, the same strides, in elements of one array.
struct Large {
  int batch, heads, len, dim;
  int32_t mask;
  int64_t q, k, v;  // where they start
  int64_t stride_batch, stride_head, stride_token;

  int64_t at(int64_t b, int64_t h, int64_t t) const {
    return b * stride_batch + h * stride_head + t * stride_token;
  }
  int64_t span() const { return at(batch - 1, heads - 1, len - 1) + dim; }
};

// An execute on device memory that holds noise.
class LargeRun {
 public:
  LargeRun(const Gpu& gpu, const Numerics& numerics, const Large& large, cuda::DeviceMemory input)
      : large_(large),
        input_(std::move(input)),
        out_(gpu.api, static_cast<size_t>(large.span()) * 2) {
    sageattn_error error = {};
    error.struct_size = sizeof error;
    sageattn_attn_desc desc = numerics.desc;
    desc.struct_size = sizeof desc;
    desc.q_dtype = SAGEATTN_BF16;
    desc.mask = large.mask;
    desc.head_dim = large.dim;
    desc.num_qo_heads = large.heads;
    desc.max_batch = large.batch;
    desc.max_qo_len = desc.max_kv_len = large.len;
    sageattn_plan* raw = nullptr;
    must(sageattn_plan_create(gpu.context(), &desc, &raw, &error), error);
    const PlanOwner plan(raw);
    info_.struct_size = sizeof info_;
    must(sageattn_plan_get_info(raw, &info_, &error), error);

    const cuda::DeviceMemory workspace(gpu.api, static_cast<size_t>(info_.min_workspace));
    const cuda::StreamOwner stream(gpu.api);
    const auto tensor = [&](int64_t start) {
      return sageattn_const_tensor{input_.as<uint16_t>() + start, large.stride_batch,
                                   large.stride_token, large.stride_head, 1};
    };
    sageattn_execute_args args = {};
    args.struct_size = sizeof args;
    args.batch = large.batch;
    args.qo_len = args.kv_len = large.len;
    args.q = tensor(large.q);
    args.k = tensor(large.k);
    args.v = tensor(large.v);
    args.out = {out_.data(), large.stride_batch, large.stride_token, large.stride_head, 1};
    must(sageattn_execute(raw, &args, workspace.data(), workspace.size(), stream.get(), &error),
         error);
    stream.wait();
  }

  const sageattn_plan_info& info() const { return info_; }
  std::vector<uint16_t> row(int64_t b, int64_t h, int64_t t) const {
    std::vector<uint16_t> bits(static_cast<size_t>(large_.dim));
    out_.download(bits.data(), bits.size() * 2, static_cast<size_t>(large_.at(b, h, t)) * 2);
    return bits;
  }

 private:
  const Large large_;
  cuda::DeviceMemory input_, out_;
  sageattn_plan_info info_ = {};
};

std::vector<double> exact_row(const Large& l, const Noise& noise, int64_t b, int64_t h, int64_t t) {
  const auto dim = static_cast<size_t>(l.dim);
  const float* q = noise.at(l.q + l.at(b, h, t));
  const int64_t keys = l.mask == SAGEATTN_MASK_NONE ? l.len : t + 1;
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < keys; ++j) {
    const float* k = noise.at(l.k + l.at(b, h, j));
    double dot = 0;
    for (size_t c = 0; c < dim; ++c) dot += static_cast<double>(q[c]) * k[c];
    scores.push_back(dot / std::sqrt(static_cast<double>(l.dim)));
    largest = std::max(largest, scores.back());
  }
  std::vector<double> out(dim);
  double sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const double p = std::exp(scores[static_cast<size_t>(j)] - largest);
    const float* v = noise.at(l.v + l.at(b, h, j));
    sum += p;
    for (size_t c = 0; c < dim; ++c) out[c] += p * v[c];
  }
  for (double& x : out) x /= sum;
  return out;
}

// The head alone, contiguous: its tensors one behind the other.
cuda::DeviceMemory copy_head(const Gpu& gpu, const Large& l, const Noise& noise, int64_t b,
                             int64_t h) {
  std::vector<uint16_t> packed;
  for (const int64_t start : {l.q, l.k, l.v}) {
    for (int64_t t = 0; t < l.len; ++t) {
      const uint16_t* row = noise.bits(start + l.at(b, h, t));
      packed.insert(packed.end(), row, row + l.dim);
    }
  }
  return cuda::DeviceMemory::copy_of(gpu.api, packed);
}

std::string check_large(const Gpu& gpu, const Numerics& numerics, const Large& l) {
  static const Noise noise(SAGEATTN_BF16);
  const cuda::CurrentContext current(gpu.api, gpu.device);
  cuda::DeviceMemory input(gpu.api, static_cast<size_t>(l.v + l.span()) * 2);
  noise.fill(input);
  const LargeRun run(gpu, numerics, l, std::move(input));

  // Rows on either side of where 32 bits end, and others.
  std::set<int64_t> exact_rows = {0, 1, l.len / 2, l.len - 1};
  for (const int bits : {31, 32}) {
    const int64_t first_beyond = (int64_t{1} << bits) / l.stride_token + 1;
    if (first_beyond >= l.len) continue;
    exact_rows.insert({first_beyond - 2, first_beyond, (first_beyond + l.len) / 2});
  }
  std::set<int64_t> rows = exact_rows;
  for (int64_t t = 0; t < l.len; t += 37) rows.insert(t);

  for (const auto& [b, h] : {std::pair{0, 0}, std::pair{l.batch - 1, l.heads - 1}}) {
    const std::string head = "batch " + std::to_string(b) + " head " + std::to_string(h);
    double difference = 0, norm = 0;
    for (const int64_t t : exact_rows) {
      const std::vector<double> want = exact_row(l, noise, b, h, t);
      const std::vector<uint16_t> got = run.row(b, h, t);
      for (size_t c = 0; c < want.size(); ++c) {
        difference += std::pow(load(&got[c], SAGEATTN_BF16) - want[c], 2);
        norm += want[c] * want[c];
      }
    }
    const double error = std::sqrt(difference / norm);
    const double limit = sageattn::error_limit(run.info()) + std::ldexp(1.0, -8);  // out is bf16
    if (!(error <= limit)) {
      return head + ": relative error " + std::to_string(error) + ", allowed " +
             std::to_string(limit);
    }
    const int64_t size = int64_t{l.len} * l.dim;
    const Large alone = {1, 1, l.len, l.dim, l.mask, 0, size, 2 * size, size, l.dim, l.dim};
    const LargeRun packed(gpu, numerics, alone, copy_head(gpu, l, noise, b, h));
    for (const int64_t t : rows) {
      if (run.row(b, h, t) != packed.row(0, 0, t)) {
        return head + " row " + std::to_string(t) + " differs from the contiguous head's";
      }
    }
  }
  return {};
}

// One query and one key a sequence: out is V. More blocks than a grid has in y and z.
std::string check_many_blocks(const Gpu& gpu, const Numerics& numerics) {
  static const Noise noise(SAGEATTN_BF16);
  constexpr int kBatch = 66000, kDim = 64;
  const int64_t size = int64_t{kBatch} * kDim;
  const Large l = {kBatch, 1, 1, kDim, SAGEATTN_MASK_NONE, 0, size, 2 * size, kDim, kDim, kDim};
  const cuda::CurrentContext current(gpu.api, gpu.device);
  cuda::DeviceMemory input(gpu.api, static_cast<size_t>(3 * size) * 2);
  noise.fill(input);
  const LargeRun run(gpu, numerics, l, std::move(input));
  for (int b = 0; b < kBatch; b += b < 65000 ? 97 : 1) {
    const std::vector<uint16_t> got = run.row(b, 0, 0);
    const float* want = noise.at(l.v + l.at(b, 0, 0));
    for (size_t c = 0; c < kDim; ++c) {
      const float error = std::fabs(load(&got[c], SAGEATTN_BF16) - want[c]);
      // V and its scale, and out, are rounded; E4M3 with a scale of the sequence takes its mean.
      if (!(error <= std::ldexp(std::fabs(want[c]), -7) + 1e-6f)) {
        return "sequence " + std::to_string(b) + " is not its value";
      }
    }
  }
  return {};
}

}  // namespace

std::vector<NamedCheck> reported_shapes() {
  const auto wide_window = [](Problem& p) { p.mask = {SAGEATTN_MASK_WINDOW, 0, 0}; };
  return {
      compared("#7 causal, q < kv",
               {problem({5}, {9}, kBottomRight), problem({5}, {9}, kTopLeft),
                problem({100}, {300}, kBottomRight), problem({100}, {300}, kTopLeft)}),
      compared("#8 causal 3 x 128",
               {problem({3}, {128}, kBottomRight), problem({3}, {128}, kTopLeft)}),
      compared("#9 V channel of zeros",
               {with(problem({200}, {200}), [](Problem& p) { p.values = Values::Zeros; })},
               first_channel_is_zero),
      compared("#10 V near 1e30",
               {with(problem({200}, {500}), [](Problem& p) { p.values = Values::Large; })},
               all_finite),
      compared("#13 causal, q > kv",
               {problem({128}, {3}, kBottomRight), problem({300}, {100}, kBottomRight),
                problem({300}, {100}, kTopLeft)}),
      compared("#15 kv_len 0", {problem({70}, {0}), problem({70}, {0}, kBottomRight)}),
      {"#16 halves merged by LSE", check_merged},
      compared("#18 one sequence without keys", {with(problem({70, 70, 70}, {90, 90, 90}),
                                                      [](Problem& p) {
                                                        p.seqused = {90, 0, 64};
                                                      })}),
      compared("#20 packed, no keys", {with(problem({7, 5, 130}, {0, 50, 0}, kBottomRight),
                                            [](Problem& p) {
                                              p.batch_mode = SAGEATTN_BATCH_VARLEN;
                                              p.gap = 3;
                                            })}),
      {"#24 heads that do not divide", check_heads},
      compared("#26 V and out transposed", {with(problem({130}, {200}),
                                                 [](Problem& p) {
                                                   p.v_view = View::Transposed;
                                                   p.out_view = View::Transposed;
                                                 })}),
      compared("#30 kv 43, 77, 700",
               {problem({33}, {43}), problem({77}, {77}), problem({64}, {700})}),
      {"#40 called twice with one K", check_twice},
      compared("#41 rows that see no key",
               {with(problem({100}, {50}), wide_window), with(problem({50}, {100}), wide_window)}),
      compared("#42 sm_scale 0, negative",
               {with(problem({130}, {200}), [](Problem& p) { p.sm_scale_set = true; }),
                with(problem({130}, {200}),
                     [](Problem& p) {
                       p.sm_scale_set = true;
                       p.sm_scale = -0.1f;
                     })}),
      compared("#43 GQA causal 1024 x 1023",
               {problem({1024}, {1023}, kBottomRight), problem({1023}, {1024}, kBottomRight)}),
      {"#46 reserved fields", check_reserved},
      {"more than 65,535 blocks", check_many_blocks},
  };
}

std::vector<NamedCheck> large_shapes() {
  const auto large = [](const char* name, const Large& l) {
    return NamedCheck{name, [l](const Gpu& gpu, const Numerics& numerics) {
                        return check_large(gpu, numerics, l);
                      }};
  };
  // Columns of one array [token, 3 * 56 * 128]: elements beyond 2^31 from token 99,864 on, beyond
  // 2^32 from twice that.
  constexpr int64_t kRow = int64_t{3} * 56 * 128;
  // [batch, head, token, channel] with room between batches.
  constexpr int64_t kHead = int64_t{73774} * 128, kTensor = 56 * kHead, kBatch = 2386435072;
  return {
      large("#3 fused QKV, 100,100 tokens", {1, 56, 100100, 128, kBottomRight, 0, kRow / 3,
                                             kRow / 3 * 2, 100100 * kRow, 128, kRow}),
      large("#3 fused QKV, 200,100 tokens",
            {1, 8, 200100, 128, kBottomRight, 0, kRow / 3, kRow / 3 * 2, 200100 * kRow, 128, kRow}),
      large("#6 stride 2,386,435,072",
            {2, 56, 73774, 128, SAGEATTN_MASK_NONE, 0, kTensor, 2 * kTensor, kBatch, kHead, 128}),
  };
}

}  // namespace sageattn_test
