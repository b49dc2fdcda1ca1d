// Runs this program again in a separate process, for results that depend on its environment.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/text.h"
#include "vgpu/tests/instructions/bench.h"

namespace tandem::test {

// A file that is deleted with the object.
struct TemporaryFile {
  const std::string path = str_cat(testing::TempDir(), "tandem_instructions_", getpid(), "_", number()++, ".txt");

  TemporaryFile() = default;
  TemporaryFile(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path); }

  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }

 private:
  static int& number() {
    static int next = 0;
    return next;
  }
};

// Runs the tests of a filter and returns whether they passed. variables: "NAME='value' ...".
inline bool run_self(const std::string& variables, const std::string& filter) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  return std::system(
             str_cat(variables, " '", self, "' --gtest_brief=1 --gtest_filter='", filter, "' > /dev/null").c_str()) ==
         0;
}

// Returns the launches of all tests: see kListVariable.
inline std::vector<std::string> listed() {
  const TemporaryFile list;
  EXPECT_TRUE(run_self(str_cat(kListVariable, "='", list.path, "'"), "-Coverage.*:Recorded.*"));
  return list.lines();
}

}  // namespace tandem::test
