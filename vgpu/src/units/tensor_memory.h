// Tensor memory: 128 lanes of 512 columns of 32-bit cells, and the instructions that access it. PTX ISA, "Tensor
// Memory", "tcgen05.ld", "tcgen05.st", "tcgen05.cp", "tcgen05.shift".
//
// An address is lane << 16 | column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "vgpu/src/units/matrix.h"
#include "vgpu/src/units/ranges.h"
#include "vgpu/src/units/wgmma.h"

namespace tandem::vgpu::units {

inline constexpr int kTmemLanes = 128;
inline constexpr int kTmemColumns = 512;

// The lanes of a column are contiguous: a register of tcgen05.ld.32x32b is 32 of them.
struct TensorMemory {
  alignas(64) uint32_t cells[kTmemColumns][kTmemLanes];
};

// An access by tcgen05.ld or tcgen05.st.
struct TmemAccess {
  enum class Shape : uint8_t { s32x32b, s16x64b, s16x128b, s16x256b, s16x32bx2 };
  Shape shape = Shape::s32x32b;
  int32_t repeat = 1;         // .x1 ... .x128
  bool pack16 = false;        // .pack::16b, .unpack::16b: two values per register
  int32_t second_offset = 0;  // s16x32bx2: columns from the first half to the second
};
Status check(const TmemAccess& access);
int registers(const TmemAccess& access);

// Checks that the access by the warp that owns lanes 32 * quadrant and following stays in its lanes and in the memory.
Status check(const TmemAccess& access, uint32_t address, int quadrant);
void load_tmem(const TmemAccess& access, const TensorMemory& memory, uint32_t address, const Row* d);
void store_tmem(const TmemAccess& access, TensorMemory* memory, uint32_t address, const ConstRow* a);
void list_ranges(const TmemAccess& access, uint32_t address, std::vector<CellRange>* cells);

// tcgen05.cp: copies from shared memory. With cta_group::2 the machine calls it for both blocks.
struct TmemCopy {
  enum class Shape : uint8_t { s128x256b, s4x256b, s128x128b, s64x128b, s32x128b };
  enum class Multicast : uint8_t { none, warpx2_02_13, warpx2_01_23, warpx4 };
  enum class Source : uint8_t { plain, b4x16_p64, b6x16_p32 };  // fp4 and fp6, to bytes (.b8x16)
  Shape shape = Shape::s128x256b;
  Multicast multicast = Multicast::none;
  Source source = Source::plain;
};
Status check(const TmemCopy& copy);
Status check(const TmemCopy& copy, uint32_t address, const MatrixDescriptor& descriptor, uint32_t window_bytes);
void copy_to_tmem(const TmemCopy& copy, const MatrixDescriptor& descriptor, const std::byte* window,
                  TensorMemory* memory, uint32_t address);
void list_ranges(const TmemCopy& copy, const MatrixDescriptor& descriptor, uint32_t address, std::vector<Range>* shared,
                 std::vector<CellRange>* cells);

// tcgen05.shift.down: rows move down by one lane, 32 bytes of each. The address's lane is a multiple of 32.
Status check_shift(uint32_t address);
void shift_down(TensorMemory* memory, uint32_t address);
void list_shift_ranges(uint32_t address, std::vector<CellRange>* cells);

}  // namespace tandem::vgpu::units
