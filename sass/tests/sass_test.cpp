#include "sass/src/sass.h"

#include <gtest/gtest.h>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

TEST(MachineCodeSass, TakesInstructionsApart) {
  const std::vector<Instruction> code = code_of({"LDC R1, c[0x0][0x37c]", "@!UP0 UIADD3 UR4, UPT, UPT, UR5, -0x1, URZ",
                                                 "@PT LDS.64 R4, [R49+0x14c]", "LDTM.x16 R20, tmem[UR4+0x100]", "NOP"});
  ASSERT_EQ(code.size(), 5u);
  EXPECT_EQ(code[0].base(), "LDC");
  EXPECT_EQ(code[0].operands, (std::vector<std::string>{"R1", "c[0x0][0x37c]"}));
  EXPECT_EQ(code[1].guard, "!UP0");
  EXPECT_EQ(code[1].address, 0x10u);
  EXPECT_EQ(code[1].operands.size(), 6u);
  EXPECT_EQ(code[2].guard, "");
  EXPECT_TRUE(code[2].has("64"));
  EXPECT_FALSE(code[2].has("6"));
  EXPECT_EQ(code[3].base(), "LDTM");
  EXPECT_EQ(code[3].operands[1], "tmem[UR4+0x100]");
  EXPECT_TRUE(code[4].operands.empty());
}

// Output of nvdisasm -hex: a barrier test that sets scoreboard 2, a comparison that does not wait, and the exit that
// waits for the scoreboard.
TEST(MachineCodeSass, ReadsControl) {
  Cubin cubin;
  const Status status = parse(
      "\t.target\tsm_90a\n\t.section\t.text.forward,\"ax\",@progbits\n"
      "        /*32b0*/   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR10], R24 ;   /* 0x00000018ff0075a7 */\n"
      "                                                                       /* 0x000ea2000802014a */\n"
      "        /*32c0*/   ISETP.NE.AND P0, PT, R25, RZ, PT ;                 /* 0x000000ff1900720c */\n"
      "                                                                       /* 0x002fda0003f05270 */\n"
      "        /*32d0*/   @!P1 EXIT ;                                         /* 0x0000007400889947 */\n"
      "                                                                       /* 0x004fd80003800000 */\n",
      &cubin);
  ASSERT_TRUE(status.ok()) << status.message;
  const std::vector<Instruction>& code = cubin.kernels[0].code;
  ASSERT_EQ(code.size(), 3u);
  EXPECT_EQ(code[0].control, (Control{.stall = 1, .yields = false, .write_barrier = 2}));
  EXPECT_EQ(code[1].control, (Control{.stall = 13, .yields = true, .waits = 1 << 1}));
  EXPECT_EQ(code[2].control, (Control{.stall = 12, .yields = true, .waits = 1 << 2}));
  EXPECT_EQ(control_of(uint64_t{0x25} << 49),
            (Control{.yields = true, .write_barrier = 0, .read_barrier = 5, .waits = 4}));
  EXPECT_FALSE(code_of({"NOP"})[0].control);
}

TEST(MachineCodeSass, FindsTargetsOfBranches) {
  const std::vector<Instruction> code =
      code_of({".L_x_0:", "@!P3 BRA !P1, `(.L_x_1)", "BRX R2 -0x8f0  (*\"BRANCH_TARGETS .L_x_0,.L_x_1\"*)",
               "CALL.REL.NOINC `($__internal_0)", ".L_x_1:", "EXIT"});
  ASSERT_EQ(code.size(), 4u);
  EXPECT_EQ(code[0].targets, std::vector<int32_t>{3});
  EXPECT_EQ(code[1].targets, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(code[1].operands, std::vector<std::string>{"R2 -0x8f0"});
  EXPECT_TRUE(code[2].targets.empty());
}

// Attributes as nvdisasm 13.5 prints them.
constexpr const char* kAttributes = R"(	.target	sm_100a

	.section	.nv.info,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_REGCOUNT
	.align		4
.L_1:
        /*0004*/ 	.word	index@(second)
        /*0008*/ 	.word	0x00000080
	//----- nvinfo : EIATTR_MIN_STACK_SIZE
        /*0030*/ 	.byte	0x04, 0x12
        /*0034*/ 	.word	index@(second)
        /*0038*/ 	.word	0x00000010
	//----- nvinfo : EIATTR_REGCOUNT
        /*0044*/ 	.word	index@(first)
        /*0048*/ 	.word	0x00000018
	.section	.nv.info.second,"",@"SHT_CUDA_INFO"
	.sectionflags	@""
	//----- nvinfo : EIATTR_PARAM_CBANK
        /*0b2c*/ 	.word	index@(.nv.constant0.second)
	//----- nvinfo : EIATTR_REQNTID
	.align		4
.L_60:
        /*0b0c*/ 	.byte	0x04, 0x10
        /*0b10*/ 	.word	0x00000040
        /*0b14*/ 	.word	0x00000004
        /*0b18*/ 	.word	0x00000002
	.section	.nv.shared.second,"aw",@nobits
	.sectionflags	@""
	.align	1024
	.zero		1024
	.section	.nv.shared.reserved.0,"aw",@nobits
	.zero		64
)";

TEST(MachineCodeSass, ReadsAttributesOfEachKernel) {
  Cubin cubin;
  const std::string text = kAttributes + code_section("first", {"EXIT"}) + code_section("second", {"NOP", "EXIT"});
  ASSERT_TRUE(parse(text, &cubin).ok());
  EXPECT_EQ(cubin.arch, "sm_100a");
  ASSERT_EQ(cubin.kernels.size(), 2u);
  const Kernel &first = cubin.kernels[0], &second = cubin.kernels[1];
  EXPECT_EQ(first.name, "first");
  EXPECT_EQ(first.registers, 24);
  EXPECT_EQ(first.threads, 0);
  EXPECT_EQ(second.code.size(), 2u);
  EXPECT_EQ(second.registers, 128);
  EXPECT_EQ(second.stack_bytes, 16);
  EXPECT_EQ(second.threads, 64 * 4 * 2);
  EXPECT_EQ(second.shared_bytes, 1024);
}

TEST(MachineCodeSass, RefusesWhatIsNoCode) {
  Cubin cubin;
  EXPECT_FALSE(parse("", &cubin).ok());
  EXPECT_FALSE(parse(kAttributes, &cubin).ok());
  const Status status = parse(listing("sm_90a", {"BRA `(.L_x_9)", "EXIT"}), &cubin);
  EXPECT_EQ(status.code, TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(status.message.find(".L_x_9"), std::string::npos) << status.message;
}

}  // namespace
}  // namespace tandem::machine_code
