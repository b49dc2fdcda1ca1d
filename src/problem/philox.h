// Philox4x32-10 (Salmon et al., SC11, "Parallel random numbers: as easy as 1, 2, 3"), as dropout uses it.
#pragma once

#include <cstdint>

namespace tandem {

struct Philox4 {
  uint32_t word[4];
};

inline Philox4 philox4x32_10(Philox4 c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c.word[0], b = uint64_t{0xCD9E8D57u} * c.word[2];
    c = {{uint32_t(b >> 32) ^ c.word[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.word[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The four random words of columns [4 * quad, 4 * quad + 4) of one row: tandem.h states the counter and the key.
inline Philox4 dropout_words(uint64_t seed, uint64_t offset, uint64_t sequence_head, uint64_t row, uint64_t quad) {
  return philox4x32_10({{uint32_t(quad), uint32_t(row), uint32_t(sequence_head), uint32_t(offset)}}, uint32_t(seed),
                       uint32_t(seed >> 32) + uint32_t(offset >> 32));
}

// An entry is dropped when its word is below this.
inline uint64_t dropout_threshold(double p) { return static_cast<uint64_t>(p * 4294967296.0); }

}  // namespace tandem
