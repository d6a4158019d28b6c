#include "inputs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace sageattn_test {

const char* const kInputKinds[8] = {
    "normal", "outlier_elements", "outlier_channels", "biased_v", "peaked", "v_channels", "sink",
    "drift"};

namespace {

__extension__ typedef unsigned __int128 uint128;

constexpr uint128 join(std::uint64_t high, std::uint64_t low) {
  return (static_cast<uint128>(high) << 64) | low;
}

// Spreads one 32-bit seed over 256 bits the way NumPy's SeedSequence does: a pool of four words is
// hashed, every word is mixed into every other, and the output is hashed from the pool again.
std::array<std::uint64_t, 4> expand_seed(std::uint32_t seed) {
  std::uint32_t multiplier = 0x43b0d7e5u;
  const auto hash = [&multiplier](std::uint32_t value) {
    value ^= multiplier;
    multiplier *= 0x931e8875u;
    value *= multiplier;
    return value ^ (value >> 16);
  };
  const auto mix = [](std::uint32_t x, std::uint32_t y) {
    const std::uint32_t value = 0xca01f9ddu * x - 0x4973f715u * y;
    return value ^ (value >> 16);
  };

  std::array<std::uint32_t, 4> pool{};
  for (std::size_t i = 0; i < pool.size(); ++i) pool[i] = hash(i == 0 ? seed : 0u);
  for (std::size_t from = 0; from < pool.size(); ++from) {
    for (std::size_t to = 0; to < pool.size(); ++to) {
      if (from != to) pool[to] = mix(pool[to], hash(pool[from]));
    }
  }

  std::uint32_t out_multiplier = 0x8b51f9ddu;
  std::array<std::uint64_t, 4> out{};
  for (std::size_t i = 0; i < 2 * out.size(); ++i) {
    std::uint32_t value = pool[i % pool.size()] ^ out_multiplier;
    out_multiplier *= 0x58f38dedu;
    value *= out_multiplier;
    value ^= value >> 16;
    out[i / 2] |= static_cast<std::uint64_t>(value) << (32 * (i % 2));
  }
  return out;
}

// PCG64 (128-bit LCG, XSL-RR output). 32-bit draws use the low half of a 64-bit draw, then the
// high half; all draws here are 32-bit, so the pending half is the only other state.
class Pcg64 {
 public:
  explicit Pcg64(std::uint32_t seed) {
    const std::array<std::uint64_t, 4> words = expand_seed(seed);
    const uint128 start = join(words[0], words[1]);
    increment_ = (join(words[2], words[3]) << 1) | 1u;
    state_ = (increment_ + start) * kMultiplier + increment_;
  }

  std::uint32_t next_uint32() {
    if (has_pending_) {
      has_pending_ = false;
      return pending_;
    }
    state_ = state_ * kMultiplier + increment_;
    const std::uint64_t folded =
        static_cast<std::uint64_t>(state_ >> 64) ^ static_cast<std::uint64_t>(state_);
    const std::uint64_t bits = std::rotr(folded, static_cast<int>(state_ >> 122));
    pending_ = static_cast<std::uint32_t>(bits >> 32);
    has_pending_ = true;
    return static_cast<std::uint32_t>(bits);
  }

  // Uniform on [0, 1) in steps of 2^-24.
  float next_uniform() { return static_cast<float>(next_uint32() >> 8) * 0x1p-24f; }

 private:
  static constexpr uint128 kMultiplier = join(0x2360ed051fc65da4u, 0x4385df649fccf645u);

  uint128 state_;
  uint128 increment_;
  std::uint32_t pending_ = 0;
  bool has_pending_ = false;
};

constexpr double kTailStart = 3.6541528853610088;

// Marsaglia and Tsang's ziggurat for exp(-x^2 / 2): 256 layers of equal area, of which layer 0 is
// the bottom one with the tail beyond kTailStart. Layers 1 to 255 grow from the peak to the tail.
struct Ziggurat {
  std::array<float, 256> width;          // x per unit of the 23-bit magnitude
  std::array<float, 256> height;         // density at the layer's outer edge
  std::array<std::uint32_t, 256> inner;  // magnitudes below this lie wholly under the curve

  Ziggurat() {
    const auto density = [](double x) { return std::exp(-0.5 * x * x); };
    const double tail = std::sqrt(std::acos(-1.0) / 2) * std::erfc(kTailStart / std::sqrt(2.0));
    const double area = kTailStart * density(kTailStart) + tail;

    std::array<double, 256> edge;
    edge[255] = kTailStart;
    for (std::size_t i = 254; i > 0; --i) {
      edge[i] = std::sqrt(-2 * std::log(area / edge[i + 1] + density(edge[i + 1])));
    }
    edge[0] = area / density(kTailStart);  // as if the bottom layer were a rectangle

    for (std::size_t i = 0; i < edge.size(); ++i) {
      const double narrower = i == 0 ? kTailStart : i == 1 ? 0.0 : edge[i - 1];
      width[i] = static_cast<float>(edge[i] * 0x1p-23);
      height[i] = i == 0 ? 1.0f : static_cast<float>(density(edge[i]));
      inner[i] = static_cast<std::uint32_t>(std::lround(narrower / edge[i] * 0x1p23));
    }
  }
};

class Generator {
 public:
  explicit Generator(std::uint32_t seed) : bits_(seed) {}

  std::vector<float> normal(std::size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = next_normal();
    return out;
  }

  std::vector<float> uniform(std::size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = bits_.next_uniform();
    return out;
  }

 private:
  // One 32-bit draw: bits 0-7 the layer, bit 8 the sign, bits 9-31 the magnitude.
  float next_normal() {
    for (;;) {
      const std::uint32_t draw = bits_.next_uint32();
      const std::size_t layer = draw & 0xff;
      const std::uint32_t magnitude = draw >> 9;
      const float size = static_cast<float>(magnitude) * zig_.width[layer];
      const float x = (draw & 0x100) != 0 ? -size : size;
      if (magnitude < zig_.inner[layer]) return x;
      if (layer == 0) return next_tail((magnitude & 0x100) != 0);

      const float low = zig_.height[layer];
      const float y = (zig_.height[layer - 1] - low) * bits_.next_uniform() + low;
      if (y < std::exp(-0.5 * x * x)) return x;
    }
  }

  // Marsaglia's exact method for |x| > kTailStart.
  float next_tail(bool negative) {
    constexpr float kStart = static_cast<float>(kTailStart);
    constexpr float kInverseStart = static_cast<float>(1 / kTailStart);
    for (;;) {
      const float beyond = -kInverseStart * std::log1p(-bits_.next_uniform());
      const float y = -std::log1p(-bits_.next_uniform());
      if (y + y > beyond * beyond) return negative ? -(kStart + beyond) : kStart + beyond;
    }
  }

  static const Ziggurat& ziggurat() {
    static const Ziggurat tables;
    return tables;
  }

  const Ziggurat& zig_ = ziggurat();
  Pcg64 bits_;
};

// Rounds to bf16, half to even. The inputs are finite.
float round_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// Walks a [heads][s][d] tensor: f(element, head, token, channel).
template <typename F>
void for_each(std::vector<float>& t, const Inputs& shape, F f) {
  float* x = t.data();
  for (int h = 0; h < shape.heads; ++h) {
    for (int i = 0; i < shape.s; ++i) {
      for (int c = 0; c < shape.d; ++c) f(*x++, h, i, c);
    }
  }
}

// scale * value where pick < rate, else a zero of the same sign.
std::vector<float> scale_picked(const std::vector<float>& value, float scale,
                                const std::vector<float>& pick, float rate) {
  std::vector<float> out(value.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = scale * value[i] * (pick[i] < rate ? 1.0f : 0.0f);
  }
  return out;
}

// N(0, 1) plus N(0, 10^2) on 0.1 % of the elements.
void add_outlier_elements(Inputs& in, Generator& gen) {
  for (std::vector<float>* t : {&in.q, &in.k, &in.v}) {
    const std::vector<float> n = gen.normal(t->size());
    const std::vector<float> u = gen.uniform(t->size());
    for (std::size_t i = 0; i < n.size(); ++i) {
      (*t)[i] += 10.0f * n[i] * (u[i] < 0.001f ? 1.0f : 0.0f);
    }
  }
}

// Biases shared by all tokens on 10 % of the channels of Q and of K.
void add_outlier_channels(Inputs& in, Generator& gen, std::size_t channels) {
  const std::vector<float> bias = gen.normal(channels);
  const std::vector<float> q = scale_picked(bias, 8.0f, gen.uniform(channels), 0.1f);
  const std::vector<float> k = scale_picked(bias, 20.0f, gen.uniform(channels), 0.1f);
  for_each(in.q, in, [&](float& x, int h, int, int c) { x += q[h * in.d + c]; });
  for_each(in.k, in, [&](float& x, int h, int, int c) { x += k[h * in.d + c]; });
}

// 5 % of V's channels are 31 times larger.
void enlarge_v_channels(Inputs& in, Generator& gen, std::size_t channels) {
  const std::vector<float> u = gen.uniform(channels);
  for_each(in.v, in, [&](float& x, int h, int, int c) {
    if (u[h * in.d + c] < 0.05f) x *= 31.0f;
  });
}

// The first 1024 keys gain 8 in every score and share an offset of V per channel.
void add_sink(Inputs& in, Generator& gen, std::size_t channels) {
  constexpr int kSinkKeys = 1024;
  const std::vector<float> offset = gen.normal(channels);
  const float step = static_cast<float>(std::sqrt(8 * std::sqrt(static_cast<double>(in.d)))) *
                     static_cast<float>(std::pow(in.d, -0.5));
  for (float& x : in.q) x += step;
  for_each(in.k, in, [&](float& x, int, int i, int) {
    if (i < kSinkKeys) x += step;
  });
  for_each(in.v, in, [&](float& x, int h, int i, int c) {
    if (i < kSinkKeys) x += 4.0f * offset[h * in.d + c];
  });
}

// Rotary-like local attention: Q and K share a position code, V drifts along the tokens.
void add_drift(Inputs& in, Generator& gen, std::size_t channels) {
  const int half = in.d / 2;
  std::vector<float> code(static_cast<std::size_t>(in.s) * in.d);
  for (int c = 0; c < half; ++c) {
    const double frequency = std::pow(10000.0, -static_cast<double>(c) / half);
    for (int i = 0; i < in.s; ++i) {
      float* row = &code[static_cast<std::size_t>(i) * in.d];
      row[c] = 3.0f * static_cast<float>(std::cos(i * frequency));
      row[half + c] = 3.0f * static_cast<float>(std::sin(i * frequency));
    }
  }
  std::vector<float> ramp(in.s, -0.5f);  // from -0.5 to 0.5, both included
  for (int i = 1; i < in.s; ++i) ramp[i] = static_cast<float>(i * (1.0 / (in.s - 1)) - 0.5);
  const std::vector<float> n = gen.normal(channels);

  const auto add_code = [&](float& x, int, int i, int c) {
    x = 0.5f * x + code[static_cast<std::size_t>(i) * in.d + c];
  };
  for_each(in.q, in, add_code);
  for_each(in.k, in, add_code);
  for_each(in.v, in,
           [&](float& x, int h, int i, int c) { x = 0.3f * x + 8.0f * n[h * in.d + c] * ramp[i]; });
}

}  // namespace

Inputs make_inputs(int kind, int d, int heads, int s) {
  if (kind < 0 || kind > 7) throw std::invalid_argument("make_inputs: kind must be 0 to 7");
  if (d < 1 || heads < 1 || s < 1) throw std::invalid_argument("make_inputs: empty shape");
  if (kind == 7 && d % 2 != 0) throw std::invalid_argument("make_inputs: drift needs an even d");

  Generator gen(static_cast<std::uint32_t>(20261130 + 1000 * kind + d));
  const std::size_t channels = static_cast<std::size_t>(heads) * d;
  const std::size_t count = channels * s;
  Inputs in{heads, s, d, {}, {}, {}};
  in.q = gen.normal(count);
  in.k = gen.normal(count);
  in.v = gen.normal(count);
  switch (kind) {
    case 1:
      add_outlier_elements(in, gen);
      break;
    case 2:
      add_outlier_channels(in, gen, channels);
      break;
    case 3:
      for (float& x : in.v) x = 0.3f * x + 8.5f;
      break;
    case 4:
      for (float& x : in.q) x *= 4.0f;
      break;
    case 5:
      enlarge_v_channels(in, gen, channels);
      break;
    case 6:
      add_sink(in, gen, channels);
      break;
    case 7:
      add_drift(in, gen, channels);
      break;
    default:  // normal: as drawn
      break;
  }
  for (std::vector<float>* t : {&in.q, &in.k, &in.v}) {
    std::transform(t->begin(), t->end(), t->begin(), round_bf16);
  }
  return in;
}

}  // namespace sageattn_test
