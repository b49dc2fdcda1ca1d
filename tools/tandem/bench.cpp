// tandem bench: speed over a grid of problems, beside the plain formula.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "svg/bars.h"
#include "tandem/compare.h"
#include "tandem/flags.h"

namespace tandem::tool {
namespace {

struct Cell {
  DType dtype;
  int64_t head_dim;
  bool causal;
  int64_t seqlen;
  Speed speed;
};

struct Bench {
  MachineFlags machine;
  std::vector<std::string> dtypes = {"f32", "bf16"};
  std::vector<int64_t> seqlens = {512, 2048}, head_dims = {64, 128};
  int64_t batch = 1, heads = 8;
  bool causal_only = false, full_only = false, no_plain = false;
  double seconds = 0.3;
  std::string json, svg;

  int run();
  std::vector<Cell> cells() const;
  Speed measure(Machine& on, const Cell& cell) const;
  void save_json(const std::vector<Cell>& results, const std::string& device) const;
  void save_svg(const std::vector<Cell>& results, const std::string& device) const;
};

double rate(double flops, double seconds) { return seconds > 0 ? flops / seconds / 1e9 : 0; }

std::vector<Cell> Bench::cells() const {
  std::vector<Cell> all;
  for (const std::string& dtype : dtypes) {
    for (const int64_t head_dim : head_dims) {
      for (const bool causal : {false, true}) {
        if (causal ? full_only : causal_only) continue;
        for (const int64_t seqlen : seqlens) all.push_back({dtype_from(dtype), head_dim, causal, seqlen, {}});
      }
    }
  }
  return all;
}

Speed Bench::measure(Machine& on, const Cell& cell) const {
  Random random(1);
  const std::vector<int64_t> shape = {batch, cell.seqlen, heads, cell.head_dim};
  Inputs in;
  for (Buffer* tensor : {&in.q, &in.k, &in.v, &in.dout}) *tensor = random_buffer(random, cell.dtype, shape);
  Attention options;
  options.causal = cell.causal;
  return measure_speed(on, in, options, true, !no_plain, seconds);
}

std::vector<std::string> row_of(const Cell& cell) {
  const Speed& s = cell.speed;
  const double forward = rate(s.flops_forward, s.forward), backward = rate(s.flops_backward, s.backward);
  std::vector<std::string> row = {short_name(cell.dtype),
                                  std::to_string(cell.head_dim),
                                  cell.causal ? "causal" : "full",
                                  std::to_string(cell.seqlen),
                                  fixed(forward, 1),
                                  fixed(backward, 1)};
  if (s.plain_forward > 0) {
    row.insert(row.begin() + 5, fixed(s.plain_forward / s.forward, 2) + "x");
    row.push_back(fixed(s.plain_backward / s.backward, 2) + "x");
  }
  row.push_back(bytes_text(s.memory));
  if (s.plain_forward > 0) row.push_back(bytes_text(s.plain_memory));
  return row;
}

int Bench::run() {
  Machine on(machine.device, machine.threads);
  std::vector<Cell> all = cells();
  double work = 0;  // longer sequences take longer: the estimate of the rest counts their work
  const auto work_of = [&](const Cell& cell) {
    const double pairs = static_cast<double>(cell.seqlen * cell.seqlen * cell.head_dim * heads * batch);
    return 4 * seconds + pairs * 3e-10;
  };
  for (const Cell& cell : all) work += work_of(cell);
  {
    Progress progress("measuring", work);
    for (Cell& cell : all) {
      cell.speed = measure(on, cell);
      progress.advance(work_of(cell));
    }
  }
  const std::string device = on.engine.context().description();
  std::printf(
      "%s; %lld x %lld heads; %s\n", device.c_str(), static_cast<long long>(batch), static_cast<long long>(heads),
      no_plain ? "plain formula not measured" : ("plain formula: products by " + plain::Blas::best().name()).c_str());
  std::vector<std::string> header = {"dtype", "head_dim", "mask", "seqlen", "forward GF/s"};
  if (!no_plain) header.push_back("vs plain");
  header.push_back("backward GF/s");
  if (!no_plain) header.push_back("vs plain");
  header.push_back("extra memory");
  if (!no_plain) header.push_back("of plain");
  Table table(header);
  for (const Cell& cell : all) table.add(row_of(cell));
  std::printf("%s", table.text().c_str());
  if (!json.empty()) save_json(all, device);
  if (!svg.empty()) save_svg(all, device);
  return 0;
}

void Bench::save_json(const std::vector<Cell>& results, const std::string& device) const {
  nlohmann::ordered_json document = {{"version", tandem_version()},
                                     {"device", device},
                                     {"blas", plain::Blas::best().name()},
                                     {"batch", batch},
                                     {"heads", heads},
                                     {"cells", nlohmann::json::array()}};
  for (const Cell& cell : results) {
    const Speed& s = cell.speed;
    document["cells"].push_back({{"dtype", short_name(cell.dtype)},
                                 {"head_dim", cell.head_dim},
                                 {"causal", cell.causal},
                                 {"seqlen", cell.seqlen},
                                 {"forward_seconds", s.forward},
                                 {"backward_seconds", s.backward},
                                 {"plain_forward_seconds", s.plain_forward},
                                 {"plain_backward_seconds", s.plain_backward},
                                 {"forward_flops", s.flops_forward},
                                 {"backward_flops", s.flops_backward},
                                 {"extra_bytes", s.memory},
                                 {"plain_extra_bytes", s.plain_memory}});
  }
  io::AtomicFile file(json);
  file.write(document.dump(2) + "\n");
  file.commit();
  std::printf("wrote %s\n", json.c_str());
}

void Bench::save_svg(const std::vector<Cell>& results, const std::string& device) const {
  svg::Bars bars;
  bars.title = "Tandem beside the plain formula";
  bars.subtitle = device + "; " + std::to_string(batch * heads) + " heads";
  bars.value_label = "GF/s";
  bars.category_label = "seqlen";
  bars.series = {{"forward", "first", false}, {"backward", "second", false}};
  if (!no_plain) {
    bars.series = {{"forward, Tandem", "first", false},
                   {"forward, plain formula", "first", true},
                   {"backward, Tandem", "second", false},
                   {"backward, plain formula", "second", true}};
  }
  bars.columns = head_dims.size() * (causal_only || full_only ? 1 : 2);
  for (const Cell& cell : results) {
    const std::string title =
        short_name(cell.dtype) + ", head_dim " + std::to_string(cell.head_dim) + (cell.causal ? ", causal" : ", full");
    if (bars.panels.empty() || bars.panels.back().title != title)
      bars.panels.push_back({title, {}, std::vector<std::vector<double>>(bars.series.size())});
    auto& panel = bars.panels.back();
    const Speed& s = cell.speed;
    panel.categories.push_back(std::to_string(cell.seqlen));
    std::vector<double> values = {rate(s.flops_forward, s.forward), rate(s.flops_backward, s.backward)};
    if (!no_plain) {
      values = {values[0], rate(s.flops_forward, s.plain_forward), values[1], rate(s.flops_backward, s.plain_backward)};
    }
    for (size_t n = 0; n < values.size(); ++n) panel.values[n].push_back(values[n]);
  }
  io::AtomicFile file(svg);
  file.write(svg::draw(bars));
  file.commit();
  std::printf("wrote %s\n", svg.c_str());
}

}  // namespace

void add_bench(CLI::App& app, int* exit_code) {
  auto bench = std::make_shared<Bench>();
  CLI::App* command = app.add_subcommand("bench", "Speed over a grid of problems, beside the plain formula");
  command->footer(R"(Examples:
  tandem bench                                            f32 and bf16, head_dim 64 and 128, 512 and 2048
  tandem bench --seqlens 512,2048,8192 --dtypes f32,bf16,f16 --json bench.json --svg bench.svg
  tandem bench --seqlens 4096 --head-dims 128 --causal-only --no-plain

GF/s count 2 matrix products forward and 5 backward over the keys that a query sees. "vs plain" is how many times faster
than the plain formula: whole score matrices, products by the machine's BLAS, its probabilities kept for the gradients.)");
  command->add_option("--dtypes", bench->dtypes, "f32, bf16, f16 [f32,bf16]")->delimiter(',');
  command->add_option("--seqlens", bench->seqlens, "Queries and keys of a sequence [512,2048]")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->add_option("--head-dims", bench->head_dims, "Sizes of a head [64,128]")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->add_option("--batch", bench->batch, "Sequences [1]")->check(CLI::PositiveNumber);
  command->add_option("--heads", bench->heads, "Heads [8]")->check(CLI::PositiveNumber);
  command->add_option("--seconds", bench->seconds, "About how long each measurement lasts [0.3]")
      ->check(CLI::PositiveNumber);
  auto* causal = command->add_flag("--causal-only", bench->causal_only, "Only causal problems");
  command->add_flag("--full-only", bench->full_only, "Only problems without a mask")->excludes(causal);
  command->add_flag("--no-plain", bench->no_plain, "Leave the plain formula out");
  command->add_option("--json", bench->json, "Write the measurements to this file");
  command->add_option("--svg", bench->svg, "Draw them into this file");
  bench->machine.add_to(*command);
  command->callback([bench, exit_code] { *exit_code = guarded([&] { return bench->run(); }); });
}

}  // namespace tandem::tool
