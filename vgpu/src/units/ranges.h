// Byte ranges that an operation accesses, for observers. Lists are short, because neighbours are merged.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::vgpu::units {

// Bytes of global memory (address of the host) or of a block's shared window (absolute offset).
struct Range {
  uint64_t address = 0;
  uint32_t bytes = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// A rectangle of tensor memory.
struct CellRange {
  uint16_t lane = 0, column = 0;
  uint16_t lanes = 0, columns = 0;
  friend bool operator==(const CellRange&, const CellRange&) = default;
};

// Appends a range, or extends the last range if they are adjacent.
inline void append(std::vector<Range>* ranges, uint64_t address, uint32_t bytes) {
  if (!ranges->empty() && ranges->back().address + ranges->back().bytes == address) {
    ranges->back().bytes += bytes;
  } else {
    ranges->push_back({address, bytes});
  }
}

}  // namespace tandem::vgpu::units
