// EXACT: attention in fp64 on the inputs as they are, the yardstick of everything else. It shares
// no arithmetic, mask or tiling code with the quantized path.
#pragma once

#include "src/core/config.h"
#include "src/cpu/layout.h"

namespace sageattn::cpu {

// One tile of b_q queries of one head.
void exact_q_tile(const PlanConfig& plan, const Launch& launch, const Sequence& sequence, int batch,
                  int head, int64_t q_tile, Scratch& scratch);

}  // namespace sageattn::cpu
