// NVRTC, found and loaded at run time. A loaded copy is never unloaded, so a pointer to it stays
// valid. Everything here may be called from any thread.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "src/jit/sources.h"
#include "src/util/file.h"

namespace sageattn::jit {

using Program = struct OpaqueProgram*;  // nvrtcProgram

struct NvrtcFunctions {
#define SAGEATTN_NVRTC(name, need, arguments) int(*name) arguments = nullptr;
#define SAGEATTN_NVRTC_TEXT(name, need, arguments) const char*(*name)arguments = nullptr;
#include "src/jit/nvrtc.def"
#undef SAGEATTN_NVRTC
#undef SAGEATTN_NVRTC_TEXT
};

struct Compilation {
  bool ok = false;
  std::string error;  // what NVRTC calls the failure, e.g. "NVRTC_ERROR_COMPILATION"
  std::string log;    // also of a success: registers and spills
  Bytes cubin;
  std::string build;  // of the compiler, e.g. "CL-36424714"; may be empty
  float ms = 0;
};

class Nvrtc {
 public:
  Nvrtc(std::string path, const NvrtcFunctions& functions)
      : path_(std::move(path)), functions_(functions) {}

  const std::string& path() const { return path_; }
  int version() const;                    // 12080 for 12.8; asked for on first use
  const std::vector<int>& archs() const;  // that it compiles for; empty if it does not say

  // `main` is one of `sources`; every other one can be included by its name.
  Compilation compile(const SourceFile& main, std::span<const SourceFile> sources,
                      const std::vector<std::string>& options) const;

 private:
  void ask() const;

  const std::string path_;
  const NvrtcFunctions functions_;
  mutable std::once_flag asked_;
  mutable int version_ = 0;
  mutable std::vector<int> archs_;
};

struct NvrtcSearch {
  const Nvrtc* nvrtc = nullptr;    // null: none found
  std::vector<std::string> tried;  // without success, in order: "where: why not"

  std::string tried_text() const;  // joined by "; "
};

// `path`: file or folder to take NVRTC from, empty for $SAGEATTN_NVRTC. Whoever names one gets that
// one or none: a wrong path would otherwise go unnoticed, and a copy that the process has loaded
// but that is too old could not be overruled. If neither names one: a copy that the process has
// already loaded, the loader's own search, CUDA toolkits, Python wheels.
NvrtcSearch find_nvrtc(const std::string& path);

std::string version_text(int version);  // "12.8" for 12080

}  // namespace sageattn::jit
