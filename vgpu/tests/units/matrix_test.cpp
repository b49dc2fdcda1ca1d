// Tests of operands in shared memory with the canonical layouts, element by element.
#include "vgpu/src/units/matrix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

using test::Random;

struct Form {
  Format format;
  bool packed4, mn_major;
  MatrixSwizzle swizzle;
};
// Returns every layout of wgmma and tcgen05.
std::vector<Form> forms() {
  std::vector<Form> list;
  for (const Format format : {Format::f16, Format::bf16, Format::tf32, Format::e4m3, Format::e5m2, Format::s8,
                              Format::u8, Format::e2m3, Format::e3m2, Format::e2m1})
    for (int swizzle = 0; swizzle < 5; ++swizzle) {
      const auto s = static_cast<MatrixSwizzle>(swizzle);
      list.push_back({format, false, false, s});
      if (format == Format::e2m1) list.push_back({format, true, false, s});
      const int bits = bits_of(format);
      if (bits >= 8 && (bits == 32) == (s == MatrixSwizzle::b128_atom_32b)) list.push_back({format, false, true, s});
    }
  return list;
}

MatrixTile tile_of(const Form& form, int mn, int k, const Canonical& layout) {
  MatrixTile tile;
  tile.descriptor = {layout.start, layout.leading, layout.stride, 0, form.swizzle};
  tile.format = form.format;
  tile.packed4 = form.packed4;
  tile.mn_major = form.mn_major;
  tile.mn = mn;
  tile.k = k;
  return tile;
}

int k_of(const Form& form) { return form.packed4 ? 64 : bits_of(form.format) < 8 ? 32 : 256 / bits_of(form.format); }

Canonical layout_of(Random& random, const Form& form, int mn, int k) {
  const auto T = static_cast<int>(elements_per_chunk(form.format, form.packed4));
  return random_canonical(random, form.swizzle, form.mn_major, static_cast<uint32_t>((form.mn_major ? mn : k) / T),
                          static_cast<uint32_t>(form.mn_major ? k : mn));
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST(Matrix, GathersEveryLayout) {
  Random random(1);
  const std::vector<std::byte> window = random_bytes(random, kWindowBytes);
  for (const Form& form : forms())
    for (const int mn : {16, 64, 96, 256}) {
      const int k = k_of(form);
      const Canonical layout = layout_of(random, form, mn, k);
      const MatrixTile tile = tile_of(form, mn, k, layout);
      const Status status = check(tile, kWindowBytes);
      ASSERT_TRUE(status.ok()) << status.message;
      const uint32_t T = elements_per_chunk(form.format, form.packed4);
      const auto bits = static_cast<uint32_t>(bits_of(form.format));
      const int64_t row_pitch = k + 3, k_pitch = mn + 5;
      std::vector<float> rows(static_cast<size_t>(mn * row_pitch), -1), columns(static_cast<size_t>(k * k_pitch), -1);
      std::vector<int32_t> integers(static_cast<size_t>(mn * row_pitch), -1);
      const bool integer = form.format == Format::s8 || form.format == Format::u8;
      gather(tile, window.data(), false, row_pitch, rows.data());
      gather(tile, window.data(), true, k_pitch, columns.data());
      if (integer) gather_s32(tile, window.data(), false, row_pitch, integers.data());
      for (int i = 0; i < mn; ++i)
        for (int j = 0; j < k; ++j) {
          const auto m = static_cast<uint32_t>(i), kk = static_cast<uint32_t>(j);
          const uint32_t within = (form.mn_major ? m : kk) % T * bits, chunk = layout.chunk(m, kk, T);
          const float want = decode(read_bits(window, chunk, within, bits), form.format);
          const std::string where = std::string(name_of(form.format)) + " swizzle " +
                                    std::to_string(static_cast<int>(form.swizzle)) + (form.mn_major ? " MN " : " K ") +
                                    std::to_string(i) + "," + std::to_string(j);
          ASSERT_TRUE(same(rows[static_cast<size_t>(i * row_pitch + j)], want)) << where;
          ASSERT_TRUE(same(columns[static_cast<size_t>(j * k_pitch + i)], want)) << where;
          if (integer) {
            ASSERT_EQ(integers[static_cast<size_t>(i * row_pitch + j)], static_cast<int32_t>(want)) << where;
          }
          int32_t bit = -1;
          ASSERT_EQ(element_address(tile, i, j, &bit), chunk + within / 8) << where;
          ASSERT_EQ(bit, static_cast<int32_t>(within % 8));
        }
      for (int i = 0; i < mn; ++i)
        for (int64_t j = k; j < row_pitch; ++j)
          ASSERT_EQ(rows[static_cast<size_t>(i * row_pitch + j)], -1) << "beyond a row";
    }
}

TEST(Matrix, ListsTheBytesOfEveryLayout) {
  Random random(2);
  for (const Form& form : forms())
    for (const int mn : {16, 64, 256}) {
      const int k = k_of(form);
      const Canonical layout = layout_of(random, form, mn, k);
      std::vector<uint32_t> want;
      const uint32_t T = elements_per_chunk(form.format, form.packed4),
                     bits = static_cast<uint32_t>(bits_of(form.format));
      for (uint32_t i = 0; i < static_cast<uint32_t>(mn); ++i)
        for (uint32_t j = 0; j < static_cast<uint32_t>(k); ++j)
          for (uint32_t bit = 0; bit < bits; ++bit)
            want.push_back(layout.chunk(i, j, T) + ((form.mn_major ? i : j) % T * bits + bit) / 8);
      std::sort(want.begin(), want.end());
      want.erase(std::unique(want.begin(), want.end()), want.end());
      std::vector<Range> ranges;
      list_ranges(tile_of(form, mn, k, layout), &ranges);
      std::vector<uint32_t> got;
      for (size_t i = 0; i < ranges.size(); ++i) {
        if (i > 0) {
          ASSERT_GT(ranges[i].address, ranges[i - 1].address + ranges[i - 1].bytes) << "sorted and merged";
        }
        for (uint32_t b = 0; b < ranges[i].bytes; ++b) got.push_back(static_cast<uint32_t>(ranges[i].address) + b);
      }
      ASSERT_EQ(got, want) << name_of(form.format) << " " << static_cast<int>(form.swizzle);
    }
}

// A pattern that begins 128 bytes times the base offset after its repeat equals the aligned pattern, moved.
TEST(Matrix, BaseOffsetMovesThePattern) {
  const Form form = {Format::bf16, false, false, MatrixSwizzle::b128};
  for (uint32_t phase = 0; phase < 8; ++phase) {
    Canonical aligned;
    aligned.swizzle = form.swizzle;
    aligned.start = 0x2000, aligned.stride = 1024;
    MatrixTile tile = tile_of(form, 64, 16, aligned);
    tile.descriptor.start += 128 * phase;
    tile.descriptor.base_offset = phase;
    const uint32_t moved = element_address(tile, 3, 9);
    EXPECT_EQ(moved, aligned.chunk(3, 9, 8) + 2 + 128 * phase);
  }
}

TEST(Matrix, StepsAlongKInsideASwizzledRow) {
  // The next 16 elements of K begin 32 bytes further in the descriptor. The swizzle follows absolute addresses.
  const Form form = {Format::f16, false, false, MatrixSwizzle::b128};
  Canonical layout;
  layout.swizzle = form.swizzle;
  layout.start = 0x1400, layout.stride = 1024;
  const MatrixTile whole = tile_of(form, 64, 64, layout);
  for (int step = 0; step < 4; ++step) {
    MatrixTile part = tile_of(form, 64, 16, layout);
    part.descriptor.start += 32 * static_cast<uint32_t>(step);
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 16; ++j) ASSERT_EQ(element_address(part, i, j), element_address(whole, i, 16 * step + j));
  }
}

TEST(Matrix, DescriptorsAreDecoded) {
  MatrixDescriptor d;
  Canonical c;
  c.start = 0x23450, c.leading = 0x1230, c.stride = 0x3fff0;
  for (int swizzle = 0; swizzle < 4; ++swizzle) {
    c.swizzle = static_cast<MatrixSwizzle>(swizzle);
    ASSERT_TRUE(decode_wgmma(c.wgmma() | uint64_t{5} << 49, &d).ok());
    EXPECT_EQ(d.start, c.start);
    EXPECT_EQ(d.leading, c.leading);
    EXPECT_EQ(d.stride, c.stride);
    EXPECT_EQ(d.base_offset, 5u);
    EXPECT_EQ(d.swizzle, c.swizzle);
  }
  for (int swizzle = 0; swizzle < 5; ++swizzle) {
    c.swizzle = static_cast<MatrixSwizzle>(swizzle);
    ASSERT_TRUE(decode_tcgen05(c.tcgen05() | uint64_t{3} << 49, &d).ok());
    EXPECT_EQ(d.start, c.start);
    EXPECT_EQ(d.leading, c.leading);
    EXPECT_EQ(d.stride, c.stride);
    EXPECT_EQ(d.base_offset, 3u);
    EXPECT_EQ(d.swizzle, c.swizzle);
  }
}

TEST(Matrix, RefusesFieldsThatDoNotExist) {
  MatrixDescriptor d;
  const Canonical c;
  for (const int bit : {14, 15, 30, 31, 46, 47, 48, 52, 53, 60, 61}) {
    const Status status = decode_wgmma(c.wgmma() | uint64_t{1} << bit, &d);
    EXPECT_NE(status.message.find("bit " + std::to_string(bit)), std::string::npos) << status.message;
  }
  for (const int bit : {14, 15, 30, 31, 47, 48, 53, 60}) {
    const Status status = decode_tcgen05(c.tcgen05() | uint64_t{1} << bit, &d);
    EXPECT_NE(status.message.find("bit " + std::to_string(bit)), std::string::npos) << status.message;
  }
  EXPECT_NE(decode_tcgen05(c.fields(), &d).message.find("bit 46"), std::string::npos);
  EXPECT_EQ(decode_tcgen05(c.tcgen05() | uint64_t{1} << 52, &d).code, TANDEM_UNSUPPORTED);
  for (const uint64_t code : {3, 5, 7}) EXPECT_FALSE(decode_tcgen05(c.tcgen05() | code << 61, &d).ok());
}

TEST(Matrix, RefusesLayoutsThatDoNotExist) {
  Canonical c;
  c.mn_major = true;
  EXPECT_FALSE(check(tile_of({Format::e2m3, false, true, MatrixSwizzle::b128}, 64, 32, c), kWindowBytes).ok());
  EXPECT_FALSE(check(tile_of({Format::tf32, false, true, MatrixSwizzle::b128}, 64, 8, c), kWindowBytes).ok());
  EXPECT_FALSE(check(tile_of({Format::bf16, false, true, MatrixSwizzle::b128_atom_32b}, 64, 16, c), kWindowBytes).ok());
}

TEST(Matrix, RefusesTilesThatEndBeyondTheWindow) {
  const Form form = {Format::bf16, false, false, MatrixSwizzle::b128};
  Canonical c;
  c.swizzle = form.swizzle;
  c.start = 0x1000, c.stride = 1024;
  const MatrixTile tile = tile_of(form, 64, 64, c);
  EXPECT_TRUE(check(tile, 0x1000 + 64 * 128).ok());
  const Status status = check(tile, 0x1000 + 64 * 128 - 16);
  EXPECT_NE(status.message.find("ends at 12288"), std::string::npos) << status.message;
  // A swizzle may put the last used bytes before the end of their line.
  MatrixTile part = tile_of(form, 4, 16, c);
  uint32_t end = 0;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 16; ++j) end = std::max(end, element_address(part, i, j) + 2);
  EXPECT_EQ(end, 0x1000u + 3 * 128 + 64);
  EXPECT_TRUE(check(part, end).ok());
  EXPECT_FALSE(check(part, end - 1).ok());
}

}  // namespace
}  // namespace tandem::vgpu::units
