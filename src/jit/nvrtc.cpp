#include "src/jit/nvrtc.h"

#include <chrono>
#include <string_view>

namespace sageattn::jit {
namespace {

// Destroys the program on every way out.
class ProgramOwner {
 public:
  explicit ProgramOwner(const NvrtcFunctions& functions) : functions_(functions) {}
  ProgramOwner(const ProgramOwner&) = delete;
  ProgramOwner& operator=(const ProgramOwner&) = delete;
  ~ProgramOwner() {
    if (program_ != nullptr) functions_.nvrtcDestroyProgram(&program_);
  }
  Program* address() { return &program_; }
  Program get() const { return program_; }

 private:
  const NvrtcFunctions& functions_;
  Program program_ = nullptr;
};

template <class Container>
bool fetch(int (*get_size)(Program, size_t*), int (*get)(Program, char*), Program program,
           Container& bytes) {
  size_t size = 0;
  if (get_size(program, &size) != 0) return false;
  bytes.resize(size);
  return size == 0 || get(program, reinterpret_cast<char*>(bytes.data())) == 0;
}

// The only place where the build of the compiler can be read is the header of its PTX:
// "// Compiler Build ID: CL-36424714".
std::string build_of(std::string_view ptx) {
  constexpr std::string_view kLabel = "Compiler Build ID: ";
  const size_t start = ptx.substr(0, 1024).find(kLabel);
  if (start == std::string_view::npos) return "";
  ptx.remove_prefix(start + kLabel.size());
  return std::string(ptx.substr(0, ptx.find_first_of(std::string_view(" \r\n\0", 4))));
}

}  // namespace

void Nvrtc::ask() const {
  std::call_once(asked_, [this] {
    int major = 0;
    int minor = 0;
    if (functions_.nvrtcVersion(&major, &minor) == 0) version_ = major * 1000 + minor * 10;
    int count = 0;
    if (functions_.nvrtcGetNumSupportedArchs != nullptr &&
        functions_.nvrtcGetSupportedArchs != nullptr &&
        functions_.nvrtcGetNumSupportedArchs(&count) == 0 && count > 0) {
      archs_.resize(static_cast<size_t>(count));
      if (functions_.nvrtcGetSupportedArchs(archs_.data()) != 0) archs_.clear();
    }
  });
}

int Nvrtc::version() const {
  ask();
  return version_;
}

const std::vector<int>& Nvrtc::archs() const {
  ask();
  return archs_;
}

Compilation Nvrtc::compile(const SourceFile& main, std::span<const SourceFile> sources,
                           const std::vector<std::string>& options) const {
  std::vector<const char*> headers;
  std::vector<const char*> names;
  for (const SourceFile& source : sources) {
    if (source.name == main.name) continue;
    headers.push_back(reinterpret_cast<const char*>(source.bytes));
    names.push_back(source.name);
  }
  std::vector<const char*> arguments;
  arguments.reserve(options.size());
  for (const std::string& option : options) arguments.push_back(option.c_str());

  Compilation done;
  const auto start = std::chrono::steady_clock::now();
  ProgramOwner program(functions_);
  int result = functions_.nvrtcCreateProgram(
      program.address(), reinterpret_cast<const char*>(main.bytes), main.name,
      static_cast<int>(headers.size()), headers.data(), names.data());
  if (result == 0) {
    result = functions_.nvrtcCompileProgram(program.get(), static_cast<int>(arguments.size()),
                                            arguments.data());
    fetch(functions_.nvrtcGetProgramLogSize, functions_.nvrtcGetProgramLog, program.get(),
          done.log);
    while (!done.log.empty() && done.log.back() == '\0') done.log.pop_back();
  }
  if (result == 0) {
    done.ok =
        fetch(functions_.nvrtcGetCUBINSize, functions_.nvrtcGetCUBIN, program.get(), done.cubin) &&
        !done.cubin.empty();
    if (!done.ok) done.error = "no cubin";
    std::string ptx;
    if (functions_.nvrtcGetPTXSize != nullptr && functions_.nvrtcGetPTX != nullptr &&
        fetch(functions_.nvrtcGetPTXSize, functions_.nvrtcGetPTX, program.get(), ptx)) {
      done.build = build_of(ptx);
    }
  } else {
    done.error = functions_.nvrtcGetErrorString(result);
  }
  done.ms =
      std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start).count();
  return done;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace sageattn::jit
