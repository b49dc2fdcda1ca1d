// tandem demo: attention of every layer of a real model, checked against float64, timed and drawn.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/own_folder.h"
#include "base/text.h"
#include "cli/compare.h"
#include "cli/emulate.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/io/json.h"
#include "cli/io/safetensors.h"
#include "cli/svg/heatmap.h"

namespace tandem::tool {
namespace {

constexpr size_t kColumns = 80;

namespace fs = std::filesystem;
using Words = std::vector<std::vector<std::string>>;  // by sequence

struct Layer {
  std::string file, name;  // "sentences", "layer0"
  Given given;
  Buffer model_out;  // the model's result; may be absent
  Results results;

  std::string title() const { return file + " " + name; }
};

// In the checkout pictures are written to the build folder, and elsewhere to the working directory.
std::string default_picture(const char* name) {
  return fs::is_directory("build") && fs::is_directory("examples/minilm") ? std::string("build/demo/") + name : name;
}

struct Demo {
  MachineFlags machine;
  std::string folder, picture = default_picture("attention.svg"), timeline = default_picture("timeline.svg"),
                      backward_timeline = default_picture("timeline-backward.svg");
  std::string program;  // as the user typed it, for the suggested commands
  int64_t sentence = 0, layer = 5, head = 11;
  double seconds = 0.1;

  int run();
  std::vector<Layer> load(const ToolEngine& engine, std::vector<Words>& words) const;
  bool report(Machine& on, std::vector<Layer>& layers, bool gradients, std::string* summary) const;
  void draw(const Layer& from, const Words& words) const;
  std::optional<bool> emulate(const std::vector<Layer>& layers) const;
  void check_outputs() const;
  void print_next() const;
};

std::string default_folder() {
  if (fs::is_directory("examples/minilm")) return "examples/minilm";
  const fs::path installed = own_folder() / TANDEM_INSTALLED_EXAMPLES "/minilm";
  const fs::path folder = fs::is_directory(installed) ? installed : own_folder() / TANDEM_EXAMPLES "/minilm";
  return folder.lexically_normal().string();
}

Words words_of(const io::Safetensors& file, const std::string& path) {
  const auto found = file.metadata.find("tokens");
  if (found == file.metadata.end()) return {};
  Words words;
  const auto refuse = [&] {
    return io::InputError(path + ": __metadata__: \"tokens\" must be JSON: write a list of words for each sequence");
  };
  try {
    const io::Json json = io::parse_json(found->second);
    if (!json.is_list()) throw refuse();
    for (const io::Json& sequence : json.items()) {
      if (!sequence.is_list()) throw refuse();
      std::vector<std::string>& texts = words.emplace_back();
      for (const io::Json& word : sequence.items()) {
        if (!word.text()) throw refuse();
        texts.push_back(*word.text());
      }
    }
  } catch (const io::JsonError&) {
    throw refuse();
  }
  return words;
}

// Loads every NAME.q with its NAME.k and NAME.v, ordered by name.
void load_file(const std::string& path, const ToolEngine& engine, std::vector<Layer>& layers,
               std::vector<Words>& words) {
  const io::MappedFile mapped(path);
  const io::Safetensors file = io::parse_safetensors(mapped.bytes(), path);
  std::vector<std::string> names;
  for (const auto& tensor : file.tensors) {
    if (tensor.name.ends_with(".q")) names.push_back(tensor.name.substr(0, tensor.name.size() - 2));
  }
  std::sort(names.begin(), names.end(),
            [](const auto& a, const auto& b) { return std::pair(a.size(), a) < std::pair(b.size(), b); });
  const auto get = [&](const std::string& name) {
    const io::FileTensor* tensor = file.find(name);
    if (!tensor) throw io::InputError(path + ": has no tensor " + io::in_quotes(name) + ": add the tensor");
    return buffer_from(*tensor, path + ": tensor " + io::in_quotes(name), false);
  };
  Random random(1);
  for (const std::string& name : names) {
    Inputs in;
    in.q = get(name + ".q");
    in.k = get(name + ".k");
    in.v = get(name + ".v");
    if (in.q.shape().size() != 4 || in.v.shape().size() != 4)
      throw io::InputError(path + ": tensor " + io::in_quotes(name + ".q") +
                           ": must be (batch, seqlen, heads, head_dim): reshape the tensor");
    if (file.find("seqused")) in.seqused_q = get("seqused"), in.seqused_k = get("seqused");
    std::vector<int64_t> shape = in.q.shape();
    shape.back() = in.v.shape().back();
    in.dout = random_buffer(random, in.q.dtype(), shape);
    Given given(std::move(in), engine.on_gpu());
    Results results(given.used(), true, false);
    layers.push_back({fs::path(path).stem().string(), name, std::move(given),
                      file.find(name + ".out") ? get(name + ".out") : Buffer(), std::move(results)});
    words.push_back(words_of(file, path));
  }
}

std::vector<Layer> Demo::load(const ToolEngine& engine, std::vector<Words>& words) const {
  const std::string from = folder.empty() ? default_folder() : folder;
  std::vector<std::string> files;
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(from, failure)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  }
  if (files.empty()) throw io::InputError(from + ": must be a folder with .safetensors files: see examples/minilm");
  std::sort(files.rbegin(), files.rend());  // short sentences come before the long passage
  std::vector<Layer> layers;
  for (const std::string& file : files) load_file(file, engine, layers, words);
  if (layers.empty())
    throw io::InputError(from + ": the files must have tensors NAME.q, NAME.k and NAME.v: rename the tensors");
  return layers;
}

double difference(double a, double b) { return std::isnan(a) ? INFINITY : std::fabs(a - b); }

// Returns the largest difference from the model's result, over the used rows.
double difference_to_model(const Layer& layer) {
  const auto& shape = layer.results.out.shape();
  double most = 0;
  const int64_t row = shape[2] * shape[3];
  for (int64_t b = 0; b < shape[0]; ++b) {
    const auto used =
        layer.given.original.seqused_q ? static_cast<int64_t>(layer.given.original.seqused_q.get(b)) : shape[1];
    for (int64_t n = b * shape[1] * row; n < (b * shape[1] + used) * row; ++n)
      most = std::fmax(most, difference(layer.results.out.get(n), layer.model_out.get(n)));
  }
  return most;
}

double worst_error(const std::vector<AccuracyCheck>& checks, Errors AccuracyCheck::*whose, bool gradients) {
  double worst = 0;
  for (const AccuracyCheck& one : checks) {
    if ((one.name[0] == 'd') == gradients && one.name != "lse") worst = std::max(worst, (one.*whose).largest);
  }
  return worst;
}

double worst_share(const std::vector<AccuracyCheck>& checks) {
  double worst = 0;
  for (const AccuracyCheck& judged : checks) worst = std::max(worst, judged.worst);
  return worst;
}

// "4x13x12x32 f16"
std::string short_shape(const Buffer& buffer) {
  std::string text;
  for (const int64_t extent : buffer.shape()) text += (text.empty() ? "" : "x") + std::to_string(extent);
  return text;
}

std::vector<std::string> exactness_row(const Layer& layer, const std::vector<AccuracyCheck>& checks, bool gradients) {
  std::vector<std::string> row = {layer.title(), short_shape(layer.given.original.q)};
  for (const bool gradient : {false, true}) {
    if (gradient && !gradients) continue;
    row.push_back(number(worst_error(checks, &AccuracyCheck::engine, gradient), 2));
    row.push_back(dim(number(worst_error(checks, &AccuracyCheck::plain, gradient), 2)));
  }
  const std::string share = fixed(100 * worst_share(checks), 0) + " %";
  row.push_back(all_good(checks) ? good(share) : bad("FAIL " + share));
  return row;
}

std::vector<std::string> speed_row(const Layer& layer, const Speed& s, bool gradients) {
  std::vector<std::string> row = {layer.title()};
  const auto add = [&](const std::string& engine, const std::string& standard) {
    row.push_back(engine);
    row.push_back(dim(standard));
  };
  add(seconds_text(s.forward), seconds_text(s.plain_forward));
  if (gradients) add(seconds_text(s.backward), seconds_text(s.plain_backward));
  add(bytes_text(s.memory), bytes_text(s.plain_memory));
  return row;
}

std::vector<std::string> speed_header(bool gradients) {
  std::vector<std::string> header = {"", "forward", "standard"};
  if (gradients) header.insert(header.end(), {"backward", "standard"});
  header.insert(header.end(), {"memory", "standard"});
  return header;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Prints both tables and fills the summary.
bool Demo::report(Machine& on, std::vector<Layer>& layers, bool gradients, std::string* summary) const {
  std::vector<std::string> header = {"", "shape of q", "out", "standard"};
  if (gradients) header.insert(header.end(), {"gradients", "standard"});
  header.emplace_back("of limit");
  Table exactness(header), speed(speed_header(gradients));
  std::vector<double> forward_ratios, backward_ratios;
  double worst = 0;
  bool exact = true;
  std::string remarks;
  {
    Progress progress("attending", 1.5 * static_cast<double>(layers.size()));
    for (Layer& one : layers) {
      const auto checks = check_exactness(on, one.given, {}, gradients, one.results, progress);
      progress.become("measuring");
      const Speed measured = measure_speed(on, one.given, {}, gradients, true, seconds);
      speed.add(speed_row(one, measured, gradients));
      exactness.add(exactness_row(one, checks, gradients));
      progress.advance(0.5);
      forward_ratios.push_back(measured.plain_forward / measured.forward);
      if (gradients) backward_ratios.push_back(measured.plain_backward / measured.backward);
      worst = std::max(worst, worst_share(checks));
      for (const AccuracyCheck& judged : checks) {
        if (!judged.good()) remarks += bad(one.title() + ": " + judged.name + ": " + judged.why) + "\n";
      }
      exact = exact && all_good(checks);
      if (one.model_out)
        remarks += str_cat(one.title(), ": differs from the model's own output by at most ",
                           number(difference_to_model(one), 2), "\n");
    }
  }
  std::printf("%s\n%s\n", bold("Largest error against float64").c_str(), exactness.text().c_str());
  std::printf("%s\n%s\n%s\n", bold("Time, and memory beyond inputs and results").c_str(), speed.text().c_str(),
              remarks.c_str());
  *summary = exact ? str_cat("Every layer is exact, with at most ", fixed(100 * worst, 0), " % of the allowed error")
                   : "Some layers are NOT exact (see FAIL above)";
  if (!on.engine.on_gpu()) {  // standard attention also runs on the CPU
    *summary +=
        str_cat("; the median speedup over standard attention is ", fixed(median(forward_ratios), 1), "x forward");
    if (gradients) *summary += str_cat(" and ", fixed(median(backward_ratios), 1), "x backward");
  }
  return exact;
}

// The weight of a key is exp(score - lse), from the engine's lse.
void Demo::draw(const Layer& from, const Words& words) const {
  const auto& shape = from.given.original.q.shape();
  const auto limit = [](int64_t value, int64_t count) { return std::clamp<int64_t>(value, 0, count - 1); };
  const int64_t b = limit(sentence, std::min<int64_t>(shape[0], static_cast<int64_t>(words.size()))),
                h = limit(head, shape[2]);
  const std::vector<std::string>& sequence = words[static_cast<size_t>(b)];
  const auto n = std::min<int64_t>(static_cast<int64_t>(sequence.size()), shape[1]);
  const int64_t heads_k = from.given.original.k.shape()[2], d = shape[3];
  svg::Heatmap map;
  map.title = "Attention between words: " + from.name + ", head " + std::to_string(h);
  map.subtitle = "softmax(q k / sqrt(" + std::to_string(d) +
                 ")) in percent, from the lse that Tandem returned; rows add up to 100";
  map.rows = map.columns = std::vector<std::string>(sequence.begin(), sequence.begin() + n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double score = 0;
      for (int64_t c = 0; c < d; ++c) {
        score += from.given.original.q.get(((b * shape[1] + i) * shape[2] + h) * d + c) *
                 from.given.original.k.get(((b * shape[1] + j) * heads_k + h * heads_k / shape[2]) * d + c);
      }
      const double lse = from.results.lse.get((b * shape[2] + h) * shape[1] + i);
      map.values.push_back(std::exp(score / std::sqrt(static_cast<double>(d)) - lse));
    }
  }
  io::AtomicFile file(picture);
  file.write(svg::draw(map));
  file.commit();
  std::printf("Picture of %s, head %lld (open it in a browser):\n  %s\n\n", from.name.c_str(),
              static_cast<long long>(h), bold(picture).c_str());
}

// Concatenates heads of a sequence to one head of a new tensor.
Buffer heads_of(const Buffer& from, const std::vector<int64_t>& heads) {
  const auto& shape = from.shape();
  const auto count = static_cast<int64_t>(heads.size());
  Buffer to(from.dtype(), {1, shape[1], 1, count * shape[3]});
  for (int64_t n = 0; n < shape[1]; ++n) {
    for (int64_t h = 0; h < count; ++h) {
      for (int64_t c = 0; c < shape[3]; ++c)
        to.set((n * count + h) * shape[3] + c, from.get((n * shape[2] + heads[static_cast<size_t>(h)]) * shape[3] + c));
    }
  }
  return to;
}

// Joins `count` heads, including the requested head, to one wide head.
Inputs heads_as_one(const Inputs& all, int64_t head, int64_t count, std::string* title) {
  const int64_t heads = all.q.shape()[2], group = heads / all.k.shape()[2];
  const int64_t first = std::min(head / count * count, heads - count);
  std::vector<int64_t> of_queries, of_keys;
  for (int64_t h = first; h < first + count; ++h) {
    of_queries.push_back(h);
    of_keys.push_back(h / group);
  }
  *title += count == 1 ? str_cat(", head ", head) : str_cat(", heads ", first, " to ", first + count - 1, " as one");
  Inputs one;
  one.q = heads_of(all.q, of_queries);
  one.k = heads_of(all.k, of_keys);
  one.v = heads_of(all.v, of_keys);
  return one;
}

// Runs one head of the longest layer on a virtual GPU. Kernels of two CTAs compute the gradients of wide heads only, so
// that several heads are joined to one for the backward. Returns nothing without NVRTC.
std::optional<bool> Demo::emulate(const std::vector<Layer>& layers) const {
  const Layer& longest = *std::max_element(layers.begin(), layers.end(), [](const Layer& a, const Layer& b) {
    return a.given.original.q.shape()[1] < b.given.original.q.shape()[1];
  });
  const Inputs& all = longest.given.original;
  const int64_t heads = all.q.shape()[2], h = std::clamp<int64_t>(head, 0, heads - 1);
  const int64_t widest = std::max({int64_t{1}, all.q.shape()[3], all.v.shape()[3]});
  const int64_t together = std::clamp<int64_t>(128 / widest, 1, heads);
  std::string title = longest.title(), wide_title = title;
  const std::optional<bool> one =
      show_on_virtual_gpu(heads_as_one(all, h, 1, &title), title, machine.threads, TANDEM_FORWARD, timeline);
  if (!one) return std::nullopt;
  Inputs wide = heads_as_one(all, h, together, &wide_title);
  const std::optional<bool> pair =
      show_on_virtual_gpu(std::move(wide), wide_title, machine.threads, TANDEM_BACKWARD, backward_timeline);
  return *one && pair.value_or(true);
}

void Demo::check_outputs() const {
  for (const auto& [flag, path] : {std::pair("--picture", &picture), std::pair("--timeline", &timeline),
                                   std::pair("--timeline-backward", &backward_timeline)}) {
    if (path->starts_with("build/demo/")) fs::create_directories("build/demo");
    io::check_output_file(flag, *path);
  }
}

int Demo::run() {
  check_outputs();
  std::vector<std::string> remarks;
  const std::unique_ptr<Machine> on = machine.open(&remarks);
  std::vector<Words> words;
  std::vector<Layer> layers = load(on->engine, words);
  const Given& first = layers.front().given;
  const bool gradients = on->serves_gradients(first.used(), {}, &remarks);
  if (first.converted) remarks.push_back(first.note());
  std::printf("%s on %s\n", bold(std::string("Tandem ") + tandem_version()).c_str(),
              on->engine.context().description().c_str());
  print(remarks, kColumns);
  std::printf("Standard attention stores whole score matrices; products by\n%s%s\n\n",
              plain::Blas::best().name().c_str(), on->engine.on_gpu() ? ", on the CPU" : "");
  std::fflush(stdout);
  std::string summary;
  bool exact = report(*on, layers, gradients, &summary);
  const auto chosen = static_cast<size_t>(std::clamp<int64_t>(layer, 0, static_cast<int64_t>(layers.size()) - 1));
  if (!words[chosen].empty()) draw(layers[chosen], words[chosen]);
  if (!on->engine.on_gpu()) {
    const std::optional<bool> emulated = emulate(layers);
    exact = emulated.value_or(true) && exact;
    summary += !emulated   ? "; the GPU's kernels did not run, because there is no NVRTC"
               : *emulated ? "; the kernels of a B200 are exact on the virtual GPU"
                           : "; the kernels of a B200 are NOT exact on the virtual GPU";
  }
  print_next();
  print({bold("Summary: ") + summary + "."}, kColumns);
  return exact ? 0 : 1;
}

void Demo::print_next() const {
  const std::string folder_of_results =
      fs::path(picture).has_parent_path() ? fs::path(picture).parent_path().string() + "/" : "";
  const std::string lines[] = {"demo --layer 0 --head 7 --sentence 1",
                               "attend examples/minilm/sentences.safetensors \\",
                               "--names layer0.q,layer0.k,layer0.v --grad \\",
                               "--out " + folder_of_results + "result.safetensors",
                               "verify --dtype bf16 --seqlen-q 2048 --causal",
                               "bench --svg " + folder_of_results + "bench.svg",
                               "--help"};
  std::printf("Next:\n");
  const std::string name = program.size() <= 20 ? program : "tandem";
  for (const std::string& line : lines) {
    const bool continues = line.starts_with("--names") || line.starts_with("--out");
    std::printf("  %s %s\n", continues ? " " : name.c_str(), line.c_str());
  }
  std::printf("\n");
}

}  // namespace

void add_demo(Command app, const std::string& program) {
  auto demo = std::make_shared<Demo>();
  demo->program = program;
  Command command = app.add("demo", "Attention of every layer of a real model: checked, timed, drawn");
  command.footer(R"(Examples:
  tandem demo                                   MiniLM, from examples/minilm
  tandem demo --layer 5 --head 2 --picture head.svg
  tandem demo folder/                           your own: tensors NAME.q, NAME.k, NAME.v, perhaps seqused, and the words
                                                as "tokens" in the metadata; see examples/minilm/README.md

Exit code: 0 when every result is exact enough, 1 when not, 2 when the input cannot be used.)");
  command.option("folder", demo->folder, "Folder of .safetensors files [examples/minilm]");
  command.option("--layer", demo->layer, "Layer of the picture, in the order of the table").show_default();
  command.option("--head", demo->head, "Head of the picture").show_default();
  command.option("--sentence", demo->sentence, "Sequence of the picture").show_default();
  command.option("--picture", demo->picture, "File of the picture").show_default();
  command.option("--timeline", demo->timeline, "File of the picture of a forward on the virtual GPU").show_default();
  command.option("--timeline-backward", demo->backward_timeline, "File of the picture of a backward on the virtual GPU")
      .show_default();
  command.option("--seconds", demo->seconds, "Seconds that each measurement lasts, about").show_default().above_zero();
  demo->machine.add_to(command);
  command.run([demo] { return demo->run(); });
}

}  // namespace tandem::tool
