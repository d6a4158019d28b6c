// An NVRTC that compiles nothing: its cubins only name the functions that their source has, which is
// all that the library and the fake driver look at.
#include <cstddef>
#include <cstring>
#include <string>

namespace {

struct FakeProgram {
  std::string source, cubin;
};

FakeProgram& program_of(void* handle) { return *static_cast<FakeProgram*>(handle); }

int copy(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_OF_A_FAKE"; }
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*,
                       const char* const*) {
  *program = new FakeProgram{source, ""};
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete static_cast<FakeProgram*>(*program);
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void* program, int, const char* const*) {
  FakeProgram& p = program_of(program);
  p.cubin =
      "\x7f"
      "ELF";
  const auto word = [](char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z');
  };
  for (size_t at = 0; (at = p.source.find("sageattn_", at)) != std::string::npos;) {
    p.cubin += ".text.";
    while (at < p.source.size() && word(p.source[at])) p.cubin += p.source[at++];
  }
  return 0;
}
int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = 1;
  return 0;
}
int nvrtcGetProgramLog(void*, char* log) { return copy(std::string(1, '\0'), log); }
int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = program_of(program).cubin.size();
  return 0;
}
int nvrtcGetCUBIN(void* program, char* cubin) { return copy(program_of(program).cubin, cubin); }
}
#pragma GCC visibility pop
