#include "sass/src/clocks.h"

#include <algorithm>
#include <iterator>

#include "base/text.h"

namespace tandem::machine_code {
namespace {

constexpr std::string_view kDelayNames[] = {"order",    "turn",   "unit",    "latency",
                                            "products", "copies", "barrier", "fences"};

bool computes(const WarpTrace& w) { return w.role == Role::computing || w.role == Role::softmax; }

// The part of a run in which all steps are equal.
struct Steady {
  size_t first = 0, last = 0;  // turns
  double begin = 0, end = 0;   // the slowest computing warp
  size_t warp = 0;             // the slowest computing warp
};

Steady steady_of(const Simulation& run) {
  Steady s;
  for (size_t w = 0; w < run.warps.size(); ++w) {
    if (!computes(run.warps[w])) continue;
    size_t reached = run.warps[w].turns.size() - 2;
    while (reached > 0 && run.time_of_turn(w, reached) < 0) --reached;
    const size_t first = std::min<size_t>(4, reached / 2);
    const double end = run.time_of_turn(w, reached);
    if (reached == 0 || end <= s.end) continue;
    s = {first, reached, run.time_of_turn(w, first), end, w};
  }
  return s;
}

class Chain {
 public:
  Chain(const Simulation& run, const Kernel& kernel) : run_(run), kernel_(kernel) {}

  // Follows the chain of waits backwards from an event.
  std::vector<Link> back_from(size_t warp, size_t event, double until) {
    now_ = run_.issues[warp][event].time;
    until_ = until;
    constexpr int longest = 1'000'000;
    for (int k = 0; k < longest && now_ > until; ++k) {
      const Issue& issue = run_.issues[warp][event];
      const Cause& c = issue.cause;
      if (issue.product >= 0 && issue.time > issue.ready) {
        go_through_products(issue.product, &warp, &event);
        continue;
      }
      pass(role(warp), busy(issue, warp, event), issue.ready);
      if (c.product >= 0) {
        go_through_products(c.product, &warp, &event);
        continue;
      }
      const bool own = c.warp < 0 || (static_cast<size_t>(c.warp) == warp && c.event >= event);
      if (own && event == 0) break;
      const size_t from = own ? warp : static_cast<size_t>(c.warp), at = own ? event - 1 : c.event;
      pass(c.delay == Delay::barrier ? role(from) + " -> " + role(warp) : role(warp), what(c.delay, from, at),
           run_.issues[from][at].time);
      warp = from;
      event = at;
    }
    std::vector<Link> links;
    for (const auto& [name, clocks] : clocks_) links.push_back({name, clocks});
    std::ranges::sort(links, std::greater(), &Link::clocks);
    return links;
  }

 private:
  std::string role(size_t warp) const { return std::string(name_of(run_.warps[warp].role)); }
  const Instruction& instruction(size_t warp, size_t event) const {
    return kernel_.code[static_cast<size_t>(run_.warps[warp].events[event].instruction)];
  }
  // The chain from `then` to `now_` passes through this link.
  void pass(const std::string& who, std::string_view what, double then) {
    then = std::max(std::min(then, now_), until_);
    if (now_ > then) clocks_[what.empty() ? who : str_cat(who, ": ", what)] += now_ - then;
    now_ = then;
  }
  // Follows the queue from the end of a product to the first product that did not wait for another product. The next
  // link is the event that issued that product.
  void go_through_products(int product, size_t* warp, size_t* event) {
    const auto at = [&](int p) { return &run_.products[static_cast<size_t>(p)]; };
    const Product* p = at(product);
    while (p->finish > now_ + 1 && p->before >= 0) p = at(p->before);
    pass(role(static_cast<size_t>(p->warp)), "until the end of the products is visible", p->finish);
    while (p->start > p->issue + 1 && p->before >= 0 && now_ > until_) {
      pass("tensor core", "", p->start);
      p = at(p->before);
    }
    pass("tensor core", "", p->issue);
    *warp = static_cast<size_t>(p->warp);
    *event = p->event;
  }
  std::string unit_at(size_t warp, size_t event) const {
    return std::string(name_of(unit_of(instruction(warp, event))));
  }
  std::string busy(const Issue& issue, size_t warp, size_t event) const {
    return issue.busy == Delay::turn ? "other warps issue" : unit_at(warp, event) + " unit is busy";
  }
  std::string what(Delay delay, size_t warp, size_t event) const {
    switch (delay) {
      case Delay::latency: return "latency, " + unit_at(warp, event);
      case Delay::copies: return "copies";
      case Delay::barrier: return "signal";
      case Delay::fences: return std::string(instruction(warp, event).base());
      default: return "issue of " + unit_at(warp, event);
    }
  }

  const Simulation& run_;
  const Kernel& kernel_;
  double now_ = 0, until_ = 0;
  std::map<std::string, double> clocks_;
};

std::vector<ChargeOfRole> charges_of(const Simulation& run, const Steady& steady) {
  std::map<std::pair<Role, Charge>, ChargeOfRole> all;
  std::map<Role, int> warps;
  for (const WarpTrace& w : run.warps) warps[w.role] += w.block == 0;
  const double steps = static_cast<double>(steady.last - steady.first);
  for (const ChargedEvent& c : run.charged) {
    const auto w = static_cast<size_t>(c.warp);
    const double time = run.issues[w][c.event].time;
    if (run.warps[w].block > 0 || time < steady.begin || time >= steady.end) continue;
    const Role role = run.warps[w].role;
    ChargeOfRole& sum = all[{role, c.charge}];
    sum.role = role;
    sum.charge = c.charge;
    sum.times += 1 / (steps * warps[role]);
    sum.clocks += c.clocks / (steps * warps[role]);
  }
  std::vector<ChargeOfRole> list;
  for (const auto& [key, sum] : all) list.push_back(sum);
  return list;
}

}  // namespace

std::string_view name_of(Delay delay) { return kDelayNames[static_cast<size_t>(delay)]; }

Clocks clocks_of(const Simulation& run, const Kernel& kernel) {
  Clocks result;
  const Steady steady = steady_of(run);
  const double steps = static_cast<double>(steady.last - steady.first);
  if (steps <= 0) return result;
  result.step = (steady.end - steady.begin) / steps;
  result.prologue = run.time_of_turn(steady.warp, 0);
  double busy = 0;
  int blocks = 1;
  for (const WarpTrace& w : run.warps) blocks = std::max(blocks, w.block + 1);
  for (const Product& p : run.products) {
    const double part = std::min(p.finish, steady.end) - std::max(p.start, steady.begin);
    if (part <= 0) continue;
    const bool quarter = !in_tensor_memory(
        kernel.code[static_cast<size_t>(run.warps[static_cast<size_t>(p.warp)].events[p.event].instruction)]);
    busy += part * (quarter ? 0.25 : 1);
    result.flops += p.flops * part / (p.finish - p.start);
  }
  result.tensor_share = busy / blocks / (steady.end - steady.begin);
  result.flops /= blocks * steps;
  std::map<std::pair<int, Role>, RoleClocks> roles;
  for (size_t w = 0; w < run.warps.size(); ++w) {
    const WarpTrace& trace = run.warps[w];
    RoleClocks& r = roles[{trace.block, trace.role}];
    r.role = trace.role;
    r.block = trace.block;
    ++r.warps;
    for (size_t k = 1; k < run.issues[w].size(); ++k) {
      const Issue& issue = run.issues[w][k];
      const double time = issue.time, before = run.issues[w][k - 1].time;
      if (before < steady.begin || time > steady.end) continue;
      r.issued += 1 / steps;
      const double ready = std::clamp(issue.ready, before, time);
      r.delays[static_cast<size_t>(issue.cause.delay)] += (ready - before) / steps;
      r.delays[static_cast<size_t>(issue.busy)] += (time - ready) / steps;
    }
  }
  for (auto& [key, r] : roles) {
    r.issued /= r.warps;
    for (double& d : r.delays) d /= r.warps;
    result.roles.push_back(r);
  }
  result.chain = Chain(run, kernel).back_from(steady.warp, run.warps[steady.warp].turns[steady.last], steady.begin);
  for (Link& link : result.chain) link.clocks /= steps;
  result.charges = charges_of(run, steady);
  return result;
}

std::optional<DqPath> dq_path_of(const Kernel& kernel, const std::vector<WarpTrace>& warps, const Rates& rates,
                                 const Latencies& latencies) {
  std::vector<WarpTrace> path;
  std::ranges::copy_if(warps, std::back_inserter(path),
                       [](const WarpTrace& w) { return w.role == Role::staging || w.role == Role::reduction; });
  if (std::ranges::find(path, Role::reduction, &WarpTrace::role) == path.end()) return std::nullopt;
  const Simulation run = simulate(kernel, path, rates, latencies);
  DqPath found;
  for (size_t w = 0; w < run.warps.size(); ++w) {
    if (run.warps[w].role != Role::reduction) continue;
    size_t last = run.warps[w].turns.size() - 1;
    while (last > 0 && run.time_of_turn(w, last) < 0) --last;
    const size_t first = last / 3;
    if (last == first) continue;
    const double begin = run.time_of_turn(w, first), end = run.time_of_turn(w, last);
    found.step = std::max(found.step, (end - begin) / static_cast<double>(last - first));
    for (const Publication& p : run.published) {
      if (p.warp == static_cast<int>(w) && p.begin >= begin)
        found.hand_over = std::max(found.hand_over, p.end - p.begin);
    }
  }
  return found;
}

}  // namespace tandem::machine_code
