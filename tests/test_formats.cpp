// The number formats of the CPU backend, against values worked out with ldexp and a search for the
// nearest code.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "src/cpu/formats.h"
#include "tests/catch.h"

namespace {

using sageattn::E4M3;
using sageattn::E5M2;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// A format as its definition has it, and the functions under test.
struct Format {
  std::string name;
  int width, mantissa, bias;
  bool infinities;  // the largest exponent field means Inf and NaN, else only the last code is NaN
  bool saturates;   // encoding never gives an infinity
  float (*decode)(uint32_t code);
  uint32_t (*encode)(float x);
  int nans, infinite, subnormals;  // number of codes

  uint32_t sign_bit() const { return 1u << (width - 1); }
  uint32_t fraction_mask() const { return (1u << mantissa) - 1; }
  uint32_t last_field() const { return (sign_bit() - 1) >> mantissa; }
  uint32_t field(uint32_t code) const { return (code & (sign_bit() - 1)) >> mantissa; }

  bool is_nan(uint32_t code) const {
    if (!infinities) return (code & (sign_bit() - 1)) == sign_bit() - 1;
    return field(code) == last_field() && (code & fraction_mask()) != 0;
  }
  bool is_infinite(uint32_t code) const {
    return infinities && field(code) == last_field() && (code & fraction_mask()) == 0;
  }
  bool is_subnormal(uint32_t code) const {
    return field(code) == 0 && (code & fraction_mask()) != 0;
  }
  // Of a finite code. The infinite one's is that of the next power of two, which is where rounding
  // sees it.
  double value(uint32_t code) const {
    const int f = static_cast<int>(field(code));
    const auto fraction = static_cast<double>(code & fraction_mask());
    const double one = f == 0 ? 0.0 : std::ldexp(1.0, mantissa);
    const double magnitude = std::ldexp(one + fraction, std::max(f, 1) - bias - mantissa);
    return (code & sign_bit()) != 0 ? -magnitude : magnitude;
  }
  uint32_t largest_finite() const {
    uint32_t code = sign_bit() - 1;
    while (is_nan(code) || is_infinite(code)) --code;
    return code;
  }
  // Largest code without sign that encoding can give.
  uint32_t largest_encoded() const { return largest_finite() + (saturates ? 0 : 1); }
};

const std::vector<Format>& formats() {
  static const std::vector<Format> all = {
      {"fp16", 16, 10, 15, true, false,
       [](uint32_t c) { return sageattn::f16_to_float(static_cast<uint16_t>(c)); },
       [](float x) { return uint32_t{sageattn::float_to_f16(x)}; }, 2046, 2, 2046},
      {"bf16", 16, 7, 127, true, false,
       [](uint32_t c) { return sageattn::bf16_to_float(static_cast<uint16_t>(c)); },
       [](float x) { return uint32_t{sageattn::float_to_bf16(x)}; }, 254, 2, 254},
      {"E4M3", 8, 3, 7, false, true,
       [](uint32_t c) { return E4M3::decode(static_cast<uint8_t>(c)); },
       [](float x) { return uint32_t{E4M3::encode(x)}; }, 2, 0, 14},
      {"E5M2", 8, 2, 15, true, true,
       [](uint32_t c) { return E5M2::decode(static_cast<uint8_t>(c)); },
       [](float x) { return uint32_t{E5M2::encode(x)}; }, 6, 2, 6},
  };
  return all;
}

// The values of the codes 0 .. largest_encoded(), which ascend.
std::vector<double> magnitudes(const Format& f) {
  std::vector<double> values;
  for (uint32_t code = 0; code <= f.largest_encoded(); ++code) values.push_back(f.value(code));
  return values;
}

// The code nearest to x, the even one of two that are equally near: by looking at every code from
// `from` up to `to`.
uint32_t nearest(const std::vector<double>& values, double magnitude, size_t from, size_t to) {
  size_t best = from;
  for (size_t code = from; code < to; ++code) {
    const double distance = std::fabs(values[code] - magnitude);
    const double least = std::fabs(values[best] - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint32_t>(best);
}

uint32_t nearest(const std::vector<double>& values, double magnitude) {
  magnitude = std::min(magnitude, 2 * values.back());  // so that distances are exact
  if (values.size() < 1000) return nearest(values, magnitude, 0, values.size());
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude) - values.begin();
  const auto from = static_cast<size_t>(std::max<std::ptrdiff_t>(above - 2, 0));
  return nearest(values, magnitude, from, std::min(from + 4, values.size()));
}

}  // namespace

TEST_CASE("Every code decodes to its value and encodes to itself", "[formats]") {
  for (const Format& f : formats()) {
    CAPTURE(f.name);
    int visited = 0, nans = 0, infinite = 0, subnormals = 0, zeros = 0, wrong = 0;
    uint32_t first_wrong = 0;
    for (uint32_t code = 0; code < 2 * f.sign_bit(); ++code) {
      ++visited;
      const float got = f.decode(code);
      const uint32_t again = f.encode(got);
      bool good;
      if (f.is_nan(code)) {
        ++nans;
        good = std::isnan(got) && f.is_nan(again);
      } else if (f.is_infinite(code)) {
        ++infinite;
        const uint32_t sign = code & f.sign_bit();
        good = got == (sign != 0 ? -kInfinity : kInfinity) &&
               again == (f.saturates ? (sign | f.largest_finite()) : code);
      } else {
        if (f.is_subnormal(code)) ++subnormals;
        if (got == 0) ++zeros;
        good = static_cast<double>(got) == f.value(code) &&
               std::signbit(got) == ((code & f.sign_bit()) != 0) && again == code;
      }
      if (!good && wrong++ == 0) first_wrong = code;
    }
    CAPTURE(first_wrong);
    CHECK(wrong == 0);
    CHECK(visited == (1 << f.width));
    CHECK(nans == f.nans);
    CHECK(infinite == f.infinite);
    CHECK(subnormals == f.subnormals);
    CHECK(zeros == 2);
  }
}

TEST_CASE("Known values of the formats", "[formats]") {
  CHECK(sageattn::f16_to_float(0x3c00) == 1.0f);
  CHECK(sageattn::f16_to_float(0x7bff) == 65504.0f);
  CHECK(sageattn::f16_to_float(0x0001) == 0x1p-24f);
  CHECK(sageattn::bf16_to_float(0x3f80) == 1.0f);
  CHECK(sageattn::bf16_to_float(0x0001) == 0x1p-133f);
  CHECK(E4M3::decode(0x38) == 1.0f);
  CHECK(E4M3::decode(0x7e) == 448.0f);
  CHECK(E4M3::decode(0x01) == 0x1p-9f);
  CHECK(E4M3::decode(0x88) == -0x1p-6f);
  CHECK(E5M2::decode(0x3c) == 1.0f);
  CHECK(E5M2::decode(0x7b) == 57344.0f);
  CHECK(E5M2::decode(0x01) == 0x1p-16f);
  CHECK(E4M3::kMax == 448.0f);
  CHECK(E5M2::kMax == 57344.0f);
}

TEST_CASE("Midpoints round to the even code, their neighbours to the nearer one", "[formats]") {
  const std::array<int, 4> pairs = {2 * 31743, 2 * 32639, 2 * 126, 2 * 123};
  for (size_t which = 0; which < formats().size(); ++which) {
    const Format& f = formats()[which];
    CAPTURE(f.name);
    int visited = 0, wrong = 0;
    float first_wrong = 0;
    for (uint32_t low = 0; low < f.largest_finite(); ++low) {
      const double middle = (f.value(low) + f.value(low + 1)) / 2;
      const auto x = static_cast<float>(middle);
      REQUIRE(static_cast<double>(x) == middle);
      for (const uint32_t sign : {0u, f.sign_bit()}) {
        ++visited;
        const float s = sign == 0 ? 1.0f : -1.0f;
        const uint32_t even = low % 2 == 0 ? low : low + 1;
        const bool good = f.encode(s * x) == (sign | even) &&
                          f.encode(s * std::nextafter(x, kInfinity)) == (sign | (low + 1)) &&
                          f.encode(s * std::nextafter(x, 0.0f)) == (sign | low);
        if (!good && wrong++ == 0) first_wrong = s * x;
      }
    }
    CAPTURE(first_wrong);
    CHECK(wrong == 0);
    CHECK(visited == pairs[which]);
  }
}

TEST_CASE("FP8 saturates, NaN stays NaN", "[formats]") {
  const auto finite_max = std::numeric_limits<float>::max();
  for (const float x :
       {448.0f, 449.0f, 463.99f, 464.0f, 464.01f, 480.0f, 512.0f, 1e30f, finite_max, kInfinity}) {
    CAPTURE(x);
    CHECK(int{E4M3::encode(x)} == 0x7e);
    CHECK(int{E4M3::encode(-x)} == 0xfe);
  }
  CHECK(int{E4M3::encode(432.0f)} == 0x7e);  // between 416 and 448: to even
  CHECK(int{E4M3::encode(431.99f)} == 0x7d);
  for (const float x :
       {57344.0f, 61439.0f, 61440.0f, 61441.0f, 65536.0f, 1e30f, finite_max, kInfinity}) {
    CAPTURE(x);
    CHECK(int{E5M2::encode(x)} == 0x7b);
    CHECK(int{E5M2::encode(-x)} == 0xfb);
  }
  CHECK(int{E5M2::encode(53248.0f)} == 0x7a);  // between 49152 and 57344: to even
  CHECK(int{E5M2::encode(53249.0f)} == 0x7b);
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u}) {
    CAPTURE(bits);
    const auto nan = std::bit_cast<float>(bits);
    CHECK((E4M3::encode(nan) & 0x7f) == 0x7f);
    CHECK((E5M2::encode(nan) & 0x7f) > 0x7c);
    CHECK(E4M3::is_nan(E4M3::encode(nan)));
    CHECK(E5M2::is_nan(E5M2::encode(nan)));
    CHECK((sageattn::float_to_f16(nan) & 0x7fff) > 0x7c00);
    CHECK((sageattn::float_to_bf16(nan) & 0x7fff) > 0x7f80);
  }
}

TEST_CASE("16-bit formats overflow to infinity where rounding says so", "[formats]") {
  CHECK(sageattn::float_to_f16(65504.0f) == 0x7bff);
  CHECK(sageattn::float_to_f16(65519.99f) == 0x7bff);
  CHECK(sageattn::float_to_f16(std::nextafter(65520.0f, 0.0f)) == 0x7bff);
  CHECK(sageattn::float_to_f16(65520.0f) == 0x7c00);
  CHECK(sageattn::float_to_f16(-65519.99f) == 0xfbff);
  CHECK(sageattn::float_to_f16(-65520.0f) == 0xfc00);
  CHECK(sageattn::float_to_f16(1e30f) == 0x7c00);
  CHECK(sageattn::float_to_f16(-kInfinity) == 0xfc00);
  const float bf16_limit = 0x1.ffp127f;  // halfway from the largest to 2^128
  CHECK(sageattn::float_to_bf16(std::nextafter(bf16_limit, 0.0f)) == 0x7f7f);
  CHECK(sageattn::float_to_bf16(bf16_limit) == 0x7f80);
  CHECK(sageattn::float_to_bf16(-bf16_limit) == 0xff80);
  CHECK(sageattn::float_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
  CHECK(sageattn::float_to_bf16(-kInfinity) == 0xff80);
}

TEST_CASE("Zeros keep their sign, and what rounds to zero does", "[formats]") {
  for (const Format& f : formats()) {
    CAPTURE(f.name);
    CHECK(f.encode(0.0f) == 0);
    CHECK(f.encode(-0.0f) == f.sign_bit());
    const float least = std::numeric_limits<float>::denorm_min();
    CHECK(f.encode(least) == 0);
    CHECK(f.encode(-least) == f.sign_bit());
    CHECK_FALSE(std::signbit(f.decode(0)));
    CHECK(std::signbit(f.decode(f.sign_bit())));
  }
}

TEST_CASE("Encoding finds the nearest code", "[formats]") {
  for (const Format& f : formats()) {
    CAPTURE(f.name);
    const std::vector<double> values = magnitudes(f);
    std::mt19937_64 random(20240901);
    int wrong = 0, tried = 0;
    float first_wrong = 0;
    for (int i = 0; i < 150'000; ++i) {
      const uint64_t r = random();
      float x;
      if (i % 3 == 0) {  // any finite fp32
        x = std::bit_cast<float>(static_cast<uint32_t>(r));
        if (!std::isfinite(x)) continue;
      } else {  // a random significand at an exponent of the format, or a little beyond
        const int least = 1 - f.bias - f.mantissa - 3;
        const int range = f.width == 8 ? 40 : f.mantissa == 10 ? 46 : 262;
        const auto exponent = least + static_cast<int>((r >> 32) % static_cast<uint64_t>(range));
        auto significand = static_cast<double>(r & 0xffffff) + 0x1p24;
        if (i % 3 == 2) {  // few bits: ties
          significand = std::ldexp(std::floor(std::ldexp(significand, -20)), 20);
        }
        x = static_cast<float>(std::ldexp(significand, exponent - 24));
        if ((r >> 63) != 0) x = -x;
        if (!std::isfinite(x)) continue;
      }
      ++tried;
      const uint32_t sign = std::signbit(x) ? f.sign_bit() : 0;
      const uint32_t want = sign | nearest(values, std::fabs(static_cast<double>(x)));
      if (f.encode(x) != want && wrong++ == 0) first_wrong = x;
    }
    CAPTURE(first_wrong);
    CHECK(wrong == 0);
    CHECK(tried > 140'000);
  }
}

TEST_CASE("round_half_even", "[formats]") {
  int wrong = 0;
  for (int k = -3000; k <= 3000; ++k) {
    const auto x = static_cast<float>(k);
    const float even = k % 2 == 0 ? x : x + 1;
    const float tie = x + 0.5f;
    if (sageattn::round_half_even(x) != x || sageattn::round_half_even(tie) != even ||
        sageattn::round_half_even(std::nextafter(tie, kInfinity)) != x + 1 ||
        sageattn::round_half_even(std::nextafter(tie, -kInfinity)) != x) {
      ++wrong;
    }
  }
  CHECK(wrong == 0);
  CHECK(sageattn::round_half_even(0.5f) == 0.0f);
  CHECK(sageattn::round_half_even(1.5f) == 2.0f);
  CHECK(sageattn::round_half_even(2.5f) == 2.0f);
  CHECK(sageattn::round_half_even(-0.5f) == 0.0f);
  CHECK(sageattn::round_half_even(-1.5f) == -2.0f);
  CHECK(sageattn::round_half_even(126.5f) == 126.0f);
  CHECK(sageattn::round_half_even(-127.5f) == -128.0f);
  CHECK(std::isnan(sageattn::round_half_even(kNan)));

  std::mt19937_64 random(7);
  for (int i = 0; i < 100'000; ++i) {
    const auto fixed = static_cast<int64_t>(random() >> 34) - (int64_t{1} << 29);  // 7 places
    const auto x = static_cast<float>(std::ldexp(static_cast<double>(fixed), -7));
    if (std::fabs(x) >= 0x1p22f) continue;
    const double below = std::floor(static_cast<double>(x)), part = static_cast<double>(x) - below;
    const bool up = part > 0.5 || (part == 0.5 && std::fmod(below, 2.0) != 0.0);
    if (static_cast<double>(sageattn::round_half_even(x)) != below + (up ? 1.0 : 0.0)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Elements of arrays", "[formats]") {
  CHECK(sageattn::dtype_size(SAGEATTN_F16) == 2);
  CHECK(sageattn::dtype_size(SAGEATTN_BF16) == 2);
  CHECK(sageattn::dtype_size(SAGEATTN_F32) == 4);
  // 1/3 differs in all three types; at an odd address, as a caller's bytes may lie.
  const struct {
    int32_t dtype;
    float rounded;
  } cases[] = {{SAGEATTN_F16, 0x1.554p-2f}, {SAGEATTN_BF16, 0x1.56p-2f}, {SAGEATTN_F32, 1.0f / 3}};
  for (const auto& [dtype, rounded] : cases) {
    CAPTURE(dtype);
    std::array<unsigned char, 32> bytes{};
    sageattn::store_element(dtype, bytes.data() + 1, 2, 1.0f / 3);
    sageattn::store_element(dtype, bytes.data() + 1, 3, -2.0f);
    CHECK(sageattn::load_element(dtype, bytes.data() + 1, 1) == 0.0f);
    CHECK(sageattn::load_element(dtype, bytes.data() + 1, 2) == rounded);
    CHECK(sageattn::load_element(dtype, bytes.data() + 1, 3) == -2.0f);
    CHECK(sageattn::round_to_dtype(dtype, 1.0f / 3) == rounded);
    const size_t end = 1 + 4 * static_cast<size_t>(sageattn::dtype_size(dtype));
    for (size_t i = end; i < bytes.size(); ++i) REQUIRE(bytes[i] == 0);
    for (size_t i = 0; i < end - 2 * static_cast<size_t>(sageattn::dtype_size(dtype)); ++i) {
      REQUIRE(bytes[i] == 0);
    }
  }
}
