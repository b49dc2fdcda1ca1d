// Tests of wgmma against a plain product: every type, layout and operand place; fragments by the formulas of the PTX
// ISA.
#include "vgpu/src/units/wgmma.h"

#include <gtest/gtest.h>

#include <array>

#include "vgpu/tests/units/window.h"

namespace tandem::vgpu::units {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

using test::Random;

// Registers of the four warps of a warpgroup.
struct Registers {
  std::vector<std::array<uint32_t, 32>> rows;
  std::vector<Row> pointers;
  std::vector<Row*> warps;
  std::vector<const ConstRow*> const_warps;
  int each = 0;

  Registers(Random& random, int count) : rows(static_cast<size_t>(4 * count)), each(count) {
    for (auto& row : rows) {
      for (uint32_t& x : row) x = static_cast<uint32_t>(random.next());
      pointers.push_back(row.data());
    }
    for (int warp = 0; warp < 4; ++warp) {
      warps.push_back(pointers.data() + warp * count);
      const_warps.push_back(warps.back());
    }
  }
  // Register r of thread t (0..127) of the warpgroup.
  uint32_t& at(int t, int r) { return rows[wide(t / 32 * each + r)][static_cast<size_t>(t % 32)]; }
};

double sum_of(uint32_t x, Sum sum) {
  if (sum == Sum::s32) return static_cast<int32_t>(x);
  return decode(x, sum == Sum::f16 ? Format::f16 : Format::f32);
}

// Stores D of 64 x n as fragments. f(row, column): the value of register r, thread t, and for f16 of half h.
template <class F>
void for_each_sum(const WgmmaForm& form, F&& f) {
  for (int t = 0; t < 128; ++t)
    for (int r = 0; r < form.n / 2; ++r)
      f(t, r, 16 * (t / 32) + (t % 32) / 4 + 8 * ((r >> 1) & 1), 8 * (r >> 2) + 2 * (t % 4) + (r & 1));
}
uint32_t read_sum(Registers& d, const WgmmaForm& form, int t, int r) {
  return form.d == Sum::f16 ? d.at(t, r / 2) >> (16 * (r % 2)) & 0xffff : d.at(t, r);
}
void write_sum(Registers& d, const WgmmaForm& form, int t, int r, double x) {
  if (form.d == Sum::f16) {
    uint32_t& to = d.at(t, r / 2);
    const int shift = 16 * (r % 2);
    to = (to & ~(0xffffu << shift)) | encode(static_cast<float>(x), Format::f16) << shift;
  } else {
    d.at(t, r) = form.d == Sum::s32 ? static_cast<uint32_t>(static_cast<int32_t>(x))
                                    : encode(static_cast<float>(x), Format::f32);
  }
}

// Stores A of 64 x k in registers.
void write_a(Registers& a, Format format, const Plain& plain) {
  const int bits = bits_of(format), elements = 32 / bits;
  for (int t = 0; t < 128; ++t)
    for (int r = 0; r < 4; ++r) {
      uint32_t& to = a.at(t, r);
      // Low bits of tf32 are not read, so that they keep their old contents.
      to = format == Format::tf32 ? to & 0x1fff : 0;
      for (int e = 0; e < elements; ++e) {
        const int row = 16 * (t / 32) + (t % 32) / 4 + 8 * (r % 2);
        const int k = elements * (t % 4) + e + 4 * elements * (r / 2);
        to |= code_of(format, plain.at(row, k)) << (bits * e);
      }
    }
}

void run(Random& random, const WgmmaForm& form, MatrixSwizzle swizzle_a, MatrixSwizzle swizzle_b, bool accumulate) {
  ASSERT_TRUE(check(form).ok()) << check(form).message;
  const auto T = elements_per_chunk(form.a, false);
  const auto layout = [&](MatrixSwizzle swizzle, bool mn_major, int mn) {
    return random_canonical(random, swizzle, mn_major, static_cast<uint32_t>(mn_major ? mn : form.k) / T,
                            static_cast<uint32_t>(mn_major ? form.k : mn));
  };
  const Plain a = random_plain(random, form.a, 64, form.k), b = random_plain(random, form.b, form.n, form.k);
  std::vector<std::byte> window = random_bytes(random, kWindowBytes);
  const Canonical a_layout = layout(swizzle_a, form.transpose_a, 64);
  Canonical b_layout = layout(swizzle_b, form.transpose_b, form.n);
  b_layout.start += 64 * 1024;
  put(&window, a_layout, form.a, false, a);
  put(&window, b_layout, form.b, false, b);
  MatrixTile a_matrix, b_matrix;
  if (!form.a_in_registers) {
    const Status status = a_tile(form, a_layout.wgmma(), kWindowBytes, &a_matrix);
    ASSERT_TRUE(status.ok()) << status.message;
  }
  const Status status = b_tile(form, b_layout.wgmma(), kWindowBytes, &b_matrix);
  ASSERT_TRUE(status.ok()) << status.message;

  Registers a_registers(random, kWgmmaARegisters), d(random, d_registers(form));
  if (form.a_in_registers) write_a(a_registers, form.a, a);
  std::vector<double> want(static_cast<size_t>(64 * form.n));
  for_each_sum(form, [&](int t, int r, int row, int column) {
    const auto before = static_cast<double>(random.between(-20, 20));
    if (accumulate) write_sum(d, form, t, r, before);
    double sum = accumulate ? before : 0;
    const double sign = (form.negate_a ? -1 : 1) * (form.negate_b ? -1 : 1);
    for (int k = 0; k < form.k; ++k) sum += sign * a.at(row, k) * b.at(column, k);
    want[wide(row * form.n + column)] =
        form.d == Sum::f16 ? decode(encode(static_cast<float>(sum), Format::f16), Format::f16) : sum;
  });
  const auto* const a_rows = form.a_in_registers ? a_registers.const_warps.data() : nullptr;
  wgmma(form, {a_matrix, a_rows, b_matrix, window.data()}, accumulate, d.warps.data());
  for_each_sum(form, [&](int t, int r, int row, int column) {
    ASSERT_EQ(sum_of(read_sum(d, form, t, r), form.d), want[static_cast<size_t>(row * form.n + column)])
        << name_of(form.a) << " n " << form.n << " at " << row << "," << column;
  });
}

struct Types {
  Format a, b;
  Sum d;
};
const Types kTypes[] = {{Format::bf16, Format::bf16, Sum::f32}, {Format::f16, Format::f16, Sum::f32},
                        {Format::f16, Format::f16, Sum::f16},   {Format::tf32, Format::tf32, Sum::f32},
                        {Format::e4m3, Format::e4m3, Sum::f32}, {Format::e4m3, Format::e5m2, Sum::f16},
                        {Format::e5m2, Format::e4m3, Sum::f32}, {Format::s8, Format::s8, Sum::s32},
                        {Format::u8, Format::s8, Sum::s32},     {Format::s8, Format::u8, Sum::s32}};

TEST(Wgmma, EveryTypeAndLayout) {
  Random random(1);
  for (const Types& types : kTypes)
    for (int swizzle = 0; swizzle < 4; ++swizzle)
      for (int variant = 0; variant < 8; ++variant) {
        WgmmaForm form;
        form.a = types.a, form.b = types.b, form.d = types.d;
        form.k = 256 / bits_of(types.a);
        form.n = variant % 3 == 0 ? 16 : variant % 3 == 1 ? 64 : 208;
        form.a_in_registers = (variant & 1) != 0;
        const bool sixteen = bits_of(types.a) == 16;
        form.transpose_a = sixteen && !form.a_in_registers && (variant & 2) != 0;
        form.transpose_b = sixteen && (variant & 4) != 0;
        form.negate_a = types.d != Sum::s32 && variant == 3;
        form.negate_b = types.d != Sum::s32 && variant > 4;
        run(random, form, static_cast<MatrixSwizzle>((swizzle + variant) % 4), static_cast<MatrixSwizzle>(swizzle),
            (variant & 2) != 0);
        if (HasFatalFailure()) return;
      }
}

TEST(Wgmma, EveryWidth) {
  Random random(2);
  for (int n = 8; n <= 256; n += 8) {
    WgmmaForm form;
    form.n = n, form.k = 16;
    run(random, form, MatrixSwizzle::b128, MatrixSwizzle::b128, true);
    form.a = form.b = Format::u8, form.d = Sum::s32, form.k = 32;
    EXPECT_EQ(check(form).ok(), n <= 32 || n % 16 == 0) << n;
    if (check(form).ok()) run(random, form, MatrixSwizzle::b64, MatrixSwizzle::b32, false);
  }
}

TEST(Wgmma, IntegersSaturateOnlyOnRequest) {
  Random random(3);
  for (const bool saturate : {false, true}) {
    WgmmaForm form;
    form.a = form.b = Format::u8, form.d = Sum::s32, form.n = 8, form.k = 32, form.saturate = saturate;
    std::vector<std::byte> window(kWindowBytes, std::byte{255});
    Canonical layout;
    layout.start = 1024, layout.leading = 128, layout.stride = 256;
    MatrixTile a, b;
    ASSERT_TRUE(a_tile(form, layout.wgmma(), kWindowBytes, &a).ok());
    ASSERT_TRUE(b_tile(form, layout.wgmma(), kWindowBytes, &b).ok());
    Registers d(random, d_registers(form));
    for (auto& row : d.rows) row.fill(INT32_MAX - 5);
    wgmma(form, {a, nullptr, b, window.data()}, true, d.warps.data());
    const uint32_t wrapped = static_cast<uint32_t>(INT32_MAX) - 5 + 32 * 255 * 255;
    for (const auto& row : d.rows)
      for (const uint32_t x : row) ASSERT_EQ(x, saturate ? static_cast<uint32_t>(INT32_MAX) : wrapped);
  }
}

TEST(Wgmma, NaNIsTheGpus) {
  Random random(4);
  WgmmaForm form;
  form.n = 8, form.k = 16;
  std::vector<std::byte> window(kWindowBytes, std::byte{0xff});
  Canonical layout;
  layout.start = 1024, layout.leading = 128, layout.stride = 256;
  MatrixTile a, b;
  ASSERT_TRUE(a_tile(form, layout.wgmma(), kWindowBytes, &a).ok());
  ASSERT_TRUE(b_tile(form, layout.wgmma(), kWindowBytes, &b).ok());
  Registers d(random, d_registers(form));
  wgmma(form, {a, nullptr, b, window.data()}, false, d.warps.data());
  for (const auto& row : d.rows)
    for (const uint32_t x : row) ASSERT_EQ(x, 0x7fffffffu);
}

TEST(Wgmma, RefusesWhatDoesNotExist) {
  struct Case {
    const char* says;
    void (*spoil)(WgmmaForm&);
  };
  const Case cases[] = {
      {"no product of bf16 and f16", [](WgmmaForm& f) { f.b = Format::f16; }},
      {"with this type of D", [](WgmmaForm& f) { f.d = Sum::f16; }},
      {"n of wgmma (12)", [](WgmmaForm& f) { f.n = 12; }},
      {"n of wgmma (264)", [](WgmmaForm& f) { f.n = 264; }},
      {"n of wgmma (0)", [](WgmmaForm& f) { f.n = 0; }},
      {"k of wgmma (8)", [](WgmmaForm& f) { f.k = 8; }},
      {"transposes operands of 16 bits only",
       [](WgmmaForm& f) { f.a = f.b = Format::tf32, f.k = 8, f.transpose_b = true; }},
      {"cannot transpose A in registers", [](WgmmaForm& f) { f.transpose_a = f.a_in_registers = true; }},
      {"saturates integers only", [](WgmmaForm& f) { f.saturate = true; }},
      {"cannot negate integers",
       [](WgmmaForm& f) { f.a = f.b = Format::s8, f.k = 32, f.d = Sum::s32, f.negate_a = true; }},
  };
  for (const Case& c : cases) {
    WgmmaForm form;
    form.n = 64, form.k = 16;
    ASSERT_TRUE(check(form).ok());
    c.spoil(form);
    EXPECT_NE(check(form).message.find(c.says), std::string::npos) << check(form).message;
  }
}

}  // namespace
}  // namespace tandem::vgpu::units
