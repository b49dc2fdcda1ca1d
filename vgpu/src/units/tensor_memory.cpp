#include "vgpu/src/units/tensor_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"

namespace tandem::vgpu::units {
namespace {

using Shape = TmemAccess::Shape;

constexpr int kQuadrant = 32;

int lane_of(uint32_t address) { return static_cast<int>(address >> 16); }
int column_of(uint32_t address) { return static_cast<int>(address & 0xffff); }

const char* name_of(Shape shape) {
  constexpr const char* names[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
  return names[static_cast<int>(shape)];
}

int registers_of_one(Shape shape) { return shape == Shape::s16x128b ? 2 : shape == Shape::s16x256b ? 4 : 1; }

// Returns the number of adjacent values (of 32 bits, or of 16 with pack) in each lane.
int width_of(const TmemAccess& access) {
  switch (access.shape) {
    case Shape::s32x32b:
    case Shape::s16x32bx2: return access.repeat;
    case Shape::s16x64b: return 2 * access.repeat;
    case Shape::s16x128b: return 4 * access.repeat;
    case Shape::s16x256b: break;
  }
  return 8 * access.repeat;
}
int columns_of(const TmemAccess& access) { return width_of(access) * (access.pack16 ? 2 : 1); }

// Calls f(register, thread, lane, column), relative to the address, column in units of registers.
template <class F>
void for_each_cell(const TmemAccess& access, F&& f) {
  for (int r = 0; r < registers(access); ++r)
    for (int t = 0; t < kLanes; ++t) {
      switch (access.shape) {
        case Shape::s32x32b: f(r, t, t, r); break;
        case Shape::s16x64b: f(r, t, t / 4 + 8 * (t & 1), (t >> 1 & 1) + 2 * r); break;
        case Shape::s16x128b: f(r, t, t / 4 + 8 * (r % 2), t % 4 + 4 * (r / 2)); break;
        case Shape::s16x256b: f(r, t, t / 4 + 8 * (r / 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r / 4)); break;
        case Shape::s16x32bx2: f(r, t, t % 16, r); break;
      }
    }
}

// Returns the first column of a register's cell (with pack: of its two cells).
int first_column(const TmemAccess& access, int thread, int column) {
  const int second = access.shape == Shape::s16x32bx2 && thread >= 16 ? access.second_offset : 0;
  return second + column * (access.pack16 ? 2 : 1);
}

}  // namespace

Status check(const TmemAccess& access) {
  const int most = 128 / registers_of_one(access.shape);
  if (access.repeat < 1 || access.repeat > most || std::popcount(static_cast<uint32_t>(access.repeat)) != 1)
    return Status::invalid(str_cat("tcgen05.ld and tcgen05.st of shape ", name_of(access.shape),
                                   " repeat 1, 2, 4, ... ", most, " times, not ", access.repeat, ": correct .x",
                                   access.repeat));
  if (access.shape != Shape::s16x32bx2 && access.second_offset != 0)
    return Status::invalid(str_cat("only the shape 16x32bx2 has an offset of the second half, not ",
                                   name_of(access.shape), ": remove the offset"));
  return {};
}

int registers(const TmemAccess& access) { return access.repeat * registers_of_one(access.shape); }

Status check(const TmemAccess& access, uint32_t address, int quadrant) {
  const int lane = lane_of(address), lanes = access.shape == Shape::s32x32b ? 32 : 16;
  if (lane / kQuadrant != quadrant)
    return Status::invalid(str_cat("lane ", lane, " of tensor memory belongs to another warp: use a lane from ",
                                   quadrant * kQuadrant, " to ", quadrant * kQuadrant + 31));
  if (lane % lanes != 0)
    return Status::invalid(str_cat("lane ", lane, " of tensor memory must be a multiple of ", lanes, " for shape ",
                                   name_of(access.shape), ": correct the address"));
  const int end = column_of(address) + columns_of(access) + std::max(access.second_offset, 0);
  if (end > kTmemColumns || column_of(address) + access.second_offset < 0)
    return Status::invalid(str_cat("columns ", column_of(address), " to ", end - 1, " end beyond tensor memory of ",
                                   kTmemColumns, " columns: correct the address"));
  return {};
}

void load_tmem(const TmemAccess& access, const TensorMemory& memory, uint32_t address, const Row* d) {
  const int lane0 = lane_of(address), column0 = column_of(address);
  if (access.shape == Shape::s32x32b && !access.pack16) {
    for (int r = 0; r < access.repeat; ++r) std::memcpy(d[r], &memory.cells[column0 + r][lane0], kLanes * sizeof *d[r]);
    return;
  }
  for_each_cell(access, [&](int r, int t, int lane, int column) {
    const auto* cell = &memory.cells[column0 + first_column(access, t, column)];
    d[r][t] = access.pack16 ? (cell[0][lane0 + lane] & 0xffff) | cell[1][lane0 + lane] << 16 : cell[0][lane0 + lane];
  });
}

void store_tmem(const TmemAccess& access, TensorMemory* memory, uint32_t address, const ConstRow* a) {
  const int lane0 = lane_of(address), column0 = column_of(address);
  if (access.shape == Shape::s32x32b && !access.pack16) {
    for (int r = 0; r < access.repeat; ++r)
      std::memcpy(&memory->cells[column0 + r][lane0], a[r], kLanes * sizeof *a[r]);
    return;
  }
  for_each_cell(access, [&](int r, int t, int lane, int column) {
    auto* cell = &memory->cells[column0 + first_column(access, t, column)];
    cell[0][lane0 + lane] = access.pack16 ? a[r][t] & 0xffff : a[r][t];
    if (access.pack16) cell[1][lane0 + lane] = a[r][t] >> 16;
  });
}

void list_ranges(const TmemAccess& access, uint32_t address, std::vector<CellRange>* cells) {
  const auto lane = static_cast<uint16_t>(lane_of(address)), column = static_cast<uint16_t>(column_of(address));
  const auto lanes = static_cast<uint16_t>(access.shape == Shape::s32x32b ? 32 : 16);
  const auto columns = static_cast<uint16_t>(columns_of(access));
  cells->push_back({lane, column, lanes, columns});
  if (access.shape == Shape::s16x32bx2 && access.second_offset != 0)
    cells->push_back({lane, static_cast<uint16_t>(column + access.second_offset), lanes, columns});
}

// ---- Copies from shared memory ----
namespace {

struct CopyShape {
  int rows, chunks;  // units of 16 bytes
};
CopyShape shape_of(const TmemCopy& copy) {
  switch (copy.shape) {
    case TmemCopy::Shape::s128x256b: return {128, 2};
    case TmemCopy::Shape::s4x256b: return {4, 2};
    case TmemCopy::Shape::s128x128b: return {128, 1};
    case TmemCopy::Shape::s64x128b: return {64, 1};
    case TmemCopy::Shape::s32x128b: break;
  }
  return {32, 1};
}

// The source as a K-major matrix of bytes, with rows and chunks as in an operand.
MatrixTile source_of(const TmemCopy& copy, const MatrixDescriptor& descriptor) {
  const CopyShape shape = shape_of(copy);
  MatrixTile tile;
  tile.descriptor = descriptor;
  tile.format = Format::u8;
  tile.mn = shape.rows;
  tile.k = 16 * shape.chunks;
  return tile;
}

// The lanes to which row `row` is copied: `count` lanes at a distance of `step`.
struct Targets {
  int first, count, step;
};
Targets targets_of(const TmemCopy& copy, int row) {
  using Multicast = TmemCopy::Multicast;
  if (copy.shape == TmemCopy::Shape::s4x256b) return {kQuadrant * row, 1, 0};
  if (copy.multicast == Multicast::warpx4) return {row, 4, kQuadrant};
  if (copy.multicast == Multicast::warpx2_02_13) return {row, 2, 2 * kQuadrant};
  if (copy.multicast == Multicast::warpx2_01_23)
    return {row % kQuadrant + 2 * kQuadrant * (row / kQuadrant), 2, kQuadrant};
  return {row, 1, 0};
}

// Expands 16 elements of 4 or 6 bits in a chunk to bytes for the matrix instructions. 6 bits are at the bottom, 4 bits
// in the middle.
void decompress(TmemCopy::Source source, uint8_t* chunk) {
  if (source == TmemCopy::Source::plain) return;
  uint8_t packed[17] = {};
  std::memcpy(packed, chunk, 16);
  for (int i = 0; i < 16; ++i) {
    const int bit = 6 * i;
    chunk[i] = source == TmemCopy::Source::b4x16_p64
                   ? static_cast<uint8_t>((packed[i / 2] >> (4 * (i % 2)) & 0xf) << 2)
                   : static_cast<uint8_t>((packed[bit / 8] | packed[bit / 8 + 1] << 8) >> (bit % 8) & 0x3f);
  }
}

}  // namespace

Status check(const TmemCopy& copy) {
  using Multicast = TmemCopy::Multicast;
  const bool pairs = copy.multicast == Multicast::warpx2_02_13 || copy.multicast == Multicast::warpx2_01_23;
  if ((copy.shape == TmemCopy::Shape::s64x128b) != pairs)
    return Status::invalid(
        ".warpx2::02_13 or .warpx2::01_23 must be given for the shape 64x128b of tcgen05.cp only: correct the "
        "modifier");
  if ((copy.shape == TmemCopy::Shape::s32x128b) != (copy.multicast == Multicast::warpx4))
    return Status::invalid(".warpx4 must be given for the shape 32x128b of tcgen05.cp only: correct the modifier");
  return {};
}

Status check(const TmemCopy& copy, uint32_t address, const MatrixDescriptor& descriptor, uint32_t window_bytes) {
  const int lane = lane_of(address), columns = 4 * shape_of(copy).chunks;
  const int last_lane = copy.shape == TmemCopy::Shape::s4x256b ? kQuadrant - 1 : 0;
  if (lane > last_lane)
    return Status::invalid(
        str_cat("lane ", lane, " of tcgen05.cp must be at most ", last_lane, " for this shape: correct the address"));
  if (column_of(address) + columns > kTmemColumns)
    return Status::invalid(str_cat("tcgen05.cp to column ", column_of(address), " ends beyond tensor memory of ",
                                   kTmemColumns, " columns: correct the address"));
  return check(source_of(copy, descriptor), window_bytes);
}

void copy_to_tmem(const TmemCopy& copy, const MatrixDescriptor& descriptor, const std::byte* window,
                  TensorMemory* memory, uint32_t address) {
  const MatrixTile source = source_of(copy, descriptor);
  const CopyShape shape = shape_of(copy);
  for (int row = 0; row < shape.rows; ++row) {
    const Targets targets = targets_of(copy, row);
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      uint8_t bytes[16];
      std::memcpy(bytes, window + element_address(source, row, 16 * chunk), sizeof bytes);
      decompress(copy.source, bytes);
      uint32_t words[4];
      std::memcpy(words, bytes, sizeof words);
      for (int i = 0; i < targets.count; ++i)
        for (int word = 0; word < 4; ++word)
          memory->cells[column_of(address) + 4 * chunk + word][lane_of(address) + targets.first + i * targets.step] =
              words[word];
    }
  }
}

void list_ranges(const TmemCopy& copy, const MatrixDescriptor& descriptor, uint32_t address, std::vector<Range>* shared,
                 std::vector<CellRange>* cells) {
  list_ranges(source_of(copy, descriptor), shared);
  const auto column = static_cast<uint16_t>(column_of(address));
  const auto columns = static_cast<uint16_t>(4 * shape_of(copy).chunks);
  if (copy.shape != TmemCopy::Shape::s4x256b) {
    cells->push_back({0, column, kTmemLanes, columns});
    return;
  }
  for (int row = 0; row < 4; ++row)
    cells->push_back({static_cast<uint16_t>(lane_of(address) + kQuadrant * row), column, 1, columns});
}

// ---- Shift ----

Status check_shift(uint32_t address) {
  if (lane_of(address) % kQuadrant != 0 || lane_of(address) >= kTmemLanes)
    return Status::invalid(
        str_cat("lane ", lane_of(address), " of tcgen05.shift must be 0, 32, 64 or 96: correct the address"));
  if (column_of(address) + 8 > kTmemColumns)
    return Status::invalid(str_cat("tcgen05.shift of columns ", column_of(address), " to ", column_of(address) + 7,
                                   " ends beyond tensor memory of ", kTmemColumns, " columns: correct the address"));
  return {};
}

void shift_down(TensorMemory* memory, uint32_t address) {
  for (int column = 0; column < 8; ++column) {
    uint32_t* lanes = &memory->cells[column_of(address) + column][lane_of(address)];
    std::memmove(lanes + 1, lanes, (kQuadrant - 1) * sizeof *lanes);
  }
}

void list_shift_ranges(uint32_t address, std::vector<CellRange>* cells) {
  cells->push_back({static_cast<uint16_t>(lane_of(address)), static_cast<uint16_t>(column_of(address)), kQuadrant, 8});
}

}  // namespace tandem::vgpu::units
