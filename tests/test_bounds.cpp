// Quantized results against fp64 attention, with derived bounds: twice the error of a naive
// implementation in the same formats, plus the rounding of the output type.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/grid.h"

using namespace sageattn_test;

namespace {

bool all_finite(const std::vector<double>& x) {
  return std::all_of(x.begin(), x.end(), [](double value) { return std::isfinite(value); });
}

double root_mean_square(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return x.empty() ? 0 : std::sqrt(sum / static_cast<double>(x.size()));
}

std::string check(const Problem& problem, const Numerics& numerics) {
  const std::string where = describe(problem, numerics);
  const Data data = make_data(problem);
  const CaseResult result = run_case(problem, numerics, data);
  if (result.status != SAGEATTN_OK) return where + "\n  " + result.message;

  // All sequences together.
  ExactOutput exact, plain;
  std::vector<double> got, got_lse;
  const auto append = [](std::vector<double>& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (int b = 0; b < problem.batch(); ++b) {
    const ExactOutput want = exact_attention(problem.shape, problem.scale(), problem.mask, data[b]);
    const ExactOutput naive = plain_attention(result.info, problem.shape, problem.mask, data[b]);
    append(got, result.sequences[b].out);
    append(got_lse, result.sequences[b].lse);
    append(exact.out, want.out);
    append(exact.magnitude, want.magnitude);
    append(exact.lse, want.lse);
    append(plain.out, naive.out);
    append(plain.lse, naive.lse);
  }
  if (!all_finite(got)) return where + "\n  out is not finite";

  const double error = relative_error(got, exact.out);
  const double bound = error_bound(result.info, exact, plain);
  std::ostringstream s;
  if (!(error <= bound)) {
    s << where << "\n  out: relative error " << error << ", allowed " << bound << ", naive "
      << relative_error(plain.out, exact.out);
    return s.str();
  }

  double largest = 0;
  std::vector<double> difference, naive_difference;
  for (size_t i = 0; i < exact.lse.size(); ++i) {
    if (std::isinf(exact.lse[i]) || std::isinf(got_lse[i])) {
      if (exact.lse[i] == got_lse[i]) continue;
      return where + "\n  lse: infinite in one of the two";
    }
    difference.push_back(got_lse[i] - exact.lse[i]);
    naive_difference.push_back(plain.lse[i] - exact.lse[i]);
    largest = std::max(largest, std::fabs(exact.lse[i]));
  }
  if (difference.size() < 16) return {};  // the naive error may be small by luck
  const double lse_difference = root_mean_square(difference);
  const double lse_bound =
      2 * root_mean_square(naive_difference) + std::ldexp(std::max(largest, 1.0), -19);
  if (!(lse_difference <= lse_bound)) {
    s << where << "\n  lse: off by " << lse_difference << ", allowed " << lse_bound;
    return s.str();
  }
  return {};
}

}  // namespace

TEST_CASE("every preset is within twice the naive error", "[bounds]") {
  const std::vector<Problem> grid = make_grid(120, 5);
  for (const Numerics& numerics : all_presets()) {
    const std::vector<std::string> reports =
        for_each_case(static_cast<int>(grid.size()), [&](int i) {
          return selected(grid[i], numerics) ? check(grid[i], numerics) : std::string();
        });
    INFO(numerics.name << ": " << summary(reports));
    CHECK(reports.empty());
  }
}
