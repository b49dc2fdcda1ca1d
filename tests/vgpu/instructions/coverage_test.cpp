// Whether each instruction has a test in this folder: all opcodes that the machine executes, and all forms that known
// kernels use (forms.txt). What the tests launch is listed by a process of its own.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "problem/text.h"
#include "vgpu/instructions/bench.h"
#include "vgpu/machine/decode/builder.h"

namespace tandem::test {
namespace {

std::set<std::string> launched_forms() {
  const std::string list = say(testing::TempDir(), "tandem_instructions_", getpid(), ".txt");
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::filesystem::remove(list);
  const std::string command =
      say(kListVariable, "='", list, "' '", self, "' --gtest_brief=1 --gtest_filter=-Coverage.* > /dev/null");
  EXPECT_EQ(std::system(command.c_str()), 0);
  std::set<std::string> forms;
  std::ifstream file(list);
  for (std::string line; std::getline(file, line);) forms.insert(line);
  std::filesystem::remove(list);
  return forms;
}

TEST(Coverage, EveryOpcodeAndForm) {
  const std::set<std::string> forms = launched_forms();
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
