// The CPU backend's inner loops give the same bits whatever the instruction set. What they compute
// is the business of the literal implementation; here every build is held against the generic one.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "src/cpu/formats.h"
#include "src/cpu/kernels.h"
#include "tests/catch.h"
#ifdef SAGEATTN_X86
#include <cpuid.h>
#endif

namespace {

using namespace sageattn::cpu;

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Every build that this processor runs but the generic one.
std::vector<const Kernels*> builds() {
  std::vector<const Kernels*> all;
#ifdef SAGEATTN_X86
  __builtin_cpu_init();
  // clang 14 does not know "f16c" by name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back(&kAvx2Kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      all.push_back(&kAvx512Kernels);
    }
  }
#endif
  if (all.empty()) WARN("only the generic kernels run here: nothing to compare");
  return all;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  int below(int n) { return static_cast<int>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  float uniform() {  // in [-1, 1)
    return static_cast<float>(static_cast<int64_t>(engine_() >> 40) - (1 << 23)) * 0x1p-23f;
  }

 private:
  std::mt19937_64 engine_;
};

template <typename T>
bool same(T a, T b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

// Number of elements that differ; any NaN equals any NaN.
template <typename T>
int differences(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return -1;
  int n = 0;
  for (size_t i = 0; i < a.size(); ++i) n += same(a[i], b[i]) ? 0 : 1;
  return n;
}

// The power of two of a value's exponent, not below `least`; 0 for a zero.
float power_of(float x, float least) {
  return x == 0.0f ? 0.0f : std::max(std::ldexp(1.0f, std::ilogb(x)), least);
}
float least_normal(PFormat format) { return format == PFormat::kE5M2 ? 0x1p-14f : 0x1p-6f; }

// A random finite value of V's codes in a format.
float random_code(Random& random, PFormat format) {
  for (;;) {
    const uint64_t r = random.bits();
    float x = 0;
    switch (format) {
      case PFormat::kE4M3:
        x = sageattn::E4M3::decode(static_cast<uint8_t>(r));
        break;
      case PFormat::kE5M2:
        x = sageattn::E5M2::decode(static_cast<uint8_t>(r));
        break;
      case PFormat::kI8:
        return static_cast<float>(static_cast<int>(r % 255) - 127);
      case PFormat::kF16:
        x = sageattn::f16_to_float(static_cast<uint16_t>(r));
        if (std::fabs(x) > 512.0f) continue;
        break;
    }
    if (std::isfinite(x)) return x;
  }
}

constexpr PFormat kFormats[] = {PFormat::kE4M3, PFormat::kE5M2, PFormat::kI8, PFormat::kF16};
constexpr PvModel kModels[] = {PvModel::kTensorFp8, PvModel::kChainF32, PvModel::kF16,
                               PvModel::kI8};

}  // namespace

// ---- One operation at a time -------------------------------------------------------------------

TEST_CASE("Every build has its name and is the one chosen", "[kernels]") {
  CHECK(std::string(kGenericKernels.isa) == "generic");
  const std::vector<const Kernels*> all = builds();
  CHECK(&kernels() == (all.empty() ? &kGenericKernels : all.back()));
  const char* const names[] = {"avx2", "avx512"};
  for (size_t i = 0; i < all.size(); ++i) CHECK(std::string(all[i]->isa) == names[i]);
}

TEST_CASE("fp8_step is the same in every build", "[kernels]") {
  Random random(1);
  int wrong = 0, nonzero = 0;
  for (int repeat = 0; repeat < 3000; ++repeat) {
    const PFormat format = repeat % 2 == 0 ? PFormat::kE4M3 : PFormat::kE5M2;
    const float least = least_normal(format);
    const int stride = kLanes * (1 + random.below(3));
    std::vector<float> p(32), p_powers(32), v(32 * stride), v_powers(32 * stride), acc(kLanes);
    const int sparse = 1 + random.below(4);
    for (int k = 0; k < 32; ++k) {
      p[k] = random.one_in(sparse) ? std::fabs(random_code(random, format)) : 0.0f;
      p_powers[k] = power_of(p[k], least);
    }
    if (random.one_in(10)) {
      const int k = random.below(32);
      p[k] = kNan;
      p_powers[k] = kInfinity;
    }
    for (int i = 0; i < 32 * stride; ++i) {
      v[i] = random.one_in(sparse) ? random_code(random, format) : 0.0f;
      v_powers[i] = power_of(v[i], least);
    }
    for (float& a : acc) {
      a = random.one_in(5) ? 0.0f : std::ldexp(random.uniform(), random.below(80) - 40);
      if (random.one_in(50)) a = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
    }
    std::vector<float> want = acc;
    kGenericKernels.fp8_step(p.data(), p_powers.data(), v.data(), v_powers.data(), stride,
                             want.data());
    for (const float x : want) nonzero += x != 0 ? 1 : 0;
    for (const Kernels* build : builds()) {
      std::vector<float> got = acc;
      build->fp8_step(p.data(), p_powers.data(), v.data(), v_powers.data(), stride, got.data());
      wrong += differences(got, want) != 0 ? 1 : 0;
    }
  }
  CHECK(wrong == 0);
  CHECK(nonzero > 3000 * kLanes / 2);
}

TEST_CASE("expand is the same in every build and decodes", "[kernels]") {
  std::vector<const Kernels*> all = builds();
  all.push_back(&kGenericKernels);
  for (const Kernels* build : all) {
    CAPTURE(build->isa);
    std::vector<uint8_t> bytes(256);
    for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
    for (const PFormat format : {PFormat::kE4M3, PFormat::kE5M2}) {
      CAPTURE(static_cast<int>(format));
      const bool e4m3 = format == PFormat::kE4M3;
      std::vector<float> values(256), powers(256), generic_values(256), generic_powers(256);
      build->expand(format, bytes.data(), 256, values.data(), powers.data());
      kGenericKernels.expand(format, bytes.data(), 256, generic_values.data(),
                             generic_powers.data());
      CHECK(differences(values, generic_values) == 0);
      CHECK(differences(powers, generic_powers) == 0);
      int finite = 0;
      for (int i = 0; i < 256; ++i) {
        const float want =
            e4m3 ? sageattn::E4M3::decode(bytes[i]) : sageattn::E5M2::decode(bytes[i]);
        if (!std::isfinite(want)) continue;
        ++finite;
        REQUIRE(same(values[i], want));
        REQUIRE(powers[i] == power_of(want, least_normal(format)));
      }
      CHECK(finite == (e4m3 ? 254 : 248));
    }
    std::vector<float> values(256);
    build->expand(PFormat::kI8, bytes.data(), 256, values.data(), nullptr);
    for (int i = 0; i < 256; ++i) REQUIRE(values[i] == static_cast<float>(i < 128 ? i : i - 256));

    std::vector<uint16_t> halves(65536);
    for (int i = 0; i < 65536; ++i) halves[i] = static_cast<uint16_t>(i);
    std::vector<float> half_values(65536), want(65536);
    build->expand(PFormat::kF16, halves.data(), 65536, half_values.data(), nullptr);
    for (int i = 0; i < 65536; ++i) want[i] = sageattn::f16_to_float(halves[i]);
    CHECK(differences(half_values, want) == 0);
  }
}

TEST_CASE("project is one chain of fma, the same in every build", "[kernels]") {
  Random random(2);
  std::vector<const Kernels*> all = builds();
  all.push_back(&kGenericKernels);
  int wrong = 0, tried = 0;
  for (const int dim : {1, 2, 7, 64, 100, 128, 256}) {
    for (const int keys : {16, 64, 128}) {
      for (int repeat = 0; repeat < 8; ++repeat) {
        std::vector<float> x(dim), k(dim * keys), want(keys);
        for (float& e : x) e = std::ldexp(random.uniform(), random.below(8));
        for (float& e : k) e = std::ldexp(random.uniform(), random.below(8));
        if (repeat == 6) k[random.below(dim * keys)] = kNan;
        if (repeat == 7) x[random.below(dim)] = kInfinity;
        for (int j = 0; j < keys; ++j) {
          for (int c = 0; c < dim; ++c) want[j] = std::fma(x[c], k[c * keys + j], want[j]);
        }
        for (const Kernels* build : all) {
          std::vector<float> got(keys, -1.0f);
          build->project(x.data(), k.data(), dim, keys, got.data());
          ++tried;
          wrong += differences(got, want) != 0 ? 1 : 0;
        }
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(tried == static_cast<int>(7 * 3 * 8 * all.size()));
}

TEST_CASE("The fp64 loops are plain sums, the same in every build", "[kernels]") {
  Random random(3);
  std::vector<const Kernels*> all = builds();
  all.push_back(&kGenericKernels);
  const auto fill = [&](std::vector<double>& x) {
    for (double& e : x) e = static_cast<double>(random.uniform()) / 3 + 1e-3;
  };
  int wrong = 0;
  for (const int dim : {1, 3, 16, 20, 64, 129, 256}) {
    for (const int keys : {1, 5, 64, 128}) {
      std::vector<double> q(dim), k(dim * keys), p(keys), v(keys * dim), o(dim), scores(keys);
      for (auto* x : {&q, &k, &p, &v, &o}) fill(*x);
      if (dim == 20) k[random.below(dim * keys)] = std::numeric_limits<double>::quiet_NaN();
      if (dim == 64) v[random.below(dim * keys)] = std::numeric_limits<double>::infinity();
      std::vector<double> sums = o;
      for (int c = 0; c < dim; ++c) {
        for (int j = 0; j < keys; ++j) scores[j] += q[c] * k[c * keys + j];
      }
      for (int j = 0; j < keys; ++j) {
        for (int c = 0; c < dim; ++c) sums[c] += p[j] * v[j * dim + c];
      }
      for (const Kernels* build : all) {
        std::vector<double> got(keys, -1.0), got_sums = o;
        build->exact_scores(q.data(), k.data(), dim, keys, got.data());
        build->exact_accumulate(p.data(), v.data(), keys, dim, got_sums.data());
        wrong += differences(got, scores) != 0 ? 1 : 0;
        wrong += differences(got_sums, sums) != 0 ? 1 : 0;
      }
    }
  }
  CHECK(wrong == 0);
}

// ---- Whole tiles -------------------------------------------------------------------------------

namespace {

struct Setting {
  PFormat format;
  PvModel model;
  int b_k;
  int interval;  // 0: never flushed
  bool fp8_scores, ds, grouped, sum_rounded;
  int channels, pairs, f16_step;
  uint64_t seed;
};

// What attend and flush change.
struct State {
  std::vector<float> row_max, flushed_max, group_sum, row_sum, acc, out;

  int differs_from(const State& other) const {
    return differences(row_max, other.row_max) + differences(flushed_max, other.flushed_max) +
           differences(group_sum, other.group_sum) + differences(row_sum, other.row_sum) +
           differences(acc, other.acc) + differences(out, other.out);
  }
};

// Three tiles of keys for a few rows of queries, with everything that may go wrong in between.
class Tiles {
 public:
  static constexpr int kRows = 5, kTiles = 3;

  explicit Tiles(const Setting& s) : setting_(s), random_(s.seed) {
    const int dim = s.fp8_scores ? 64 : 2 * s.pairs;
    scales(q_scale_, kRows, 0.05f);
    if (s.fp8_scores) {
      fp8(q_values_, q_powers_, kRows * dim);
    } else {
      codes(q_pairs_, kRows * s.pairs);
    }
    tiles_.resize(kTiles);
    for (Keys& keys : tiles_) {
      if (s.fp8_scores) {
        fp8(keys.values, keys.powers, dim * s.b_k);
      } else {
        codes(keys.pairs, s.pairs * s.b_k);
      }
      scales(keys.scale, s.b_k, 0.02f);
      for (int j = 0; j < s.b_k; ++j) {
        keys.ds.push_back(random_.one_in(200) ? kNan : 4 * random_.uniform());
      }
      for (int i = 0; i < s.b_k * s.channels; ++i) {
        keys.v.push_back(random_code(random_, s.format));
        keys.v_powers.push_back(power_of(keys.v.back(), least_normal(s.format)));
      }
      const int groups = s.interval == 0 ? 1 : std::max(1, s.b_k / s.interval);
      for (int i = 0; i < groups * s.channels; ++i) {
        keys.v_scale.push_back(random_.one_in(300) ? kNan : std::fabs(random_.uniform()));
        keys.v_mean.push_back(random_.uniform());
      }
      for (int row = 0; row < kRows; ++row) {
        int first = 0, end = s.b_k;  // everything
        if (random_.one_in(2)) {     // part of it
          first = random_.below(s.b_k);
          end = first + random_.below(s.b_k - first + 1);
        }
        if (random_.one_in(6)) first = end = random_.below(s.b_k + 1);  // nothing
        if (random_.one_in(10)) {                                       // nothing, the wrong way
          first = s.b_k;
          end = 0;
        }
        keys.visible.push_back(first);
        keys.visible.push_back(end);
      }
    }
  }

  State run(const Kernels& kernels) const {
    const Setting& s = setting_;
    State state;
    for (auto* rows : {&state.row_max, &state.flushed_max}) rows->assign(kRows, -kInfinity);
    for (auto* rows : {&state.group_sum, &state.row_sum}) rows->assign(kRows, 0.0f);
    for (auto* x : {&state.acc, &state.out}) x->assign(kRows * s.channels, 0.0f);
    std::vector<float> scratch(2 * s.b_k, kNan);

    AttendTile t{};
    t.fp8_scores = s.fp8_scores;
    t.pairs = s.pairs;
    t.q_pairs = q_pairs_.data();
    t.qk_channels = 64;
    t.q_values = q_values_.data();
    t.q_powers = q_powers_.data();
    t.b_k = s.b_k;
    t.ds_scale = 0.7f;
    t.rows = kRows;
    t.q_scale = q_scale_.data();
    t.p_format = s.format;
    t.pv_model = s.model;
    const float factors[] = {448.0f, 57344.0f, 127.0f, 1.0f};
    t.p_log2 = std::log2(factors[static_cast<int>(s.format)]);
    t.sum_rounded = s.sum_rounded;
    t.f16_step = s.f16_step;
    t.chunk = s.interval == 0 ? s.b_k : std::min(s.b_k, s.interval);
    t.channels = s.channels;
    t.grouped = s.grouped;
    t.v_scale_stride = t.v_mean_stride = s.channels;
    t.row_max = state.row_max.data();
    t.flushed_max = state.flushed_max.data();
    t.group_sum = state.group_sum.data();
    t.row_sum = state.row_sum.data();
    t.acc = state.acc.data();
    t.out = state.out.data();
    t.scratch = scratch.data();
    for (int i = 0; i < kTiles; ++i) {
      const Keys& keys = tiles_[static_cast<size_t>(i)];
      t.k_pairs = keys.pairs.data();
      t.k_values = keys.values.data();
      t.k_powers = keys.powers.data();
      t.k_scale = keys.scale.data();
      t.ds = s.ds ? keys.ds.data() : nullptr;
      t.visible = keys.visible.data();
      t.v_values = keys.v.data();
      t.v_powers = keys.v_powers.data();
      t.v_scale = keys.v_scale.data();
      t.v_mean = keys.v_mean.data();
      t.flush_at = s.b_k + 1;
      t.flush_every = 0;
      if (s.interval > 0 && s.interval <= s.b_k) {
        t.flush_at = t.flush_every = s.interval;
      } else if (s.interval > 0 && (i + 1) * s.b_k % s.interval == 0) {
        t.flush_at = s.b_k;
      }
      kernels.attend(t);
    }
    for (int row = 0; row < kRows; ++row) kernels.flush(t, row, t.v_scale, t.v_mean);
    return state;
  }

 private:
  struct Keys {
    std::vector<int32_t> pairs;
    std::vector<float> values, powers, scale, ds, v, v_powers, v_scale, v_mean;
    std::vector<int32_t> visible;
  };

  void codes(std::vector<int32_t>& pairs, int n) {
    for (int i = 0; i < n; ++i) {
      const auto lo = static_cast<uint16_t>(random_.below(255) - 127);
      const auto hi = static_cast<uint16_t>(random_.below(255) - 127);
      pairs.push_back(static_cast<int32_t>(uint32_t{hi} << 16 | lo));
    }
  }
  void fp8(std::vector<float>& values, std::vector<float>& powers, int n) {
    for (int i = 0; i < n; ++i) {
      values.push_back(random_code(random_, PFormat::kE4M3));
      powers.push_back(power_of(values.back(), 0x1p-6f));
    }
  }
  // Scales such that scores are tens; some are NaN, zero or huge.
  void scales(std::vector<float>& x, int n, float size) {
    const float shrink = setting_.fp8_scores ? 0.05f : 1.0f;
    for (int i = 0; i < n; ++i) {
      float scale = size * shrink * std::fabs(random_.uniform());
      if (random_.one_in(150)) scale = kNan;
      if (random_.one_in(50)) scale = 0.0f;
      if (random_.one_in(400)) scale = 3e38f;
      x.push_back(scale);
    }
  }

  const Setting setting_;
  Random random_;
  std::vector<int32_t> q_pairs_;
  std::vector<float> q_values_, q_powers_, q_scale_;
  std::vector<Keys> tiles_;
};

std::string describe(const Setting& s) {
  return "format " + std::to_string(static_cast<int>(s.format)) + " model " +
         std::to_string(static_cast<int>(s.model)) + " b_k " + std::to_string(s.b_k) +
         " interval " + std::to_string(s.interval) + " fp8_scores " + std::to_string(s.fp8_scores) +
         " ds " + std::to_string(s.ds) + " grouped " + std::to_string(s.grouped) + " sum_rounded " +
         std::to_string(s.sum_rounded) + " channels " + std::to_string(s.channels) + " pairs " +
         std::to_string(s.pairs) + " f16_step " + std::to_string(s.f16_step) + " seed " +
         std::to_string(s.seed);
}

}  // namespace

TEST_CASE("attend and flush are the same in every build", "[kernels]") {
  const std::vector<const Kernels*> all = builds();
  int settings = 0, wrong = 0;
  int64_t finite = 0, nans = 0;
  std::string first_wrong;
  for (const PFormat format : kFormats) {
    for (const PvModel model : kModels) {
      for (const int b_k : {64, 128}) {
        for (const int interval : {0, 32, 64, b_k, 2 * b_k}) {
          for (int bits = 0; bits < 8; ++bits) {
            Setting s{};
            s.format = format;
            s.model = model;
            s.b_k = b_k;
            s.interval = interval;
            s.fp8_scores = (bits & 1) != 0;
            s.ds = (bits & 2) != 0;
            s.grouped = (bits & 4) != 0;
            s.sum_rounded = settings % 3 != 0;
            s.channels = 16 * (1 + settings % 9);
            s.pairs = 1 + settings * 7 % 40;
            s.f16_step = settings % 5 < 2 ? 16 : 32;
            s.seed = static_cast<uint64_t>(settings);
            ++settings;
            const Tiles tiles(s);
            const State want = tiles.run(kGenericKernels);
            for (const float x : want.out) {
              finite += std::isfinite(x) && x != 0 ? 1 : 0;
              nans += std::isnan(x) ? 1 : 0;
            }
            for (const Kernels* build : all) {
              const int differing = tiles.run(*build).differs_from(want);
              if (differing != 0 && wrong++ == 0) {
                first_wrong = std::string(build->isa) + ", " + std::to_string(differing) +
                              " differ: " + describe(s);
              }
            }
          }
        }
      }
    }
  }
  CAPTURE(first_wrong);
  CHECK(wrong == 0);
  CHECK(settings == 4 * 4 * 2 * 5 * 8);
  CHECK(finite > 100'000);  // most of it is numbers, not only NaN or zeros
  CHECK(nans > 1000);
}

TEST_CASE("The comparison of builds sees one changed bit of one scale", "[kernels]") {
  Setting s{PFormat::kE4M3, PvModel::kTensorFp8, 64, 64, false, false, false, true, 32, 8, 32, 5};
  const State once = Tiles(s).run(kGenericKernels);
  CHECK(Tiles(s).run(kGenericKernels).differs_from(once) == 0);
  State changed = once;
  changed.out[3] = std::nextafter(changed.out[3], kInfinity);
  CHECK(changed.differs_from(once) == 1);
  s.seed = 6;
  CHECK(Tiles(s).run(kGenericKernels).differs_from(once) > 10);
}
