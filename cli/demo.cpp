// tandem demo: attention as a real model asks for it, layer by layer: exact? fast? small? And what does it look at?
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

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

namespace fs = std::filesystem;
using Words = std::vector<std::vector<std::string>>;  // of each sequence

struct Layer {
  std::string file, name;  // "sentences", "layer0"
  Given given;
  Buffer model_out;  // what the model itself computed; may be absent
  Results results;

  std::string title() const { return file + " " + name; }
};

struct Demo {
  MachineFlags machine;
  std::string folder, picture = "attention.svg", timeline = "timeline.svg", backward_timeline = "timeline-backward.svg";
  int64_t sentence = 0, layer = 5, head = 11;
  double seconds = 0.1;

  int run();
  std::vector<Layer> load(const Engine& engine, std::vector<Words>& words) const;
  bool report(Machine& on, std::vector<Layer>& layers, bool gradients) const;
  void draw(const Layer& from, const Words& words) const;
  bool emulate(const std::vector<Layer>& layers) const;
};

std::string default_folder() {
  return fs::is_directory("examples/minilm") ? "examples/minilm" : TANDEM_EXAMPLES "/minilm";
}

Words words_of(const io::Safetensors& file, const std::string& path) {
  const auto found = file.metadata.find("tokens");
  if (found == file.metadata.end()) return {};
  Words words;
  const auto refuse = [&] {
    return io::InputError(path + ": __metadata__: \"tokens\" must be JSON, a list of words for each sequence");
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

// Every NAME.q with its NAME.k and NAME.v, in the order of their names.
void load_file(const std::string& path, const Engine& engine, std::vector<Layer>& layers, std::vector<Words>& words) {
  const io::MappedFile mapped(path);
  const io::Safetensors file = io::parse_safetensors(mapped.bytes(), path);
  std::vector<std::string> names;
  for (const auto& tensor : file.tensors) {
    if (tensor.name.ends_with(".q")) names.push_back(tensor.name.substr(0, tensor.name.size() - 2));
  }
  std::sort(names.begin(), names.end(),
            [](const auto& a, const auto& b) { return std::pair(a.size(), a) < std::pair(b.size(), b); });
  const auto get = [&](const std::string& name) {
    const io::TensorView* tensor = file.find(name);
    if (!tensor) throw io::InputError(path + ": has no tensor " + io::in_quotes(name));
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
                           ": must be (batch, seqlen, heads, head_dim)");
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

std::vector<Layer> Demo::load(const Engine& engine, std::vector<Words>& words) const {
  const std::string from = folder.empty() ? default_folder() : folder;
  std::vector<std::string> files;
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(from, failure)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  }
  if (files.empty()) throw io::InputError(from + ": is no folder with .safetensors files; see examples/minilm");
  std::sort(files.rbegin(), files.rend());  // the short sentences before the long passage
  std::vector<Layer> layers;
  for (const std::string& file : files) load_file(file, engine, layers, words);
  if (layers.empty()) throw io::InputError(from + ": its files have no tensors named NAME.q, NAME.k and NAME.v");
  return layers;
}

double difference(double a, double b) { return std::isnan(a) ? INFINITY : std::fabs(a - b); }

// The largest difference to what the model computed itself, over the rows that are in use.
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

std::vector<std::string> exactness_row(const Layer& layer, const std::vector<AccuracyCheck>& checks, bool gradients) {
  const Buffer& q = layer.given.original.q;
  std::vector<std::string> row = {layer.title(), io::shape_text(q.shape()) + " " + short_name(q.dtype())};
  for (const bool gradient : {false, true}) {
    if (gradient && !gradients) continue;
    row.push_back(number(worst_error(checks, &AccuracyCheck::engine, gradient), 2));
    row.push_back(dim(number(worst_error(checks, &AccuracyCheck::plain, gradient), 2)));
  }
  double worst = 0;
  for (const AccuracyCheck& judged : checks) worst = std::max(worst, judged.worst);
  row.push_back(fixed(100 * worst, 0) + " %");
  row.push_back(all_good(checks) ? good("exact") : bad("FAIL"));
  return row;
}

// How many times faster is said of one machine only: the formula runs on the CPU.
std::vector<std::string> speed_row(const Layer& layer, const Speed& s, bool gradients, bool ratios) {
  std::vector<std::string> row = {layer.title()};
  const auto add = [&](double engine, double plain) {
    row.push_back(seconds_text(engine));
    row.push_back(dim(seconds_text(plain)));
    if (ratios) row.push_back(fixed(plain / engine, 1) + "x");
  };
  add(s.forward, s.plain_forward);
  if (gradients) add(s.backward, s.plain_backward);
  row.push_back(bytes_text(s.memory));
  row.push_back(dim(bytes_text(s.plain_memory)));
  return row;
}

std::vector<std::string> speed_header(bool gradients, bool ratios) {
  std::vector<std::string> header = {""};
  for (const char* pass : {"forward", "backward"}) {
    if (!gradients && pass[0] == 'b') continue;
    header.insert(header.end(), {pass, "plain formula"});
    if (ratios) header.emplace_back("");
  }
  header.insert(header.end(), {"extra memory", "plain formula"});
  return header;
}

bool Demo::report(Machine& on, std::vector<Layer>& layers, bool gradients) const {
  const bool ratios = !on.engine.on_gpu();
  std::vector<std::string> header = {"", "shape", "out", "plain formula"};
  if (gradients) header.insert(header.end(), {"gradients", "plain formula"});
  header.insert(header.end(), {"of allowed", ""});
  Table exactness(header), speed(speed_header(gradients, ratios));
  bool good_so_far = true;
  std::string remarks;
  {
    Progress progress("attending", 1.5 * static_cast<double>(layers.size()));
    for (Layer& one : layers) {
      const auto checks = check_exactness(on, one.given, {}, gradients, one.results, progress);
      speed.add(speed_row(one, measure_speed(on, one.given, {}, gradients, true, seconds), gradients, ratios));
      exactness.add(exactness_row(one, checks, gradients));
      progress.advance(0.5);
      for (const AccuracyCheck& judged : checks) {
        if (!judged.good()) remarks += bad(one.title() + ": " + judged.name + ": " + judged.why) + "\n";
      }
      good_so_far = good_so_far && all_good(checks);
      if (one.model_out) {
        remarks += one.title() + ": differs from the model's own output by at most " +
                   number(difference_to_model(one), 2) + "\n";
      }
    }
  }
  std::printf("%s\n%s\n", bold("Largest error against float64").c_str(), exactness.text().c_str());
  std::printf("%s\n%s\n%s\n", bold("Time, and memory beyond inputs and results").c_str(), speed.text().c_str(),
              remarks.c_str());
  return good_so_far;
}

// exp(score - lse) is the weight of a key, from the lse that the engine returned.
void Demo::draw(const Layer& from, const Words& words) const {
  const auto& shape = from.given.original.q.shape();
  const auto limit = [](int64_t value, int64_t count) { return std::clamp<int64_t>(value, 0, count - 1); };
  const int64_t b = limit(sentence, std::min<int64_t>(shape[0], static_cast<int64_t>(words.size()))),
                h = limit(head, shape[2]);
  const std::vector<std::string>& sequence = words[static_cast<size_t>(b)];
  const auto n = std::min<int64_t>(static_cast<int64_t>(sequence.size()), shape[1]);
  const int64_t heads_k = from.given.original.k.shape()[2], d = shape[3];
  svg::Heatmap map;
  map.title = "What each word looks at: " + from.name + ", head " + std::to_string(h);
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
  std::printf("The picture of %s, head %lld (open it in a browser):\n  %s\n\n", from.name.c_str(),
              static_cast<long long>(h), bold(fs::absolute(picture).lexically_normal().string()).c_str());
}

// Heads of a sequence side by side, as one head of a tensor of its own.
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

// So many heads as one, the head that was asked for among them.
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

// The longest layer's head, where no GPU is. Pairs of CTAs make the gradients of wider ones: so heads side by side,
// too, until they are that wide.
bool Demo::emulate(const std::vector<Layer>& layers) const {
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
  if (!one) return true;
  Inputs wide = heads_as_one(all, h, together, &wide_title);
  const std::optional<bool> pair =
      show_on_virtual_gpu(std::move(wide), wide_title, machine.threads, TANDEM_BACKWARD, backward_timeline);
  return *one && pair.value_or(true);
}

int Demo::run() {
  std::vector<std::string> remarks;
  const std::unique_ptr<Machine> on = machine.open(&remarks);
  std::vector<Words> words;
  std::vector<Layer> layers = load(on->engine, words);
  const Given& first = layers.front().given;
  const bool gradients = on->serves_gradients(first.used(), {}, &remarks);
  if (first.converted) remarks.push_back(first.note());
  std::printf("%s on %s\n", bold(std::string("Tandem ") + tandem_version()).c_str(),
              on->engine.context().description().c_str());
  print(remarks);
  std::printf("Plain formula: whole score matrices; products by %s%s\n\n", plain::Blas::best().name().c_str(),
              on->engine.on_gpu() ? ", on the CPU" : "");
  bool exact = report(*on, layers, gradients);
  const auto chosen = static_cast<size_t>(std::clamp<int64_t>(layer, 0, static_cast<int64_t>(layers.size()) - 1));
  if (!words[chosen].empty()) draw(layers[chosen], words[chosen]);
  if (!on->engine.on_gpu()) exact = emulate(layers) && exact;
  std::printf(
      "Next:\n"
      "  tandem demo --layer 0 --head 7 --sentence 1     another picture\n"
      "  tandem attend examples/minilm/sentences.safetensors --names layer0.q,layer0.k,layer0.v --grad --out "
      "result.safetensors\n"
      "  tandem verify --dtype bf16 --seqlen-q 2048 --causal\n"
      "  tandem bench --svg bench.svg\n"
      "  tandem --help\n");
  return exact ? 0 : 1;
}

}  // namespace

void add_demo(Command app) {
  auto demo = std::make_shared<Demo>();
  Command command = app.add("demo", "Attend to every layer of a real model; check, time and draw it");
  command.footer(R"(Examples:
  tandem demo                                   MiniLM, from examples/minilm
  tandem demo --layer 5 --head 2 --picture head.svg
  tandem demo folder/                           your own: tensors NAME.q, NAME.k, NAME.v, perhaps seqused, and the words
                                                as "tokens" in the metadata; see examples/minilm/README.md

Exit code: 0 when every result is exact enough, 1 when not, 2 when the input cannot be used.)");
  command.option("folder", demo->folder, "Folder of .safetensors files [examples/minilm]");
  command.option("--layer", demo->layer, "Of the picture: which layer, in the order of the table").show_default();
  command.option("--head", demo->head, "Of the picture: which head").show_default();
  command.option("--sentence", demo->sentence, "Of the picture: which sequence").show_default();
  command.option("--picture", demo->picture, "Where the picture goes").show_default();
  command.option("--timeline", demo->timeline, "Where the picture of the virtual GPU's warps goes").show_default();
  command.option("--timeline-backward", demo->backward_timeline, "Where that of the gradients' kernel goes")
      .show_default();
  command.option("--seconds", demo->seconds, "About how long each measurement lasts").show_default().above_zero();
  demo->machine.add_to(command);
  command.run([demo] { return demo->run(); });
}

}  // namespace tandem::tool
