#include "demo_presets.h"

#include "attention.h"
#include "failure.h"
#include "half.h"

namespace sageattn_cli {
namespace {

// SAGE2_4B without what makes four bits enough.
void unsmooth(sageattn_attn_desc& desc) {
  desc.smooth_q = SAGEATTN_SMOOTH_OFF;
  desc.smooth_k = SAGEATTN_SMOOTH_OFF;
}

void make_official(sageattn_attn_desc& desc) {
  desc.qk_format = SAGEATTN_QK_I8;
  desc.qk_granularity = SAGEATTN_GRANULARITY_PER_THREAD;
  desc.smooth_q = SAGEATTN_SMOOTH_OFF;
  desc.smooth_k = SAGEATTN_SMOOTH_OFF;  // K comes smoothed
  desc.smooth_v = SAGEATTN_SMOOTH_V_OFF;
  desc.v_scale = SAGEATTN_V_SCALE_CHANNEL;
  desc.pv_format = SAGEATTN_PV_E4M3;
  desc.row_sum = SAGEATTN_ROW_SUM_P;
  desc.pv_accum = SAGEATTN_PV_ACCUM_TWO_LEVEL;
  desc.promotion_interval = 128;
  desc.kernel = SAGEATTN_KERNEL_WGMMA;
}

constexpr DemoPreset kPresetTable[] = {
    {"SAGE1", "INT8 QK per block, K smoothed, FP16 PV", SAGEATTN_PRESET_SAGE1, nullptr, false},
    {"SAGE2_8B", "INT8 QK per thread, K smoothed, E4M3 PV", SAGEATTN_PRESET_SAGE2_8B, nullptr,
     false},
    {"SAGE2_4B", "INT4 QK per thread, Q and K smoothed, E4M3 PV", SAGEATTN_PRESET_SAGE2_4B, nullptr,
     false},
    {"SAGE2PP", "as SAGE2_8B with fp16 accumulators", SAGEATTN_PRESET_SAGE2PP, nullptr, false},
    {"INT4_UNSMOOTHED", "SAGE2_4B without smoothing Q and K", SAGEATTN_PRESET_SAGE2_4B, unsmooth,
     false},
    {"OFFICIAL", "the recipe of the official SageAttention2 kernel for sm_90, emulated",
     SAGEATTN_PRESET_AUTO, make_official, true},
};

constexpr Enumerant kNames[] = {{"sage1", 0},   {"sage2_8b", 1},        {"sage2_4b", 2},
                                {"sage2pp", 3}, {"int4_unsmoothed", 4}, {"official", 5}};
static_assert(std::size(kNames) == std::size(kPresetTable));

template <typename Decode, typename Encode>
void subtract_mean(uint16_t* column, int64_t tokens, int64_t stride, Decode decode, Encode encode) {
  float sum = 0;
  for (int64_t i = 0; i < tokens; ++i) sum += decode(column[i * stride]);
  const float mean = decode(encode(sum / static_cast<float>(tokens)));
  for (int64_t i = 0; i < tokens; ++i) {
    column[i * stride] = encode(decode(column[i * stride]) - mean);
  }
}

}  // namespace

std::span<const DemoPreset> demo_presets() { return kPresetTable; }
std::span<const Enumerant> demo_preset_names() { return kNames; }

sageattn_attn_desc demo_desc(const DemoPreset& preset) {
  sageattn_attn_desc desc = preset_desc(preset.base);
  if (preset.change) preset.change(desc);
  return desc;
}

void smooth_k_officially(Tensor& k, int32_t layout) {
  if (k.type != ElementType::kF16 && k.type != ElementType::kBF16) {
    throw Failure(kFileError, "the OFFICIAL recipe takes F16 and BF16 only");
  }
  const View view = view_of(k, layout, "k");
  auto* data = reinterpret_cast<uint16_t*>(k.data.data());
  for (int64_t batch = 0; batch < view.batches; ++batch) {
    for (int64_t head = 0; head < view.heads; ++head) {
      for (int64_t channel = 0; channel < view.channels; ++channel) {
        uint16_t* column = data + batch * view.stride_batch + head * view.stride_head + channel;
        if (k.type == ElementType::kBF16) {
          subtract_mean(column, view.tokens, view.stride_token, f32_from_bf16, bf16_from_f32);
        } else {
          subtract_mean(column, view.tokens, view.stride_token, f32_from_f16, f16_from_f32);
        }
      }
    }
  }
}

}  // namespace sageattn_cli
