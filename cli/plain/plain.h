// Standard attention without a fused kernel: two matrix products by the machine's BLAS and a softmax between them. The
// whole score matrix is in memory, and arithmetic is float32. The command compares Tandem's error and speed with
// standard attention's.
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
  // The faster variant. 16-bit inputs are widened once and results are narrowed once. Probabilities are kept in memory
  // for the backward, as on an autograd tape.
  none,
  // The variant in the input precision, for the error bound of an engine. The probabilities and the gradient of the
  // scores are rounded to the input type before they enter a product. The backward reads out and lse.
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
  int64_t bytes() const { return bytes_; }  // maximum size of any call

 private:
  std::mutex mutex_;
  std::vector<std::pair<int64_t, std::unique_ptr<float[]>>> free_;
  std::atomic<int64_t> bytes_{0};
};

class Plain {
 public:
  // noise 0: every operation rounds to nearest. Another noise seeds Monte Carlo arithmetic: scores, exponentials and
  // lse change at random by at most the roundings of their operations. Several runs show the typical error.
  Plain(cpu::Threads& threads, const Blas& blas, Rounding rounding, uint32_t noise = 0)
      : threads_(threads), blas_(blas), rounding_(rounding), noise_(noise) {}

  // Writes problem.out and lse.
  void forward(const Problem& problem);
  // Computes the present gradients of the last problem of forward(), from its out and lse. Page tables are not
  // supported.
  void backward(const Problem& problem);

  // Returns the memory in addition to inputs and outputs.
  int64_t scratch_bytes() const { return scratch_.bytes() + static_cast<int64_t>(kept_.size() * sizeof(float)); }

 private:
  cpu::Threads& threads_;
  const Blas& blas_;
  Rounding rounding_;
  uint32_t noise_;
  Scratch scratch_;
  std::vector<float> kept_;  // probabilities by head, seqlen_q x seqlen_k; or empty
};

}  // namespace tandem::plain
