// The literal accumulation models of docs/numerics.md section 7: cases worked out by hand, laws
// that must hold, a second formulation in big integers; and the CPU backend's tensor core step
// against them, in every build.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/cpu/kernels.h"
#include "tests/catch.h"
#include "tests/literal.h"

using namespace sageattn_test;

namespace {

const float kNaN = std::numeric_limits<float>::quiet_NaN();

float two_to(int exponent) { return std::ldexp(1.0f, exponent); }

// A small generator, so that this file needs nothing else.
struct Bits {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  }
};

struct Fp8 {
  bool e5m2;
  int mantissa() const { return e5m2 ? 2 : 3; }
  int least() const { return e5m2 ? -14 : -6; }
  // Value of the code with these fields.
  int exponent_of(uint32_t code) const {
    const int field = static_cast<int>((code & 0x7f) >> mantissa());
    return std::max(field, 1) - 1 + least();
  }
  int64_t integer_of(uint32_t code) const {  // in units of 2^(exponent - mantissa)
    const int field = static_cast<int>((code & 0x7f) >> mantissa());
    const int64_t fraction = code & ((1u << mantissa()) - 1);
    const int64_t magnitude = field == 0 ? fraction : fraction + (int64_t{1} << mantissa());
    return (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  float value_of(uint32_t code) const {
    return static_cast<float>(
        std::ldexp(static_cast<double>(integer_of(code)), exponent_of(code) - mantissa()));
  }
  bool finite(uint32_t code) const { return e5m2 ? (code & 0x7c) != 0x7c : (code & 0x7f) != 0x7f; }
};

// The model once more, from codes, in 128-bit integers with all addends at one fixed scale first.
float big_integer_step(Fp8 format, const std::vector<uint32_t>& p, const std::vector<uint32_t>& v,
                       float acc) {
  struct Addend {
    __extension__ __int128 integer;
    int unit;      // of the integer, a power of two
    int exponent;  // as the tensor core sees it
  };
  std::vector<Addend> addends;
  for (size_t j = 0; j < p.size(); ++j) {
    Addend a;
    a.integer = format.integer_of(p[j]) * format.integer_of(v[j]);
    a.exponent = format.exponent_of(p[j]) + format.exponent_of(v[j]);
    a.unit = a.exponent - 2 * format.mantissa();
    if (a.integer != 0) addends.push_back(a);
  }
  if (acc != 0) {
    int exponent;
    const double fraction = std::frexp(static_cast<double>(acc), &exponent);  // in [0.5, 1)
    Addend a;
    a.integer = static_cast<int64_t>(std::ldexp(fraction, 24));
    a.unit = exponent - 24;
    a.exponent = std::max(exponent - 1, -126);
    addends.push_back(a);
  }
  if (addends.empty()) return 0;
  int e = addends[0].exponent;
  for (const Addend& a : addends) e = std::max(e, a.exponent);
  e = std::max(e, -100);

  __extension__ __int128 sum = 0;
  for (const Addend& a : addends) {
    const int shift = a.unit - (e - 13);
    __extension__ __int128 magnitude = a.integer < 0 ? -a.integer : a.integer;
    if (shift >= 0) {
      magnitude <<= shift;
    } else {
      magnitude = shift > -120 ? magnitude >> -shift : 0;
    }
    sum += a.integer < 0 ? -magnitude : magnitude;
  }
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  if (magnitude == 0) return 0;
  int top = 63;
  while ((magnitude >> top) == 0) --top;
  if (top > 13) magnitude &= ~uint64_t{0} << (top - 13);
  const double result = std::ldexp(static_cast<double>(magnitude), e - 13);
  return static_cast<float>(sum < 0 ? -result : result);
}

}  // namespace

TEST_CASE("FP8 step: small products vanish one by one", "[models]") {
  // Exponent 0 of the accumulator: the grid is 2^-13, and 2^-14 is below it.
  std::vector<float> p(32, two_to(-7)), v(32, two_to(-7));
  // 2^-7 is subnormal in E4M3 (exponent counts as -6), the product's exponent is -12.
  CHECK(literal_fp8_step(p.data(), v.data(), 32, 1.0f, false) == 1.0f);
  CHECK(literal_fp8_step(p.data(), v.data(), 32, -1.0f, false) == -1.0f);
  // Without the accumulator they are seen: 32 * 2^-14.
  CHECK(literal_fp8_step(p.data(), v.data(), 32, 0.0f, false) == two_to(-9));
  // 2^-13 is on the grid.
  std::fill(v.begin(), v.end(), two_to(-6));
  CHECK(literal_fp8_step(p.data(), v.data(), 32, 1.0f, false) == 1.0f + two_to(-8));
  // As in the measured model: 32 products of 2^-14 made of normal operands.
  std::fill(p.begin(), p.end(), two_to(-14));
  std::fill(v.begin(), v.end(), 1.0f);
  CHECK(literal_fp8_step(p.data(), v.data(), 32, 1.0f, true) == 1.0f);
}

TEST_CASE("FP8 step: truncation is toward zero, of addends and of the sum", "[models]") {
  float p[2] = {1.0f, 1.125f};
  float v[2] = {0.0f, two_to(-6)};
  // 1.125 * 2^-6 on a grid of 2^(6-13): a multiple, but with 2^7 in the accumulator the grid is
  // 2^-6.
  CHECK(literal_fp8_step(p, v, 2, 64.0f, false) == 64.0f + two_to(-6));
  CHECK(literal_fp8_step(p, v, 2, -128.0f, false) == -128.0f + two_to(-6));
  v[1] = -two_to(-6);
  CHECK(literal_fp8_step(p, v, 2, 128.0f, false) == 128.0f - two_to(-6));
  // E = 0 (see below), so 3.515625 + 2^-13 is on the grid; the sum in [2, 4) keeps 12 bits of it.
  const float q[2] = {1.875f, two_to(-4)}, w[2] = {1.875f, two_to(-9)};
  CHECK(literal_fp8_step(q, w, 2, 0.0f, false) == 3.515625f);
  // The accumulator itself is cut to the grid of the largest product.
  const float one[1] = {256.0f};
  CHECK(literal_fp8_step(one, one, 1, two_to(3) - two_to(-5), false) == 65536.0f);
  CHECK(literal_fp8_step(one, one, 1, two_to(3), false) == 65536.0f + 8.0f);
  // Alone, it is cut to 13 fraction bits.
  CHECK(literal_fp8_step(one, one, 0, 1.0f + two_to(-13) + two_to(-14), false) ==
        1.0f + two_to(-13));
}

TEST_CASE("FP8 step: exponents come from the fields, zeros take no part", "[models]") {
  // Products of 1.875 * 1.875 = 3.516 and 1.875 * 1.75 = 3.281 count as exponent 0, so 2^-13
  // survives beside their difference. Normalised, they would have exponent 1.
  const float p[3] = {1.875f, 1.875f, two_to(-4)};
  const float v[3] = {1.875f, -1.75f, two_to(-9)};
  CHECK(literal_fp8_step(p, v, 3, 0.0f, false) == 0.234375f + two_to(-13));
  // A zero product with a large partner does not raise the grid.
  const float z[2] = {0.0f, two_to(-9)};
  const float y[2] = {448.0f, two_to(-9)};
  CHECK(literal_fp8_step(z, y, 2, 0.0f, false) == two_to(-18));
  CHECK(literal_fp8_step(z, y, 2, two_to(-10), false) == two_to(-10) + two_to(-18));
  // Subnormal E4M3 operands count as 2^-6 each: the grid is 2^-25, and an accumulator below it
  // vanishes.
  CHECK(literal_fp8_step(z + 1, y + 1, 1, two_to(-26), false) == two_to(-18));
  CHECK(literal_fp8_step(z + 1, y + 1, 1, two_to(-25), false) == two_to(-18) + two_to(-25));
}

TEST_CASE("FP8 step: the grid is 2^-113 at the finest", "[models]") {
  const float zero[1] = {0.0f};
  CHECK(literal_fp8_step(zero, zero, 1, two_to(-113), false) == two_to(-113));
  CHECK(literal_fp8_step(zero, zero, 1, -1.75f * two_to(-113), false) == -two_to(-113));
  CHECK(literal_fp8_step(zero, zero, 1, two_to(-114), true) == 0.0f);
}

TEST_CASE("FP8 step: NaN", "[models]") {
  const float p[2] = {1.0f, kNaN};
  const float v[2] = {1.0f, 0.0f};
  CHECK(std::isnan(literal_fp8_step(p, v, 2, 0.0f, false)));
  CHECK(std::isnan(literal_fp8_step(p, v, 1, kNaN, true)));
  CHECK(literal_fp8_step(p, v, 1, 0.0f, false) == 1.0f);
}

TEST_CASE("FP8 step: the order of keys, and negation, change nothing", "[models]") {
  Bits bits{1};
  for (const bool e5m2 : {false, true}) {
    const Fp8 format{e5m2};
    for (int round = 0; round < 2000; ++round) {
      const int n = 1 + static_cast<int>(bits.next() % 32);
      std::vector<float> p, v;
      while (static_cast<int>(p.size()) < n) {
        const uint32_t a = bits.next() & 0x7f, b = bits.next() & 0xff;
        if (!format.finite(a) || !format.finite(b)) continue;
        p.push_back(format.value_of(a));
        v.push_back(format.value_of(b));
      }
      const float acc = std::ldexp(static_cast<float>(bits.next() % 20000) - 10000,
                                   static_cast<int>(bits.next() % 30) - 20);
      const float want = literal_fp8_step(p.data(), v.data(), n, acc, e5m2);
      std::vector<float> rp(p.rbegin(), p.rend()), rv(v.rbegin(), v.rend());
      REQUIRE(literal_fp8_step(rp.data(), rv.data(), n, acc, e5m2) == want);
      for (float& x : v) x = -x;
      REQUIRE(literal_fp8_step(p.data(), v.data(), n, -acc, e5m2) == -want);
      // Absent keys are zero products.
      p.resize(32, 0.0f);
      v.resize(32, 448.0f);
      REQUIRE(literal_fp8_step(p.data(), v.data(), 32, -acc, e5m2) == -want);
      // What comes out is on its own grid: another step with nothing to add leaves it.
      REQUIRE(literal_fp8_step(p.data(), v.data(), 0, want, e5m2) == want);
    }
  }
}

TEST_CASE("FP8 step equals a formulation in big integers", "[models]") {
  Bits bits{2};
  for (const bool e5m2 : {false, true}) {
    const Fp8 format{e5m2};
    for (int round = 0; round < 20000; ++round) {
      std::vector<uint32_t> p, v;
      std::vector<float> pf, vf;
      // A third of the cases crowd around the accumulator's exponent, a third are sparse.
      const uint32_t p_mask = round % 3 == 0 ? 0x1f : 0x7f;
      while (p.size() < 32) {
        uint32_t a = bits.next() & p_mask;
        const uint32_t b = bits.next() & 0xff;
        if (round % 3 == 1 && bits.next() % 4 != 0) a = 0;
        if (!format.finite(a) || !format.finite(b)) continue;
        p.push_back(a);
        v.push_back(b);
        pf.push_back(format.value_of(a));
        vf.push_back(format.value_of(b));
      }
      float acc = 0;
      if (round % 5 != 0) {
        acc = std::ldexp(static_cast<float>(bits.next() & 0xffffff),
                         static_cast<int>(bits.next() % 40) - 45);
        if (bits.next() % 2 != 0) acc = -acc;
      }
      REQUIRE(literal_fp8_step(pf.data(), vf.data(), 32, acc, e5m2) ==
              big_integer_step(format, p, v, acc));
    }
  }
}

namespace {

// Every build that this processor runs: those up to the one that the backend takes.
std::vector<const sageattn::cpu::Kernels*> builds() {
  using namespace sageattn::cpu;
  std::vector<const Kernels*> all = {&kGenericKernels};
#ifdef SAGEATTN_X86
  const Kernels* const best = &kernels();
  if (best != &kGenericKernels) all.push_back(&kAvx2Kernels);
  if (best == &kAvx512Kernels) all.push_back(&kAvx512Kernels);
#endif
  return all;
}

}  // namespace

TEST_CASE("FP8 step: every build of the CPU backend equals the literal one", "[models]") {
  constexpr int kKeys = 32, kChannels = sageattn::cpu::kLanes;
  for (const sageattn::cpu::Kernels* build : builds()) {
    INFO(build->isa);
    Bits bits{3};
    for (const bool e5m2 : {false, true}) {
      const Fp8 format{e5m2};
      const auto power_of = [&](uint32_t code) {
        return (code & 0x7f) == 0 ? 0.0f : two_to(format.exponent_of(code));
      };
      for (int round = 0; round < 3000; ++round) {
        std::vector<float> p, p_powers, v, v_powers;  // v: [key][channel]
        const uint32_t p_mask = round % 3 == 0 ? 0x1f : 0x7f;
        const auto push = [&](std::vector<float>& values, std::vector<float>& powers, uint32_t mask,
                              size_t count) {
          while (values.size() < count) {
            uint32_t code = bits.next() & mask;
            if (round % 3 == 1 && bits.next() % 4 != 0) code = 0;
            if (!format.finite(code)) continue;
            values.push_back(format.value_of(code));
            powers.push_back(power_of(code));
          }
        };
        push(p, p_powers, p_mask, kKeys);
        push(v, v_powers, 0xff, kKeys * kChannels);
        std::vector<float> acc(kChannels), want(kChannels);
        for (int c = 0; c < kChannels; ++c) {
          acc[c] = std::ldexp(static_cast<float>(bits.next() & 0xffffff),
                              static_cast<int>(bits.next() % 40) - 45);
          if (c % 5 == 0) acc[c] = 0;
          if (c % 2 == 0) acc[c] = -acc[c];
          if (c == 3) acc[c] = std::ldexp(acc[c], -100);  // at and below the finest grid
          std::vector<float> column;
          column.reserve(kKeys);
          for (int j = 0; j < kKeys; ++j) column.push_back(v[j * kChannels + c]);
          want[c] = literal_fp8_step(p.data(), column.data(), kKeys, acc[c], e5m2);
        }
        build->fp8_step(p.data(), p_powers.data(), v.data(), v_powers.data(), kChannels,
                        acc.data());
        REQUIRE(acc == want);
      }
    }
  }
}

TEST_CASE("FP8 step: a single pair of every two codes", "[models]") {
  for (const bool e5m2 : {false, true}) {
    const Fp8 format{e5m2};
    for (uint32_t a = 0; a < 256; ++a) {
      for (uint32_t b = 0; b < 256; ++b) {
        if (!format.finite(a) || !format.finite(b)) continue;
        // A product has at most 8 significant bits: nothing is lost without an accumulator.
        const float p = format.value_of(a), v = format.value_of(b);
        if (literal_fp8_step(&p, &v, 1, 0.0f, e5m2) != p * v) {
          FAIL("codes " << a << " and " << b << (e5m2 ? " in E5M2" : " in E4M3"));
        }
      }
    }
  }
}

TEST_CASE("fp16 step rounds once to fp16", "[models]") {
  const float p[2] = {1.0f, 1.0f};
  const float v[2] = {two_to(-11), two_to(-12)};
  // t = 1.5 * 2^-11: above half a unit of fp16 at 1.
  CHECK(literal_fp16_step(p, v, 2, 1.0f) == 1.0f + two_to(-10));
  // t = 2^-11 alone is a tie: to even.
  CHECK(literal_fp16_step(p, v, 1, 1.0f) == 1.0f);
  CHECK(literal_fp16_step(p, v, 1, 1.0f + two_to(-10)) == 1.0f + two_to(-9));
  const float large[1] = {65504.0f};
  CHECK(std::isinf(literal_fp16_step(p, large, 1, 16.0f)));
  CHECK(literal_fp16_step(p, large, 1, 15.0f) == 65504.0f);
}

TEST_CASE("integer and fp32 steps", "[models]") {
  std::vector<float> p(32, 127.0f), v(32, -127.0f);
  CHECK(literal_i8_step(p.data(), v.data(), 32, 0.5f) == 0.5f - 32 * 127 * 127);
  // The sum of a step is exact, the addition rounds.
  v[0] = 127.0f;  // 2^24 + 16129 is a tie: to even
  CHECK(literal_i8_step(p.data(), v.data(), 1, 16777216.0f) == 16793344.0f);
  const float a[2] = {1.0f, 1.0f}, b[2] = {16777216.0f, 1.0f};
  CHECK(literal_fp32_step(a, b, 2, 0.0f) == 16777216.0f);
  CHECK(literal_fp32_step(a, b, 2, 1.0f) == 16777216.0f);
}

TEST_CASE("literal conversions", "[models]") {
  CHECK(round_fp16(65519.0f) == 65504.0f);
  CHECK(std::isinf(round_fp16(65520.0f)));
  CHECK(round_fp16(two_to(-25)) == 0.0f);
  CHECK(round_fp16(1.5f * two_to(-25)) == two_to(-24));
  CHECK(round_fp16(2049.0f) == 2048.0f);
  CHECK(round_fp16(2051.0f) == 2052.0f);
  CHECK(round_bf16(257.0f) == 256.0f);
  CHECK(round_bf16(259.0f) == 260.0f);
  CHECK(std::isinf(round_bf16(std::numeric_limits<float>::max())));
  CHECK(round_e4m3(463.0f) == 448.0f);
  CHECK(round_e4m3(1e9f) == 448.0f);
  CHECK(round_e4m3(-1e9f) == -448.0f);
  CHECK(round_e4m3(two_to(-10)) == 0.0f);
  CHECK(round_e4m3(1.5f * two_to(-10)) == two_to(-9));
  CHECK(round_e4m3(17.0f) == 16.0f);
  CHECK(round_e4m3(19.0f) == 20.0f);
  CHECK(round_e5m2(9.0f) == 8.0f);
  CHECK(round_e5m2(11.0f) == 12.0f);
  CHECK(round_e5m2(1e9f) == 57344.0f);
  CHECK(round_e5m2(two_to(-17)) == 0.0f);
  for (float (*round)(float) : {round_fp16, round_bf16, round_e4m3, round_e5m2}) {
    CHECK(std::isnan(round(kNaN)));
    CHECK(std::signbit(round(-0.0f)));
    CHECK(round(-1.25f) == -1.25f);
  }
}

TEST_CASE("literal exp2", "[models]") {
  CHECK(literal_exp2(0.0f) == 1.0f);
  CHECK(literal_exp2(-126.0f) == two_to(-126));
  CHECK(literal_exp2(std::nextafter(-126.0f, -200.0f)) == 0.0f);
  CHECK(literal_exp2(-std::numeric_limits<float>::infinity()) == 0.0f);
  CHECK(std::isnan(literal_exp2(kNaN)));
  for (float x = -125; x < 16; x += 0.37f) {
    const double want = std::exp2(static_cast<double>(x));
    CHECK(std::fabs(literal_exp2(x) - want) <= want * std::ldexp(1.0, -22));
  }
}

TEST_CASE("literal mean", "[models]") {
  CHECK(literal_mean({}) == 0.0f);
  CHECK(literal_mean({3.0f}) == 3.0f);
  std::vector<float> x(4097, 1.0f);
  CHECK(literal_mean(x) == 1.0f);
  // Lanes: tokens 0, 16, 32, 48 first, so 2^24 + 1 + 1 loses the ones only within a lane.
  std::vector<float> y(64, 0.0f);
  y[0] = 16777216.0f;
  y[16] = y[32] = 1.0f;
  CHECK(literal_mean(y) == 16777216.0f / 64);
  y[16] = y[32] = 0.0f;
  y[1] = y[9] = 1.0f;  // lanes 1 and 9 meet in the first fold
  CHECK(literal_mean(y) == 16777218.0f / 64);
}
