// Runs kernels with one line wrong: for each mutation of mutations.txt the right rule must report the right line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

#include "base/text.h"
#include "vgpu/tests/mutation/subject.h"

namespace tandem::test {
namespace {

constexpr const char* kWrongResult = "wrong-result";

struct Expected {
  std::string rule, line;  // a part of the source line of one of the two accesses
};

struct Mutation {
  std::string name, file, of, behind, from, to;  // member `of`: the flags of the case
  std::vector<Expected> caught;                  // one of these must be found
};

struct Catalogue {
  std::map<std::string, std::unique_ptr<Subject>> subjects;
  std::vector<Mutation> mutations;
};

// Reads "key: value" lines. "-text" is replaced by "+text". An empty line ends a mutation.
Catalogue read(const char* path) {
  Catalogue all;
  std::string device = "vgpu:h200";
  std::ifstream file(path);
  Mutation now;
  const auto end = [&] {
    if (!now.name.empty()) all.mutations.push_back(now);
    now = Mutation();
  };
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("#")) continue;
    if (line.empty()) {
      end();
      continue;
    }
    if (line[0] == '-') {
      now.from += str_cat(now.from.empty() ? "" : "\n", line.substr(1));
      continue;
    }
    if (line[0] == '+') {
      now.to += str_cat(now.to.empty() ? "" : "\n", line.substr(1));
      continue;
    }
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) throw std::runtime_error("no \"key: value\": " + line);
    const std::string key = line.substr(0, colon), value = line.substr(colon + 2);
    if (key == "device") {
      device = value;
    } else if (key.starts_with("case ")) {
      const size_t bar = value.find(" | blocks ");
      all.subjects[key.substr(5)] =
          std::make_unique<Subject>(value.substr(0, bar), std::stoi(value.substr(bar + 10)), device);
    } else if (key == "mutation") {
      now.name = value;
    } else if (key == "in") {
      now.file = value;
    } else if (key == "of") {
      now.of = value;
    } else if (key == "behind") {
      now.behind = value;
    } else if (key == "caught") {
      const size_t at = value.find(" at ");
      now.caught.push_back({value.substr(0, at), at == std::string::npos ? "" : value.substr(at + 4)});
      if (at == std::string::npos && value != kWrongResult) throw std::runtime_error("at which line? " + line);
    } else {
      throw std::runtime_error("unknown key: " + line);
    }
  }
  end();
  return all;
}

// Returns the expected finding that the trial has.
std::optional<std::string> caught_by(const Mutation& mutation, const Changed& changed, const Trial& trial) {
  for (const Expected& expected : mutation.caught) {
    if (expected.rule == kWrongResult && trial.found.empty() && !trial.failure.empty()) return kWrongResult;
    for (const Found& found : trial.found) {
      if (found.rule != expected.rule) continue;
      for (const auto& [file, line] : found.at)
        if (changed.line(file, line).find(expected.line) != std::string::npos)
          return found.rule + " at " + file + ":" + std::to_string(line);
    }
  }
  return std::nullopt;
}

std::string text_of(const Trial& trial) {
  std::string text = trial.failure.empty() ? "" : trial.failure.substr(0, 300) + "\n";
  for (const Found& found : trial.found) text += found.text;
  return text.empty() ? "nothing was found\n" : text;
}

// Each file with its least number of mutations.
const std::pair<const char*, size_t> kLists[] = {{TANDEM_MUTATIONS, 40},
                                                 {TANDEM_BACKWARD_MUTATIONS, 40},
                                                 {TANDEM_STRIPS_MUTATIONS, 30},
                                                 {TANDEM_BLACKWELL_MUTATIONS, 25},
                                                 {TANDEM_BLACKWELL_BACKWARD_MUTATIONS, 35}};

// Needs no compiler, so that a changed kernel shows at once which mutations must follow.
TEST(MutationTexts, ExistInTheKernels) {
  for (const auto& [path, least] : kLists) {
    const Catalogue all = read(path);
    EXPECT_GE(all.mutations.size(), least) << path;
    for (const Mutation& mutation : all.mutations)
      EXPECT_EQ(Changed(jit::kernels()).replace(mutation.file, mutation.behind, mutation.from, mutation.to), "")
          << mutation.name;
  }
}

class Mutations : public CompilerTest {};

// Without a mutation the cases must be right. Otherwise the reference would find every mutation.
void expect_right_cases(const Catalogue& all) {
  std::set<std::string> judged;
  for (const Mutation& mutation : all.mutations)
    for (const Expected& expected : mutation.caught)
      if (expected.rule == kWrongResult) judged.insert(mutation.of);
  for (const std::string& name : judged) {
    const Subject& subject = *all.subjects.at(name);
    std::vector<std::string> ptx;
    const Status compiled = subject.compile(Changed(jit::kernels()).sources(), &ptx);
    ASSERT_TRUE(compiled.ok()) << name << ": " << compiled.message;
    const Trial trial = subject.run(ptx, 0, true);
    EXPECT_TRUE(trial.found.empty() && trial.failure.empty()) << "case " << name << "\n" << text_of(trial);
  }
}

void expect_caught(const char* path, size_t most = SIZE_MAX) {
  Catalogue all = read(path);
  all.mutations.resize(std::min(most, all.mutations.size()));
  expect_right_cases(all);
  constexpr int kSchedules = 8;  // each with another placement of blocks
  for (const Mutation& mutation : all.mutations) {
    const Subject& subject = *all.subjects.at(mutation.of);
    Changed changed(jit::kernels());
    const std::string missing = changed.replace(mutation.file, mutation.behind, mutation.from, mutation.to);
    ASSERT_EQ(missing, "") << mutation.name;
    std::vector<std::string> ptx;
    std::string last;
    const Status compiled = subject.compile(changed.sources(), &ptx);
    ASSERT_TRUE(compiled.ok()) << mutation.name << ": " << compiled.message;
    std::optional<std::string> caught;
    bool by_result = false;
    for (const Expected& expected : mutation.caught) by_result |= expected.rule == kWrongResult;
    int schedule = 0;
    for (; schedule < kSchedules && !caught; ++schedule) {
      const Trial trial = subject.run(ptx, schedule, by_result);
      caught = caught_by(mutation, changed, trial);
      last = text_of(trial);
    }
    EXPECT_TRUE(caught) << mutation.name << "\n" << last;
    std::printf("%-72s schedule %d  %s\n", mutation.name.c_str(), schedule - 1, caught.value_or("NOT CAUGHT").c_str());
    std::fflush(stdout);
  }
}

TEST_F(Mutations, TheFirstIsCaught) { expect_caught(TANDEM_MUTATIONS, 1); }
TEST_F(Mutations, EachIsCaught) { expect_caught(TANDEM_MUTATIONS); }
TEST_F(Mutations, EachOfHoppersBackwardIsCaught) { expect_caught(TANDEM_BACKWARD_MUTATIONS); }
TEST_F(Mutations, EachOfHoppersStripsIsCaught) { expect_caught(TANDEM_STRIPS_MUTATIONS); }
TEST_F(Mutations, EachOfBlackwellIsCaught) { expect_caught(TANDEM_BLACKWELL_MUTATIONS); }
TEST_F(Mutations, EachOfTheBlackwellBackwardIsCaught) { expect_caught(TANDEM_BLACKWELL_BACKWARD_MUTATIONS); }

}  // namespace
}  // namespace tandem::test
