// sageattn_compare against its formulas, written down directly.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sageattn.h"
#include "tests/catch.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

size_t size_of(int32_t dtype) { return dtype == SAGEATTN_F32 ? 4 : 2; }

// A 16-bit code's value by definition.
double value_of(uint16_t code, int32_t dtype) {
  const int mantissa = dtype == SAGEATTN_F16 ? 10 : 7, bias = dtype == SAGEATTN_F16 ? 15 : 127;
  const int field = (code & 0x7fff) >> mantissa, fraction = code & ((1 << mantissa) - 1);
  const double sign = (code & 0x8000) != 0 ? -1 : 1;
  if (field == (0x7fff >> mantissa)) return fraction != 0 ? std::nan("") : sign * kInfinity;
  const int significand = field == 0 ? fraction : fraction + (1 << mantissa);
  return sign * std::ldexp(significand, std::max(field, 1) - bias - mantissa);
}

// A tensor [batch][token][head][channel] of exactly representable values, at any strides.
struct Tensor {
  int32_t dtype;
  int batch, len, heads, dim;
  std::array<int64_t, 4> strides;  // batch, token, head, dim
  std::vector<unsigned char> bytes;
  size_t origin = 0;  // element where index 0, 0, 0, 0 is

  // Strides that step over each other in the order given, innermost last; negative ones mirrored.
  Tensor(int32_t type, std::array<int, 4> sizes, std::array<int, 4> order, int64_t gap,
         std::array<bool, 4> reversed = {})
      : dtype(type), batch(sizes[0]), len(sizes[1]), heads(sizes[2]), dim(sizes[3]), strides{} {
    int64_t step = 1 + gap;
    for (int i = 3; i >= 0; --i) {
      const auto d = static_cast<size_t>(order[i]);
      strides[d] = reversed[d] ? -step : step;
      if (reversed[d] && sizes[d] > 0) origin += static_cast<size_t>(step * (sizes[d] - 1));
      step = step * std::max(sizes[d], 1) + gap;
    }
    // What lies between elements is NaN: reading it would show.
    bytes.assign(static_cast<size_t>(step) * size_of(dtype), 0xff);
  }

  unsigned char* at(int b, int t, int h, int c) {
    const int64_t index = static_cast<int64_t>(origin) + b * strides[0] + t * strides[1] +
                          h * strides[2] + c * strides[3];
    return bytes.data() + static_cast<size_t>(index) * size_of(dtype);
  }
  // Stores the value of `bits` in this dtype and returns it.
  double set(int b, int t, int h, int c, uint32_t bits) {
    if (dtype == SAGEATTN_F32) {
      float x;
      std::memcpy(&x, &bits, 4);
      std::memcpy(at(b, t, h, c), &x, 4);
      return static_cast<double>(x);
    }
    const auto code = static_cast<uint16_t>(bits >> 16);
    std::memcpy(at(b, t, h, c), &code, 2);
    return value_of(code, dtype);
  }
  sageattn_const_tensor view() const {
    return {bytes.data() + origin * size_of(dtype), strides[0], strides[1], strides[2], strides[3]};
  }
};

sageattn_compare_args args_of(const Tensor& out, const Tensor& ref) {
  sageattn_compare_args args{};
  args.struct_size = sizeof args;
  args.out_dtype = out.dtype;
  args.ref_dtype = ref.dtype;
  args.batch = out.batch;
  args.len = out.len;
  args.num_heads = out.heads;
  args.head_dim = out.dim;
  args.out = out.view();
  args.ref = ref.view();
  return args;
}

// Contiguous fp32 tensors [batch][token][head][channel].
sageattn_compare_args plain_args(const std::vector<float>& out, const std::vector<float>& ref,
                                 int batch, int len, int heads, int dim) {
  sageattn_compare_args args{};
  args.struct_size = sizeof args;
  args.out_dtype = args.ref_dtype = SAGEATTN_F32;
  args.batch = batch;
  args.len = len;
  args.num_heads = heads;
  args.head_dim = dim;
  args.out.data = out.data();
  args.ref.data = ref.data();
  return args;
}

sageattn_compare_result compare(const sageattn_compare_args& args) {
  sageattn_compare_result result{};
  result.struct_size = sizeof result;
  sageattn_error err{};
  err.struct_size = sizeof err;
  const int32_t status = sageattn_compare(&args, &result, &err);
  INFO(err.message);
  REQUIRE(status == SAGEATTN_OK);
  return result;
}

// The same numbers, in long double, from pairs (out, ref) of the finite elements of one head.
using Pairs = std::vector<std::array<double, 2>>;

struct Metrics {
  long double cos_sim, rel_l1, rmse, rel_error, max_abs_error;
};

Metrics metrics(const Pairs& pairs) {
  long double oo = 0, rr = 0, cross = 0, abs_r = 0, abs_e = 0, square_e = 0, largest = 0;
  for (const auto& [out, ref] : pairs) {
    const long double o = out, r = ref, e = o - r;
    oo += o * o;
    rr += r * r;
    cross += o * r;
    abs_r += std::fabs(r);
    abs_e += std::fabs(e);
    square_e += e * e;
    largest = std::max(largest, std::fabs(e));
  }
  return {cross / (std::sqrt(oo) * std::sqrt(rr)), abs_e / abs_r,
          std::sqrt(square_e / static_cast<long double>(pairs.size())),
          std::sqrt(square_e) / std::sqrt(rr), largest};
}

bool close(double got, long double want) {
  return std::fabs(static_cast<long double>(got) - want) <= 1e-12L * std::fabs(want);
}

constexpr std::array<std::array<int, 4>, 4> kOrders = {
    {{0, 1, 2, 3}, {0, 2, 1, 3}, {3, 1, 0, 2}, {2, 3, 1, 0}}};

}  // namespace

TEST_CASE("Comparison follows its formulas, whatever types and strides", "[compare]") {
  std::mt19937_64 random(11);
  int tried = 0;
  int64_t nonfinite = 0;
  for (const int32_t out_dtype : {SAGEATTN_F16, SAGEATTN_BF16, SAGEATTN_F32}) {
    for (const int32_t ref_dtype : {SAGEATTN_F16, SAGEATTN_BF16, SAGEATTN_F32}) {
      for (int variant = 0; variant < 8; ++variant) {
        CAPTURE(out_dtype, ref_dtype, variant);
        const std::array<int, 4> sizes = {1 + variant % 3, 2 + variant * 5 % 9, 1 + variant % 4,
                                          1 + variant * 7 % 20};
        const std::array<bool, 4> reversed = {variant % 2 == 1, variant % 3 == 1, variant % 5 == 1,
                                              variant % 4 == 3};
        Tensor out(out_dtype, sizes, kOrders[variant % 4], variant % 3, reversed);
        Tensor ref(ref_dtype, sizes, kOrders[variant / 2 % 4], variant % 2);
        const bool spoil = variant >= 4;
        std::vector<Pairs> heads;
        int64_t bad_out = 0, bad_ref = 0;
        for (int b = 0; b < sizes[0]; ++b) {
          for (int h = 0; h < sizes[2]; ++h) {
            heads.emplace_back();
            for (int t = 0; t < sizes[1]; ++t) {
              for (int c = 0; c < sizes[3]; ++c) {
                // Values near one and their noisy copies, in every type; 5 of 8 exponent bits vary.
                const auto r = static_cast<uint32_t>(random());
                uint32_t bits[2];
                int i = 0;
                for (const int32_t dtype : {out_dtype, ref_dtype}) {
                  const uint32_t noise = static_cast<uint32_t>(random()) >> 12 << (i == 0 ? 5 : 0);
                  const uint32_t magnitude = dtype == SAGEATTN_F16 ? 0x38000000u : 0x3f000000u;
                  const int mantissa_end = dtype == SAGEATTN_F16 ? 26 : 23;
                  bits[i] = (r & 0x80000000u) | (magnitude + ((r >> 30 & 1u) << mantissa_end)) |
                            ((noise ^ r) & ((1u << mantissa_end) - 1));
                  if (spoil && random() % 23 == 0) {
                    const uint32_t specials[] = {0x7fc00000u, 0xffffffffu,
                                                 dtype == SAGEATTN_F16 ? 0x7c000000u : 0x7f800000u,
                                                 dtype == SAGEATTN_F16 ? 0xfc000000u : 0xff800000u};
                    bits[i] = specials[random() % 4];
                  }
                  ++i;
                }
                const double o = out.set(b, t, h, c, bits[0]), e = ref.set(b, t, h, c, bits[1]);
                bad_out += std::isfinite(o) ? 0 : 1;
                bad_ref += std::isfinite(e) ? 0 : 1;
                if (std::isfinite(o) && std::isfinite(e)) heads.back().push_back({o, e});
              }
            }
          }
        }
        const sageattn_compare_result got = compare(args_of(out, ref));
        Pairs all;
        int worst = -1;
        Metrics worst_of = {2, 0, 0, 0, 0};
        for (size_t h = 0; h < heads.size(); ++h) {
          if (heads[h].empty()) continue;
          all.insert(all.end(), heads[h].begin(), heads[h].end());
          const Metrics m = metrics(heads[h]);
          if (m.cos_sim < worst_of.cos_sim) {
            worst_of.cos_sim = m.cos_sim;
            worst = static_cast<int>(h);
          }
          worst_of.rel_l1 = std::max(worst_of.rel_l1, m.rel_l1);
          worst_of.rmse = std::max(worst_of.rmse, m.rmse);
          worst_of.rel_error = std::max(worst_of.rel_error, m.rel_error);
        }
        REQUIRE_FALSE(all.empty());
        const Metrics want = metrics(all);
        CHECK(got.count == static_cast<int64_t>(all.size()));
        CHECK(got.nonfinite_out == bad_out);
        CHECK(got.nonfinite_ref == bad_ref);
        CHECK(close(got.cos_sim, want.cos_sim));
        CHECK(close(got.rel_l1, want.rel_l1));
        CHECK(close(got.rmse, want.rmse));
        CHECK(close(got.rel_error, want.rel_error));
        CHECK(got.max_abs_error == static_cast<double>(want.max_abs_error));
        CHECK(got.worst_head == worst);
        CHECK(close(got.worst_cos_sim, worst_of.cos_sim));
        CHECK(close(got.worst_rel_l1, worst_of.rel_l1));
        CHECK(close(got.worst_rmse, worst_of.rmse));
        CHECK(close(got.worst_rel_error, worst_of.rel_error));
        nonfinite += bad_out + bad_ref;
        ++tried;
      }
    }
  }
  CHECK(tried == 72);
  CHECK(nonfinite > 500);
}

TEST_CASE("Comparison of numbers worked out by hand", "[compare]") {
  // Two heads of two tokens of one channel: head 0 is (3, 4) for (3, 4), head 1 (1, 0) for (1, 1).
  const std::vector<float> out = {3, 1, 4, 0}, ref = {3, 1, 4, 1};
  const sageattn_compare_result r = compare(plain_args(out, ref, 1, 2, 2, 1));
  CHECK(r.count == 4);
  CHECK(r.nonfinite_out == 0);
  CHECK(r.nonfinite_ref == 0);
  CHECK(r.cos_sim == Approx(26.0 / std::sqrt(26.0 * 27.0)).epsilon(1e-14));
  CHECK(r.rel_l1 == Approx(1.0 / 9.0).epsilon(1e-14));
  CHECK(r.rmse == 0.5);
  CHECK(r.rel_error == Approx(1.0 / std::sqrt(27.0)).epsilon(1e-14));
  CHECK(r.max_abs_error == 1.0);
  CHECK(r.worst_head == 1);
  CHECK(r.worst_cos_sim == Approx(std::sqrt(0.5)).epsilon(1e-14));
  CHECK(r.worst_rel_l1 == 0.5);
  CHECK(r.worst_rmse == Approx(std::sqrt(0.5)).epsilon(1e-14));
  CHECK(r.worst_rel_error == Approx(std::sqrt(0.5)).epsilon(1e-14));
}

TEST_CASE("All-zero strides mean the layout", "[compare]") {
  // One batch item, 2 tokens, 2 heads: head 1 is wrong if token-major, else token 1 of both heads.
  const std::vector<float> ref = {1, 2, 3, 4}, out = {1, 2, 3, -4};
  sageattn_compare_args args = plain_args(out, ref, 1, 2, 2, 1);
  const auto cos = [](double a, double b, double c, double d) {
    return (a * c + b * d) / std::sqrt((a * a + b * b) * (c * c + d * d));
  };
  args.layout = SAGEATTN_LAYOUT_NHD;  // heads {1, 3} and {2, 4}
  CHECK(compare(args).worst_head == 1);
  CHECK(compare(args).worst_cos_sim == Approx(cos(2, 4, 2, -4)).epsilon(1e-14));
  args.layout = SAGEATTN_LAYOUT_HND;  // heads {1, 2} and {3, 4}
  CHECK(compare(args).worst_head == 1);
  CHECK(compare(args).worst_cos_sim == Approx(cos(3, 4, 3, -4)).epsilon(1e-14));
  // Each tensor's strides on its own: the same heads from a head-major copy.
  const std::vector<float> transposed = {1, 3, 2, -4};
  args.layout = SAGEATTN_LAYOUT_NHD;
  args.out = {transposed.data(), 0, 1, 2, 1};
  CHECK(compare(args).worst_cos_sim == Approx(cos(2, 4, 2, -4)).epsilon(1e-14));
}

TEST_CASE("Zero strides expand a tensor; those of dimensions of size 1 do not count", "[compare]") {
  const std::vector<float> row = {1, -2, 4}, full = {1, -2, 4, 1, -2, 4, 1, -2, 4, 1, -2, 4};
  sageattn_compare_args args = plain_args(full, row, 2, 2, 1, 3);
  args.ref = {row.data(), 0, 0, -123456, 1};
  const sageattn_compare_result r = compare(args);
  CHECK(r.count == 12);
  CHECK(r.max_abs_error == 0.0);
  CHECK(r.rmse == 0.0);
  CHECK(r.rel_l1 == 0.0);
  CHECK(r.rel_error == 0.0);
  CHECK(r.cos_sim == Approx(1.0).epsilon(1e-15));
}

TEST_CASE("Tensors of zeros", "[compare]") {
  const std::vector<float> zeros(6, 0.0f), ones(6, 1.0f);
  const sageattn_compare_result both = compare(plain_args(zeros, zeros, 1, 2, 1, 3));
  CHECK(both.count == 6);
  CHECK(both.cos_sim == 1.0);
  CHECK(both.worst_cos_sim == 1.0);
  CHECK(both.worst_head == 0);
  CHECK(both.rel_l1 == 0.0);
  CHECK(both.rel_error == 0.0);
  CHECK(both.rmse == 0.0);
  CHECK(both.max_abs_error == 0.0);

  // Wrong where the truth is zero: no relative error is small.
  const sageattn_compare_result wrong = compare(plain_args(ones, zeros, 1, 2, 1, 3));
  CHECK(wrong.rmse == 1.0);
  CHECK(wrong.max_abs_error == 1.0);
  CHECK_FALSE(wrong.rel_l1 < 1e300);
  CHECK_FALSE(wrong.rel_error < 1e300);
  CHECK_FALSE(wrong.cos_sim > 0.0);
  CHECK_FALSE(wrong.worst_cos_sim > 0.0);

  const sageattn_compare_result lost = compare(plain_args(zeros, ones, 1, 2, 1, 3));
  CHECK(lost.rel_l1 == 1.0);
  CHECK(lost.rel_error == 1.0);
  CHECK_FALSE(lost.cos_sim > 0.0);
}

TEST_CASE("Huge and tiny values neither overflow nor vanish", "[compare]") {
  const std::vector<float> huge = {3e38f, -3e38f}, half = {1.5e38f, -1.5e38f};
  const sageattn_compare_result h = compare(plain_args(half, huge, 1, 1, 1, 2));
  CHECK(h.cos_sim == Approx(1.0).epsilon(1e-12));
  CHECK(h.rel_l1 == Approx(0.5).epsilon(1e-6));
  CHECK(h.rel_error == Approx(0.5).epsilon(1e-6));
  const std::vector<float> tiny = {1e-42f, -1e-42f}, twice = {2e-42f, -2e-42f};
  const sageattn_compare_result t = compare(plain_args(twice, tiny, 1, 1, 1, 2));
  CHECK(t.cos_sim == Approx(1.0).epsilon(1e-12));
  CHECK(t.rel_l1 == Approx(1.0).epsilon(1e-2));
  CHECK(t.rmse > 0.0);
  // Differences are taken in fp64: this one is no fp32 number.
  const std::vector<float> one = {1.0f}, speck = {1e-10f};
  CHECK(compare(plain_args(one, speck, 1, 1, 1, 1)).max_abs_error ==
        1.0 - static_cast<double>(speck[0]));
}

TEST_CASE("Non-finite elements are counted and left out", "[compare]") {
  const auto inf = std::numeric_limits<float>::infinity();
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  // Head 0: element 0 compares; head 1: nothing does.
  const std::vector<float> out = {2, nan, nan, inf}, ref = {1, 5, nan, 4};
  const sageattn_compare_result r = compare(plain_args(out, ref, 1, 1, 2, 2));
  CHECK(r.count == 1);
  CHECK(r.nonfinite_out == 3);
  CHECK(r.nonfinite_ref == 1);
  CHECK(r.worst_head == 0);
  CHECK(r.max_abs_error == 1.0);
  CHECK(r.rmse == 1.0);
  CHECK(r.rel_l1 == 1.0);
  CHECK(r.cos_sim == Approx(1.0).epsilon(1e-15));

  const std::vector<float> nans(4, nan);
  const sageattn_compare_result none = compare(plain_args(nans, ref, 1, 1, 2, 2));
  CHECK(none.count == 0);
  CHECK(none.nonfinite_out == 4);
  CHECK(none.nonfinite_ref == 1);
  CHECK(none.worst_head == -1);
}

TEST_CASE("The worst head is counted over the batch", "[compare]") {
  constexpr int kBatch = 3, kHeads = 4, kDim = 5;
  for (int worst = 0; worst < kBatch * kHeads; ++worst) {
    std::vector<float> ref(kBatch * kHeads * kDim), out;
    for (size_t i = 0; i < ref.size(); ++i) ref[i] = static_cast<float>(i % 7) + 1;
    out = ref;
    for (int h = 0; h < kBatch * kHeads; ++h) out[h * kDim] += h == worst ? -4.0f : 0.25f;
    const sageattn_compare_result r = compare(plain_args(out, ref, kBatch, 1, kHeads, kDim));
    CAPTURE(worst);
    CHECK(r.worst_head == worst);
    CHECK(r.worst_cos_sim < r.cos_sim);
    CHECK(r.worst_rmse == Approx(std::sqrt(16.0 / kDim)).epsilon(1e-14));
  }
}

TEST_CASE("Empty tensors need no memory", "[compare]") {
  const std::array<std::array<int, 4>, 5> shapes = {
      {{0, 3, 2, 4}, {2, 0, 2, 4}, {2, 3, 0, 4}, {2, 3, 2, 0}, {0, 0, 0, 0}}};
  for (const auto& [batch, len, heads, dim] : shapes) {
    CAPTURE(batch, len, heads, dim);
    sageattn_compare_args args = plain_args({}, {}, batch, len, heads, dim);
    args.out.data = args.ref.data = nullptr;
    const sageattn_compare_result r = compare(args);
    CHECK(r.count == 0);
    CHECK(r.nonfinite_out == 0);
    CHECK(r.nonfinite_ref == 0);
    CHECK(r.worst_head == -1);
    CHECK(r.cos_sim == 1.0);  // both are all zero
    CHECK(r.max_abs_error == 0.0);
    CHECK_FALSE(std::isnan(r.rmse + r.rel_l1 + r.rel_error + r.worst_cos_sim + r.worst_rmse));
  }
}

TEST_CASE("A result struct is written as far as the caller knows it", "[compare]") {
  const std::vector<float> out = {1, 2}, ref = {1, 3};
  const sageattn_compare_args args = plain_args(out, ref, 1, 1, 1, 2);
  const sageattn_compare_result whole = compare(args);
  sageattn_compare_result part;
  std::memset(&part, 0x55, sizeof part);
  constexpr auto kKnown = static_cast<uint32_t>(offsetof(sageattn_compare_result, rmse));
  part.struct_size = kKnown;
  CHECK(sageattn_compare(&args, &part, nullptr) == SAGEATTN_OK);
  CHECK(part.struct_size == kKnown);
  CHECK(part.count == 2);
  CHECK(part.cos_sim == whole.cos_sim);
  CHECK(part.rel_l1 == whole.rel_l1);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&part);
  CHECK(std::all_of(bytes + kKnown, bytes + sizeof part, [](auto b) { return b == 0x55; }));
}

TEST_CASE("Comparison refuses what it cannot read", "[compare]") {
  const std::vector<float> data(64, 1.0f);
  const sageattn_compare_args good = plain_args(data, data, 2, 2, 2, 4);
  REQUIRE(compare(good).count == 32);

  int refused = 0;
  const auto refuse = [&](const sageattn_compare_args& args, int32_t want, const char* words) {
    sageattn_compare_result result;
    std::memset(&result, 0x5a, sizeof result);
    result.struct_size = sizeof result;
    const sageattn_compare_result before = result;
    sageattn_error err{};
    err.struct_size = sizeof err;
    CHECK(sageattn_compare(&args, &result, &err) == want);
    CHECK(err.status == want);
    const std::string message = err.message;
    CAPTURE(message, words);
    CHECK(message.find(words) != std::string::npos);
    CHECK(message.find("sageattn_compare") != std::string::npos);
    CHECK(std::memcmp(&result, &before, sizeof result) == 0);  // outputs are untouched
    ++refused;
  };
  const auto change = [&](auto field, auto value, int32_t want, const char* words) {
    sageattn_compare_args args = good;
    args.*field = value;
    refuse(args, want, words);
  };
  using Args = sageattn_compare_args;
  constexpr int32_t kInvalid = SAGEATTN_E_INVALID_ARGUMENT;
  for (const int32_t bad : {0, -1, 4, INT32_MAX, INT32_MIN}) {
    change(&Args::out_dtype, bad, kInvalid, "out_dtype");
    change(&Args::ref_dtype, bad, kInvalid, "ref_dtype");
  }
  for (const int32_t bad : {-1, 2, INT32_MAX}) change(&Args::layout, bad, kInvalid, "layout");
  for (const int32_t bad : {-1, INT32_MIN}) {
    change(&Args::batch, bad, kInvalid, "batch");
    change(&Args::len, bad, kInvalid, "len");
    change(&Args::num_heads, bad, kInvalid, "num_heads");
    change(&Args::head_dim, bad, kInvalid, "head_dim");
  }
  change(&Args::struct_size, uint32_t{0}, kInvalid, "struct_size");

  Args args = good;
  args.batch = args.num_heads = 46341;  // their product is just above 2^31
  args.len = 0;
  refuse(args, kInvalid, "num_heads");
  args.num_heads = 46340;  // just below
  CHECK(compare(args).count == 0);

  args = good;
  args.out.data = nullptr;
  refuse(args, kInvalid, "out");
  args = good;
  args.ref.data = nullptr;
  refuse(args, kInvalid, "ref");
  args = good;
  args.out.data = reinterpret_cast<const char*>(data.data()) + 2;
  refuse(args, SAGEATTN_E_MISALIGNED, "out");
  args = good;
  args.ref_dtype = SAGEATTN_F16;
  args.ref.data = reinterpret_cast<const char*>(data.data()) + 1;
  refuse(args, SAGEATTN_E_MISALIGNED, "ref");
  args.ref.data = reinterpret_cast<const char*>(data.data()) + 2;
  CHECK(compare(args).count == 32);
  args = good;
  args.ref = {data.data(), 16, 8, 4, 0};
  refuse(args, kInvalid, "stride_dim");
  args = good;
  args.out = {data.data(), INT64_MAX, INT64_MAX, 4, 1};
  refuse(args, kInvalid, "out");

  // Bytes beyond the struct that the library knows.
  struct Longer {
    sageattn_compare_args args;
    uint64_t more;
  } longer{good, 0};
  longer.args.struct_size = sizeof longer;
  sageattn_compare_result result{};
  result.struct_size = sizeof result;
  CHECK(sageattn_compare(&longer.args, &result, nullptr) == SAGEATTN_OK);
  CHECK(result.count == 32);
  longer.more = 1;
  CHECK(sageattn_compare(&longer.args, &result, nullptr) == SAGEATTN_E_UNKNOWN_FIELD);

  CHECK(sageattn_compare(nullptr, &result, nullptr) == kInvalid);
  CHECK(sageattn_compare(&good, nullptr, nullptr) == kInvalid);
  result.struct_size = 0;
  CHECK(sageattn_compare(&good, &result, nullptr) == kInvalid);
  CHECK(refused == 10 + 3 + 8 + 1 + 7);

  sageattn_error err{};
  err.struct_size = sizeof err;
  result.struct_size = sizeof result;
  CHECK(sageattn_compare(&good, &result, &err) == SAGEATTN_OK);
  CHECK(err.status == SAGEATTN_OK);
  CHECK(std::string(err.message).empty());
}
