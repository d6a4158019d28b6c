// What a plan gets where the desc leaves the choice: formats, kernel, tile. Pure functions of their
// arguments. None of them fails: whether a combination can run is for validate.h.
#pragma once

#include <cstdint>

#include "include/sageattn.h"
#include "src/core/config.h"

namespace sageattn {

// The numerics of SAGEATTN_PRESET_*, every other field zero.
sageattn_attn_desc preset_desc(int32_t preset);

// Whether the arch multiplies E4M3 and E5M2 on its tensor cores.
bool arch_has_fp8(int32_t arch);

// Sets every numerics field of the plan and its tile, from those of the desc and from the plan's
// arch and head dimensions.
void resolve_numerics(const sageattn_attn_desc& desc, PlanConfig& plan);

// docs/numerics.md section 1. Kernel 0 (SAGEATTN_QK_NONE) gets the tile of MMA_SYNC; there it only
// says how the work is cut.
Tile select_tile(int32_t kernel, int32_t head_dim, int32_t head_dim_v);

// Whether pv_model decides anything: only FP8 sums that stay in the tensor core have one.
bool has_pv_model(int32_t pv_format, int32_t pv_accum);

}  // namespace sageattn
