// The judge: whether an engine's result is as exact as it must be.
//
//   max error  <= 2   * max error of the plain formula  + 2 * max |ref + 0.3 - 0.3 - ref|
//   mean error <= 1.5 * mean error of the plain formula + half a unit of float32
//
// both against the oracle in float64, for every head of every sequence on its own; ref + 0.3 - 0.3 is computed in the
// type of the result. The plain formula is run several times with random rounding (plain.h), because luck decides what
// one run does to few numbers: its max error is the largest of all runs, or 3 times the root mean square over the runs
// of its hardest number, whichever is more; its mean error is the mean of the runs plus 3 times their spread, and is
// asked for from 16 numbers on. What fewer refuse, 32 runs decide. Where one key takes a row, a forward's result is
// held to one run without noise: there it makes next to no error, and noise would make one. Of 16-bit inputs the log-
// sum-exp, and float32 results in units of the largest, may err by 2^-13 besides, as exponentials do. Infinities must
// stand where the oracle's stand, what is exactly zero by structure must be zero, and nothing may be NaN that is not
// NaN in the oracle.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "problem/problem.h"
#include "support/case.h"
#include "support/instance.h"

namespace tandem::test {

// A problem in host memory and, for engines that compute elsewhere and copy them whole, the tensors that it views.
struct EngineCall : Problem {
  EngineCall(const Problem& problem, Instance* its_instance = nullptr, Outputs* its_outputs = nullptr)
      : Problem(problem), instance(its_instance), outputs(its_outputs) {}

  Instance* instance;
  Outputs* outputs;
};

// Runs forward or backward by call.pass, on the outputs of the call. An exception is a failure of the case, but for
// Refused: the engine sees only now that it cannot serve the call, and has written nothing.
using Engine = std::function<void(const EngineCall& call)>;
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Verdict {
  std::string failure;  // empty: good. Otherwise what was wrong and the flags that repeat it
  std::string refusal;  // why the engine or make_problem does not serve the case; nothing was run
  double worst = 0;     // the largest error seen, in units of the allowed one
};

// Why an engine cannot serve a call; empty when it can.
using Supports = std::function<std::string(const EngineCall& call)>;

// What of a case with gradients is judged: both passes, or the gradients alone, of a forward that the oracle makes.
enum class Passes { both, backward };

// Runs the case through make_problem and the engine, forward and backward, and compares with the oracle. Checks the
// guards of all outputs and that no input has changed. Backward of 16-bit inputs reads the reference's out and lse,
// rounded. That of float32 and float64 reads the engine's own, because its scores are to be those that made them.
// adjust may change the inputs before they are used; the flags of a failure do not repeat what it did.
// flags: of tandem_fuzz, which choose the engine in the command that repeats a failure.
Verdict run_case(const Case& c, const Engine& engine, const Supports& supports = nullptr,
                 const std::function<void(Instance&)>& adjust = nullptr, const std::string& flags = "",
                 Passes passes = Passes::both);

}  // namespace tandem::test
