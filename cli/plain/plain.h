// The plain formula: attention as it is written without a fused engine. Two matrix products by the machine's BLAS with
// a softmax between them, the whole score matrix in memory, float32 arithmetic. What Tandem's exactness and speed are
// compared with.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cli/plain/blas.h"
#include "cpu/threads.h"
#include "problem/problem.h"

namespace tandem::plain {

enum class Rounding {
  // 16-bit inputs are widened once and results narrowed once, and backward finds the probabilities in memory while they
  // are small enough, as an autograd tape would have them: the faster way.
  none,
  // The formula in the input precision, whose error is the measure of an engine's: the probabilities and the gradient
  // of
  // the scores are rounded to the input type before they enter a product, backward starts from out and lse.
  intermediates
};

// float32 memory that is reused from call to call, so that no call pays for fresh pages.
class Scratch {
 public:
  class Loan {
   public:
    Loan(Scratch& owner, int64_t count);
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    float* data() { return memory_.get(); }

   private:
    Scratch& owner_;
    int64_t capacity_;
    std::unique_ptr<float[]> memory_;
  };
  int64_t bytes() const { return bytes_; }  // all that was ever needed at once

 private:
  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::unique_ptr<float[]>>> free_;
  std::atomic<int64_t> bytes_{0};
};

class Plain {
 public:
  // noise 0: every operation rounds to nearest. Otherwise scores, exponentials and lse are off at random, by what the
  // roundings of their operations in any order may amount to, seeded by noise (Monte Carlo arithmetic): a single run
  // may be right by luck, several show what the formula's error is.
  Plain(cpu::Threads& threads, const Blas& blas, Rounding rounding, uint32_t noise = 0)
      : threads_(threads), blas_(blas), rounding_(rounding), noise_(noise) {}

  // problem.out and lse.
  void forward(const Problem& problem);
  // The gradients that are present, of the problem that forward() saw last, whose out and lse it reads. Every option
  // but page tables.
  void backward(const Problem& problem);

  // Memory beyond inputs and outputs.
  int64_t scratch_bytes() const { return scratch_.bytes() + static_cast<int64_t>(kept_.size() * sizeof(float)); }

 private:
  cpu::Threads& threads_;
  const Blas& blas_;
  Rounding rounding_;
  uint32_t noise_;
  Scratch scratch_;
  std::vector<float> kept_;  // the probabilities of every head, seqlen_q x seqlen_k each; or empty
};

}  // namespace tandem::plain
