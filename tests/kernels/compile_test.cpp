// NVRTC compiles the planned kernels for Hopper and Blackwell without spilling registers. The test needs no GPU. The
// disabled cases compile every pair and every combination of options (tests/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "jit/compiler.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"
#include "support/pairwise.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

// ---- Options to combine ----

struct Shape {
  int64_t head_dim, head_dim_v, seqlen_q, seqlen_k;
};
constexpr Shape kShapes[] = {{64, 64, 4096, 4096},     {64, 64, 64, 4096},     {128, 128, 512, 512},
                             {128, 128, 16384, 16384}, {256, 256, 4096, 4096}, {192, 128, 4096, 4096},
                             {80, 80, 512, 512},       {72, 136, 512, 512},    {64, 128, 512, 512},
                             {128, 64, 512, 512},      {16, 16, 512, 512},     {64, 256, 512, 512}};

// A choice of a value for every option, each by number.
enum Option { kShape, kType, kMask, kRagged, kScale, kSoftcap, kAlibi, kBias, kDropout, kDirect, kOptions };
constexpr int kChoices[kOptions] = {static_cast<int>(std::size(kShapes)), 2, 4, 2, 2, 2, 2, 4, 2, 2};
using Choice = std::array<int, kOptions>;

Problem problem_of(const Choice& choice) {
  const Shape& shape = kShapes[choice[kShape]];
  Problem p;
  p.dtype = choice[kType] == 0 ? DType::bf16 : DType::f16;
  p.batch = 1;
  p.heads_q = p.heads_k = 2;
  p.seqlen_q = p.total_q = shape.seqlen_q;
  p.seqlen_k = p.total_k = shape.seqlen_k;
  p.head_dim = shape.head_dim;
  p.head_dim_v = shape.head_dim_v;
  for (View* view : {&p.q, &p.k, &p.v, &p.out}) *view = {.dtype = p.dtype, .present = true};
  if (choice[kMask] & 1) p.window_right = 0;
  if (choice[kMask] & 2) p.window_left = 100;
  p.seqused_k.present = choice[kRagged] == 1;
  p.softmax_scale = choice[kScale] == 0 ? 0.1 : -0.1;
  p.softcap = choice[kSoftcap] == 0 ? 0 : 20;
  p.alibi_slopes.present = choice[kAlibi] == 1;
  constexpr DType kBiases[] = {DType::f32, DType::boolean, DType::f32, DType::bf16};
  if (choice[kDropout] == 1) p.dropout.p = 0.1;
  p.bias.present = choice[kBias] > 0;
  p.bias.dtype = choice[kBias] == 3 ? p.dtype : kBiases[choice[kBias]];
  // One bias for both heads, which TMA can copy, or not.
  p.bias.shape[2] = p.seqlen_q;
  p.bias.shape[3] = p.seqlen_k;
  p.bias.stride[2] = p.seqlen_k + (choice[kType] == 0 ? 0 : 1);
  p.bias.stride[3] = 1;
  return p;
}

// The same problem with all gradients.
Problem gradients_of(const Choice& choice) {
  Problem p = problem_of(choice);
  p.pass = TANDEM_BACKWARD;
  for (View* view : {&p.dout, &p.dq, &p.dk, &p.dv}) *view = {.dtype = p.dtype, .present = true};
  if (choice[kDirect] == 1) p.dk.dtype = DType::f32;
  if (p.bias && p.bias.dtype != DType::boolean) {
    p.dbias = p.bias;
    std::ranges::fill(p.dbias.shape, 1);
  }
  p.lse = {.dtype = DType::f32, .present = true};
  return p;
}

std::vector<Choice> all_choices() {
  std::vector<Choice> all;
  Choice c{};
  for (;;) {
    all.push_back(c);
    int option = 0;
    while (option < kOptions && ++c[static_cast<size_t>(option)] == kChoices[option])
      c[static_cast<size_t>(option++)] = 0;
    if (option == kOptions) return all;
  }
}

std::vector<Choice> pairwise_choices() {
  std::vector<Choice> chosen;
  for (const std::vector<int>& combination : pairwise(kChoices))
    std::ranges::copy(combination, chosen.emplace_back().begin());
  return chosen;
}

// Every fourth combination. CI compiles a quarter of the pairs for each list of kernels.
std::vector<Choice> quarter_of_pairs(size_t first) {
  const std::vector<Choice> all = pairwise_choices();
  std::vector<Choice> quarter;
  for (size_t n = first; n < all.size(); n += 4) quarter.push_back(all[n]);
  return quarter;
}

// Returns the distinct kernels of the plans of these problems. The first and last kernels of a backward hardly depend
// on options, so one for each pair of head dimensions suffices.
std::vector<plan::PlannedKernel> kernels_of(const std::vector<Choice>& choices, const gpu::Properties& device,
                                            Problem (*of)(const Choice&)) {
  std::map<std::string, plan::PlannedKernel> kernels;
  std::set<std::pair<int64_t, int64_t>> ends;
  for (const Choice& choice : choices) {
    const Problem problem = of(choice);
    if (!plan::check(problem, device).ok()) continue;
    const plan::Plan plan = plan::make_plan(problem, device);
    for (const plan::PlannedKernel& kernel : plan.kernels) {
      if (kernel.unit == plan::Unit::prepost && !ends.emplace(problem.head_dim, problem.head_dim_v).second) continue;
      kernels.emplace(plan::name_of(kernel), kernel);
    }
  }
  std::vector<plan::PlannedKernel> list;
  for (const auto& [name, kernel] : kernels) list.push_back(kernel);
  return list;
}

// ---- Compiling ----

// Returns the complaint of ptxas about a kernel in the log of -v, or "".
std::string complaint(const std::string& log) {
  size_t functions = 0;
  for (size_t at = 0; (at = log.find(" bytes stack frame, ", at)) != std::string::npos; ++at) {
    ++functions;
    const size_t line = log.rfind('\n', at) + 1, end = log.find('\n', at);
    if (log.find(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", line) > end) {
      return log.substr(line, end - line);
    }
  }
  if (functions == 0) return "the log says nothing about stack and spills";
  if (const size_t at = log.find("(C75"); at != std::string::npos) return log.substr(at, log.find('\n', at) - at);
  return "";
}

// Some lists are halved for each commit: one device compiles the even entries, and the other the odd ones.
enum class Part { half, whole };
bool compiles(Part part, size_t entry, const gpu::Properties& device) {
  return part == Part::whole || (entry + (device.compute_major == 9)) % 2 == 0;
}

class KernelsCompile : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = jit::Compiler::open({}, Env::get(), &compiler_); !status.ok()) {
      GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
    }
  }

  std::string compile(const std::string& name, const std::string& source, const gpu::Properties& device = hopper(),
                      const std::vector<std::string>& more = {}) const {
    // The engine's compiler options, and a report of registers.
    jit::Request request{name,
                         source,
                         device.arch(),
                         {"--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v"},
                         jit::Output::cubin};
    request.options.insert(request.options.end(), more.begin(), more.end());
    std::string code, log;
    const Status status = compiler_->compile(request, jit::included_by(source, jit::kernels()), &code, &log);
    return status.ok() ? complaint(log) : status.message;
  }

  void compile_all(const std::vector<Choice>& choices, const gpu::Properties& device,
                   Problem (*of)(const Choice&) = problem_of) const {
    const std::vector<plan::PlannedKernel> kernels = kernels_of(choices, device, of);
    std::atomic<size_t> next = 0;
    std::mutex mutex;
    double total = 0, longest = 0;
    std::vector<std::string> bad;
    const auto work = [&] {
      for (size_t n = next++; n < kernels.size(); n = next++) {
        const auto start = std::chrono::steady_clock::now();
        const std::string wrong = compile(plan::name_of(kernels[n]), plan::translation_unit(kernels[n]), device);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        const std::lock_guard lock(mutex);
        std::printf("%5.2f s  %s%s%s\n", seconds, plan::name_of(kernels[n]).c_str(), wrong.empty() ? "" : ": ",
                    wrong.c_str());
        std::fflush(stdout);
        total += seconds;
        longest = std::max(longest, seconds);
        if (!wrong.empty()) bad.push_back(plan::name_of(kernels[n]) + ": " + wrong);
      }
    };
    std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
    for (std::thread& thread : threads) thread = std::thread(work);
    for (std::thread& thread : threads) thread.join();
    std::printf("%zu kernels by NVRTC %d.%d, %.2f s each, %.2f s the longest\n", kernels.size(), compiler_->major(),
                compiler_->minor(), total / static_cast<double>(kernels.size()), longest);
    for (const std::string& one : bad) ADD_FAILURE() << one;
  }

  void compile_block_masks(Part part) const;

  const jit::Compiler& compiler() const { return *compiler_; }

 private:
  std::unique_ptr<jit::Compiler> compiler_;
};

TEST_F(KernelsCompile, QuarterOfPairs) { compile_all(quarter_of_pairs(0), hopper()); }
TEST_F(KernelsCompile, QuarterOfPairsForBlackwell) { compile_all(quarter_of_pairs(1), blackwell()); }
TEST_F(KernelsCompile, QuarterOfPairsForBlackwellGradients) {
  compile_all(quarter_of_pairs(2), blackwell(), gradients_of);
}

TEST_F(KernelsCompile, DISABLED_EveryPairOfOptions) { compile_all(pairwise_choices(), hopper()); }
TEST_F(KernelsCompile, DISABLED_EveryPairOfOptionsForBlackwell) { compile_all(pairwise_choices(), blackwell()); }
TEST_F(KernelsCompile, DISABLED_EveryPairOfOptionsForBlackwellGradients) {
  compile_all(pairwise_choices(), blackwell(), gradients_of);
}

// The loading thread has few registers.
std::vector<Choice> page_choices(Part part, const gpu::Properties& device) {
  std::vector<Choice> choices;
  size_t entry = 0;
  const auto add = [&](const Choice& choice) {
    if (compiles(part, entry++, device)) choices.push_back(choice);
  };
  for (const int shape : {1, 2, 4, 5}) {
    for (const int type : {0, 1}) {
      Choice choice{};
      choice[kShape] = shape;
      choice[kType] = type;
      choice[kMask] = shape == 1 ? 0 : 3;
      add(choice);
    }
    Choice causal{};
    causal[kShape] = shape;
    causal[kMask] = 1;
    add(causal);
  }
  return choices;
}
Problem with_pages(const Choice& choice) {
  Problem p = problem_of(choice);
  p.page_table = {.pages = 1000, .page_size = choice[kType] == 0 ? 16 : 128, .max_pages = 256, .present = true};
  return p;
}
TEST_F(KernelsCompile, HalfOfPages) {
  for (const gpu::Properties& device : {hopper(), blackwell()})
    compile_all(page_choices(Part::half, device), device, with_pages);
}
TEST_F(KernelsCompile, DISABLED_Pages) {
  for (const gpu::Properties& device : {hopper(), blackwell()})
    compile_all(page_choices(Part::whole, device), device, with_pages);
}

Problem one_query_of(Problem p) {
  p.heads_q = 128, p.heads_k = 1;
  p.seqlen_q = p.total_q = 1;
  return p;
}
// The tile of one query with 128 heads, whose loading warpgroup may copy small pages.
TEST_F(KernelsCompile, OneQueryOfManyHeads) {
  std::vector<Choice> choices;
  for (int n = 0; n < 4; ++n) {
    Choice choice{};
    choice[kShape] = 3;
    choice[kMask] = n < 2 ? 0 : 3;
    choice[kType] = n % 2;
    choice[kRagged] = n / 2;
    choice[kSoftcap] = n == 3;
    choices.push_back(choice);
  }
  compile_all(choices, hopper(), [](const Choice& choice) { return one_query_of(with_pages(choice)); });
  compile_all(choices, hopper(), [](const Choice& choice) { return one_query_of(problem_of(choice)); });
}

// Dropout of sequences that are parts of longer sequences needs a loop of draws.
TEST_F(KernelsCompile, PlacedDropout) {
  const auto forward = [](const Choice& choice) {
    Problem p = problem_of(choice);
    p.placed = true;
    return p;
  };
  const auto backward = [](const Choice& choice) {
    Problem p = gradients_of(choice);
    p.placed = true;
    return p;
  };
  Choice choice{};
  choice[kShape] = 3;
  choice[kMask] = choice[kRagged] = choice[kDropout] = 1;
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    compile_all({choice}, device, forward);
    compile_all({choice}, device, backward);
  }
}

// Splits that the device plans: the epilogue stores either a result or a split's result.
TEST_F(KernelsCompile, SplitsOfTheDevice) {
  const auto splits = [](const Choice& choice) {
    Problem p = problem_of(choice);
    p.seqlen_q = p.total_q = 4;
    p.batch_invariant = true;
    return p;
  };
  std::vector<Choice> choices;
  for (const int shape : {0, 3, 4, 5}) {
    Choice choice{};
    choice[kShape] = shape;
    choice[kMask] = shape % 4;
    choices.push_back(choice);
  }
  for (const gpu::Properties& device : {hopper(), blackwell()}) compile_all(choices, device, splits);
}

TEST_F(KernelsCompile, DISABLED_EveryCombination) { compile_all(all_choices(), hopper()); }
TEST_F(KernelsCompile, DISABLED_EveryCombinationForBlackwell) { compile_all(all_choices(), blackwell()); }

// Accumulators leave registers for half a tile of scores: with eight registers fewer, ptxas serialises all products.
TEST_F(KernelsCompile, HalvesOfHopper) {
  for (const int mask : {0, 1, 3}) {
    for (const int more : {0, 1}) {  // bfloat16, capped; float16, float32 gradients
      Choice choice{};
      choice[kShape] = 5;
      choice[kMask] = mask;
      choice[kSoftcap] = more == 0;
      choice[kType] = choice[kDirect] = more;
      Problem p = gradients_of(choice);
      p.heads_q = p.heads_k = 16;  // enough heads that dS of one may be in memory
      const plan::Plan plan = plan::make_plan(p, hopper());
      EXPECT_TRUE(plan.backward.tile.for_hopper().q_subtiles());
      const std::string name = plan::name_of(plan.kernels[0]);
      EXPECT_EQ(compile(name, plan::translation_unit(plan.kernels[0]), hopper()), "") << name;
    }
  }
}

// A block mask with a mask_mod for some blocks; and the max_scores kernel with it.
void KernelsCompile::compile_block_masks(Part part) const {
  const score_mod::Signature mask{.result = score_mod::Signature::Result::mask,
                                  .scalars = {},
                                  .tensors = {{.name = "doc", .type = score_mod::Type::integer, .rank = 1}}};
  const auto mod = std::make_shared<BoundExpression>(), longer = std::make_shared<BoundExpression>(),
             of_documents = std::make_shared<BoundExpression>();
  ASSERT_TRUE(score_mod::read_program("k <= q and (q ^ k) & 3 != 0", mask, &mod->program).ok());
  // Hopper evaluates up to six operations inline where it hides scores: some spills are faster there
  // (docs/design/score_mod.md).
  ASSERT_TRUE(
      score_mod::read_program("k <= q and (q ^ k) & 3 != 0 and (q ^ k) & 12 != 8", mask, &longer->program).ok());
  ASSERT_TRUE(score_mod::read_program("k <= q and doc[q] == doc[k]", mask, &of_documents->program).ok());
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    size_t entry = 0;
    for (const int shape : {0, 3, 4, 5}) {
      for (const int more : {0, 1, 2}) {  // bfloat16, also with a window and softcap; float16, causal
        if (!compiles(part, entry++, device)) continue;
        Choice choice{};
        choice[kShape] = shape;
        choice[kType] = more == 2;
        choice[kMask] = more == 1 ? 3 : more == 2;
        choice[kSoftcap] = more == 1;
        for (Problem p : {problem_of(choice), gradients_of(choice)}) {
          // Gradients with a window and softcap, and wide heads on Hopper, also spill without a block mask.
          if (p.pass == TANDEM_BACKWARD && (more == 1 || p.head_dim > 128)) continue;
          const auto& of_device = device.compute_major == 9 && p.pass == TANDEM_FORWARD ? longer : mod;
          p.mask_mod = {.present = true, .read = more == 0 && p.pass == TANDEM_FORWARD ? of_documents : of_device};
          p.block_mask.block_q = p.block_mask.block_k = 128;
          p.block_mask.partial.present = true;
          p.max_scores.present = p.pass == TANDEM_FORWARD;
          ASSERT_TRUE(plan::check(p, device).ok());
          const plan::PlannedKernel kernel = plan::make_plan(p, device).kernels[0];
          const std::string name = plan::name_of(kernel), wrong = compile(name, plan::translation_unit(kernel), device);
          EXPECT_EQ(wrong, "") << name;
        }
      }
    }
  }
}
TEST_F(KernelsCompile, HalfOfBlockMasks) { compile_block_masks(Part::half); }
TEST_F(KernelsCompile, DISABLED_BlockMasks) { compile_block_masks(Part::whole); }

// Gradients of captured tensors: elements that whole tiles read, which the main kernel adds, and elements with a
// factor.
TEST_F(KernelsCompile, LearnedTables) {
  const score_mod::Signature names{
      .result = score_mod::Signature::Result::score,
      .scalars = {},
      .tensors = {{.name = "table", .type = score_mod::Type::real, .rank = 2, .element = score_mod::Element::f32}}};
  for (const char* text : {"score + table[head, clamp(q - k + 32, 0, 64)]", "score * table[head, 0]"}) {
    std::shared_ptr<const score_mod::Program> program;
    ASSERT_TRUE(score_mod::read_program(text, names, &program).ok());
    const auto mod = std::make_shared<BoundExpression>();
    mod->program = program;
    mod->cells = 130;
    for (const gpu::Properties& device : {hopper(), blackwell()}) {
      for (const int shape : {0, 3, 4}) {
        Choice choice{};
        choice[kShape] = shape;
        Problem p = gradients_of(choice);
        // On Hopper the main kernel of wide heads spills with any score_mod (docs/design/score_mod.md).
        if (p.head_dim > 128 && device.compute_major == 9) continue;
        p.score_mod = {.present = true, .read = mod};
        ASSERT_TRUE(plan::check(p, device).ok());
        const plan::PlannedKernel kernel = plan::make_plan(p, device).kernels[0];
        const std::string name = plan::name_of(kernel), wrong = compile(name, plan::translation_unit(kernel), device);
        EXPECT_EQ(name.find("_captured_per_tile") != std::string::npos, program->captured_per_tile) << name;
        const bool captured_per_score = program->captured_per_score && device.compute_major == 9;
        EXPECT_EQ(name.find("_captured_per_score") != std::string::npos, captured_per_score) << name;
        EXPECT_EQ(wrong, "") << name;
      }
    }
  }
}

// The relay zeroes values with ordinary writes. Therefore the arrival at the other CTA and its wait need cluster scope.
// With lazy maxima, the signal of lost rows also needs it, once per work tile. No other barrier has that scope.
TEST_F(KernelsCompile, ZeroedValuesAreReleasedToTheCluster) {
  const auto ptx = [&](Sm100ForwardConfig tile) {
    const jit::Request request{"scopes",
                               plan::translation_unit(tile),
                               blackwell().arch(),
                               {"--std=c++20", "--device-as-default-execution-space"},
                               jit::Output::ptx};
    std::string code, log;
    const Status status = compiler().compile(request, jit::included_by(request.source, jit::kernels()), &code, &log);
    EXPECT_TRUE(status.ok()) << status.message;
    return code;
  };
  const auto times = [](const std::string& code, const std::string& what) {
    int n = 0;
    for (size_t at = code.find(what); at != std::string::npos; at = code.find(what, at + 1)) ++n;
    return n;
  };
  for (const bool f16 : {false, true}) {
    const std::string code = ptx({.two_cta = true, .options = {.f16 = f16}}),
                      ragged = ptx({.two_cta = true, .clc = true, .options = {.f16 = f16, .varlen = true}});
    for (const char* what :
         {"mbarrier.arrive.release.cluster.shared::cluster", "mbarrier.try_wait.parity.acquire.cluster"}) {
      EXPECT_EQ(times(code, what), f16 ? 0 : 1) << what;
      EXPECT_GT(times(ragged, what), 0) << what;
    }
  }
}

// The check for spills finds them in a kernel that spills.
TEST_F(KernelsCompile, SpillsAreSeen) {
  const std::string source =
      "extern \"C\" __global__ void sum(const float* from, float* to) {\n"
      "  float x[64];\n"
      "  for (int i = 0; i < 64; ++i) x[i] = from[threadIdx.x * 64 + i];\n"
      "  __syncthreads();\n"
      "  for (int i = 0; i < 64; ++i) to[threadIdx.x * 64 + i] = x[i] * x[63 - i];\n"
      "}\n";
  EXPECT_EQ(compile("sum", source), "");
  const std::string spilt = compile("sum", source, hopper(), {"--maxrregcount=24"});
  EXPECT_NE(spilt.find("bytes spill stores"), std::string::npos) << spilt;
}

}  // namespace
}  // namespace tandem::test
