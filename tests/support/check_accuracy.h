// Checks that the errors of an engine's result are within these bounds.
//
//   max error  <= 2   * max error of standard attention  + 2 * max |ref + 0.3 - 0.3 - ref|
//   mean error <= 1.5 * mean error of standard attention + half a unit of float32
//
// Errors are against the reference in float64, for every head of every sequence. ref + 0.3 - 0.3 has the result's type.
// One run on few numbers depends on chance, so that standard attention runs several times with random rounding
// (plain.h). The max error of standard attention is the largest of all runs. If that is more, it is 3 times the root
// mean square over the runs of its hardest number. The mean error of standard attention, compared from 16 numbers on,
// is the mean of the runs plus 3 times their spread. If a few runs refuse a result, 32 runs decide. The first runs
// suffice for a result within a bound that no later run lowers. A forward's row with one key is held to one run without
// noise, because the run has almost no error. With 16-bit inputs the log-sum-exp may err by another 2^-13, as
// exponentials do. This bound also holds for their float32 results in units of the largest. Infinities must stand where
// the reference's stand, and numbers that are zero by structure must be zero. A result may be NaN only where the
// reference is NaN.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "problem/problem.h"
#include "support/case.h"
#include "support/instance.h"

namespace tandem::test {

// A problem in host memory. Engines that compute elsewhere copy whole tensors, which it also lists.
struct EngineCall : Problem {
  EngineCall(const Problem& problem, Instance* its_instance = nullptr, Outputs* its_outputs = nullptr)
      : Problem(problem), instance(its_instance), outputs(its_outputs) {}

  Instance* instance;
  Outputs* outputs;
};

// Runs forward or backward by call.pass, on the outputs of the call. An exception is a failure of the case, except
// Refused: the engine detects only during the call that it cannot serve it. The engine has then written nothing.
using Engine = std::function<void(const EngineCall& call)>;
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Verdict {
  std::string failure;  // empty: good; else the error and the flags that repeat it
  std::string refusal;  // why the case is not served; nothing was run
  double worst = 0;     // the largest error, in units of the allowed error
};

// Returns the reason why an engine cannot serve a call; empty if it can.
using Supports = std::function<std::string(const EngineCall& call)>;

// The checked passes of a case with gradients: both, or only the gradients, after the reference's forward.
enum class Passes { both, backward };

// Runs the case through make_problem and the engine, compares with the reference, and checks guards and inputs. A
// 16-bit backward reads the reference's rounded out and lse. Other types read the engine's results, so that scores
// match. adjust: changes the inputs before use; a failure's flags omit it. flags: tandem_fuzz's for the engine.
Verdict run_case(const Case& c, const Engine& engine, const Supports& supports = nullptr,
                 const std::function<void(Instance&)>& adjust = nullptr, const std::string& flags = "",
                 Passes passes = Passes::both);

}  // namespace tandem::test
