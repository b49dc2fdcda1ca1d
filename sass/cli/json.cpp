#include "cli/io/json.h"

#include "sass/cli/report.h"

namespace tandem::tool {
namespace {

using io::Json;
using machine_code::CostModel;
using machine_code::kUnits;
using machine_code::LoopCost;
using machine_code::name_of;
using machine_code::TileCost;
using machine_code::Unit;

// Returns {"MMA": 16, "exponential": 66, ...}.
template <class Values>
Json by_unit(const Values& values) {
  Json all = Json::object();
  for (size_t u = 0; u < kUnits; ++u) all[std::string(name_of(static_cast<Unit>(u)))] = values[u];
  return all;
}

// steady: this loop represents its role in a tile.
Json of(const LoopCost& loop, bool steady) {
  return {{"role", name_of(loop.role)},
          {"masked", loop.masked},
          {"around_the_loops", loop.once},
          {"steady", steady},
          {"address", loop.address},
          {"registers", loop.registers},
          {"instructions", loop.instructions},
          {"left_out", loop.left_out},
          {"scores_of_a_thread", loop.work.scores()},
          {"turns_of_a_tile", loop.turns},
          {"warps_of_a_turn", loop.warps},
          {"units", by_unit(loop.units)},
          {"opcodes", loop.opcodes}};
}

Json of(const std::optional<TileCost>& tile) {
  if (!tile) return nullptr;
  Json clocks = by_unit(tile->clocks);
  clocks["issue"] = tile->issue_clocks;
  return {{"instructions", by_unit(tile->instructions)},
          {"issued", tile->issued},
          {"clocks", clocks},
          {"binds", tile->binds}};
}

Json of(const Examined& e) {
  const CostModel& a = e.cost_model;
  Json loops = Json::list();
  for (const LoopCost& loop : a.loops) {
    const bool steady = &loop == a.steady(loop.role, false) || &loop == a.steady(loop.role, true);
    loops.add(of(loop, steady && loop.turns > 0));
  }
  Json companions = Json::list();
  for (const machine_code::Companion& other : a.companions) {
    companions.add({{"name", other.name},
                    {"registers", other.registers},
                    {"instructions", other.instructions},
                    {"stack_bytes", other.stack_bytes}});
  }
  Json all = {{"name", e.name},
              {"arch", a.arch},
              {"kernel", a.kernel},
              {"registers", a.registers},
              {"threads", a.threads},
              {"spills", a.spills},
              {"stack_bytes", a.stack_bytes},
              {"shared_bytes", e.shared_bytes},
              {"tensor_columns", a.tensor_columns},
              {"backward", a.backward},
              {"companions", companions},
              {"pair", a.pair},
              {"rows", a.shape.rows},
              {"keys", a.shape.keys},
              {"head_dim", a.shape.head_dim},
              {"head_dim_v", a.shape.head_dim_v},
              {"unknown_opcodes", a.unknown}};
  if (!e.compiler.empty()) all["compiler"] = e.compiler;
  if (!e.compiler.empty()) all["compile_seconds"] = e.compile_seconds;
  all["loops"] = loops;
  all["tile"] = {{"unmasked", of(a.plain)}, {"masked", of(a.masked)}};
  return all;
}

}  // namespace

std::string json_of(const std::vector<Examined>& all) {
  Json kernels = Json::list();
  for (const Examined& examined : all) kernels.add(of(examined));
  return Json({{"kernels", kernels}}).dump(1) + "\n";
}

}  // namespace tandem::tool
