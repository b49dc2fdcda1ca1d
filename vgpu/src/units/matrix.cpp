#include "vgpu/src/units/matrix.h"

#include <algorithm>
#include <bit>

#include "base/text.h"
#include "vgpu/src/units/product.h"

namespace tandem::vgpu::units {
namespace {

constexpr uint32_t kChunk = 16;
constexpr int kMaxChunks = 256;  // in one direction of a tile

uint32_t span_of(MatrixSwizzle swizzle) {
  switch (swizzle) {
    case MatrixSwizzle::none: return 16;
    case MatrixSwizzle::b32: return 32;
    case MatrixSwizzle::b64: return 64;
    default: return 128;
  }
}

const char* name_of(MatrixSwizzle swizzle) {
  constexpr const char* names[] = {"no swizzle", "32-byte swizzle", "64-byte swizzle", "128-byte swizzle",
                                   "128-byte swizzle of 32-byte atoms"};
  return names[static_cast<int>(swizzle)];
}

// Chunks of the tile: `along` chunks in the direction in which elements are contiguous, and `across` in the other
// direction.
struct Chunks {
  int elements;  // per chunk
  int along, across;
  uint32_t bytes;  // bytes of a chunk that hold data
};
Chunks chunks_of(const MatrixTile& tile) {
  Chunks c;
  const int bits = bits_of(tile.format);
  c.elements = tile.packed4 ? 32 : bits < 8 ? 16 : 128 / bits;
  c.along = (tile.mn_major ? tile.mn : tile.k) / c.elements;
  c.across = tile.mn_major ? tile.k : tile.mn;
  c.bytes = static_cast<uint32_t>(c.elements * bits / 8);
  return c;
}

// Returns the number of lines that form a group.
uint32_t group_of(MatrixSwizzle swizzle, bool mn_major) {
  return swizzle == MatrixSwizzle::b128_atom_32b && mn_major ? 4 : 8;
}

// Returns the address of a chunk before the swizzle.
uint32_t chunk_address(const MatrixDescriptor& d, bool mn_major, int along, int across) {
  const auto i = static_cast<uint32_t>(along), j = static_cast<uint32_t>(across);
  const uint32_t span = span_of(d.swizzle), chunks = span / kChunk;
  const uint32_t group = group_of(d.swizzle, mn_major);
  const uint32_t line = j % group * span;
  if (!mn_major) {
    // Groups have 8 rows. Without a swizzle the next chunk of a row lies in the next column of groups.
    const uint32_t step = d.swizzle == MatrixSwizzle::none ? d.leading : kChunk;
    return d.start + j / group * d.stride + line + i * step;
  }
  if (d.swizzle == MatrixSwizzle::none) return d.start + i * d.stride + j / group * d.leading + line;
  return d.start + i / chunks * d.leading + i % chunks * kChunk + j / group * d.stride + line;
}

// The swizzle uses bits of the absolute address, less the phase in which the pattern begins. Bits of the 128-byte line
// flip bits from `shift` on.
struct Swizzling {
  uint32_t lines, shift;
};
Swizzling swizzling_of(MatrixSwizzle swizzle) {
  switch (swizzle) {
    case MatrixSwizzle::none: return {0, 4};
    case MatrixSwizzle::b32: return {1, 4};
    case MatrixSwizzle::b64: return {3, 4};
    case MatrixSwizzle::b128: return {7, 4};
    case MatrixSwizzle::b128_atom_32b: break;
  }
  return {3, 5};
}
uint32_t swizzled(const MatrixDescriptor& d, uint32_t address) {
  const Swizzling s = swizzling_of(d.swizzle);
  return address ^ (((address >> 7) - d.base_offset) & s.lines) << s.shift;
}

uint32_t field(uint64_t bits, int from) { return static_cast<uint32_t>(bits >> from & 0x3fff) << 4; }

Status decode_common(uint64_t bits, uint64_t reserved, uint64_t constant, const char* what, MatrixDescriptor* d) {
  if ((bits & reserved) != constant) {
    const int bit = std::countr_zero((bits & reserved) ^ constant);
    return Status::invalid(str_cat("bit ", bit, " of a ", what, " shared memory descriptor must be ",
                                   constant >> bit & 1, ": correct the descriptor"));
  }
  d->start = field(bits, 0);
  d->leading = field(bits, 16);
  d->stride = field(bits, 32);
  d->base_offset = static_cast<uint32_t>(bits >> 49 & 7);
  return {};
}

// Computes the offsets of all chunks at one place along the contiguous direction.
void line_offsets(const MatrixTile& tile, int along, int count, uint32_t* offsets) {
  const MatrixDescriptor d = tile.descriptor;
  const uint32_t first = chunk_address(d, tile.mn_major, along, 0), span = span_of(d.swizzle);
  const uint32_t group = group_of(d.swizzle, tile.mn_major);
  const uint32_t next_group = chunk_address(d, tile.mn_major, along, static_cast<int>(group)) - first;
  const int shift = std::countr_zero(group);
  const Swizzling s = swizzling_of(d.swizzle);
  for (uint32_t j = 0; j < static_cast<uint32_t>(count); ++j) {
    const uint32_t address = first + (j >> shift) * next_group + (j & (group - 1)) * span;
    offsets[j] = address ^ (((address >> 7) - d.base_offset) & s.lines) << s.shift;
  }
}

template <class T, class Unpack>
void gather_as(const MatrixTile& tile, bool k_rows, int64_t pitch, T* to, Unpack&& unpack) {
  const Chunks chunks = chunks_of(tile);
  // Chunks become rows of the result if both have the same direction, else columns.
  const bool across = tile.mn_major != k_rows;
  const int64_t step = across ? pitch : 1;
  uint32_t offsets[kMaxChunks];
  for (int i = 0; i < chunks.along; ++i) {
    line_offsets(tile, i, chunks.across, offsets);
    unpack(offsets, chunks.across, across, to + i * chunks.elements * step);
    if (!tile.packed4) continue;
    for (int j = 0; j < chunks.across; ++j) offsets[j] += kChunk / 2;  // the other 16 elements
    unpack(offsets, chunks.across, across, to + (i * chunks.elements + 16) * step);
  }
}

}  // namespace

Status decode_wgmma(uint64_t bits, MatrixDescriptor* descriptor) {
  TANDEM_TRY(decode_common(bits, 0x3ff1c000c000c000, 0, "wgmma", descriptor));
  constexpr MatrixSwizzle swizzles[] = {MatrixSwizzle::none, MatrixSwizzle::b128, MatrixSwizzle::b64,
                                        MatrixSwizzle::b32};
  descriptor->swizzle = swizzles[bits >> 62];
  return {};
}

Status decode_tcgen05(uint64_t bits, MatrixDescriptor* descriptor) {
  if ((bits >> 52 & 1) != 0)
    return Status::unsupported(
        "bit 52 of a tcgen05 shared memory descriptor (absolute leading address, of sm_103a) must be 0: use the "
        "relative leading offset");
  TANDEM_TRY(decode_common(bits, 0x1fe1c000c000c000, uint64_t{1} << 46, "tcgen05", descriptor));
  switch (bits >> 61) {
    case 0: descriptor->swizzle = MatrixSwizzle::none; return {};
    case 1: descriptor->swizzle = MatrixSwizzle::b128_atom_32b; return {};
    case 2: descriptor->swizzle = MatrixSwizzle::b128; return {};
    case 4: descriptor->swizzle = MatrixSwizzle::b64; return {};
    case 6: descriptor->swizzle = MatrixSwizzle::b32; return {};
    default:
      return Status::invalid(str_cat("swizzle mode ", bits >> 61,
                                     " of a tcgen05 shared memory descriptor does not exist: use 0, 1, 2, 4 or 6"));
  }
}

Status check(const MatrixTile& tile, uint32_t window_bytes) {
  const MatrixDescriptor& d = tile.descriptor;
  const int bits = bits_of(tile.format);
  const bool atoms_of_32 = d.swizzle == MatrixSwizzle::b128_atom_32b;
  if (tile.mn_major && bits < 8)
    return Status::invalid(
        str_cat("a matrix of ", name_of(tile.format), " in shared memory must be K-major: transpose the matrix"));
  if (tile.mn_major && (bits == 32) != atoms_of_32)
    return Status::invalid(str_cat("an MN-major matrix of ", name_of(tile.format), " cannot have the ",
                                   name_of(d.swizzle),
                                   bits == 32 ? ": use the swizzle of 32-byte atoms" : ": use another swizzle"));
  const Chunks chunks = chunks_of(tile);
  // A swizzle stays inside lines of 128 bytes.
  const uint32_t last = chunk_address(d, tile.mn_major, chunks.along - 1, chunks.across - 1);
  if ((last | 127) < window_bytes) return {};
  uint32_t end = 0;
  for (int i = 0; i < chunks.along; ++i)
    for (int j = 0; j < chunks.across; ++j)
      end = std::max(end, swizzled(d, chunk_address(d, tile.mn_major, i, j)) + chunks.bytes);
  if (end > window_bytes)
    return Status::invalid(
        str_cat("a matrix of ", tile.mn, " x ", tile.k, " ", name_of(tile.format), " that begins at shared ", d.start,
                " (leading offset ", d.leading, ", stride ", d.stride, ", ", name_of(d.swizzle), ") ends at ", end,
                ", beyond the block's shared memory (", window_bytes, "): correct the address or the offsets"));
  return {};
}

uint32_t element_address(const MatrixTile& tile, int32_t mn, int32_t k, int32_t* bit) {
  const Chunks chunks = chunks_of(tile);
  const int i = tile.mn_major ? mn : k, j = tile.mn_major ? k : mn;
  const int within = i % chunks.elements * bits_of(tile.format);
  if (bit != nullptr) *bit = within % 8;
  const uint32_t chunk = chunk_address(tile.descriptor, tile.mn_major, i / chunks.elements, j);
  return swizzled(tile.descriptor, chunk) + static_cast<uint32_t>(within / 8);
}

void gather(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, float* to) {
  gather_as(tile, k_rows, pitch, to, [&](const uint32_t* offsets, int count, bool across, float* part) {
    products().unpack_f32({tile.format, window, offsets, count}, across, pitch, part);
  });
}

void gather_s32(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, int32_t* to) {
  gather_as(tile, k_rows, pitch, to, [&](const uint32_t* offsets, int count, bool across, int32_t* part) {
    products().unpack_s32({tile.format, window, offsets, count}, across, pitch, part);
  });
}

void list_ranges(const MatrixTile& tile, std::vector<Range>* shared) {
  const Chunks chunks = chunks_of(tile);
  const auto across = static_cast<size_t>(chunks.across);
  std::vector<uint32_t> offsets(static_cast<size_t>(chunks.along) * across);
  for (int i = 0; i < chunks.along; ++i)
    line_offsets(tile, i, chunks.across, offsets.data() + static_cast<size_t>(i) * across);
  const auto [least, most] = std::ranges::minmax(offsets);
  std::vector<uint64_t> there((most - least) / kChunk / 64 + 1);  // a bit for each chunk
  for (const uint32_t offset : offsets) {
    const uint32_t chunk = (offset - least) / kChunk;
    there[chunk / 64] |= uint64_t{1} << chunk % 64;
  }
  for (size_t word = 0; word < there.size(); ++word)
    for (uint64_t bits = there[word]; bits != 0; bits &= bits - 1)
      append(shared, least + kChunk * (64 * word + static_cast<size_t>(std::countr_zero(bits))), chunks.bytes);
}

}  // namespace tandem::vgpu::units
