#include "src/jit/store.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>
#include <thread>

#include "src/jit/blob.h"
#include "src/jit/options.h"
#include "src/jit/ptxas_log.h"

namespace sageattn::jit {
namespace {

DiskCache::Mode disk_mode(uint32_t flags) {
  if ((flags & SAGEATTN_CONTEXT_NO_DISK_CACHE) != 0) return DiskCache::Mode::kOff;
  // What never compiles has nothing to write.
  constexpr uint32_t kReads = SAGEATTN_CONTEXT_CACHE_READ_ONLY | SAGEATTN_CONTEXT_NO_JIT;
  if ((flags & kReads) != 0) return DiskCache::Mode::kRead;
  return DiskCache::Mode::kReadWrite;
}

// Calls visit(line) for each line that says something.
template <class Visit>
void each_line(const std::string& text, Visit visit) {
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = text.substr(start, end - start);
    if (line.find_first_not_of(" \r\t") != std::string::npos) visit(line);
    start = end + 1;
  }
}

// The log without ptxas's figures: a message has room for what went wrong only.
std::string complaints(const std::string& log) {
  std::string text;
  each_line(log, [&](const std::string& line) {
    if (line.rfind("ptxas info", 0) != 0) text += "\n" + line;
  });
  return text.empty() ? " no log" : text;
}

}  // namespace

struct KernelStore::Wanted {
  const KernelSpec* kernel;
  std::string arch;
  std::vector<std::string> options;
  std::string text;  // key_text
  Digest key;
  std::string name;  // for messages
};

KernelStore::KernelStore(StoreConfig config)
    : config_(std::move(config)),
      disk_(config_.cache_dir, disk_mode(config_.flags), config_.log, config_.bad_builds) {}

void KernelStore::log(int32_t level, const std::string& line) const {
  if (config_.log) config_.log(level, line);
}

size_t KernelStore::imported_count() {
  const std::lock_guard lock(mutex_);
  return imported_.size();
}

KernelStore::Wanted KernelStore::resolve(const KernelRequest& request) const {
  Wanted wanted;
  wanted.kernel = &find_kernel(config_.kernels, request.kernel);
  wanted.arch = arch_name(*wanted.kernel, request.arch);
  if (wanted.arch.empty()) {
    fail(SAGEATTN_E_UNSUPPORTED, "kernel %s: not made for sm_%d (made for %s)", wanted.kernel->name,
         request.arch, wanted.kernel->archs);
  }
  const std::vector<Macro> macros = resolve_macros(*wanted.kernel, request.macros);
  wanted.options = compile_options(*wanted.kernel, wanted.arch, macros);
  wanted.text = key_text(config_.source_id, *wanted.kernel, wanted.arch, wanted.options);
  wanted.key = sha256(wanted.text.data(), wanted.text.size());
  wanted.name = kernel_text(*wanted.kernel, wanted.arch, macros);
  return wanted;
}

std::shared_ptr<const KernelImage> KernelStore::get(const KernelRequest& request) {
  const Wanted wanted = resolve(request);
  std::shared_ptr<Slot> slot;
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = slots_.find(wanted.key);
      if (found == slots_.end()) break;
      const std::shared_ptr<Slot> other = found->second;
      changed_.wait(lock, [&] { return !other->working; });
      if (other->error) throw Error(*other->error);
      if (other->code) {
        return std::make_shared<const KernelImage>(
            KernelImage{other->code, wanted.kernel->entry, SAGEATTN_ORIGIN_MEMORY, 0});
      }
      // The other thread ran out of memory. We may not.
    }
    slot = std::make_shared<Slot>();
    slots_.emplace(wanted.key, slot);
  }
  // Only what succeeded stays: a later call may find what this one missed.
  const auto finish = [&](bool keep) {
    const std::lock_guard lock(mutex_);
    slot->working = false;
    if (!keep) slots_.erase(wanted.key);
    changed_.notify_all();
  };
  try {
    auto image = std::make_shared<const KernelImage>(produce(wanted));
    slot->code = image->code;
    finish(true);
    return image;
  } catch (const Error& error) {
    slot->error = error;
    finish(false);
    throw;
  } catch (...) {
    finish(false);
    throw;
  }
}

bool KernelStore::in_memory(const KernelRequest& request) {
  const Wanted wanted = resolve(request);
  const std::lock_guard lock(mutex_);
  return slots_.count(wanted.key) != 0 || imported_.count(wanted.key) != 0;
}

std::vector<std::shared_ptr<const KernelImage>> KernelStore::get_all(
    std::span<const KernelRequest> requests) {
  std::vector<std::shared_ptr<const KernelImage>> images(requests.size());
  std::vector<std::exception_ptr> failures(requests.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1)) < requests.size();) {
      try {
        images[i] = get(requests[i]);
      } catch (...) {
        failures[i] = std::current_exception();
        next = requests.size();  // what has not begun would be in vain
      }
    }
  };
  const auto missing = std::count_if(requests.begin(), requests.end(),
                                     [&](const KernelRequest& one) { return !in_memory(one); });
  const size_t threads = std::min<size_t>(static_cast<size_t>(missing),
                                          std::max(std::thread::hardware_concurrency(), 1u));
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(threads);
    for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // fewer threads only take longer
  } catch (const std::bad_alloc&) {
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return images;
}

KernelImage KernelStore::produce(const Wanted& wanted) {
  const auto image = [&](KernelCode&& code, int32_t origin) {
    return KernelImage{std::make_shared<const KernelCode>(std::move(code)), wanted.kernel->entry,
                       origin, 0};
  };
  {
    const std::lock_guard lock(mutex_);
    const auto found = imported_.find(wanted.key);
    if (found != imported_.end()) {
      return {found->second, wanted.kernel->entry, SAGEATTN_ORIGIN_BLOB, 0};
    }
  }
  if ((config_.flags & SAGEATTN_CONTEXT_NO_JIT) != 0) {
    std::string why;
    if (auto code = disk_.load(wanted.key, wanted.text, &why)) {
      return image(std::move(*code), SAGEATTN_ORIGIN_DISK);
    }
    fail_missing(wanted, why);
  }
  FileDescriptor claim;  // held while compiling and publishing
  if (auto code = disk_.load_or_claim(wanted.key, wanted.text, claim)) {
    return image(std::move(*code), SAGEATTN_ORIGIN_DISK);
  }
  KernelImage compiled = compile(wanted);
  disk_.store(wanted.key, *compiled.code);
  return compiled;
}

void KernelStore::fail_missing(const Wanted& wanted, const std::string& disk_reason) {
  std::string places = std::to_string(imported_count()) + " imported kernels; kernel cache ";
  places += disk_.state();
  if (disk_reason != "off") places += ": " + to_hex(wanted.key) + ".kernel: " + disk_reason;
  fail(SAGEATTN_E_KERNEL_MISSING,
       "kernel %s: not there, and SAGEATTN_CONTEXT_NO_JIT forbids to compile it; looked in: %s",
       wanted.name.c_str(), places.c_str());
}

KernelImage KernelStore::compile(const Wanted& wanted) {
  const char* const name = wanted.name.c_str();
  const auto main =
      std::find_if(config_.sources.begin(), config_.sources.end(), [&](const SourceFile& source) {
        return std::strcmp(source.name, wanted.kernel->source) == 0;
      });
  if (main == config_.sources.end()) {
    fail(SAGEATTN_E_INTERNAL, "kernel %s: no source %s", name, wanted.kernel->source);
  }
  const NvrtcSearch search = find_nvrtc(config_.nvrtc_path);
  if (search.nvrtc == nullptr) {
    fail(SAGEATTN_E_NVRTC_NOT_FOUND,
         "kernel %s: must be compiled, but NVRTC (libnvrtc.so of CUDA 12 or 13) was not found; "
         "name it with nvrtc_path or $SAGEATTN_NVRTC. Tried: %s",
         name, search.tried_text().c_str());
  }
  const Nvrtc& nvrtc = *search.nvrtc;
  check_nvrtc(*wanted.kernel, wanted.arch, nvrtc.version(), nvrtc.archs(), nvrtc.path());

  std::vector<std::string> options = wanted.options;
  for (std::string& option : session_options(nvrtc.version())) options.push_back(std::move(option));
  Compilation done = nvrtc.compile(*main, config_.sources, options);
  const std::string compiler = "NVRTC " + version_text(nvrtc.version());
  if (!done.ok) {
    each_line(done.log,
              [&](const std::string& line) { log(SAGEATTN_LOG_WARNING, "nvrtc: " + line); });
    fail(SAGEATTN_E_COMPILE, "kernel %s: %s refuses it, %s:%s", name, compiler.c_str(),
         done.error.c_str(), complaints(done.log).c_str());
  }
  const PtxasLog resources = parse_ptxas_log(done.log, wanted.kernel->entry);
  KernelCode code;
  code.text = wanted.text;
  code.cubin = std::move(done.cubin);
  code.nvrtc_version = nvrtc.version();
  code.nvrtc_build = done.build;
  code.registers = resources.registers;
  code.spill_bytes = resources.spill_stores + resources.spill_loads;
  code.smem_bytes = resources.smem_bytes;
  if (const BadBuild* bad = find_bad_build(config_.bad_builds, code)) {
    fail(SAGEATTN_E_COMPILE, "kernel %s: %s (%s, build %s) is known to compile wrongly: %s", name,
         compiler.c_str(), nvrtc.path().c_str(), done.build.c_str(), bad->why);
  }
  // An NVRTC that answers from a cache all the same (session_options) leaves out what ptxas says:
  // then only the cubin can tell whether the function is there.
  const std::string section = std::string(".text.") + wanted.kernel->entry;
  if (!resources.found && std::search(code.cubin.begin(), code.cubin.end(), section.begin(),
                                      section.end()) == code.cubin.end()) {
    fail(SAGEATTN_E_COMPILE, "kernel %s: %s has no function %s", name, wanted.kernel->source,
         wanted.kernel->entry);
  }
  for (const PtxasAdvisory& advisory : resources.advisories) {
    log(SAGEATTN_LOG_WARNING, "kernel " + wanted.name + ": " + advisory.line);
  }
  char figures[160];
  std::snprintf(figures, sizeof figures, " in %.0f ms: %d registers, %d bytes spilled, %d smem",
                static_cast<double>(done.ms), code.registers, code.spill_bytes, code.smem_bytes);
  log(SAGEATTN_LOG_INFO, "compiled " + wanted.name + " with " + compiler + figures);
  return {std::make_shared<const KernelCode>(std::move(code)), wanted.kernel->entry,
          SAGEATTN_ORIGIN_COMPILED, done.ms};
}

void KernelStore::import_blob(std::span<const uint8_t> blob) {
  std::map<Digest, std::shared_ptr<const KernelCode>> added;
  for (KernelCode& code : read_blob(blob, config_.source_id)) {
    if (const BadBuild* bad = find_bad_build(config_.bad_builds, code)) {
      fail(SAGEATTN_E_BAD_BLOB,
           "data: the blob's kernels come from NVRTC %s (build %s), which compiles wrongly: %s",
           version_text(code.nvrtc_version).c_str(), code.nvrtc_build.c_str(), bad->why);
    }
    const Digest key = code.key();
    added.emplace(key, std::make_shared<const KernelCode>(std::move(code)));
  }
  const std::lock_guard lock(mutex_);
  imported_.merge(added);
}

Bytes KernelStore::export_blob() {
  std::vector<std::shared_ptr<const KernelCode>> kernels;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, slot] : slots_) {
      if (!slot->working) kernels.push_back(slot->code);
    }
  }
  return write_blob(kernels, config_.source_id);
}

Bytes KernelStore::export_blob(std::span<const std::shared_ptr<const KernelImage>> images) const {
  std::vector<std::shared_ptr<const KernelCode>> kernels;
  for (const auto& image : images) kernels.push_back(image->code);
  return write_blob(kernels, config_.source_id);
}

}  // namespace sageattn::jit
