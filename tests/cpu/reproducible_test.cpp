// The bits depend neither on the number of threads, their order and the run nor, if requested, on the rest of the
// batch.
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/judged.h"
#include "reference/reference.h"

namespace tandem::test {
namespace {

const Tensor Outputs::*const kOutputs[] = {&Outputs::out,    &Outputs::lse,         &Outputs::dq,    &Outputs::dk,
                                           &Outputs::dv,     &Outputs::dbias,       &Outputs::dsink, &Outputs::dslope,
                                           &Outputs::dtable, &Outputs::dtemperature};

uint64_t fingerprint(const Outputs& o) {
  uint64_t sum = 0;
  for (const auto member : kOutputs) sum = sum * 31 + (o.*member).fingerprint();
  return sum;
}

void reverse_order(void*, int32_t tasks, void (*body)(void*, int32_t), void* data) {
  while (tasks > 0) body(data, --tasks);
}

void run(const Problem& p, cpu::Threads& threads, std::byte poison) {
  std::vector<std::byte> workspace(cpu::workspace_size(p, threads.count()), poison);
  (p.pass == TANDEM_FORWARD ? cpu::forward : cpu::backward)(p, threads, workspace.data());
}

void give_reference_results(Instance& in) {
  Outputs exact = in.exact_outputs(TANDEM_FORWARD);
  reference::forward(in.exact_problem(TANDEM_FORWARD, &exact));
  in.give_results(&exact);
}

const char* const kProblems[] = {
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 300 --seqlen-k 300 --head-dim 32 --head-dim-v 32 --causal 1",
    "--batch 3 --heads-q 2 --heads-k 2 --seqlen-q 150 --seqlen-k 400 --head-dim 16 --head-dim-v 16 --bias f32 "
    "--bias-shape 11ij --sink f32 --dlse 1",
    "--heads-q 8 --heads-k 1 --seqlen-q 200 --seqlen-k 500 --head-dim 24 --head-dim-v 40 --left 60 --right 10 "
    "--dropout 0.25",
    "--packed 1 --lengths-q 5,200,0,77 --lengths-k 300,200,9,3 --heads-q 2 --heads-k 2 --causal 1 --softcap 4",
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 1 --seqlen-k 4000 --head-dim 32 --head-dim-v 32",
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 3 --seqlen-k 2000 --head-dim 32 --head-dim-v 32 --splits 5 --causal "
    "1",
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 300 --seqlen-k 300 --head-dim 16 --head-dim-v 16 --mask-mod "
    "q//70==k//70 --score-mod score*temperature-slope[head]*abs(q-k)+table[head,(q*k)%9]",
};

TEST(CpuReproducible, AnyNumberOfThreadsInAnyOrder) {
  for (const char* flags : kProblems) {
    for (const std::string dtype : {"f32", "bf16", "f16"}) {
      Instance in(from_flags(std::string(flags) + " --dtype " + dtype));
      give_reference_results(in);
      for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
        uint64_t first = 0;
        for (const int count : {1, 2, 3, 7, 2, -1, -5}) {  // negative: a caller's threads, one after another
          cpu::Threads threads(std::abs(count), count < 0 ? reverse_order : nullptr, nullptr);
          Outputs o = in.outputs(pass);
          run(in.problem(pass, &o), threads, count == 2 ? std::byte{0} : std::byte{0xff});
          if (count == 1) first = fingerprint(o);
          EXPECT_EQ(fingerprint(o), first) << count << " threads, pass " << pass << ": " << to_flags(in.c);
        }
      }
    }
  }
}

// Rows [begin, begin + rows) of sequence b of one tensor into all rows of another with one sequence. Dense tensors are
// (batch, row, ...), packed ones (row, ...): both are runs of whole rows.
void copy_rows(const Tensor& from, int64_t begin, int64_t rows, int64_t row_size, Tensor& to) {
  for (int64_t n = 0; n < rows * row_size; ++n) to.set(n, from.get(begin * row_size + n));
}

struct Rows {
  int64_t q_begin, q, k_begin, k;
};

// Compares the bits of one sequence's results in a batch, and alone.
void compare_alone(const Case& together, const Case& alone, const Rows& rows) {
  const int64_t q_row = together.heads_q * together.head_dim, k_row = together.heads_k * together.head_dim;
  Instance many(together), one(alone);
  give_reference_results(many);
  copy_rows(many.q, rows.q_begin, rows.q, q_row, one.q);
  copy_rows(many.dout, rows.q_begin, rows.q, q_row, one.dout);
  copy_rows(many.k, rows.k_begin, rows.k, k_row, one.k);
  copy_rows(many.v, rows.k_begin, rows.k, k_row, one.v);
  give_reference_results(one);
  cpu::Threads threads(3, nullptr, nullptr);
  const auto same = [&](const char* name, const Tensor& a, int64_t begin, int64_t count, int64_t row, const Tensor& b) {
    for (int64_t n = 0; n < count * row; ++n) {
      ASSERT_EQ(std::memcmp(a.element(begin * row + n), b.element(n), static_cast<size_t>(size_of(a.dtype()))), 0)
          << name << " element " << n << ": " << a.get(begin * row + n) << " in the batch, " << b.get(n) << " alone; "
          << to_flags(together);
    }
  };
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    Outputs a = many.outputs(pass), b = one.outputs(pass);
    run(many.problem(pass, &a), threads, std::byte{0xff});
    run(one.problem(pass, &b), threads, std::byte{0xff});
    if (pass == TANDEM_FORWARD) {
      same("out", a.out, rows.q_begin, rows.q, q_row, b.out);
    } else {
      same("dq", a.dq, rows.q_begin, rows.q, q_row, b.dq);
      same("dk", a.dk, rows.k_begin, rows.k, k_row, b.dk);
      same("dv", a.dv, rows.k_begin, rows.k, k_row, b.dv);
    }
  }
}

TEST(CpuReproducible, BatchInvariant) {
  const std::string common = "--invariant 1 --heads-q 4 --heads-k 2 --head-dim 16 --head-dim-v 16 --causal 1 --dtype ";
  for (const std::string dtype : {"f32", "bf16", "f16"}) {
    for (const auto& [q, k] : {std::pair<int64_t, int64_t>{150, 170}, {1, 1500}, {4, 900}, {90, 300}}) {
      const std::string lengths = " --seqlen-q " + std::to_string(q) + " --seqlen-k " + std::to_string(k);
      compare_alone(from_flags(common + dtype + lengths + " --batch 5"), from_flags(common + dtype + lengths),
                    {2 * q, q, 2 * k, k});
      const std::string q_text = std::to_string(q), k_text = std::to_string(k);
      compare_alone(from_flags(common + dtype + " --packed 1 --lengths-q 3," + q_text + ",1,250 --lengths-k 40," +
                               k_text + ",2000,260"),
                    from_flags(common + dtype + " --packed 1 --lengths-q " + q_text + " --lengths-k " + k_text),
                    {3, q, 40, k});
      compare_alone(from_flags(common + dtype + lengths + " --batch 2 --splits 7"),
                    from_flags(common + dtype + lengths + " --splits 2"), {q, q, k, k});
    }
  }
}

}  // namespace
}  // namespace tandem::test
