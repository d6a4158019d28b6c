// SHA-256 (FIPS 180-4).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace sageattn {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(const void* data, size_t size);
  Digest finish();  // once; the object is spent afterwards

 private:
  void block(const uint8_t* data);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t size_ = 0;  // bytes so far
  uint8_t pending_[64];
};

Digest sha256(const void* data, size_t size);
std::string to_hex(const Digest& digest);

}  // namespace sageattn
