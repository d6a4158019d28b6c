#include "src/jit/entry.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "src/jit/little_endian.h"

namespace sageattn::jit {
namespace {

constexpr char kMagic[] = "SAGEKERN";
constexpr size_t kBuildSize = 32;
constexpr size_t kHashedSize = 144;
constexpr size_t kHeaderSize = kHashedSize + sizeof(Digest);

void append_bytes(Bytes& bytes, const void* data, size_t size) {
  const auto* first = static_cast<const uint8_t*>(data);
  bytes.insert(bytes.end(), first, first + size);
}

bool digest_is(const uint8_t* stored, const Digest& digest) {
  return std::memcmp(stored, digest.data(), digest.size()) == 0;
}

}  // namespace

std::string key_prefix(const std::string& source_id) {
  return "format " + std::to_string(kEntryFormat) + "\nsource_id " + source_id + "\n";
}

void append_entry(const KernelCode& code, Bytes& bytes) {
  const size_t start = bytes.size();
  bytes.reserve(start + kHeaderSize + code.text.size() + code.cubin.size());
  append_bytes(bytes, kMagic, 8);
  append_integer<uint32_t>(bytes, kEntryFormat);
  append_integer<uint32_t>(bytes, static_cast<uint32_t>(code.nvrtc_version));
  char build[kBuildSize] = {};
  std::copy_n(code.nvrtc_build.data(), std::min(code.nvrtc_build.size(), kBuildSize - 1), build);
  append_bytes(bytes, build, kBuildSize);
  append_integer<uint32_t>(bytes, static_cast<uint32_t>(code.registers));
  append_integer<uint32_t>(bytes, static_cast<uint32_t>(code.spill_bytes));
  append_integer<uint32_t>(bytes, static_cast<uint32_t>(code.smem_bytes));
  append_integer<uint32_t>(bytes, 0);
  append_integer<uint64_t>(bytes, code.text.size());
  append_integer<uint64_t>(bytes, code.cubin.size());
  append_bytes(bytes, code.key().data(), sizeof(Digest));
  append_bytes(bytes, sha256(code.cubin.data(), code.cubin.size()).data(), sizeof(Digest));
  append_bytes(bytes, sha256(bytes.data() + start, kHashedSize).data(), sizeof(Digest));
  append_bytes(bytes, code.text.data(), code.text.size());
  append_bytes(bytes, code.cubin.data(), code.cubin.size());
}

const char* read_entry(std::span<const uint8_t> bytes, KernelCode& code, size_t& used) {
  const uint8_t* const head = bytes.data();
  if (bytes.size() < kHeaderSize) return "is cut short";
  if (std::memcmp(head, kMagic, 8) != 0) return "is not a kernel";
  if (read_integer<uint32_t>(head + 8) != kEntryFormat) return "has another format";
  if (!digest_is(head + kHashedSize, sha256(head, kHashedSize))) return "has a damaged header";
  const size_t rest = bytes.size() - kHeaderSize;
  const auto text_size = read_integer<uint64_t>(head + 64);
  const auto cubin_size = read_integer<uint64_t>(head + 72);
  if (text_size > rest || cubin_size > rest - text_size) return "is cut short";
  // What follows guards against a header that was made up: its numbers are used as they are.
  uint32_t numbers[3];
  for (int i = 0; i < 3; ++i) {
    numbers[i] = read_integer<uint32_t>(head + 48 + 4 * i);
    if (numbers[i] > INT_MAX) return "has a damaged header";
  }
  const auto version = read_integer<uint32_t>(head + 12);
  if (version > INT_MAX || head[16 + kBuildSize - 1] != 0) return "has a damaged header";
  const uint8_t* const text = head + kHeaderSize;
  const uint8_t* const cubin = text + text_size;
  if (!digest_is(head + 80, sha256(text, text_size))) return "has a damaged text";
  if (!digest_is(head + 112, sha256(cubin, cubin_size))) return "has a damaged cubin";
  if (cubin_size < 4 || std::memcmp(cubin, "\177ELF", 4) != 0) return "holds no cubin";

  code.text.assign(text, cubin);
  code.cubin.assign(cubin, cubin + cubin_size);
  code.nvrtc_version = static_cast<int>(version);
  code.nvrtc_build = reinterpret_cast<const char*>(head + 16);
  code.registers = static_cast<int>(numbers[0]);
  code.spill_bytes = static_cast<int>(numbers[1]);
  code.smem_bytes = static_cast<int>(numbers[2]);
  used = kHeaderSize + text_size + cubin_size;
  return nullptr;
}

}  // namespace sageattn::jit
