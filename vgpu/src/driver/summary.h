// Output of the virtual driver: each new finding on standard error, as `tandem vgpu check` prints it, and a summary
// line at the program's exit.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <tuple>

#include "vgpu/src/device.h"

namespace tandem::vgpu::driver {

class Summary {
 public:
  static Summary& get();

  void begin(const std::string& model);
  void add(const Outcome& outcome);
  // Records a call that is not served, because the later verdict is then unreliable.
  void refused(const char* function);
  void finish();

 private:
  std::string model_;
  size_t launches_ = 0, errors_ = 0, warnings_ = 0, refusals_ = 0;
  std::set<std::tuple<std::string, Rule, std::string>> seen_;  // kernel, rule, line
  std::set<std::string> refused_;
};

}  // namespace tandem::vgpu::driver
