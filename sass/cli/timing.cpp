#include "sass/cli/timing.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "cli/cards.h"
#include "cli/io/json.h"
#include "cli/terminal.h"

namespace tandem::tool {
namespace {

using io::Json;
using machine_code::Clocks;
using machine_code::Delay;
using machine_code::Issue;
using machine_code::kDelays;
using machine_code::Kernel;
using machine_code::Latencies;
using machine_code::Link;
using machine_code::name_of;
using machine_code::RoleClocks;
using machine_code::Simulation;
using machine_code::WarpTrace;

constexpr int kTurns = 14;
constexpr size_t kIndent = 11;
// Hopper's warpgroups may or may not fall into step, depending on the begin of a tile. The median of three offsets
// counts.
constexpr double kOffsets[] = {300, 600, 1000};                // clocks
constexpr double kLeastTensorLoad = 60, kMaxTensorLoad = 150;  // clocks; no published source has the latency of LDTM

double megahertz_of(const Modelled& m) {
  constexpr double unlimited = 0.57;
  const double share = m.clocks.flops / m.clocks.step / m.peak;
  return m.latencies.megahertz - m.latencies.megahertz_lost * std::max(0.0, share - unlimited);
}

// Suggests a change that shortens a link of the chain.
std::string advice_for(const std::string& what) {
  const struct {
    const char* in;
    const char* advice;
  } all[] = {
      {"latency, tensor memory", "load all scores before the first is used, and once"},
      {"latency, exponential", "more exponentials in flight before the first is used"},
      {"latency, shared memory", "read shared memory earlier"},
      {"exponential unit", "more exponentials by polynomials"},
      {"FMA unit", "fewer multiplications and additions, or fewer polynomials"},
      {"ALU unit", "fewer maxima, selects and conversions; integers on FMA units"},
      {"conversion unit", "conversions at a time when the ALU is idle"},
      {"issue of", "shorter chains: independent instructions between dependent ones"},
      {"other warps issue", "fewer instructions in all roles of a scheduler"},
      {"mma: order", "fewer instructions between products"},
      {"tensor memory unit", "fewer columns read and written"},
      {"copies", "more stages, or earlier copies"},
      {"shared memory unit", "less traffic of shared memory"},
      {"signal", "hand over in smaller parts, or earlier"},
      {"end is seen", "more work while products run; another step's products queued earlier"},
  };
  for (const auto& [in, advice] : all) {
    if (what.find(in) != std::string::npos) return advice;
  }
  return "";
}

std::string roles_table(const Clocks& clocks) {
  Table table({"role", "warps", "instructions", "order", "turn", "unit", "latency", "products", "copies", "barrier"});
  for (const RoleClocks& r : clocks.roles) {
    if (r.block > 0) continue;
    std::vector<std::string> row{std::string(name_of(r.role)), str_cat(r.warps), fixed(r.issued, 0)};
    for (const double d : r.delays) row.push_back(d >= 0.5 ? fixed(d, 0) : "");
    table.add(row);
  }
  return table.text();
}

std::string chain_table(const Clocks& clocks) {
  constexpr size_t most = 10, most_advice = 3;
  Table table({"chain of waits in a step", "clocks", "of it"});
  std::vector<std::string> said;
  for (size_t k = 0; k < std::min(most, clocks.chain.size()); ++k) {
    const Link& link = clocks.chain[k];
    if (link.clocks < clocks.step / 100) break;
    table.add({link.what, fixed(link.clocks, 0), fixed(100 * link.clocks / clocks.step, 0) + " %"});
    const std::string advice = advice_for(link.what);
    const bool known = advice.empty() || std::ranges::find(said, advice) != said.end();
    if (!known && said.size() < most_advice) said.push_back(advice);
  }
  std::string text = table.text();
  std::string name = "to change";
  for (const std::string& advice : said) text += entry(std::exchange(name, ""), advice, kIndent);
  return text;
}

}  // namespace

Modelled model_of(const Examined& e) {
  const Latencies* latencies = machine_code::latencies_of(e.cost_model.arch);
  if (latencies == nullptr)
    throw_if_failed(Status::unsupported(
        str_cat("latencies are unknown for ", e.cost_model.arch, ": compile for sm_90, sm_100 or sm_103")));
  const Kernel& kernel = machine_code::kernel_of(e.cubin);
  const std::vector<WarpTrace> traces = machine_code::trace(kernel, e.cost_model, kTurns);
  const machine_code::Rates& rates = *machine_code::rates_of(e.cost_model.arch);
  Modelled m{.name = e.name, .latencies = *latencies, .clocks = {}, .run = {}, .range = {}};
  const double rows = rates.tensor_bytes > 0 ? 128 : 64, depth = 16;
  m.peak = 2 * rows * depth * rates.mma_columns;
  struct Beginning {
    Simulation run;
    Clocks clocks;
  };
  std::vector<Beginning> all;
  const auto add = [&](double offset) {
    Simulation run = machine_code::simulate(kernel, traces, rates, *latencies, offset);
    Clocks clocks = machine_code::clocks_of(run, kernel);
    all.push_back({std::move(run), std::move(clocks)});
  };
  if (rates.tensor_bytes > 0) add(0);
  if (rates.tensor_bytes <= 0) std::ranges::for_each(kOffsets, add);
  std::ranges::sort(all, {}, [](const Beginning& b) { return b.clocks.step; });
  m.least = all.front().clocks.step;
  m.most = all.back().clocks.step;
  m.run = std::move(all[all.size() / 2].run);
  m.clocks = std::move(all[all.size() / 2].clocks);
  m.range = "warpgroups may or may not fall into step";
  if (m.clocks.step <= 0) {
    throw_if_failed(Status::unsupported(
        str_cat("no computing warp of ", e.cost_model.kernel,
                " has a loop of known length: examine a kernel whose loop lengths do not depend on memory")));
  }
  if (rates.tensor_bytes <= 0) return m;
  m.range = "the latency of tensor memory is not known";
  for (const double latency : {kLeastTensorLoad, kMaxTensorLoad}) {
    Latencies other = *latencies;
    other.tensor_load = latency;
    const double step = machine_code::clocks_of(machine_code::simulate(kernel, traces, rates, other), kernel).step;
    m.least = std::min(m.least, step);
    m.most = std::max(m.most, step);
  }
  return m;
}

double rate_of(const Modelled& m, const Grid& g) {
  const double of_tile = g.steps / g.tiles * m.clocks.step + g.tile_bytes / m.latencies.tile_bytes;
  const double rounds = g.tiles / g.multiprocessors;
  // Tiles of one length fill whole rounds. With several lengths, the last tiles are short.
  const double clocks = g.longest_first ? rounds * of_tile : std::ceil(rounds) * of_tile;
  return g.flops * megahertz_of(m) / clocks * 1e-6;
}

std::string timing_report(const Modelled& m, const WholeProblem& problem) {
  const std::optional<Grid>& grid = problem.grid;
  const Clocks& c = m.clocks;
  const double per_clock = c.flops / c.step;
  std::string text = entry("kernel", m.name, kIndent);
  text += entry(
      "step",
      str_cat(fixed(c.step, 0), " clocks",
              m.most > m.least ? str_cat(" (", fixed(m.least, 0), " to ", fixed(m.most, 0), ": ", m.range, ")") : "",
              "; the tensor core works ", fixed(100 * c.tensor_share, 0), " % of them"),
      kIndent);
  text += entry("rate", str_cat(fixed(per_clock, 0), " FLOP a clock and multiprocessor"), kIndent);
  if (grid)
    text +=
        entry("modelled",
              str_cat(fixed(rate_of(m, *grid), 0), " TFLOP/s for the problem at ", fixed(megahertz_of(m), 0), " MHz"),
              kIndent);
  if (const std::optional<Turns>& turns = problem.turns) {
    text += entry("turns",
                  str_cat("blocks wait ", fixed(100 * turns->waiting.share(), 1), " % (", fixed(100 * turns->least, 1),
                          " to ", fixed(100 * turns->most, 1), ") longer than if dq were added in any order; ",
                          fixed(turns->waiting.clocks, 0), " clocks of the main kernel in all"),
                  kIndent);
  }
  if (m.run.assumed > 0 || m.run.unknown > 0) {
    text += entry("beware",
                  str_cat("the model assumes ", m.run.assumed, " arrivals and leaves out ", m.run.unknown,
                          " waits, because the code does not show the barriers"),
                  kIndent);
  }
  return str_cat(text, "\nClocks of a warp in a step, by cause of the wait:\n", roles_table(c), "\n", chain_table(c));
}

std::string timing_json(const Modelled& m, const WholeProblem& problem) {
  const std::optional<Grid>& grid = problem.grid;
  const Clocks& c = m.clocks;
  Json roles = Json::list(), chain = Json::list();
  for (const RoleClocks& r : c.roles) {
    Json one{{"role", name_of(r.role)}, {"block", r.block}, {"warps", r.warps}, {"instructions", r.issued}};
    for (size_t d = 0; d < kDelays; ++d) one[std::string(name_of(static_cast<Delay>(d)))] = r.delays[d];
    roles.add(one);
  }
  for (const Link& link : c.chain) chain.add({{"what", link.what}, {"clocks", link.clocks}});
  Json all{{"kernel", m.name},
           {"step", c.step},
           {"step_least", m.least},
           {"step_most", m.most},
           {"flops_a_clock", c.flops / c.step},
           {"tensor_share", c.tensor_share},
           {"megahertz", megahertz_of(m)},
           {"assumed", m.run.assumed},
           {"unknown", m.run.unknown},
           {"roles", roles},
           {"chain", chain}};
  if (grid) {
    all["grid"] = {
        {"tiles", grid->tiles}, {"steps", grid->steps}, {"flops", grid->flops}, {"longest_first", grid->longest_first}};
    all["tflops"] = rate_of(m, *grid);
  }
  if (const std::optional<Turns>& turns = problem.turns) {
    all["turns"] = {{"steps", turns->waiting.steps},     {"clocks", turns->waiting.clocks},
                    {"waiting", turns->waiting.share()}, {"waiting_least", turns->least},
                    {"waiting_most", turns->most},       {"flops", turns->flops}};
    all["tflops"] = turns->flops * megahertz_of(m) / turns->waiting.clocks * 1e-6;
  }
  return all.dump(1) + "\n";
}

}  // namespace tandem::tool
