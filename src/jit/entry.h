// The file of one cached kernel. Little-endian:
//
//   bytes  0..8    magic "TANDEM\0\1", the last byte being the version of this format
//          8..12   bytes of the description
//         12..20   bytes of the payload
//         20..52   the key
//         52..     description, payload
//         last 32  SHA-256 of everything before
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "jit/sha256.h"

namespace tandem::jit {

inline constexpr std::string_view kEntryMagic{"TANDEM\0\1", 8};
inline constexpr size_t kMaxDescription = 1000;

struct EntryHead {
  Digest key{};
  std::string description;  // one line for people; cut at kMaxDescription
  uint64_t payload_bytes = 0;
};
// The maximum number of bytes that read_head needs.
inline constexpr size_t kMaxHead = 52 + kMaxDescription;

std::string write_entry(const Digest& key, std::string_view description, std::string_view payload);

// Returns the beginning of an entry, or nothing if it is invalid. The payload is not checked.
std::optional<EntryHead> read_head(std::string_view bytes);

// Returns the payload of a complete, undamaged entry with this key, or nothing. The result points into file.
std::optional<std::string_view> read_payload(std::string_view file, const Digest& key);

}  // namespace tandem::jit
