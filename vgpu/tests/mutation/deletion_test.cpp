// Deletes each fence, wait, commit, arrive and expect_tx of a kernel's PTX in turn. survivors/ lists the deletions that
// no test notices, with the reason. The test takes minutes per kernel and runs when a kernel changes
// (tools/gpu/prove_virtual.sh).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <future>
#include <thread>

#include "base/text.h"
#include "vgpu/src/ptx/parser.h"
#include "vgpu/tests/mutation/subject.h"

namespace tandem::test {
namespace {

struct Survivor {
  std::string instruction, line;  // parts of its name, and of its source line
  int most = 1;                   // copies of the instruction: the compiler unrolls loops
};

// "mbarrier.try_wait at mbarrier_wait(&s.k_empty", or the same after "3 x "; the reason is indented.
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
  if (i.opcode == "tcgen05") return i.has("commit") || i.has("wait") || i.has("fence");
  return i.opcode == "cp" && (i.has("commit_group") || i.has("wait_group"));
}

// Returns the PTX without the instruction. A deleted wait passes at once.
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

// Returns true if one of a few schedules has a finding or a wrong result.
bool is_caught(const std::vector<Subject>& subjects, const std::vector<std::string>& kernels) {
  constexpr int kSchedules = 6;
  for (int n = 0; n < kSchedules; ++n) {
    for (const Subject& subject : subjects) {
      const Trial trial = subject.run(kernels, n, n == kSchedules - 1);
      if (!trial.found.empty() || !trial.failure.empty()) return true;
    }
  }
  return false;
}

// Returns for each of these instructions of the main kernel whether a test notices its deletion. Uses all cores.
std::vector<char> are_caught(const std::vector<Subject>& subjects, const std::vector<std::string>& kernels,
                             const std::vector<const vgpu::ptx::Instruction*>& instructions) {
  std::vector<char> caught(instructions.size());
  std::atomic<size_t> next{0};
  std::vector<std::future<void>> workers;
  for (unsigned n = 0; n < std::max(1u, std::thread::hardware_concurrency()); ++n) {
    workers.push_back(std::async(std::launch::async, [&] {
      std::vector<std::string> changed = kernels;
      for (size_t i; (i = next++) < caught.size();) {
        changed[0] = without(kernels[0], *instructions[i]);
        caught[i] = is_caught(subjects, changed);
      }
    }));
  }
  for (std::future<void>& worker : workers) worker.get();
  return caught;
}

// subjects: problems of one kernel. Together these problems should execute nearly all of the kernel's instructions.
void expect_survivors(const char* name, const std::vector<Subject>& subjects, const char* listed,
                      const char* entry = "forward") {
  const std::vector<Survivor> known = read(listed);
  std::vector<int> met(known.size());
  const Changed sources(jit::kernels());
  std::vector<std::string> kernels;
  const Status compiled = subjects[0].compile(sources.sources(), &kernels);
  ASSERT_TRUE(compiled.ok()) << compiled.message;
  vgpu::ptx::Module module;
  ASSERT_TRUE(vgpu::ptx::parse(kernels[0], &module).ok());
  std::set<int> executed;
  for (const Subject& subject : subjects) executed.merge(subject.executed(kernels, entry));
  std::vector<const vgpu::ptx::Instruction*> all;
  int idle = 0;
  for (const vgpu::ptx::Instruction& instruction : module.find(entry)->instructions) {
    if (!orders(instruction)) continue;
    if (executed.contains(instruction.location.ptx_line)) {
      all.push_back(&instruction);
      continue;
    }
    ++idle;
    std::printf("%s: PTX line %d is not executed: %s\n", name, instruction.location.ptx_line,
                instruction.full_name().c_str());
  }
  const std::vector<char> caught = are_caught(subjects, kernels, all);
  for (size_t n = 0; n < all.size(); ++n) {
    if (caught[n]) continue;
    bool listed_here = false;
    const std::vector<std::string> lines = lines_of(module, all[n]->location, sources);
    for (size_t i = 0; i < known.size(); ++i) {
      if (all[n]->full_name().find(known[i].instruction) == std::string::npos) continue;
      const auto says = [&](const std::string& line) { return line.find(known[i].line) != std::string::npos; };
      if (!std::any_of(lines.begin(), lines.end(), says)) continue;
      ++met[i];
      listed_here = true;
    }
    std::printf("%s: PTX line %d survives: %s\n", name, all[n]->location.ptx_line, all[n]->full_name().c_str());
    for (const std::string& line : lines) std::printf("    %s\n", trimmed(line).c_str());
    EXPECT_TRUE(listed_here) << "a survivor that " << listed << " does not explain";
  }
  for (size_t i = 0; i < known.size(); ++i) {
    EXPECT_GT(met[i], 0) << known[i].instruction << " at " << known[i].line << " no longer survives: " << listed;
    EXPECT_LE(met[i], known[i].most) << known[i].instruction << " at " << known[i].line << ": " << listed;
  }
  std::printf("%s: %zu instructions left out in turn, %td unnoticed; %d more that these problems do not execute\n",
              name, all.size(), std::count(caught.begin(), caught.end(), 0), idle);
  EXPECT_GT(all.size(), 50u);
  EXPECT_LE(10 * static_cast<size_t>(idle), all.size());
}

class Deletion : public CompilerTest {};

// Deletes from one kernel at several shapes.
std::vector<Subject> subjects_of(const std::string& kernel, const std::vector<const char*>& shapes,
                                 const std::string& device = "vgpu:h200", int blocks = 1) {
  std::vector<Subject> subjects;
  for (const char* shape : shapes) subjects.emplace_back(kernel + shape, blocks, device);
  return subjects;
}

TEST_F(Deletion, DISABLED_OfAForwardKernel) {
  const std::vector<Subject> subjects =
      subjects_of("--dtype bf16 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 2 --heads-k 1 ",
                  {"--seqlen-q 280 --seqlen-k 300", "--seqlen-q 280 --seqlen-k 800",
                   "--seqlen-q 280 --seqlen-k 500 --values large"});
  expect_survivors("causal", subjects, TANDEM_SURVIVORS "/causal.txt");
}

TEST_F(Deletion, DISABLED_OfARaggedKernel) {
  const std::vector<Subject> subjects = subjects_of(
      "--dtype bf16 --packed 1 --head-dim 64 --head-dim-v 64 --heads-q 2 --heads-k 1 ",
      {"--lengths-q 70,200,0,10,40 --lengths-k 70,230,50,600,100", "--lengths-q 250,150 --lengths-k 900,1000",
       "--lengths-q 140,150 --lengths-k 300,500 --values large"});
  expect_survivors("varlen", subjects, TANDEM_SURVIVORS "/varlen.txt");
}

// The last unit of the first problem has one step.
TEST_F(Deletion, DISABLED_OfABlackwellKernel) {
  const std::vector<Subject> subjects =
      subjects_of("--dtype bf16 --head-dim 128 --head-dim-v 128 --causal 1 --heads-q 2 --heads-k 1 ",
                  {"--seqlen-q 280 --seqlen-k 280", "--seqlen-q 280 --seqlen-k 600",
                   "--seqlen-q 280 --seqlen-k 500 --values large"},
                  "vgpu:b200");
  expect_survivors("blackwell", subjects, TANDEM_SURVIVORS "/blackwell.txt");
}

// The problems have a CTA pair, and three n_blocks in two pairs.
std::vector<Subject> pairs_of_ctas(const std::string& head_dims) {
  const std::string kernel = "--dtype bf16 --gradients qkv " + head_dims;
  std::vector<Subject> subjects =
      subjects_of(kernel, {"--seqlen-q 260 --seqlen-k 500", "--seqlen-q 100 --seqlen-k 300 --heads-q 2 --heads-k 1"},
                  "vgpu:b200", 2);
  subjects.emplace_back(kernel + "--seqlen-q 200 --seqlen-k 700", 4, "vgpu:b200");
  return subjects;
}

TEST_F(Deletion, DISABLED_OfABlackwellBackward) {
  const std::vector<Subject> subjects = pairs_of_ctas("--head-dim 128 --head-dim-v 128 ");
  expect_survivors("blackwell backward", subjects, TANDEM_SURVIVORS "/blackwell_backward.txt", "backward");
}

TEST_F(Deletion, DISABLED_OfABlackwellBackwardWithARing) {
  const std::vector<Subject> subjects = pairs_of_ctas("--head-dim 192 --head-dim-v 128 ");
  expect_survivors("blackwell backward, ring", subjects, TANDEM_SURVIVORS "/blackwell_backward_ring.txt", "backward");
}

}  // namespace
}  // namespace tandem::test
