// tcgen05.mma: what one instruction computes in tensor memory. PTX ISA, "tcgen05.mma", "Instruction descriptor", "Data
// path layout", "Block scaling".
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "vgpu/src/units/matrix.h"
#include "vgpu/src/units/ranges.h"
#include "vgpu/src/units/tensor_memory.h"

namespace tandem::vgpu::units {

enum class TmmaKind : uint8_t { f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4 };

// Properties that the instruction's text defines.
struct TmmaForm {
  TmmaKind kind = TmmaKind::f16;
  int32_t group = 1;  // .cta_group::N
  bool ws = false;
  bool a_in_tmem = false;
  bool shift_a = false;      // .ashift
  int32_t scale_vector = 0;  // .scale_vec or .block: 1, 2, 4, 16, 32; 0: default
};
Status check(const TmmaForm& form);

// Properties that the instruction's registers define.
struct TmmaOperands {
  uint32_t d = 0;                   // addresses in tensor memory
  uint64_t a = 0;                   // shared memory descriptor, or address in tensor memory
  uint64_t b = 0;                   // shared memory descriptor
  uint32_t instruction = 0;         // descriptor
  uint32_t disabled_lanes[8] = {};  // bit set: that lane of D is not written
  bool accumulate = false;
  uint32_t scale_d = 0;               // D is scaled by 2^-scale_d first (kinds f16 and tf32)
  uint32_t scale_a = 0, scale_b = 0;  // tensor memory addresses of scale factors
  uint64_t zero_columns = 0;          // .ws: zero-column mask descriptor, 0 without one
};

// A decoded and valid instruction.
struct Tmma {
  TmmaForm form;
  TmmaOperands operands;
  int32_t m = 0, n = 0, k = 0;  // size of the whole product, both blocks together
  Format a = Format::f16, b = Format::f16;
  Sum d = Sum::f32;
  bool a_mn_major = false, b_mn_major = false;
  bool negate_a = false, negate_b = false;
  bool saturate = false;
  Format scale_format = Format::ue8m0;
  int32_t scale_block = 0;  // elements of k that share a scale factor; 0: no block scaling
  int32_t scale_a_id = 0, scale_b_id = 0;
  int32_t b_shift = 0;        // columns of B that come before the first one used (.ws)
  std::vector<bool> b_zero;   // columns of B that count as zero (.ws); empty: none
  MatrixTile a_tile, b_tile;  // in each block; a_tile only if A is in shared memory
};
// Decodes an instruction. A sparse A (tcgen05.mma.sp) is not modelled, so that its flag in the instruction descriptor
// is refused.
Status decode(const TmmaForm& form, const TmmaOperands& operands, uint32_t window_bytes, Tmma* mma);

// Executes the product. There is one entry per block of the group; with group 2, [0] is the block of even rank.
void execute(const Tmma& mma, const std::byte* const* windows, TensorMemory* const* memories);

// Lists the bytes and cells of block `cta` of the group. reads includes D when it accumulates.
void list_ranges(const Tmma& mma, int cta, std::vector<Range>* shared, std::vector<CellRange>* reads,
                 std::vector<CellRange>* writes);

// Returns the position of an element of D. With group 2, *cta is its block.
void d_cell(const Tmma& mma, int32_t row, int32_t column, int32_t* cta, int32_t* lane, int32_t* cell);

}  // namespace tandem::vgpu::units
