// FIPS 180-4: the examples of its appendix and of NIST's test files. Results must not depend on the division of a
// message.
#include "jit/sha256.h"

#include <gtest/gtest.h>

namespace tandem::test {
namespace {

using jit::hex;
using jit::sha256;

TEST(Sha256, KnownVectors) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(
      hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                 "mnopqrstnopqrstu")),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(hex(sha256("\xbd")), "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b");
  EXPECT_EQ(hex(sha256(std::string(64, '\0'))), "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b");
}

TEST(Sha256, EveryLengthAndEveryCut) {
  std::string message;
  for (int i = 0; i < 200; ++i) message += static_cast<char>(i * 7);
  for (size_t length = 0; length <= message.size(); ++length) {
    const std::string_view whole = std::string_view(message).substr(0, length);
    for (size_t cut = 0; cut <= length; cut += 13) {
      jit::Sha256 hash;
      hash.add(whole.substr(0, cut));
      hash.add(whole.substr(cut));
      ASSERT_EQ(hash.finish(), sha256(whole)) << length << " " << cut;
    }
  }
}

}  // namespace
}  // namespace tandem::test
