// The library against the second implementation of docs/numerics.md, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

// Runs one problem both ways. Empty if they agree.
std::string check(const Problem& problem, const Numerics& numerics, const Data& data) {
  const std::string where = describe(problem, numerics) + "\n  ";
  const CaseResult result = run_case(problem, numerics, data);
  if (result.status != SAGEATTN_OK) {
    return where + sageattn_status_name(result.status) + ": " + result.message;
  }
  if (!result.violation.empty()) return where + result.violation;
  for (int b = 0; b < problem.batch(); ++b) {
    const LiteralOutput want = literal_attention(result.info, problem.shape.head_dim,
                                                 problem.shape.num_qo_heads, problem.mask, data[b]);
    const std::string difference =
        compare_bits(result.sequences[b], want, problem, "sequence " + std::to_string(b));
    if (!difference.empty()) return where + difference;
    if (result.sequence_status[b] != SAGEATTN_SEQUENCE_OK) return where + "status word is set";
  }
  return {};
}

void check_all(const std::vector<Numerics>& list, const std::vector<Problem>& grid) {
  int cases = 0;
  for (const Numerics& numerics : list) {
    std::vector<Problem> problems;
    for (const Problem& problem : grid) {
      const AttentionShape& s = problem.shape;
      if (std::max(s.head_dim, s.head_dim_v) > numerics.max_dim) continue;
      if (selected(problem, numerics)) problems.push_back(problem);
    }
    const std::vector<std::string> reports =
        for_each_case(static_cast<int>(problems.size()),
                      [&](int i) { return check(problems[i], numerics, make_data(problems[i])); });
    INFO(numerics.name << ": " << summary(reports));
    CHECK(reports.empty());
    cases += static_cast<int>(problems.size());
  }
  INFO("the environment variables select nothing");
  CHECK((cases > 0 || std::getenv("SAGEATTN_TEST_CASE") != nullptr ||
         std::getenv("SAGEATTN_TEST_NUMERICS") != nullptr));
}

// Sanitizers make this twenty times slower, and look at what the code does, not at the values.
#ifdef SAGEATTN_SANITIZE
constexpr int kShare = 4;
#else
constexpr int kShare = 1;
#endif

}  // namespace

TEST_CASE("every preset equals the literal implementation", "[literal]") {
  check_all(all_presets(), make_grid(200 / kShare, 1));
}

TEST_CASE("every enumerant equals the literal implementation", "[literal]") {
  check_all(all_enumerants(), make_grid(50 / kShare, 2));
}

// More keys than the grid has: several promotion groups of 512, means over more than 32 chunks of
// 64 tokens.
TEST_CASE("long sequences equal the literal implementation", "[literal]") {
  Problem problem;
  problem.id = 9000;
  problem.shape = {1, 1, 16, 24};
  problem.q_dtype = problem.kv_dtype = SAGEATTN_BF16;
  problem.out_dtype = SAGEATTN_F32;
  problem.values = Values::Biased;
  problem.seed = 77;
  std::vector<Problem> grid;
  for (const int kv_len : {511, 513, 1025, 2200}) {
    for (const int32_t kind : {SAGEATTN_MASK_NONE, SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT,
                               SAGEATTN_MASK_CAUSAL_TOP_LEFT, SAGEATTN_MASK_WINDOW}) {
      problem.id += 1;
      problem.qo_lens = {70};
      problem.kv_lens = {kv_len};
      problem.mask = {kind, 0, 0};
      if (kind == SAGEATTN_MASK_WINDOW) problem.mask = {kind, 700, -1};
      grid.push_back(problem);
    }
  }
  std::vector<Numerics> list = all_presets();
  for (const Numerics& numerics : all_enumerants()) {
    const bool about_groups = numerics.name.find("interval") != std::string::npos ||
                              numerics.name.find("smooth_v") != std::string::npos ||
                              numerics.name.find("accum") != std::string::npos;
    if (about_groups) list.push_back(numerics);
  }
  check_all(list, grid);
}

// Scores far from zero: rounding of the running maximum lifts p above the P factor, alpha and F
// underflow.
TEST_CASE("extreme scores equal the literal implementation", "[literal]") {
  Problem problem;
  problem.id = 9500;
  problem.shape = {2, 1, 32, 32};
  problem.q_dtype = problem.kv_dtype = SAGEATTN_F32;
  problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {65};
  problem.kv_lens = {200};
  problem.sm_scale_set = true;
  problem.seed = 78;
  std::vector<Problem> grid;
  for (const float scale : {30.0f, 1e3f, -1e5f, 1e7f}) {
    for (const Values values : {Values::Normal, Values::Scales}) {
      problem.id += 1;
      problem.sm_scale = scale;
      problem.values = values;
      grid.push_back(problem);
    }
  }
  check_all(all_presets(), grid);
}

// The exponent of V's scale in F16: absmax at, above and below powers of two, down to the least. It
// shows in codes that are subnormal, so the largest key is one that the first queries do not see.
TEST_CASE("FP16 V of every magnitude equals the literal implementation", "[literal]") {
  constexpr int kChannels = 128;
  Problem problem;
  problem.id = 9600;
  problem.shape = {1, 1, 16, kChannels};
  problem.q_dtype = problem.kv_dtype = problem.out_dtype = SAGEATTN_F32;
  problem.qo_lens = {20};
  problem.kv_lens = {20};
  problem.mask.kind = SAGEATTN_MASK_CAUSAL_TOP_LEFT;
  problem.seed = 79;
  Data data = make_data(problem);
  for (size_t i = 0; i < data[0].v.size(); ++i) {
    const int c = static_cast<int>(i % kChannels), token = static_cast<int>(i / kChannels);
    const float largest = c % 3 == 0 ? 1.0f : c % 3 == 1 ? 1.0f + 0x1p-23f : 1.0f - 0x1p-24f;
    const float x = std::ldexp(largest, c - 103);  // from below 2^-100
    data[0].v[i] = token == 7 ? x : x * (1 + 0.137f * static_cast<float>(token)) * 0x1p-25f;
  }
  CHECK(check(problem, preset_numerics(SAGEATTN_PRESET_SAGE1, 90), data) == "");
}
