// Links texts of relocatable device code to one text that parses.
#include "vgpu/src/ptx/link.h"

#include <gtest/gtest.h>

#include "vgpu/src/ptx/inlining.h"
#include "vgpu/src/ptx/module.h"
#include "vgpu/src/ptx/parser.h"

namespace tandem::vgpu::ptx {
namespace {

const std::string kHeader = ".version 9.0\n.target sm_90a\n.address_size 64\n";

Module parsed(const std::vector<std::string>& texts) {
  std::string linked;
  Status status = link(texts, &linked);
  EXPECT_TRUE(status.ok()) << status.message;
  Module module;
  status = parse(linked, &module);
  EXPECT_TRUE(status.ok()) << status.message << "\n" << linked;
  return module;
}

int count_variables(const Module& module, const std::string& name) {
  int count = 0;
  for (const Symbol& v : module.variables) count += v.name == name && !v.is_extern;
  return count;
}

const std::string kFirst = kHeader + R"(
.extern .func (.param .b32 result) other (.param .b32 x);  // the other text defines it
.extern .global .align 4 .u32 bias;
.extern .shared .align 16 .b8 dynamic[];
.global .align 4 .u32 mine = 5;
.global .align 1 .b8 $str[4] = {37, 100, 59, 0};
.weak .global .align 4 .u32 inlined = 8;
.func (.param .b32 result) local (.param .b32 x) { .reg .b32 %r<2>; ld.param.b32 %r1, [x]; st.param.b32 [result], %r1; ret; }
.weak .func (.param .b32 result) shared_inline (.param .b32 x) { .reg .b32 %r<2>; mov.b32 %r1, 1; st.param.b32 [result], %r1; ret; }
.visible .entry first(.param .u64 out) .maxntid 128, 1, 1
{
  .reg .b32 %r<4>; .reg .b64 %rd<2>;
  ld.global.u32 %r1, [bias]; ld.global.u32 %r2, [mine]; mov.u64 %rd1, $str;
  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call.uni (b), other, (a); ld.param.b32 %r3, [b]; }
  { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call.uni (b), local, (a); ld.param.b32 %r3, [b]; }
  ret;
}
)";
const std::string kSecond = kHeader + R"(
.visible .global .align 4 .u32 bias = 11;
.extern .shared .align 16 .b8 dynamic[];
.global .align 4 .u32 mine = 7;
.global .align 1 .b8 $str[3] = {37, 117, 0};
.weak .global .align 4 .u32 inlined = 8;
.weak .func (.param .b32 result) shared_inline (.param .b32 x) { .reg .b32 %r<2>; mov.b32 %r1, 1; st.param.b32 [result], %r1; ret; }
.func (.param .b32 result) local (.param .b32 x) { .reg .b32 %r<2>; ld.global.b32 %r1, [mine]; st.param.b32 [result], %r1; ret; }
.visible .func (.param .b32 result) other (.param .b32 x) { .reg .b32 %r<2>; .reg .b64 %rd<2>; mov.u64 %rd1, $str; mov.b32 %r1, 1; st.param.b32 [result], %r1; ret; }
.visible .entry second() { ret; }
)";

TEST(Link, DefinitionsMeetDeclarations) {
  for (const bool swapped : {false, true}) {
    const Module module = swapped ? parsed({kSecond, kFirst}) : parsed({kFirst, kSecond});
    for (const char* name : {"first", "second", "other", "shared_inline"}) {
      const Function* const function = module.find(name);
      ASSERT_NE(function, nullptr) << name;
      EXPECT_TRUE(function->has_body) << name;
    }
    EXPECT_EQ(count_variables(module, "bias"), 1);
    EXPECT_EQ(count_variables(module, "inlined"), 1);
    EXPECT_EQ(count_variables(module, "mine$0") + count_variables(module, "mine$1"), 2);
    EXPECT_EQ(count_variables(module, "$str$0") + count_variables(module, "$str$1"), 2);
    EXPECT_NE(module.find("local$0"), nullptr);
    EXPECT_NE(module.find("local$1"), nullptr);
  }
}

TEST(Link, OneTextStaysAsItIs) {
  const Module module = parsed({kSecond});
  EXPECT_EQ(count_variables(module, "mine"), 1);
  EXPECT_NE(module.find("local"), nullptr);
}

TEST(Link, TwoDefinitionsAreRefused) {
  std::string linked;
  const Status status = link({kSecond, kSecond}, &linked);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(status.message.find("\"bias\" must be defined in one"), std::string::npos) << status.message;
  EXPECT_FALSE(link({kHeader + ".visible .entry k() { ret;"}, &linked).ok());
}

TEST(Link, FilesKeepTheirLines) {
  const auto text = [](const std::string& name) {
    return kHeader + ".visible .entry " + name + "()\n{\n.loc 1 7 3\nret;\n}\n.file 1 \"" + name + ".cu\"\n";
  };
  const Module module = parsed({text("a"), text("b")});
  for (const std::string name : {"a", "b"}) {
    const Function* const function = module.find(name);
    ASSERT_NE(function, nullptr);
    const Location& at = function->instructions.back().location;
    EXPECT_EQ(at.line, 7);
    EXPECT_NE(place_text(module, at).find(name + ".cu:7"), std::string::npos) << place_text(module, at);
  }
}

}  // namespace
}  // namespace tandem::vgpu::ptx
