// A kernel of Tandem under test: compiled from possibly changed sources, run on the virtual GPU for a small problem.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "jit/sources.h"
#include "plan/plan.h"
#include "support/case.h"
#include "support/instance.h"
#include "vgpu/src/device.h"

namespace tandem::test {

// A finding of the checker or the machine.
struct Found {
  std::string rule;
  std::string text;                          // the whole report
  std::set<std::pair<std::string, int>> at;  // source lines of both accesses and of their calls
  bool warning = false;
};

struct Trial {
  std::vector<Found> found;
  std::string failure;  // failure of the call or of its result; empty: none
};

class Subject {
 public:
  // flags: a Case; its backward is run if it has gradients. blocks: the limit of the main kernel's grid, so that each
  // block has several tiles.
  Subject(std::string flags, int blocks, std::string device = "vgpu:h200");

  // Compiles the plan's kernels from these sources to PTX. A kernel that includes only unchanged texts of
  // jit::kernels() is compiled once.
  Status compile(jit::Sources sources, std::vector<std::string>* ptx) const;
  // The n-th schedule with the n-th placement of blocks, on one host thread. The tiles of each block, and so the
  // findings, must not depend on the machine. judges: compares the result with the reference's after a successful call.
  Trial run(const std::vector<std::string>& ptx, int n, bool judges) const;

  // Returns the lines of the PTX with this entry whose instructions some thread executes.
  std::set<int> executed(const std::vector<std::string>& ptx, const char* entry) const;

 private:
  std::unique_ptr<gpu::Device> open(vgpu::Options options) const;
  std::unique_ptr<Instance> instance() const;
  Status launch(const Problem& problem, const std::vector<std::string>& ptx, vgpu::Options options) const;

  const std::string device_;
  const Case case_;
  const tandem_pass pass_;
  const int blocks_;
  plan::Plan plan_;
  mutable std::map<size_t, std::string> unchanged_;  // PTX of unchanged sources, by the kernel's index in the plan
};

// The kernels' sources with one text replaced.
class Changed {
 public:
  explicit Changed(jit::Sources sources) : texts_(sources.begin(), sources.end()) {}
  // Replaces the first `from` after `behind` (anywhere if it is empty). Returns a sentence if no such text exists, or
  // several.
  std::string replace(const std::string& file, const std::string& behind, const std::string& from,
                      const std::string& to);
  jit::Sources sources() const { return texts_; }
  // Returns the text of a line. file: the compiler's name of the file.
  std::string line(const std::string& file, int number) const;

 private:
  std::vector<jit::Text> texts_;
  std::map<std::string, std::string> changed_;  // storage for texts_
};

// Tests are skipped if no compiler is available.
class CompilerTest : public testing::Test {
 protected:
  void SetUp() override;
};

}  // namespace tandem::test
