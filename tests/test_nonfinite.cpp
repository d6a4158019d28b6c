// NaN, infinities, zeros, very large values, no keys at all, and lengths that are nonsense: never a
// finite wrong answer, and never a trace in what has nothing to do with them.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<Numerics> presets_and_exact() {
  std::vector<Numerics> list = all_presets();
  list.push_back(preset_numerics(SAGEATTN_PRESET_EXACT, 90));
  return list;
}

std::vector<Numerics> everything() {
  std::vector<Numerics> list = presets_and_exact();
  for (const Numerics& numerics : all_enumerants()) list.push_back(numerics);
  return list;
}

CaseResult must_run(const Problem& problem, const Numerics& numerics, const Data& data,
                    const RunOptions& options = {}) {
  CaseResult result = run_case(problem, numerics, data, options);
  if (result.status != SAGEATTN_OK) throw std::runtime_error(result.message);
  if (!result.violation.empty()) throw std::runtime_error(result.violation);
  return result;
}

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

bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

enum Which { kQ, kK, kV };

// Two sequences, 4 query heads on 2 KV heads; one element of sequence 0 becomes `value`.
struct Poison {
  Which which;
  int token, head, channel;
  float value;
};

std::string check_poison(const Problem& problem, const Numerics& numerics, const Data& clean_data,
                         const CaseResult& clean, const Poison& poison) {
  const AttentionShape& s = problem.shape;
  Data data = clean_data;
  LiteralInput& input = data[0];
  std::vector<float>& x = poison.which == kQ ? input.q : poison.which == kK ? input.k : input.v;
  const int heads = poison.which == kQ ? s.num_qo_heads : s.num_kv_heads;
  const int channels = poison.which == kV ? s.head_dim_v : s.head_dim;
  x[(static_cast<size_t>(poison.token) * heads + poison.head) * channels + poison.channel] =
      poison.value;
  const CaseResult got = must_run(problem, numerics, data);
  const std::string where = describe(problem, numerics) + "\n  " + std::to_string(poison.value) +
                            " in " + "qkv"[poison.which] + " at token " +
                            std::to_string(poison.token) + ": ";

  const std::string other =
      compare_bits(got.sequences[1], clean.sequences[1], problem, "the other sequence");
  if (!other.empty()) return where + other;

  // Which rows see the poison: those whose exact result is NaN in its place.
  for (int i = 0; i < input.qo_len; ++i) {
    for (int head = 0; head < s.num_qo_heads; ++head) {
      const size_t row = static_cast<size_t>(i) * s.num_qo_heads + head;
      const int kv_head = head / (s.num_qo_heads / s.num_kv_heads);
      const bool own_head = (poison.which == kQ ? head : kv_head) == poison.head;
      bool attends = own_head;
      if (problem.mask.kind == SAGEATTN_MASK_CAUSAL_TOP_LEFT) {
        if (poison.which == kQ) attends = attends && i == poison.token;
        if (poison.which != kQ) attends = attends && poison.token <= i;
      } else if (poison.which == kQ) {
        attends = attends && i == poison.token;
      }
      const std::string place = "row " + std::to_string(i) + " head " + std::to_string(head);
      for (int c = 0; c < s.head_dim_v; ++c) {
        const float value = got.sequences[0].out[row * s.head_dim_v + c];
        const float before = clean.sequences[0].out[row * s.head_dim_v + c];
        const bool must_be_nan = attends && (poison.which != kV || c == poison.channel);
        if (must_be_nan && !std::isnan(value)) {
          return where + place + " attends to it, but is " + std::to_string(value);
        }
        // Whatever is finite is what it was without the poison. Another head must be.
        if (!must_be_nan && !same_bits(value, before) && (!own_head || !std::isnan(value))) {
          return where + place + " is " + std::to_string(value) + " instead of " +
                 std::to_string(before);
        }
      }
      const float lse = got.sequences[0].lse[row], lse_before = clean.sequences[0].lse[row];
      if (poison.which == kV || !own_head) {
        if (!same_bits(lse, lse_before)) return where + place + ": lse changed";
      } else if (attends ? !std::isnan(lse) : !std::isnan(lse) && !same_bits(lse, lse_before)) {
        return where + place + ": lse is " + std::to_string(lse);
      }
    }
  }
  return {};
}

}  // namespace

TEST_CASE("NaN and infinities never become a finite wrong answer", "[nonfinite]") {
  Problem problem;
  problem.id = 1;
  problem.shape = {4, 2, 16, 24};
  problem.q_dtype = problem.kv_dtype = SAGEATTN_BF16;
  problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {150, 150};
  problem.kv_lens = {150, 150};
  problem.seed = 11;
  for (const int32_t kind : {SAGEATTN_MASK_NONE, SAGEATTN_MASK_CAUSAL_TOP_LEFT}) {
    problem.mask.kind = kind;
    const Data data = make_data(problem);
    check_each(everything(), [&](const Numerics& numerics) {
      // EXACT: test_exact.cpp. SMOOTHATTN: its factors are shared by the heads of a group.
      if (numerics.desc.qk_format == SAGEATTN_QK_NONE) return std::string();
      if (numerics.desc.rotation == SAGEATTN_ROTATION_SMOOTHATTN) return std::string();
      const CaseResult clean = must_run(problem, numerics, data);
      const Poison poisons[] = {{kQ, 40, 1, 3, kNaN}, {kQ, 149, 2, 0, kInf},
                                {kK, 0, 1, 15, kNaN}, {kK, 70, 0, 7, -kInf},
                                {kV, 1, 0, 23, kNaN}, {kV, 131, 1, 5, kInf}};
      for (const Poison& poison : poisons) {
        std::string report = check_poison(problem, numerics, data, clean, poison);
        if (!report.empty()) return report;
      }
      return std::string();
    });
  }
}

// EXACT: rows that do not see the poison keep their bits; so do all other heads and sequences.
TEST_CASE("EXACT confines NaN to the rows that see it", "[nonfinite]") {
  Problem problem;
  problem.id = 1;
  problem.shape = {4, 2, 16, 24};
  problem.qo_lens = {70, 70};
  problem.kv_lens = {70, 70};
  problem.mask.kind = SAGEATTN_MASK_CAUSAL_TOP_LEFT;
  problem.seed = 12;
  const Data data = make_data(problem);
  const Numerics numerics = preset_numerics(SAGEATTN_PRESET_EXACT, 90);
  const CaseResult clean = must_run(problem, numerics, data);
  for (const Poison& poison : {Poison{kQ, 40, 1, 3, kNaN}, Poison{kK, 33, 1, 15, kNaN},
                               Poison{kV, 1, 0, 23, kNaN}, Poison{kV, 60, 1, 5, kNaN}}) {
    CHECK(check_poison(problem, numerics, data, clean, poison) == "");
  }
}

TEST_CASE("a zero channel of V stays zero", "[nonfinite]") {  // users.md #9
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 32, 16};
  problem.q_dtype = problem.kv_dtype = problem.out_dtype = SAGEATTN_BF16;
  problem.qo_lens = {70};
  problem.kv_lens = {200};
  problem.seed = 13;
  Data data = make_data(problem);
  for (size_t i = 0; i < data[0].v.size(); i += 16) data[0].v[i + 9] = 0;
  check_each(everything(), [&](const Numerics& numerics) {
    const CaseResult result = must_run(problem, numerics, data);
    const std::vector<float>& out = result.sequences[0].out;
    for (size_t i = 0; i < out.size(); ++i) {
      if (i % 16 == 9 ? out[i] != 0 : !std::isfinite(out[i]) || out[i] == 0) {
        return "out " + std::to_string(i) + " is " + std::to_string(out[i]);
      }
    }
    return std::string();
  });
}

TEST_CASE("all inputs zero", "[nonfinite]") {
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 32, 16};
  problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {3};
  problem.kv_lens = {130};
  Data data = make_data(problem);
  for (std::vector<float>* x : {&data[0].q, &data[0].k, &data[0].v}) {
    std::fill(x->begin(), x->end(), 0.0f);
  }
  check_each(everything(), [&](const Numerics& numerics) {
    const CaseResult result = must_run(problem, numerics, data);
    for (const float x : result.sequences[0].out) {
      if (x != 0) return "out is " + std::to_string(x);
    }
    for (const float x : result.sequences[0].lse) {
      if (std::fabs(x - std::log(130.0)) > 1e-5) return "lse is " + std::to_string(x);
    }
    return std::string();
  });
}

TEST_CASE("very large V stays finite", "[nonfinite]") {  // users.md #10
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 32, 16};
  problem.q_dtype = problem.kv_dtype = problem.out_dtype = SAGEATTN_BF16;
  problem.qo_lens = {70};
  problem.kv_lens = {200};
  problem.values = Values::Large;
  problem.seed = 14;
  Data data = make_data(problem);
  // All of one sign, so that nothing cancels in the accumulators.
  for (size_t i = 0; i < data[0].v.size(); i += 2) data[0].v[i] = std::fabs(data[0].v[i]);
  const ExactOutput exact = exact_attention(problem.shape, problem.scale(), problem.mask, data[0]);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult result = must_run(problem, numerics, data);
    for (const float x : result.sequences[0].out) {
      if (!std::isfinite(x)) return std::string("out is not finite");
    }
    double bound = 0.005;  // EXACT: bf16
    if (result.info.qk_format != SAGEATTN_QK_NONE) {
      bound = error_bound(result.info, exact,
                          plain_attention(result.info, problem.shape, problem.mask, data[0]));
    }
    const double error = relative_error(widen(result.sequences[0].out), exact.out);
    return error <= bound ? std::string()
                          : "error " + std::to_string(error) + ", allowed " + std::to_string(bound);
  });
}

TEST_CASE("sequences without keys give 0 and -inf, and leave others alone", "[nonfinite]") {
  // users.md #15, #18, #20
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 40, 24};
  problem.batch_mode = SAGEATTN_BATCH_VARLEN;
  problem.qo_lens = {5, 66, 5};
  problem.kv_lens = {9, 0, 9};
  problem.seed = 15;
  check_each(everything(), [&](const Numerics& numerics) {
    const Data data = make_data(problem);
    const CaseResult packed = must_run(problem, numerics, data);
    for (const float x : packed.sequences[1].out) {
      if (x != 0) return "out is " + std::to_string(x);
    }
    for (const float x : packed.sequences[1].lse) {
      if (x != -kInf) return "lse is " + std::to_string(x);
    }
    // The same through seqused, dense.
    Problem dense = problem;
    dense.batch_mode = SAGEATTN_BATCH_DENSE;
    dense.qo_lens = {5, 5, 5};
    dense.kv_lens = {9, 9, 9};
    dense.seqused = {9, 0, 9};
    Data dense_data = make_data(dense);
    dense_data[0] = data[0];
    dense_data[2] = data[2];
    const CaseResult batched = must_run(dense, numerics, dense_data);
    for (const float x : batched.sequences[1].lse) {
      if (x != -kInf) return "dense: lse is " + std::to_string(x);
    }
    for (const int b : {0, 2}) {
      std::string report = compare_bits(batched.sequences[b], packed.sequences[b], problem,
                                        "sequence " + std::to_string(b));
      if (!report.empty()) return report;
    }
    // No keys at all: NULL data.
    Problem none = dense;
    none.seqused.clear();
    none.kv_lens = {0, 0, 0};
    for (const LiteralOutput& output : must_run(none, numerics, make_data(none)).sequences) {
      for (const float x : output.out) {
        if (x != 0) return "no keys: out is " + std::to_string(x);
      }
      for (const float x : output.lse) {
        if (x != -kInf) return "no keys: lse is " + std::to_string(x);
      }
    }
    // No queries, no sequences.
    none.qo_lens = {0, 0, 0};
    must_run(none, numerics, make_data(none));
    none.qo_lens.clear();
    none.kv_lens.clear();
    must_run(none, numerics, {});
    return std::string();
  });
}

// ---- Lengths that are nonsense -----------------------------------------------------------------

namespace {

enum class Row { Right, NaN, Untouched, Any };

struct Hostile {
  const char* what;
  std::vector<int32_t> cu_q, cu_kv, seqused;  // empty: the true ones
  std::vector<int32_t> status;
  // Expected of rows begin .. end-1; all others as in the run with true lengths.
  struct Range {
    int begin, end;
    Row row;
  };
  std::vector<Range> ranges;
};

constexpr int32_t kLowest = std::numeric_limits<int32_t>::min();
constexpr int32_t kHighest = std::numeric_limits<int32_t>::max();

}  // namespace

TEST_CASE("nonsense lengths poison their own rows only", "[nonfinite]") {
  Problem problem;
  problem.id = 3;  // a multiple of 3: limits are 5 above what is needed
  problem.shape = {2, 1, 24, 16};
  problem.batch_mode = SAGEATTN_BATCH_VARLEN;
  problem.mask.kind = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT;
  problem.qo_lens = {5, 7, 4};  // cu_q 3, 8, 15, 19; total 22; max_qo_len 12
  problem.kv_lens = {6, 8, 5};  // cu_kv 3, 9, 17, 22; total 25; max_kv_len 13
  problem.gap = 3;
  problem.seed = 16;
  const Data data = make_data(problem);

  const Row nan = Row::NaN, any = Row::Any, untouched = Row::Untouched;
  // Any: rows below an earlier entry, which may belong to an earlier sequence.
  // Rows 0..2 and 19..21 belong to no sequence: untouched in the run with true lengths.
  const Hostile cases[] = {
      {"negative start", {-2, 8, 15, 19}, {}, {}, {1, 0, 0}, {{0, 8, nan}}},
      {"lowest start", {kLowest, 8, 15, 19}, {}, {}, {1, 0, 0}, {{0, 8, any}}},
      {"end below start, and the start after it below an earlier entry",
       {3, 8, 6, 15},
       {},
       {},
       {0, 1, 1},
       {{6, 8, any}, {8, 15, nan}, {15, 19, untouched}}},
      {"end above the total", {3, 8, 15, 23}, {}, {}, {0, 0, 1}, {{15, 22, nan}}},
      {"highest end", {3, 8, 15, kHighest}, {}, {}, {0, 0, 1}, {{15, 22, nan}}},
      {"longer than the limit",
       {3, 8, 21, 22},
       {},
       {},
       {0, 1, 0},
       {{8, 20, nan}, {20, 21, untouched}, {21, 22, nan}}},
      {"start above the total",
       {30, 8, 15, 19},
       {},
       {},
       {1, 1, 1},
       {{3, 8, untouched}, {8, 19, any}}},
      {"all the highest",
       {kHighest, kHighest, kHighest, kHighest},
       {},
       {},
       {1, 1, 1},
       {{3, 19, untouched}}},
      {"all the lowest",
       {kLowest, kLowest, kLowest, kLowest},
       {},
       {},
       {1, 1, 1},
       {{3, 19, untouched}}},
      {"keys: negative start", {}, {-1, 9, 17, 22}, {}, {1, 0, 0}, {{3, 8, nan}}},
      {"keys: lowest start", {}, {kLowest, 9, 17, 22}, {}, {1, 0, 0}, {{3, 8, nan}}},
      {"keys: end above the total", {}, {3, 9, 17, 26}, {}, {0, 0, 1}, {{15, 19, nan}}},
      {"keys: highest end", {}, {3, 9, 17, kHighest}, {}, {0, 0, 1}, {{15, 19, nan}}},
      {"keys: end below start", {}, {3, 9, 5, 17}, {}, {0, 1, 1}, {{8, 19, nan}}},
      {"keys: longer than the limit",
       {},
       {3, 9, 23, 25},
       {},
       {0, 1, 0},
       {{8, 15, nan}, {15, 19, any}}},
      {"seqused negative", {}, {}, {-1, 8, 5}, {1, 0, 0}, {{3, 8, nan}}},
      {"seqused lowest and highest",
       {},
       {},
       {kLowest, 8, kHighest},
       {1, 0, 1},
       {{3, 8, nan}, {15, 19, nan}}},
      {"seqused above kv_len", {}, {}, {6, 9, 5}, {0, 1, 0}, {{8, 15, nan}}},
  };

  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult clean = must_run(problem, numerics, data);
    const AttentionShape& s = problem.shape;
    for (const Hostile& hostile : cases) {
      RunOptions options;
      options.lengths.cu_q = hostile.cu_q;
      options.lengths.cu_kv = hostile.cu_kv;
      options.lengths.used = hostile.seqused;
      const CaseResult got = must_run(problem, numerics, data, options);
      const std::string where = std::string(hostile.what) + ": ";
      if (got.sequence_status != hostile.status) return where + "status words";
      for (int t = 0; t < 22; ++t) {
        Row expected = clean.packed_row_untouched[t] ? Row::Untouched : Row::Right;
        for (const Hostile::Range& range : hostile.ranges) {
          if (t >= range.begin && t < range.end) expected = range.row;
        }
        const std::string row = where + "row " + std::to_string(t);
        if (expected == Row::Untouched && !got.packed_row_untouched[t]) return row + " was written";
        const size_t width = static_cast<size_t>(s.num_qo_heads) * s.head_dim_v;
        const auto check = [&](const std::vector<float>& x, const std::vector<float>& want,
                               size_t count) {
          for (size_t i = t * count; i < (t + 1) * count; ++i) {
            if (expected == Row::NaN && !std::isnan(x[i])) return false;
            if (expected == Row::Right && !same_bits(x[i], want[i])) return false;
          }
          return true;
        };
        if (!check(got.packed.out, clean.packed.out, width)) return row + ": out is wrong";
        if (!check(got.packed.lse, clean.packed.lse, s.num_qo_heads)) return row + ": lse is wrong";
      }
    }
    return std::string();
  });
}

TEST_CASE("nonsense seqused_kv of a dense batch", "[nonfinite]") {
  Problem problem;
  problem.id = 1;
  problem.shape = {2, 1, 24, 16};
  problem.qo_lens = {5, 5, 5, 5};
  problem.kv_lens = {70, 70, 70, 70};
  problem.seqused = {70, 3, 0, 69};
  problem.seed = 17;
  const Data data = make_data(problem);
  check_each(presets_and_exact(), [&](const Numerics& numerics) {
    const CaseResult clean = must_run(problem, numerics, data);
    RunOptions options;
    options.lengths.used = {71, 3, -1, 69};
    const CaseResult got = must_run(problem, numerics, data, options);
    if (got.sequence_status != std::vector<int32_t>{1, 0, 1, 0}) return std::string("status words");
    for (const int b : {0, 2}) {
      for (const std::vector<float>* x : {&got.sequences[b].out, &got.sequences[b].lse}) {
        if (!std::all_of(x->begin(), x->end(), [](float value) { return std::isnan(value); })) {
          return "sequence " + std::to_string(b) + " is not NaN";
        }
      }
    }
    for (const int b : {1, 3}) {
      std::string report = compare_bits(got.sequences[b], clean.sequences[b], problem,
                                        "sequence " + std::to_string(b));
      if (!report.empty()) return report;
    }
    return std::string();
  });
}
