// Which kernels a plan needs, how they are specialised, and how large their blocks are.
#pragma once

#include <string>
#include <vector>

#include "src/core/config.h"
#include "src/jit/kernel_list.h"

namespace sageattn::cuda {

// In the order of an execute.
enum class Kernel { kSequences, kPrepare, kCorrection, kAttention };
inline constexpr int kNumKernels = 4;

struct KernelUse {
  Kernel kernel;
  std::string name;  // in ptx/kernels/kernels.def
  std::vector<jit::Macro> macros;
  int threads;       // a block
  int shared_bytes;  // a block, dynamic
  bool stays =
      false;  // blocks take work until there is none: no more than run at once are launched
};

// Every kernel that some execute of the plan launches.
std::vector<KernelUse> kernels_of(const PlanConfig& plan);

// "attn_sm89_i8_e4m3": the attention kernel and the formats of QK and PV.
std::string kernel_name(const PlanConfig& plan);

// Fails with E_UNSUPPORTED, saying what can run, unless kernels_of can run the plan.
void check_supported(const PlanConfig& plan);

}  // namespace sageattn::cuda
