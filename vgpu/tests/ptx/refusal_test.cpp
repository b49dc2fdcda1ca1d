// Tests of refusals, with the line and the text.
#include <gtest/gtest.h>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

struct Case {
  std::string text;
  int line;
  std::string says;
};

void expect_refused(const std::string& text, int line, const std::string& says, tandem_status code) {
  Module module;
  const Status status = parse(text, &module);
  EXPECT_EQ(status.code, code) << text << "\n" << status.message;
  EXPECT_TRUE(status.message.starts_with("PTX line " + std::to_string(line) + ": ")) << text << "\n" << status.message;
  EXPECT_NE(status.message.find(says), std::string::npos) << text << "\n" << status.message;
}

// A refusal inside a kernel, whose body begins in line 2.
void expect_body_refused(const std::string& body, int line, const std::string& says) {
  expect_refused(in_kernel(body), line, says, TANDEM_INVALID_ARGUMENT);
}

TEST(PtxRefusal, NoPtx) {
  const Case cases[] = {
      {"", 1, "expected '.version', with which PTX begins, found the end of the text"},
      {"\n\nhello", 3, "found 'hello'"},
      {".version 9.0\n.entry f() { ret; }", 2, "expected '.target', found '.entry'"},
      {".version nine", 1, "expected a version"},
      {".version 9.x .target sm_90", 1, "'9.x' must be a version"},
      {".version 9.0 .target compute_90", 1, "'compute_90' must be a target"},
      {with_preamble("\x01"), 2, "'?' must be a character of PTX"},
      {with_preamble("add.s32 a, b, c;"), 2, "expected a directive, found 'add'"},
      {with_preamble("\n.banana x;"), 3, "'.banana' must be a directive of modules"},
      {with_preamble("/* open"), 2, "this comment must end"},
      {with_preamble(".file 1 \"open\n"), 2, "this string must end"},
      {with_preamble(".section .debug_str { .b8 1"), 2, "this block must end"},
      {with_preamble(".entry f() {\n ret;\n"), 2, "the body that begins here must end with '}'"},
      {with_preamble(".entry f() .fast { ret; }"), 2, "'.fast' must be a directive of a function"},
      {with_preamble(".entry f() { ret; }\n.entry f() { ret; }"), 3, "function 'f' must be defined once"},
      {with_preamble(".func f();\n.entry f() { ret; }"), 3, "'f' must be declared once"},
      {with_preamble(".global .b32 a;\n.global .b32 a;"), 3, "'a' must be declared once"},
      {with_preamble(".func a() { ret; }\n.alias b, a;"), 3, ".alias: 'b' must be a function"},
      {with_preamble(".func f(.param .b32 a,\n.param .b32 a) { ret; }"), 3, "'a' must be declared once in a scope"},
      {with_preamble(".entry f() .maxntid 0 { ret; }"), 2, "the first dimension (0) must be 1 to"},
  };
  for (const Case& c : cases) expect_refused(c.text, c.line, c.says, TANDEM_INVALID_ARGUMENT);
}

TEST(PtxRefusal, Instructions) {
  const std::string registers = ".reg .pred %p<2>; .reg .b32 %r<9>; .reg .f32 x;\n";
  const Case cases[] = {
      {"frobnicate.sync.b32 %r1, %r2;", 3, "'frobnicate.sync.b32' must be an instruction of PTX"},
      {"mov.b32 %r1, %r9;", 3, "'%r9' must be declared"},
      {"mov.b32 %r1, %r01;", 3, "'%r01' must be declared"},
      {"mov.b32 %r1, y;", 3, "'y' must be declared"},
      {"mov.b32 %r1, %tid;", 3, "after a special register that is a vector"},
      {"mov.b32 %r1, %tid.q;", 3, "'%tid' has no component 'q'"},
      {"mov.b32 %r1, %tix.x;", 3, "'%tix' must be declared"},
      {"mov.b32 %r1, %r2", 3, "expected ',' or ';' after an operand of 'mov.b32', found '}'"},
      {"mov.b32 %r1 %r2;", 3, "found '%r2'"},
      {"mov.b32 %r1, ;", 3, "expected an operand, found ';'"},
      {"mov.b32 %r1, {%r2, };", 3, "expected an operand, found '}'"},
      {"mov.b32 %r1, {%r2;", 3, "expected '}', found ';'"},
      {"ld.global.b32 %r1, [%r2;", 3, "expected ']', found ';'"},
      {"ld.global.b32 %r1, [%r2+%r3];", 3, "expected a number, found '%r3'"},
      {"ld.global.b32 %r1, [%r2+1.5];", 3, "whole number of bytes"},
      {"ld.global.b32 %r1, [_];", 3, "an address must begin with"},
      {"ld.global.b32 %r1, [!%p1];", 3, "an address must begin with"},
      {"mov.b32 %r1, [[[[[[%r1]]]]]];", 3, "nested less deeply"},
      {"setp.eq.b32 %p1, !5, !%r1, 0;", 3, "'!' must stand before a predicate register"},
      {"\n@%r1 ret;", 4, "'%r1' guards an instruction and must be a predicate register"},
      {"@%p9 ret;", 3, "'%p9' guards an instruction"},
      {"@%p1 { ret; }", 3, "expected an instruction, found '{'"},
      {"mov.b32 %r1, 99999999999999999999;", 3, "'99999999999999999999' must be a number of at most 64 bits"},
      {"mov.b32 %r1, 08;", 3, "'08' must be a number"},
      {"mov.b32 %r1, 0x;", 3, "'0x' must be a number"},
      {"mov.b32 %r1, 12ab;", 3, "'12ab' must be a number"},
      {"mov.f32 x, 0f3F80;", 3, "'0f3F80' must be a number"},
      {"mov.f32 x, 1e999;", 3, "'1e999' must be a number"},
      {"mov.b32 %r1, 1/0;", 3, "not divide by zero"},
      {"mov.b32 %r1, 1<<64;", 3, "the shift (64)"},
      {"mov.f32 x, 1.0+2;", 3, "must have integers only"},
      {"mov.b32 %r1, (1;", 3, "expected ')', found ';'"},
      {"ret;;", 3, "expected an instruction, a label or a declaration, found ';'"},
      {".banana;", 3, "'.banana' must be a directive of functions"},
      {".loc 1 2;", 3, "expected a number, found ';'"},
      {".loc 1 2 3, outlined_at 1 2 3\n ret;", 3, "expected function_name or inlined_at, found 'outlined_at'"},
  };
  for (const Case& c : cases) expect_body_refused(registers + c.text, c.line, c.says);
}

TEST(PtxRefusal, Names) {
  const Case cases[] = {
      {".reg .b32 a;\n.reg .b64 a;", 3, "'a' must be declared once in a scope"},
      {".reg .b32 %r<4>;\n.reg .b32 %r3;", 3, "'%r3' must be declared once"},
      {".reg .b32 %r<4>;\n.reg .b64 %r<2>;", 3, "'%r' must be declared once"},
      {".shared .b8 a;\n{ .shared .b8 a; }\n.local .b8 a;", 4, "'a' must be declared once"},
      {"L: ret;\nL: ret;", 3, "label 'L' must be placed once in a block"},
      {"ret;\nbra L;", 3, "'L' must be a label of this block"},
      {"bra L; { L: ret; }", 2, "'L' must be a label of this block"},
      {"bra 5;", 2, "expected a label, found '5'"},
      {".reg .b32 r; brx.idx r, L; L: ret;", 2, "'L' must be declared"},
      {".reg .b32 r; T: .branchtargets L, M; L: brx.idx r, T;", 2, "'M' must be a label of this block"},
      {".reg .b32 r; T: .branchtargets L; L: mov.b32 r, T;", 2, "must not be a list of targets"},
      {"call g;", 2, "'g' must be declared"},
      {"call f, (1), (2);", 2, "nothing must follow the arguments of a named function"},
      {"call 5;", 2, "the callee must be a function"},
      {".reg .b64 p; call p, (1);", 2, "a prototype or a list of .calltargets must follow"},
      {".reg .b64 p; call p, (1), f;", 2, "must be a prototype or a list"},
      {".reg .b64 p; T: .calltargets g; call p, T;", 2, "'g' of 'T' must be a function"},
      {".reg .banana a;", 2, "expected a type of a register, found '.banana'"},
      {".shared .pred a;", 2, "expected a type of a variable, found '.pred'"},
      {".shared .b8 a[];", 2, "'a' must have a size"},
      {".shared .b8 a[0];", 2, "elements of an array (0) must be 1 to"},
      {".shared .align 3 .b8 a;", 2, "alignment (3) must be a power of two"},
      {".shared .b8 a = 1;", 2, "must be in .global or .const"},
  };
  for (const Case& c : cases) {
    Case at = c;
    // brx.idx: the missing name is the list's, not a label's.
    if (at.says == "'L' must be declared") at.says = "'L' must be a list of .branchtargets before this instruction";
    expect_body_refused(at.text, at.line, at.says);
  }
}

TEST(PtxRefusal, InitialValues) {
  const Case cases[] = {
      {".global .b32 a[2] = {1, 2, 3};", 2, "'a' must not have more initial values than elements"},
      {".global .b32 a[2][2] = {1, 2};", 2, "expected '{', found '1'"},
      {".global .b32 a = {1};", 2, "expected a number, found '{'"},
      {".global .b32 a = 1.0;", 2, "is a real number, which a variable of type .b32 cannot have"},
      {".global .f32 a = 1;", 2, "is an integer number, which a variable of type .f32 cannot have"},
      {".global .f16 a = 1.0;", 2, "a variable of type .f16 cannot have"},
      {".global .b8 a[] = \"text\";", 2, "expected '{', found 'text'"},
  };
  for (const Case& c : cases) expect_refused(with_preamble(c.text), c.line, c.says, TANDEM_INVALID_ARGUMENT);
}

TEST(PtxRefusal, PtxThatIsNotSupported) {
  const Case cases[] = {
      {with_preamble(".address_size 32"), 2, "addresses of 32 bits"},
      {".version 9.0 .target sm_90, map_f64_to_f32", 1, "'map_f64_to_f32' is not supported"},
      {with_preamble(".global .texref t;"), 2,
       "textures and surfaces are not supported: remove the variable of type .texref"},
      {with_preamble(".global .u64 a[2] = {0, generic(x)};"), 2,
       "an initial value of 'a' is the address of 'x': declare that variable earlier"},
      {with_preamble(".global .b32 x;\n.global .u32 a = x;"), 3, "the address of 'x' and needs a .u64, not a .u32"},
      {with_preamble(".shared .b32 x;\n.global .u64 a = x;"), 3,
       "the address of 'x', which is in .shared memory: compute the address in the kernel"},
      {with_preamble(".reg .b32 x;"), 2, "registers of a module"},
      {with_preamble(".func (.reg .b32 a) f() { ret; }"), 2, "parameters in registers"},
      {with_preamble(".global .attribute(.shiny) .b32 x;"), 2, "attribute 'shiny'"},
      {in_kernel(".global .b32 x;"), 2, ".global variables must be declared outside of functions"},
      {in_kernel(".reg .v4 .b32 x;"), 2, "registers that are vectors"},
      {in_kernel(".reg .b32 x, y; mov.b32 x, y.x;"), 2, "'y.x': parts of a register"},
      {in_kernel(".shared .b32 x[4]; .reg .b32 y; ld.shared.b32 y, x[1];"), 2, "'x' with an index"},
  };
  for (const Case& c : cases) expect_refused(c.text, c.line, c.says, TANDEM_UNSUPPORTED);
}

TEST(PtxRefusal, LeavesTheModuleAlone) {
  Module module = parsed(with_preamble(".entry f() { ret; }"));
  EXPECT_FALSE(parse("nonsense", &module).ok());
  EXPECT_TRUE(module.find("f"));
}

}  // namespace
}  // namespace tandem::test
