// What ptxas says about a kernel with --ptxas-options=-v: its resources, without a GPU.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sageattn::jit {

// "(C7517) warpgroup.wait is injected in around line 48 by compiler ...": performance was lost.
struct PtxasAdvisory {
  int code;          // 7517
  std::string line;  // all of it
};

struct PtxasLog {
  bool found = false;  // the log speaks of the kernel
  int registers = 0;   // a thread
  int stack_bytes = 0;
  // A thread, of the kernel and of the functions that it calls.
  int spill_stores = 0;
  int spill_loads = 0;
  int smem_bytes = 0;                     // static, a block
  std::vector<PtxasAdvisory> advisories;  // of the whole log

  // wgmma instructions wait for each other, so that the tensor cores idle: C7508 to C7516, which
  // tell the reasons apart. Recognised by what their texts share, as new codes keep appearing.
  bool wgmma_serialized() const;
  bool has_advisory(int code) const;
};

PtxasLog parse_ptxas_log(std::string_view log, std::string_view entry);

}  // namespace sageattn::jit
