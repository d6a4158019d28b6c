// What must hold whatever the numbers are: laws of attention, and the promises of the header about
// bits. Also the public bug reports of other libraries that a CPU backend can show.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Numerics exact_numerics() { return preset_numerics(SAGEATTN_PRESET_EXACT, 90); }

std::vector<Numerics> presets_and_exact() {
  std::vector<Numerics> list = all_presets();
  list.push_back(exact_numerics());
  return list;
}

std::vector<Numerics> everything() {
  std::vector<Numerics> list = presets_and_exact();
  for (const Numerics& numerics : all_enumerants()) list.push_back(numerics);
  return list;
}

// Throws where the run fails or writes what it must not; for_each_case reports it.
CaseResult must_run(const Problem& problem, const Numerics& numerics, const Data& data,
                    const RunOptions& options = {}) {
  CaseResult result = run_case(problem, numerics, data, options);
  if (result.status != SAGEATTN_OK) throw std::runtime_error(result.message);
  if (!result.violation.empty()) throw std::runtime_error(result.violation);
  return result;
}

// Runs f for each numerics, a few at a time, and expects no report.
void check_each(const std::vector<Numerics>& list,
                const std::function<std::string(const Numerics&)>& f) {
  const std::vector<std::string> reports = for_each_case(static_cast<int>(list.size()), [&](int i) {
    std::string report;
    try {
      report = f(list[i]);
    } catch (const std::exception& e) {
      report = e.what();
    }
    return report.empty() ? report : list[i].name + ": " + report;
  });
  INFO(summary(reports));
  CHECK(reports.empty());
}

Problem base_problem(int qo_len, int kv_len) {
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 64, 64};
  problem.q_dtype = problem.kv_dtype = SAGEATTN_BF16;
  problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {qo_len};
  problem.kv_lens = {kv_len};
  problem.values = Values::Biased;
  problem.seed = 5;
  return problem;
}

// Keys and values at the given indices.
LiteralInput with_keys(const LiteralInput& input, const AttentionShape& s,
                       const std::vector<int>& keys) {
  LiteralInput result = input;
  result.kv_len = static_cast<int>(keys.size());
  result.k.clear();
  result.v.clear();
  const auto append = [](std::vector<float>& to, const std::vector<float>& from, int row,
                         int width) {
    to.insert(to.end(), from.begin() + static_cast<ptrdiff_t>(row) * width,
              from.begin() + static_cast<ptrdiff_t>(row + 1) * width);
  };
  for (const int key : keys) {
    append(result.k, input.k, key, s.num_kv_heads * s.head_dim);
    append(result.v, input.v, key, s.num_kv_heads * s.head_dim_v);
  }
  return result;
}

std::vector<int> range(int begin, int end) {
  std::vector<int> values;
  for (int i = begin; i < end; ++i) values.push_back(i);
  return values;
}

// The bound for a quantized plan; rounding to fp32 for EXACT.
double bound_for(const sageattn_plan_info& info, const Problem& problem, const LiteralInput& input,
                 const ExactOutput& exact) {
  if (info.qk_format == SAGEATTN_QK_NONE) return 1e-6;
  return error_bound(info, exact, plain_attention(info, problem.shape, problem.mask, input));
}

std::string report_if_above(const char* what, double error, double bound) {
  if (error <= bound) return {};
  return std::string(what) + ": error " + std::to_string(error) + ", allowed " +
         std::to_string(bound);
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) largest = std::max(largest, std::fabs(a[i] - b[i]));
  }
  return largest;
}

// Largest difference of lse: twice that of the naive implementation; rounding to fp32 for EXACT.
double lse_bound_for(const sageattn_plan_info& info, const Problem& problem,
                     const LiteralInput& input, const ExactOutput& exact) {
  if (info.qk_format == SAGEATTN_QK_NONE) return 1e-5;
  const ExactOutput plain = plain_attention(info, problem.shape, problem.mask, input);
  return 2 * largest_difference(plain.lse, exact.lse) + 1e-5;
}

}  // namespace

// ---- Laws of attention -------------------------------------------------------------------------

TEST_CASE("the order of keys does not matter", "[properties]") {
  const Problem problem = base_problem(65, 200);
  const Data data = make_data(problem);
  std::vector<int> keys = range(0, 200);
  Random random(3);
  for (int i = 199; i > 0; --i) std::swap(keys[i], keys[random.below(i + 1)]);
  const LiteralInput permuted = with_keys(data[0], problem.shape, keys);
  const ExactOutput exact = exact_attention(problem.shape, problem.scale(), problem.mask, data[0]);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult result = must_run(problem, numerics, {permuted});
    return report_if_above("out", relative_error(widen(result.sequences[0].out), exact.out),
                           bound_for(result.info, problem, permuted, exact));
  });
}

namespace {

// Merges attention over disjoint sets of keys; (0, -inf) is that over none.
LiteralOutput merge(const LiteralOutput& a, const LiteralOutput& b, int channels) {
  LiteralOutput result = a;
  for (size_t row = 0; row < a.lse.size(); ++row) {
    const double largest = std::max(a.lse[row], b.lse[row]);
    if (largest == -kInfinity) continue;
    const double wa = std::exp(a.lse[row] - largest), wb = std::exp(b.lse[row] - largest);
    for (int c = 0; c < channels; ++c) {
      const size_t i = row * channels + c;
      result.out[i] = static_cast<float>((wa * a.out[i] + wb * b.out[i]) / (wa + wb));
    }
    result.lse[row] = static_cast<float>(largest + std::log(wa + wb));
  }
  return result;
}

}  // namespace

TEST_CASE("keys may be split and the parts merged through the log-sum-exp", "[properties]") {
  const Problem whole = base_problem(65, 200);
  const LiteralInput input = make_data(whole)[0];
  const ExactOutput exact = exact_attention(whole.shape, whole.scale(), whole.mask, input);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    for (const int cut : {1, 64, 100, 200}) {
      LiteralOutput parts[2];
      sageattn_plan_info info = {};
      double bound = 0;
      for (int i = 0; i < 2; ++i) {
        const LiteralInput part =
            with_keys(input, whole.shape, i == 0 ? range(0, cut) : range(cut, 200));
        Problem problem = whole;
        problem.kv_lens = {part.kv_len};
        const CaseResult result = must_run(problem, numerics, {part});
        parts[i] = result.sequences[0];
        info = result.info;
      }
      bound = bound_for(info, whole, input, exact);
      const LiteralOutput merged = merge(parts[0], parts[1], whole.shape.head_dim_v);
      std::string report =
          report_if_above("out", relative_error(widen(merged.out), exact.out), bound);
      if (report.empty()) {
        report = report_if_above("lse", largest_difference(widen(merged.lse), exact.lse),
                                 lse_bound_for(info, whole, input, exact));
      }
      if (!report.empty()) return "cut at " + std::to_string(cut) + ": " + report;
    }
    return std::string();
  });
}

TEST_CASE("a constant added to K changes only the log-sum-exp", "[properties]") {
  Problem problem = base_problem(65, 200);
  problem.q_dtype = problem.kv_dtype = SAGEATTN_F32;
  problem.values = Values::Normal;
  LiteralInput input = make_data(problem)[0];
  for (float& x : input.k) x = std::ldexp(std::nearbyint(std::ldexp(x, 12)), -12);
  LiteralInput shifted = input;
  std::vector<double> constant(problem.shape.head_dim);
  for (size_t c = 0; c < constant.size(); ++c) {
    constant[c] = static_cast<double>(c % 5) * 4 - 8;  // K + constant is exact
  }
  for (size_t i = 0; i < shifted.k.size(); ++i) {
    shifted.k[i] += static_cast<float>(constant[i % constant.size()]);
  }
  const ExactOutput exact = exact_attention(problem.shape, problem.scale(), problem.mask, input);
  std::vector<double> lse = exact.lse;
  for (size_t row = 0; row < lse.size(); ++row) {
    for (size_t c = 0; c < constant.size(); ++c) {
      lse[row] += problem.scale() * input.q[row * constant.size() + c] * constant[c];
    }
  }
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult result = must_run(problem, numerics, {shifted});
    // The bound of the problem without the constant: smoothing takes it out.
    std::string report =
        report_if_above("out", relative_error(widen(result.sequences[0].out), exact.out),
                        bound_for(result.info, problem, input, exact));
    if (report.empty()) {
      report = report_if_above("lse", largest_difference(widen(result.sequences[0].lse), lse),
                               lse_bound_for(result.info, problem, input, exact));
    }
    return report;
  });
}

TEST_CASE("a causal row is the run on its prefix", "[properties]") {
  Problem problem = base_problem(200, 200);
  problem.mask.kind = SAGEATTN_MASK_CAUSAL_TOP_LEFT;
  const LiteralInput input = make_data(problem)[0];
  const ExactOutput exact = exact_attention(problem.shape, problem.scale(), problem.mask, input);
  const int width = problem.shape.num_qo_heads * problem.shape.head_dim_v;
  const int q_width = problem.shape.num_qo_heads * problem.shape.head_dim;
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult full = must_run(problem, numerics, {input});
    std::vector<double> of_full, of_prefix, of_exact;
    const auto append_row = [&](std::vector<double>& to, const auto& from, int row) {
      to.insert(to.end(), from.begin() + static_cast<ptrdiff_t>(row) * width,
                from.begin() + static_cast<ptrdiff_t>(row + 1) * width);
    };
    for (const int i : {0, 1, 2, 30, 63, 64, 65, 127, 128, 129, 198, 199}) {
      LiteralInput prefix = with_keys(input, problem.shape, range(0, i + 1));
      prefix.qo_len = i + 1;
      prefix.q.resize(static_cast<size_t>(i + 1) * q_width);
      Problem part = problem;
      part.qo_lens = part.kv_lens = {i + 1};
      const CaseResult result = must_run(part, numerics, {prefix});
      append_row(of_prefix, result.sequences[0].out, i);
      append_row(of_full, full.sequences[0].out, i);
      append_row(of_exact, exact.out, i);
    }
    const double bound = bound_for(full.info, problem, input, exact);
    std::string report = report_if_above("full run", relative_error(of_full, of_exact), bound);
    if (report.empty()) {
      report = report_if_above("prefix runs", relative_error(of_prefix, of_exact), bound);
    }
    return report;
  });
}

// ---- Promises about bits -----------------------------------------------------------------------

TEST_CASE("repeated KV heads give the bits of grouped heads", "[properties]") {
  for (const int ratio : {2, 3}) {
    Problem grouped = base_problem(40, 130);
    grouped.shape = {2 * ratio, 2, 40, 20};
    Problem repeated = grouped;
    repeated.shape.num_kv_heads = grouped.shape.num_qo_heads;
    const Data data = make_data(grouped);
    LiteralInput copy = data[0];
    const auto repeat_heads = [&](const std::vector<float>& x, int channels) {
      std::vector<float> result;
      for (int t = 0; t < copy.kv_len; ++t) {
        for (int h = 0; h < 2 * ratio; ++h) {
          const auto row = x.begin() + (static_cast<ptrdiff_t>(t) * 2 + h / ratio) * channels;
          result.insert(result.end(), row, row + channels);
        }
      }
      return result;
    };
    copy.k = repeat_heads(data[0].k, grouped.shape.head_dim);
    copy.v = repeat_heads(data[0].v, grouped.shape.head_dim_v);
    check_each(everything(), [&](const Numerics& numerics) {
      // Its factors are shared by the heads of a group.
      if (numerics.desc.rotation == SAGEATTN_ROTATION_SMOOTHATTN) return std::string();
      return compare_bits(must_run(repeated, numerics, {copy}).sequences[0],
                          must_run(grouped, numerics, data).sequences[0], grouped, "repeated");
    });
  }
}

TEST_CASE("a packed sequence has the bits it has alone", "[properties]") {
  Problem packed = base_problem(0, 0);
  packed.batch_mode = SAGEATTN_BATCH_VARLEN;
  packed.shape = {4, 2, 40, 64};
  packed.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  packed.qo_lens = {3, 0, 65, 129, 1};
  packed.kv_lens = {70, 9, 0, 65, 130};
  packed.gap = 2;
  const Data data = make_data(packed);
  check_each(everything(), [&](const Numerics& numerics) {
    const CaseResult together = must_run(packed, numerics, data);
    for (int b = 0; b < packed.batch(); ++b) {
      for (const int32_t mode : {SAGEATTN_BATCH_VARLEN, SAGEATTN_BATCH_DENSE}) {
        Problem alone = packed;
        alone.batch_mode = mode;
        alone.gap = 0;
        alone.qo_lens = {packed.qo_lens[b]};
        alone.kv_lens = {packed.kv_lens[b]};
        std::string report =
            compare_bits(together.sequences[b], must_run(alone, numerics, {data[b]}).sequences[0],
                         alone, "sequence " + std::to_string(b));
        if (!report.empty()) return report;
      }
    }
    return std::string();
  });
}

TEST_CASE("keys beyond seqused_kv do not exist", "[properties]") {
  Problem padded = base_problem(33, 150);
  padded.qo_lens = {33, 33};
  padded.kv_lens = {150, 150};
  padded.seqused = {64, 97};
  padded.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  const Data data = make_data(padded);
  check_each(everything(), [&](const Numerics& numerics) {
    const CaseResult together = must_run(padded, numerics, data);
    for (int b = 0; b < 2; ++b) {
      Problem cut = padded;
      cut.qo_lens = {33};
      cut.kv_lens = {padded.seqused[b]};
      cut.seqused.clear();
      std::string report = compare_bits(
          together.sequences[b], must_run(cut, numerics, {data[b]}).sequences[0], cut, "padded");
      if (!report.empty()) return report;
    }
    return std::string();
  });
}

TEST_CASE("the same bits every time, with any number of threads, with or without lse",
          "[properties]") {
  const std::vector<Problem> grid = make_grid(24, 6);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    for (const Problem& problem : grid) {
      const Data data = make_data(problem);
      const CaseResult once = must_run(problem, numerics, data);
      for (const int threads : {1, 2, 5}) {
        for (const bool want_lse : {true, false}) {
          RunOptions options;
          options.threads = threads;
          options.want_lse = want_lse;
          CaseResult again = must_run(problem, numerics, data, options);
          for (int b = 0; b < problem.batch(); ++b) {
            if (!want_lse) again.sequences[b].lse = once.sequences[b].lse;
            const std::string report = compare_bits(again.sequences[b], once.sequences[b], problem,
                                                    std::to_string(threads) + " threads");
            if (!report.empty()) return describe(problem, numerics) + "\n  " + report;
          }
        }
      }
    }
    return std::string();
  });
}

TEST_CASE("the layout in memory does not matter", "[properties]") {  // also users.md #26
  Problem plain = base_problem(20, 70);
  plain.shape = {4, 2, 24, 40};
  plain.qo_lens = {20, 20};
  plain.kv_lens = {70, 70};
  const Data data = make_data(plain);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult want = must_run(plain, numerics, data);
    for (const int32_t layout : {SAGEATTN_LAYOUT_NHD, SAGEATTN_LAYOUT_HND}) {
      for (const View view : {View::Default, View::Padded, View::OtherMajor, View::Transposed,
                              View::Reversed, View::Interleaved}) {
        Problem other = plain;
        other.layout = layout;
        other.q_view = other.k_view = other.v_view = other.out_view = view;
        if (view == View::Padded || view == View::Reversed) other.lse_view = view;
        const CaseResult got = must_run(other, numerics, data);
        for (int b = 0; b < 2; ++b) {
          std::string report =
              compare_bits(got.sequences[b], want.sequences[b], other, describe(other, numerics));
          if (!report.empty()) return report;
        }
      }
    }
    return std::string();
  });
}

// ---- Public bug reports of other libraries (numbers of the project's list) ----------------------

// #3, #6: strides beyond 32 bits, in bytes and in elements.
TEST_CASE("strides of more than 2^32 elements", "[properties]") {
  constexpr int kTokens = 5, kDim = 8;
  constexpr int64_t kStride = (int64_t{1} << 32) + 24;  // elements of a token
  constexpr size_t kSize = static_cast<size_t>(kTokens) * kStride * 2;
  void* memory = mmap(nullptr, kSize, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    WARN("cannot reserve address space: not tested");
    return;
  }
  Problem problem;
  problem.id = 1;
  problem.shape = {1, 1, kDim, kDim};
  problem.qo_lens = problem.kv_lens = {kTokens};
  problem.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  problem.seed = 9;
  const Data data = make_data(problem);
  uint16_t* const base = static_cast<uint16_t*>(memory);
  // q, k, v and out side by side in every token; tokens in reverse order with a negative stride.
  for (const int64_t stride : {kStride, -kStride}) {
    uint16_t* const origin = stride > 0 ? base : base + (kTokens - 1) * kStride;
    for (int t = 0; t < kTokens; ++t) {
      for (int c = 0; c < kDim; ++c) {
        uint16_t* const row = origin + t * stride + c;
        store(row, SAGEATTN_F16, data[0].q[t * kDim + c]);
        store(row + kDim, SAGEATTN_F16, data[0].k[t * kDim + c]);
        store(row + 2 * kDim, SAGEATTN_F16, data[0].v[t * kDim + c]);
      }
    }
    for (const Numerics& numerics : presets_and_exact()) {
      INFO(numerics.name);
      sageattn_attn_desc desc = make_desc(problem, numerics);
      desc.max_qo_len = desc.max_kv_len = kTokens;
      sageattn_plan* plan = nullptr;
      REQUIRE(sageattn_plan_create(shared_context(numerics.arch, 1), &desc, &plan, nullptr) ==
              SAGEATTN_OK);
      sageattn_plan_info info = {};
      info.struct_size = sizeof info;
      REQUIRE(sageattn_plan_get_info(plan, &info, nullptr) == SAGEATTN_OK);
      std::vector<unsigned char> workspace(info.min_workspace + info.workspace_alignment);
      const uintptr_t address = reinterpret_cast<uintptr_t>(workspace.data());
      const uintptr_t alignment = static_cast<uintptr_t>(std::max(info.workspace_alignment, 1));
      unsigned char* const aligned =
          workspace.data() + (alignment - address % alignment) % alignment;

      sageattn_execute_args args = {};
      args.struct_size = sizeof args;
      args.batch = 1;
      args.qo_len = args.kv_len = kTokens;
      args.q = {origin, 0, stride, 0, 1};
      args.k = {origin + kDim, 0, stride, 0, 1};
      args.v = {origin + 2 * kDim, 0, stride, 0, 1};
      args.out = {origin + 3 * kDim, 0, stride, 0, 1};
      sageattn_error error = {};
      error.struct_size = sizeof error;
      const int32_t status = sageattn_execute(
          plan, &args, aligned, static_cast<size_t>(info.min_workspace), nullptr, &error);
      sageattn_plan_destroy(plan);
      INFO(error.message);
      REQUIRE(status == SAGEATTN_OK);
      std::vector<float> got;
      for (int t = 0; t < kTokens; ++t) {
        for (int c = 0; c < kDim; ++c) {
          got.push_back(load(origin + t * stride + 3 * kDim + c, SAGEATTN_F16));
        }
      }
      const CaseResult want = run_case(problem, numerics, data);
      CHECK(compare_bits(got, want.sequences[0].out, "far apart", kDim, 1) == "");
    }
  }
  munmap(memory, kSize);
}

// #6: a shape whose head stride exceeds 31 bits plans.
TEST_CASE("a very large shape plans", "[properties]") {
  for (const Numerics& numerics : presets_and_exact()) {
    Problem problem;
    problem.shape = {56, 56, 128, 128};
    sageattn_attn_desc desc = make_desc(problem, numerics);
    desc.max_qo_len = desc.max_kv_len = 600000;
    desc.max_batch = 4;
    sageattn_plan_info info = {};
    info.struct_size = sizeof info;
    INFO(numerics.name);
    CHECK(sageattn_plan_query(shared_context(numerics.arch, 1), &desc, &info, nullptr) ==
          SAGEATTN_OK);
    CHECK(info.min_workspace >= 0);
  }
}

// #7, #8, #13, #41: alignment of masks, rows that see nothing.
TEST_CASE("both causal alignments, and rows that see nothing", "[properties]") {
  struct Case {
    int qo_len, kv_len;
  };
  for (const Case shape : {Case{3, 128}, Case{128, 3}, Case{5, 5}, Case{130, 65}, Case{65, 130}}) {
    for (const MaskSpec mask :
         {MaskSpec{SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT, 0, 0},
          MaskSpec{SAGEATTN_MASK_CAUSAL_TOP_LEFT, 0, 0}, MaskSpec{SAGEATTN_MASK_WINDOW, 2, 0},
          MaskSpec{SAGEATTN_MASK_WINDOW, 0, 1}}) {
      Problem problem = base_problem(shape.qo_len, shape.kv_len);
      problem.mask = mask;
      const LiteralInput input = make_data(problem)[0];
      const ExactOutput exact =
          exact_attention(problem.shape, problem.scale(), problem.mask, input);
      check_each(presets_and_exact(), [&](const Numerics& numerics) {
        const CaseResult result = must_run(problem, numerics, {input});
        const LiteralOutput& got = result.sequences[0];
        const int dv = problem.shape.head_dim_v;
        for (size_t row = 0; row < got.lse.size(); ++row) {
          const bool sees_nothing = exact.lse[row] == -kInfinity;
          if ((got.lse[row] == -kInfinity) != sees_nothing) {
            return describe(problem, numerics) + "\n  lse of row " + std::to_string(row);
          }
          for (int c = 0; sees_nothing && c < dv; ++c) {
            if (got.out[row * dv + c] != 0) {
              return describe(problem, numerics) + "\n  out of row " + std::to_string(row);
            }
          }
        }
        const std::string report = report_if_above("out", relative_error(widen(got.out), exact.out),
                                                   bound_for(result.info, problem, input, exact));
        return report.empty() ? report : describe(problem, numerics) + "\n  " + report;
      });
    }
  }
}

// #14: what merging two empty parts must give, and #16: natural logarithms.
TEST_CASE("merging empty parts", "[properties]") {
  LiteralOutput empty;
  empty.out = {0, 0};
  empty.lse = {-std::numeric_limits<float>::infinity()};
  const LiteralOutput merged = merge(empty, empty, 2);
  CHECK(merged.out == std::vector<float>{0, 0});
  CHECK(merged.lse[0] == -std::numeric_limits<float>::infinity());

  // 7 equal keys: lse = ln 7 + the score.
  Problem problem = base_problem(1, 7);
  problem.shape = {1, 1, 4, 4};
  LiteralInput input = make_data(problem)[0];
  std::fill(input.q.begin(), input.q.end(), 1.0f);
  std::fill(input.k.begin(), input.k.end(), 2.0f);
  for (const Numerics& numerics : presets_and_exact()) {
    INFO(numerics.name);
    const CaseResult result = run_case(problem, numerics, {input});
    REQUIRE(result.status == SAGEATTN_OK);
    CHECK(std::fabs(result.sequences[0].lse[0] - (std::log(7.0) + 4)) < 1e-5);
  }
}

// #24: heads that do not divide are refused.
// Scores of 10^9, whose last place is far above 1: the largest must still get a probability.
TEST_CASE("huge scores choose a key", "[properties]") {
  constexpr int kDim = 64, kQueries = 70, kKeys = 200;
  Problem problem;
  problem.id = 8800;
  problem.shape = {1, 1, kDim, kDim};
  problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {kQueries};
  problem.kv_lens = {kKeys};
  problem.seed = 88;
  Data data = make_data(problem);
  for (float& x : data[0].q) x = round_dtype(x * 1.5e4f, SAGEATTN_F16);
  for (float& x : data[0].k) x = round_dtype(x * 1.5e4f, SAGEATTN_F16);
  for (float& x : data[0].v) x = 1;
  std::vector<Numerics> list = all_presets();
  for (const Numerics& numerics : all_enumerants()) list.push_back(numerics);
  for (const Numerics& numerics : list) {
    INFO(numerics.name);
    const CaseResult result = run_case(problem, numerics, data);
    REQUIRE(result.status == SAGEATTN_OK);
    int wrong = 0;
    for (const float x : result.sequences[0].out) wrong += !(std::fabs(x - 1) < 0.07f);
    for (const float x : result.sequences[0].lse) wrong += !std::isfinite(x);
    CHECK(wrong == 0);
  }
}

TEST_CASE("query heads that are no multiple of KV heads are refused", "[properties]") {
  for (const auto& [qo_heads, kv_heads] : {std::pair{33, 2}, std::pair{3, 2}, std::pair{2, 4}}) {
    Problem problem = base_problem(1, 1);
    problem.shape.num_qo_heads = qo_heads;
    problem.shape.num_kv_heads = kv_heads;
    for (const Numerics& numerics : presets_and_exact()) {
      sageattn_attn_desc desc = make_desc(problem, numerics);
      desc.max_qo_len = desc.max_kv_len = 1;
      CHECK(sageattn_plan_query(shared_context(numerics.arch, 1), &desc, nullptr, nullptr) ==
            SAGEATTN_E_INVALID_ARGUMENT);
    }
  }
}

// #42: softmax scales of zero and below.
TEST_CASE("softmax scale zero and negative", "[properties]") {
  Problem problem = base_problem(33, 150);
  problem.sm_scale_set = true;
  const LiteralInput input = make_data(problem)[0];
  const AttentionShape& s = problem.shape;
  for (const float scale : {0.0f, -0.0f, -0.125f, -1.0f}) {
    problem.sm_scale = scale;
    const ExactOutput exact = exact_attention(s, scale, problem.mask, input);
    if (scale == 0) {
      double mean = 0;
      for (int j = 0; j < 150; ++j) mean += input.v[static_cast<size_t>(j) * s.head_dim_v] / 150.0;
      REQUIRE(std::fabs(exact.out[0] - mean) < 1e-12);
    }
    check_each(presets_and_exact(), [&](const Numerics& numerics) {
      const CaseResult result = must_run(problem, numerics, {input});
      return report_if_above("out", relative_error(widen(result.sequences[0].out), exact.out),
                             bound_for(result.info, problem, input, exact));
    });
  }
}

// #43: causal, grouped heads, lengths off by one.
TEST_CASE("causal grouped heads at lengths off by one", "[properties]") {
  for (const auto& [qo_len, kv_len] :
       {std::pair{512, 511}, std::pair{511, 512}, std::pair{257, 256}}) {
    Problem problem = base_problem(qo_len, kv_len);
    problem.shape = {2, 1, 16, 16};
    problem.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
    const LiteralInput input = make_data(problem)[0];
    const ExactOutput exact = exact_attention(problem.shape, problem.scale(), problem.mask, input);
    check_each(presets_and_exact(), [&](const Numerics& numerics) {
      const CaseResult result = must_run(problem, numerics, {input});
      return report_if_above("out", relative_error(widen(result.sequences[0].out), exact.out),
                             bound_for(result.info, problem, input, exact));
    });
  }
}
