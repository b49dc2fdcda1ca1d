// Gradients: any two features together, at sizes that a virtual GPU runs quickly, and bugs of other libraries.
#include <cstring>

#include "kernels/on_gpu.h"
#include "reference/reference.h"
#include "support/pairwise.h"

namespace tandem::test {
namespace {

using Values = std::vector<const char*>;

// Lengths around the edges of tiles: one query, one key, several n_blocks and m_blocks, the last ones not full.
const Values kLengths = {"--seqlen-q 130 --seqlen-k 150",
                         "--seqlen-q 1 --seqlen-k 200",
                         "--seqlen-q 200 --seqlen-k 1",
                         "--batch 2 --seqlen-q 65 --seqlen-k 129",
                         "--batch 3 --seqlen-q 64 --seqlen-k 128",
                         "--seqlen-q 300 --seqlen-k 270",
                         "--batch 2 --seqlen-q 70 --seqlen-k 141 --used-q 3,70 --used-k 141,17",
                         "--packed 1 --lengths-q 20,0,133,1 --lengths-k 9,4,133,0 --max-seqlen 0",
                         "--packed 1 --lengths-q 5,70 --lengths-k 90,33 --used-q 3,70 --used-k 81,0 "
                         "--max-seqlen 3"};
const Values kDims = {
    "--head-dim 64 --head-dim-v 64",   "--head-dim 128 --head-dim-v 128", "--head-dim 80 --head-dim-v 80",
    "--head-dim 64 --head-dim-v 128",  "--head-dim 128 --head-dim-v 56",  "--head-dim 8 --head-dim-v 16",
    "--head-dim 256 --head-dim-v 256", "--head-dim 192 --head-dim-v 128", "--head-dim 64 --head-dim-v 136"};
const Values kHeads = {"", "--heads-q 4 --heads-k 2", "--heads-q 3 --heads-k 3", "--heads-q 5 --heads-k 1"};
const Values kMasks = {"",
                       "--causal 1",
                       "--causal 1 --top-left 1",
                       "--left 30 --right 11",
                       "--left 20 --right -4",
                       "--left 40 --causal 1",
                       "--left 17",
                       "--right -70 --top-left 1"};
const Values kScales = {"", "--scale 0.9", "--scale -0.2", "--softcap 5", "--values large", "--softcap 1000000"};
const Values kAlibi = {"", "--alibi head", "--alibi batch"};
const Values kBias = {"",
                      "--bias f32 --bias-shape bh1j",
                      "--bias same --bias-inf 1",
                      "--bias bool --bias-shape 1hij",
                      "--bias f32 --bias-shape 11ij",
                      "--bias same --bias-shape b1i1",
                      "--bias f32 --bias-shape 1111"};
const Values kResults = {"", "--float32 g", "--accumulate 1", "--float32 od", "--float32 gd --accumulate 1"};
// each: one offset per sequence
const Values kDiagonals = {"", "--explicit 1 --diagonal -30", "--explicit 1 --diagonal 5 --diagonals each"};
const Values kDropout = {"", "--dropout 0.1", "--dropout 0.3125 --dropout-pointers 1"};
const Values kSinks = {"", "--sink f32", "--sink same"};
const Values kGiven = {"", "--dlse 1"};
const Values kGradients = {"--gradients qkvb", "--gradients q",  "--gradients k",    "--gradients v",
                           "--gradients bs",   "--gradients kv", "--gradients qkvbs"};
const Values kTypes = {"--dtype bf16", "--dtype f16"};
const Values kLayouts = {"", "--layout 349525", "--layout 1048575"};
// Problems with few tiles split their m_blocks over CTAs, unless bits must not depend on the number of CTAs.
const Values kSplits = {"--invariant 1", ""};

TEST(KernelsBackward, EveryPairOfFeatures) {
  const Values options[] = {kLengths, kDims,      kHeads, kMasks,   kScales,    kAlibi,   kBias,    kSinks,
                            kGiven,   kGradients, kTypes, kLayouts, kDiagonals, kDropout, kResults, kSplits};
  std::vector<int> choices;
  for (const Values& values : options) choices.push_back(static_cast<int>(values.size()));
  std::vector<CheckedCase> cases;
  for (const std::vector<int>& combination : pairwise(choices)) {
    std::string flags;
    for (size_t option = 0; option < combination.size(); ++option) {
      const std::string value = options[option][static_cast<size_t>(combination[option])];
      const bool packed_bias = value.starts_with("--bias") && flags.find("--packed") != std::string::npos;
      if (!packed_bias) flags += value + " ";
    }
    // Far from the diagonal, ALiBi adds large float32 numbers that absorb the differences between scores.
    cases.emplace_back(with_diagonals(flags, flags.find("--alibi") == std::string::npos));
  }
  expect_all_good(cases);
}

// Two CTAs share n_blocks of 256 keys: one n_block and several, of which the last is partial. Some have keys of one CTA
// only.
TEST(KernelsBackward, PairsOfCtas) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--seqlen-q 520 --seqlen-k 700 --causal 1 --heads-q 2 --heads-k 1",
        "--seqlen-q 530 --seqlen-k 520 --left 100 --right 60 --softcap 5", "--seqlen-q 1 --seqlen-k 129 --scale -0.2",
        "--seqlen-q 130 --seqlen-k 513 --bias same --alibi head --heads-q 4 --heads-k 2 --gradients qkvb",
        "--seqlen-q 520 --seqlen-k 600 --left 200 --causal 1 --dtype f16 --sink f32 --gradients qs",
        "--packed 1 --lengths-q 20,0,133,150 --lengths-k 300,4,520,0 --max-seqlen 0 --gradients kv",
        "--packed 1 --lengths-q 520,600 --lengths-k 600,530 --max-seqlen 0 --causal 1 --heads-q 2 --heads-k 1",
        "--batch 2 --seqlen-q 70 --seqlen-k 441 --used-q 3,70 --used-k 441,17 --values large --gradients q"})
    cases.emplace_back(std::string("--gradients qkv --dtype bf16 --head-dim 128 --head-dim-v 128 ") + flags);
  cases.emplace_back("--gradients qkv --dtype f16 --head-dim 104 --head-dim-v 72 --seqlen-q 200 --seqlen-k 500");
  expect_all_good(cases);
}

// The m_blocks of an n_block are split over up to 16 CTAs, within and between heads. Some CTAs get no m_block.
TEST(KernelsBackward, SplitSteps) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--head-dim 128 --head-dim-v 128 --seqlen-q 1100 --seqlen-k 77",
        "--head-dim 64 --head-dim-v 64 --seqlen-q 1100 --seqlen-k 300 --causal 1 --float32 g --accumulate 1",
        "--head-dim 128 --head-dim-v 64 --seqlen-q 130 --seqlen-k 70 --heads-q 10 --heads-k 2 --dropout 0.1",
        "--head-dim 256 --head-dim-v 256 --seqlen-q 700 --seqlen-k 77 --accumulate 1",
        "--head-dim 192 --head-dim-v 128 --seqlen-q 500 --seqlen-k 130 --left 100 --right 3 --float32 g",
        "--head-dim 80 --head-dim-v 104 --batch 2 --seqlen-q 600 --seqlen-k 141 --used-q 3,600 --used-k 141,17",
        "--head-dim 64 --head-dim-v 56 --packed 1 --lengths-q 900,0,133 --lengths-k 19,44,133 --max-seqlen 0",
        "--head-dim 64 --head-dim-v 64 --seqlen-q 1000 --seqlen-k 200 --right -870 --top-left 1 --gradients kv"})
    cases.emplace_back(std::string("--gradients qkv --dtype bf16 ") + flags);
  expect_all_good(cases);
}

// Head dims that are no multiple of 64: one CTA on Blackwell multiplies them as multiples of 16.
TEST(KernelsBackward, HeadDimsBetween) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--head-dim 16 --head-dim-v 16 --seqlen-q 150 --seqlen-k 300 --heads-q 2 --heads-k 1",
        "--head-dim 24 --head-dim-v 48 --seqlen-q 150 --seqlen-k 140 --causal 1",
        "--head-dim 40 --head-dim-v 112 --seqlen-q 150 --seqlen-k 140 --left 70 --values large",
        "--head-dim 80 --head-dim-v 80 --seqlen-q 270 --seqlen-k 260 --causal 1 --dropout 0.2",
        "--head-dim 96 --head-dim-v 96 --seqlen-q 150 --seqlen-k 270 --values copy",
        "--head-dim 112 --head-dim-v 32 --seqlen-q 150 --seqlen-k 140 --float32 g --accumulate 1",
        "--head-dim 96 --head-dim-v 80 --packed 1 --lengths-q 20,0,133,150 --lengths-k 200,4,260,0 --max-seqlen 0",
        "--head-dim 80 --head-dim-v 16 --batch 2 --seqlen-q 70 --seqlen-k 141 --used-q 3,70 --used-k 141,17",
        "--head-dim 16 --head-dim-v 240 --seqlen-q 150 --seqlen-k 140 --gradients qkvs --sink f32",
        "--head-dim 80 --head-dim-v 168 --seqlen-q 150 --seqlen-k 140"}) {
    const char* const dtype = cases.size() % 2 == 0 ? "--gradients qkv --dtype bf16 " : "--gradients qkv --dtype f16 ";
    cases.emplace_back(std::string(dtype) + flags);
  }
  expect_all_good(cases);
}

// Threads, not TMA, store dk and dv that are float32 or are added to the old values. Rows have gaps, sequences end
// within a tile, and some tiles have no keys. No byte outside the rows changes.
TEST(KernelsBackward, GradientsStoredByThreads) {
  std::vector<CheckedCase> cases;
  for (const std::string results : {"--float32 g", "--accumulate 1", "--float32 g --accumulate 1"}) {
    for (const std::string layout : {"", " --layout 349525", " --layout 1048575"}) {
      for (const char* lengths : {" --seqlen-q 70 --seqlen-k 150 --head-dim 64 --head-dim-v 64 --dtype f16",
                                  " --seqlen-q 70 --seqlen-k 300 --head-dim 128 --head-dim-v 120 --causal 1",
                                  " --packed 1 --lengths-q 20,0,130 --lengths-k 9,4,261 --max-seqlen 0 --head-dim 40 "
                                  "--head-dim-v 128",
                                  " --batch 2 --seqlen-q 70 --seqlen-k 441 --used-q 3,70 --used-k 141,17 --dtype f16 "
                                  "--head-dim 128 --head-dim-v 128 --heads-q 2 --heads-k 1"})
        cases.emplace_back("--gradients qkv --dtype bf16 " + results + layout + lengths);
    }
  }
  expect_all_good(cases);
}

// Blackwell accumulates dk and dv of wide heads in separate tiles. Sizes are mixed and the last blocks partial; cases
// have options, one gradient alone, or sharp probabilities.
TEST(KernelsBackward, WideHeads) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--head-dim 256 --head-dim-v 256 --seqlen-q 270 --seqlen-k 300 --causal 1 --heads-q 2 --heads-k 1",
        "--head-dim 192 --head-dim-v 128 --seqlen-q 300 --seqlen-k 270 --heads-q 2 --heads-k 1 --dropout 0.2",
        "--head-dim 192 --head-dim-v 128 --seqlen-q 140 --seqlen-k 400 --left 100 --causal 1 --softcap 5",
        "--head-dim 128 --head-dim-v 256 --seqlen-q 130 --seqlen-k 141 --left 30 --right 11 --float32 g",
        "--head-dim 256 --head-dim-v 64 --seqlen-q 300 --seqlen-k 129 --bias f32 --alibi head --accumulate 1",
        "--head-dim 64 --head-dim-v 256 --seqlen-q 270 --seqlen-k 300 --scale -0.2 --dlse 1",
        "--head-dim 64 --head-dim-v 136 --seqlen-q 140 --seqlen-k 150 --heads-q 4 --heads-k 2",
        "--head-dim 136 --head-dim-v 8 --seqlen-q 1 --seqlen-k 300 --sink f32 --gradients qks",
        "--head-dim 200 --head-dim-v 152 --seqlen-q 300 --seqlen-k 1 --values large",
        "--head-dim 256 --head-dim-v 192 --seqlen-q 150 --seqlen-k 160 --gradients v",
        "--head-dim 192 --head-dim-v 192 --seqlen-q 150 --seqlen-k 160 --gradients q",
        "--head-dim 192 --head-dim-v 256 --seqlen-q 150 --seqlen-k 160 --gradients k",
        "--head-dim 256 --head-dim-v 256 --packed 1 --lengths-q 20,0,133,150 --lengths-k 200,4,260,0 --max-seqlen 0",
        "--head-dim 192 --head-dim-v 128 --packed 1 --lengths-q 140,200 --lengths-k 200,130 --causal 1 --heads-q 2 "
        "--heads-k 1 --float32 gd --accumulate 1",
        "--head-dim 192 --head-dim-v 128 --batch 2 --seqlen-q 70 --seqlen-k 241 --used-q 3,70 --used-k 241,17",
        "--head-dim 256 --head-dim-v 256 --batch 2 --seqlen-q 200 --seqlen-k 300 --right -190",
        "--head-dim 192 --head-dim-v 128 --seqlen-q 150 --seqlen-k 200 --values sink20 --causal 1",
        "--head-dim 256 --head-dim-v 256 --seqlen-q 140 --seqlen-k 140 --values copy",
        "--head-dim 256 --head-dim-v 256 --seqlen-q 130 --seqlen-k 150 --values needle15"}) {
    const char* const dtype = cases.size() % 2 == 0 ? "--gradients qkv --dtype bf16 " : "--gradients qkv --dtype f16 ";
    cases.emplace_back(std::string(dtype) + flags);
  }
  expect_all_good(cases);
}

// dS of Hopper's wide heads goes through global memory. Every third case has head dims between two multiples of 64.
std::vector<CheckedCase> wide_heads(std::initializer_list<const char*> sizes) {
  std::vector<CheckedCase> cases;
  for (const char* flags : sizes) {
    const char* const dtype = cases.size() % 2 == 0 ? "--dtype bf16 " : "--dtype f16 ";
    const char* const dims =
        cases.size() % 3 == 2 ? "--head-dim 200 --head-dim-v 136 " : "--head-dim 256 --head-dim-v 256 ";
    cases.emplace_back(std::string("--gradients qkv ") + dtype + dims + flags);
  }
  return cases;
}

// Windows begin anywhere, some m_blocks see no keys, and a row of dS has one or two m_blocks. A tile has one or two
// heads of a group.
TEST(KernelsBackward, WideHeadsOfHopper) {
  if (the_gpu()->device().properties().compute_major != 9) GTEST_SKIP();
  expect_all_good(wide_heads(
      {"--seqlen-q 400 --seqlen-k 200 --explicit 1 --diagonal -70 --left 40 --right 3",
       "--seqlen-q 700 --seqlen-k 200 --top-left 1 --left 500 --right -350",
       "--seqlen-q 330 --seqlen-k 341 --left 70 --right 11", "--seqlen-q 330 --seqlen-k 130 --causal 1",
       "--seqlen-q 130 --seqlen-k 330 --causal 1 --batch 2 --heads-q 6 --heads-k 2",
       "--seqlen-q 200 --seqlen-k 200 --causal 1 --top-left 1 --explicit 1 --diagonal 5 --diagonals 5,-60 --batch 2",
       "--seqlen-q 65 --seqlen-k 66 --batch 80 --heads-q 4 --heads-k 4 --causal 1 --values integer",
       "--seqlen-q 300 --seqlen-k 129 --bias f32 --alibi head --accumulate 1 --gradients qkvb",
       "--seqlen-q 150 --seqlen-k 160 --dropout 0.25 --softcap 20 --causal 1 --float32 g",
       "--seqlen-q 150 --seqlen-k 160 --gradients q --values sink20",
       "--seqlen-q 77 --seqlen-k 200 --gradients kv --values large",
       "--seqlen-q 10 --seqlen-k 2100 --causal 1 --heads-q 20 --heads-k 2"}));
}

// More n_blocks than one sum of dq has: minutes on a virtual GPU. KernelsSchedules.ChunksOfOneHead forces the same path
// in less time.
TEST(KernelsBackward, WideHeadsOfManyKeys) {
  expect_all_good(
      wide_heads({"--seqlen-q 64 --seqlen-k 8400 --causal 1", "--seqlen-q 100 --seqlen-k 8400 --left 8300 --right 20",
                  "--seqlen-q 200 --seqlen-k 17000 --left 100 --right 30",
                  "--seqlen-q 400 --seqlen-k 8300 --explicit 1 --diagonal 8200 --left 50 --right 5"}));
}

// One warp holds all of dq for at most 16 queries; 17 exceed it. Several n_blocks add to dq.
TEST(KernelsBackward, FewQueries) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--head-dim 128 --head-dim-v 128 --seqlen-q 1 --seqlen-k 700 --batch 2 --heads-q 4 --heads-k 2 --invariant 1",
        "--head-dim 64 --head-dim-v 64 --seqlen-q 1 --seqlen-k 700 --batch 2 --heads-q 3 --heads-k 3",
        "--head-dim 128 --head-dim-v 128 --seqlen-q 16 --seqlen-k 300 --causal 1 --float32 g --accumulate 1",
        "--head-dim 64 --head-dim-v 64 --seqlen-q 16 --seqlen-k 300 --causal 1 --values needle15",
        "--head-dim 128 --head-dim-v 128 --seqlen-q 17 --seqlen-k 300",
        "--head-dim 64 --head-dim-v 64 --seqlen-q 17 --seqlen-k 300",
        "--head-dim 72 --head-dim-v 128 --seqlen-q 9 --seqlen-k 300 --left 250 --right 3 --dropout 0.2 --align 8",
        "--head-dim 64 --head-dim-v 120 --seqlen-q 11 --seqlen-k 300 --bias f32 --gradients qkvb",
        "--head-dim 128 --head-dim-v 64 --seqlen-q 16 --seqlen-k 300 --batch 3 --used-q 0,16,5 --used-k 300,0,140 "
        "--softcap 5 --alibi head",
        "--head-dim 128 --head-dim-v 128 --seqlen-q 13 --seqlen-k 300 --score-mod score*slope[head] --gradients "
        "qkvm"}) {
    const char* const dtype = cases.size() % 2 == 0 ? "--dtype bf16 " : "--dtype f16 ";
    cases.emplace_back(std::string("--gradients qkv ") + dtype + flags);
  }
  expect_all_good(cases);
}

// A bias is broadcast along every subset of batch, heads, queries and keys, with one n_block and with several.
TEST(KernelsBackward, ABiasOfEveryShape) {
  const char* const kProblems[] = {
      " --bias f32 --dtype bf16 --seqlen-k 270 --head-dim 128 --head-dim-v 128 --causal 1",
      " --bias same --dtype f16 --seqlen-k 150 --head-dim 64 --head-dim-v 128 --left 30 --accumulate 1",
      " --bias f32 --dtype f16 --seqlen-k 300 --head-dim 72 --head-dim-v 128 --used-q 140,9 --used-k 20,300"};
  std::vector<CheckedCase> cases;
  for (int shape = 0; shape < 16; ++shape) {
    std::string flags = "--gradients b --align 8 --batch 2 --seqlen-q 140 --heads-q 2 --heads-k 1 --bias-shape ";
    for (int i = 0; i < 4; ++i) flags += (shape >> i & 1) != 0 ? "bhij"[i] : '1';
    cases.emplace_back(flags + kProblems[shape % 3]);
  }
  expect_all_good(cases);
}

// With dropout or a softcap, kernels skip 16 or 32 queries of a bias at a time if they see none of a warp's keys. This
// holds for two CTAs and for the kernel of the bias's gradient.
TEST(KernelsBackward, ScoresOfAnInvisibleBias) {
  const std::string pairs = "--gradients qkvb --dtype bf16 --head-dim 128 --head-dim-v 128 --seqlen-k 500 ";
  expect_all_good(
      {{pairs + "--seqlen-q 400 --causal 1 --bias f32 --dropout 0.2 --heads-q 2 --heads-k 1"},
       {pairs + "--seqlen-q 500 --causal 1 --left 50 --bias same --dropout 0.3 --softcap 4"},
       {pairs + "--seqlen-q 400 --batch 2 --left 40 --used-q 400,9 --used-k 20,500 --bias f32 --dropout 0.1"},
       {pairs + "--seqlen-q 400 --causal 1 --bias bool --dropout 0.2 --alibi head"},
       {"--gradients qkvb --dtype f16 --head-dim 64 --head-dim-v 64 --seqlen-q 300 --seqlen-k 200 "
        "--causal 1 --left 20 --bias f32 --softcap 3"}});
}

// The gradients of one sequence in memory: rows that follow each other, in packed tensors.
struct Gradients {
  std::vector<std::byte> dq, dk, dv;
  bool operator==(const Gradients&) const = default;
};
std::vector<std::byte> rows_of(const Tensor& t, int64_t first, int64_t count) {
  const std::vector<std::byte> all = bytes_of(t);
  const auto row = static_cast<int64_t>(all.size()) / t.shape()[0];
  return {all.begin() + first * row, all.begin() + (first + count) * row};
}

// With batch_invariant a sequence has the same gradients alone and next to a longer sequence. The longest length, and
// therefore the fastest kernel, differs. A single query sees all keys, so that its plan alone has no mask.
TEST(KernelsBackward, ASequenceWithALongerOneAndAlone) {
  const NamedEngine engine = gpu_engine(the_gpus());
  const struct {
    const char *flags, *q, *k;
    const char *longer_q, *longer_k;
  } cases[] = {{"", "140", "300", ",700", ",1500"},
               {" --causal 1", "140", "300", ",700", ",1500"},
               {" --causal 1", "1", "400", ",200", ",450"}};
  for (const auto& each : cases) {
    const std::string common =
        std::string(
            "--align 8 --dtype bf16 --packed 1 --max-seqlen 0 --invariant 1 --gradients qkv --head-dim 128 "
            "--head-dim-v 128") +
        each.flags;
    const auto call = [&](Instance& in) {
      Outputs exact = in.exact_outputs(TANDEM_FORWARD);
      reference::forward(in.exact_problem(TANDEM_FORWARD, &exact));
      in.give_results(&exact);
      Outputs outputs = in.outputs(TANDEM_BACKWARD);
      engine.run(EngineCall(in.problem(TANDEM_BACKWARD, &outputs), &in, &outputs));
      const int64_t q = in.c.lengths_q[0], k = in.c.lengths_k[0];
      return Gradients{rows_of(outputs.dq, 0, q), rows_of(outputs.dk, 0, k), rows_of(outputs.dv, 0, k)};
    };
    const auto lengths = [&](const std::string& more_q, const std::string& more_k) {
      return common + " --lengths-q " + each.q + more_q + " --lengths-k " + each.k + more_k;
    };
    Instance batch(from_flags(lengths(each.longer_q, each.longer_k)));
    Instance alone(from_flags(lengths("", "")));
    for (Tensor Instance::*t : {&Instance::q, &Instance::k, &Instance::v, &Instance::dout}) {
      for (int64_t n = 0; n < (alone.*t).size(); ++n)
        std::memcpy((alone.*t).element(n), (batch.*t).element(n), static_cast<size_t>(size_of((alone.*t).dtype())));
    }
    EXPECT_TRUE(call(batch) == call(alone)) << common;
  }
}

// Under a causal mask, n_blocks run from the last to the first, for some heads or for all. Cases have unequal lengths,
// several n_blocks per two CTAs, and more queries than keys.
TEST(KernelsBackward, NBlocksFromTheDiagonal) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--batch 9 --heads-q 8 --heads-k 8 --seqlen-q 260 --seqlen-k 260 --head-dim 16 --head-dim-v 16",
        "--invariant 1 --heads-q 2 --heads-k 2 --seqlen-q 500 --seqlen-k 700 --head-dim 64 --head-dim-v 64",
        "--invariant 1 --seqlen-q 500 --seqlen-k 300 --head-dim 128 --head-dim-v 128",
        "--invariant 1 --seqlen-q 300 --seqlen-k 300 --head-dim 256 --head-dim-v 256",
        "--invariant 1 --seqlen-q 300 --seqlen-k 300 --head-dim 192 --head-dim-v 128",
        "--invariant 1 --heads-q 2 --heads-k 2 --packed 1 --lengths-q 300,10,0,200 --lengths-k 300,50,40,200 "
        "--head-dim 128 --head-dim-v 128"})
    cases.emplace_back(std::string("--gradients qkv --dtype bf16 --causal 1 ") + flags);
  expect_all_good(cases);
}

// The last keys are visible only to rows beyond the last query of the last m_block.
TEST(KernelsBackward, ADiagonalThatEndsBeforeTheLastKeys) {
  std::vector<CheckedCase> cases;
  for (const char* flags : {"--head-dim 64 --head-dim-v 64 --invariant 1", "--head-dim 128 --head-dim-v 128",
                            "--head-dim 192 --head-dim-v 128", "--head-dim 256 --head-dim-v 256"})
    cases.emplace_back(std::string("--gradients qkv --dtype bf16 --heads-q 2 --heads-k 2 --seqlen-q 41 --seqlen-k 284 "
                                   "--causal 1 --explicit 1 --diagonal 210 ") +
                       flags);
  expect_all_good(cases);
}

// Any of these sequences might have all queries, so that the plan must be the plan of many queries. Query heads that
// share keys run one after the other (on Blackwell together).
TEST(KernelsBackward, HeadsThatShareKeysOneByOne) {
  std::string lengths_q = "150", lengths_k = "200";
  for (int n = 0; n < 40; ++n) {
    lengths_q += n % 8 == 0 ? ",300" : ",80";
    lengths_k += n % 8 == 0 ? ",310" : ",60";
  }
  const std::string common = "--gradients qkv --dtype bf16 --causal 1 --packed 1 --max-seqlen 4096 --lengths-q " +
                             lengths_q + " --lengths-k " + lengths_k;
  std::vector<CheckedCase> cases;
  cases.emplace_back(common + " --heads-q 3 --heads-k 1 --head-dim 64 --head-dim-v 64");
  cases.emplace_back(common + " --heads-q 2 --heads-k 1 --head-dim 128 --head-dim-v 128");  // two CTAs on Blackwell
  cases.emplace_back(common + " --heads-q 2 --heads-k 1 --head-dim 136 --head-dim-v 128 --float32 g");
  expect_all_good(cases);
}

TEST(KernelsBackward, NothingToSum) {
  std::vector<CheckedCase> cases;
  for (const char* flags :
       {"--seqlen-q 0 --seqlen-k 70", "--seqlen-q 70 --seqlen-k 0",
        "--batch 2 --heads-q 4 "
        "--heads-k 2 --seqlen-q 100 --seqlen-k 300 --right -290",
        "--seqlen-q 300 --seqlen-k 100 "
        "--causal 1",
        "--packed 1 --lengths-q 0 --lengths-k 368 --max-seqlen 0 --heads-q 4 --heads-k 2 --sink f32 --dlse 1 "
        "--gradients kvs"})
    cases.emplace_back(std::string("--gradients qkv --dtype bf16 --head-dim 64 --head-dim-v 64 ") + flags);
  expect_all_good(cases);
}

// A bias with batch 0 must not get a tensor map, because drivers refuse empty ones.
TEST(KernelsBackward, ABiasOfNoSequence) {
  std::vector<CheckedCase> cases;
  cases.emplace_back(
      "--gradients qkvb --dtype bf16 --batch 0 --seqlen-q 70 --seqlen-k 139 --head-dim 64 --head-dim-v 64 "
      "--bias f32 --bias-shape 1h1j");
  expect_all_good(cases);
}

// Without heads no list of blocks exists: a launch without blocks would be an error.
TEST(KernelsBackward, ABlockMaskOfNoHead) {
  std::vector<CheckedCase> cases;
  cases.emplace_back(
      "--gradients qkvs --dtype f16 --batch 2 --heads-q 0 --heads-k 0 --seqlen-q 255 --seqlen-k 255 --head-dim 128 "
      "--head-dim-v 256 --sink f32 --mask-mod true --blocks random --block-shape b1");
  expect_all_good(cases);
}

// Bugs of other attention libraries, each under the number of its report.
void expect_good_gradients(const std::vector<std::string>& problems) {
  std::vector<CheckedCase> cases;
  for (const std::string& flags : problems) {
    for (const char* dtype : {"--dtype bf16 ", "--dtype f16 "})
      cases.emplace_back(std::string("--gradients qkvs ") + dtype + flags);
  }
  expect_all_good(cases);
}

TEST(KernelsBackward, TransformerEngine3216WrongDqOfWideHeadsInBatches) {
  expect_good_gradients({"--batch 2 --seqlen-q 130 --seqlen-k 130 --head-dim 256 --head-dim-v 256 --causal 1",
                         "--batch 3 --seqlen-q 130 --seqlen-k 130 --heads-q 2 --head-dim 128 --head-dim-v 128"});
}

TEST(KernelsBackward, FlashAttention2896HeadDims72And104) {
  expect_good_gradients({"--seqlen-q 130 --seqlen-k 130 --head-dim 72 --head-dim-v 72",
                         "--seqlen-q 130 --seqlen-k 130 --head-dim 104 --head-dim-v 104 --causal 1"});
}

TEST(KernelsBackward, FlashAttention2698HeadDimsThatAreNoMultipleOf32) {
  expect_good_gradients({"--seqlen-q 130 --seqlen-k 130 --head-dim 40 --head-dim-v 24"});
}

TEST(KernelsBackward, FlashAttention2466SoftcapEnds) {
  expect_good_gradients({"--seqlen-q 200 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --softcap 15 --causal 1"});
}

TEST(KernelsBackward, CudnnFrontend1072NanWithOneQuery) {
  expect_good_gradients({"--batch 2 --seqlen-q 1 --seqlen-k 300 --head-dim 128 --head-dim-v 128 --causal 1"});
}

TEST(KernelsBackward, FlashAttention2087And2552And2888GroupsOfWideHeads) {
  expect_good_gradients({"--heads-q 6 --heads-k 2 --seqlen-q 70 --seqlen-k 130 --head-dim 192 --head-dim-v 192",
                         "--heads-q 4 --heads-k 1 --seqlen-q 70 --seqlen-k 130 --head-dim 192 --head-dim-v 128",
                         "--heads-q 4 --heads-k 2 --seqlen-q 130 --seqlen-k 270 --head-dim 256 --head-dim-v 256"});
}

// Gradients under the same mask as the forward.
TEST(KernelsBackward, FlashAttentionMasksOfPackedAndOfTwoMasksAtOnce) {
  expect_good_gradients(
      {"--packed 1 --lengths-q 70,130 --lengths-k 90,150 --left 20 --causal 1 --head-dim 64 --head-dim-v 64",
       "--batch 2 --seqlen-q 100 --seqlen-k 150 --bias bool --causal 1 --head-dim 64 --head-dim-v 64"});
}

TEST(KernelsBackward, FlashAttention2562SequencesOfNoLength) {
  expect_good_gradients(
      {"--packed 1 --lengths-q 0,70,0,5,0 --lengths-k 30,0,0,90,7 --max-seqlen 0 --heads-q 2 --sink f32 "
       "--head-dim 64 --head-dim-v 64"});
}

TEST(KernelsBackward, FlashAttention2665DoutThatIsNotContiguous) {
  expect_good_gradients({"--batch 2 --seqlen-q 90 --seqlen-k 90 --head-dim 64 --head-dim-v 64 --layout 699050"});
}

}  // namespace
}  // namespace tandem::test
