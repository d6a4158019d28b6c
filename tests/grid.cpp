#include "tests/grid.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include "tests/buffers.h"

namespace sageattn_test {

// ---------------------------------------------------------------------------------------------
// Encodings.
// ---------------------------------------------------------------------------------------------

int dtype_size(int32_t dtype) { return dtype == SAGEATTN_F32 ? 4 : 2; }

namespace {

// Bits of a value that the format holds: a sign, exponent bits and `mantissa` fraction bits.
uint16_t pack16(float value, int mantissa, int min_exponent, int max_exponent) {
  const int exponent_field_all_ones = max_exponent - min_exponent + 2;
  const uint32_t sign = std::signbit(value) ? 1u : 0u;
  const float magnitude = std::fabs(value);
  uint32_t bits;
  if (std::isnan(value)) {
    bits = static_cast<uint32_t>(exponent_field_all_ones * 2 + 1) << (mantissa - 1);
  } else if (std::isinf(value)) {
    bits = static_cast<uint32_t>(exponent_field_all_ones) << mantissa;
  } else if (magnitude == 0) {
    bits = 0;
  } else {
    const int exponent = std::max(std::ilogb(magnitude), min_exponent);
    const double fraction = std::ldexp(static_cast<double>(magnitude), mantissa - exponent);
    if (fraction != std::floor(fraction) || exponent > max_exponent) {
      throw std::logic_error("a test stored a value that its type cannot hold");
    }
    bits = static_cast<uint32_t>(fraction) +
           (static_cast<uint32_t>(exponent - min_exponent) << mantissa);
  }
  return static_cast<uint16_t>(bits | sign << 15);
}

float unpack16(uint16_t bits, int mantissa, int min_exponent, int max_exponent) {
  const int fraction = bits & ((1 << mantissa) - 1);
  const int field = (bits & 0x7fff) >> mantissa;
  float magnitude;
  if (field == max_exponent - min_exponent + 2) {
    magnitude = fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                              : std::numeric_limits<float>::infinity();
  } else if (field == 0) {
    magnitude = static_cast<float>(std::ldexp(fraction, min_exponent - mantissa));
  } else {
    magnitude = static_cast<float>(
        std::ldexp(fraction + (1 << mantissa), field - 1 + min_exponent - mantissa));
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

void store(void* address, int32_t dtype, float value) {
  if (dtype == SAGEATTN_F32) {
    std::memcpy(address, &value, 4);
    return;
  }
  const uint16_t bits =
      dtype == SAGEATTN_F16 ? pack16(value, 10, -14, 15) : pack16(value, 7, -126, 127);
  std::memcpy(address, &bits, 2);
}

float load(const void* address, int32_t dtype) {
  if (dtype == SAGEATTN_F32) {
    float value;
    std::memcpy(&value, address, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, address, 2);
  return dtype == SAGEATTN_F16 ? unpack16(bits, 10, -14, 15) : unpack16(bits, 7, -126, 127);
}

uint64_t Random::next() {  // splitmix64
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

float Random::normal() {  // Irwin-Hall: 12 uniforms, from 16 bits each
  int64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    const uint64_t bits = next();
    for (int shift = 0; shift < 64; shift += 16) sum += (bits >> shift) & 0xffff;
  }
  return static_cast<float>(static_cast<double>(sum) / 65536 - 6);
}

// ---------------------------------------------------------------------------------------------
// Problems.
// ---------------------------------------------------------------------------------------------

double Problem::scale() const {
  if (sm_scale_set) return sm_scale;
  return static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
}

namespace {

const char* dtype_name(int32_t dtype) {
  return dtype == SAGEATTN_F16 ? "f16" : dtype == SAGEATTN_BF16 ? "bf16" : "f32";
}

const char* view_name(View view) {
  static const char* const names[] = {"default",  "padded",      "other_major", "transposed",
                                      "reversed", "interleaved", "shared_head"};
  return names[static_cast<int>(view)];
}

std::string list_of(const std::vector<int>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i != 0) text += ',';
    text += std::to_string(values[i]);
  }
  return text + "]";
}

// Deals the values of one axis in a shuffled order, each once before any comes again.
template <typename T>
class Deck {
 public:
  Deck(Random& random, std::vector<T> values) : random_(random), values_(std::move(values)) {}

  T deal() {
    if (next_ == 0) {
      for (size_t i = values_.size() - 1; i > 0; --i) {
        std::swap(values_[i], values_[random_.below(static_cast<int>(i) + 1)]);
      }
      next_ = values_.size();
    }
    return values_[--next_];
  }

 private:
  Random& random_;
  std::vector<T> values_;
  size_t next_ = 0;
};

struct Types {
  int32_t q, kv, out;
};

double cost_of(const Problem& p) {
  double cost = 0;
  for (int b = 0; b < p.batch(); ++b) {
    cost += static_cast<double>(p.qo_lens[b]) * p.kv_lens[b] * p.shape.num_qo_heads *
            (p.shape.head_dim + p.shape.head_dim_v);
  }
  return cost;
}

}  // namespace

std::string describe(const Problem& p) {
  static const char* const masks[] = {"none", "bottom_right", "top_left", "window"};
  static const char* const values[] = {"normal", "biased", "outliers", "scales", "zeros", "large"};
  std::ostringstream s;
  s << "q=" << dtype_name(p.q_dtype) << " kv=" << dtype_name(p.kv_dtype)
    << " out=" << dtype_name(p.out_dtype) << " heads=" << p.shape.num_qo_heads << "/"
    << p.shape.num_kv_heads << " d=" << p.shape.head_dim << " dv=" << p.shape.head_dim_v
    << (p.batch_mode == SAGEATTN_BATCH_VARLEN ? " varlen" : " dense")
    << " qo=" << list_of(p.qo_lens) << " kv=" << list_of(p.kv_lens);
  if (!p.seqused.empty()) s << " used=" << list_of(p.seqused);
  if (p.gap != 0) s << " gap=" << p.gap;
  s << " mask=" << masks[p.mask.kind];
  if (p.mask.kind == SAGEATTN_MASK_WINDOW) s << "(" << p.mask.left << "," << p.mask.right << ")";
  s << " layout=" << (p.layout == SAGEATTN_LAYOUT_HND ? "HND" : "NHD");
  if (p.sm_scale_set) s << " sm_scale=" << p.sm_scale;
  s << " views=" << view_name(p.q_view) << "," << view_name(p.k_view) << "," << view_name(p.v_view)
    << "," << view_name(p.out_view) << "," << view_name(p.lse_view)
    << " values=" << values[static_cast<int>(p.values)] << " seed=" << p.seed;
  return s.str();
}

std::string describe(const Problem& problem, const Numerics& numerics) {
  return "SAGEATTN_TEST_CASE=" + std::to_string(problem.id) +
         " SAGEATTN_TEST_NUMERICS=" + numerics.name + ": " + describe(problem);
}

std::vector<Problem> make_grid(int count, uint64_t seed) {
  Random random(seed);
  Deck<int> lengths(random, {1, 2, 3, 17, 31, 63, 64, 65, 97, 127, 128, 129, 200});
  Deck<int> dims(random, {1, 8, 20, 40, 64, 64, 80, 128, 128, 129, 192, 256});
  Deck<int> other_dims(random, {0, 0, 0, 1, 40, 64, 80, 128, 192, 256});  // 0: the same
  Deck<std::pair<int, int>> heads(random,
                                  {{1, 1}, {2, 2}, {2, 1}, {3, 1}, {6, 3}, {4, 2}, {7, 1}, {1, 1}});
  Deck<MaskSpec> masks(random, {{SAGEATTN_MASK_NONE, 0, 0},
                                {SAGEATTN_MASK_NONE, 0, 0},
                                {SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT, 0, 0},
                                {SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT, 0, 0},
                                {SAGEATTN_MASK_CAUSAL_TOP_LEFT, 0, 0},
                                {SAGEATTN_MASK_CAUSAL_TOP_LEFT, 0, 0},
                                {SAGEATTN_MASK_WINDOW, 0, 0},
                                {SAGEATTN_MASK_WINDOW, 5, 3},
                                {SAGEATTN_MASK_WINDOW, -1, 0},
                                {SAGEATTN_MASK_WINDOW, 16, -1},
                                {SAGEATTN_MASK_WINDOW, 64, 64},
                                {SAGEATTN_MASK_WINDOW, 0, 70},
                                {SAGEATTN_MASK_WINDOW, -1, -1}});
  constexpr int32_t kF16 = SAGEATTN_F16, kBF16 = SAGEATTN_BF16, kF32 = SAGEATTN_F32;
  Deck<Types> types(random, {{kF16, kF16, kF16},
                             {kBF16, kBF16, kBF16},
                             {kF32, kF32, kF32},
                             {kF16, kF16, kF32},
                             {kBF16, kF16, kF32},
                             {kF16, kBF16, kF32},
                             {kF32, kBF16, kF16},
                             {kBF16, kF32, kBF16}});
  constexpr float kDefault = std::numeric_limits<float>::infinity();
  Deck<float> scales(random,
                     {kDefault, kDefault, kDefault, kDefault, 0.0f, -0.125f, 0.3f, kDefault});
  Deck<int> batches(random, {1, 1, 2, 3});
  Deck<int> batch_modes(random,
                        {SAGEATTN_BATCH_DENSE, SAGEATTN_BATCH_DENSE, SAGEATTN_BATCH_VARLEN});
  Deck<int> empty(random, {1, 0, 0, 0, 0, 0, 0, 0});
  Deck<int> uses_seqused(random, {1, 0, 0, 0});
  Deck<int> gaps(random, {0, 0, 3});
  Deck<int32_t> layouts(random, {SAGEATTN_LAYOUT_NHD, SAGEATTN_LAYOUT_HND});
  const std::vector<View> output_views = {View::Default,    View::Default,    View::Padded,
                                          View::OtherMajor, View::Transposed, View::Reversed,
                                          View::Interleaved};
  std::vector<View> input_views = output_views;
  Deck<View> q_views(random, input_views);
  input_views.push_back(View::SharedHead);
  Deck<View> k_views(random, input_views), v_views(random, input_views);
  Deck<View> out_views(random, output_views);
  Deck<View> lse_views(random, {View::Default, View::Padded, View::Reversed});
  Deck<Values> values(random, {Values::Normal, Values::Normal, Values::Biased, Values::Biased,
                               Values::Outliers, Values::Scales, Values::Zeros, Values::Large});

  std::vector<Problem> grid;
  for (int id = 0; id < count; ++id) {
    Problem p;
    p.id = id;
    p.seed = seed * 1000 + static_cast<uint64_t>(id);
    p.shape.head_dim = dims.deal();
    p.shape.head_dim_v = other_dims.deal();
    if (p.shape.head_dim_v == 0) p.shape.head_dim_v = p.shape.head_dim;
    std::tie(p.shape.num_qo_heads, p.shape.num_kv_heads) = heads.deal();
    const Types t = types.deal();
    p.q_dtype = t.q;
    p.kv_dtype = t.kv;
    p.out_dtype = t.out;
    p.layout = layouts.deal();
    p.batch_mode = batch_modes.deal();
    p.mask = masks.deal();
    const float scale = scales.deal();
    if (scale != kDefault) {
      p.sm_scale_set = true;
      p.sm_scale = scale;
    }
    p.values = values.deal();
    if (p.values == Values::Large && p.out_dtype == SAGEATTN_F16) p.out_dtype = SAGEATTN_F32;
    p.q_view = q_views.deal();
    p.k_view = k_views.deal();
    p.v_view = v_views.deal();
    p.out_view = out_views.deal();
    p.lse_view = lse_views.deal();

    const int batch = batches.deal();
    for (int b = 0; b < batch; ++b) {
      if (b == 0 || p.batch_mode == SAGEATTN_BATCH_VARLEN) {
        p.qo_lens.push_back(lengths.deal());
        p.kv_lens.push_back(lengths.deal());
        if (empty.deal() != 0) (id % 2 != 0 ? p.qo_lens : p.kv_lens).back() = 0;
      } else {
        p.qo_lens.push_back(p.qo_lens[0]);
        p.kv_lens.push_back(p.kv_lens[0]);
      }
    }
    if (p.batch_mode == SAGEATTN_BATCH_VARLEN) p.gap = gaps.deal();

    // Keep it small, but for every tenth.
    const double limit = id % 10 == 9 ? 12e6 : 2e6;
    while (cost_of(p) > limit) {
      if (p.shape.num_qo_heads > 2) {
        p.shape.num_qo_heads = 2;
        p.shape.num_kv_heads = 1;
      } else if (p.batch() > 1) {
        p.qo_lens.pop_back();
        p.kv_lens.pop_back();
      } else if (p.shape.num_qo_heads > 1) {
        p.shape.num_qo_heads = p.shape.num_kv_heads = 1;
      } else {
        (random.below(2) != 0 ? p.qo_lens : p.kv_lens)[0] = lengths.deal();
      }
    }
    if (uses_seqused.deal() != 0) {
      for (int kv_len : p.kv_lens) p.seqused.push_back(random.below(kv_len + 1));
      if (id % 3 == 0) p.seqused[0] = p.kv_lens[0];
    }
    grid.push_back(p);
  }
  return grid;
}

Data make_data(const Problem& p) {
  Data data;
  for (int b = 0; b < p.batch(); ++b) {
    LiteralInput input;
    input.qo_len = p.qo_lens[b];
    input.kv_len = p.used_keys(b);
    Random random(p.seed * 64 + static_cast<uint64_t>(b) + 1);
    const float sharpness = p.seed % 3 == 0 ? 3.0f : 1.0f;

    enum { kQ, kK, kV };
    const auto fill = [&](std::vector<float>& x, int which, int tokens, int heads, int channels,
                          int32_t dtype, bool shared) {
      x.resize(static_cast<size_t>(tokens) * heads * channels);
      for (int t = 0; t < tokens; ++t) {
        for (int h = 0; h < heads; ++h) {
          for (int c = 0; c < channels; ++c) {
            float value = random.normal();
            if (which == kQ) value *= sharpness;
            switch (p.values) {
              case Values::Normal:
                break;
              case Values::Biased:
                if (which == kK && c % 7 == 3) value += 8;
                if (which == kV && c % 2 == 0) value = 0.25f * value + static_cast<float>(c % 9);
                break;
              case Values::Outliers:
                if (random.below(100) == 0) value *= 10;
                break;
              case Values::Scales:
                value *= std::ldexp(1.0f, 2 * (c % 5) - (which == kQ ? 6 : 4));
                break;
              case Values::Zeros:
                if (which == kQ ? t % 5 == 2 : c == 0) value = 0;
                break;
              case Values::Large:
                if (which == kV) value *= dtype == SAGEATTN_F16 ? 1e3f : 1e30f;
                break;
            }
            const size_t row = (static_cast<size_t>(t) * heads + h) * channels;
            const size_t first_head = static_cast<size_t>(t) * heads * channels;
            x[row + c] = shared && h > 0 ? x[first_head + c] : round_dtype(value, dtype);
          }
        }
      }
    };
    const AttentionShape& s = p.shape;
    fill(input.q, kQ, input.qo_len, s.num_qo_heads, s.head_dim, p.q_dtype, false);
    fill(input.k, kK, input.kv_len, s.num_kv_heads, s.head_dim, p.kv_dtype,
         p.k_view == View::SharedHead);
    fill(input.v, kV, input.kv_len, s.num_kv_heads, s.head_dim_v, p.kv_dtype,
         p.v_view == View::SharedHead);
    data.push_back(std::move(input));
  }
  return data;
}

// ---------------------------------------------------------------------------------------------
// Numerics.
// ---------------------------------------------------------------------------------------------

Numerics preset_numerics(int32_t preset, int32_t arch) {
  static const char* const names[] = {"AUTO", "SAGE1", "SAGE2_8B", "SAGE2_4B", "SAGE2PP", "EXACT"};
  Numerics numerics;
  numerics.name = std::string(names[preset]) + "/" + std::to_string(arch);
  numerics.arch = arch;
  if (sageattn_attn_desc_init(&numerics.desc, sizeof numerics.desc, preset, nullptr) !=
      SAGEATTN_OK) {
    throw std::runtime_error("sageattn_attn_desc_init failed");
  }
  return numerics;
}

std::vector<Numerics> all_presets() {
  std::vector<Numerics> list;
  for (int32_t arch : {90, 89, 80}) {
    list.push_back(preset_numerics(SAGEATTN_PRESET_AUTO, arch));
    list.push_back(preset_numerics(SAGEATTN_PRESET_SAGE1, arch));
    if (arch == 80) continue;  // no FP8 there
    list.push_back(preset_numerics(SAGEATTN_PRESET_SAGE2_8B, arch));
    list.push_back(preset_numerics(SAGEATTN_PRESET_SAGE2_4B, arch));
    list.push_back(preset_numerics(SAGEATTN_PRESET_SAGE2PP, arch));
  }
  return list;
}

std::vector<Numerics> all_enumerants() {
  std::vector<Numerics> list;
  const auto add = [&](const std::string& name, int32_t preset, int32_t arch,
                       const std::function<void(sageattn_attn_desc&)>& change) {
    Numerics numerics = preset_numerics(preset, arch);
    numerics.name += "+" + name;
    change(numerics.desc);
    if (numerics.desc.kernel == SAGEATTN_KERNEL_WGMMA) numerics.max_dim = 128;
    list.push_back(numerics);
  };
  using Desc = sageattn_attn_desc;
  constexpr int32_t k8B = SAGEATTN_PRESET_SAGE2_8B, k4B = SAGEATTN_PRESET_SAGE2_4B;
  constexpr int32_t k1 = SAGEATTN_PRESET_SAGE1, kPP = SAGEATTN_PRESET_SAGE2PP;

  add("i8", k4B, 90, [](Desc& d) { d.qk_format = SAGEATTN_QK_I8; });
  add("i4", k8B, 90, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
  add("i4", k1, 80, [](Desc& d) { d.qk_format = SAGEATTN_QK_I4; });
  add("qk_e4m3", k8B, 90, [](Desc& d) { d.qk_format = SAGEATTN_QK_E4M3; });
  add("qk_e4m3_smooth_q", k8B, 89, [](Desc& d) {
    d.qk_format = SAGEATTN_QK_E4M3;
    d.smooth_q = SAGEATTN_SMOOTH_ON;
  });
  for (int32_t g = SAGEATTN_GRANULARITY_PER_THREAD; g <= SAGEATTN_GRANULARITY_PER_TENSOR; ++g) {
    const std::string name = "granularity" + std::to_string(g);
    add(name, k8B, 90, [&](Desc& d) { d.qk_granularity = g; });
    add(name, k8B, 89, [&](Desc& d) { d.qk_granularity = g; });
    add(name, k1, 80, [&](Desc& d) { d.qk_granularity = g; });
  }
  for (int32_t q = SAGEATTN_SMOOTH_ON; q <= SAGEATTN_SMOOTH_OFF; ++q) {
    for (int32_t k = SAGEATTN_SMOOTH_ON; k <= SAGEATTN_SMOOTH_OFF; ++k) {
      const auto change = [&](Desc& d) {
        d.smooth_q = q;
        d.smooth_k = k;
      };
      const std::string name = "smooth_q" + std::to_string(q) + "k" + std::to_string(k);
      add(name, k8B, 90, change);
      add(name, k1, 80, change);
    }
  }
  for (int32_t smooth = SAGEATTN_SMOOTH_V_OFF; smooth <= SAGEATTN_SMOOTH_V_GROUP; ++smooth) {
    for (int32_t scale = SAGEATTN_V_SCALE_CHANNEL; scale <= SAGEATTN_V_SCALE_GROUP; ++scale) {
      const auto change = [&](Desc& d) {
        d.smooth_v = smooth;
        d.v_scale = scale;
      };
      const std::string name = "smooth_v" + std::to_string(smooth) + "s" + std::to_string(scale);
      add(name, k8B, 90, change);
      add(name, k8B, 89, change);
      add(name, kPP, 89, change);
      add(name + "i64", k8B, 90, [&](Desc& d) {
        change(d);
        d.promotion_interval = 64;
      });
    }
  }
  for (int32_t r : {SAGEATTN_ROTATION_HADAMARD, SAGEATTN_ROTATION_SMOOTHATTN}) {
    const std::string name = "rotation" + std::to_string(r);
    add(name, k8B, 90, [&](Desc& d) { d.rotation = r; });
    add(name, k4B, 89, [&](Desc& d) { d.rotation = r; });
  }
  add("pv_f16", k8B, 90, [](Desc& d) { d.pv_format = SAGEATTN_PV_F16; });
  add("pv_e5m2", k8B, 90, [](Desc& d) { d.pv_format = SAGEATTN_PV_E5M2; });
  add("pv_e5m2", k8B, 89, [](Desc& d) { d.pv_format = SAGEATTN_PV_E5M2; });
  add("pv_i8", k8B, 90, [](Desc& d) { d.pv_format = SAGEATTN_PV_I8; });
  add("pv_i8", k8B, 89, [](Desc& d) { d.pv_format = SAGEATTN_PV_I8; });
  for (int32_t sum : {SAGEATTN_ROW_SUM_P, SAGEATTN_ROW_SUM_ROUNDED_P}) {
    const std::string name = "row_sum" + std::to_string(sum);
    add(name, k8B, 90, [&](Desc& d) { d.row_sum = sum; });
    add(name, k1, 80, [&](Desc& d) { d.row_sum = sum; });
  }
  add("two_level", k1, 80, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_TWO_LEVEL; });
  add("accum_f16", k1, 80, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16; });
  add("accum_f16", k8B, 90, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F16; });
  add("accum_f32", k8B, 90, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F32; });
  add("accum_f32", k8B, 89, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_F32; });
  add("single_level", k8B, 90, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL; });
  add("single_level", k8B, 89, [](Desc& d) { d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL; });
  for (int32_t interval : {32, 64, 128, 256, 512}) {
    const std::string name = "interval" + std::to_string(interval);
    add(name, k8B, 90, [&](Desc& d) { d.promotion_interval = interval; });
    add(name, k8B, 89, [&](Desc& d) { d.promotion_interval = interval; });
  }
  // Combinations in which one field shows only through another.
  for (const int32_t preset : {k1, kPP}) {
    add("accum_f16_interval32", preset, 89, [](Desc& d) {
      d.pv_accum = SAGEATTN_PV_ACCUM_F16;
      d.promotion_interval = 32;
    });
  }
  for (int32_t format : {SAGEATTN_PV_F16, SAGEATTN_PV_E5M2, SAGEATTN_PV_I8}) {
    const std::string name = "pv" + std::to_string(format);
    add(name + "_group", k8B, 90, [&](Desc& d) {
      d.pv_format = format;
      d.smooth_v = SAGEATTN_SMOOTH_V_GROUP;
      d.promotion_interval = 128;
    });
    add(name + "_sequence", k8B, 89, [&](Desc& d) {
      d.pv_format = format;
      d.smooth_v = SAGEATTN_SMOOTH_V_SEQUENCE;
      d.row_sum = SAGEATTN_ROW_SUM_ROUNDED_P;
    });
  }
  add("accum_f32_group", k8B, 90, [](Desc& d) {
    d.pv_accum = SAGEATTN_PV_ACCUM_F32;
    d.smooth_v = SAGEATTN_SMOOTH_V_GROUP;
    d.promotion_interval = 64;
  });
  add("pv_e5m2_single_level", k8B, 89, [](Desc& d) {
    d.pv_format = SAGEATTN_PV_E5M2;
    d.pv_accum = SAGEATTN_PV_ACCUM_SINGLE_LEVEL;
  });
  add("wgmma", k8B, 90, [](Desc& d) { d.kernel = SAGEATTN_KERNEL_WGMMA; });
  add("mma_sync", k8B, 90, [](Desc& d) { d.kernel = SAGEATTN_KERNEL_MMA_SYNC; });
  add("mma_sync_qmma13", k8B, 90, [](Desc& d) {
    d.kernel = SAGEATTN_KERNEL_MMA_SYNC;
    d.pv_model = SAGEATTN_PV_MODEL_QMMA13;
  });
  add("qmma13", k8B, 89, [](Desc& d) { d.pv_model = SAGEATTN_PV_MODEL_QMMA13; });
  add("hmma", k8B, 89, [](Desc& d) { d.pv_model = SAGEATTN_PV_MODEL_HMMA; });
  return list;
}

bool selected(const Problem& problem, const Numerics& numerics) {
  const char* id = std::getenv("SAGEATTN_TEST_CASE");
  const char* name = std::getenv("SAGEATTN_TEST_NUMERICS");
  return (id == nullptr || std::to_string(problem.id) == id) &&
         (name == nullptr || numerics.name == name);
}

// ---------------------------------------------------------------------------------------------
// Running a problem.
// ---------------------------------------------------------------------------------------------
namespace {

bool all_are(unsigned char value, const unsigned char* bytes, size_t size) {
  return std::all_of(bytes, bytes + size, [&](unsigned char x) { return x == value; });
}

// The first byte outside the tokens that may be written which no longer holds the canary.
std::string find_stray_write(const Tensor& tensor, const std::vector<std::vector<bool>>& may_write,
                             const char* name) {
  std::vector<unsigned char> rest = tensor.image;
  const Dims& n = tensor.dims();
  const int size = dtype_size(tensor.dtype());
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t t = 0; t < n.token; ++t) {
      if (!may_write[b][t]) continue;
      for (int64_t h = 0; h < n.head; ++h) {
        for (int64_t c = 0; c < n.dim; ++c) {
          std::memset(&rest[tensor.at(b, t, h, c)], kCanary, size);
        }
      }
    }
  }
  for (size_t i = 0; i < rest.size(); ++i) {
    if (rest[i] != kCanary) {
      return std::string(name) + ": byte " + std::to_string(i) + " of its buffer was written";
    }
  }
  return {};
}

}  // namespace

sageattn_attn_desc make_desc(const Problem& p, const Numerics& numerics) {
  sageattn_attn_desc desc = numerics.desc;
  desc.struct_size = sizeof desc;
  desc.q_dtype = p.q_dtype;
  desc.kv_dtype = p.kv_dtype;
  desc.out_dtype = p.out_dtype;
  desc.layout = p.layout;
  desc.batch_mode = p.batch_mode;
  desc.mask = p.mask.kind;
  desc.window_left = p.mask.left;
  desc.window_right = p.mask.right;
  desc.head_dim = p.shape.head_dim;
  desc.head_dim_v = p.shape.head_dim_v;
  desc.num_qo_heads = p.shape.num_qo_heads;
  desc.num_kv_heads = p.shape.num_kv_heads;
  desc.sm_scale_set = p.sm_scale_set ? 1 : 0;
  desc.sm_scale = p.sm_scale;
  return desc;
}

std::vector<int32_t> cumulative(const std::vector<int>& lens, int start) {
  std::vector<int32_t> cu{start};
  for (const int len : lens) cu.push_back(cu.back() + len);
  return cu;
}

void set_limits(const Problem& p, sageattn_attn_desc& desc) {
  const auto limit = [&](int64_t n) { return std::max<int64_t>(n, 1) + (p.id % 3 == 0 ? 5 : 0); };
  const auto largest = [](const std::vector<int>& lens) {
    return lens.empty() ? 0 : *std::max_element(lens.begin(), lens.end());
  };
  desc.max_batch = static_cast<int32_t>(limit(p.batch()));
  desc.max_qo_len = static_cast<int32_t>(limit(largest(p.qo_lens)));
  desc.max_kv_len = static_cast<int32_t>(limit(largest(p.kv_lens)));
  if (p.batch_mode == SAGEATTN_BATCH_VARLEN) {
    desc.max_total_qo = limit(cumulative(p.qo_lens, p.gap).back() + p.gap);
    desc.max_total_kv = limit(cumulative(p.kv_lens, p.gap).back() + p.gap);
  }
}

sageattn_context* shared_context(int32_t arch, int threads) {
  static std::mutex mutex;
  using Owner = std::unique_ptr<sageattn_context, void (*)(sageattn_context*)>;
  static std::map<std::pair<int32_t, int>, Owner> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = contexts.find({arch, threads});
  if (found != contexts.end()) return found->second.get();

  sageattn_context_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.backend = SAGEATTN_BACKEND_CPU;
  desc.target_arch = arch;
  desc.num_threads = threads;
  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_context* context = nullptr;
  if (sageattn_context_create(&desc, &context, &error) != SAGEATTN_OK) {
    throw std::runtime_error(std::string("sageattn_context_create: ") + error.message);
  }
  contexts.emplace(std::pair(arch, threads), Owner(context, sageattn_context_destroy));
  return context;
}

CaseResult run_case(const Problem& p, const Numerics& numerics, const Data& data,
                    const RunOptions& options) {
  CaseResult result;
  const AttentionShape& s = p.shape;
  const bool varlen = p.batch_mode == SAGEATTN_BATCH_VARLEN;
  const int batch = p.batch();

  sageattn_error error = {};
  error.struct_size = sizeof error;
  sageattn_attn_desc desc = make_desc(p, numerics);
  set_limits(p, desc);
  sageattn_plan* raw_plan = nullptr;
  result.status = sageattn_plan_create(shared_context(numerics.arch, options.threads), &desc,
                                       &raw_plan, &error);
  if (result.status != SAGEATTN_OK) {
    result.message = error.message;
    return result;
  }
  const std::unique_ptr<sageattn_plan, void (*)(sageattn_plan*)> plan(raw_plan,
                                                                      sageattn_plan_destroy);
  result.planned = true;
  result.info.struct_size = sizeof result.info;
  result.status = sageattn_plan_get_info(plan.get(), &result.info, &error);
  if (result.status != SAGEATTN_OK) {
    result.message = error.message;
    return result;
  }

  Buffers buffers = make_buffers(p, data, options.lengths);
  Tensor &out = buffers.out, &lse = buffers.lse;
  const std::vector<unsigned char> before[3] = {buffers.q.image, buffers.k.image, buffers.v.image};
  sageattn_execute_args args = make_args(p, buffers, addresses_of(buffers));
  if (!options.want_lse) args.lse = {};

  // Workspace: exactly what is needed, no better aligned than promised.
  const size_t workspace_size = static_cast<size_t>(result.info.min_workspace);
  const size_t alignment = static_cast<size_t>(std::max(result.info.workspace_alignment, 1));
  const size_t guard = 4096;
  std::vector<unsigned char> arena(workspace_size + 2 * guard + 2 * alignment, kWorkspaceCanary);
  size_t offset = guard;
  while ((reinterpret_cast<uintptr_t>(&arena[offset])) % (2 * alignment) != alignment) ++offset;
  std::memset(&arena[offset], 0xFF, workspace_size);

  result.status =
      sageattn_execute(plan.get(), &args, &arena[offset], workspace_size, nullptr, &error);
  result.message = error.message;

  // What must not have changed.
  std::string& violation = result.violation;
  const char* const names[3] = {"q", "k", "v"};
  const Tensor* const inputs[3] = {&buffers.q, &buffers.k, &buffers.v};
  for (int i = 0; i < 3; ++i) {
    if (inputs[i]->image != before[i]) violation = std::string(names[i]) + " was written";
  }
  if (!all_are(kWorkspaceCanary, arena.data(), offset))
    violation = "memory before the workspace was written";
  if (!all_are(kWorkspaceCanary, &arena[offset] + workspace_size,
               arena.size() - offset - workspace_size)) {
    violation = "memory after the workspace was written";
  }
  if (!status_guards_hold(buffers.status)) {
    violation = "memory around the status words was written";
  }
  const int64_t q_tokens = out.dims().token;
  const int64_t q_start = varlen ? p.gap : 0;
  const int64_t q_end = varlen ? q_tokens - p.gap : q_tokens;
  if (violation.empty()) {
    const bool ok = result.status == SAGEATTN_OK;
    const bool own_lengths = options.lengths.cu_q.empty() && options.lengths.cu_kv.empty();
    std::vector<std::vector<bool>> rows(out.dims().batch, std::vector<bool>(q_tokens, ok));
    if (ok && varlen && own_lengths) {
      rows[0].assign(q_tokens, false);
      for (int64_t t = q_start; t < q_end; ++t) rows[0][t] = true;
    }
    violation = find_stray_write(out, rows, "out");
    if (!options.want_lse) {
      for (std::vector<bool>& row : rows) row.assign(q_tokens, false);
    }
    if (violation.empty()) violation = find_stray_write(lse, rows, "lse");
  }
  if (result.status != SAGEATTN_OK) return result;

  // Results.
  const auto read_rows = [&](int b, int64_t start, int64_t tokens) {
    LiteralOutput output;
    for (int64_t t = start; t < start + tokens; ++t) {
      for (int h = 0; h < s.num_qo_heads; ++h) {
        for (int c = 0; c < s.head_dim_v; ++c) {
          output.out.push_back(load(&out.image[out.at(b, t, h, c)], p.out_dtype));
        }
        output.lse.push_back(load(&lse.image[lse.at(b, t, h, 0)], SAGEATTN_F32));
      }
    }
    return output;
  };
  int64_t start = q_start;
  for (int b = 0; b < batch; ++b) {
    result.sequences.push_back(varlen ? read_rows(0, start, p.qo_lens[b])
                                      : read_rows(b, 0, q_tokens));
    result.sequence_status.push_back(buffers.status[b + 1]);
    start += p.qo_lens[b];
  }
  if (varlen) {
    result.packed = read_rows(0, 0, q_tokens);
    for (int64_t t = 0; t < q_tokens; ++t) {
      bool untouched = true;
      for (int h = 0; h < s.num_qo_heads; ++h) {
        untouched = untouched && all_are(kCanary, &lse.image[lse.at(0, t, h, 0)], 4);
        for (int c = 0; c < s.head_dim_v; ++c) {
          untouched = untouched &&
                      all_are(kCanary, &out.image[out.at(0, t, h, c)], dtype_size(p.out_dtype));
        }
      }
      result.packed_row_untouched.push_back(untouched);
    }
  }
  return result;
}

// ---------------------------------------------------------------------------------------------
// Reports.
// ---------------------------------------------------------------------------------------------

std::vector<std::string> for_each_case(int n, const std::function<std::string(int)>& f) {
  std::vector<std::string> reports(n);
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int i = next++; i < n; i = next++) {
      try {
        reports[i] = f(i);
      } catch (const std::exception& e) {
        reports[i] = std::string("exception: ") + e.what();
      }
    }
  };
  const int threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 4);
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  std::erase_if(reports, [](const std::string& report) { return report.empty(); });
  return reports;
}

std::string summary(const std::vector<std::string>& reports) {
  std::string text = std::to_string(reports.size()) + " cases failed";
  for (size_t i = 0; i < reports.size() && i < 5; ++i) text += "\n" + reports[i];
  return text;
}

std::string compare_bits(const std::vector<float>& got, const std::vector<float>& want,
                         const std::string& what, int channels, int heads) {
  if (got.size() != want.size()) return what + ": sizes differ";
  size_t count = 0, first = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(want[i])) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return {};
  std::ostringstream s;
  s.precision(9);
  const size_t row = first / channels;
  s << what << ": " << count << " of " << got.size() << " differ, first at token " << row / heads
    << " head " << row % heads << " channel " << first % channels << ": got " << got[first]
    << ", want " << want[first];
  return s.str();
}

std::string compare_bits(const LiteralOutput& got, const LiteralOutput& want,
                         const Problem& problem, const std::string& what) {
  const AttentionShape& s = problem.shape;
  const std::string out =
      compare_bits(got.out, want.out, what + " out", s.head_dim_v, s.num_qo_heads);
  const std::string lse = compare_bits(got.lse, want.lse, what + " lse", 1, s.num_qo_heads);
  return out + (out.empty() || lse.empty() ? "" : "; ") + lse;
}

}  // namespace sageattn_test
