#include "support/engines.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cpu/cpu.h"
#include "problem/use_options.h"

namespace tandem::test {

NamedEngine cpu_engine(int threads) {
  const auto pool = std::make_shared<cpu::Threads>(threads, nullptr, nullptr);
  return {
      .run =
          [pool](const Problem& given) {
            Problem p = given;
            use_options(&p);
            constexpr size_t kGuard = 256;
            const size_t bytes = cpu::workspace_size(p, pool->count());
            std::vector<std::byte> workspace(bytes + 2 * kGuard + 1, std::byte{0xff});
            std::byte* begin = workspace.data() + kGuard + 1;  // "any alignment"
            if (p.pass == TANDEM_FORWARD) {
              cpu::forward(p, *pool, begin);
            } else {
              cpu::backward(p, *pool, begin);
            }
            const auto intact = [](const std::byte* from, const std::byte* to) {
              return std::all_of(from, to, [](std::byte b) { return b == std::byte{0xff}; });
            };
            if (!intact(workspace.data(), begin) || !intact(begin + bytes, workspace.data() + workspace.size())) {
              throw std::logic_error("the engine wrote outside its workspace");
            }
          },
      .supports =
          [](const Problem& p) { return p.dtype == DType::f64 ? "float64: reference only" : cpu::check(p).message; }};
}

}  // namespace tandem::test
