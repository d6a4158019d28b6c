// The kernels of a context: in memory, else imported, else on disk, else compiled.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/core/error.h"
#include "src/jit/disk_cache.h"
#include "src/jit/entry.h"
#include "src/jit/kernel_list.h"
#include "src/jit/nvrtc.h"
#include "src/jit/sources.h"
#include "src/util/source_id.h"

namespace sageattn::jit {

struct StoreConfig {
  uint32_t flags = 0;      // SAGEATTN_CONTEXT_NO_JIT, _NO_DISK_CACHE, _CACHE_READ_ONLY
  std::string cache_dir;   // of the context's desc; empty: choose
  std::string nvrtc_path;  // likewise; empty: search
  Log log;                 // may be empty

  // What tests replace.
  std::string source_id = kSourceId;  // stands for `kernels` and `sources` in keys
  std::span<const KernelSpec> kernels = kernel_list();
  std::span<const SourceFile> sources = embedded_sources();
  std::span<const BadBuild> bad_builds = known_bad_builds();
};

struct KernelRequest {
  std::string kernel;  // a name of kernels.def
  int arch = 0;        // 80, 86, ...; whether it is compiled for sm_90 or sm_90a, the kernel says
  std::vector<Macro> macros;  // its choices, in any order
};

struct KernelImage {
  std::shared_ptr<const KernelCode> code;  // cubin, registers, spill_bytes, smem_bytes, ...
  std::string entry;                       // name of the function in the cubin
  int32_t origin;                          // SAGEATTN_ORIGIN_*, of this get
  float compile_ms;                        // spent in NVRTC by this get
};

// May be used from any thread.
class KernelStore {
 public:
  explicit KernelStore(StoreConfig config);

  // Threads that want the same kernel at the same time compile it once; different kernels compile
  // in parallel. Fails with KERNEL_MISSING, NVRTC_NOT_FOUND, NVRTC_TOO_OLD, COMPILE, and with
  // UNSUPPORTED if the kernel is not made for the arch.
  std::shared_ptr<const KernelImage> get(const KernelRequest& request);

  // As get, for several at once: what is not in memory is read or compiled side by side, in the
  // order of the requests, so the one that takes longest should come first.
  std::vector<std::shared_ptr<const KernelImage>> get_all(std::span<const KernelRequest> requests);

  // All of a blob or, with BAD_BLOB, nothing of it.
  void import_blob(std::span<const uint8_t> blob);
  Bytes export_blob();  // of all that get() has returned
  Bytes export_blob(std::span<const std::shared_ptr<const KernelImage>> images) const;

  // For reports.
  std::string disk_state() { return disk_.state(); }
  size_t imported_count();
  NvrtcSearch nvrtc() const { return find_nvrtc(config_.nvrtc_path); }  // loads it if it is there

 private:
  struct Wanted;  // a request, resolved
  struct Slot {   // a kernel that is there, or that some thread is working on
    std::shared_ptr<const KernelCode> code;
    std::optional<Error> error;
    bool working = true;
  };

  bool in_memory(const KernelRequest& request);
  Wanted resolve(const KernelRequest& request) const;
  KernelImage produce(const Wanted& wanted);
  KernelImage compile(const Wanted& wanted);
  [[noreturn]] void fail_missing(const Wanted& wanted, const std::string& disk_reason);
  void log(int32_t level, const std::string& line) const;

  const StoreConfig config_;
  DiskCache disk_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Digest, std::shared_ptr<Slot>> slots_;
  std::map<Digest, std::shared_ptr<const KernelCode>> imported_;
};

}  // namespace sageattn::jit
