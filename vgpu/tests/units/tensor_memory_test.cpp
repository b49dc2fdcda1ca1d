// Tests of tensor memory: loads and stores by the table of their fragments, copies row by row, the shift.
#include "vgpu/src/units/tensor_memory.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <set>

#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

using test::Random;
using Shape = TmemAccess::Shape;

std::unique_ptr<TensorMemory> random_memory(Random& random) {
  auto memory = std::make_unique<TensorMemory>();
  for (auto& column : memory->cells)
    for (uint32_t& cell : column) cell = static_cast<uint32_t>(random.next());
  return memory;
}

struct Cell {
  int lane, column;
};
// Register r of thread t, by the table of fragments, with columns in units of registers.
Cell place(Shape shape, int t, int r, int second) {
  switch (shape) {
    case Shape::s32x32b: return {t, r};
    case Shape::s16x64b: return {t / 4 + 8 * (t & 1), ((t >> 1) & 1) + 2 * r};
    case Shape::s16x128b: return {t / 4 + 8 * (r & 1), t % 4 + 4 * (r >> 1)};
    case Shape::s16x256b: return {t / 4 + 8 * ((r >> 1) & 1), 2 * (t % 4) + (r & 1) + 8 * (r >> 2)};
    default: return t < 16 ? Cell{t, r} : Cell{t - 16, second + r};
  }
}
int registers_each(Shape shape) { return shape == Shape::s16x128b ? 2 : shape == Shape::s16x256b ? 4 : 1; }

struct TmemWarp {
  std::vector<std::array<uint32_t, 32>> rows;
  std::vector<Row> pointers;
  std::vector<ConstRow> const_pointers;
  TmemWarp(Random& random, int count) : rows(static_cast<size_t>(count)) {
    for (auto& row : rows) {
      for (uint32_t& x : row) x = static_cast<uint32_t>(random.next());
      pointers.push_back(row.data());
      const_pointers.push_back(row.data());
    }
  }
};

using CellSet = std::set<std::pair<int, int>>;
CellSet cells_in(const std::vector<CellRange>& ranges) {
  CellSet cells;
  for (const CellRange& range : ranges)
    for (int lane = 0; lane < range.lanes; ++lane)
      for (int column = 0; column < range.columns; ++column) cells.insert({range.lane + lane, range.column + column});
  return cells;
}

TEST(TensorMemory, LoadsAndStoresEveryShape) {
  Random random(1);
  for (int s = 0; s < 5; ++s)
    for (int repeat = 1; repeat <= 128; repeat *= 2)
      for (const bool pack : {false, true}) {
        const auto shape = static_cast<Shape>(s);
        TmemAccess access = {shape, repeat, pack, 0};
        if (repeat * registers_each(shape) > 128) {
          EXPECT_FALSE(check(access).ok());
          continue;
        }
        const int width = repeat * (s == 1 ? 2 : s == 2 ? 4 : s == 3 ? 8 : 1) * (pack ? 2 : 1);
        if (shape == Shape::s16x32bx2) access.second_offset = width;
        ASSERT_TRUE(check(access).ok());
        ASSERT_EQ(registers(access), repeat * registers_each(shape));
        const int quadrant = repeat % 4, lane = 32 * quadrant + (s != 0 && repeat % 8 == 0 ? 16 : 0);
        const int column = static_cast<int>(random.between(0, std::max(0, 512 - 2 * width)));
        const auto address = static_cast<uint32_t>(lane << 16 | column);
        if (column + width + access.second_offset > 512) {
          EXPECT_FALSE(check(access, address, quadrant).ok());
          continue;
        }
        ASSERT_TRUE(check(access, address, quadrant).ok()) << check(access, address, quadrant).message;

        auto memory = random_memory(random);
        TmemWarp warp(random, registers(access));
        load_tmem(access, *memory, address, warp.pointers.data());
        CellSet touched;
        for (int r = 0; r < registers(access); ++r)
          for (int t = 0; t < 32; ++t) {
            const Cell cell = place(shape, t, r, 0);
            const int first = column + cell.column * (pack ? 2 : 1) +
                              (shape == Shape::s16x32bx2 && t >= 16 ? access.second_offset : 0);
            const uint32_t low = memory->cells[first][lane + cell.lane];
            touched.insert({lane + cell.lane, first});
            uint32_t want = low;
            if (pack) {
              want = (low & 0xffff) | memory->cells[first + 1][lane + cell.lane] << 16;
              touched.insert({lane + cell.lane, first + 1});
            }
            ASSERT_EQ(warp.rows[static_cast<size_t>(r)][static_cast<size_t>(t)], want)
                << "shape " << s << " x" << repeat << " register " << r << " thread " << t;
          }
        std::vector<CellRange> ranges;
        list_ranges(access, address, &ranges);
        EXPECT_EQ(cells_in(ranges), touched);

        // A store is the inverse and changes no other cell.
        auto before = std::make_unique<TensorMemory>(*memory);
        TmemWarp values(random, registers(access)), back(random, registers(access));
        store_tmem(access, memory.get(), address, values.const_pointers.data());
        load_tmem(access, *memory, address, back.pointers.data());
        ASSERT_EQ(values.rows, back.rows);
        for (int c = 0; c < kTmemColumns; ++c)
          for (int l = 0; l < kTmemLanes; ++l)
            if (touched.count({l, c}) == 0) {
              ASSERT_EQ(memory->cells[c][l], before->cells[c][l]);
            } else if (pack) {
              ASSERT_EQ(memory->cells[c][l] >> 16, 0u) << "unpacked values are alone in their cell";
            }
      }
}

TEST(TensorMemory, RefusesOtherWarpsLanes) {
  const TmemAccess access = {Shape::s32x32b, 4, false, 0};
  EXPECT_NE(check(access, 32 << 16, 0).message.find("lane 32"), std::string::npos);
  EXPECT_TRUE(check(access, 32 << 16, 1).ok());
  EXPECT_FALSE(check(access, 16 << 16, 0).ok());
  EXPECT_TRUE(check({Shape::s16x64b, 1, false, 0}, 16 << 16, 0).ok());
  EXPECT_FALSE(check({Shape::s16x64b, 1, false, 0}, 8 << 16, 0).ok());
  EXPECT_FALSE(check(access, 509, 0).ok());
  EXPECT_TRUE(check(access, 508, 0).ok());
  EXPECT_FALSE(check({Shape::s32x32b, 3, false, 0}).ok());
  EXPECT_FALSE(check({Shape::s32x32b, 2, false, 8}).ok());
}

// Returns the lanes to which row m of the source is copied.
std::vector<int> lanes_of(const TmemCopy& copy, int m) {
  using S = TmemCopy::Shape;
  using M = TmemCopy::Multicast;
  switch (copy.shape) {
    case S::s128x256b:
    case S::s128x128b: return {m};
    case S::s4x256b: return {32 * m};
    case S::s64x128b:
      if (copy.multicast == M::warpx2_02_13) return {m, m + 64};
      return m < 32 ? std::vector<int>{m, m + 32} : std::vector<int>{m + 32, m + 64};
    default: return {m, m + 32, m + 64, m + 96};
  }
}

TEST(TensorMemory, CopiesEveryShape) {
  Random random(2);
  using S = TmemCopy::Shape;
  using M = TmemCopy::Multicast;
  struct Case {
    S shape;
    M multicast;
    int rows, bytes;
  };
  const Case cases[] = {{S::s128x256b, M::none, 128, 32},       {S::s4x256b, M::none, 4, 32},
                        {S::s128x128b, M::none, 128, 16},       {S::s64x128b, M::warpx2_02_13, 64, 16},
                        {S::s64x128b, M::warpx2_01_23, 64, 16}, {S::s32x128b, M::warpx4, 32, 16}};
  for (const Case& c : cases)
    for (int source = 0; source < 3; ++source)
      for (int swizzle = 0; swizzle < 5; ++swizzle) {
        const TmemCopy copy = {c.shape, c.multicast, static_cast<TmemCopy::Source>(source)};
        ASSERT_TRUE(check(copy).ok());
        const Canonical layout = random_canonical(random, static_cast<MatrixSwizzle>(swizzle), false,
                                                  static_cast<uint32_t>(c.bytes / 16), static_cast<uint32_t>(c.rows));
        MatrixDescriptor descriptor;
        ASSERT_TRUE(decode_tcgen05(layout.tcgen05(), &descriptor).ok());
        const std::vector<std::byte> window = random_bytes(random, kWindowBytes);
        const int lane = c.shape == S::s4x256b ? 5 : 0, column = static_cast<int>(random.between(0, 504));
        const auto address = static_cast<uint32_t>(lane << 16 | column);
        ASSERT_TRUE(check(copy, address, descriptor, kWindowBytes).ok());
        auto memory = random_memory(random);
        auto want = std::make_unique<TensorMemory>(*memory);
        CellSet touched;
        for (int m = 0; m < c.rows; ++m)
          for (int byte = 0; byte < c.bytes; ++byte) {
            const uint32_t chunk = layout.chunk(static_cast<uint32_t>(m), static_cast<uint32_t>(byte / 16), 1);
            const auto i = static_cast<uint32_t>(byte % 16);
            uint32_t x = read_bits(window, chunk, 8 * i, 8);
            if (source == 1) x = read_bits(window, chunk, 4 * i, 4) << 2;
            if (source == 2) x = read_bits(window, chunk, 6 * i, 6);
            for (const int to : lanes_of(copy, m)) {
              uint32_t& cell = want->cells[column + byte / 4][lane + to];
              cell = (cell & ~(0xffu << (8 * (byte % 4)))) | x << (8 * (byte % 4));
              touched.insert({lane + to, column + byte / 4});
            }
          }
        copy_to_tmem(copy, descriptor, window.data(), memory.get(), address);
        ASSERT_EQ(std::memcmp(memory.get(), want.get(), sizeof *want), 0);
        std::vector<Range> shared;
        std::vector<CellRange> cells;
        list_ranges(copy, descriptor, address, &shared, &cells);
        EXPECT_EQ(cells_in(cells), touched);
        uint32_t bytes = 0;
        for (const Range& range : shared) bytes += range.bytes;
        EXPECT_EQ(bytes, static_cast<uint32_t>(c.rows * c.bytes));
      }
}

TEST(TensorMemory, RefusesCopiesThatDoNotExist) {
  using S = TmemCopy::Shape;
  using M = TmemCopy::Multicast;
  EXPECT_FALSE(check(TmemCopy{S::s64x128b, M::none, {}}).ok());
  EXPECT_FALSE(check(TmemCopy{S::s64x128b, M::warpx4, {}}).ok());
  EXPECT_FALSE(check(TmemCopy{S::s32x128b, M::none, {}}).ok());
  EXPECT_FALSE(check(TmemCopy{S::s128x256b, M::warpx4, {}}).ok());
  Canonical layout;
  layout.start = 1024, layout.leading = 128, layout.stride = 256;
  MatrixDescriptor d;
  ASSERT_TRUE(decode_tcgen05(layout.tcgen05(), &d).ok());
  const TmemCopy copy;
  EXPECT_TRUE(check(copy, 504, d, kWindowBytes).ok());
  EXPECT_FALSE(check(copy, 505, d, kWindowBytes).ok());
  EXPECT_FALSE(check(copy, 32 << 16, d, kWindowBytes).ok());
  EXPECT_FALSE(check(copy, 0, d, 2048).ok());
}

TEST(TensorMemory, ShiftsRowsDown) {
  Random random(3);
  for (int quadrant = 0; quadrant < 4; ++quadrant) {
    auto memory = random_memory(random);
    const auto before = std::make_unique<TensorMemory>(*memory);
    const auto address = static_cast<uint32_t>(32 * quadrant << 16 | 40);
    ASSERT_TRUE(check_shift(address).ok());
    shift_down(memory.get(), address);
    for (int column = 0; column < kTmemColumns; ++column)
      for (int lane = 0; lane < kTmemLanes; ++lane) {
        const bool moved = column >= 40 && column < 48 && lane / 32 == quadrant && lane % 32 > 0;
        ASSERT_EQ(memory->cells[column][lane], before->cells[column][lane - (moved ? 1 : 0)]);
      }
  }
  EXPECT_FALSE(check_shift(16 << 16).ok());
  EXPECT_FALSE(check_shift(505).ok());
  EXPECT_FALSE(check_shift(128 << 16).ok());
}

}  // namespace
}  // namespace tandem::vgpu::units
