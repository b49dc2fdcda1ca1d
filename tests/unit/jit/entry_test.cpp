// Cache entries: a written entry is read, and any other bytes are refused.
#include "jit/entry.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>

namespace tandem::test {
namespace {

const jit::Digest kKey = jit::sha256("key");

TEST(Entry, RoundTrip) {
  for (const std::string& payload : {std::string(), std::string("x"), std::string(100000, '\0')}) {
    const std::string file = jit::write_entry(kKey, "forward, sm_90a", payload);
    EXPECT_EQ(jit::read_payload(file, kKey), payload);
    const auto head = jit::read_head(file);
    ASSERT_TRUE(head);
    EXPECT_EQ(head->key, kKey);
    EXPECT_EQ(head->description, "forward, sm_90a");
    EXPECT_EQ(head->payload_bytes, payload.size());
  }
}

TEST(Entry, LongDescriptionsAreCut) {
  const std::string file = jit::write_entry(kKey, std::string(5000, 'd'), "payload");
  EXPECT_EQ(jit::read_head(std::string_view(file).substr(0, jit::kMaxHead))->description.size(), jit::kMaxDescription);
  EXPECT_EQ(jit::read_payload(file, kKey), "payload");
}

TEST(Entry, OtherKeyIsRefused) {
  EXPECT_FALSE(jit::read_payload(jit::write_entry(kKey, "", "payload"), jit::sha256("other")));
}

TEST(Entry, EveryTruncationAndEveryFlippedByteIsRefused) {
  const std::string file = jit::write_entry(kKey, "description", std::string(50, 'p'));
  for (size_t i = 0; i < file.size(); ++i) {
    EXPECT_FALSE(jit::read_payload(std::string_view(file).substr(0, i), kKey)) << i;
    std::string damaged = file;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    EXPECT_FALSE(jit::read_payload(damaged, kKey)) << i;
  }
  EXPECT_FALSE(jit::read_payload(file + '\0', kKey));
}

TEST(Entry, SizesThatContradictTheFileAreRefused) {
  const std::string file = jit::write_entry(kKey, "description", "payload");
  const std::string body = file.substr(0, file.size() - 32);
  for (const auto& [at, byte] :
       {std::pair(8, 12), {8, 10}, {8, 60}, {11, 127}, {12, 6}, {12, 8}, {19, 127}, {12, 39}}) {
    std::string wrong = body;
    wrong[static_cast<size_t>(at)] = static_cast<char>(byte);
    const jit::Digest digest = jit::sha256(wrong);
    wrong.append(reinterpret_cast<const char*>(digest.data()), digest.size());
    EXPECT_FALSE(jit::read_payload(wrong, kKey)) << at << " " << byte;
  }
  std::string long_description = body;
  long_description[8] = 60;
  EXPECT_FALSE(jit::read_head(long_description));
}

// A parser must not trust the sizes in a head: the test uses random bytes, and entries with random heads.
TEST(Entry, Fuzz) {
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    std::mt19937 random(seed);
    std::string bytes;
    if (seed % 2 == 0) {
      bytes = std::string(jit::kEntryMagic).substr(0, random() % 9);
      bytes.resize(random() % 200);
      for (size_t i = 8; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random());
    } else {
      bytes = jit::write_entry(kKey, std::string(random() % 20, 'd'), std::string(random() % 20, 'p'));
      const uint32_t changes = 1 + random() % 4;
      for (uint32_t i = 0; i < changes; ++i)
        bytes[8 + random() % 12] = random() % 2 ? '\xff' : static_cast<char>(random() % 40);
    }
    const auto head = jit::read_head(bytes);
    const auto payload = jit::read_payload(bytes, kKey);
    if (payload) {
      EXPECT_TRUE(head && head->payload_bytes == payload->size()) << seed;
      EXPECT_EQ(bytes, jit::write_entry(kKey, head->description, *payload)) << seed;
    }
  }
}

}  // namespace
}  // namespace tandem::test
