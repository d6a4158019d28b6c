// Compiled kernels in a folder, one file an entry (src/jit/entry.h). Whatever is wrong with the
// folder or a file, the worst that happens is that a kernel is compiled again.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "include/sageattn.h"
#include "src/jit/entry.h"
#include "src/util/file.h"

namespace sageattn::jit {

// Level SAGEATTN_LOG_*, one line of text.
using Log = std::function<void(int32_t level, const std::string& line)>;

// An NVRTC build that is known to compile wrongly; what it made is never used.
struct BadBuild {
  int version;
  const char* build;  // "" stands for every build of the version
  const char* why;
};
std::span<const BadBuild> known_bad_builds();
const BadBuild* find_bad_build(std::span<const BadBuild> builds, const KernelCode& code);

// The folder: cache_dir, else $SAGEATTN_CACHE_DIR, else $XDG_CACHE_HOME/sageattn, else
// $HOME/.cache/sageattn, else "". Empty variables count as not set, and so do relative ones of the
// last two, which their specification asks for.
std::string choose_cache_dir(const std::string& cache_dir);

class DiskCache {
 public:
  enum class Mode { kOff, kRead, kReadWrite };

  // Touches the disk on first use.
  DiskCache(std::string cache_dir, Mode mode, Log log, std::span<const BadBuild> bad_builds);

  // Where entries are, and whether they can be: "<folder>", "<folder> (read only)",
  // "off (<why>)".
  std::string state();

  // `text` is the key's. Nothing if there is no entry or a bad one, which is logged once; `why`
  // tells the two apart, if given.
  std::optional<KernelCode> load(const Digest& key, const std::string& text,
                                 std::string* why = nullptr);

  // As load; where there is no good entry, waits while another process works on one, then claims
  // the key in `claim` so that others wait for us. Nothing is wrong without a claim: it only saves
  // compiling twice, so a folder that allows no locks, or a holder that is stuck, does not matter.
  std::optional<KernelCode> load_or_claim(const Digest& key, const std::string& text,
                                          FileDescriptor& claim);

  void store(const Digest& key, const KernelCode& code);

 private:
  bool open();
  void open_once();
  bool claim_now(const Digest& key, FileDescriptor& claim);
  bool publish(const std::string& name, const Bytes& bytes);
  void remove_leftovers();
  void log_once(const std::string& line, int32_t level = SAGEATTN_LOG_WARNING);

  const std::string cache_dir_;
  Mode mode_;
  const Log log_;
  const std::span<const BadBuild> bad_builds_;
  std::once_flag opened_;
  FileDescriptor folder_;  // not open: off
  std::string path_;
  std::string off_;  // why it is off
  std::mutex mutex_;
  std::set<std::string> logged_;
};

}  // namespace sageattn::jit
