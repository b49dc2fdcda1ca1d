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
using machine_code::Charge;
using machine_code::ChargeOfRole;
using machine_code::Clocks;
using machine_code::Delay;
using machine_code::Issue;
using machine_code::kCharges;
using machine_code::kDelays;
using machine_code::Kernel;
using machine_code::Latencies;
using machine_code::Link;
using machine_code::name_of;
using machine_code::Role;
using machine_code::RoleClocks;
using machine_code::Simulation;
using machine_code::WarpTrace;

constexpr int kTurns = 14;
constexpr size_t kIndent = 11;
// Hopper's warpgroups may or may not fall into step, depending on the begin of a tile. The median of three offsets
// counts.
constexpr double kOffsets[] = {300, 600, 1000};  // clocks
constexpr int kMaxRecurring = 2;                 // assumed arrivals of a run
constexpr double kHalf = 0.5, kDouble = 2;       // factors of charges
constexpr const char* kAllCharges = "all";
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
  Table table(
      {"role", "warps", "instructions", "order", "turn", "unit", "latency", "products", "copies", "barrier", "fences"});
  for (const RoleClocks& r : clocks.roles) {
    if (r.block > 0) continue;
    std::vector<std::string> row{std::string(name_of(r.role)), str_cat(r.warps), fixed(r.issued, 0)};
    for (const double d : r.delays) row.push_back(d >= 0.5 ? fixed(d, 0) : "");
    table.add(row);
  }
  return table.text();
}

std::string charges_table(const Modelled& m) {
  if (m.clocks.charges.empty()) return "";
  Table table({"charge", "role", "times", "clocks", "step if halved", "if doubled"});
  const auto varied = [&](std::string_view name, double factor) {
    const auto found =
        std::ranges::find_if(m.variations, [&](const Variation& v) { return v.name == name && v.factor == factor; });
    return found == m.variations.end() ? "" : fixed(found->step, 0);
  };
  for (const ChargeOfRole& c : m.clocks.charges) {
    const std::string_view name = name_of(c.charge);
    table.add({std::string(name), std::string(name_of(c.role)), fixed(c.times, 1), fixed(c.clocks, 0),
               varied(name, kHalf), varied(name, kDouble)});
  }
  table.add({"all", "", "", "", varied(kAllCharges, kHalf), varied(kAllCharges, kDouble)});
  return str_cat("\nWaits of a warp in a step that are charged as measured on an H200:\n", table.text());
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

// Lists the roles whose loops no warp reaches in the model.
std::string roles_not_followed(const machine_code::CostModel& cost_model, const std::vector<WarpTrace>& traces) {
  std::string names;
  std::vector<Role> listed;
  for (const machine_code::LoopCost& loop : cost_model.loops) {
    if (loop.once || loop.role == Role::epilogue || std::ranges::find(listed, loop.role) != listed.end()) continue;
    listed.push_back(loop.role);
    if (std::ranges::find(traces, loop.role, &WarpTrace::role) != traces.end()) continue;
    names += str_cat(names.empty() ? "" : ", ", name_of(loop.role));
  }
  return names;
}

std::string doubt_of(const Modelled& m, const machine_code::CostModel& cost_model,
                     const std::vector<WarpTrace>& traces) {
  const std::string roles = roles_not_followed(cost_model, traces);
  if (!roles.empty()) return str_cat("no warp reaches the loop of ", roles);
  // A loop of a forward contains waits of the first iteration of a tile, for warps that act once per tile.
  const int unanswered = cost_model.backward ? m.run.unanswered : 0;
  if (m.run.recurring > kMaxRecurring || unanswered > 0)
    return str_cat("the model assumes ", m.run.recurring, " arrivals, and no followed warp arrives at the barriers of ",
                   unanswered, " waits");
  return "";
}

void add_second_pass(const Kernel& kernel, const machine_code::CostModel& cost_model, const machine_code::Rates& rates,
                     Modelled* m) {
  const std::vector<WarpTrace> traces = machine_code::trace(kernel, cost_model, kTurns, machine_code::Pass::second);
  const Simulation run = machine_code::simulate(kernel, traces, rates, m->latencies);
  const Clocks clocks = machine_code::clocks_of(run, kernel);
  m->second_pass = clocks.step;
  if (m->doubt.empty() && (clocks.step <= 0 || run.recurring > kMaxRecurring || run.unanswered > 0))
    m->doubt = str_cat("the second pass has ", run.recurring, " assumed arrivals and ", run.unanswered,
                       " waits for arrivals of no followed warp");
}

// Runs the model with each charge of the kernel halved and doubled, and with all of them.
std::vector<Variation> variations_of(const Kernel& kernel, const std::vector<WarpTrace>& traces,
                                     const machine_code::Rates& rates, const Modelled& m) {
  std::vector<Variation> all;
  const auto add = [&](std::string_view name, double factor, const Latencies& l) {
    const Clocks clocks = machine_code::clocks_of(machine_code::simulate(kernel, traces, rates, l), kernel);
    all.push_back({std::string(name), factor, clocks.step, machine_code::dq_path_of(kernel, traces, rates, l)});
  };
  for (const double factor : {kHalf, kDouble}) {
    Latencies together = m.latencies;
    int charges = 0;
    for (size_t k = 0; k < kCharges; ++k) {
      const auto charge = static_cast<Charge>(k);
      if (std::ranges::find(m.clocks.charges, charge, &ChargeOfRole::charge) == m.clocks.charges.end()) continue;
      ++charges;
      together = together.with(charge, factor);
      add(name_of(charge), factor, m.latencies.with(charge, factor));
    }
    if (charges > 0) add(kAllCharges, factor, together);
  }
  return all;
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
  Modelled m{.name = e.name,
             .latencies = *latencies,
             .clocks = {},
             .run = {},
             .dq = {},
             .variations = {},
             .doubt = {},
             .range = {}};
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
  m.dq = machine_code::dq_path_of(kernel, traces, rates, *latencies);
  m.doubt = doubt_of(m, e.cost_model, traces);
  if (machine_code::has_second_pass(e.cost_model)) add_second_pass(kernel, e.cost_model, rates, &m);
  if (rates.tensor_bytes <= 0) return m;
  m.variations = variations_of(kernel, traces, rates, m);
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

HandOver hand_over_of(const Modelled& m) {
  HandOver hand_over;
  const bool blackwell = m.latencies.tensor_load > 0;
  if (!blackwell || !m.dq || m.dq->hand_over <= 0) return hand_over;
  constexpr double kPolls = 1.5;  // half of a poll on average, and the next one
  hand_over.adds = m.dq->hand_over;
  hand_over.busy = m.dq->step;
  hand_over.visible = kPolls * m.latencies.charge(Charge::strong_load).clocks;
  return hand_over;
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
  if (m.second_pass > 0)
    text += entry("pass 2", str_cat(fixed(m.second_pass, 0), " clocks a step, in addition to the first pass"), kIndent);
  if (m.dq) {
    text += entry("dq",
                  str_cat(fixed(m.dq->step, 0), " clocks a step from tensor memory to global memory, ",
                          m.dq->hand_over > 0 ? str_cat("and ", fixed(m.dq->hand_over, 0),
                                                        " from the first addition until the semaphore is released")
                                              : "in any order"),
                  kIndent);
  }
  if (m.run.unknown > 0) {
    text +=
        entry("beware",
              str_cat("the model leaves out ", m.run.unknown, " waits, because the code does not show the barriers"),
              kIndent);
  }
  if (!m.doubt.empty()) text += entry("verdict", "none, because " + m.doubt, kIndent);
  return str_cat(text, "\nClocks of a warp in a step, by cause of the wait:\n", roles_table(c), charges_table(m), "\n",
                 chain_table(c));
}

namespace {

Json dq_json(const machine_code::DqPath& dq) { return {{"step", dq.step}, {"hand_over", dq.hand_over}}; }

}  // namespace

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
  Json charges = Json::list(), variations = Json::list();
  for (const ChargeOfRole& charge : c.charges) {
    charges.add({{"charge", name_of(charge.charge)},
                 {"role", name_of(charge.role)},
                 {"times", charge.times},
                 {"clocks", charge.clocks}});
  }
  for (const Variation& v : m.variations) {
    Json one{{"charge", v.name}, {"factor", v.factor}, {"step", v.step}};
    if (v.dq) one["dq"] = dq_json(*v.dq);
    variations.add(one);
  }
  Json all{{"kernel", m.name},
           {"step", c.step},
           {"step_least", m.least},
           {"step_most", m.most},
           {"flops_a_clock", c.flops / c.step},
           {"tensor_share", c.tensor_share},
           {"megahertz", megahertz_of(m)},
           {"assumed", m.run.assumed},
           {"recurring", m.run.recurring},
           {"unknown", m.run.unknown},
           {"unanswered", m.run.unanswered},
           {"second_pass", m.second_pass},
           {"doubt", m.doubt},
           {"roles", roles},
           {"chain", chain},
           {"charges", charges},
           {"variations", variations}};
  if (m.dq) all["dq"] = dq_json(*m.dq);
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
