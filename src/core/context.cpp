#include "src/core/context.h"

#include <sched.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <thread>

#include "src/core/error.h"
#include "src/core/validate.h"
#include "src/cpu/backend.h"
#include "src/util/source_id.h"

namespace sageattn {
namespace {

constexpr int32_t kDefaultEmulatedArch = 90;

// Nothing if the CPU backend is to compute; `reason` says why, unless that was asked for.
std::optional<cuda::Target> choose_target(const sageattn_context_desc& desc, std::string& reason) {
  if (desc.backend == SAGEATTN_BACKEND_CPU) return {};
  try {
    cuda::Target target = cuda::find_target(desc.device, desc.target_arch);
    if (desc.backend == SAGEATTN_BACKEND_CUDA || target.device != nullptr) return target;
    reason = target.no_device.message;
  } catch (const Error& error) {
    if (desc.backend == SAGEATTN_BACKEND_CUDA) throw;
    reason = error.message;
  }
  return {};
}

int32_t choose_arch(const sageattn_context_desc& desc, const std::optional<cuda::Target>& target) {
  if (target) return target->arch;
  return desc.target_arch != 0 ? desc.target_arch : kDefaultEmulatedArch;
}

// Processors this process may use, not those the machine has.
int usable_processors() {
  cpu_set_t set;
  const int count = sched_getaffinity(0, sizeof set, &set) == 0
                        ? CPU_COUNT(&set)
                        : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(count, 1, 1024);
}

// Collects lines "key: value".
class Report {
 public:
  explicit Report(std::pmr::string& text) : text_(text) {}

  void line(const char* key, const char* value) {
    text_.append(key).append(": ").append(value).append("\n");
  }
  void line(const char* key, int64_t value, const char* remark) {
    char text[160];
    std::snprintf(text, sizeof text, "%lld%s", static_cast<long long>(value), remark);
    line(key, text);
  }
  void unused(const char* key, const char* value) {
    text_.append(key).append(": ").append(value);
    text_.append(" (no effect: the CPU backend compiles and loads nothing)\n");
  }

 private:
  std::pmr::string& text_;
};

// The libraries that are looked for at run time: which were found, and where they were not.
void write_libraries_report(const std::string& nvrtc_path, Report& report) {
  try {
    report.line("driver_library", cuda::driver().library);
  } catch (const Error& error) {
    report.line("driver_library", (std::string("none: ") + error.message).c_str());
  }
  const jit::NvrtcSearch search = jit::find_nvrtc(nvrtc_path);
  if (search.nvrtc != nullptr) {
    report.line("nvrtc",
                (jit::version_text(search.nvrtc->version()) + ", " + search.nvrtc->path()).c_str());
  } else {
    report.line("nvrtc",
                "none: kernels cannot be compiled; name it with nvrtc_path or "
                "$SAGEATTN_NVRTC");
  }
  for (const std::string& miss : search.tried) report.line("nvrtc_tried", miss.c_str());
}

void write_cuda_report(const sageattn_context_desc& desc, const cuda::Target& target,
                       jit::KernelStore& store, Report& report, std::pmr::string& text) {
  report.line("backend",
              desc.backend == SAGEATTN_BACKEND_CUDA ? "CUDA (asked for)" : "CUDA (AUTO)");
  text.append(cuda::describe(target));
  if ((desc.flags & SAGEATTN_CONTEXT_NO_JIT) != 0) report.line("flag", "NO_JIT");
  report.line("kernel_cache", store.disk_state().c_str());
  report.line("allocator", desc.alloc != nullptr ? "hooks of the caller" : "heap");
}

void write_cpu_report(const sageattn_context_desc& desc, const std::string& cuda_reason,
                      int32_t arch, int threads, Report& report) {
  report.line("backend", desc.backend == SAGEATTN_BACKEND_CPU
                             ? "CPU (asked for)"
                             : ("CPU (AUTO: " + cuda_reason + ")").c_str());
  if (desc.device != 0) report.unused("device", std::to_string(desc.device).c_str());
  report.line("arch", arch,
              desc.target_arch != 0 ? " (emulated, asked for)" : " (emulated, default)");
  report.line("instruction_set", cpu::isa_name());
  report.line("threads", threads,
              desc.num_threads != 0 ? " (asked for)" : " (processors this process may use)");
  report.line("allocator", desc.alloc != nullptr ? "hooks of the caller" : "heap");
  if ((desc.flags & SAGEATTN_CONTEXT_NO_JIT) != 0) report.unused("flag", "NO_JIT");
  if ((desc.flags & SAGEATTN_CONTEXT_NO_DISK_CACHE) != 0) report.unused("flag", "NO_DISK_CACHE");
  if ((desc.flags & SAGEATTN_CONTEXT_CACHE_READ_ONLY) != 0) {
    report.unused("flag", "CACHE_READ_ONLY");
  }
  if (desc.cache_dir != nullptr) report.unused("cache_dir", desc.cache_dir);
  if (desc.nvrtc_path != nullptr) report.unused("nvrtc_path", desc.nvrtc_path);
}

}  // namespace

void* HostMemory::do_allocate(size_t size, size_t alignment) {
  if (alloc_ == nullptr) return ::operator new (size, std::align_val_t{alignment});
  void* memory = alloc_(user_, size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void HostMemory::do_deallocate(void* memory, size_t, size_t alignment) {
  if (free_ == nullptr) return ::operator delete (memory, std::align_val_t{alignment});
  free_(user_, memory);
}

Context::Context(const sageattn_context_desc& desc)
    : memory_(desc),
      log_(desc.log),
      log_user_(desc.log_user),
      target_(choose_target(desc, cuda_reason_)),
      backend_(target_ ? SAGEATTN_BACKEND_CUDA : SAGEATTN_BACKEND_CPU),
      arch_(choose_arch(desc, target_)),
      looked_for_cuda_(desc.backend != SAGEATTN_BACKEND_CPU),
      pool_(target_                 ? 1
            : desc.num_threads != 0 ? desc.num_threads
                                    : usable_processors()),
      nvrtc_path_(desc.nvrtc_path != nullptr ? desc.nvrtc_path : ""),
      report_(&memory_) {
  Report report(report_);
  report.line("version", sageattn_version_string());
  report.line("source_id", kSourceId);
  if (target_) {
    jit::StoreConfig config;
    config.flags = desc.flags;
    if (desc.cache_dir != nullptr) config.cache_dir = desc.cache_dir;
    config.nvrtc_path = nvrtc_path_;
    config.log = [this](int32_t level, const std::string& line) { log(level, "%s", line.c_str()); };
    store_.emplace(std::move(config));
    write_cuda_report(desc, *target_, *store_, report, report_);
  } else {
    write_cpu_report(desc, cuda_reason_, arch_, pool_.threads(), report);
  }
}

const std::pmr::string& Context::report() {
  std::call_once(reported_, [&] {
    if (!looked_for_cuda_) return;
    std::pmr::string libraries(&memory_);
    Report report(libraries);
    write_libraries_report(nvrtc_path_, report);
    report_.append(libraries);
  });
  return report_;
}

Context* Context::create(const sageattn_context_desc& desc) {
  check_context_desc(desc);
  HostMemory memory(desc);
  Context* context = memory.make<Context>(desc);
  if (context->target_) {
    const cuda::DeviceInfo* device = context->target_->device;
    context->log(SAGEATTN_LOG_INFO, "context: CUDA backend, %s, arch %d",
                 device != nullptr ? device->name : "no device", context->arch_);
  } else {
    context->log(SAGEATTN_LOG_INFO, "context: CPU backend, %s, %d threads, arch %d emulated",
                 cpu::isa_name(), context->pool_.threads(), context->arch_);
  }
  return context;
}

void Context::release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  HostMemory memory = memory_;  // outlives the object whose memory it frees
  memory.destroy(this);
}

void Context::log(int32_t level, const char* format, ...) const {
  if (log_ == nullptr) return;
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  log_(log_user_, level, message);
}

}  // namespace sageattn
