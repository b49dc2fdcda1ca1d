// Instructions and their operands.
#include <gtest/gtest.h>

#include <bit>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

constexpr std::string_view kRegisters =
    ".reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<99>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .reg .f64 %fd<9>;"
    ".reg .b128 %rq<2>; .shared .align 16 .b8 memory[64];\n";

std::string last(std::string_view instruction) { return last_of(std::string(kRegisters) + std::string(instruction)); }

// Text that text_of() reproduces.
TEST(PtxInstruction, IsReadAsWritten) {
  for (const std::string text : {
           "ret",
           "bar.sync 0",
           "@%p1 mov.u32 %r1, %tid.x",
           "@!%p1 mov.u32 %r1, %r2",
           "mov.u32 %r1, %laneid",
           "mov.u64 %rd1, %clock64",
           "mov.u32 %r1, %envreg31",
           "mov.u64 %rd1, %pm7_64",
           "mov.v4.u32 {%r1, %r2, %r3, _}, {%r4, %r5, %r6, 0}",
           "mov.b64 %rd1, {%r1, %r2}",
           "mov.b128 %rq1, {%rd1, %rd2}",
           "mov.u64 %rd1, memory",
           "mov.u64 %rd1, memory+24",
           "setp.eq.s32 %p1|%p2, %r1, %r2",
           "setp.lt.and.f32 %p1, %f1, %f2, !%p2",
           "shfl.sync.idx.b32 %r2|%p3, %r1, 0, 31, -1",
           "elect.sync _|%p1, -1",
           "vote.sync.ballot.b32 %r1, !%p1, -1",
           "ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r5+16]",
           "ld.shared.u32 %r1, [memory+60]",
           "ld.global.u32 %r1, [%rd1+-8]",
           "ld.global.u32 %r1, [4096]",
           "st.shared::cluster.f32 [%r1], %f1",
           "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2",
           "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2, 10000000",
           ("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint [%r1], [%rd1, {%r2, %r3, %r4, %r5}], [%r6], %rs1, %rd2"),
           "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1, %r2}], [%r3]",
           ("cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], "
            "[%rd1, {%r2, %r3, %r4}], [%r5], {%rs1}"),
           "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3, %r4, %r5, %r6}, %p1",
           "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3]",
           "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r3], 2",
           "tcgen05.cp.cta_group::2.64x128b.warpx2::02_13 [%r1], %rd1",
           "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, %p1, 1, -1, 0, 1",
           "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
           "griddepcontrol.wait",
       }) {
    EXPECT_EQ(last(text + ";"), text);
  }
}

TEST(PtxInstruction, LayoutDoesNotMatter) {
  EXPECT_EQ(last("@ ! %p1 tcgen05.ld.sync.aligned.32x32b.x2.b32{%r1,\n%r2},[ %r3 + 4 ] ;"),
            "@!%p1 tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3+4]");
  EXPECT_EQ(last("mov .b32 %r1 , /* a\n b */ %r2 // c\n ;"), "mov.b32 %r1, %r2");
  EXPECT_EQ(last("mov.b32 %r1, \\\r\n %r2;"), "mov.b32 %r1, %r2");
  EXPECT_EQ(last("ld.global.u32%r1,[%rd1-8];"), "ld.global.u32 %r1, [%rd1+-8]");
}

TEST(PtxInstruction, ModifiersKeepTheirOrderAndTheirColons) {
  const Function f = parsed_body(
      ".reg .b32 %r<9>; stmatrix.sync.aligned.x4.trans.m8n8.shared::cta.b16 [%r1], {%r2,%r3,%r4,%r5};\n"
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %r2;");
  ASSERT_EQ(f.instructions.size(), 2u);
  const Instruction& store = f.instructions[0];
  EXPECT_EQ(store.opcode, "stmatrix");
  EXPECT_EQ(store.modifiers,
            (std::vector<std::string>{"sync", "aligned", "x4", "trans", "m8n8", "shared::cta", "b16"}));
  EXPECT_TRUE(store.has("trans"));
  EXPECT_FALSE(store.has("shared"));
  EXPECT_EQ(store.full_name(), "stmatrix.sync.aligned.x4.trans.m8n8.shared::cta.b16");
  EXPECT_EQ(f.instructions[1].modifiers, (std::vector<std::string>{"commit", "cta_group::2", "mbarrier::arrive::one",
                                                                   "shared::cluster", "multicast::cluster", "b64"}));
}

TEST(PtxInstruction, KindsOfOperands) {
  const Function f =
      parsed_body(std::string(kRegisters) + "mov.u64 %rd1, memory+8; ld.shared.u32 %r1, [memory+12]; ret;");
  const Operand& symbol = f.instructions[0].operands[1];
  EXPECT_EQ(symbol.kind, Operand::Kind::symbol);
  EXPECT_EQ(symbol.bits, 8u);
  EXPECT_EQ(f.symbols.at(symbol.symbol).name, "memory");
  const Operand& address = f.instructions[1].operands[1];
  EXPECT_EQ(address.kind, Operand::Kind::address);
  EXPECT_EQ(address.bits, 12u);
  ASSERT_EQ(address.parts.size(), 1u);
  EXPECT_EQ(address.parts[0].kind, Operand::Kind::symbol);
  EXPECT_EQ(address.parts[0].bits, 0u);
  EXPECT_EQ(f.instructions[0].guard, -1);
}

uint64_t bits_of_constant(const std::string& constant) {
  const Function f = parsed_body(".reg .b64 a; mov.b64 a, " + constant + ";");
  return f.instructions.empty() ? 0 : f.instructions[0].operands.at(1).bits;
}

TEST(PtxConstant, Integers) {
  const std::pair<const char*, uint64_t> cases[] = {
      {"0", 0},
      {"42", 42},
      {"-1", ~uint64_t{0}},
      {"0x1F", 31},
      {"0XfFu", 255},
      {"0xFF00U", 0xFF00},
      {"017", 15},
      {"0b101", 5},
      {"18446744073709551615", ~uint64_t{0}},
      {"1297036692682702848", 0x1200000000000000},
      {"-9223372036854775808", uint64_t{1} << 63},
      {"WARP_SZ", 32},
      {"4*8", 32},
      {"4 * (8 - 1) + 1", 29},
      {"1 << 3 | 1", 9},
      {"-7 / 2", static_cast<uint64_t>(-3)},
      {"-7 % 2", static_cast<uint64_t>(-1)},
      {"-8 >> 1", static_cast<uint64_t>(-4)},
      {"-8U >> 60", 15},
      {"~0 ^ 1", ~uint64_t{1}},
      {"0 + !5 + !0", 1},
      {"2 < 3 ? 10 : 20", 10},
      {"-1 < 0U ? 10 : 20", 20},
      {"1 == 2 || 3 != 4 && 1", 1},
      {"(.u64) -1 > 5", 1},
      {"-9223372036854775808 / -1", uint64_t{1} << 63},
  };
  for (const auto& [text, bits] : cases) EXPECT_EQ(bits_of_constant(text), bits) << text;
}

TEST(PtxConstant, Reals) {
  const auto real = [](const std::string& text) {
    const Function f = parsed_body(".reg .f64 a; mov.f64 a, " + text + ";");
    return f.instructions.at(0).operands.at(1);
  };
  const Operand one = real("0f3F800000");
  EXPECT_EQ(one.kind, Operand::Kind::real);
  EXPECT_TRUE(one.is_f32);
  EXPECT_EQ(one.bits, 0x3F800000u);
  EXPECT_EQ(real("0FFf800000").bits, 0xFF800000u);
  EXPECT_EQ(real("-0f3F800000").bits, 0xBF800000u);
  const std::pair<const char*, double> doubles[] = {
      {"0d3FF0000000000000", 1.0}, {"1.5", 1.5},       {"2.", 2.0}, {"1e3", 1000.0},
      {"0.25E-2", 0.0025},         {"-1.0e+2", -100.0}};
  for (const auto& [text, value] : doubles) {
    const Operand operand = real(text);
    EXPECT_EQ(operand.kind, Operand::Kind::real) << text;
    EXPECT_FALSE(operand.is_f32) << text;
    EXPECT_EQ(std::bit_cast<double>(operand.bits), value) << text;
  }
}

TEST(PtxInstruction, LocationIsTheLastLocAndTheLineOfTheText) {
  const Module module = parsed(with_preamble(
      ".entry f() { .reg .pred p;\n ret;\n .loc 7 20 3\n ret;\n .loc 3 419 3, function_name $L__info_string0+4, "
      "inlined_at 7 4 3\n @p\n ret;\n}\n.entry g() { ret; }\n .file 7 \"a.cu\"\n.file 3 \"b c.cuh\", 1700000000, 99\n"
      ".entry h() { .loc 5 1 1 ret; }"));
  EXPECT_EQ(module.files, (std::vector<std::string>{"a.cu", "b c.cuh"}));
  const auto expect = [](const Instruction& instruction, int32_t ptx_line, int32_t file, int32_t line) {
    EXPECT_EQ(instruction.location.ptx_line, ptx_line);
    EXPECT_EQ(instruction.location.file, file);
    EXPECT_EQ(instruction.location.line, line);
  };
  const Function& f = *module.find("f");
  ASSERT_EQ(f.instructions.size(), 3u);
  expect(f.instructions[0], 3, -1, 0);
  expect(f.instructions[1], 5, 0, 20);
  expect(f.instructions[2], 8, 1, 419);
  expect(module.find("g")->instructions.at(0), 10, -1, 0);
  expect(module.find("h")->instructions.at(0), 13, -1, 1);  // a file that is not named
}

TEST(PtxInstruction, InlinedFunctionsAreCalledByTheirNames) {
  const std::pair<std::string, std::string> names[] = {
      {"_Z4loadi", "load"},
      {"_ZNK1W5storeEv", "W::store"},                       // W::store() const
      {"_ZNK1WILi3EE5storeILi2EEEvRf", "W::store"},         // void W<3>::store<2>(float&) const
      {"_ZZNK1W5storeEvENKUliE_clEi", "W::store::lambda"},  // W::store() const::{lambda(int)#1}::operator()(int) const
  };
  for (const auto& [mangled, name] : names) {
    std::string bytes;
    for (const char c : mangled) bytes += std::to_string(static_cast<int>(c)) + ",";
    const Module module = parsed(with_preamble(
        ".entry f() {\n .loc 1 1 0\n ret;\n .loc 1 5 0, function_name $L__info_string0, inlined_at 1 1 0\n ret;\n}\n"
        ".file 1 \"a.cu\"\n.section .debug_str\n{\n$L__info_string0:\n.b8 " +
        bytes + "0\n}"));
    ASSERT_EQ(module.inlinings.size(), 1u);
    EXPECT_EQ(module.inlinings[0].function, name) << mangled;
  }
}

}  // namespace
}  // namespace tandem::test
