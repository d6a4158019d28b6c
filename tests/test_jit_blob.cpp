// Entries and blobs: what goes in comes out, and nothing else is accepted.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "src/jit/blob.h"
#include "src/jit/little_endian.h"
#include "tests/catch.h"
#include "tests/jit_helpers.h"

using namespace sageattn::jit;
using jit_test::contains;
using jit_test::error_of;
using jit_test::same;
using jit_test::sample_code;
using sageattn::Bytes;
using sageattn::Digest;
using sageattn::sha256;

namespace {

const std::string kId(64, 'a');

std::vector<std::shared_ptr<const KernelCode>> sample_kernels(const std::string& id = kId) {
  std::vector<std::shared_ptr<const KernelCode>> kernels;
  for (const char* name : {"one", "two", "three"}) {
    kernels.push_back(std::make_shared<KernelCode>(
        sample_code(key_prefix(id) + "kernel " + name + "\n", 100 + kernels.size())));
  }
  return kernels;
}

// Makes the checksum at the end right again.
void sign(Bytes& blob) {
  const size_t end = blob.size() - sizeof(Digest);
  const Digest digest = sha256(blob.data(), end);
  std::copy(digest.begin(), digest.end(), blob.begin() + static_cast<std::ptrdiff_t>(end));
}

TEST_CASE("entry: round trip") {
  const KernelCode code = sample_code("what\nand how\n", 5000);
  Bytes bytes = {1, 2, 3};
  append_entry(code, bytes);
  KernelCode back;
  size_t used = 0;
  bytes.push_back(9);
  REQUIRE(read_entry(std::span(bytes).subspan(3), back, used) == nullptr);
  CHECK(used == bytes.size() - 4);
  CHECK(same(code, back));
}

TEST_CASE("entry: every flipped bit and every cut is noticed") {
  Bytes bytes;
  append_entry(sample_code("text", 50), bytes);
  KernelCode code;
  size_t used = 0;
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    REQUIRE(read_entry(bytes, code, used) != nullptr);
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    REQUIRE(read_entry(cut, code, used) != nullptr);
  }
  CHECK(read_entry(bytes, code, used) == nullptr);
}

TEST_CASE("entry: no number in a header that is made up leads outside") {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes;
    append_entry(sample_code("text", 50), bytes);
    const size_t at = 8 + random() % 104;
    const uint64_t values[] = {0,       1, 54, 226, 0x7fffffff, ~uint64_t{0}, ~uint64_t{0} - 200,
                               random()};
    const uint64_t value = values[random() % 8];
    for (size_t i = 0; i < 8; ++i) bytes[at + i] = static_cast<uint8_t>(value >> (8 * i));
    const Digest digest = sha256(bytes.data(), 144);
    std::copy(digest.begin(), digest.end(), bytes.begin() + 144);
    KernelCode code;
    size_t used = 0;
    if (read_entry(bytes, code, used) == nullptr) {
      REQUIRE(used <= bytes.size());
      REQUIRE(code.registers >= 0);
    }
  }
}

TEST_CASE("blob: round trip") {
  auto kernels = sample_kernels();
  Bytes blob = write_blob(kernels, kId);
  std::vector<KernelCode> back = read_blob(blob, kId);
  REQUIRE(back.size() == 3);
  for (size_t i = 0; i < 3; ++i) CHECK(same(*kernels[i], back[i]));
  // A kernel given twice is written once; an empty blob is a blob.
  kernels.push_back(kernels[1]);
  CHECK(write_blob(kernels, kId) == blob);
  CHECK(read_blob(write_blob({}, kId), kId).empty());
}

TEST_CASE("blob: what is wrong is said") {
  const Bytes blob = write_blob(sample_kernels(), kId);
  const auto fault = [&](Bytes bytes, const std::string& id = kId) {
    const sageattn::Error error = error_of([&] { read_blob(bytes, id); });
    CHECK(error.status == SAGEATTN_E_BAD_BLOB);
    return std::string(error.message);
  };
  const auto with = [&](size_t at, uint8_t value) {
    Bytes bytes = blob;
    bytes[at] ^= value;
    return bytes;
  };
  CHECK(contains(fault({}), "not a blob"));
  CHECK(contains(fault({'S', 'A', 'G', 'E'}), "not a blob"));
  CHECK(contains(fault(with(0, 1)), "not a blob"));
  CHECK(contains(fault(with(8, 3)), "format version 2, this library reads 1"));
  CHECK(contains(fault(with(100, 1)), "checksum"));
  CHECK(contains(fault(Bytes(blob.begin(), blob.end() - 1)), "damaged, it says that it has"));
  CHECK(contains(fault(Bytes(blob.begin(), blob.begin() + 20)), "cut short"));
  const std::string other = fault(blob, std::string(64, 'b'));
  CHECK(contains(other, "another build"));
  CHECK(contains(other, std::string(64, 'a')));
  CHECK(contains(other, std::string(64, 'b')));

  // Correctly signed, and yet wrong.
  Bytes bytes = with(12, 1);  // 2 entries
  sign(bytes);
  CHECK(contains(fault(bytes), "follow its last entry"));
  bytes = with(12, 7);  // 4 entries
  sign(bytes);
  CHECK(contains(fault(bytes), "its entry 3 is cut short"));
  bytes = with(400, 1);
  sign(bytes);
  CHECK(contains(fault(bytes), "damaged, its entry"));
  bytes = write_blob(sample_kernels(std::string(64, 'c')), kId);
  CHECK(contains(fault(bytes), "entry 0 of the blob is of another build"));
}

TEST_CASE("blob: hostile bytes never crash") {
  const Bytes blob = write_blob(sample_kernels(), kId);
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes = blob;
    const int edits = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < edits; ++i) {
      const size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<uint8_t>(random());
          break;
        case 1:
          bytes[at] = 0xff;
          break;
        case 2:
          bytes.resize(std::max<size_t>(at, 40));
          break;
        default:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 3, 0xff);
          break;
      }
    }
    if (random() % 2 == 0 && bytes.size() > 60) {
      for (size_t i = 0; i < 8; ++i) bytes[16 + i] = static_cast<uint8_t>(bytes.size() >> (8 * i));
      sign(bytes);
    }
    const sageattn::Error error = error_of([&] { read_blob(bytes, kId); });
    REQUIRE((error.status == SAGEATTN_OK || error.status == SAGEATTN_E_BAD_BLOB));
  }
}

}  // namespace
