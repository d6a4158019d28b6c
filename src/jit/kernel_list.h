// The table of kernels (ptx/kernels/kernels.def) and what its columns mean.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sageattn::jit {

struct KernelSpec {  // columns of kernels.def
  const char* name;
  const char* source;
  const char* entry;
  const char* archs;
  const char* macros;
  bool fmad;
  int min_nvrtc;
};

struct Macro {
  std::string name;
  int64_t value;
  bool operator==(const Macro&) const = default;
};

std::span<const KernelSpec> kernel_list();

// Fails with INTERNAL if there is no such kernel.
const KernelSpec& find_kernel(std::span<const KernelSpec> kernels, std::string_view name);

// "sm_90a" for 90; "" if the kernel is not made for that arch.
std::string arch_name(const KernelSpec& kernel, int arch);

// All macros of the kernel in the order of the table, with the request's choices. Fails with
// INTERNAL if a choice is missing, unknown or not one of those listed.
std::vector<Macro> resolve_macros(const KernelSpec& kernel, std::span<const Macro> chosen);

// Every set of choices that a request can make, "*" apart (those fail with INTERNAL).
std::vector<std::vector<Macro>> macro_sets(const KernelSpec& kernel);

}  // namespace sageattn::jit
