// Compiles kernels of plans with NVRTC and reads them with nvdisasm. The tests need both programs and no GPU.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "jit/compiler.h"
#include "plan/forward.h"
#include "sass/src/clocks.h"
#include "sass/src/cost_model.h"
#include "sass/src/nvdisasm.h"

namespace tandem::machine_code {

class Compiled : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status status = jit::Compiler::open({}, Env::get(), &compiler_); !status.ok())
      GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
    if (nvdisasm_candidates(Places::get()).empty())
      GTEST_SKIP() << "NOT RUN, no disassembler: pip install nvidia-cuda-nvdisasm";
  }

  // functions: a score_mod() and a mask_mod(), if the tile has them.
  CostModel account_of(const plan::ForwardKernel& tile, const std::string& arch, const Shape& known,
                       const std::string& functions = "") const {
    const std::string source = plan::translation_unit(tile, functions);
    const jit::Request request{.name = plan::name_of(tile),
                               .source = source,
                               .arch = arch,
                               .options = {"--std=c++20", "--device-as-default-execution-space"}};
    std::string code, log, text;
    CostModel result;
    Cubin& cubin = last_;
    cubin = {};
    Status status = compiler_->compile(request, jit::included_by(source, jit::kernels()), &code, &log);
    if (status.ok()) status = disassemble_bytes(code, Places::get(), &text);
    if (status.ok()) status = parse(text, &cubin);
    if (status.ok()) status = cost_model(cubin, known, false, &result);
    EXPECT_TRUE(status.ok()) << request.name << ": " << status.message;
    return result;
  }

  // Runs the kernel of the last account. Every barrier must be known, and the role's warps must alternate.
  Clocks clocks_of_last(const CostModel& a) const {
    const Kernel& kernel = kernel_of(last_);
    const auto made = simulate(kernel, trace(kernel, a, 14), *rates_of(a.arch), *latencies_of(a.arch));
    EXPECT_EQ(made.assumed, 0);
    return machine_code::clocks_of(made, kernel);
  }

  static Shape shape_of(const plan::ForwardKernel& t) {
    return {.head_dim = t.head_dim, .head_dim_v = t.head_dim_v, .rows = t.tile_m() / t.ctas(), .keys = t.tile_n};
  }

  // Expects that every opcode is known and no register is spilled.
  static void expect_read(const CostModel& a, const std::string& arch, const plan::ForwardKernel& tile) {
    EXPECT_EQ(a.arch, arch);
    EXPECT_EQ(a.threads, tile.threads());
    EXPECT_TRUE(a.unknown.empty()) << a.unknown.front();
    EXPECT_EQ(a.spills, 0);
    EXPECT_EQ(a.stack_bytes, 0);
    EXPECT_FALSE(a.backward);
  }

  static double clocks(const TileCost& cost, Unit unit) { return cost.clocks[static_cast<size_t>(unit)]; }

 private:
  std::unique_ptr<jit::Compiler> compiler_;
  mutable Cubin last_;
};

}  // namespace tandem::machine_code
