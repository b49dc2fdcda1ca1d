// Machine code of the Blackwell kernels as NVRTC compiles it: invariants of every tile.
#include "sass/tests/compiled.h"

namespace tandem::machine_code {
namespace {

class MachineCodeBlackwell : public Compiled {};

TEST_F(MachineCodeBlackwell, IsUnderstood) {
  for (const Sm100ForwardConfig& sizes :
       {Sm100ForwardConfig{.head_dim = 64, .head_dim_v = 64, .ex2_emu_pairs = 3},
        Sm100ForwardConfig{.head_dim = 128, .head_dim_v = 128, .ex2_emu_pairs = 2},
        Sm100ForwardConfig{.head_dim = 192, .head_dim_v = 128, .ex2_emu_pairs = 3, .options = {.f16 = true}},
        Sm100ForwardConfig{.head_dim = 128, .head_dim_v = 128, .ex2_emu_pairs = 3, .two_cta = true}}) {
    for (const bool causal : {false, true}) {
      Sm100ForwardConfig tile = sizes;
      tile.options.bounded_right = causal;
      SCOPED_TRACE(plan::name_of(tile));
      Shape shape = shape_of(tile);
      shape.load_waits = tile.k_blocks() + tile.v_blocks();
      const CostModel a = account_of(tile, "sm_100a", shape);
      expect_read(a, "sm_100a", tile);
      EXPECT_EQ(a.pair, tile.two_cta);
      EXPECT_EQ(a.tensor_columns, Sm100ForwardConfig::kTmemColumns);
      const LoopCost *softmax = a.steady(Role::softmax, false), *mma = a.steady(Role::mma, false),
                     *load = a.steady(Role::load, false);
      ASSERT_TRUE(softmax != nullptr && mma != nullptr && load != nullptr && a.plain);
      EXPECT_EQ(softmax->registers, tile.softmax_registers());
      EXPECT_EQ(mma->registers, tile.other_registers());
      EXPECT_EQ(load->registers, tile.other_registers());
      EXPECT_EQ(softmax->work.scores(), 128);
      EXPECT_EQ(softmax->work.columns_written, 64);
      EXPECT_DOUBLE_EQ(clocks(*a.plain, Unit::mma), 2.0 * 128 * 128 * (tile.head_dim + tile.head_dim_v) / 8192);
      // The exponentials of a step that polynomials do not compute, and one factor per row if the correction reads the
      // scores. The results need no more, because they are rescaled only in exceptions.
      const double exponentials = 128 * 128 / 16.0 * (16 - tile.ex2_emu_pairs) / 16;
      if (tile.lazy_max()) {
        EXPECT_DOUBLE_EQ(clocks(*a.plain, Unit::exponential), exponentials);
      } else {
        EXPECT_GE(clocks(*a.plain, Unit::exponential), exponentials);
        EXPECT_LE(clocks(*a.plain, Unit::exponential), exponentials + 4 * 128 / 16.0);
      }
      EXPECT_EQ(softmax->work.columns_read, 128);
      const Clocks c = clocks_of_last(a);
      EXPECT_GT(c.tensor_share, tile.head_dim > 64 ? 0.4 : 0.35);  // short products: the softmax is the bottleneck
      EXPECT_LE(c.tensor_share, 1.001);
      ASSERT_TRUE(a.masked.has_value());  // at least the last keys of a sequence are masked
      EXPECT_GT(a.masked->issued, a.plain->issued);
    }
  }
}

// The compiler needs more registers for sm_103a, which Sm100ForwardConfig gives the warps that issue products.
TEST_F(MachineCodeBlackwell, SpillsNothingOnB300) {
  for (const Sm100ForwardConfig& tile :
       {Sm100ForwardConfig{.head_dim = 64, .head_dim_v = 64, .ex2_emu_pairs = 0},
        Sm100ForwardConfig{.ex2_emu_pairs = 0, .options = {.dropout = true}},
        Sm100ForwardConfig{.head_dim = 192, .ex2_emu_pairs = 0, .options = {.f16 = true, .bounded_right = true}},
        Sm100ForwardConfig{.ex2_emu_pairs = 0, .two_cta = true}}) {
    SCOPED_TRACE(plan::name_of(tile));
    expect_read(account_of(tile, "sm_103a", shape_of(tile)), "sm_103a", tile);
  }
}

}  // namespace
}  // namespace tandem::machine_code
