// What the demo compares: the library's presets, and two that show what smoothing is for.
#pragma once

#include <cstdint>
#include <span>

#include "options.h"
#include "sageattn.h"
#include "tensor_io.h"

namespace sageattn_cli {

// The arch whose arithmetic is emulated: the one that the OFFICIAL recipe is for.
inline constexpr int32_t kDemoArch = 90;

struct DemoPreset {
  const char* name;
  const char* help;
  int32_t base;                              // SAGEATTN_PRESET_*
  void (*change)(sageattn_attn_desc& desc);  // may be null
  bool smooths_k_itself;                     // by smooth_k_officially
};

std::span<const DemoPreset> demo_presets();

// For a flag: each preset's name in lower case, and its index in demo_presets().
std::span<const Enumerant> demo_preset_names();

sageattn_attn_desc demo_desc(const DemoPreset& preset);

// Subtracts from K its mean over the tokens as the official preprocessing does: the mean, and then
// the difference, rounded to the type of K. Throws Failure(kFileError) unless that has 16 bits.
void smooth_k_officially(Tensor& k, int32_t layout);

}  // namespace sageattn_cli
