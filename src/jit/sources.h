// Device sources: the files of ptx/, which the build turns into byte arrays (embed.cmake).
#pragma once

#include <cstddef>
#include <span>

namespace sageattn::jit {

struct SourceFile {
  const char* name;            // "ptx/common/types.h", as #include names it
  const unsigned char* bytes;  // bytes[size] is 0: NVRTC takes C strings
  size_t size;
};

std::span<const SourceFile> embedded_sources();

}  // namespace sageattn::jit
