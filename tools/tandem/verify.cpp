// tandem verify: the error of any problem against float64, by the rule of judge.h.
#include <cstdio>
#include <memory>
#include <numeric>

#include "tandem/compare.h"
#include "tandem/flags.h"

namespace tandem::tool {
namespace {

struct Verify {
  MachineFlags machine;
  MaskFlags mask;
  std::string dtype = "f32", bias;
  int64_t batch = 1, heads_q = 8, heads_k = 0, seqlen_q = 512, seqlen_k = 0, head_dim = 64, head_dim_v = 0;
  std::vector<int64_t> lengths_q, lengths_k;
  bool sink = false, forward_only = false, dlse = false;
  double dropout = 0, magnitude = 1;
  uint64_t seed = 1;

  int run();
  Inputs inputs();
};

Buffer cumulative(const std::vector<int64_t>& lengths) {
  Buffer result(DType::i32, {static_cast<int64_t>(lengths.size()) + 1});
  int64_t sum = 0;
  result.set(0, 0);
  for (size_t b = 0; b < lengths.size(); ++b) {
    sum += lengths[b];
    result.set(static_cast<int64_t>(b) + 1, checked_index(sum, "--lengths"));
  }
  return result;
}

Inputs Verify::inputs() {
  Random random(seed);
  const DType type = dtype_from(dtype);
  const bool packed = !lengths_q.empty();
  if (heads_k == 0) heads_k = heads_q;
  if (seqlen_k == 0) seqlen_k = seqlen_q;
  if (head_dim_v == 0) head_dim_v = head_dim;
  if (lengths_k.empty()) lengths_k = lengths_q;
  const auto shape = [&](const std::vector<int64_t>& lengths, int64_t length, int64_t heads, int64_t dim) {
    if (packed) return std::vector{std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), heads, dim};
    return std::vector{batch, length, heads, dim};
  };
  Inputs in;
  in.q = random_buffer(random, type, shape(lengths_q, seqlen_q, heads_q, head_dim), magnitude);
  in.k = random_buffer(random, type, shape(lengths_k, seqlen_k, heads_k, head_dim));
  in.v = random_buffer(random, type, shape(lengths_k, seqlen_k, heads_k, head_dim_v));
  in.dout = random_buffer(random, type, shape(lengths_q, seqlen_q, heads_q, head_dim_v));
  if (packed) {
    in.cu_seqlens_q = cumulative(lengths_q);
    in.cu_seqlens_k = cumulative(lengths_k);
  }
  if (dlse) {
    const auto rows = in.q.shape();
    in.dlse = random_buffer(random, DType::f32,
                            packed ? std::vector{rows[1], rows[0]} : std::vector{rows[0], rows[2], rows[1]});
  }
  if (sink) in.sink = random_buffer(random, DType::f32, {heads_q});
  if (!bias.empty()) {
    const DType bias_type = bias == "bool" ? DType::boolean : bias == "same" ? type : DType::f32;
    in.bias = random_buffer(random, bias == "bool" ? DType::f32 : bias_type, {1, heads_q, seqlen_q, seqlen_k});
    if (bias == "bool") {
      const Buffer numbers = std::move(in.bias);
      in.bias = Buffer(DType::boolean, numbers.shape());
      for (int64_t i = 0; i < numbers.count(); ++i) in.bias.set(i, numbers.get(i) > -0.5);
    }
  }
  mask.fill(in);
  return in;
}

int Verify::run() {
  Machine on(machine.device, machine.threads);
  Attention options = mask.options();
  options.dropout_p = dropout;
  options.dropout_seed = seed;
  const Inputs in = inputs();
  Results results(in, !forward_only, false);
  Progress progress("float64", 1);
  const auto judgements = check_exactness(on, in, options, !forward_only, results, progress);
  std::printf("q %s  k %s  v %s  %s  on %s\n\n%s\n", io::shape_text(in.q.shape()).c_str(),
              io::shape_text(in.k.shape()).c_str(), io::shape_text(in.v.shape()).c_str(), dtype.c_str(),
              on.engine.context().description().c_str(), exactness_table(judgements).c_str());
  if (all_good(judgements)) {
    std::printf("%s  no head errs more than the rule allows: twice the plain formula's error in %s, plus rounding\n",
                good("PASS").c_str(), dtype.c_str());
    return 0;
  }
  std::printf("%s\n", bad("FAIL").c_str());
  return 1;
}

}  // namespace

void add_verify(CLI::App& app, int* exit_code) {
  auto verify = std::make_shared<Verify>();
  CLI::App* command = app.add_subcommand("verify", "Compare any problem with float64, forward and backward");
  command->footer(R"(Examples:
  tandem verify                                      8 heads, 512 x 512, head_dim 64, float32
  tandem verify --dtype bf16 --causal --head-dim 128
  tandem verify --heads-q 8 --heads-k 2 --seqlen-q 1 --seqlen-k 4096      decoding, grouped queries
  tandem verify --lengths-q 5,0,300 --lengths-k 9,7,300 --window '128,0'  packed sequences
  tandem verify --dtype f16 --softcap 30 --sink --bias f32 --dropout 0.1

Exit code: 0 when every head of every result is exact enough, 1 when not, 2 when the problem cannot be served.)");
  command->add_option("--dtype", verify->dtype, "f32, bf16, f16 or f64")->capture_default_str();
  const auto size = [&](const char* flag, int64_t& value, const char* text) {
    command->add_option(flag, value, text)->check(CLI::NonNegativeNumber)->group("Shape");
  };
  size("--batch", verify->batch, "Sequences [1]");
  size("--heads-q", verify->heads_q, "Query heads [8]");
  size("--heads-k", verify->heads_k, "Key and value heads [as --heads-q]");
  size("--seqlen-q", verify->seqlen_q, "Queries of a sequence [512]");
  size("--seqlen-k", verify->seqlen_k, "Keys of a sequence [as --seqlen-q]");
  size("--head-dim", verify->head_dim, "Size of a query and a key [64]");
  size("--head-dim-v", verify->head_dim_v, "Size of a value [as --head-dim]");
  command->add_option("--lengths-q", verify->lengths_q, "Packed: queries of each sequence")
      ->delimiter(',')
      ->group("Shape");
  command->add_option("--lengths-k", verify->lengths_k, "Packed: keys of each sequence [as --lengths-q]")
      ->delimiter(',')
      ->group("Shape")
      ->needs("--lengths-q");
  verify->mask.add_to(*command);
  command->add_option("--bias", verify->bias, "Random bias per head: f32, same (as q) or bool")
      ->check(CLI::IsMember({"f32", "same", "bool"}))
      ->group("Scores and masks");
  command->add_flag("--sink", verify->sink, "A random sink per head")->group("Scores and masks");
  command->add_option("--dropout", verify->dropout, "Probability to drop an entry")->group("Scores and masks");
  command->add_option("--magnitude", verify->magnitude, "Standard deviation of q; large ones make sharp softmaxes [1]");
  command->add_option("--seed", verify->seed, "Of the random inputs and of dropout [1]");
  command->add_flag("--forward-only", verify->forward_only, "No gradients");
  command->add_flag("--dlse", verify->dlse, "A random gradient of the lse too");
  verify->machine.add_to(*command);
  command->callback([verify, exit_code] { *exit_code = guarded([&] { return verify->run(); }); });
}

}  // namespace tandem::tool
