#include "context_parallel/explain.h"

#include "base/text.h"

namespace tandem::context_parallel {
namespace {

constexpr int32_t kMaxRounds = 9;  // columns of the table of rounds

template <class... Values>
std::string print(const char* format, Values... values) {
  char line[128];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

std::string range(const TokenRange& r) {
  std::string text = str_cat("[", r.begin, ", ", r.end(), ")");
  if (r.stride > 1) text += str_cat(" by ", r.stride);
  return text;
}

// A rank's share of its pairs in each round: "3:25%" is a quarter, with the keys of rank 3.
std::string rounds(const ContextPlan& plan, int32_t rank, const std::vector<ContextStep>& steps) {
  std::vector<double> share(static_cast<size_t>(plan.ranks()), 0);
  double sum = 0;
  for (const ContextStep& s : steps) {
    share[static_cast<size_t>(s.round)] += static_cast<double>(s.pairs);
    sum += static_cast<double>(s.pairs);
  }
  std::string line = print("%5d ", rank);
  for (int32_t round = 0; round < std::min(plan.ranks(), kMaxRounds); ++round) {
    const int32_t peer = plan.peer(rank, round);
    const double part = share[static_cast<size_t>(round)];
    line += part > 0 ? print(" %7s", print("%d:%.0f%%", peer, 100 * part / sum).c_str()) : std::string("       -");
  }
  return line + "\n";
}

}  // namespace

std::string explain(const ContextPlan& plan) {
  double total = 0, largest = 0;
  for (int32_t r = 0; r < plan.ranks(); ++r) {
    total += static_cast<double>(plan.pairs(r));
    largest = std::max(largest, static_cast<double>(plan.pairs(r)));
  }
  const double mean = total / plan.ranks();
  std::string text = str_cat("context parallel: ", plan.ranks(), plan.ranks() == 1 ? " rank" : " ranks", ", layout ",
                             name_of(plan.layout()), ", ", plan.documents().size(),
                             plan.documents().size() == 1 ? " document" : " documents");
  if (plan.chunk() > 0) text += str_cat(", chunks of ", plan.chunk());
  text += print("\nwork: %.4g visible pairs, largest / mean %.3f\n\n", total, mean > 0 ? largest / mean : 1);
  text += " rank     queries        keys    work   steps  received keys  from ranks\n";
  std::string table;
  for (int32_t r = 0; r < plan.ranks(); ++r) {
    const std::vector<ContextStep> steps = plan.steps(r);
    int64_t received = 0;
    std::vector<bool> sends(static_cast<size_t>(plan.ranks()), false);
    for (const KeyTransfer& t : plan.transfers(r)) {
      received += t.k.count;
      sends[static_cast<size_t>(t.peer)] = true;
    }
    text += print("%5d %11lld %11lld %7.3f %7zu %14lld %11d\n", r, static_cast<long long>(plan.queries().tokens(r)),
                  static_cast<long long>(plan.keys().tokens(r)),
                  mean > 0 ? static_cast<double>(plan.pairs(r)) / mean : 1, steps.size(),
                  static_cast<long long>(received), static_cast<int>(std::count(sends.begin(), sends.end(), true)));
    table += rounds(plan, r, steps);
  }
  text += "\nshare of a rank's work in each round, as peer:share\n rank ";
  for (int32_t round = 0; round < std::min(plan.ranks(), kMaxRounds); ++round) text += print(" %7d", round);
  text += "\n" + table;
  if (plan.ranks() > kMaxRounds) text += str_cat("       and ", plan.ranks() - kMaxRounds, " more rounds\n");
  return text;
}

std::string explain_rank(const ContextPlan& plan, int32_t rank) {
  std::string text = str_cat("steps of rank ", rank, "\n");
  for (const ContextStep& s : plan.steps(rank)) {
    text += str_cat("round ", s.round, ", document ", s.q.document, ": queries ", range(s.q), ", order ", s.key_order,
                    "\n    keys ", range(s.k), " of rank ", s.peer);
    if (s.mask == StepMask::full) text += ", full";
    if (s.mask == StepMask::blocks) text += ", block mask";
    if (s.mask == StepMask::band) text += str_cat(", diagonal ", s.diagonal);
    if (s.window_left != TANDEM_UNBOUNDED) text += str_cat(", left ", s.window_left);
    if (s.window_right != TANDEM_UNBOUNDED) text += str_cat(", right ", s.window_right);
    text += "\n";
  }
  return text;
}

}  // namespace tandem::context_parallel
