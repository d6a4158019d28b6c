#include "src/jit/blob.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "src/core/error.h"
#include "src/jit/little_endian.h"

namespace sageattn::jit {
namespace {

constexpr char kMagic[] = "SAGEBLOB";
constexpr uint32_t kFormat = 1;
constexpr size_t kIdSize = 64;
constexpr size_t kHeaderSize = 24 + kIdSize;

}  // namespace

Bytes write_blob(std::span<const std::shared_ptr<const KernelCode>> kernels,
                 const std::string& source_id) {
  Bytes bytes;
  std::set<Digest> written;
  for (const char c : std::string(kMagic)) bytes.push_back(static_cast<uint8_t>(c));
  append_integer<uint32_t>(bytes, kFormat);
  append_integer<uint32_t>(bytes, 0);  // count and size follow below
  append_integer<uint64_t>(bytes, 0);
  for (size_t i = 0; i < kIdSize; ++i) {
    bytes.push_back(i < source_id.size() ? static_cast<uint8_t>(source_id[i]) : 0);
  }
  for (const auto& kernel : kernels) {
    if (written.insert(kernel->key()).second) append_entry(*kernel, bytes);
  }
  Bytes sizes;
  append_integer<uint32_t>(sizes, static_cast<uint32_t>(written.size()));
  append_integer<uint64_t>(sizes, bytes.size() + sizeof(Digest));
  std::copy(sizes.begin(), sizes.end(), bytes.begin() + 12);
  const Digest digest = sha256(bytes.data(), bytes.size());
  bytes.insert(bytes.end(), digest.begin(), digest.end());
  return bytes;
}

std::vector<KernelCode> read_blob(std::span<const uint8_t> blob, const std::string& source_id) {
  const size_t size = blob.size();
  if (size < 8 || std::memcmp(blob.data(), kMagic, 8) != 0) {
    fail(SAGEATTN_E_BAD_BLOB, "data: not a blob of libsageattn");
  }
  if (size < 12) fail(SAGEATTN_E_BAD_BLOB, "size = %zu: the blob is cut short", size);
  const auto format = read_integer<uint32_t>(blob.data() + 8);
  if (format != kFormat) {
    fail(SAGEATTN_E_BAD_BLOB, "data: blob of format version %u, this library reads %u", format,
         kFormat);
  }
  if (size < kHeaderSize + sizeof(Digest)) {
    fail(SAGEATTN_E_BAD_BLOB, "size = %zu: the blob is cut short", size);
  }
  const auto stated = read_integer<uint64_t>(blob.data() + 16);
  if (stated != size) {
    fail(SAGEATTN_E_BAD_BLOB, "size = %zu: the blob is damaged, it says that it has %llu bytes",
         size, static_cast<unsigned long long>(stated));
  }
  const size_t end = size - sizeof(Digest);
  const Digest digest = sha256(blob.data(), end);
  if (std::memcmp(blob.data() + end, digest.data(), sizeof(Digest)) != 0) {
    fail(SAGEATTN_E_BAD_BLOB, "data: the blob is damaged, its checksum is wrong");
  }
  // Text for a message only after it is known to be text.
  const auto* const id_bytes = reinterpret_cast<const char*>(blob.data() + 24);
  const std::string id(id_bytes, std::find(id_bytes, id_bytes + kIdSize, '\0'));
  if (id != source_id.substr(0, kIdSize)) {
    const bool hex = id.find_first_not_of("0123456789abcdef") == std::string::npos;
    fail(SAGEATTN_E_BAD_BLOB,
         "data: blob of another build of this library: its source id is %s, this one's %s",
         hex ? id.c_str() : "no source id", source_id.c_str());
  }

  const auto count = read_integer<uint32_t>(blob.data() + 12);
  const std::string prefix = key_prefix(source_id);
  std::vector<KernelCode> kernels;
  std::set<Digest> keys;
  size_t at = kHeaderSize;
  for (uint32_t i = 0; i < count; ++i) {
    KernelCode code;
    size_t used = 0;
    if (const char* why = read_entry(blob.subspan(at, end - at), code, used)) {
      fail(SAGEATTN_E_BAD_BLOB, "data: the blob is damaged, its entry %u %s", i, why);
    }
    if (code.text.rfind(prefix, 0) != 0) {
      fail(SAGEATTN_E_BAD_BLOB, "data: entry %u of the blob is of another build of this library",
           i);
    }
    if (!keys.insert(code.key()).second) {
      fail(SAGEATTN_E_BAD_BLOB, "data: the blob is damaged, its entry %u is there twice", i);
    }
    kernels.push_back(std::move(code));
    at += used;
  }
  if (at != end) {
    fail(SAGEATTN_E_BAD_BLOB, "data: the blob is damaged, %zu bytes follow its last entry",
         end - at);
  }
  return kernels;
}

}  // namespace sageattn::jit
