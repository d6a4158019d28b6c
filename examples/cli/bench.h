// The time that executes of a plan take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "library.h"

namespace sageattn_cli {

// What an execute spends on a GPU, in ms, each launch between two events of its own.
struct LaunchTimes {
  double attention = 0;    // its attention launches
  double preparation = 0;  // all others
};

struct Timing {
  double milliseconds;                  // of a whole execute
  std::optional<LaunchTimes> launches;  // the CPU backend has none
  size_t buffers;                       // sets of inputs and outputs that took turns
};

// Operands are dense and normally distributed, the same in every run.
class Bench {
 public:
  // Medians of `repeat` executes each. Inputs and outputs take turns where they fit in `l2_bytes`.
  Bench(const Context& context, int32_t dtype, int32_t repeat, int32_t warmup, int64_t l2_bytes);

  // `desc` has one type, and its limits are the lengths. Throws LibraryFailure.
  Timing time(const sageattn_attn_desc& desc, bool lse, sageattn_plan_info& info) const;

 private:
  const Context& context_;
  size_t repeat_, warmup_, l2_bytes_;
  std::vector<std::byte> noise_;
};

}  // namespace sageattn_cli
