// Executes tcgen05.mma.
#include "vgpu/src/units/tcgen05.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vgpu/src/units/formats.h"
#include "vgpu/src/units/product.h"
#include "vgpu/src/units/tcgen05_layout.h"

namespace tandem::vgpu::units {
namespace {

constexpr int kMaxM = 128;  // rows of one block

void read_tile(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, float* to) {
  gather(tile, window, k_rows, pitch, to);
}
void read_tile(const MatrixTile& tile, const std::byte* window, bool k_rows, int64_t pitch, int32_t* to) {
  gather_s32(tile, window, k_rows, pitch, to);
}

// Returns B as rows, to[column][k], of both blocks one after the other.
template <class T>
void read_b(const Tmma& mma, const std::byte* const* windows, T* to) {
  const int columns = mma.n / mma.form.group;
  for (int cta = 0; cta < mma.form.group; ++cta)
    read_tile(mma.b_tile, windows[cta], false, mma.k, to + cta * columns * mma.k);
  if (mma.b_shift != 0) std::copy_n(to + mma.b_shift * mma.k, columns * mma.k, to);
  if (mma.negate_b) std::transform(to, to + mma.n * mma.k, to, [](T x) { return -x; });
  for (size_t n = 0; n < mma.b_zero.size(); ++n)
    if (mma.b_zero[n]) std::fill_n(to + static_cast<int>(n) * mma.k, mma.k, T{0});
}

// A lane of A in tensor memory: its 32 bytes, gathered.
struct ALane {
  uint32_t words[kAColumns];
};

// Elements of 4 and 6 bits occupy a byte each: 6 bits at its bottom, or 4 bits in its middle. Only kinds of 4 bits pack
// two elements into a byte.
float narrow_element(const Tmma& mma, const ALane& lane, int e) {
  const int bits = mma.b_tile.packed4 ? 4 : 8;
  const uint32_t x = lane.words[e * bits / 32] >> (e * bits % 32) & ((1u << bits) - 1);
  return decode(mma.a == Format::e2m1 && bits == 8 ? x >> 2 & 0xf : x, mma.a);
}

void unpack(Format format, const ALane* lanes, const uint32_t* chunks, int count, float* to) {
  products().unpack_f32({format, reinterpret_cast<const std::byte*>(lanes), chunks, count}, true, count, to);
}
void unpack(Format format, const ALane* lanes, const uint32_t* chunks, int count, int32_t* to) {
  products().unpack_s32({format, reinterpret_cast<const std::byte*>(lanes), chunks, count}, true, count, to);
}

// Returns A of one part as columns: to[k][lane].
template <class T>
void read_a_from_tmem(const Tmma& mma, const DatapathPart& part, const TensorMemory& memory, T* to) {
  const auto column = static_cast<int>(mma.operands.a & 0xffff);
  ALane lanes[kTmemLanes];
  for (int i = 0; i < part.lanes; ++i) {
    // Shifts down: each row takes the place of the next row. The first and last rows stay.
    const int from = part.lane + i - (mma.form.shift_a && part.row + i > 0 ? 1 : 0);
    for (int word = 0; word < kAColumns; ++word) lanes[i].words[word] = memory.cells[column + word][from];
  }
  if (bits_of(mma.a) < 8) {
    for (int i = 0; i < part.lanes; ++i)
      for (int k = 0; k < mma.k; ++k) to[k * part.lanes + i] = static_cast<T>(narrow_element(mma, lanes[i], k));
    return;
  }
  uint32_t chunks[kTmemLanes];
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    for (uint32_t i = 0; i < static_cast<uint32_t>(part.lanes); ++i) chunks[i] = sizeof(ALane) * i + 16 * chunk;
    unpack(mma.a, lanes, chunks, part.lanes, to + static_cast<int>(chunk) * mma.k / 2 * part.lanes);
  }
}

// Returns A of both blocks: [cta][k][row].
template <class T>
struct SharedA {
  std::vector<T> data;
  int rows = 0;
};
template <class T>
SharedA<T> read_a(const Tmma& mma, const std::byte* const* windows) {
  SharedA<T> a;
  if (mma.form.a_in_tmem) return a;
  a.rows = mma.a_tile.mn;
  const auto each = static_cast<size_t>(a.rows) * static_cast<size_t>(mma.k);
  a.data.resize(each * static_cast<size_t>(mma.form.group));
  for (int cta = 0; cta < mma.form.group; ++cta)
    read_tile(mma.a_tile, windows[cta], true, a.rows, a.data.data() + static_cast<size_t>(cta) * each);
  return a;
}

template <class T>
void part_of_a(const Tmma& mma, const DatapathPart& part, const SharedA<T>& shared, const TensorMemory& memory, T* to) {
  if (mma.form.a_in_tmem) {
    read_a_from_tmem(mma, part, memory, to);
  } else {
    const T* from = shared.data.data() + part.cta * mma.k * shared.rows + part.row;
    for (int k = 0; k < mma.k; ++k) std::copy_n(from + k * shared.rows, part.lanes, to + k * part.lanes);
  }
  if (mma.negate_a) std::transform(to, to + mma.k * part.lanes, to, [](T x) { return -x; });
}

// The scale factors of one operand, as the lanes of a quadrant read them.
struct ScaleFactors {
  const TensorMemory& memory;
  Format format;
  uint32_t address;
  int id, quadrant;

  // The factor of block `block` of k for line `line`: a row of A, or a column of B in its block of columns.
  float at(int line, int block) const {
    const uint32_t word =
        memory.cells[(address & 0xffff) + static_cast<uint32_t>(line / 32)][32 * quadrant + line % 32];
    return decode(word >> (8 * (id + block)) & 0xff, format);
  }
};

// Scales a[k][lane] and b[column][k] of a part within one quadrant.
void scale_part(const Tmma& mma, const DatapathPart& part, const TensorMemory& memory, float* a, float* b) {
  const int quadrant = part.lane / 32;
  const ScaleFactors a_factors = {memory, mma.scale_format, mma.operands.scale_a, mma.scale_a_id, quadrant};
  const ScaleFactors b_factors = {memory, mma.scale_format, mma.operands.scale_b, mma.scale_b_id, quadrant};
  for (int block = 0; block < mma.k / mma.scale_block; ++block) {
    const int k_end = (block + 1) * mma.scale_block;
    for (int lane = 0; lane < part.lanes; ++lane) {
      const float factor = a_factors.at(part.row + lane, block);
      for (int k = block * mma.scale_block; k < k_end; ++k) a[k * part.lanes + lane] *= factor;
    }
    for (int column = 0; column < part.columns; ++column) {
      const float factor = b_factors.at(column, block);
      for (int k = block * mma.scale_block; k < k_end; ++k) b[column * mma.k + k] *= factor;
    }
  }
}

bool is_disabled(const Tmma& mma, int cta, int lane) {
  return (mma.operands.disabled_lanes[4 * cta + lane / 32] >> (lane % 32) & 1) != 0;
}

// Loads and stores d[column][lane] of a part from and to its cells. T is float or int32_t.
template <class T>
T from_cell(const Tmma& mma, uint32_t cell) {
  if constexpr (sizeof(T) == 4 && std::is_integral_v<T>) return static_cast<T>(cell);
  const float x = mma.d == Sum::f16 ? decode_one<Format::f16>(cell & 0xffff) : value(cell);
  return static_cast<T>(mma.operands.scale_d == 0 ? x : std::ldexp(x, -static_cast<int>(mma.operands.scale_d)));
}
uint32_t to_cell(const Tmma&, int32_t x) { return static_cast<uint32_t>(x); }
uint32_t to_cell(const Tmma& mma, float x) {
  return mma.d == Sum::f16 ? encode_one<Format::f16>(x, masks_of({})) : bits(x);
}

template <class T>
void load_d(const Tmma& mma, const DatapathPart& part, const TensorMemory& memory, T* d) {
  const auto column0 = static_cast<int>(mma.operands.d & 0xffff);
  for (int column = 0; column < part.columns; ++column)
    for (int lane = 0; lane < part.lanes; ++lane)
      d[column * part.lanes + lane] = from_cell<T>(mma, memory.cells[column0 + column][part.lane + lane]);
}
template <class T>
void store_d(const Tmma& mma, const DatapathPart& part, const T* d, TensorMemory* memory) {
  const auto column0 = static_cast<int>(mma.operands.d & 0xffff);
  bool disabled[kTmemLanes];
  for (int lane = 0; lane < part.lanes; ++lane) disabled[lane] = is_disabled(mma, part.cta, part.lane + lane);
  for (int column = 0; column < part.columns; ++column)
    for (int lane = 0; lane < part.lanes; ++lane)
      if (!disabled[lane])
        memory->cells[column0 + column][part.lane + lane] = to_cell(mma, d[column * part.lanes + lane]);
}

// d[column][lane] (+)= sum of b[column][k] * a[k][lane].
template <class T>
void multiply(const Tmma& mma, const DatapathPart& part, const T* b, const T* a, T* d, int64_t d_pitch) {
  const DenseProduct<T> product = {.m = part.columns,
                                   .n = part.lanes,
                                   .k = mma.k,
                                   .a = b,
                                   .a_pitch = mma.k,
                                   .b = a,
                                   .b_pitch = part.lanes,
                                   .d = d,
                                   .d_pitch = d_pitch,
                                   .accumulate = mma.operands.accumulate};
  if constexpr (std::is_integral_v<T>) {
    products().s32(product, mma.saturate);
  } else {
    products().f32(product);
  }
}

// Returns true for the usual case: sums in float32, in place.
bool is_in_place(const Tmma& mma) {
  const auto& disabled = mma.operands.disabled_lanes;
  return mma.d == Sum::f32 && mma.operands.scale_d == 0 &&
         std::all_of(std::begin(disabled), std::end(disabled), [](uint32_t lanes) { return lanes == 0; });
}
void multiply_in_place(const Tmma& mma, const DatapathPart& part, const float* b, const float* a,
                       TensorMemory* memory) {
  uint32_t* cells = &memory->cells[mma.operands.d & 0xffff][part.lane];
  multiply(mma, part, b, a, reinterpret_cast<float*>(cells), kTmemLanes);
}

// A part accesses only its lanes, so that the order of parts does not matter.
template <class T>
void execute_as(const Tmma& mma, const std::byte* const* windows, TensorMemory* const* memories) {
  const int b_columns = mma.b_tile.mn * mma.form.group;
  std::vector<T> b(static_cast<size_t>(b_columns * mma.k)), a(static_cast<size_t>(mma.k * kMaxM)), scaled, d;
  read_b(mma, windows, b.data());
  const SharedA<T> shared_a = read_a<T>(mma, windows);
  for_each_part(mma, mma.scale_block != 0, [&](const DatapathPart& part) {
    TensorMemory* memory = memories[part.cta];
    part_of_a(mma, part, shared_a, *memory, a.data());
    const T* part_b = b.data() + part.column * mma.k;
    if constexpr (!std::is_integral_v<T>) {
      if (mma.scale_block != 0) {
        scaled.assign(part_b, part_b + part.columns * mma.k);
        scale_part(mma, part, *memory, a.data(), scaled.data());
        part_b = scaled.data();
      }
      if (is_in_place(mma)) return multiply_in_place(mma, part, part_b, a.data(), memory);
    }
    d.resize(static_cast<size_t>(part.columns) * static_cast<size_t>(part.lanes));
    if (mma.operands.accumulate) load_d(mma, part, *memory, d.data());
    multiply<T>(mma, part, part_b, a.data(), d.data(), part.lanes);
    store_d(mma, part, d.data(), memory);
  });
}

CellRange cells(int lane, int column, int lanes, int columns) {
  return {static_cast<uint16_t>(lane), static_cast<uint16_t>(column), static_cast<uint16_t>(lanes),
          static_cast<uint16_t>(columns)};
}

}  // namespace

void execute(const Tmma& mma, const std::byte* const* windows, TensorMemory* const* memories) {
  if (mma.d == Sum::s32) {
    execute_as<int32_t>(mma, windows, memories);
  } else {
    execute_as<float>(mma, windows, memories);
  }
}

void list_ranges(const Tmma& mma, int cta, std::vector<Range>* shared, std::vector<CellRange>* reads,
                 std::vector<CellRange>* writes) {
  const TmmaOperands& o = mma.operands;
  if (!mma.form.a_in_tmem) list_ranges(mma.a_tile, shared);
  list_ranges(mma.b_tile, shared);
  for_each_part(mma, false, [&](const DatapathPart& part) {
    if (part.cta != cta) return;
    const CellRange d = cells(part.lane, static_cast<int>(o.d & 0xffff), part.lanes, part.columns);
    writes->push_back(d);
    if (o.accumulate) reads->push_back(d);
    if (mma.form.a_in_tmem) reads->push_back(cells(part.lane, static_cast<int>(o.a & 0xffff), part.lanes, kAColumns));
  });
  if (mma.scale_block == 0) return;
  reads->push_back(cells(0, static_cast<int>(o.scale_a & 0xffff), kTmemLanes, scale_columns(mma, true)));
  reads->push_back(cells(0, static_cast<int>(o.scale_b & 0xffff), kTmemLanes, scale_columns(mma, false)));
}

void d_cell(const Tmma& mma, int32_t row, int32_t column, int32_t* cta, int32_t* lane, int32_t* cell) {
  const int rows = mma.m / mma.form.group;
  for_each_part(mma, false, [&](const DatapathPart& part) {
    const int in_block = row - part.cta * rows;
    if (in_block < part.row || in_block >= part.row + part.lanes) return;
    if (column < part.column || column >= part.column + part.columns) return;
    *cta = part.cta;
    *lane = part.lane + in_block - part.row;
    *cell = static_cast<int32_t>(mma.operands.d & 0xffff) + column - part.column;
  });
}

}  // namespace tandem::vgpu::units
