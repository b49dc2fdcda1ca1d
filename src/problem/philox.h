// Philox4x32 (Salmon et al., SC11, "Parallel random numbers: as easy as 1, 2, 3"), and its use in dropout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tandem {

struct Philox4 {
  uint32_t word[4];
};

inline Philox4 philox4x32(Philox4 c, uint32_t key0, uint32_t key1, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c.word[0], b = uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{uint32_t(b >> 32) ^ c.word[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.word[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The minimum number of rounds that passes all tests of randomness in the paper.
constexpr int kDropoutRounds = 7;
// The number of neighbouring columns of a row that one call decides, one byte each.
constexpr int kDropoutGroup = 16;

// The words of columns [16 * group, 16 * group + 16) of one row. tandem.h defines the counter and the key.
inline Philox4 dropout_words(uint64_t seed, uint64_t offset, uint64_t sequence_head, uint64_t row, uint64_t group) {
  return philox4x32({{uint32_t(group), uint32_t(row), uint32_t(sequence_head), uint32_t(offset)}}, uint32_t(seed),
                    uint32_t(seed >> 32) + uint32_t(offset >> 32), kDropoutRounds);
}

// The word and the first bit of a column's byte. Both follow the layout of GPU fragments: pairs of columns in
// neighbouring lanes, eight columns in four lanes.
constexpr int dropout_word(int64_t column) { return static_cast<int>(column % 16 / 8 * 2 + column % 2); }
constexpr int dropout_shift(int64_t column) { return static_cast<int>(column / 2 % 4 * 8); }

// The nearest probability that a byte can represent: a multiple of 1 / 256, and 0 or 1 only if dropout_p is 0 or 1.
inline double rounded_dropout(double p) { return p > 0 ? std::clamp(std::round(p * 256), 1.0, 255.0) / 256 : 0; }
// An entry is dropped if its byte is below this threshold. p: rounded.
inline uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 256); }

inline bool is_dropped(const Philox4& words, int64_t column, uint32_t threshold) {
  return (words.word[dropout_word(column)] >> dropout_shift(column) & 255) < threshold;
}

}  // namespace tandem
