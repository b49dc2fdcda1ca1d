// The transport over NCCL, and the executions on GPUs: threads of one process as ranks, a stand-in for NCCL, and
// virtual GPUs.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "context_parallel/nccl_library.h"
#include "jit/compiler.h"
#include "ranks/group.h"
#include "ranks/shards.h"
#include "ranks/standin_nccl.h"
#include "support/gpu.h"

namespace tandem::test {
namespace {

const Gpu& the_gpu() {
  static const Gpu gpu("vgpu:h200");
  return gpu;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The communicators of some ranks and their transports.
class Clique {
 public:
  explicit Clique(int ranks) : comms_(static_cast<size_t>(ranks)), transports_(static_cast<size_t>(ranks)) {
    ncclCommInitAll(comms_.data(), ranks, nullptr);
    for (int r = 0; r < ranks; ++r) {
      if (tandem_cp_nccl_open(the_gpu().context(), comm(r), nullptr, transport(r)) != TANDEM_OK) {
        throw std::runtime_error(tandem_last_error());
      }
    }
  }
  ~Clique() {
    for (tandem_cp_transport& t : transports_) {
      if (t.user_data != nullptr) (void)tandem_cp_nccl_close(&t);
    }
    for (void* c : comms_) ncclCommDestroy(c);
  }
  Clique(const Clique&) = delete;

  void* comm(int rank) const { return comms_[static_cast<size_t>(rank)]; }
  tandem_cp_transport* transport(int rank) { return &transports_[static_cast<size_t>(rank)]; }

 private:
  std::vector<void*> comms_;
  std::vector<tandem_cp_transport> transports_;
};

// Exchanges 8 bytes between two ranks. Returns the sentence of each rank's error.
std::vector<std::string> swap_bytes(Clique& clique, std::array<uint64_t, 2>* received, int ranks_that_call = 2) {
  return on_ranks(ranks_that_call, [&](int32_t rank) -> std::string {
    const tandem_cp_transport& t = *clique.transport(rank);
    uint64_t sent = 10 + static_cast<uint64_t>(rank);
    const tandem_cp_message send{&sent, sizeof sent, 1 - rank, 0};
    const tandem_cp_message receive{&(*received)[static_cast<size_t>(rank)], sizeof sent, 1 - rank, 0};
    void* request = nullptr;
    const bool failed =
        t.exchange(t.user_data, &send, 1, &receive, 1, &request) != 0 || t.wait(t.user_data, request) != 0;
    EXPECT_EQ(standin_nccl_groups(), 0);
    return failed ? t.last_error(t.user_data) : "";
  });
}

TEST(RankNccl, MessagesAndNumbersArrive) {
  Clique clique(2);
  std::array<uint64_t, 2> received{};
  for (int n = 0; n < 3; ++n) {
    received = {};
    EXPECT_EQ(swap_bytes(clique, &received), (std::vector<std::string>{"", ""}));
    EXPECT_EQ(received, (std::array<uint64_t, 2>{11, 10}));
  }
  const auto errors = on_ranks(2, [&](int32_t rank) -> std::string {
    const tandem_cp_transport& t = *clique.transport(rank);
    EXPECT_EQ(t.rank, rank);
    EXPECT_EQ(t.ranks, 2);
    uint64_t own = 7 + static_cast<uint64_t>(rank), all[2] = {};
    if (t.all_gather(t.user_data, &own, all, sizeof own) != 0) return t.last_error(t.user_data);
    return all[0] == 7 && all[1] == 8 ? "" : "other numbers";
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(RankNccl, ACommunicatorThatDoesNotBlockIsPolled) {
  Clique clique(2);
  StandinFaults faults;
  faults.polls_in_progress = 5;
  for (int r = 0; r < 2; ++r) standin_nccl_plant(clique.comm(r), &faults);
  std::array<uint64_t, 2> received{};
  EXPECT_EQ(swap_bytes(clique, &received), (std::vector<std::string>{"", ""}));
  EXPECT_EQ(received, (std::array<uint64_t, 2>{11, 10}));
}

TEST(RankNccl, ALostRankIsAnAsynchronousError) {
  Clique clique(2);
  StandinFaults faults;
  faults.milliseconds = 100;
  standin_nccl_plant(clique.comm(0), &faults);
  std::array<uint64_t, 2> received{};
  const auto errors = swap_bytes(clique, &received, 1);
  EXPECT_TRUE(contains(errors[0], "remote process exited")) << errors[0];
  EXPECT_TRUE(contains(errors[0], "the stand-in's last error")) << errors[0];
  EXPECT_EQ(tandem_cp_nccl_close(clique.transport(0)), TANDEM_DEVICE_ERROR);
  EXPECT_TRUE(contains(tandem_last_error(), "remote process exited")) << tandem_last_error();
}

TEST(RankNccl, AFailedSendEndsItsGroup) {
  Clique clique(2);
  StandinFaults faults;
  faults.milliseconds = 100;
  standin_nccl_plant(clique.comm(1), &faults);
  faults.send_error = 4;
  standin_nccl_plant(clique.comm(0), &faults);
  std::array<uint64_t, 2> received{};
  const auto errors = swap_bytes(clique, &received);
  EXPECT_TRUE(contains(errors[0], "ncclSend failed: invalid argument")) << errors[0];
}

// A small problem of one document, forward or backward.
struct SmallCall {
  explicit SmallCall(const std::string& flags = "")
      : in(from_flags("--packed 1 --lengths-q 70 --lengths-k 70 --heads-q 2 --heads-k 1 --head-dim 64 --head-dim-v 64 "
                      "--dtype bf16 --align 8 --causal 1 " +
                      flags)) {}

  Instance in;
};

std::vector<std::string> run_on(Clique& clique, const Problem& problem, const CpPlan& plan, int32_t execution,
                                const AdjustArgs& adjust = nullptr) {
  const int32_t ranks = clique.transport(0)->ranks;
  fill_unused(problem);
  return on_ranks(ranks, [&](int32_t rank) {
    return run_rank(problem, {plan.get(), clique.transport(rank), execution, the_gpu().context()}, adjust);
  });
}

TEST(RankNccl, AsynchronousErrorsEndTheCall) {
  for (const int faulty : {0, 1}) {
    Clique clique(2);
    StandinFaults faults;
    faults.milliseconds = 100;
    standin_nccl_plant(clique.comm(1 - faulty), &faults);
    faults.async_error = 6;
    standin_nccl_plant(clique.comm(faulty), &faults);
    SmallCall call;
    Outputs outputs = call.in.outputs(TANDEM_FORWARD);
    const Problem problem = call.in.problem(TANDEM_FORWARD, &outputs);
    const auto errors = run_on(clique, problem, plan_of(problem, {2}), TANDEM_CP_GATHER);
    for (const std::string& error : errors) EXPECT_TRUE(contains(error, "remote process exited")) << error;
  }
}

TEST(RankNccl, WrongArgumentsAreRefused) {
  tandem_cp_transport transport{};
  void* comm = nullptr;
  ncclCommInitAll(&comm, 1, nullptr);
  EXPECT_EQ(tandem_cp_nccl_open(nullptr, comm, nullptr, &transport), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(tandem_last_error(), "context (of the CPU) must be a context of a GPU")) << tandem_last_error();
  EXPECT_EQ(tandem_cp_nccl_open(the_gpu().context(), nullptr, nullptr, &transport), TANDEM_INVALID_ARGUMENT);
  EXPECT_EQ(tandem_cp_nccl_open(the_gpu().context(), comm, nullptr, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_EQ(tandem_cp_nccl_close(&transport), TANDEM_INVALID_ARGUMENT);
  ncclCommDestroy(comm);
}

TEST(RankNccl, AMissingLibraryOrFunctionIsNamed) {
  context_parallel::NcclLibrary library;
  const Status missing = context_parallel::load_nccl("libnccl_of_no_machine.so.2", &library);
  EXPECT_EQ(missing.code, TANDEM_UNSUPPORTED);
  EXPECT_TRUE(contains(missing.message, "libnccl_of_no_machine.so.2 cannot be loaded")) << missing.message;
  const Status other = context_parallel::load_nccl("libm.so.6", &library);
  EXPECT_EQ(other.code, TANDEM_UNSUPPORTED);
  EXPECT_TRUE(contains(other.message, "libm.so.6 lacks ncclGroupStart")) << other.message;
}

// ---- Executions with kernels --------------------------------------------------------------------------------------

// Runs both passes on the ranks of a division. Returns hashes of out, lse and all gradients.
std::vector<uint64_t> bits_on_gpus(Instance& in, const Division& division, std::string* error) {
  std::vector<uint64_t> bits;
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    Outputs outputs = in.outputs(pass);
    const Problem problem = in.problem(pass, &outputs);
    Clique clique(division.ranks);
    const AdjustArgs options = options_of(in.args(pass, &outputs));
    for (const std::string& e : run_on(clique, problem, plan_of(problem, division), division.execution, options)) {
      *error += e;
    }
    for (const Tensor* t : outputs.all()) {
      if (*t) bits.push_back(t->fingerprint());
    }
    if (pass == TANDEM_FORWARD) in.give_results(&outputs);
  }
  return bits;
}

Engine engine_on_gpus(const Division& division) {
  return [division](const EngineCall& call) {
    Clique clique(division.ranks);
    const auto errors = run_on(clique, call, plan_of(call, division), division.execution,
                               options_of(call.instance->args(call.pass, call.outputs)));
    for (const std::string& error : errors) {
      if (!error.empty()) throw std::runtime_error(error);
    }
  };
}

const char* const kKernelCases[] = {
    "--packed 1 --lengths-q 200,0,1,61 --lengths-k 200,0,1,61 --heads-q 4 --heads-k 2 --head-dim 64 --head-dim-v 64 "
    "--dtype bf16 --align 8 --causal 1 --sink f32",
    "--packed 1 --lengths-q 150,40 --lengths-k 150,40 --heads-q 2 --heads-k 2 --head-dim 64 --head-dim-v 64 "
    "--dtype bf16 --align 8 --left 70 --right 9 --alibi head",
    "--packed 1 --lengths-q 150,40 --lengths-k 150,40 --heads-q 4 --heads-k 2 --head-dim 64 --head-dim-v 64 "
    "--dtype bf16 --align 8 --dropout 0.25 --mask-mod k<=q+head&&(q+batch)%7>=k%5 --score-mod "
    "score*0.5-slope[head]*abs(q-k)+table[head,(q*k)%9]+k/seqlen_k",
};

// The tests are skipped without a compiler.
class RankGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::unique_ptr<jit::Compiler> compiler;
    const Status status = jit::Compiler::open({}, Env::get(), &compiler);
    if (!status.ok()) GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
  }
};

TEST_F(RankGpu, EveryExecutionIsAccurate) {
  for (const char* flags : kKernelCases) {
    for (const int32_t execution : {TANDEM_CP_GATHER, TANDEM_CP_RING, TANDEM_CP_HEADS}) {
      for (const int64_t chunk : {0, 64}) {
        const Division division{execution == TANDEM_CP_RING ? 3 : 2, TANDEM_CP_BALANCED, execution, chunk};
        const Verdict verdict = run_case(from_flags(flags), engine_on_gpus(division));
        EXPECT_EQ(verdict.failure + verdict.refusal, "") << division.text();
      }
    }
  }
}

// Without chunks the neighbouring rows of a striped shard have a distance of several positions.
TEST_F(RankGpu, StripedShardsReadPositions) {
  const std::string flags = std::string(kKernelCases[1]) + " --dropout 0.25";
  const Division division{3, TANDEM_CP_STRIPED, TANDEM_CP_RING, 0};
  const Verdict verdict = run_case(from_flags(flags), engine_on_gpus(division));
  EXPECT_EQ(verdict.failure + verdict.refusal, "");
}

// A rank has the bias rows of its queries.
const char* const kBiasCase =
    "--batch 2 --seqlen-q 90 --seqlen-k 130 --used-q 90,41 --used-k 130,41 --heads-q 2 --heads-k 1 --head-dim 64 "
    "--head-dim-v 64 --dtype bf16 --align 8 --bias ";

TEST_F(RankGpu, Biases) {
  const std::pair<const char*, Division> cases[] = {
      {"f32 --bias-shape b1ij --causal 1", {2, TANDEM_CP_BALANCED, TANDEM_CP_HEADS, 0}},
      {"same", {2, TANDEM_CP_STRIPED, TANDEM_CP_RING, 0}},
      {"bool", {2, TANDEM_CP_STRIPED, TANDEM_CP_HEADS, 0}}};
  for (const auto& [bias, division] : cases) {
    const Verdict verdict = run_case(from_flags(std::string(kBiasCase) + bias), engine_on_gpus(division));
    EXPECT_EQ(verdict.failure + verdict.refusal, "") << bias;
  }
}

// Without chunks blocks cross the bounds of shards.
TEST_F(RankGpu, BlockMasks) {
  const char* flags =
      "--batch 2 --seqlen-q 260 --seqlen-k 260 --used-q 260,41 --used-k 260,41 --heads-q 2 --heads-k 1 --head-dim 64 "
      "--head-dim-v 64 --dtype bf16 --align 8 --blocks random --block-q 128 --block-k 128 --block-shape b1 "
      "--mask-mod (q+k)%3>0";
  for (const Division& division :
       {Division{2, TANDEM_CP_BALANCED, TANDEM_CP_GATHER, 0}, Division{2, TANDEM_CP_ZIGZAG, TANDEM_CP_HEADS, 128}}) {
    const Verdict verdict = run_case(from_flags(flags), engine_on_gpus(division));
    EXPECT_EQ(verdict.failure + verdict.refusal, "") << division.text();
  }
  Instance in(from_flags(std::string(flags) + " --block-q 64"));
  std::string error;
  bits_on_gpus(in, {1, TANDEM_CP_BALANCED, TANDEM_CP_GATHER, 0}, &error);
  EXPECT_TRUE(contains(error, "block_q (64) and block_k (128) must be multiples of 128 on a GPU")) << error;
}

TEST_F(RankGpu, Float64GradientsOfCapturedTensorsAreRefused) {
  Instance in(from_flags(kKernelCases[0]));
  Outputs outputs = in.outputs(TANDEM_BACKWARD);
  const Problem problem = in.problem(TANDEM_BACKWARD, &outputs);
  double values[2] = {1, 1};
  const tandem_dtype f64{TANDEM_FLOAT, 64, 1};
  const tandem_tensor t{&values[0], {TANDEM_CPU, 0}, 0, f64, nullptr, nullptr, 0};
  const tandem_tensor gradient{&values[1], {TANDEM_CPU, 0}, 0, f64, nullptr, nullptr, 0};
  const tandem_mod_tensor captured{"t", &t, &gradient};
  const tandem_mod mod{sizeof(tandem_mod), "score * t", nullptr, 0, &captured, 1};
  Clique clique(1);
  const auto errors = run_on(clique, problem, plan_of(problem, {1}), TANDEM_CP_GATHER,
                             [&](tandem_attention_args& a) { a.score_mod = &mod; });
  EXPECT_TRUE(contains(errors[0], "score_mod.t.gradient.dtype (float64) must be float32 on a GPU")) << errors[0];
}

TEST_F(RankGpu, BitsOfBiasesDoNotDependOnTheRanks) {
  Instance in(from_flags(std::string(kBiasCase) + "f32 --bias-shape b1ij --causal 1"));
  std::string error;
  const std::vector<uint64_t> one = bits_on_gpus(in, {1, TANDEM_CP_CONTIGUOUS, TANDEM_CP_GATHER, 64}, &error);
  EXPECT_EQ(bits_on_gpus(in, {2, TANDEM_CP_ZIGZAG, TANDEM_CP_HEADS, 64}, &error), one);
  EXPECT_EQ(error, "");
}

TEST_F(RankGpu, BitsWithChunksDoNotDependOnTheRanks) {
  for (const char* flags : kKernelCases) {
    Instance in(from_flags(flags));
    std::string error;
    const std::vector<uint64_t> one = bits_on_gpus(in, {1, TANDEM_CP_CONTIGUOUS, TANDEM_CP_GATHER, 64}, &error);
    for (const Division& division :
         {Division{2, TANDEM_CP_BALANCED, TANDEM_CP_GATHER, 64}, Division{3, TANDEM_CP_STRIPED, TANDEM_CP_RING, 64},
          Division{2, TANDEM_CP_ZIGZAG, TANDEM_CP_HEADS, 64}}) {
      EXPECT_EQ(bits_on_gpus(in, division, &error), one) << division.text();
      EXPECT_EQ(error, "");
    }
  }
}

}  // namespace
}  // namespace tandem::test
