// Kernels differ in number, name and source if any field of their configurations differs.
#include "plan/kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "plan/fields.h"
#include "plan/sm100/tuning.h"
#include "plan/sm90/tuning.h"

namespace tandem::test {
namespace {

// All members; static_asserts of plan/fields.h check that the list is complete.
template <class Config>
std::vector<int> members_of(const Config& t) {
  std::vector<int> values;
  plan::fields(t, [&](const plan::Field&, const auto& member) { values.push_back(static_cast<int>(member)); });
  return values;
}

// Calls visit(t) with all 2^10 combinations of a problem's options.
template <class Tile, class Visit>
void for_all_options(Tile t, Visit&& visit) {
  for (int options = 0; options < 1 << 10; ++options) {
    t.options.f16 = options & 1;
    t.options.bounded_left = options & 2;
    t.options.bounded_right = options & 4;
    t.options.varlen = options & 8;
    t.options.scale_outside_exp2 = options & 16;
    t.options.softcap = options & 32;
    t.options.alibi = options & 64;
    t.options.bias = static_cast<Bias>(options >> 7 & 3);
    t.f32_out = options & 512;
    visit(t);
  }
}

// Every configuration of the table for head_dims that are multiples of 16 and of `step`, without options. Plans combine
// these with options.
std::vector<Sm90ForwardConfig> configs_of_hopper(int step) {
  std::vector<Sm90ForwardConfig> configs;
  for (const plan::Sm90TuningRow& row_of_table : plan::kSm90TuningRows) {
    for (int dim = 16; dim <= row_of_table.head_dim; dim += step)
      for (int dim_v = 16; dim_v <= row_of_table.head_dim_v; dim_v += step)
        configs.push_back(plan::tile_of(row_of_table, dim, dim_v));
  }
  return configs;
}
std::vector<Sm100ForwardConfig> configs_of_blackwell(int step) {
  std::vector<Sm100ForwardConfig> configs;
  for (const plan::Sm100TuningRow& row_of_table : plan::kSm100TuningRows) {
    for (const int ex2_emu_pairs :
         {0, row_of_table.ex2_emu_pairs_lazy, row_of_table.ex2_emu_pairs_window, row_of_table.ex2_emu_pairs_strict}) {
      for (const int clusters : {0, 1, 2, 3}) {
        for (int dim = 16; dim <= row_of_table.head_dim; dim += step) {
          for (int dim_v = 16; dim_v <= row_of_table.head_dim_v; dim_v += step) {
            configs.push_back({.head_dim = dim,
                               .head_dim_v = dim_v,
                               .ex2_emu_pairs = ex2_emu_pairs,
                               .two_cta = (clusters & 1) != 0,
                               .clc = (clusters & 2) != 0});
          }
        }
      }
    }
  }
  return configs;
}

// The ids of all kernels of these configurations, and the number of kernels.
template <class Tile>
size_t add_numbers(const std::vector<Tile>& configs, std::vector<uint64_t>* ids) {
  std::set<std::vector<int>> kernels;
  for (const Tile& config : configs) {
    if (!kernels.insert(members_of(config)).second) continue;  // the tables repeat some configurations
    for_all_options(config, [ids](const Tile& t) { ids->push_back(plan::id_of(t)); });
  }
  return kernels.size() << 10;
}

// Visits every combination that a planner may choose.
TEST(Kernels, NumbersAreUnique) {
  std::vector<uint64_t> ids;
  const size_t kernels = add_numbers(configs_of_hopper(16), &ids) + add_numbers(configs_of_blackwell(16), &ids);
  EXPECT_EQ(ids.size(), kernels);
  std::ranges::sort(ids);
  EXPECT_TRUE(std::ranges::adjacent_find(ids) == ids.end());
}

// A change of any field changes number, name and source, for any values of the other fields.
template <class Tile>
void expect_each_field_to_tell(const Tile& base) {
  std::set<uint64_t> ids;
  std::set<std::string> names, sources;
  std::set<std::vector<int>> distinct;
  const auto add = [&](const Tile& t) {
    distinct.insert(members_of(t));
    ids.insert(plan::id_of(t));
    names.insert(plan::name_of(t));
    sources.insert(plan::translation_unit(t));
  };
  add(base);
  plan::fields(base, [&](const plan::Field& field, const auto&) {
    for (int value = field.values.first; value <= field.values.last; value += field.values.step) {
      Tile changed = base;
      plan::fields(changed, [&](const plan::Field& its, auto& member) {
        if (its.name == std::string_view(field.name))
          member = static_cast<std::remove_cvref_t<decltype(member)>>(value);
      });
      EXPECT_TRUE(plan::is_valid(changed)) << field.name << " " << value;
      add(changed);
    }
  });
  EXPECT_EQ(ids.size(), distinct.size());
  EXPECT_EQ(sources.size(), distinct.size());
  EXPECT_EQ(names.size(), distinct.size());
}

TEST(Kernels, EachFieldDistinguishesThem) {
  expect_each_field_to_tell(Sm90ForwardConfig{});
  expect_each_field_to_tell(Sm90ForwardConfig{
      .head_dim = 64, .head_dim_v = 256, .warpgroups = 3, .options = {.varlen = true, .alibi = true}});
  expect_each_field_to_tell(Sm100ForwardConfig{});
  expect_each_field_to_tell(Sm100ForwardConfig{
      .head_dim = 192, .head_dim_v = 64, .two_cta = true, .clc = true, .options = {.bias = Bias::element}});
}

// Names and sources take longer to write, so that only some of the combinations are checked.
TEST(Kernels, NamesAndSourcesAreUnique) {
  std::set<uint64_t> ids;
  std::set<std::string> names, sources;
  const auto add = [&](const auto& t) {
    ids.insert(plan::id_of(t));
    names.insert(plan::name_of(t));
    sources.insert(plan::translation_unit(t));
  };
  for (const Sm90ForwardConfig& config : configs_of_hopper(112)) for_all_options(config, add);
  for (const Sm100ForwardConfig& config : configs_of_blackwell(240)) for_all_options(config, add);
  EXPECT_GT(ids.size(), 10'000u);
  EXPECT_EQ(names.size(), ids.size());
  EXPECT_EQ(sources.size(), ids.size());
}

TEST(Kernels, TranslationUnit) {
  Sm90ForwardConfig t{.head_dim = 64,
                      .head_dim_v = 48,
                      .warpgroups = 3,
                      .tile_n = 112,
                      .pingpong = false,
                      .options = {.bounded_right = true}};
  EXPECT_EQ(plan::name_of(t), "forward_bf16_d64v48_192x112x2_right");
  const std::string dense_unit = plan::translation_unit(t);
  for (const char* part : {"#include \"sm90/forward/kernel.cuh\"", ".head_dim = 64", ".head_dim_v = 48",
                           ".tile_n = 112", ".bounded_right = true", ".bias = Bias::none", "forward<kConfig>(p)"}) {
    EXPECT_NE(dense_unit.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(dense_unit.find("schedule"), std::string::npos);
  t.options.varlen = true;
  EXPECT_NE(plan::translation_unit(t).find("schedule<kConfig>(p)"), std::string::npos);
}

TEST(Kernels, TranslationUnitOfBlackwell) {
  const Sm100ForwardConfig t{
      .head_dim = 192, .head_dim_v = 128, .ex2_emu_pairs = 3, .options = {.f16 = true, .bounded_right = true}};
  EXPECT_EQ(plan::name_of(t), "forward_f16_d192v128_2x128x128_fma3_right");
  const std::string unit = plan::translation_unit(t);
  for (const char* part : {"#include \"sm100/forward/kernel.cuh\"", "constexpr Sm100ForwardConfig kConfig{",
                           ".head_dim = 192", ".ex2_emu_pairs = 3", ".f16 = true", "forward<kConfig>(p)"}) {
    EXPECT_NE(unit.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(unit.find("__cluster_dims__"), std::string::npos);
  const Sm100ForwardConfig pair{.two_cta = true};
  EXPECT_EQ(plan::name_of(pair), "forward_bf16_d128_2x256x128_fma4");
  EXPECT_NE(plan::translation_unit(pair).find("__cluster_dims__(2, 1, 1)"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
