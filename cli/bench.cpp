// tandem bench: speed of many problems, next to standard attention.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cli/compare.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/io/json.h"
#include "cli/svg/bars.h"

namespace tandem::tool {
namespace {

struct Cell {
  DType dtype;
  int64_t batch, heads, head_dim;
  bool causal;
  int64_t seqlen;
  Speed speed;
};

struct Bench {
  MachineFlags machine;
  std::vector<std::string> dtypes;  // empty or 0: chosen by choose_for()
  std::vector<int64_t> seqlens, head_dims = {64, 128};
  int64_t batch = 0, heads = 0;
  bool causal_only = false, full_only = false, no_plain = false, backward = false;
  double seconds = 0.3;
  std::string json, svg;

  int run();
  void choose_for(const ToolEngine& engine);
  std::vector<Cell> cells() const;
  Inputs inputs(const Cell& cell) const;
  void measure(Machine& on, Cell& cell) const;
  std::string sizes() const;
  Table table() const;  // with its header only
  void measure_all(Machine& on, std::vector<Cell>& all) const;
  std::vector<std::string> row_of(const Cell& cell) const;
  double rate(double flops, double time) const { return time > 0 ? flops / time / unit : 0; }
  void save_json(const std::vector<Cell>& results, const std::string& device) const;
  void save_svg(const std::vector<Cell>& results, const std::string& device) const;

  // choose_for() sets this.
  bool gradients = true;
  double unit = 1e9;
  const char* unit_name = "GF/s";
};

// Random numbers that repeat after a million, because drawing all of them would take longer than the attention.
Buffer varied(Random& random, DType dtype, const std::vector<int64_t>& shape) {
  constexpr int64_t drawn = int64_t{1} << 20;
  Buffer all(dtype, shape);
  const Buffer numbers = random_buffer(random, dtype, {std::min(drawn, all.count())});
  for (int64_t at = 0; at < all.bytes(); at += numbers.bytes())
    std::memcpy(all.data() + at, numbers.data(), static_cast<size_t>(std::min(numbers.bytes(), all.bytes() - at)));
  return all;
}

// Chooses values for absent flags. A GPU gets the usual sizes of attention benchmarks.
void Bench::choose_for(const ToolEngine& engine) {
  const bool gpu = engine.on_gpu();
  if (dtypes.empty()) dtypes = gpu ? std::vector<std::string>{"bf16"} : std::vector<std::string>{"f32", "bf16"};
  if (seqlens.empty()) seqlens = gpu ? std::vector<int64_t>{1024, 4096, 16384} : std::vector<int64_t>{512, 2048};
  if (!gpu) {
    if (batch == 0) batch = 1;
    if (heads == 0) heads = 8;
    return;
  }
  no_plain = true;
  unit = engine.emulated() ? 1e6 : 1e12;  // a virtual GPU uses this machine's clock
  unit_name = engine.emulated() ? "MF/s" : "TF/s";
}

std::vector<Cell> Bench::cells() const {
  std::vector<Cell> all;
  for (const std::string& dtype : dtypes) {
    for (const int64_t head_dim : head_dims) {
      for (const bool causal : {false, true}) {
        if (causal ? full_only : causal_only) continue;
        for (const int64_t seqlen : seqlens) {
          all.push_back({.dtype = dtype_from(dtype),
                         .batch = batch > 0 ? batch : std::max<int64_t>(1, 16384 / seqlen),
                         .heads = heads > 0 ? heads : std::max<int64_t>(1, 2048 / head_dim),
                         .head_dim = head_dim,
                         .causal = causal,
                         .seqlen = seqlen,
                         .speed = {}});
        }
      }
    }
  }
  return all;
}

Inputs Bench::inputs(const Cell& cell) const {
  Random random(1);
  Inputs in;
  for (Buffer* tensor : {&in.q, &in.k, &in.v, &in.dout}) {
    if (tensor == &in.dout && !gradients) continue;
    *tensor = varied(random, cell.dtype, {cell.batch, cell.seqlen, cell.heads, cell.head_dim});
  }
  return in;
}

void Bench::measure(Machine& on, Cell& cell) const {
  const Given given(inputs(cell), on.engine.on_gpu());
  Attention options;
  options.causal = cell.causal;
  cell.dtype = given.used().q.dtype();
  cell.speed = measure_speed(on, given, options, gradients, !no_plain, seconds);
}

std::vector<std::string> Bench::row_of(const Cell& cell) const {
  const Speed& s = cell.speed;
  const int decimals = unit > 1e9 ? 0 : 1;
  std::vector<std::string> row = {short_name(cell.dtype), std::to_string(cell.head_dim),
                                  cell.causal ? "causal" : "full", std::to_string(cell.seqlen)};
  const auto add = [&](double flops, double engine, double plain) {
    row.push_back(fixed(rate(flops, engine), decimals));
    if (!no_plain) row.push_back(fixed(plain / engine, 2) + "x");
  };
  add(s.flops_forward, s.forward, s.plain_forward);
  if (gradients) add(s.flops_backward, s.backward, s.plain_backward);
  row.push_back(bytes_text(s.memory));
  if (!no_plain) row.push_back(bytes_text(s.plain_memory));
  return row;
}

Table Bench::table() const {
  std::vector<std::string> header = {"dtype", "head_dim", "mask", "seqlen"};
  for (const std::string pass : {"forward", "backward"}) {
    if (pass == "backward" && !gradients) continue;
    header.push_back(pass + " " + unit_name);
    if (!no_plain) header.emplace_back("vs plain");
  }
  header.emplace_back("extra memory");
  if (!no_plain) header.emplace_back("of plain");
  Table table(header);
  table.at_least(6);
  return table;
}

// Returns a text such as "1 x 8 heads".
std::string Bench::sizes() const {
  return (batch > 0 ? std::to_string(batch) : "16384/seqlen") + " x " +
         (heads > 0 ? std::to_string(heads) : "2048/head_dim") + " heads";
}

int Bench::run() {
  io::check_output_file("--json", json);
  io::check_output_file("--svg", svg);
  std::vector<std::string> remarks;
  const std::unique_ptr<Machine> on = machine.open(&remarks);
  const bool gpu = on->engine.on_gpu();
  choose_for(on->engine);
  if (on->engine.emulated()) remarks.emplace_back("times on a virtual GPU are times of this host, not of the GPU");
  std::vector<Cell> all = cells();
  {
    const Given given(inputs(all.front()), gpu);
    if (backward) on->require_gradients(given.used(), {});
    gradients = on->serves_gradients(given.used(), {}, &remarks);
    if (given.converted) remarks.push_back(given.note());
  }
  const std::string device = on->engine.context().description();
  std::printf("%s\n%s", device.c_str(), sizes().c_str());
  if (!no_plain) std::printf("; standard attention: products by %s", plain::Blas::best().name().c_str());
  std::printf("\n");
  print(remarks);
  measure_all(*on, all);
  if (!json.empty()) save_json(all, device);
  if (!svg.empty()) save_svg(all, device);
  return 0;
}

// Prints each row when it is measured. The estimate of the remaining time counts the work, because longer sequences
// take longer.
void Bench::measure_all(Machine& on, std::vector<Cell>& all) const {
  const bool gpu = on.engine.on_gpu();
  double work = 0;
  const auto work_of = [&](const Cell& cell) {
    const double pairs = static_cast<double>(cell.seqlen * cell.seqlen * cell.head_dim * cell.heads * cell.batch);
    return 4 * seconds + pairs * (gpu ? 0 : 3e-10);
  };
  for (const Cell& cell : all) work += work_of(cell);
  Table rows = table();
  std::printf("%s", rows.line().c_str());
  std::fflush(stdout);
  Progress progress("measuring", work);
  for (Cell& cell : all) {
    measure(on, cell);
    progress.advance(work_of(cell));
    progress.clear();
    rows.add(row_of(cell));
    std::printf("%s", rows.line().c_str());
    std::fflush(stdout);
  }
}

void Bench::save_json(const std::vector<Cell>& results, const std::string& device) const {
  io::Json document = {{"version", tandem_version()},
                       {"device", device},
                       {"blas", plain::Blas::best().name()},
                       {"cells", io::Json::list()}};
  for (const Cell& cell : results) {
    const Speed& s = cell.speed;
    document["cells"].add({{"dtype", short_name(cell.dtype)},
                           {"batch", cell.batch},
                           {"heads", cell.heads},
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
  bars.title = no_plain ? "Tandem" : "Tandem next to standard attention";
  bars.subtitle = device + "; " + sizes();
  bars.value_label = unit_name;
  bars.category_label = "seqlen";
  for (const char* pass : {"forward", "backward"}) {
    const bool forward = pass[0] == 'f';
    if (!forward && !gradients) continue;
    const char* color = forward ? "first" : "second";
    bars.series.push_back({std::string(pass) + (no_plain ? "" : ", Tandem"), color, false});
    if (!no_plain) bars.series.push_back({std::string(pass) + ", standard attention", color, true});
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
    std::vector<double> values;
    const auto add = [&](double flops, double engine, double plain) {
      values.push_back(rate(flops, engine));
      if (!no_plain) values.push_back(rate(flops, plain));
    };
    add(s.flops_forward, s.forward, s.plain_forward);
    if (gradients) add(s.flops_backward, s.backward, s.plain_backward);
    for (size_t n = 0; n < values.size(); ++n) panel.values[n].push_back(values[n]);
  }
  io::AtomicFile file(svg);
  file.write(svg::draw(bars));
  file.commit();
  std::printf("wrote %s\n", svg.c_str());
}

}  // namespace

void add_bench(Command app) {
  auto bench = std::make_shared<Bench>();
  Command command = app.add("bench", "Speed of many problems, next to standard attention");
  command.footer(R"(Examples:
  tandem bench                                            f32 and bf16, head_dim 64 and 128, 512 and 2048
  tandem bench --seqlens 512,2048,8192 --dtypes f32,bf16,f16 --json bench.json --svg bench.svg
  tandem bench --seqlens 4096 --head-dims 128 --causal-only --no-plain

GF/s count 2 matrix products forward and 5 backward over the keys that a query sees. "vs plain" is the speedup over
standard attention, which stores whole score matrices, multiplies by the machine's BLAS and keeps P for the gradients.
Standard attention runs on the CPU only. The figures of a GPU are TF/s, by the GPU's clock.)");
  command.option("--dtypes", bench->dtypes, "f32, bf16, f16 [f32,bf16; GPU: bf16]").separated_by_commas();
  command.option("--seqlens", bench->seqlens, "Queries and keys of a sequence [512,2048; GPU: 1024,4096,16384]")
      .separated_by_commas()
      .above_zero();
  command.option("--head-dims", bench->head_dims, "Sizes of a head [64,128]").separated_by_commas().above_zero();
  command.option("--batch", bench->batch, "Sequences [1; GPU: 16384/seqlen]").above_zero();
  command.option("--heads", bench->heads, "Heads [8; GPU: 2048/head_dim]").above_zero();
  command.option("--seconds", bench->seconds, "Approximate seconds of each measurement [0.3]").above_zero();
  const Flag causal = command.flag("--causal-only", bench->causal_only, "Only causal problems");
  command.flag("--full-only", bench->full_only, "Only problems without a mask").excludes(causal);
  command.flag("--backward", bench->backward, "Gradients; exit code 2 if the device does not compute them");
  command.flag("--no-plain", bench->no_plain, "Do not measure standard attention");
  command.option("--json", bench->json, "Write the measurements to this file");
  command.option("--svg", bench->svg, "Draw them into this file");
  bench->machine.add_to(command);
  command.run([bench] { return bench->run(); });
}

}  // namespace tandem::tool
