// Blobs: compiled kernels to be carried to another machine.
//
// All integers little-endian:
//     0  char[8]   "SAGEBLOB"
//     8  u32       format, 1
//    12  u32       number of entries
//    16  u64       size of the blob
//    24  char[64]  source id of the build that wrote it
//    88  entries   (src/jit/entry.h), each once
//        u8[32]    SHA-256 of all before
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/jit/entry.h"

namespace sageattn::jit {

Bytes write_blob(std::span<const std::shared_ptr<const KernelCode>> kernels,
                 const std::string& source_id);

// Checks everything before it returns anything. Fails with BAD_BLOB and what is wrong.
std::vector<KernelCode> read_blob(std::span<const uint8_t> blob, const std::string& source_id);

}  // namespace sageattn::jit
