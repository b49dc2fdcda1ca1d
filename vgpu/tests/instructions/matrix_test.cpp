// PTX ISA, "Matrix multiply-accumulate operation using mma instruction", ldmatrix, stmatrix, movmatrix, and
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate". vgpu/tests/units compares the products of given registers
// and shared memory with plain products. These tests require the same results on every device. Values are small
// integers, whose sums are exact in any order.
#include <array>
#include <cstring>

#include "base/text.h"
#include "support/random.h"
#include "vgpu/src/units/wgmma.h"
#include "vgpu/tests/instructions/bench.h"
#include "vgpu/tests/units/window.h"

namespace tandem::test {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

using namespace vgpu::units;
using u32 = uint32_t;
using u64 = uint64_t;

// A word full of small values of a format.
u32 small_word(Random& random, Format format) {
  const int bits = std::max(bits_of(format), 8), count = 32 / bits;
  u32 word = 0;
  for (int i = 0; i < count; ++i) {
    const auto x = static_cast<double>(random.between(-4, 4));
    word |= (format == Format::u8 ? static_cast<u32>(random.between(0, 9)) : code_of(format, x)) << (bits * i % 32);
  }
  return word;
}

std::string list_of(const std::string& name, int count) {
  std::string text = "{";
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + name + std::to_string(i);
  return text + "}";
}

// ---- One warp: registers from p0 (word r of lane t at 32 r + t), results to p1 ----
struct WarpCase {
  std::string declarations, body;
  int in = 0, out = 0;  // registers of 32 bits, "a0" and "d0" on
  bool wide = false;    // multiple of 64
};
BenchKernel kernel_of(const WarpCase& c, const std::vector<u32>& in) {
  BenchKernel kernel;
  const std::string type = c.wide ? "b64" : "b32", size = c.wide ? "8" : "4";
  kernel.body = ".reg .b32 t, at;\n.reg .b64 in, out;\n.reg ." + type + " a<" + std::to_string(c.in + 1) + ">, d<" +
                std::to_string(c.out + 1) +
                ">;\nld.param.u64 in, [p0];\nld.param.u64 out, [p1];\nmov.u32 t, %tid.x;\nmad.wide.u32 in, t, " + size +
                ", in;\nmad.wide.u32 out, t, " + size + ", out;\n" + c.declarations;
  const int row = c.wide ? 256 : 128;
  for (int r = 0; r < c.in; ++r)
    kernel.body += "ld.global." + type + " a" + std::to_string(r) + ", [in+" + std::to_string(row * r) + "];\n";
  kernel.body += c.body + "\n";
  for (int r = 0; r < c.out; ++r)
    kernel.body += "st.global." + type + " [out+" + std::to_string(row * r) + "], d" + std::to_string(r) + ";\n";
  kernel.memory = {Memory::in(in), Memory::out(wide(row * std::max(c.out, 1)))};
  return kernel;
}

TEST(Matrix, LdMatrix) {
  Random random(1);
  for (const bool trans : {false, true})
    for (const int count : {1, 2, 4})
      for (const char* spelling :
           {"ldmatrix.sync.aligned.m8n8.x# @.shared.b16", "ldmatrix.sync.aligned.x# @.m8n8.shared::cta.b16"}) {
        std::string name = spelling;
        name.replace(name.find('#'), 1, std::to_string(count));
        name.replace(name.find(" @"), 2, trans ? ".trans" : "");
        // Rows: 32 rows of 16 bytes; lane l has the address of row (5 l) % 32.
        std::vector<u32> in(128);
        for (u32& x : in) x = static_cast<u32>(random.next());
        WarpCase c;
        c.declarations =
            ".shared .align 16 .b8 rows[512];\nmov.u32 at, rows;\n.reg .b32 to;\nmad.lo.u32 to, t, 4, at;\n";
        c.in = 4, c.out = count;
        c.body =
            "st.shared.b32 [to], a0;\nst.shared.b32 [to+128], a1;\nst.shared.b32 [to+256], a2;\nst.shared.b32 "
            "[to+384], a3;\nbar.warp.sync -1;\n"
            "mul.lo.u32 to, t, 5;\nand.b32 to, to, 31;\nmad.lo.u32 to, to, 16, at;\n" +
            name + " " + list_of("d", count) + ", [to];";
        const MatrixAccess access = {MatrixAccess::Shape::m8n8_b16, count, trans};
        u32 addresses[32], want[4][32];
        Row rows[] = {want[0], want[1], want[2], want[3]};
        for (u32 lane = 0; lane < 32; ++lane) addresses[lane] = 16 * (5 * lane % 32);
        load_matrix(access, reinterpret_cast<const std::byte*>(in.data()), addresses, rows);
        on_each(kernel_of(c, in), [&](const Bench&, const BenchKernel& done) {
          for (size_t r = 0; r < static_cast<size_t>(count); ++r)
            for (size_t t = 0; t < 32; ++t) ASSERT_EQ(done.memory[1].at<u32>(32 * r + t), want[r][t]) << name;
        });
      }
}

TEST(Matrix, StMatrix) {
  Random random(2);
  for (const auto& [trans, space] : {std::pair(false, ""), std::pair(false, "::cta"), std::pair(true, "")})
    for (const int count : {1, 2, 4}) {
      const std::string name =
          str_cat("stmatrix.sync.aligned.m8n8.x", count, trans ? ".trans" : "", ".shared", space, ".b16");
      std::vector<u32> in(32 * static_cast<size_t>(count));
      for (u32& x : in) x = static_cast<u32>(random.next());
      WarpCase c;
      c.declarations =
          ".shared .align 16 .b8 rows[512];\nmov.u32 at, rows;\n.reg .b32 to, zero;\nmad.lo.u32 to, t, 16, "
          "at;\nmov.b32 zero, 0;\nst.shared.v4.b32 [to], {zero, zero, zero, zero};\nbar.warp.sync -1;\n";
      c.in = count, c.out = 4;
      c.body = "mul.lo.u32 to, t, 5;\nand.b32 to, to, 31;\nmad.lo.u32 to, to, 16, at;\n" + name + " [to], " +
               list_of("a", count) +
               ";\nbar.warp.sync -1;\nmad.lo.u32 to, t, 4, at;\nld.shared.b32 d0, [to];\nld.shared.b32 d1, "
               "[to+128];\nld.shared.b32 d2, [to+256];\nld.shared.b32 d3, [to+384];";
      std::vector<u32> want(128);
      u32 addresses[32];
      std::vector<ConstRow> rows;
      for (u32 lane = 0; lane < 32; ++lane) addresses[lane] = 16 * (5 * lane % 32);
      for (int r = 0; r < count; ++r) rows.push_back(in.data() + 32 * r);
      store_matrix({MatrixAccess::Shape::m8n8_b16, count, trans}, reinterpret_cast<std::byte*>(want.data()), addresses,
                   rows.data());
      on_each(kernel_of(c, in), [&](const Bench&, const BenchKernel& done) {
        for (size_t i = 0; i < 128; ++i) ASSERT_EQ(done.memory[1].at<u32>(i), want[i]) << name;
      });
    }
}

TEST(Matrix, MovMatrix) {
  Random random(3);
  std::vector<u32> in(32), want(32);
  for (u32& x : in) x = static_cast<u32>(random.next());
  WarpCase c;
  c.in = c.out = 1;
  c.body = "movmatrix.sync.aligned.m8n8.trans.b16 d0, a0;";
  transpose_matrix(in.data(), want.data());
  on_each(kernel_of(c, in), [&](const Bench&, const BenchKernel& done) {
    for (size_t t = 0; t < 32; ++t) ASSERT_EQ(done.memory[1].at<u32>(t), want[t]);
  });
}

// Tests elements of a byte or less, of Blackwell.
TEST(Matrix, MovesOfBytes) {
  Random random(4);
  using Shape = MatrixAccess::Shape;
  struct Case {
    const char* name;
    MatrixAccess access;
    bool load;
  };
  const Case cases[] = {
      {"ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", {Shape::m16n16_b8, 1, true}, true},
      {"ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8", {Shape::m16n16_b8, 2, true}, true},
      {"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64", {Shape::m8n16_b8x16_b4x16_p64, 4, false}, true},
      {"ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b6x16_p32", {Shape::m8n16_b8x16_b6x16_p32, 2, false}, true},
      {"stmatrix.sync.aligned.m16n8.x1.trans.shared.b8", {Shape::m16n8_b8, 1, true}, false},
      {"stmatrix.sync.aligned.m16n8.x4.trans.shared.b8", {Shape::m16n8_b8, 4, true}, false}};
  for (const Case& k : cases) {
    std::vector<u32> in(128);
    for (u32& x : in) x = static_cast<u32>(random.next());
    WarpCase c;
    c.declarations = ".shared .align 16 .b8 rows[512];\nmov.u32 at, rows;\n.reg .b32 to;\nmad.lo.u32 to, t, 4, at;\n";
    c.in = 4;
    const int count = registers(k.access);
    u32 addresses[32];
    for (u32 lane = 0; lane < 32; ++lane) addresses[lane] = 16 * lane;
    std::vector<u32> want;
    if (k.load) {
      c.out = count;
      c.body =
          "st.shared.b32 [to], a0;\nst.shared.b32 [to+128], a1;\nst.shared.b32 [to+256], a2;\nst.shared.b32 [to+384], "
          "a3;\nbar.warp.sync -1;\n"
          "mad.lo.u32 to, t, 16, at;\n" +
          std::string(k.name) + " " + list_of("d", count) + ", [to];";
      want.resize(32 * static_cast<size_t>(count));
      std::vector<Row> rows;
      for (int r = 0; r < count; ++r) rows.push_back(want.data() + 32 * r);
      load_matrix(k.access, reinterpret_cast<const std::byte*>(in.data()), addresses, rows.data());
    } else {
      c.out = 4;
      c.body =
          "mov.b32 d0, 0;\nst.shared.b32 [to], d0;\nst.shared.b32 [to+128], d0;\nst.shared.b32 [to+256], "
          "d0;\nst.shared.b32 [to+384], d0;\nbar.warp.sync -1;\nmad.lo.u32 to, t, 16, at;\n" +
          std::string(k.name) + " [to], " + list_of("a", count) +
          ";\nbar.warp.sync -1;\nmad.lo.u32 to, t, 4, at;\nld.shared.b32 d0, [to];\nld.shared.b32 d1, "
          "[to+128];\nld.shared.b32 d2, [to+256];\nld.shared.b32 d3, [to+384];";
      want.resize(128);
      std::vector<ConstRow> rows;
      for (int r = 0; r < count; ++r) rows.push_back(in.data() + 32 * r);
      store_matrix(k.access, reinterpret_cast<std::byte*>(want.data()), addresses, rows.data());
    }
    BenchKernel kernel = kernel_of(c, in);
    kernel.needs = Needs::blackwell;
    on_each(kernel, [&](const Bench&, const BenchKernel& done) {
      for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(done.memory[1].at<u32>(i), want[i]) << k.name << " " << i;
    });
  }
}

struct MmaCase {
  const char* name;
  MmaForm form;
};
const MmaCase kMma[] = {
    {"m16n8k8.row.col.f32.bf16.bf16.f32", {16, 8, 8, Format::bf16, Format::bf16, Sum::f32, Sum::f32, false}},
    {"m16n8k16.row.col.f32.bf16.bf16.f32", {16, 8, 16, Format::bf16, Format::bf16, Sum::f32, Sum::f32, false}},
    {"m16n8k8.row.col.f32.f16.f16.f32", {16, 8, 8, Format::f16, Format::f16, Sum::f32, Sum::f32, false}},
    {"m16n8k16.row.col.f32.f16.f16.f32", {16, 8, 16, Format::f16, Format::f16, Sum::f32, Sum::f32, false}},
    {"m16n8k8.row.col.f16.f16.f16.f16", {16, 8, 8, Format::f16, Format::f16, Sum::f16, Sum::f16, false}},
    {"m16n8k16.row.col.f16.f16.f16.f16", {16, 8, 16, Format::f16, Format::f16, Sum::f16, Sum::f16, false}},
    {"m16n8k4.row.col.f32.tf32.tf32.f32", {16, 8, 4, Format::tf32, Format::tf32, Sum::f32, Sum::f32, false}},
    {"m16n8k8.row.col.f32.tf32.tf32.f32", {16, 8, 8, Format::tf32, Format::tf32, Sum::f32, Sum::f32, false}},
    {"m16n8k32.row.col.f32.e4m3.e5m2.f32", {16, 8, 32, Format::e4m3, Format::e5m2, Sum::f32, Sum::f32, false}},
    {"m16n8k32.row.col.f32.e5m2.e5m2.f32", {16, 8, 32, Format::e5m2, Format::e5m2, Sum::f32, Sum::f32, false}},
    {"m16n8k16.row.col.f32.e4m3.e4m3.f32", {16, 8, 16, Format::e4m3, Format::e4m3, Sum::f32, Sum::f32, false}},
    {"m16n8k32.row.col.f16.e4m3.e4m3.f16", {16, 8, 32, Format::e4m3, Format::e4m3, Sum::f16, Sum::f16, false}},
    {"m16n8k16.row.col.s32.s8.s8.s32", {16, 8, 16, Format::s8, Format::s8, Sum::s32, Sum::s32, false}},
    {"m16n8k32.row.col.s32.s8.u8.s32", {16, 8, 32, Format::s8, Format::u8, Sum::s32, Sum::s32, false}},
    {"m16n8k32.row.col.satfinite.s32.u8.u8.s32", {16, 8, 32, Format::u8, Format::u8, Sum::s32, Sum::s32, true}},
    {"m8n8k16.row.col.s32.s8.s8.s32", {8, 8, 16, Format::s8, Format::s8, Sum::s32, Sum::s32, false}},
    {"m8n8k4.row.col.f64.f64.f64.f64", {8, 8, 4, Format::f32, Format::f32, Sum::f64, Sum::f64, false}},
    {"m16n8k4.row.col.f64.f64.f64.f64", {16, 8, 4, Format::f32, Format::f32, Sum::f64, Sum::f64, false}},
    {"m16n8k8.row.col.f64.f64.f64.f64", {16, 8, 8, Format::f32, Format::f32, Sum::f64, Sum::f64, false}},
    {"m16n8k16.row.col.f64.f64.f64.f64", {16, 8, 16, Format::f32, Format::f32, Sum::f64, Sum::f64, false}},
};

TEST(Matrix, MmaSync) {
  Random random(5);
  for (const MmaCase& k : kMma) {
    SCOPED_TRACE(k.name);
    const MmaForm& form = k.form;
    ASSERT_TRUE(check(form).ok()) << check(form).message;
    WarpCase c;
    c.wide = form.d == Sum::f64;
    const int na = a_registers(form), nb = b_registers(form), nc = c_registers(form), nd = d_registers(form);
    c.in = na + nb + nc, c.out = nd;
    const auto part = [&](int from, int count) {
      std::string text = "{";
      for (int i = 0; i < count; ++i) text += (i == 0 ? "a" : ", a") + std::to_string(from + i);
      return text + "}";
    };
    c.body = "mma.sync.aligned." + std::string(k.name) + " " + list_of("d", nd) + ", " + part(0, na) + ", " +
             part(na, nb) + ", " + part(na + nb, nc) + ";";
    const size_t words = c.wide ? 64 : 32;
    std::vector<u32> in(words * static_cast<size_t>(c.in));
    for (size_t r = 0; r < static_cast<size_t>(c.in); ++r)
      for (size_t t = 0; t < 32; ++t) {
        const bool is_a = r < static_cast<size_t>(na), is_c = r >= static_cast<size_t>(na) + static_cast<size_t>(nb);
        const Format sums = form.c == Sum::f16 ? Format::f16 : Format::f32;
        if (c.wide) {
          const auto x = static_cast<double>(random.between(-9, 9));
          std::memcpy(&in[words * r + 2 * t], &x, 8);
        } else if (is_c && form.c == Sum::s32) {
          in[words * r + t] = static_cast<u32>(random.between(-50, 50));
        } else {
          in[words * r + t] = small_word(random, is_c ? sums : is_a ? form.a : form.b);
        }
      }
    std::vector<u32> want(words * static_cast<size_t>(nd));
    std::vector<ConstRow> rows;
    std::vector<Row> to;
    for (int r = 0; r < c.in; ++r) rows.push_back(in.data() + words * static_cast<size_t>(r));
    for (int r = 0; r < nd; ++r) to.push_back(want.data() + words * static_cast<size_t>(r));
    mma(form, rows.data(), rows.data() + na, rows.data() + na + nb, to.data());
    on_each(kernel_of(c, in), [&](const Bench&, const BenchKernel& done) {
      for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(done.memory[1].at<u32>(i), want[i]) << i;
    });
  }
}

// ---- wgmma ----
struct WgmmaCase {
  WgmmaForm form;
  MatrixSwizzle swizzle_a = MatrixSwizzle::b128, swizzle_b = MatrixSwizzle::b128;
  bool accumulate = true;
};

const char* type_name(Format format) { return name_of(format); }

std::string instruction_of(const WgmmaForm& f) {
  const char* sums[] = {"f32", "f16", "s32", "f64"};
  const bool integers = f.d == Sum::s32;
  std::string text = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(f.n) + "k" + std::to_string(f.k) + "." +
                     sums[static_cast<int>(f.d)] + "." + type_name(f.a) + "." + type_name(f.b);
  if (f.saturate) text += ".satfinite";
  text += " " + list_of("d", d_registers(f)) + ", " + (f.a_in_registers ? "{a0, a1, a2, a3}" : "da") + ", db, p";
  if (!integers) text += std::string(", ") + (f.negate_a ? "-1" : "1") + ", " + (f.negate_b ? "-1" : "1");
  if (bits_of(f.a) == 16)
    text += (f.a_in_registers ? "" : f.transpose_a ? ", 1" : ", 0") + std::string(f.transpose_b ? ", 1" : ", 0");
  return text + ";";
}

constexpr u32 kBase = 1024;  // possible begin of dynamic shared memory
constexpr u32 kImage = 112 * 1024;

// Operands of a wgmma. Register r of thread t is at 128 r + t. The registers of D precede the registers of A.
struct WgmmaData {
  Canonical a, b;
  std::vector<u32> window, registers;
};

WgmmaData random_data(Random& random, const WgmmaCase& c) {
  const WgmmaForm& form = c.form;
  const auto T = elements_per_chunk(form.a, false);
  const auto layout = [&](MatrixSwizzle swizzle, bool mn_major, int mn) {
    return random_canonical(random, swizzle, mn_major, static_cast<u32>(mn_major ? mn : form.k) / T,
                            static_cast<u32>(mn_major ? form.k : mn));
  };
  WgmmaData data;
  data.a = layout(c.swizzle_a, form.transpose_a, 64);
  data.b = layout(c.swizzle_b, form.transpose_b, form.n);
  data.b.start += 36 * 1024;
  data.window.resize((kBase + kImage) / 4);
  for (size_t i = 0; i < data.window.size(); ++i)
    data.window[i] = small_word(random, 4 * i < 36 * 1024 + kBase ? form.a : form.b);
  const int nd = d_registers(form), na = form.a_in_registers ? kWgmmaARegisters : 0;
  data.registers.resize(wide(128 * (nd + na)));
  for (size_t i = 0; i < data.registers.size(); ++i) {
    const bool is_d = i < wide(128 * nd);
    const Format sums = form.d == Sum::f16 ? Format::f16 : Format::f32;
    data.registers[i] = is_d && form.d == Sum::s32 ? static_cast<u32>(random.between(-60, 60))
                                                   : small_word(random, is_d ? sums : form.a);
  }
  return data;
}

// The registers after the product, in four warps of rows of 32 lanes.
void expected_registers(const WgmmaCase& c, const WgmmaData& data, std::vector<u32>* expected) {
  const WgmmaForm& form = c.form;
  MatrixTile a_matrix, b_matrix;
  const Status a_status = form.a_in_registers ? Status{} : a_tile(form, data.a.wgmma(), kBase + kImage, &a_matrix);
  ASSERT_TRUE(a_status.ok()) << a_status.message;
  const Status status = b_tile(form, data.b.wgmma(), kBase + kImage, &b_matrix);
  ASSERT_TRUE(status.ok()) << status.message;
  const int nd = d_registers(form), na = form.a_in_registers ? kWgmmaARegisters : 0;
  *expected = data.registers;
  std::vector<std::vector<Row>> d(4);
  std::vector<std::vector<ConstRow>> a(4);
  std::array<Row*, 4> d_warps;
  std::array<const ConstRow*, 4> a_warps;
  for (size_t warp = 0; warp < 4; ++warp) {
    for (int r = 0; r < nd; ++r) d[warp].push_back(expected->data() + 128 * r + 32 * warp);
    for (int r = 0; r < na; ++r) a[warp].push_back(data.registers.data() + 128 * (nd + r) + 32 * warp);
    d_warps[warp] = d[warp].data(), a_warps[warp] = a[warp].data();
  }
  const auto* const window = reinterpret_cast<const std::byte*>(data.window.data());
  wgmma(form, {a_matrix, a_warps.data(), b_matrix, window}, c.accumulate, d_warps.data());
}

void try_wgmma(Random& random, const WgmmaCase& c) {
  const WgmmaForm& form = c.form;
  SCOPED_TRACE(instruction_of(form));
  ASSERT_TRUE(check(form).ok()) << check(form).message;
  const WgmmaData data = random_data(random, c);
  std::vector<u32> expected;
  expected_registers(c, data, &expected);
  if (testing::Test::HasFatalFailure()) return;
  const int nd = d_registers(form), na = form.a_in_registers ? kWgmmaARegisters : 0;

  BenchKernel kernel;
  kernel.needs = Needs::hopper;
  std::string& body = kernel.body;
  body = ".reg .b32 t, x, y, at, v<4>, a<4>, d<" + std::to_string(nd) + R"(>;
  .reg .b64 image, in, out, wide, da, db, where;
  .reg .pred p, q;
  ld.param.u64 image, [p0];
  ld.param.u64 in, [p1];
  ld.param.u64 out, [p2];
  mov.u32 t, %tid.x;
  mov.u32 at, smem;
  mul.lo.u32 x, t, 16;
  fill:
  add.u32 y, at, x;
  cvt.u64.u32 wide, x;
  add.s64 wide, image, wide;
  ld.global.v4.b32 {v0, v1, v2, v3}, [wide];
  st.shared.v4.b32 [y], {v0, v1, v2, v3};
  add.u32 x, x, 2048;
  setp.lt.u32 q, x, )" +
         std::to_string(kImage) + R"(;
  @q bra fill;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  mad.wide.u32 in, t, 4, in;
  mad.wide.u32 out, t, 4, out;
)";
  for (int r = 0; r < nd; ++r)
    body += "ld.global.b32 d" + std::to_string(r) + ", [in+" + std::to_string(512 * r) + "];\n";
  for (int r = 0; r < na; ++r)
    body += "ld.global.b32 a" + std::to_string(r) + ", [in+" + std::to_string(512 * (nd + r)) + "];\n";
  const auto descriptor = [&](const char* name, const Canonical& l) {
    return "add.u32 x, at, " + std::to_string(l.start - kBase) +
           ";\nshr.u32 x, x, 4;\nand.b32 x, x, 0x3fff;\ncvt.u64.u32 where, x;\nmov.b64 " + name + ", " +
           std::to_string(l.wgmma() & ~u64{0x3fff}) + ";\nor.b64 " + name + ", " + name + ", where;\n";
  };
  if (!form.a_in_registers) body += descriptor("da", data.a);
  body += descriptor("db", data.b) + "setp.ne.b32 p, " + (c.accumulate ? "1" : "0") +
          ", 0;\nwgmma.fence.sync.aligned;\n" + instruction_of(form) +
          "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
  for (int r = 0; r < nd; ++r)
    body += "st.global.b32 [out+" + std::to_string(512 * r) + "], d" + std::to_string(r) + ";\n";
  kernel.block = {128, 1, 1};
  kernel.dynamic_smem_bytes = kImage;
  kernel.memory = {Memory::in(std::vector<u32>(data.window.begin() + kBase / 4, data.window.end())),
                   Memory::in(data.registers), Memory::out(wide(512 * nd))};
  on_each(kernel, [&](const Bench&, const BenchKernel& done) {
    for (size_t i = 0; i < wide(128 * nd); ++i)
      ASSERT_EQ(done.memory[2].at<u32>(i), expected[i]) << "register " << i / 128 << " of thread " << i % 128;
  });
}

WgmmaForm wgmma_form(Format a, Format b, Sum d, int n) {
  WgmmaForm f;
  f.a = a, f.b = b, f.d = d, f.n = n, f.k = 256 / bits_of(a);
  return f;
}

TEST(Wgmma, EveryType) {
  Random random(6);
  for (const bool registers : {false, true})
    for (const bool accumulate : {false, true})
      for (WgmmaForm f :
           {wgmma_form(Format::bf16, Format::bf16, Sum::f32, 64), wgmma_form(Format::f16, Format::f16, Sum::f32, 128),
            wgmma_form(Format::f16, Format::f16, Sum::f16, 32), wgmma_form(Format::tf32, Format::tf32, Sum::f32, 40),
            wgmma_form(Format::e4m3, Format::e4m3, Sum::f32, 64), wgmma_form(Format::e4m3, Format::e5m2, Sum::f16, 24),
            wgmma_form(Format::e5m2, Format::e5m2, Sum::f32, 16), wgmma_form(Format::s8, Format::s8, Sum::s32, 64),
            wgmma_form(Format::u8, Format::s8, Sum::s32, 24)}) {
        f.a_in_registers = registers;
        try_wgmma(random, {f, MatrixSwizzle::b128, MatrixSwizzle::b128, accumulate});
      }
}

TEST(Wgmma, EveryLayout) {
  Random random(7);
  for (int swizzle = 0; swizzle < 4; ++swizzle)
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true}) {
        WgmmaForm f = wgmma_form(Format::bf16, Format::bf16, Sum::f32, 96);
        f.transpose_a = transpose_a, f.transpose_b = transpose_b;
        try_wgmma(random,
                  {f, static_cast<MatrixSwizzle>(swizzle), static_cast<MatrixSwizzle>((swizzle + 1) % 4), true});
        if (transpose_a || transpose_b) continue;
        try_wgmma(random, {wgmma_form(Format::e4m3, Format::e4m3, Sum::f32, 96), static_cast<MatrixSwizzle>(swizzle),
                           static_cast<MatrixSwizzle>((swizzle + 2) % 4), true});
        try_wgmma(random, {wgmma_form(Format::tf32, Format::tf32, Sum::f32, 96), static_cast<MatrixSwizzle>(swizzle),
                           static_cast<MatrixSwizzle>((swizzle + 3) % 4), true});
      }
}

TEST(Wgmma, EveryWidthAndSign) {
  Random random(8);
  for (int n = 8; n <= 256; n += 8) {
    WgmmaForm f = wgmma_form(Format::bf16, Format::bf16, Sum::f32, n);
    f.negate_a = n % 16 == 0, f.negate_b = n % 24 == 0, f.a_in_registers = n % 40 == 0;
    try_wgmma(random, {f, MatrixSwizzle::b64, MatrixSwizzle::b128, true});
  }
  WgmmaForm f = wgmma_form(Format::u8, Format::u8, Sum::s32, 32);
  f.saturate = true;
  try_wgmma(random, {f, MatrixSwizzle::b128, MatrixSwizzle::b128, true});
}

}  // namespace
}  // namespace tandem::test
