// The fields of each kernel configuration, listed once. The id and name of a kernel, its source, and the candidates of
// bench/tune.py all derive from these lists.
//
// A configuration is an aggregate of whole numbers, flags and enumerations. The aggregate's list names each member in
// the order of the struct, as designated initialisers require. static_asserts below compare a list with its struct.
#pragma once

#include <cstdint>
#include <type_traits>

#include "config/sm100_backward.h"
#include "config/sm100_forward.h"
#include "config/sm90_backward.h"
#include "config/sm90_forward.h"

namespace tandem::plan {

// The values of a field: first, first + step, ..., last.
struct FieldValues {
  int first, last, step = 1;

  constexpr int count() const { return (last - first) / step + 1; }
  constexpr bool contains(int value) const { return first <= value && value <= last && (value - first) % step == 0; }
};
inline constexpr FieldValues kFlag{0, 1}, kHeadDims{16, 256, 16}, kWholeHeadDims{64, 256, 64}, kBiases{0, 3},
    kPageRows{0, 256, 16};

struct Field {
  const char* name;  // member name
  FieldValues values;
  // A set flag appends `mark` to a kernel's name. A field without a mark is part of the shape in the name.
  const char* mark = "";
  bool is_tuned = false;  // a column of the tables of configurations
};

// Calls visit(Field, member) for each member of ScoreOptions, which may be const.
template <class Options, class Visit>
constexpr void option_fields(Options& c, Visit&& visit) {
  visit(Field{"dropout", kFlag, "_dropout"}, c.dropout);
  visit(Field{"block_mask", kFlag, "_blocks"}, c.block_mask);
  visit(Field{"f16", kFlag}, c.f16);
  visit(Field{"bounded_left", kFlag, "_left"}, c.bounded_left);
  visit(Field{"bounded_right", kFlag, "_right"}, c.bounded_right);
  visit(Field{"varlen", kFlag, "_varlen"}, c.varlen);
  visit(Field{"scale_outside_exp2", kFlag, "_scale_outside_exp2"}, c.scale_outside_exp2);
  visit(Field{"softcap", kFlag, "_softcap"}, c.softcap);
  visit(Field{"alibi", kFlag, "_alibi"}, c.alibi);
  visit(Field{"bias", kBiases}, c.bias);
  visit(Field{"score_mod", kFlag, "_scoremod"}, c.score_mod);
  visit(Field{"mask_mod", kFlag, "_maskmod"}, c.mask_mod);
  visit(Field{"placed", kFlag, "_placed"}, c.placed);
}

// Calls visit(Field, member) for each other member of a configuration.
template <class T, class Visit>
  requires std::is_same_v<std::remove_const_t<T>, Sm90ForwardConfig>
constexpr void own_fields(T& t, Visit&& visit) {
  visit(Field{"head_dim", kHeadDims}, t.head_dim);
  visit(Field{"head_dim_v", kHeadDims}, t.head_dim_v);
  visit(Field{"warpgroups", {1, 4}, "", true}, t.warpgroups);
  visit(Field{"tile_n", {16, 256, 16}, "", true}, t.tile_n);
  visit(Field{"stages", {1, 8}, "", true}, t.stages);
  visit(Field{"pingpong", kFlag, "_pingpong", true}, t.pingpong);
  visit(Field{"bias_ctas", {0, 4}}, t.bias_ctas);
  visit(Field{"kv_ctas", {1, 2}}, t.kv_ctas);
  visit(Field{"f32_out", kFlag, "_f32out"}, t.f32_out);
  visit(Field{"max_scores", kFlag, "_maxscores"}, t.max_scores);
  visit(Field{"split_keys", kFlag, "_split"}, t.split_keys);
  visit(Field{"device_splits", kFlag, "_device_splits"}, t.device_splits);
  visit(Field{"page_rows", kPageRows}, t.page_rows);
  visit(Field{"gathers_pages", kFlag, "_gather"}, t.gathers_pages);
}

template <class T, class Visit>
  requires std::is_same_v<std::remove_const_t<T>, Sm100ForwardConfig>
constexpr void own_fields(T& t, Visit&& visit) {
  visit(Field{"head_dim", kHeadDims}, t.head_dim);
  visit(Field{"head_dim_v", kHeadDims}, t.head_dim_v);
  visit(Field{"ex2_emu_pairs", {0, 16}, "", true}, t.ex2_emu_pairs);
  visit(Field{"two_cta", kFlag, "", true}, t.two_cta);
  visit(Field{"clc", kFlag, "_clc"}, t.clc);
  visit(Field{"f32_out", kFlag, "_f32out"}, t.f32_out);
  visit(Field{"max_scores", kFlag, "_maxscores"}, t.max_scores);
  visit(Field{"split_keys", kFlag, "_split"}, t.split_keys);
  visit(Field{"device_splits", kFlag, "_device_splits"}, t.device_splits);
  visit(Field{"page_rows", kPageRows}, t.page_rows);
  visit(Field{"exact_n", kFlag, "_exact_n"}, t.exact_n);
  visit(Field{"wait_products", kFlag, "_wait_products"}, t.wait_products);
}

template <class T, class Visit>
  requires std::is_same_v<std::remove_const_t<T>, Sm90BackwardConfig>
constexpr void own_fields(T& t, Visit&& visit) {
  visit(Field{"head_dim", kWholeHeadDims}, t.head_dim);
  visit(Field{"head_dim_v", kWholeHeadDims}, t.head_dim_v);
  visit(Field{"warpgroups", {1, 4}, "", true}, t.warpgroups);
  visit(Field{"tile_m", {64, 256, 64}, "", true}, t.tile_m);
  visit(Field{"q_stages", {1, 4}, "", true}, t.q_stages);
  visit(Field{"dout_stages", {1, 4}, "", true}, t.dout_stages);
  visit(Field{"schedule", {0, 5}}, t.schedule);
  visit(Field{"spt", kFlag, "_spt"}, t.spt);
  visit(Field{"store_from_registers", kFlag, "_from_registers"}, t.store_from_registers);
  visit(Field{"m_split", kFlag, "_m_split"}, t.m_split);
  visit(Field{"single_n_block", kFlag, "_single_n_block"}, t.single_n_block);
  visit(Field{"short_q", kFlag, "_short_q"}, t.short_q);
  visit(Field{"dq_split", kFlag, "_dq_split"}, t.dq_split);
  visit(Field{"wraps", kFlag, "_wraps"}, t.wraps);
  visit(Field{"split_q_heads", kFlag, "_split_q_heads"}, t.split_q_heads);
  visit(Field{"captured", kFlag, "_captured"}, t.captured);
  visit(Field{"captured_per_tile", kFlag, "_captured_per_tile"}, t.captured_per_tile);
  visit(Field{"captured_per_score", kFlag, "_captured_per_score"}, t.captured_per_score);
}

template <class T, class Visit>
  requires std::is_same_v<std::remove_const_t<T>, Sm100BackwardConfig>
constexpr void own_fields(T& t, Visit&& visit) {
  visit(Field{"head_dim", kHeadDims}, t.head_dim);
  visit(Field{"head_dim_v", kHeadDims}, t.head_dim_v);
  visit(Field{"q_stages", {1, 4}, "", true}, t.q_stages);
  visit(Field{"dout_stages", {1, 4}, "", true}, t.dout_stages);
  visit(Field{"dq_stages", {1, 4}, "", true}, t.dq_stages);
  visit(Field{"two_cta", kFlag, "", true}, t.two_cta);
  visit(Field{"accumulators", {0, 1}, "", true}, t.accumulators);
  visit(Field{"spt", kFlag, "_spt"}, t.spt);
  visit(Field{"store_from_registers", kFlag, "_from_registers"}, t.store_from_registers);
  visit(Field{"captured", kFlag, "_captured"}, t.captured);
  visit(Field{"captured_per_tile", kFlag, "_captured_per_tile"}, t.captured_per_tile);
  visit(Field{"exact_n", kFlag, "_exact_n"}, t.exact_n);
  visit(Field{"wait_products", kFlag, "_wait_products"}, t.wait_products);
}

// Calls visit(Field, member) for each field of a configuration, which may be const.
template <class T, class Visit>
constexpr void fields(T& t, Visit&& visit) {
  own_fields(t, visit);
  option_fields(t.options, visit);
}

// ---- Checks of the lists ----

namespace detail {

struct Anything {
  template <class T>
  constexpr operator T() const;  // NOLINT(google-explicit-constructor): stands for a value of any type
};

template <class T, class... Members>
consteval int count_members() {
  if constexpr (requires { T{Members{}..., Anything{}}; }) {
    return count_members<T, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

template <class T>
consteval bool lists_every_member() {
  const T t{};
  const void* listed[64] = {};
  int count = 0;
  bool distinct = true;
  fields(t, [&](const Field&, const auto& member) {
    for (int i = 0; i < count; ++i) distinct = distinct && listed[i] != &member;
    listed[count++] = &member;
  });
  return distinct && count == count_members<T>() - 1 + count_members<ScoreOptions>();
}

// Returns the number of possible configurations, or 0 if they are too many for an id.
template <class T>
consteval uint64_t combinations() {
  const T t{};
  uint64_t all = 1;
  fields(t, [&](const Field& field, const auto&) {
    const auto count = static_cast<uint64_t>(field.values.count());
    all = all > UINT64_MAX / 256 / count ? 0 : all * count;
  });
  return all;
}

}  // namespace detail

// Requires a configuration whose members are all values of their fields, because an id encodes only these.
template <class Configuration>
constexpr bool is_valid(const Configuration& configuration) {
  bool valid = true;
  fields(configuration, [&](const Field& field, const auto& member) {
    valid = valid && field.values.contains(static_cast<int>(member));
  });
  return valid;
}

template <class Configuration>
inline constexpr bool kFieldsAreComplete =
    detail::lists_every_member<Configuration>() && detail::combinations<Configuration>() > 0;
static_assert(kFieldsAreComplete<Sm90ForwardConfig>, "fields(Sm90ForwardConfig) must list each member once");
static_assert(kFieldsAreComplete<Sm100ForwardConfig>, "fields(Sm100ForwardConfig) must list each member once");
static_assert(kFieldsAreComplete<Sm90BackwardConfig>, "fields(Sm90BackwardConfig) must list each member once");
static_assert(kFieldsAreComplete<Sm100BackwardConfig>, "fields(Sm100BackwardConfig) must list each member once");

}  // namespace tandem::plan
