// SHA-256 (FIPS 180-4). The digests name cache entries by content and detect damaged entries.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::jit {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(std::string_view bytes);
  // Ends the message. Nothing may be added after it.
  Digest finish();

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
};

Digest sha256(std::string_view bytes);
std::string hex(const Digest& digest);

}  // namespace tandem::jit
