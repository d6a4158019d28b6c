#include "src/jit/options.h"

#include <algorithm>

#include "src/core/error.h"
#include "src/jit/entry.h"
#include "src/jit/nvrtc.h"

namespace sageattn::jit {
namespace {

struct ArchFloor {
  int arch;
  int nvrtc;
};

// First NVRTC whose nvrtcGetSupportedArchs lists the arch, from the release notes of CUDA.
constexpr ArchFloor kArchFloors[] = {{80, 11000},  {86, 11010},  {87, 11040},  {89, 11080},
                                     {90, 11080},  {100, 12080}, {101, 12080}, {103, 12090},
                                     {110, 13000}, {120, 12080}, {121, 12090}};
constexpr int kOwnInstructionsFloor = 12000;  // sm_90a
constexpr int kNoCacheFloor = 12090;          // older ones have no cache and refuse the option

int arch_number(const std::string& arch) { return std::stoi(arch.substr(3)); }

}  // namespace

std::vector<std::string> compile_options(const KernelSpec& kernel, const std::string& arch,
                                         std::span<const Macro> macros) {
  std::vector<std::string> options = {
      "--gpu-architecture=" + arch,  // a real arch: a cubin, never PTX for the driver to compile
      "--std=c++17", kernel.fmad ? "--fmad=true" : "--fmad=false",
      "--ptxas-options=-v",  // changes the cubin's bytes: always on, so that what is tested is used
  };
  for (const Macro& macro : macros) {
    options.push_back("-D" + macro.name + "=" + std::to_string(macro.value));
  }
  return options;
}

std::vector<std::string> session_options(int version) {
  if (version < kNoCacheFloor) return {};
  return {"--no-cache"};
}

int required_nvrtc(const KernelSpec& kernel, const std::string& arch) {
  int version = kernel.min_nvrtc;
  for (const ArchFloor& floor : kArchFloors) {
    if (floor.arch == arch_number(arch)) version = std::max(version, floor.nvrtc);
  }
  if (arch.back() == 'a') version = std::max(version, kOwnInstructionsFloor);
  return version;
}

void check_nvrtc(const KernelSpec& kernel, const std::string& arch, int version,
                 std::span<const int> known, const std::string& path) {
  const char* const name = kernel.name;
  const std::string has = version_text(version) + " (" + path + ")";
  const int required = required_nvrtc(kernel, arch);
  if (version < required) {
    fail(SAGEATTN_E_NVRTC_TOO_OLD,
         "kernel %s for %s: needs NVRTC %s or newer, found %s; name a newer one with nvrtc_path or "
         "$SAGEATTN_NVRTC",
         name, arch.c_str(), version_text(required).c_str(), has.c_str());
  }
  const int number = arch_number(arch);
  if (known.empty() || std::find(known.begin(), known.end(), number) != known.end()) return;
  if (number > *std::max_element(known.begin(), known.end())) {
    fail(SAGEATTN_E_NVRTC_TOO_OLD,
         "kernel %s for %s: needs an NVRTC newer than %s, which does not know that arch; name one "
         "with nvrtc_path or $SAGEATTN_NVRTC",
         name, arch.c_str(), has.c_str());
  }
  fail(SAGEATTN_E_UNSUPPORTED, "kernel %s for %s: NVRTC %s does not compile for that arch", name,
       arch.c_str(), has.c_str());
}

std::string key_text(const std::string& source_id, const KernelSpec& kernel,
                     const std::string& arch, std::span<const std::string> options) {
  std::string text = key_prefix(source_id);
  text += std::string("kernel ") + kernel.name + "\n";
  text += std::string("source ") + kernel.source + "\n";
  text += std::string("entry ") + kernel.entry + "\n";
  text += "arch " + arch + "\n";
  for (const std::string& option : options) text += "option " + option + "\n";
  return text;
}

std::string kernel_text(const KernelSpec& kernel, const std::string& arch,
                        std::span<const Macro> macros) {
  std::string text = std::string(kernel.name) + " for " + arch;
  const char* separator = " (";
  for (const Macro& macro : macros) {
    text += separator + macro.name + "=" + std::to_string(macro.value);
    separator = ", ";
  }
  return macros.empty() ? text : text + ")";
}

}  // namespace sageattn::jit
