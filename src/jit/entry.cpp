#include "jit/entry.h"

#include <cstring>

namespace tandem::jit {
namespace {

constexpr size_t kDescriptionAt = 52, kDigestBytes = 32;

void put(std::string& text, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
}

uint64_t get(std::string_view text, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<uint8_t>(text[at + i]);
  return value;
}

std::string_view bytes_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

std::string write_entry(const Digest& key, std::string_view description, std::string_view payload) {
  description = description.substr(0, kMaxDescription);
  std::string file(kEntryMagic);
  file.reserve(kDescriptionAt + description.size() + payload.size() + kDigestBytes);
  put(file, description.size(), 4);
  put(file, payload.size(), 8);
  file += bytes_of(key);
  file += description;
  file += payload;
  file += bytes_of(sha256(file));
  return file;
}

std::optional<EntryHead> read_head(std::string_view bytes) {
  if (bytes.size() < kDescriptionAt || !bytes.starts_with(kEntryMagic)) return std::nullopt;
  const uint64_t description_bytes = get(bytes, 8, 4);
  if (description_bytes > bytes.size() - kDescriptionAt) return std::nullopt;
  EntryHead head;
  std::memcpy(head.key.data(), bytes.data() + 20, head.key.size());
  head.description = bytes.substr(kDescriptionAt, description_bytes);
  head.payload_bytes = get(bytes, 12, 8);
  return head;
}

std::optional<std::string_view> read_payload(std::string_view file, const Digest& key) {
  if (file.size() < kDigestBytes) return std::nullopt;
  const std::string_view body = file.substr(0, file.size() - kDigestBytes), digest = file.substr(body.size());
  const std::optional<EntryHead> head = read_head(body);
  if (!head || head->key != key) return std::nullopt;
  const std::string_view payload = body.substr(kDescriptionAt + head->description.size());
  if (head->payload_bytes != payload.size() || bytes_of(sha256(body)) != digest) return std::nullopt;
  return payload;
}

}  // namespace tandem::jit
