// Machine code of the Hopper kernels as NVRTC compiles it: invariants of every tile.
#include "sass/tests/compiled.h"
#include "score_mod/program.h"

namespace tandem::machine_code {
namespace {

class MachineCodeHopper : public Compiled {
 protected:
  CostModel sound_account_of(const Sm90ForwardConfig& tile, const Shape& known) const {
    const CostModel a = account_of(tile, "sm_90a", known);
    expect_read(a, "sm_90a", tile);
    const LoopCost *computing = a.steady_softmax(!a.plain), *load = a.steady(Role::load, false);
    if (computing == nullptr || load == nullptr) {
      ADD_FAILURE() << "a role is not found";
      return a;
    }
    EXPECT_EQ(computing->role, Role::computing);
    EXPECT_EQ(computing->registers, tile.registers());
    EXPECT_EQ(load->registers, Sm90ForwardConfig::kLoadRegisters);
    const TileCost& cost = a.plain ? *a.plain : *a.masked;
    EXPECT_DOUBLE_EQ(clocks(cost, Unit::mma), 2.0 * 128 * 128 * (tile.head_dim + tile.head_dim_v) / 4096);
    // Expects one exponential for each score. The path excludes the exponentials of rescaling.
    EXPECT_DOUBLE_EQ(clocks(cost, Unit::exponential), 128 * 128 / 16.0);
    return a;
  }

  // Two accounts of one kernel, with and without a block mask. The mask compares neighbours in rows of a width, and the
  // width is a scalar of the call. Therefore no score needs a division.
  struct Neighbours {
    Sm90ForwardConfig tile;
    CostModel without, with;
  };
  Neighbours neighbours() const {
    const Sm90ForwardConfig plain{.options = {.bounded_right = true}},
        masked{.options = {.block_mask = true, .mask_mod = true}};
    const score_mod::Signature names{.result = score_mod::Signature::Result::mask,
                                     .scalars = {{.name = "width", .type = score_mod::Type::integer}},
                                     .tensors = {}};
    std::shared_ptr<const score_mod::Program> text;
    const char* const source = "abs(q % width - k % width) <= 3 and abs(q // width - k // width) <= 3";
    const Status status = score_mod::read_program(source, names, &text);
    EXPECT_TRUE(status.ok()) << status.message;
    if (!status.ok()) return {};
    return {masked, account_of(plain, "sm_90a", shape_of(plain)),
            account_of(masked, "sm_90a", shape_of(masked), text->cuda)};
  }
};

TEST_F(MachineCodeHopper, IsUnderstood) {
  for (const int dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Sm90ForwardConfig tile{.head_dim = dim, .head_dim_v = dim};
      tile.warpgroups = dim == 64 ? 3 : 2;
      tile.tile_n = dim == 64 ? 96 : dim == 256 ? 80 : 128;
      tile.options.bounded_right = causal;
      SCOPED_TRACE(plan::name_of(tile));
      const CostModel a = sound_account_of(tile, shape_of(tile));
      ASSERT_TRUE(a.plain.has_value());
      ASSERT_EQ(a.masked.has_value(), causal);
      if (causal) {
        EXPECT_GT(a.masked->issued, a.plain->issued);
      }
    }
  }
}

// Eight warps compute and one loads. An H200 takes about 590 clocks for a warpgroup's 512 clocks of products.
TEST_F(MachineCodeHopper, Clocks) {
  const Sm90ForwardConfig tile{.head_dim = 128, .head_dim_v = 128, .tile_n = 128};
  const Clocks c = clocks_of_last(sound_account_of(tile, shape_of(tile)));
  ASSERT_EQ(c.roles.size(), 2u);
  EXPECT_EQ(c.roles[0].role, Role::load);
  EXPECT_EQ(c.roles[1].role, Role::computing);
  EXPECT_EQ(c.roles[1].warps, 4 * tile.warpgroups);
  EXPECT_GT(c.step, 512 * 2 * tile.warpgroups);
  EXPECT_LT(c.step, 700 * 2 * tile.warpgroups);
}

// Steps that show all keys skip the mask_mod, and both kinds of steps may have lazy maxima. A full step also needs its
// list and data of the next keys (docs/design/score_mod.md). This mask takes about 12 instructions, and hiding takes
// two.
TEST_F(MachineCodeHopper, StepsThatAskAMaskAreNotThoseThatDoNot) {
  const auto [tile, without, with] = neighbours();
  EXPECT_TRUE(with.unknown.empty()) << with.unknown.front();
  ASSERT_TRUE(without.plain.has_value() && with.plain.has_value() && with.masked.has_value());
  EXPECT_LT(with.plain->issued, 1.35 * without.plain->issued);
  EXPECT_LT(with.masked->issued - with.plain->issued, 8 * 64 * 15);
}

// The code and the tile agree on every size.
TEST_F(MachineCodeHopper, ShapesAreFoundInTheCode) {
  const CostModel a =
      sound_account_of({.head_dim = 192, .head_dim_v = 128, .tile_n = 112, .options = {.bounded_right = true}}, {});
  EXPECT_EQ(a.shape.head_dim, 192);
  EXPECT_EQ(a.shape.head_dim_v, 128);
  EXPECT_EQ(a.shape.rows, 128);
  EXPECT_EQ(a.shape.keys, 112);
}

}  // namespace
}  // namespace tandem::machine_code
