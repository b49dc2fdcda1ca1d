// .safetensors: 8 bytes of header length (little endian), a JSON header, the tensors' bytes.
//
// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text"}}
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/io/tensor.h"

namespace tandem::io {

struct Safetensors {
  std::vector<FileTensor> tensors;  // tensors, ordered by address, point into the parsed bytes
  std::map<std::string, std::string> metadata;

  const FileTensor* find(std::string_view name) const;  // nullptr if absent
};

// Throws InputError unless the format's rules hold: every byte after the header belongs to exactly one tensor, names
// are unique, sizes agree. file: its name in messages.
Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// Replaces path after all bytes are written.
void write_safetensors(const std::string& path, std::span<const FileTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace tandem::io
