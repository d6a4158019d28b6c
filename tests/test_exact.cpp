// The EXACT preset against fp64 attention: nothing but the rounding of the output may differ.
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

// Half a unit in the last place of the type at x.
double half_ulp(double x, int32_t dtype) {
  const int mantissa = dtype == SAGEATTN_F16 ? 10 : dtype == SAGEATTN_BF16 ? 7 : 23;
  const int least = dtype == SAGEATTN_F16 ? -14 : -126;
  const int exponent = x == 0 ? least : std::max(std::ilogb(x), least);
  return std::ldexp(0.5, exponent - mantissa);
}

// Which kind of special value, 0 if finite.
int special(double x) {
  if (std::isnan(x)) return 1;
  if (std::isinf(x)) return x > 0 ? 2 : 3;
  return 0;
}

// The special values first, then |got - want| <= rounding + slack[i].
std::string compare(const std::vector<float>& got, const std::vector<double>& want,
                    const std::vector<double>& slack, int32_t dtype, const char* what) {
  if (got.size() != want.size()) return std::string(what) + ": sizes differ";
  std::ostringstream s;
  s.precision(17);
  const double largest = dtype == SAGEATTN_F16 ? 65519 : 3.3953138981e38;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool overflows = dtype != SAGEATTN_F32 && std::fabs(want[i]) > largest;
    if (overflows ? special(got[i]) != 0 && special(got[i]) != (want[i] > 0 ? 2 : 3)
                  : special(got[i]) != special(want[i])) {
      s << what << " " << i << ": got " << got[i] << ", want " << want[i] << " (special values)";
      return s.str();
    }
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (special(got[i]) != 0) continue;
    const double bound = half_ulp(want[i], dtype) + slack[i];
    if (std::fabs(got[i] - want[i]) <= bound) continue;
    s << what << " " << i << ": got " << got[i] << ", want " << want[i] << ", off by "
      << std::fabs(got[i] - want[i]) << ", allowed " << bound;
    return s.str();
  }
  return {};
}

std::string check(const Problem& problem, const Numerics& numerics, const Data& data) {
  const std::string where = describe(problem, numerics) + "\n  ";
  const CaseResult result = run_case(problem, numerics, data);
  if (result.status != SAGEATTN_OK) return where + result.message;
  if (!result.violation.empty()) return where + result.violation;
  for (int b = 0; b < problem.batch(); ++b) {
    const ExactOutput want = exact_attention(problem.shape, problem.scale(), problem.mask, data[b]);
    // fp64 sums in another order: 1e-12 of the terms' magnitude.
    std::vector<double> slack;
    for (const double x : want.magnitude) slack.push_back(1e-12 * x);
    std::string difference =
        compare(result.sequences[b].out, want.out, slack, problem.out_dtype, "out");
    if (difference.empty()) {
      const std::vector<double> lse_slack(want.lse.size(), 1e-9);
      difference = compare(result.sequences[b].lse, want.lse, lse_slack, SAGEATTN_F32, "lse");
    }
    if (!difference.empty()) {
      return where + difference + " of sequence " + std::to_string(b);
    }
  }
  return {};
}

}  // namespace

TEST_CASE("EXACT is fp64 attention, rounded once", "[exact]") {
  const std::vector<Problem> grid = make_grid(250, 3);
  for (const int32_t arch : {90, 80}) {
    const Numerics numerics = preset_numerics(SAGEATTN_PRESET_EXACT, arch);
    const std::vector<std::string> reports =
        for_each_case(static_cast<int>(grid.size()), [&](int i) {
          if (!selected(grid[i], numerics)) return std::string();
          return check(grid[i], numerics, make_data(grid[i]));
        });
    INFO(numerics.name << ": " << summary(reports));
    CHECK(reports.empty());
  }
}

TEST_CASE("EXACT carries NaN and infinities as fp64 attention does", "[exact]") {
  const Numerics numerics = preset_numerics(SAGEATTN_PRESET_EXACT, 90);
  const std::vector<Problem> grid = make_grid(60, 4);
  const std::vector<std::string> reports = for_each_case(static_cast<int>(grid.size()), [&](int i) {
    Data data = make_data(grid[i]);
    Random random(static_cast<uint64_t>(i));
    const float values[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()};
    for (LiteralInput& input : data) {
      std::vector<float>* const tensors[] = {&input.q, &input.k, &input.v};
      // With a shared head every copy would have to change: leave those alone.
      const int which = i % 3;
      if (which == 1 && grid[i].k_view == View::SharedHead) continue;
      if (which == 2 && grid[i].v_view == View::SharedHead) continue;
      std::vector<float>& x = *tensors[which];
      if (x.empty()) continue;
      x[static_cast<size_t>(random.below(static_cast<int>(x.size())))] = values[i / 3 % 3];
    }
    return check(grid[i], numerics, data);
  });
  INFO(summary(reports));
  CHECK(reports.empty());
}
