#include "sass/cli/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/text.h"
#include "cli/terminal.h"

namespace tandem::tool {
namespace {

using machine_code::CostModel;
using machine_code::kUnits;
using machine_code::LoopCost;
using machine_code::name_of;
using machine_code::Role;
using machine_code::TileCost;
using machine_code::Unit;

constexpr size_t kIndent = 11;

std::string hex(uint32_t address) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", address);
  return text;
}

std::string amount(double value) { return value > 0 && value < 9.95 ? fixed(value, 1) : fixed(value, 0); }

// Describes the path of a loop in one or two words.
std::string way_of(const LoopCost& loop) {
  if (loop.once) return loop.masked ? "around, masked" : "around";
  const bool scores = loop.role == Role::softmax || loop.role == Role::computing;
  return scores ? loop.masked ? "masked" : "unmasked" : "";
}

std::string spills_of(const CostModel& a) {
  if (a.spills == 0 && a.stack_bytes == 0) return "none";
  return str_cat(a.spills, " moves to and from the stack, which has ", a.stack_bytes, " bytes");
}

std::string tile_of(const CostModel& a) {
  if (a.backward && a.shape.head_dim == 0) return "a backward pass: its code does not show head_dim and tile";
  if (a.backward) {
    return str_cat("a backward pass, head_dim ", a.shape.head_dim,
                   a.shape.head_dim_v != a.shape.head_dim ? str_cat(" and ", a.shape.head_dim_v) : "");
  }
  std::string text = str_cat(a.shape.rows, " rows x ", a.shape.keys, " keys, head_dim ", a.shape.head_dim);
  if (a.shape.head_dim_v != a.shape.head_dim) text += str_cat(" and ", a.shape.head_dim_v);
  return a.pair ? text + ", two blocks multiply together" : text;
}

std::string facts_of(const Examined& e) {
  const CostModel& a = e.cost_model;
  std::string text = entry("kernel", str_cat(e.name, " for ", a.arch), kIndent);
  if (!e.compiler.empty())
    text +=
        entry("compiler", str_cat(e.compiler, ", ", seconds_text(e.compile_seconds), " of CPU time from a cold start"),
              kIndent);
  text += entry("tile", tile_of(a), kIndent);
  text += entry(
      "registers",
      str_cat(a.registers, " of each thread at the start", a.threads > 0 ? str_cat(", ", a.threads, " threads") : ""),
      kIndent);
  text += entry("spilled", spills_of(a), kIndent);
  text += entry("shared",
                e.shared_bytes > 0 ? str_cat(e.shared_bytes, " bytes")
                                   : str_cat("chosen at launch; ", a.shared_bytes, " bytes before that"),
                kIndent);
  if (a.tensor_columns > 0) text += entry("tensor", str_cat(a.tensor_columns, " columns of tensor memory"), kIndent);
  std::string name = "beside it";
  for (const machine_code::Companion& other : a.companions) {
    text += entry(std::exchange(name, ""),
                  str_cat(other.name, ": ", other.registers, " registers, ", other.instructions, " instructions",
                          other.stack_bytes > 0 ? str_cat(", ", other.stack_bytes, " bytes of stack") : ""),
                  kIndent);
  }
  for (const std::string& opcode : a.unknown)
    text += entry("unknown", str_cat(opcode, ": the unit is unknown, and the opcode counts as control"), kIndent);
  return text;
}

std::string loops_of(const CostModel& a) {
  Table table({"loop", "", "at", "registers", "instructions", "left out", "warps' turns a tile"});
  for (const LoopCost& loop : a.loops) {
    const bool counts = &loop == a.steady(loop.role, false) || &loop == a.steady(loop.role, true);
    table.add({std::string(name_of(loop.role)), way_of(loop), hex(loop.address), str_cat(loop.registers),
               str_cat(loop.instructions), str_cat(loop.left_out),
               counts && loop.turns > 0 ? number(loop.per_tile()) : "-"});
  }
  return table.text();
}

std::vector<const LoopCost*> steady_of(const CostModel& a, bool masked) {
  std::vector<const LoopCost*> loops;
  for (const Role role :
       {Role::load, Role::mma, Role::softmax, Role::computing, Role::correction, Role::staging, Role::reduction}) {
    if (const LoopCost* loop = a.steady(role, masked)) loops.push_back(loop);
  }
  return loops;
}

std::string bar_of(double clocks, double most) {
  constexpr double widest = 24;
  const auto length = static_cast<size_t>(most > 0 ? std::lround(widest * clocks / most) : 0);
  return std::string(length, '#') + std::string(static_cast<size_t>(widest) - length, ' ');
}

std::string tile_table(const CostModel& a, const TileCost& tile, bool masked) {
  const std::vector<const LoopCost*> loops = steady_of(a, masked);
  const double most = std::max(*std::ranges::max_element(tile.clocks), tile.issue_clocks);
  std::vector<std::string> header{masked ? "masked tile" : "unmasked tile"};
  for (const LoopCost* loop : loops) header.emplace_back(name_of(loop->role));
  for (const char* title : {"all", "clocks", ""}) header.emplace_back(title);
  Table table(header);
  for (size_t u = 0; u < kUnits; ++u) {
    if (tile.instructions[u] <= 0 && tile.clocks[u] <= 0) continue;
    std::vector<std::string> row{std::string(name_of(static_cast<Unit>(u)))};
    for (const LoopCost* loop : loops) row.push_back(amount(loop->units[u] * loop->per_tile()));
    row.push_back(amount(tile.instructions[u]));
    row.push_back(tile.clocks[u] > 0 ? fixed(tile.clocks[u], 0) : "");
    row.push_back(tile.clocks[u] > 0 ? bar_of(tile.clocks[u], most) : "");
    table.add(row);
  }
  std::vector<std::string> row{"issue"};
  for (const LoopCost* loop : loops) row.push_back(amount(loop->instructions * loop->per_tile()));
  row.push_back(amount(tile.issued));
  row.push_back(fixed(tile.issue_clocks, 0));
  row.push_back(bar_of(tile.issue_clocks, most));
  table.add(row);
  return str_cat(table.text(), "Bound by ", tile.binds, ": ", fixed(most, 0), " clocks.\n");
}

// ---- Comparisons ----

// Returns the warps whose iterations make a tile: 32 rows each if tensor memory holds the scores, else 16.
double warps_of_tile(const CostModel& a) { return a.steady(Role::mma, false) != nullptr ? 4 : 8; }

struct Row {
  std::string name;
  std::string (*value)(const Examined& e, double warps);
};

std::string per_warp(const Examined& e, double warps, bool masked) {
  const LoopCost* loop = e.cost_model.steady_softmax(masked);
  if (loop != nullptr) return fixed(loop->instructions * loop->per_tile() / warps, 0);
  // The iteration lies outside of the loops, so that the count includes the other code there.
  for (const LoopCost& around : e.cost_model.loops) {
    if (around.once && around.masked == masked && around.work.scores() > 0) return str_cat("<= ", around.instructions);
  }
  return "-";
}

std::string clocks_of(const std::optional<TileCost>& tile, Unit unit) {
  const double clocks = tile ? tile->clocks[static_cast<size_t>(unit)] : 0;
  return clocks > 0 ? fixed(2 * clocks, 0) : "-";
}

const std::optional<TileCost>& main_tile(const Examined& e) {
  return e.cost_model.plain ? e.cost_model.plain : e.cost_model.masked;
}

template <Unit unit>
std::string clocks(const Examined& e, double) {
  return clocks_of(main_tile(e), unit);
}

// Returns the columns of tensor memory that units other than the tensor core read in an iteration. The number is 0 if
// each score is read once, and the result only for an exceptional rescaling.
std::string columns_beside_scores(const Examined& e, double) {
  const LoopCost *softmax = e.cost_model.steady(Role::softmax, !e.cost_model.plain),
                 *correction = e.cost_model.steady(Role::correction, false);
  if (softmax == nullptr) return "-";
  const int more = softmax->work.columns_read - softmax->work.scores();
  return str_cat(std::max(0, more) + (correction == nullptr ? 0 : correction->work.columns_read));
}

std::string registers_of(const Examined& e, double) {
  std::string text;
  for (const LoopCost* loop : steady_of(e.cost_model, !e.cost_model.plain))
    text += str_cat(text.empty() ? "" : "/", loop->registers);
  return text;
}

const Row kRows[] = {
    {"instructions of a warp, unmasked", [](const Examined& e, double warps) { return per_warp(e, warps, false); }},
    {"instructions of a warp, masked", [](const Examined& e, double warps) { return per_warp(e, warps, true); }},
    {"clocks for two tiles: MMA", clocks<Unit::mma>},
    {"  exponential", clocks<Unit::exponential>},
    {"  FMA", clocks<Unit::fma>},
    {"  ALU, with conversions", clocks<Unit::alu>},
    {"  shared memory", clocks<Unit::shared_memory>},
    {"  tensor memory", clocks<Unit::tensor_memory>},
    {"  issue, all warps", [](const Examined& e, double) { return fixed(2 * main_tile(e)->issue_clocks, 0); }},
    {"bound by", [](const Examined& e, double) { return main_tile(e)->binds; }},
    {"columns read except the scores", columns_beside_scores},
    {"spills; bytes of stack",
     [](const Examined& e, double) { return str_cat(e.cost_model.spills, "; ", e.cost_model.stack_bytes); }},
    {"registers, by role", registers_of},
    {"columns of tensor memory", [](const Examined& e, double) { return str_cat(e.cost_model.tensor_columns); }},
    {"cold compile, CPU time",
     [](const Examined& e, double) { return e.compiler.empty() ? std::string("-") : seconds_text(e.compile_seconds); }},
};

}  // namespace

std::string report_of(const Examined& examined) {
  const CostModel& a = examined.cost_model;
  std::string text = str_cat(facts_of(examined), "\n", loops_of(a));
  if (a.plain) text += str_cat("\n", tile_table(a, *a.plain, false));
  if (a.masked) text += str_cat("\n", tile_table(a, *a.masked, true));
  return text;
}

std::string comparison_of(const std::vector<Examined>& all) {
  const CostModel& first = all.front().cost_model;
  const double warps = warps_of_tile(first);
  std::string names;
  std::vector<std::string> header{str_cat("steady loop, head_dim ", first.shape.head_dim)};
  for (const Examined& e : all) {
    header.push_back(e.compiler.empty() ? e.name : "tandem");
    if (!e.compiler.empty()) names += str_cat("tandem: ", e.name, " for ", e.cost_model.arch, "\n\n");
  }
  Table table(header);
  for (const Row& row : kRows) {
    std::vector<std::string> cells{row.name};
    for (const Examined& e : all) cells.push_back(row.value(e, warps));
    table.add(cells);
  }
  return str_cat(names, table.text(), "Instructions are counted for one warp and ", 128 / static_cast<int>(warps),
                 " rows x 128 keys; a tile has 128 x 128 scores.\n");
}

}  // namespace tandem::tool
