// What verify, attend, bench and demo have in common: one call beside float64 and beside the plain formula.
#pragma once

#include <string>
#include <vector>

#include "cli/check_accuracy.h"
#include "cli/engine.h"
#include "cli/terminal.h"

namespace tandem::tool {

// What a command works with: the engine, and threads for the formula and the truth.
struct Machine {
  Machine(const std::string& device, int thread_count)
      : engine(device, thread_count), threads(thread_count, nullptr, nullptr) {}

  // Whether gradients are served, of inputs whose forward is. A GPU may have no kernels for them yet: then the
  // remarks say why. On the CPU the call itself says what is wrong with it.
  bool serves_gradients(const Inputs& inputs, const Attention& options, std::vector<std::string>* remarks) const;

  // Throws what serves_gradients() would remark on: for those who asked for gradients and nothing less.
  void require_gradients(const Inputs& inputs, const Attention& options) const;

  Engine engine;
  cpu::Threads threads;
};

// The engine's and the plain formula's results against float64 of the original inputs: out, lse and, with backward,
// every gradient. The formula gets the inputs that the engine gets. results, made for these, receives the engine's.
std::vector<AccuracyCheck> check_exactness(Machine& machine, const Given& given, const Attention& options,
                                           bool backward, Results& results, Progress& progress);

struct Speed {
  double forward = 0, backward = 0;              // seconds
  double plain_forward = 0, plain_backward = 0;  // 0: not measured
  double flops_forward = 0, flops_backward = 0;
  double memory = 0, plain_memory = 0;  // bytes beyond inputs and results, the most at any time
};

// seconds: about how long each of the four is repeated. The formula runs on the CPU, on the original inputs.
Speed measure_speed(Machine& machine, const Given& given, const Attention& options, bool backward, bool plain,
                    double seconds);

std::string exactness_table(const std::vector<AccuracyCheck>& checks);
bool all_good(const std::vector<AccuracyCheck>& checks);

}  // namespace tandem::tool
