#include "cli/compare.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <thread>

#include "base/text.h"
#include "cli/measure.h"

namespace tandem::tool {
namespace {

// Small problems are repeated more often, because with few numbers chance decides the largest error of a run.
uint32_t plain_runs(const Problem& p) {
  const int64_t work = p.total_q * p.seqlen_k * p.heads_q * (p.head_dim + p.head_dim_v) + 1;
  return static_cast<uint32_t>(std::clamp<int64_t>(10'000'000 / work, 3, 32));
}

}  // namespace

bool Machine::serves_gradients(const Inputs& inputs, const Attention& options,
                               std::vector<std::string>* remarks) const {
  if (!engine.on_gpu()) return true;
  const std::optional<Error> refusal = engine.refusal(inputs, options, TANDEM_BACKWARD);
  if (!refusal || refusal->code() != TANDEM_UNSUPPORTED) return true;
  remarks->push_back(std::string("no gradients: ") + refusal->what());
  return false;
}

void Machine::require_gradients(const Inputs& inputs, const Attention& options) const {
  if (const std::optional<Error> refusal = engine.refusal(inputs, options, TANDEM_BACKWARD)) throw *refusal;
}

std::vector<AccuracyCheck> check_exactness(Machine& machine, const Given& given, const Attention& options,
                                           bool backward, Results& results, Progress& progress) {
  const Inputs& used = given.used();
  Call engine_call(machine.engine, used, options, results);
  engine_call.forward();
  if (backward) engine_call.backward();
  engine_call.fetch();

  // The shapes of the engine's results define the Problem. The other results then replace them.
  const Attention call = with_results(used.attention(options), results);
  const auto problem = [&](const Results& to, tandem_pass pass) { return problem_of(call, to, pass); };
  std::vector<Results> formula;
  const uint32_t runs = plain_runs(problem(results, TANDEM_FORWARD));
  for (uint32_t noise = 0; noise < runs; ++noise) {
    formula.emplace_back(used, backward, false);
    plain::Plain plain(machine.threads, plain::Blas::best(), plain::Rounding::intermediates, noise);
    plain.forward(problem(formula.back(), TANDEM_FORWARD));
    if (backward) plain.backward(problem(formula.back(), TANDEM_BACKWARD));
  }
  progress.become("computing float64");
  const Results exact(given.original, backward, true), shapes(given.original, backward, false);
  const double passes = backward ? 2 : 1;
  truth(with_results(given.original.attention(options), shapes), exact, backward, machine.threads,
        [&](double share) { progress.advance(share / passes); });

  std::vector<AccuracyCheck> checks = check_accuracy(used.q.dtype(), TANDEM_FORWARD, results, formula, exact);
  if (backward) {
    for (AccuracyCheck& one : check_accuracy(used.q.dtype(), TANDEM_BACKWARD, results, formula, exact))
      checks.push_back(std::move(one));
  }
  return checks;
}

Speed measure_speed(Machine& machine, const Given& given, const Attention& options, bool backward, bool plain,
                    double seconds) {
  ToolEngine& engine = machine.engine;
  const Results results(given.used(), backward, false);
  std::fill_n(results.out.data(), results.out.bytes(), std::byte{0});  // so that the first run does not fault pages in
  for (const auto& one : results.all(TANDEM_BACKWARD))
    std::fill_n(one.buffer->data(), one.buffer->bytes(), std::byte{0});
  Speed speed;
  engine.release_workspace();
  Call call(engine, given.used(), options, results);
  const int64_t growth = peak_growth([&] {
    call.forward();
    if (backward) call.backward();
  });
  speed.memory = static_cast<double>(engine.workspace_bytes());
  if (!engine.on_gpu()) speed.memory = std::max(speed.memory, static_cast<double>(growth));
  speed.forward = call.median_seconds(TANDEM_FORWARD, seconds);
  if (backward) speed.backward = call.median_seconds(TANDEM_BACKWARD, seconds);

  std::optional<Results> apart;  // results in other types, if these differ
  if (given.converted) apart.emplace(given.original, backward, false);
  const Results& plain_results = apart ? *apart : results;
  const Attention plain_call = with_results(given.original.attention(options), plain_results);
  const Problem forward_problem = problem_of(plain_call, plain_results, TANDEM_FORWARD);
  speed.flops_forward = forward_flops(forward_problem);
  speed.flops_backward = backward_flops(forward_problem);
  if (!plain) return speed;

  plain::Plain formula(machine.threads, plain::Blas::best(), plain::Rounding::none);
  speed.plain_forward = tool::median_seconds([&] { formula.forward(forward_problem); }, seconds);
  if (backward) {
    const Problem backward_problem = problem_of(plain_call, plain_results, TANDEM_BACKWARD);
    speed.plain_backward = tool::median_seconds([&] { formula.backward(backward_problem); }, seconds);
  }
  speed.plain_memory = static_cast<double>(formula.scratch_bytes());
  // A BLAS may keep its threads spinning for a moment. The pause keeps these threads from slowing the next measurement.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return speed;
}

namespace {

// Returns a text such as "q contains 3 NaN, the first at (0, 5, 2, 1)", or "".
std::string nan_remark(const char* name, const Buffer& buffer) {
  int64_t count = 0, first = 0;
  for (int64_t n = buffer.count() - 1; buffer && n >= 0; --n) {
    if (std::isnan(buffer.get(n))) ++count, first = n;
  }
  if (count == 0) return "";
  std::vector<int64_t> index(buffer.shape().size());
  for (size_t axis = index.size(); axis-- > 0; first /= buffer.shape()[axis])
    index[axis] = first % buffer.shape()[axis];
  return str_cat(name, " contains ", count, " NaN, the first at ", io::shape_text(index),
                 ": results that depend on it are NaN");
}

}  // namespace

void print_problem(const Inputs& in, const Machine& machine, const std::vector<std::string>& remarks) {
  std::printf("q %s  k %s  v %s  %s\n", io::shape_text(in.q.shape()).c_str(), io::shape_text(in.k.shape()).c_str(),
              io::shape_text(in.v.shape()).c_str(), short_name(in.q.dtype()).c_str());
  std::printf("on %s\n", machine.engine.context().description().c_str());
  print(remarks);
  const struct {
    const char* name;
    const Buffer* buffer;
  } inputs[] = {{"q", &in.q},       {"k", &in.k},       {"v", &in.v},      {"dout", &in.dout},
                {"dlse", &in.dlse}, {"bias", &in.bias}, {"sink", &in.sink}};
  for (const auto& [name, buffer] : inputs) {
    const std::string remark = nan_remark(name, *buffer);
    if (!remark.empty()) print({remark});
  }
  std::fflush(stdout);
}

bool is_empty(const Results& results) {
  for (const Buffer* result : {&results.out, &results.lse, &results.dq, &results.dk, &results.dv})
    if (result->count() > 0) return false;
  return true;
}

std::string exactness_table(const std::vector<AccuracyCheck>& checks) {
  Table table({"", "largest error", "standard", "mean error", "standard", "of limit", ""});
  for (const AccuracyCheck& one : checks) {
    table.add({one.name, number(one.engine.largest), number(one.plain.largest), number(one.engine.mean),
               number(one.plain.mean), fixed(100 * one.worst, 0) + " %", one.good() ? good("exact") : bad("FAIL")});
  }
  std::string text = table.text();
  for (const AccuracyCheck& one : checks) {
    if (!one.good()) text += bad(one.name + ": " + one.why) + "\n";
  }
  return text;
}

bool all_good(const std::vector<AccuracyCheck>& checks) {
  return std::all_of(checks.begin(), checks.end(), [](const AccuracyCheck& one) { return one.good(); });
}

}  // namespace tandem::tool
