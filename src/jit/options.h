// How a kernel is compiled: options, the versions of NVRTC that can, and the key of the result.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "src/jit/kernel_list.h"

namespace sageattn::jit {

// `arch`: as arch_name() returns it. `macros`: as resolve_macros() returns them.
std::vector<std::string> compile_options(const KernelSpec& kernel, const std::string& arch,
                                         std::span<const Macro> macros);

// Options for an NVRTC of that version on top, which do not change the kernel and are not part of its
// key: NVRTC must not answer from a cache of its own, as it then leaves out the words of ptxas.
std::vector<std::string> session_options(int version);

// The oldest NVRTC that can compile the kernel for that arch, e.g. 12080: the larger of the
// kernel's and the arch's own floor.
int required_nvrtc(const KernelSpec& kernel, const std::string& arch);

// Fails with NVRTC_TOO_OLD, or with UNSUPPORTED if that NVRTC no longer knows the arch. `known`:
// the archs that it lists, empty if it does not say.
void check_nvrtc(const KernelSpec& kernel, const std::string& arch, int version,
                 std::span<const int> known, const std::string& path);

// All that decides the bytes of a kernel, but the compiler, as lines of text. Its SHA-256 is the
// kernel's key. The compiler is not part of it because asking it costs more than reading a kernel;
// an entry names its compiler in its header.
std::string key_text(const std::string& source_id, const KernelSpec& kernel,
                     const std::string& arch, std::span<const std::string> options);

// "k_mean for sm_80 (HEAD_DIM=64)", for messages.
std::string kernel_text(const KernelSpec& kernel, const std::string& arch,
                        std::span<const Macro> macros);

}  // namespace sageattn::jit
