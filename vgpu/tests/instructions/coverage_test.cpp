// Checks that each instruction has a test in this folder: all opcodes that the machine executes, and all forms that
// known kernels use (forms.txt). A separate process lists the launches of the tests.
#include <fstream>
#include <set>

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/tests/instructions/child.h"

namespace tandem::test {
namespace {

TEST(Coverage, EveryOpcodeAndForm) {
  const std::vector<std::string> list = listed();
  const std::set<std::string> forms(list.begin(), list.end());
  std::set<std::string> opcodes;
  for (const std::string& form : forms) opcodes.insert(form.substr(0, form.find('.')));
  for (const auto& families : vgpu::machine::all_families())
    for (const auto& family : families)
      EXPECT_TRUE(opcodes.contains(family.opcode)) << family.opcode << " is executed and has no test here";

  std::ifstream known(TANDEM_FORMS);
  int count = 0;
  for (std::string line; std::getline(known, line); ++count)
    EXPECT_TRUE(forms.contains(in_order(line))) << line << " has no test here";
  EXPECT_GT(count, 200);
}

}  // namespace
}  // namespace tandem::test
