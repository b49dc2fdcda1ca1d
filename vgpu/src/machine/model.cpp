#include "vgpu/src/machine/model.h"

#include <algorithm>
#include <bitset>
#include <charconv>
#include <span>

#include "base/embedded.h"
#include "base/text.h"

namespace tandem::vgpu {

std::span<const Text> model_files();  // vgpu/models, by cmake/Embed.cmake

namespace {

struct Number {
  std::string_view key;
  int64_t least, most;
  void (*set)(Model*, int64_t);
};

template <class T>
constexpr T as(int64_t value, int64_t scale = 1) {
  return static_cast<T>(value * scale);
}

constexpr Number kNumbers[] = {
    {"multiprocessors", 1, 1024, [](Model* m, int64_t n) { m->sm_count = as<int32_t>(n); }},
    {"clock_mhz", 1, 100'000, [](Model* m, int64_t n) { m->clock_khz = as<int32_t>(n, 1000); }},
    {"memory_gib", 1, 65536, [](Model* m, int64_t n) { m->memory_bytes = n << 30; }},
    {"memory_clock_mhz", 1, 100'000, [](Model* m, int64_t n) { m->memory_clock_khz = as<int32_t>(n, 1000); }},
    {"memory_bus_bits", 1, 65536, [](Model* m, int64_t n) { m->memory_bus_bits = as<int32_t>(n); }},
    {"l2_mib", 1, 65536, [](Model* m, int64_t n) { m->l2_bytes = n << 20; }},
    {"shared_bytes", 1024, 1 << 20, [](Model* m, int64_t n) { m->shared_bytes_per_block = as<int32_t>(n); }},
    {"tensor_memory_columns", 0, 512, [](Model* m, int64_t n) { m->tensor_memory_columns = as<int32_t>(n); }},
    {"threads", 32, 1024, [](Model* m, int64_t n) { m->max_threads_per_block = as<int32_t>(n); }},
    {"registers", 1024, 1 << 20, [](Model* m, int64_t n) { m->registers_per_sm = as<int32_t>(n); }},
    {"blocks", 1, 16, [](Model* m, int64_t n) { m->max_cluster = as<int32_t>(n); }},
    {"products", 1, 1 << 20, [](Model* m, int64_t n) { m->products = as<int32_t>(n); }},
    {"exponentials", 1, 1 << 20, [](Model* m, int64_t n) { m->exponentials = as<int32_t>(n); }},
};

struct Family {
  std::string_view name;
  bool Model::*decodes;
};
constexpr Family kFamilies[] = {
    {"wgmma", &Model::wgmma}, {"tcgen05", &Model::tcgen05}, {"tcgen05.i8", &Model::tcgen05_i8}};

std::string_view trimmed(std::string_view text) {
  constexpr const char* blanks = " \t\r";
  const size_t begin = text.find_first_not_of(blanks);
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

// Removes and returns the text before the first `end`.
std::string_view take_until(char end, std::string_view* text) {
  const size_t at = std::min(text->find(end), text->size());
  const std::string_view part = text->substr(0, at);
  text->remove_prefix(std::min(at + 1, text->size()));
  return part;
}

bool read(std::string_view text, int64_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

class Reader {
 public:
  Reader(std::string_view file_name, Model* model) : file_name_(file_name), model_(*model) {}

  Status read_all(std::string_view text) {
    while (!text.empty()) {
      ++line_;
      const std::string_view line = take_until('\n', &text);
      TANDEM_TRY(read_line(trimmed(line.substr(0, line.find('#')))));
    }
    for (size_t n = 0; n < kKeys; ++n)
      if (!seen_[n]) return refuse(str_cat("\"", key(n), "\" is missing: add the key"));
    if (model_.tcgen05 != (model_.tensor_memory_columns == 512) || (!model_.tcgen05 && model_.tensor_memory_columns))
      return refuse("tensor_memory_columns must be 512 with tcgen05, and 0 without: correct the number");
    if (model_.tcgen05_i8 && !model_.tcgen05)
      return refuse("tcgen05.i8 must not be set without tcgen05: set tcgen05 too");
    return {};
  }

 private:
  // The keys of numbers, then the remaining keys.
  static constexpr std::string_view kOthers[] = {"chip", "compute_capability", "decodes"};
  static constexpr size_t kKeys = std::size(kNumbers) + std::size(kOthers);
  static std::string_view key(size_t n) {
    return n < std::size(kNumbers) ? kNumbers[n].key : kOthers[n - std::size(kNumbers)];
  }

  Status refuse(std::string_view why) const { return Status::invalid(str_cat(file_name_, ":", line_, ": ", why)); }

  Status read_line(std::string_view line) {
    if (line.empty()) return {};
    if (line.find('=') == std::string_view::npos)
      return refuse(str_cat("\"", line, "\" must be \"key = value\" or a comment: correct the line"));
    const std::string_view name = trimmed(take_until('=', &line)), value = trimmed(line);
    for (size_t n = 0; n < kKeys; ++n) {
      if (name != key(n)) continue;
      if (seen_[n]) return refuse(str_cat("\"", name, "\" must be given once: remove the second"));
      seen_[n] = true;
      if (n < std::size(kNumbers)) return read_number(kNumbers[n], value);
      if (name == "chip") return read_chip(value);
      return name == "decodes" ? read_families(value) : read_capability(value);
    }
    return refuse(str_cat("\"", name, "\" must be a key of a model: correct the name"));
  }

  Status read_number(const Number& known, std::string_view value) {
    int64_t number = 0;
    if (!read(value, &number) || number < known.least || number > known.most) {
      return refuse(str_cat(known.key, " (\"", value, "\") must be a whole number from ", known.least, " to ",
                            known.most, ": correct the value"));
    }
    known.set(&model_, number);
    return {};
  }

  Status read_chip(std::string_view value) {
    if (value.empty()) return refuse("chip must be the name of the chip: write its name");
    model_.marketing_name = str_cat(value, " (virtual)");
    return {};
  }

  Status read_capability(std::string_view value) {
    std::string_view minor = value;
    int64_t numbers[2] = {};
    const std::string_view major = take_until('.', &minor);
    const bool both = read(major, &numbers[0]) && read(minor, &numbers[1]);
    if (!both || (numbers[0] != 9 && numbers[0] != 10) || numbers[1] < 0 || numbers[1] > 9)
      return refuse(str_cat("compute_capability (\"", value, "\") must be 9.N or 10.N: write such a number"));
    model_.compute_major = as<int32_t>(numbers[0]);
    model_.compute_minor = as<int32_t>(numbers[1]);
    return {};
  }

  Status read_families(std::string_view value) {
    while (!value.empty()) {
      const std::string_view word = take_until(' ', &value);
      value = trimmed(value);
      const auto* found = std::ranges::find(kFamilies, word, &Family::name);
      if (found == std::end(kFamilies))
        return refuse(str_cat("decodes: \"", word, "\" must be wgmma, tcgen05 or tcgen05.i8: choose one of them"));
      model_.*found->decodes = true;
    }
    return {};
  }

  const std::string_view file_name_;
  Model& model_;
  int line_ = 0;
  std::bitset<kKeys> seen_;
};

struct Models {
  Status status;
  std::vector<Model> all;
};

Models read_models() {
  Models models;
  for (const Text& file : model_files()) {
    models.status = parse_model(file.name, file.text, &models.all.emplace_back());
    if (!models.status.ok()) break;
  }
  return models;
}

const Models& models() {
  static const Models read = read_models();
  return read;
}

}  // namespace

Status parse_model(std::string_view file_name, std::string_view text, Model* model) {
  *model = {};
  model->name = file_name.substr(0, file_name.find('.'));
  return Reader(file_name, model).read_all(text);
}

Status all_models(std::vector<const Model*>* all) {
  TANDEM_TRY(models().status);
  for (const Model& model : models().all) all->push_back(&model);
  return {};
}

const Model* find_model(std::string_view name) {
  const auto found = std::ranges::find(models().all, name, &Model::name);
  return found == models().all.end() ? nullptr : &*found;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& model : models().all) names.push_back(model.name);
  return names;
}

}  // namespace tandem::vgpu
