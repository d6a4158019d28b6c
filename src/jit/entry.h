// A compiled kernel, and the bytes that hold one: in a file of the disk cache, or in a blob.
//
// An entry, all integers little-endian:
//     0  char[8]   "SAGEKERN"
//     8  u32       format, 1
//    12  u32       version of NVRTC, e.g. 13000
//    16  char[32]  build of NVRTC, zero-padded
//    48  u32       registers a thread
//    52  u32       spilled bytes a thread
//    56  u32       static shared memory a block, bytes
//    60  u32       0
//    64  u64       size of the text
//    72  u64       size of the cubin
//    80  u8[32]    key: SHA-256 of the text
//   112  u8[32]    SHA-256 of the cubin
//   144  u8[32]    SHA-256 of bytes 0..143
//   176  text      what was compiled and how (key_text)
//        cubin
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "src/util/file.h"
#include "src/util/sha256.h"

namespace sageattn::jit {

constexpr uint32_t kEntryFormat = 1;

struct KernelCode {
  std::string text;
  Bytes cubin;
  int nvrtc_version = 0;
  std::string nvrtc_build;
  int registers = 0;    // a thread
  int spill_bytes = 0;  // a thread, stores and loads together
  int smem_bytes = 0;   // static, a block

  Digest key() const { return sha256(text.data(), text.size()); }
};

// First lines of every text of this build.
std::string key_prefix(const std::string& source_id);

void append_entry(const KernelCode& code, Bytes& bytes);

// Reads the entry at the start of `bytes`, which may be anything, and sets how many bytes it has.
// Returns null, or what is wrong with it.
const char* read_entry(std::span<const uint8_t> bytes, KernelCode& code, size_t& used);

}  // namespace sageattn::jit
