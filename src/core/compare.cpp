#include "src/core/compare.h"

#include <algorithm>
#include <cmath>

#include "src/cpu/formats.h"

namespace sageattn {
namespace {

// Sums over elements that are finite on both sides; o is judged, r is the reference.
struct Sums {
  int64_t count = 0;
  double oo = 0, rr = 0, cross = 0;  // o o, r r, o r
  double abs_r = 0, abs_error = 0;   // |r|, |o - r|
  double square_error = 0;           // (o - r)^2
  double max_abs_error = 0;

  void add(double o, double r) {
    const double error = std::fabs(o - r);
    ++count;
    oo += o * o;
    rr += r * r;
    cross += o * r;
    abs_r += std::fabs(r);
    abs_error += error;
    square_error += error * error;
    max_abs_error = std::max(max_abs_error, error);
  }

  void add(const Sums& other) {
    count += other.count;
    oo += other.oo;
    rr += other.rr;
    cross += other.cross;
    abs_r += other.abs_r;
    abs_error += other.abs_error;
    square_error += other.square_error;
    max_abs_error = std::max(max_abs_error, other.max_abs_error);
  }

  double cos_sim() const {
    if (oo == 0 && rr == 0) return 1;
    return oo == 0 || rr == 0 ? 0 : cross / (std::sqrt(oo) * std::sqrt(rr));
  }
  double rel_l1() const { return ratio(abs_error, abs_r); }
  double rmse() const {
    return count == 0 ? 0 : std::sqrt(square_error / static_cast<double>(count));
  }
  double rel_error() const { return ratio(std::sqrt(square_error), std::sqrt(rr)); }

  // 0 where there is no error; infinite where there is one and nothing to measure it by.
  static double ratio(double error, double reference) { return error == 0 ? 0 : error / reference; }
};

}  // namespace

sageattn_compare_result compare(const Comparison& comparison) {
  const sageattn_compare_args& args = comparison.args;
  const Strides& o = comparison.out_strides;
  const Strides& r = comparison.ref_strides;

  sageattn_compare_result result{};
  result.struct_size = sizeof result;
  result.worst_head = -1;
  result.cos_sim = result.worst_cos_sim = 1;
  if (args.len == 0 || args.head_dim == 0) return result;

  Sums total;
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t h = 0; h < args.num_heads; ++h) {
      Sums head;
      for (int64_t t = 0; t < args.len; ++t) {
        const int64_t o_row = b * o.batch + t * o.token + h * o.head;
        const int64_t r_row = b * r.batch + t * r.token + h * r.head;
        for (int64_t c = 0; c < args.head_dim; ++c) {
          const float out = load_element(args.out_dtype, args.out.data, o_row + c * o.dim);
          const float ref = load_element(args.ref_dtype, args.ref.data, r_row + c * r.dim);
          if (!std::isfinite(out)) ++result.nonfinite_out;
          if (!std::isfinite(ref)) ++result.nonfinite_ref;
          if (std::isfinite(out) && std::isfinite(ref)) head.add(out, ref);
        }
      }
      if (head.count == 0) continue;
      if (result.worst_head < 0 || head.cos_sim() < result.worst_cos_sim) {
        result.worst_head = static_cast<int32_t>(b * args.num_heads + h);
        result.worst_cos_sim = head.cos_sim();
      }
      result.worst_rel_l1 = std::max(result.worst_rel_l1, head.rel_l1());
      result.worst_rmse = std::max(result.worst_rmse, head.rmse());
      result.worst_rel_error = std::max(result.worst_rel_error, head.rel_error());
      total.add(head);
    }
  }
  result.count = total.count;
  result.cos_sim = total.cos_sim();
  result.rel_l1 = total.rel_l1();
  result.rmse = total.rmse();
  result.rel_error = total.rel_error();
  result.max_abs_error = total.max_abs_error;
  return result;
}

}  // namespace sageattn
