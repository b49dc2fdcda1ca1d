// tandem verify: the error of any problem against float64, by the bound of check_accuracy.h.
#include <cstdio>
#include <memory>

#include "cli/compare.h"
#include "cli/flags.h"

namespace tandem::tool {
namespace {

struct Verify {
  MachineFlags machine;
  ProblemFlags problem;
  bool forward_only = false, gradients = false, dlse = false;
  double magnitude = 1;
  uint64_t seed = 1;

  int run();
  Inputs inputs() const;
};

Inputs Verify::inputs() const {
  Random random(seed);
  Inputs in = problem.random_inputs(random, magnitude);
  if (dlse) {
    const auto& q = in.q.shape();
    in.dlse =
        random_buffer(random, DType::f32, q.size() == 3 ? std::vector{q[1], q[0]} : std::vector{q[0], q[2], q[1]});
  }
  return in;
}

int Verify::run() {
  Attention options = problem.mask.options();
  options.dropout_seed = seed;
  auto [on, given, remarks] = machine.open(inputs(), options, gradients ? TANDEM_BACKWARD : TANDEM_FORWARD);
  const Inputs& in = given.used();
  const bool backward = gradients || (!forward_only && on->serves_gradients(in, options, &remarks));
  if (gradients) on->require_gradients(in, options);
  print_problem(in, *on, remarks);
  Results results(in, backward, false);
  if (is_empty(results)) {
    std::printf("%s", kNothingRan);
    return 0;
  }
  std::vector<AccuracyCheck> checks;
  {
    Progress progress("verifying", 1);
    checks = check_exactness(*on, given, options, backward, results, progress);
  }
  std::printf("\n%s\n", exactness_table(checks).c_str());
  if (all_good(checks)) {
    std::printf(
        "%s  every head errs at most as much as the rule allows: twice the error of\n"
        "      standard attention in %s, plus rounding\n",
        good("PASS").c_str(), short_name(in.q.dtype()).c_str());
    return 0;
  }
  std::printf("%s\n", bad("FAIL").c_str());
  return 1;
}

}  // namespace

void add_verify(Command app) {
  auto verify = std::make_shared<Verify>();
  Command command = app.add("verify", "Compare any problem with float64, forward and backward");
  command.footer(R"(Examples:
  tandem verify                                      8 heads, 512 x 512, head_dim 64, float32
  tandem verify --dtype bf16 --causal --head-dim 128
  tandem verify --heads-q 8 --heads-k 2 --seqlen-q 1 --seqlen-k 4096      decoding, grouped queries
  tandem verify --lengths-q 5,0,300 --lengths-k 9,7,300 --window '128,0'  packed sequences
  tandem verify --dtype bf16 --backward --device vgpu:b200 --heads 1 --seqlen 70
  tandem verify --dtype f16 --softcap 30 --sink --bias f32 --dropout 0.1

Exit code: 0 when every head of every result is exact enough, 1 when not, 2 when the problem cannot be served.)");
  verify->problem.add_to(command);
  command.option("--magnitude", verify->magnitude, "Standard deviation of q; a large value makes a sharp softmax [1]")
      .at_least_zero();
  command.option("--seed", verify->seed, "Seed of the random inputs and of dropout [1]");
  const Flag forward_only = command.flag("--forward-only", verify->forward_only, "No gradients");
  command.flag("--backward", verify->gradients, "Gradients; exit code 2 if the device does not compute them")
      .excludes(forward_only);
  command.flag("--dlse", verify->dlse, "A random gradient of the lse too");
  verify->machine.add_to(command);
  command.run([verify] { return verify->run(); });
}

}  // namespace tandem::tool
