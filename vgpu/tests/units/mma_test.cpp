// Tests of mma.sync, ldmatrix, stmatrix and movmatrix: lanes and registers by the tables of the PTX ISA.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "vgpu/src/units/wgmma.h"
#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

using test::Random;

// Registers of one warp, of 4 or 8 bytes per lane.
struct MmaWarp {
  std::vector<std::array<uint64_t, 32>> rows;
  std::vector<Row> pointers;
  std::vector<ConstRow> const_pointers;
  explicit MmaWarp(int count) : rows(static_cast<size_t>(count)) {
    for (auto& row : rows) {
      row.fill(0x5a5a5a5a5a5a5a5au);
      pointers.push_back(reinterpret_cast<Row>(row.data()));
      const_pointers.push_back(pointers.back());
    }
  }
  uint32_t word(int r, int t) const {
    uint32_t x;
    std::memcpy(&x, reinterpret_cast<const std::byte*>(rows[static_cast<size_t>(r)].data()) + 4 * t, 4);
    return x;
  }
  void set_word(int r, int t, uint32_t x) {
    std::memcpy(reinterpret_cast<std::byte*>(rows[static_cast<size_t>(r)].data()) + 4 * t, &x, 4);
  }
  double real(int r, int t) const {
    double x;
    std::memcpy(&x, &rows[static_cast<size_t>(r)][static_cast<size_t>(t)], 8);
    return x;
  }
  void set_real(int r, int t, double x) { std::memcpy(&rows[static_cast<size_t>(r)][static_cast<size_t>(t)], &x, 8); }
};

// Tables of "Matrix Fragments for mma": element i of a lane's fragment, groupID = t / 4, threadID_in_group = t % 4.
struct ElementPlace {
  int row, column;
};
ElementPlace a_place(const MmaForm& form, int t, int i) {
  const int g = t / 4, q = t % 4;
  if (form.d == Sum::f64)
    return form.m == 8 ? ElementPlace{g, q} : ElementPlace{i % 2 == 0 ? g : g + 8, q + 4 * (i / 2)};
  switch (bits_of(form.a)) {
    case 16:
      if (form.k == 8) return {i < 2 ? g : g + 8, 2 * q + (i & 1)};
      return {i < 2 || (i >= 4 && i < 6) ? g : g + 8, 2 * q + (i & 1) + (i >= 4 ? 8 : 0)};
    case 32:
      if (form.k == 4) return {i == 0 ? g : g + 8, q};
      return {i == 0 || i == 2 ? g : g + 8, i < 2 ? q : q + 4};
    default:
      if (form.m == 8) return {g, 4 * q + i};
      if (form.k == 16) return {i < 4 ? g : g + 8, 4 * q + (i & 3)};
      return {i < 4 || (i >= 8 && i < 12) ? g : g + 8, 4 * q + (i & 3) + (i >= 8 ? 16 : 0)};
  }
}
ElementPlace b_place(const MmaForm& form, int t, int i) {  // row: k
  const int g = t / 4, q = t % 4;
  if (form.d == Sum::f64) return {q + 4 * i, g};
  switch (bits_of(form.b)) {
    case 16: return {2 * q + (i & 1) + (i >= 2 ? 8 : 0), g};
    case 32: return {q + (i >= 1 ? 4 : 0), g};
    default: return {4 * q + (i & 3) + (i >= 4 ? 16 : 0), g};
  }
}
ElementPlace c_place(int t, int i) { return {t / 4 + (i >= 2 ? 8 : 0), 2 * (t % 4) + (i & 1)}; }

void write_operand(MmaWarp* warp, const MmaForm& form, bool is_a, const Plain& p) {
  const Format format = is_a ? form.a : form.b;
  const int registers = is_a ? a_registers(form) : b_registers(form);
  const int elements = form.d == Sum::f64 ? 1 : 32 / bits_of(format);
  for (int t = 0; t < 32; ++t)
    for (int r = 0; r < registers; ++r) {
      uint32_t word = 0;
      for (int e = 0; e < elements; ++e) {
        const ElementPlace place = is_a ? a_place(form, t, r * elements + e) : b_place(form, t, r * elements + e);
        const double x = is_a ? p.at(place.row, place.column) : p.at(place.column, place.row);
        if (form.d == Sum::f64) {
          warp->set_real(r, t, x);
        } else {
          word |= code_of(format, x) << (bits_of(format) * e);
        }
      }
      if (form.d != Sum::f64) warp->set_word(r, t, word);
    }
}

struct Types {
  Format a, b;
  Sum d;
};

TEST(Mma, EveryForm) {
  Random random(1);
  std::vector<MmaForm> forms;
  for (const Types& t : {Types{Format::bf16, Format::bf16, Sum::f32}, Types{Format::f16, Format::f16, Sum::f32},
                         Types{Format::f16, Format::f16, Sum::f16}, Types{Format::tf32, Format::tf32, Sum::f32},
                         Types{Format::e4m3, Format::e5m2, Sum::f32}, Types{Format::e5m2, Format::e4m3, Sum::f16},
                         Types{Format::s8, Format::u8, Sum::s32}, Types{Format::u8, Format::u8, Sum::s32}})
    for (const int k : {128 / bits_of(t.a), 256 / bits_of(t.a)}) forms.push_back({16, 8, k, t.a, t.b, t.d, t.d, false});
  forms.push_back({8, 8, 16, Format::s8, Format::s8, Sum::s32, Sum::s32, false});
  forms.push_back({8, 8, 4, Format::bf16, Format::bf16, Sum::f64, Sum::f64, false});
  for (const int k : {4, 8, 16}) forms.push_back({16, 8, k, Format::bf16, Format::bf16, Sum::f64, Sum::f64, false});
  for (const MmaForm& form : forms) {
    ASSERT_TRUE(check(form).ok()) << check(form).message;
    const Plain a = random_plain(random, form.a, form.m, form.k), b = random_plain(random, form.b, 8, form.k);
    MmaWarp a_warp(a_registers(form)), b_warp(b_registers(form)), c_warp(c_registers(form)), d_warp(d_registers(form));
    write_operand(&a_warp, form, true, a);
    write_operand(&b_warp, form, false, b);
    const int sums = form.m * 8 / 32;
    std::vector<double> c(static_cast<size_t>(32 * sums));
    for (int t = 0; t < 32; ++t)
      for (int i = 0; i < sums; ++i) {
        const auto x = static_cast<double>(random.between(-9, 9));
        c[wide(t * sums + i)] = x;
        if (form.c == Sum::f64) {
          c_warp.set_real(i, t, x);
        } else if (form.c == Sum::f16) {
          const uint32_t half = encode(static_cast<float>(x), Format::f16);
          const uint32_t other = c_warp.word(i / 2, t);
          c_warp.set_word(i / 2, t, i % 2 == 0 ? half : (other & 0xffff) | half << 16);
        } else {
          c_warp.set_word(i, t,
                          form.c == Sum::s32 ? static_cast<uint32_t>(static_cast<int32_t>(x))
                                             : encode(static_cast<float>(x), Format::f32));
        }
      }
    mma(form, a_warp.const_pointers.data(), b_warp.const_pointers.data(), c_warp.const_pointers.data(),
        d_warp.pointers.data());
    for (int t = 0; t < 32; ++t)
      for (int i = 0; i < sums; ++i) {
        const ElementPlace place = c_place(t, i);
        double want = c[wide(t * sums + i)];
        for (int k = 0; k < form.k; ++k) want += a.at(place.row, k) * b.at(place.column, k);
        double got = 0;
        switch (form.d) {
          case Sum::f64: got = d_warp.real(i, t); break;
          case Sum::f32: got = decode(d_warp.word(i, t), Format::f32); break;
          case Sum::s32: got = static_cast<int32_t>(d_warp.word(i, t)); break;
          case Sum::f16:
            got = decode(d_warp.word(i / 2, t) >> (16 * (i % 2)) & 0xffff, Format::f16);
            want = decode(encode(static_cast<float>(want), Format::f16), Format::f16);
            break;
        }
        ASSERT_EQ(got, want) << "m" << form.m << "k" << form.k << " " << name_of(form.a) << " lane " << t << " element "
                             << i;
      }
  }
}

TEST(Mma, RefusesWhatItDoesNotHave) {
  const auto refused = [](MmaForm form) { return !check(form).ok(); };
  EXPECT_TRUE(refused({16, 8, 32, Format::bf16, Format::bf16, Sum::f32, Sum::f32, false}));
  EXPECT_TRUE(refused({16, 8, 16, Format::bf16, Format::f16, Sum::f32, Sum::f32, false}));
  EXPECT_TRUE(refused({16, 8, 16, Format::bf16, Format::bf16, Sum::f16, Sum::f16, false}));
  EXPECT_TRUE(refused({16, 8, 16, Format::f16, Format::f16, Sum::f32, Sum::f16, false}));
  EXPECT_TRUE(refused({16, 16, 16, Format::bf16, Format::bf16, Sum::f32, Sum::f32, false}));
  EXPECT_TRUE(refused({8, 8, 4, Format::f16, Format::f16, Sum::f32, Sum::f32, false}));
  EXPECT_TRUE(refused({16, 8, 16, Format::bf16, Format::bf16, Sum::f32, Sum::f32, true}));
  EXPECT_TRUE(refused({16, 8, 32, Format::e4m3, Format::s8, Sum::f32, Sum::f32, false}));
}

// ---- ldmatrix, stmatrix, movmatrix ----
using Shape = MatrixAccess::Shape;

struct Rows {
  std::vector<std::byte> window;
  uint32_t addresses[32];
  explicit Rows(Random& random) : window(random_bytes(random, 8192)) {
    // Rows have random places, each place once.
    for (uint32_t i = 0; i < 32; ++i) addresses[i] = 1024 + 16 * ((i * 37 + 11) % 256);
  }
  uint32_t byte(int row, int column) const {
    return static_cast<uint32_t>(window[addresses[row] + static_cast<uint32_t>(column)]);
  }
  uint32_t half(int row, int column) const { return byte(row, 2 * column) | byte(row, 2 * column + 1) << 8; }
};

TEST(MatrixMoves, EightByEightOfSixteenBits) {
  Random random(2);
  for (const int count : {1, 2, 4})
    for (const bool transpose : {false, true}) {
      Rows rows(random);
      const MatrixAccess access = {Shape::m8n8_b16, count, transpose};
      ASSERT_TRUE(check_load(access).ok());
      ASSERT_EQ(registers(access), count);
      ASSERT_EQ(row_addresses(access), 8 * count);
      MmaWarp d(count);
      load_matrix(access, rows.window.data(), rows.addresses, d.pointers.data());
      for (int i = 0; i < count; ++i)
        for (int t = 0; t < 32; ++t)
          for (int e = 0; e < 2; ++e) {
            const int row = t / 4, column = 2 * (t % 4) + e;
            const uint32_t want = transpose ? rows.half(8 * i + column, row) : rows.half(8 * i + row, column);
            ASSERT_EQ(d.word(i, t) >> (16 * e) & 0xffff, want) << "matrix " << i << " lane " << t;
          }
      // A store writes back the values of a load.
      std::vector<std::byte> other(rows.window.size());
      ASSERT_TRUE(check_store(access).ok());
      store_matrix(access, other.data(), rows.addresses, d.const_pointers.data());
      for (int row = 0; row < 8 * count; ++row)
        ASSERT_EQ(std::memcmp(&other[rows.addresses[row]], &rows.window[rows.addresses[row]], 16), 0);
      for (int row = 8 * count; row < 32; ++row) ASSERT_EQ(other[rows.addresses[row]], std::byte{0});
    }
}

TEST(MatrixMoves, FourAndSixBitsBecomeBytes) {
  Random random(3);
  for (const int bits : {4, 6})
    for (const int count : {1, 2, 4}) {
      Rows rows(random);
      const MatrixAccess access = {bits == 4 ? Shape::m8n16_b8x16_b4x16_p64 : Shape::m8n16_b8x16_b6x16_p32, count,
                                   false};
      ASSERT_TRUE(check_load(access).ok());
      MmaWarp d(count);
      load_matrix(access, rows.window.data(), rows.addresses, d.pointers.data());
      for (int i = 0; i < count; ++i)
        for (int t = 0; t < 32; ++t)
          for (int e = 0; e < 4; ++e) {
            const auto column = static_cast<uint32_t>(4 * (t % 4) + e), width = static_cast<uint32_t>(bits);
            const uint32_t want = read_bits(rows.window, rows.addresses[8 * i + t / 4], column * width, width);
            ASSERT_EQ(d.word(i, t) >> (8 * e) & 0xff, want);
          }
    }
}

// Bytes, transposed: lane t has rows t / 4 and t / 4 + 8 of the transposed matrix. The lane's columns begin at 4 (t %
// 4) in a 16 x 16 matrix, and at 2 (t % 4) in a 16 x 8 matrix.
TEST(MatrixMoves, BytesAreTransposed) {
  Random random(4);
  for (const int count : {1, 2}) {
    Rows rows(random);
    const MatrixAccess access = {Shape::m16n16_b8, count, true};
    ASSERT_TRUE(check_load(access).ok());
    ASSERT_EQ(registers(access), 2 * count);
    ASSERT_EQ(row_addresses(access), 16 * count);
    MmaWarp d(2 * count);
    load_matrix(access, rows.window.data(), rows.addresses, d.pointers.data());
    for (int i = 0; i < count; ++i)
      for (int t = 0; t < 32; ++t)
        for (int r = 0; r < 2; ++r)
          for (int e = 0; e < 4; ++e) {
            const int column = 4 * (t % 4) + 2 * r + e % 2, row = t / 4 + 8 * (e / 2);
            ASSERT_EQ(d.word(2 * i + r, t) >> (8 * e) & 0xff, rows.byte(16 * i + column, row));
          }
  }
  for (const int count : {1, 2, 4}) {
    Rows rows(random);
    const MatrixAccess access = {Shape::m16n8_b8, count, true};
    ASSERT_TRUE(check_store(access).ok());
    MmaWarp a(count);
    for (int i = 0; i < count; ++i)
      for (int t = 0; t < 32; ++t) a.set_word(i, t, static_cast<uint32_t>(random.next()));
    store_matrix(access, rows.window.data(), rows.addresses, a.const_pointers.data());
    for (int i = 0; i < count; ++i)
      for (int t = 0; t < 32; ++t)
        for (int e = 0; e < 4; ++e)
          ASSERT_EQ(rows.byte(8 * i + 2 * (t % 4) + e % 2, t / 4 + 8 * (e / 2)), a.word(i, t) >> (8 * e) & 0xff);
  }
}

TEST(MatrixMoves, RefusesWhatDoesNotExist) {
  EXPECT_FALSE(check_load({Shape::m8n8_b16, 3, false}).ok());
  EXPECT_FALSE(check_load({Shape::m16n16_b8, 4, true}).ok());
  EXPECT_FALSE(check_load({Shape::m16n16_b8, 1, false}).ok());
  EXPECT_FALSE(check_load({Shape::m8n16_b8x16_b4x16_p64, 1, true}).ok());
  EXPECT_FALSE(check_load({Shape::m16n8_b8, 1, true}).ok());
  EXPECT_FALSE(check_store({Shape::m16n8_b8, 1, false}).ok());
  EXPECT_FALSE(check_store({Shape::m16n16_b8, 1, true}).ok());
}

TEST(MatrixMoves, TransposesInRegisters) {
  Random random(5);
  uint32_t a[32], d[32], again[32];
  for (uint32_t& x : a) x = static_cast<uint32_t>(random.next());
  transpose_matrix(a, d);
  for (int t = 0; t < 32; ++t)
    for (int e = 0; e < 2; ++e) {
      const int row = t / 4, column = 2 * (t % 4) + e;
      ASSERT_EQ(d[t] >> (16 * e) & 0xffff, a[4 * column + row / 2] >> (16 * (row % 2)) & 0xffff);
    }
  transpose_matrix(d, again);
  EXPECT_EQ(std::memcmp(a, again, sizeof a), 0);
}

}  // namespace
}  // namespace tandem::vgpu::units
