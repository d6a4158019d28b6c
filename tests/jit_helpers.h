// For the tests of src/jit: folders, environment, kernels that need no compiler.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/core/error.h"
#include "src/jit/disk_cache.h"
#include "src/jit/entry.h"

namespace jit_test {

namespace fs = std::filesystem;
using sageattn::Bytes;
using sageattn::Digest;
using sageattn::jit::KernelCode;

// An empty folder that goes with the object.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "sageattn-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string path(const std::string& name = "") const {
    return name.empty() ? path_ : path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Sets or (nullptr) removes a variable, and puts it back.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { set(old_ ? old_->c_str() : nullptr); }

 private:
  void set(const char* value) {
    if (value != nullptr) {
      ::setenv(name_, value, 1);
    } else {
      ::unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> old_;
};

// Collects what is logged.
class Lines {
 public:
  sageattn::jit::Log log() {
    return [this](int32_t, const std::string& line) {
      const std::lock_guard lock(mutex_);
      text_ += line + "\n";
      ++count_;
    };
  }
  std::string text() const { return text_; }
  int count() const { return count_; }

 private:
  std::mutex mutex_;
  std::string text_;
  int count_ = 0;
};

// The error that `call` throws; status 0 if none.
template <class Call>
sageattn::Error error_of(Call call) {
  try {
    call();
  } catch (const sageattn::Error& error) {
    return error;
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& piece) {
  return text.find(piece) != std::string::npos;
}

inline Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

inline void write_file(const std::string& path, const Bytes& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

// Looks like a kernel to everything but a GPU.
inline KernelCode sample_code(const std::string& text, size_t size = 1000) {
  KernelCode code;
  code.text = text;
  code.cubin = {0x7f, 'E', 'L', 'F'};
  for (size_t i = 4; i < size; ++i) code.cubin.push_back(static_cast<uint8_t>(i * 7 + i / 256));
  code.nvrtc_version = 12080;
  code.nvrtc_build = "CL-1234";
  code.registers = 168;
  code.spill_bytes = 12;
  code.smem_bytes = 1024;
  return code;
}

inline bool same(const KernelCode& a, const KernelCode& b) {
  return a.text == b.text && a.cubin == b.cubin && a.nvrtc_version == b.nvrtc_version &&
         a.nvrtc_build == b.nvrtc_build && a.registers == b.registers &&
         a.spill_bytes == b.spill_bytes && a.smem_bytes == b.smem_bytes;
}

}  // namespace jit_test
