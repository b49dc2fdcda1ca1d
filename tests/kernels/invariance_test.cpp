// With batch_invariant a request has the same bits alone, in any batch, and under any bound of lengths. Requests with
// few queries are split at fixed keys.
#include <cstring>
#include <numeric>

#include "engine/context.h"
#include "kernels/on_gpu.h"
#include "plan/plan.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

void copy_rows(const Tensor& from, int64_t first, Tensor& to) {
  const int64_t begin = first * (from.size() / std::max<int64_t>(from.shape()[0], 1));
  for (int64_t n = 0; n < to.size(); ++n)
    std::memcpy(to.element(n), from.element(begin + n), static_cast<size_t>(size_of(to.dtype())));
}

void scale_rows(Tensor& to, int64_t first, int64_t rows, double factor) {
  const int64_t row = to.size() / std::max<int64_t>(to.shape()[0], 1);
  for (int64_t n = first * row; n < (first + rows) * row; ++n) to.set(n, to.get(n) * factor);
}

// Compares rows from `first` on of dimension 0 of the batch's tensors with all rows of the other result's.
void expect_same_rows(const Tensor& batch, int64_t first, const Tensor& alone, const std::string& what) {
  const int64_t begin = first * (batch.size() / std::max<int64_t>(batch.shape()[0], 1));
  for (int64_t n = 0; n < alone.size(); ++n) {
    ASSERT_EQ(std::memcmp(batch.element(begin + n), alone.element(n), static_cast<size_t>(size_of(alone.dtype()))), 0)
        << what << ", element " << n << ": " << batch.get(begin + n) << " in the batch, " << alone.get(n) << " alone";
  }
}

TEST(KernelsInvariance, ASequenceOfAPackedBatchAndAlone) {
  for (const std::string dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 "}) {
    for (const std::string more : {"--causal 1", "--left 100 --right 30 --softcap 9", ""}) {
      const std::string common =
          "--dtype bf16 --packed 1 --max-seqlen 0 --invariant 1 --heads-q 8 --heads-k 2 " + dims + more;
      Repeated batch(common + " --lengths-q 300,5,0,129,700,64 --lengths-k 300,90,7,129,8400,1");
      const Case& c = batch.instance->c;
      // The last tile of an odd sequence contains a neighbour's rows, with scores of sigma 30.
      for (size_t b = 0, q = 0; b < c.lengths_q.size(); q += static_cast<size_t>(c.lengths_q[b++]))
        if (b % 2 == 0) scale_rows(batch.instance->q, static_cast<int64_t>(q), c.lengths_q[b], 32);
      batch.run();
      for (size_t b = 0; b < c.lengths_q.size(); ++b) {
        int64_t q = 0, k = 0;
        for (size_t n = 0; n < b; ++n) q += c.lengths_q[n], k += c.lengths_k[n];
        auto in =
            std::make_unique<Instance>(from_flags(kServed + common + " --lengths-q " + std::to_string(c.lengths_q[b]) +
                                                  " --lengths-k " + std::to_string(c.lengths_k[b])));
        copy_rows(batch.instance->q, q, in->q);
        copy_rows(batch.instance->k, k, in->k);
        copy_rows(batch.instance->v, k, in->v);
        Repeated alone(std::move(in));
        alone.run();
        expect_same_rows(batch.outputs.out, q, alone.outputs.out, common + ", sequence " + std::to_string(b));
      }
    }
  }
}

TEST(KernelsInvariance, ASequenceOfADenseBatchAndAlone) {
  for (const std::string more : {"--causal 1", "--left 30 --alibi head", "--scale -0.1"}) {
    const std::string common =
        "--dtype f16 --invariant 1 --heads-q 6 --heads-k 2 --seqlen-q 210 --seqlen-k 333 --head-dim 128 --head-dim-v "
        "64 " +
        more;
    Repeated batch(common + " --batch 5");
    batch.run();
    for (int64_t b = 0; b < 5; ++b) {
      auto in = std::make_unique<Instance>(from_flags(kServed + common));
      copy_rows(batch.instance->q, b, in->q);
      copy_rows(batch.instance->k, b, in->k);
      copy_rows(batch.instance->v, b, in->v);
      if (in->alibi_slopes) copy_rows(batch.instance->alibi_slopes, 0, in->alibi_slopes);
      Repeated alone(std::move(in));
      alone.run();
      expect_same_rows(batch.outputs.out, b, alone.outputs.out, common + ", sequence " + std::to_string(b));
      expect_same_rows(batch.outputs.lse, b, alone.outputs.lse, common + ", lse of sequence " + std::to_string(b));
    }
  }
}

// ---- Splits of sequences with few queries ----

// Splits of 128 keys, so that small problems have several. splits: the most of all heads of a sequence.
plan::Tuning short_splits(int64_t splits = 128) {
  plan::Tuning tuning;
  for (plan::ForwardOrderTuning* t : {&tuning.sm90.forward_order, &tuning.sm100.forward_order})
    t->invariant_split_keys = 128, t->invariant_splits = splits;
  return tuning;
}

TEST(KernelsInvariance, SplitsWithEveryOption) {
  const ForcedTuning forced(short_splits());
  const std::string few = "--dtype bf16 --batch 2 --heads-q 4 --heads-k 2 --seqlen-q 5 --seqlen-k 700 --invariant 1 ";
  const char* const options[] = {
      "",
      "--causal 1 --used-k 690,3",
      "--causal 1 --top-left 1",
      "--left 90",
      "--left 200 --right 30 --used-q 5,2",
      "--left 40 --right -20 --used-k 700,0",
      "--sink f32 --left 100",
      "--sink same --causal 1 --used-k 700,600 --lse 0",
      "--softcap 5",
      "--alibi batch --causal 1",
      "--bias f32 --bias-inf 1",
      "--bias bool --bias-shape b1ij --used-q 0,5",
      "--dropout 0.3 --causal 1",
      "--scale -0.2",
      "--values large --causal 1",
      "--values needle20",
      "--max-scores 1 --causal 1",
      "--float32 o --lse 0",
      "--score-mod score*temperature+table[head,clamp(q-k+4,0,8)]",
      "--mask-mod (q^k)&3!=0",
      "--explicit 1 --diagonals 400,-60 --causal 1",
  };
  std::vector<CheckedCase> cases;
  for (const char* option : options) cases.emplace_back(few + option);
  expect_all_good(cases);
}

// The rows of 128 heads of one query have splits.
TEST(KernelsInvariance, SplitsOfManyHeads) {
  const ForcedTuning forced(short_splits());
  const std::string one = "--dtype bf16 --heads-q 128 --heads-k 1 --seqlen-q 1 --seqlen-k 1800 --invariant 1 ";
  expect_all_good({{one + "--batch 2 --used-k 1800,700"},
                   {one + "--batch 2 --page-size 64 --used-k 1500,30 --sink f32"},
                   {one + "--page-size 16 --used-k 1300 --left 900 --head-dim 128 --head-dim-v 128"},
                   {one + "--batch 2 --used-q 0,1 --float32 o --head-dim 128 --head-dim-v 128"}});
}

// Padded queries, packed queries and pages; sequences that are split, that have longer splits, and that have none.
TEST(KernelsInvariance, SplitsInMixedBatches) {
  const ForcedTuning forced(short_splits(4));
  const std::string padded =
      "--dtype bf16 --batch 4 --heads-q 8 --heads-k 2 --seqlen-q 300 --seqlen-k 512 "
      "--used-q 1,300,8,0 --used-k 500,400,129,300 --invariant 1 ";
  const std::string packed = "--dtype f16 --packed 1 --heads-q 8 --heads-k 1 --lengths-q 1,130,0,8,9,1 --invariant 1 ";
  const std::string pages = packed + "--used-k 500,130,7,333,512,0 --seqlen-k 512 --page-size 16 ";
  expect_all_good({{padded + "--causal 1"},
                   {padded + "--max-scores 1 --left 300 --sink f32"},
                   {packed + "--lengths-k 900,130,50,257,700,600 --causal 1"},
                   {packed + "--lengths-k 900,130,50,257,700,600 --float32 o --used-q 1,100,0,3,9,1"},
                   {pages + "--causal 1"},
                   {pages + "--left 200 --max-scores 1 --head-dim 64 --head-dim-v 128"}});
}

TEST(KernelsInvariance, SplitsWithEveryHeadDim) {
  const ForcedTuning forced(short_splits());
  const std::string few = "--dtype bf16 --packed 1 --lengths-q 1,70 --lengths-k 600,600 --heads-q 4 --invariant 1 ";
  expect_all_good({{few + "--head-dim 80 --head-dim-v 40 --causal 1"},
                   {few + "--head-dim 192 --head-dim-v 128"},
                   {few + "--head-dim 256 --head-dim-v 256 --causal 1"},
                   {few + "--head-dim 256 --head-dim-v 256 --dtype f16 --heads-k 4"}});
}

// The place of a key's row in the rows of k and v.
int64_t key_row(const Instance& in, int64_t sequence, int64_t key) {
  const Case& c = in.c;
  if (c.page_size) {
    const int64_t columns = c.seqlen_k / c.page_size, column = key / c.page_size;
    const auto page = static_cast<int64_t>(in.page_table.get(sequence * columns + column));
    return page * c.page_size + key % c.page_size;
  }
  if (!c.packed) return sequence * c.seqlen_k + key;
  return std::accumulate(c.lengths_k.begin(), c.lengths_k.begin() + sequence, key);
}

void copy_row(const Tensor& from, int64_t row, Tensor& to, int64_t to_row, int64_t size) {
  for (int64_t n = 0; n < size; ++n)
    std::memcpy(to.element(to_row * size + n), from.element(row * size + n), static_cast<size_t>(size_of(to.dtype())));
}

// Copies `keys` keys of a sequence, and its queries from row first_query on, to a problem that has it alone. Keys
// before a window keep their values, because their pages may be poison.
void copy_sequence(const Instance& from, int64_t sequence, int64_t first_query, int64_t keys, Instance& to) {
  const Case& c = from.c;
  const int64_t queries = to.q.size() / (c.heads_q * c.head_dim);
  for (int64_t i = 0; i < queries; ++i) copy_row(from.q, first_query + i, to.q, i, c.heads_q * c.head_dim);
  for (int64_t j = c.left == TANDEM_UNBOUNDED ? 0 : std::max<int64_t>(0, keys - queries - c.left); j < keys; ++j) {
    copy_row(from.k, key_row(from, sequence, j), to.k, j, c.heads_k * c.head_dim);
    copy_row(from.v, key_row(from, sequence, j), to.v, j, c.heads_k * c.head_dim_v);
  }
  for (int64_t n = 0; to.sink && n < to.sink.size(); ++n) to.sink.set(n, from.sink.get(n));
}

// One call has prefill chunks and decodes in pages. Each request has the same bits alone: packed, with a larger bound
// of lengths, and in dense tensors.
TEST(KernelsInvariance, ARequestOfAMixedBatchAndAlone) {
  const ForcedTuning forced(short_splits());
  const std::vector<int64_t> q = {1, 130, 8, 1, 9, 2}, k = {700, 300, 513, 100, 400, 640};
  for (const std::string more : {"--causal 1", "--left 200 --right 0 --sink f32", "--values large --left 300"}) {
    const std::string common =
        "--dtype bf16 --invariant 1 --heads-q 8 --heads-k 2 --head-dim 64 --head-dim-v 64 " + more;
    Repeated batch(common +
                   " --packed 1 --lengths-q 1,130,8,1,9,2 --used-k 700,300,513,100,400,640 --seqlen-k 768 "
                   "--page-size 16");
    batch.run();
    int64_t first = 0;
    for (size_t b = 0; b < q.size(); first += q[b++]) {
      const std::string its_q = std::to_string(q[b]), its_k = std::to_string(k[b]);
      const std::string packed = common + " --packed 1 --lengths-q " + its_q + " --lengths-k " + its_k;
      const std::string dense = common + " --seqlen-q " + its_q + " --seqlen-k " + its_k;
      for (const std::string& alone : {packed, packed + " --max-seqlen 900", dense}) {
        auto in = std::make_unique<Instance>(from_flags(kServed + alone));
        copy_sequence(*batch.instance, static_cast<int64_t>(b), first, k[b], *in);
        Repeated one(std::move(in));
        one.run();
        expect_same_rows(batch.outputs.out, first, one.outputs.out, alone);
      }
    }
  }
}

// A plan and its launches serve every length up to the longest, as a graph that is replayed. The workspace keeps the
// results of the preceding call.
TEST(KernelsInvariance, LengthsThatChangeBetweenReplays) {
  if (!the_gpu()->is_virtual()) GTEST_SKIP() << "the test needs tensors in host memory";
  const ForcedTuning forced(short_splits());
  const std::string common =
      "--dtype bf16 --invariant 1 --heads-q 8 --heads-k 2 --head-dim 64 --head-dim-v 64 "
      "--causal 1 --seqlen-q 2 ";
  Instance in(from_flags(kServed + common + "--batch 3 --seqlen-k 768 --page-size 16 --used-k 768,768,768"));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  const Problem p = in.problem(TANDEM_FORWARD, &outputs);
  tandem::Engine& engine = *the_gpu()->context()->engine;
  std::vector<std::byte> workspace(engine.workspace_size(p), std::byte{0xff});
  const tandem_attention_args args = in.args(TANDEM_FORWARD, &outputs);
  const CallWorkspace memory{args, TANDEM_FORWARD, workspace.data(), workspace.size()};
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{768, 768, 768}, {2, 300, 129}, {640, 128, 2}, {257, 768, 500}}) {
    for (size_t b = 0; b < lengths.size(); ++b)
      in.seqused_k.set(static_cast<int64_t>(b), static_cast<double>(lengths[b]));
    require(engine.run(p, memory, the_gpu()->stream()));
    require(the_gpu()->device().synchronize(the_gpu()->stream()));
    for (size_t b = 0; b < lengths.size(); ++b) {
      const auto sequence = static_cast<int64_t>(b);
      auto its = std::make_unique<Instance>(from_flags(kServed + common + "--seqlen-k " + std::to_string(lengths[b])));
      copy_sequence(in, sequence, 2 * sequence, lengths[b], *its);
      Repeated alone(std::move(its));
      alone.run();
      expect_same_rows(outputs.out, sequence, alone.outputs.out, std::to_string(lengths[b]) + " keys");
      expect_same_rows(outputs.lse, sequence, alone.outputs.lse, std::to_string(lengths[b]) + " keys, lse");
    }
  }
}

// Prefill chunks that begin at multiples of 768 queries have the bits of one forward of all queries.
TEST(KernelsInvariance, PrefillChunksAndTheWhole) {
  for (const std::string more : {"--causal 1", "--left 300 --values large --dtype f16"}) {
    const std::string common =
        "--dtype bf16 --invariant 1 --heads-q 2 --heads-k 1 --head-dim 64 --head-dim-v 64 --causal 1 " + more;
    Repeated whole(common + " --seqlen-q 900 --seqlen-k 900");
    whole.run();
    for (const auto& [first, end] : {std::pair<int64_t, int64_t>{0, 768}, {768, 900}}) {
      const std::string keys = std::to_string(end);
      auto in = std::make_unique<Instance>(from_flags(kServed + common + " --packed 1 --lengths-q " +
                                                      std::to_string(end - first) + " --lengths-k " + keys));
      copy_sequence(*whole.instance, 0, first, end, *in);
      Repeated chunk(std::move(in));
      chunk.run();
      const Tensor &of_whole = whole.outputs.out, &of_chunk = chunk.outputs.out;
      const int64_t begin = first * 2 * 64;
      for (int64_t n = 0; n < of_chunk.size(); ++n)
        ASSERT_EQ(std::memcmp(of_whole.element(begin + n), of_chunk.element(n), 2), 0) << more << ", element " << n;
    }
  }
}

// Runs a backward on outputs as they are.
void run_backward(Instance& in, Outputs& outputs, bool accumulate) {
  const Gpu& gpu = *the_gpu();
  DeviceCall call(gpu, in, TANDEM_BACKWARD, outputs);
  call.args.accumulate = accumulate ? 1 : 0;
  call.prepare();
  call.allocate_workspace();
  call.forward(gpu.stream());
  call.fetch(gpu.stream());
}

// Context parallelism adds gradients of chunks in the call or after it, and both sums must have the same bits.
TEST(KernelsInvariance, AnAccumulatedGradientIsASeparateSum) {
  for (const std::string heads : {"--heads-k 2 ", "--heads-k 1 "}) {
    for (const std::string dims : {"--head-dim 128 --head-dim-v 128 ", "--head-dim 48 --head-dim-v 64 "}) {
      const std::string flags =
          "--gradients qkv --float32 g --dtype bf16 --packed 1 --lengths-q 70,130 --lengths-k "
          "150,140 --causal 1 --invariant 1 --heads-q 2 " +
          heads + dims;
      Instance in(from_flags(kServed + flags));
      Outputs exact = in.exact_outputs(TANDEM_FORWARD);
      reference::forward(in.exact_problem(TANDEM_FORWARD, &exact));
      in.give_results(&exact);
      Outputs alone = in.outputs(TANDEM_BACKWARD), sums = in.outputs(TANDEM_BACKWARD);
      const std::vector<std::pair<Tensor*, Tensor*>> gradients = {
          {&alone.dq, &sums.dq}, {&alone.dk, &sums.dk}, {&alone.dv, &sums.dv}};
      const auto before = [](int64_t n) { return static_cast<float>(n % 101 - 50) * 0.013f; };
      for (const auto& [_, sum] : gradients)
        for (int64_t n = 0; n < sum->size(); ++n) sum->set(n, before(n));
      run_backward(in, alone, false);
      run_backward(in, sums, true);
      for (const auto& [gradient, sum] : gradients) {
        for (int64_t n = 0; n < sum->size(); ++n) {
          const float expected = before(n) + static_cast<float>(gradient->get(n));
          ASSERT_EQ(static_cast<float>(sum->get(n)), expected) << flags << ", element " << n;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
