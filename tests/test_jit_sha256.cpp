// SHA-256 against the vectors of NIST (FIPS 180-4 examples and CAVP short and long messages).
#include <string>

#include "src/util/sha256.h"
#include "tests/catch.h"

using sageattn::Sha256;
using sageattn::sha256;
using sageattn::to_hex;

namespace {

std::string hex_of(const std::string& text) { return to_hex(sha256(text.data(), text.size())); }

TEST_CASE("sha256: NIST vectors") {
  CHECK(hex_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
               "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu") ==
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(hex_of(std::string(1000000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK(hex_of("\xd3") == "28969cdfa74a12c82f3bad960b0b000aca2ac329deea5c2328ebc6f2ba9802c1");
}

TEST_CASE("sha256: any cut into pieces gives the same digest") {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 31);
  for (size_t length = 0; length <= text.size(); ++length) {
    const std::string whole = hex_of(text.substr(0, length));
    for (const size_t step : {size_t{1}, size_t{63}, size_t{64}, size_t{65}}) {
      Sha256 sha;
      for (size_t at = 0; at < length; at += step) {
        sha.update(text.data() + at, std::min(step, length - at));
      }
      REQUIRE(to_hex(sha.finish()) == whole);
    }
  }
}

}  // namespace
