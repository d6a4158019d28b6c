// What a benchmark ran on, and how fast that can be at most.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "library.h"
#include "options.h"

namespace sageattn_cli {

// Measured, not read off a data sheet.
struct Rates {
  double s8_tops, e4m3_tops;  // tensor core, nothing but products
  double copy_bytes;          // a second, read and written added up
  const char* source;
};

struct Machine {
  Json json;  // names and versions; what cannot be found out is null
  std::optional<Rates> rates;
  int64_t l2_bytes = 0;  // 0: unknown, or no GPU
};

Machine find_machine(const Context& context);

// Tensor-core TOPS that attention could reach at most; nothing if no rate of a format is known.
std::optional<double> tensor_peak(const Machine& machine, const sageattn_plan_info& plan);

}  // namespace sageattn_cli
