// Each fence, wait, commit, arrive and expect_tx of a kernel's PTX left out in turn. What goes unnoticed is listed in
// survivors/, with the reason.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "problem/text.h"
#include "vgpu/mutation/subject.h"
#include "vgpu/ptx/parser.h"

namespace tandem::test {
namespace {

struct Survivor {
  std::string instruction, line;  // parts of its name, and of a source line that it comes from
  int most = 1;                   // copies of it: the compiler unrolls loops
};

// "mbarrier.try_wait at mbarrier_wait(&s.k_empty", or the same behind "3 x "; the reason is indented.
std::vector<Survivor> read(const char* path) {
  std::vector<Survivor> all;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.starts_with("#") || line.starts_with(" ")) continue;
    Survivor survivor;
    if (const size_t times = line.find(" x "); times < 3) {
      survivor.most = std::stoi(line);
      line = line.substr(times + 3);
    }
    const size_t at = line.find(" at ");
    survivor.instruction = line.substr(0, at);
    survivor.line = line.substr(at + 4);
    all.push_back(survivor);
  }
  return all;
}

bool orders(const vgpu::ptx::Instruction& i) {
  if (i.opcode == "fence" || i.opcode == "bar" || i.opcode == "barrier" || i.opcode == "setmaxnreg") return true;
  if (i.opcode == "mbarrier") return !i.has("init");
  if (i.opcode == "wgmma") return !i.has("mma_async");
  return i.opcode == "cp" && (i.has("commit_group") || i.has("wait_group"));
}

// Without the instruction; a wait passes at once.
std::string without(const std::string& ptx, const vgpu::ptx::Instruction& instruction) {
  size_t begin = 0;
  for (int line = 1; line < instruction.location.ptx_line; ++line) begin = ptx.find('\n', begin) + 1;
  const size_t end = ptx.find('\n', begin);
  const std::string line = ptx.substr(begin, end - begin);
  const size_t name = line.find(instruction.opcode + ".");
  std::string instead = line.substr(0, name);  // a label, or a guard
  if (instruction.has("try_wait")) {
    const size_t predicate = line.find_first_not_of(" \t", line.find_first_of(" \t", name));
    instead += "setp.eq.u32 " + line.substr(predicate, line.find(',') - predicate) + ", 0, 0;";
  } else {
    instead += "membar.cta;";
    instead = instruction.guard >= 0 ? "" : instead.substr(0, instead.size() - 11);
  }
  return ptx.substr(0, begin) + instead + ptx.substr(end);
}

// Source lines of an instruction and of the calls that it is inlined from, from the outermost on.
std::vector<std::string> lines_of(const vgpu::ptx::Module& module, const vgpu::ptx::Location& at,
                                  const Changed& sources) {
  std::vector<std::string> lines;
  const auto add = [&](int32_t file, int32_t line) {
    if (file >= 0) lines.insert(lines.begin(), sources.line(module.files[static_cast<size_t>(file)], line));
  };
  add(at.file, at.line);
  for (int32_t i = at.inlining; i >= 0; i = module.inlinings[static_cast<size_t>(i)].outer)
    add(module.inlinings[static_cast<size_t>(i)].file, module.inlinings[static_cast<size_t>(i)].line);
  return lines;
}

std::string trimmed(const std::string& line) {
  const size_t first = line.find_first_not_of(' ');
  return first == std::string::npos ? "" : line.substr(first);
}

// Whether something is found, or the result is wrong, under one of a few schedules.
bool is_caught(const std::vector<Subject>& subjects, const std::string& ptx) {
  constexpr int kSchedules = 6;
  for (int n = 0; n < kSchedules; ++n) {
    for (const Subject& subject : subjects) {
      const Trial trial = subject.run(ptx, vgpu::Schedule::nth(n), n == kSchedules - 1);
      if (!trial.found.empty() || !trial.failure.empty()) return true;
    }
  }
  return false;
}

// subjects: problems that one kernel serves; between them they are to execute nearly all of it.
void expect_survivors(const char* name, const std::vector<Subject>& subjects, const char* listed) {
  const std::vector<Survivor> known = read(listed);
  std::vector<int> met(known.size());
  const Changed sources(jit::kernels());
  std::string ptx;
  const Status compiled = subjects[0].compile(sources.sources(), &ptx);
  ASSERT_TRUE(compiled.ok()) << compiled.message;
  vgpu::ptx::Module module;
  ASSERT_TRUE(vgpu::ptx::parse(ptx, &module).ok());
  std::set<int> executed;
  for (const Subject& subject : subjects) executed.merge(subject.executed(ptx));
  int all = 0, survived = 0, idle = 0;
  for (const vgpu::ptx::Instruction& instruction : module.find("forward")->instructions) {
    if (!orders(instruction)) continue;
    ++all;
    if (!executed.contains(instruction.location.ptx_line)) {
      ++idle;
      std::printf("%s: PTX line %d is not executed: %s\n", name, instruction.location.ptx_line,
                  instruction.full_name().c_str());
      continue;
    }
    if (is_caught(subjects, without(ptx, instruction))) continue;
    ++survived;
    bool listed_here = false;
    const std::vector<std::string> lines = lines_of(module, instruction.location, sources);
    for (size_t i = 0; i < known.size(); ++i) {
      if (instruction.full_name().find(known[i].instruction) == std::string::npos) continue;
      const auto says = [&](const std::string& line) { return line.find(known[i].line) != std::string::npos; };
      if (!std::any_of(lines.begin(), lines.end(), says)) continue;
      ++met[i];
      listed_here = true;
    }
    std::printf("%s: PTX line %d survives: %s\n", name, instruction.location.ptx_line, instruction.full_name().c_str());
    for (const std::string& line : lines) std::printf("    %s\n", trimmed(line).c_str());
    EXPECT_TRUE(listed_here) << "a survivor that " << listed << " does not explain";
  }
  for (size_t i = 0; i < known.size(); ++i) {
    EXPECT_GT(met[i], 0) << known[i].instruction << " at " << known[i].line << " no longer survives: " << listed;
    EXPECT_LE(met[i], known[i].most) << known[i].instruction << " at " << known[i].line << ": " << listed;
  }
  std::printf("%s: %d instructions left out in turn, %d unnoticed; %d more that this problem does not execute\n", name,
              all - idle, survived, idle);
  EXPECT_GT(all - idle, 50);
  EXPECT_LE(10 * idle, all);
}

class Deletion : public CompilerTest {};

TEST_F(Deletion, OfAForwardKernel) {
  std::vector<Subject> subjects;
  for (const char* flags : {"--seqlen-q 280 --seqlen-k 300", "--seqlen-q 280 --seqlen-k 800",
                            "--seqlen-q 280 --seqlen-k 500 --values large"})
    subjects.emplace_back(
        say("--dtype bf16 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 2 --heads-k 1 ", flags), 1);
  expect_survivors("causal", subjects, TANDEM_SURVIVORS "/causal.txt");
}

}  // namespace
}  // namespace tandem::test
