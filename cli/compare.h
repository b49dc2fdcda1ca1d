// Common code of verify, attend, bench and demo: one call, compared with float64 and with standard attention.
#pragma once

#include <string>
#include <vector>

#include "cli/check_accuracy.h"
#include "cli/engine.h"
#include "cli/terminal.h"

namespace tandem::tool {

// The engine of a command, and threads for standard attention and float64.
struct Machine {
  Machine(const std::string& device, int thread_count)
      : engine(device, thread_count), threads(thread_count, nullptr, nullptr) {}

  // Returns whether the backward is supported if the forward is. A GPU may have no kernel, and the remarks then receive
  // the reason. On the CPU the call itself reports errors.
  bool serves_gradients(const Inputs& inputs, const Attention& options, std::vector<std::string>* remarks) const;

  // Throws the reason that serves_gradients() would add to the remarks, for commands whose flag requires gradients.
  void require_gradients(const Inputs& inputs, const Attention& options) const;

  ToolEngine engine;
  cpu::Threads threads;
};

// Compares the engine and standard attention with float64 of the original inputs: out, lse and, with backward, every
// gradient. Both get the same inputs. results receives the engine's results.
std::vector<AccuracyCheck> check_exactness(Machine& machine, const Given& given, const Attention& options,
                                           bool backward, Results& results, Progress& progress);

struct Speed {
  double forward = 0, backward = 0;              // seconds
  double plain_forward = 0, plain_backward = 0;  // 0: not measured
  double flops_forward = 0, flops_backward = 0;
  double memory = 0, plain_memory = 0;  // peak bytes in addition to inputs and results
};

// seconds: the approximate duration of each of the four measurements. Standard attention runs on the CPU, on the
// original inputs.
Speed measure_speed(Machine& machine, const Given& given, const Attention& options, bool backward, bool plain,
                    double seconds);

// The first lines of a command: shapes, type, device, remarks, and every input that contains NaN.
void print_problem(const Inputs& inputs, const Machine& machine, const std::vector<std::string>& remarks);

inline constexpr const char* kNothingRan = "Nothing ran: every result is empty.\n";
bool is_empty(const Results& results);

std::string exactness_table(const std::vector<AccuracyCheck>& checks);
bool all_good(const std::vector<AccuracyCheck>& checks);

}  // namespace tandem::tool
