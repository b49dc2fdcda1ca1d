// Prints data from the shared headers for rig/tiles.py, as JSON: the Hopper forward kernels in the given
// configurations, and the offsets of their parameter's members. Names, sources and fields come from src/plan.
//
//   tiles 64/64,192/128 warpgroups=2,3 tile_n=64,96 stages=2 pingpong=0,1     all columns of the table of
//   configurations
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "base/text.h"
#include "config/forward.h"
#include "members.h"
#include "plan/fields.h"
#include "plan/forward_kernel.h"
#include "plan/kernel.h"
#include "plan/tuning.h"

namespace {

using tandem::str_cat;
using tandem::plan::Field;
using Config = Sm90ForwardConfig;
using Tried = std::map<std::string, std::vector<int>>;

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) c == at ? parts.emplace_back() : parts.back() += c, void();
  return parts;
}

// The members of ForwardParams that a dense call sets.
std::string parameters() {
  Members<ForwardParams> members;
#define ADD(member) members.add(#member, members.p.member)
  ADD(q), ADD(k), ADD(v), ADD(out), ADD(lse), ADD(lse_batch), ADD(lse_row), ADD(lse_head), ADD(counter), ADD(batch);
  ADD(heads_q), ADD(heads_k), ADD(seqlen_q), ADD(seqlen_k), ADD(pack_gqa), ADD(m_blocks), ADD(tiles), ADD(l2_heads);
  ADD(bottom_right), ADD(window_left), ADD(window_right), ADD(scale), ADD(scale_log2), ADD(head_dim_v);
#undef ADD
  return members.json;
}

std::string text_of(bool on) { return on ? "true" : "false"; }
std::string text_of(int number) { return std::to_string(number); }

std::string describe(const Config& t) {
  Config causal = t;
  causal.options.bounded_right = true;
  std::string members, columns;
  tandem::plan::fields(t, [&](const Field& field, const auto& member) {
    members += str_cat(members.empty() ? "" : ", ", quoted(field.name), ": ", static_cast<int>(member));
    if constexpr (!std::is_enum_v<std::remove_cvref_t<decltype(member)>>)
      if (field.is_tuned) columns += (columns.empty() ? "" : ", ") + text_of(member);
  });
  const std::string check = str_cat("static_assert(sizeof(ForwardParams) == ", sizeof(ForwardParams), ");\n");
  const auto kernel = [&](const Config& c) {
    return str_cat("[", quoted(tandem::plan::name_of(c)), ", ", quoted(tandem::plan::translation_unit(c) + check), "]");
  };
  const auto [q, k, v, out] = tandem::plan::ForwardKernel(t).boxes;
  return str_cat("{\"fields\": {", members, "}, \"columns\": ", quoted(columns), ", \"full\": ", kernel(t),
                 ", \"causal\": ", kernel(causal), ", \"shared\": ", t.smem_bytes(), ", \"threads\": ", t.threads(),
                 ", \"rows\": ", t.tile_m(), ", \"boxes\": [", q, ", ", k, ", ", v, ", ", out, "]}");
}

void fail(const std::string& sentence) {
  std::fprintf(stderr, "%s\n", sentence.c_str());
  std::exit(2);
}

// Adds every combination of the candidate values, from the n-th field of a configuration on.
void add_all(const Config& t, const Tried& tried, int n, std::vector<std::string>* found) {
  int at = 0;
  const char* name = nullptr;
  tandem::plan::fields(t, [&](const Field& field, const auto&) {
    if (field.is_tuned && at++ == n) name = field.name;
  });
  if (name == nullptr) {
    if (tandem::plan::is_valid(t) && tandem::plan::fits(t)) found->push_back(describe(t));
    return;
  }
  if (!tried.contains(name)) fail(str_cat(name, ": no values to try are given"));
  for (const int value : tried.at(name)) {
    Config next = t;
    tandem::plan::fields(next, [&](const Field& field, auto& member) {
      if (field.name == std::string(name)) member = static_cast<std::remove_cvref_t<decltype(member)>>(value);
    });
    add_all(next, tried, n + 1, found);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("tiles <head_dim>/<head_dim_v>,... <field>=<value>,... ...");
  Tried tried;
  for (int i = 2; i < argc; ++i) {
    const std::vector<std::string> named = split(argv[i], '=');
    for (const std::string& value : split(named.back(), ',')) tried[named.front()].push_back(std::atoi(value.c_str()));
  }
  std::vector<std::string> found;
  for (const std::string& dims : split(argv[1], ',')) {
    const std::vector<std::string> both = split(dims, '/');
    const Config t{.head_dim = std::atoi(both.front().c_str()), .head_dim_v = std::atoi(both.back().c_str())};
    add_all(t, tried, 0, &found);
  }
  std::string tiles;
  for (const std::string& one : found) tiles += (tiles.empty() ? "" : ",\n") + one;
  std::printf("{\"bytes\": %zu, \"l2_heads\": %.0f, \"parameters\": {%s}, \"tiles\": [\n%s]}\n", sizeof(ForwardParams),
              tandem::plan::kTuning.sm90.forward_order.l2_heads, parameters().c_str(), tiles.c_str());
}
