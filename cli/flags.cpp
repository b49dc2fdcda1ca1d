#include "cli/flags.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace tandem::tool {
namespace {

const std::string not_on_the_gpu = "not on the GPU: ";

// Returns true if the sentence has CUDA's name of the out-of-memory error, or comes from a virtual GPU's allocator.
bool is_out_of_memory(std::string_view sentence) {
  return sentence.find("OUT_OF_MEMORY") != std::string_view::npos ||
         sentence.find("virtual GPU's memory") != std::string_view::npos;
}

// Parses "255", "-3", or "*" (unbounded).
std::optional<int64_t> window_bound(const std::string& text, const std::string& window) {
  if (text == "*") return std::nullopt;
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size())
    throw io::InputError("--window (" + window + ") must be LEFT,RIGHT: pass 64-bit whole numbers, or * for no bound");
  return value;
}

}  // namespace

void MachineFlags::add_to(Command app) {
  app.option("--device", device, "cpu, cuda, cuda:N or vgpu:MODEL [the first supported GPU, else cpu]")
      .environment("TANDEM_DEVICE");
  app.option("--threads", threads, "Largest number of threads; 0: one per core").within(0, 1024);
}

std::unique_ptr<Machine> MachineFlags::open(std::vector<std::string>* remarks) const {
  const DeviceChoice choice = choose_device(device);
  if (!choice.why.empty()) remarks->push_back(not_on_the_gpu + choice.why);
  return std::make_unique<Machine>(choice.name, threads);
}

Opened MachineFlags::open(Inputs inputs, const Attention& options, tandem_pass pass) const {
  std::vector<std::string> remarks;
  std::unique_ptr<Machine> machine = open(&remarks);
  Given given(std::move(inputs), machine->engine.on_gpu());
  if (device.empty() && machine->engine.on_gpu()) {
    const std::optional<Error> refusal = machine->engine.refusal(given.used(), options, pass);
    if (refusal && refusal->code() == TANDEM_UNSUPPORTED) {
      remarks.push_back(not_on_the_gpu + refusal->what());
      machine = std::make_unique<Machine>("cpu", threads);
      given = Given(std::move(given.original), false);
    }
  }
  if (given.converted) remarks.push_back(given.note());
  return {std::move(machine), std::move(given), std::move(remarks)};
}

void MaskFlags::add_to(Command app) {
  app.flag("--causal", causal, "A query sees no later key").group("Scores and masks");
  app.option("--window", window, "LEFT,RIGHT: number of keys that a query sees on each side; *: all")
      .group("Scores and masks");
  app.flag("--top-left", top_left, "Align the first query with the first key [the last with the last]")
      .group("Scores and masks");
  app.option("--scale", scale, "Factor of the scores; 0: 1/sqrt(head_dim)").finite().group("Scores and masks");
  app.option("--softcap", softcap, "Scores become C * tanh(score / C); 0: off")
      .at_least_zero()
      .group("Scores and masks");
  app.flag("--alibi", alibi, "Subtract slope * distance; slopes 2^(-8/heads), its square, ...")
      .group("Scores and masks");
  app.option("--seqused", seqused, "Used length of each sequence, queries and keys alike: 13,11,7")
      .separated_by_commas()
      .group("Scores and masks");
}

Attention MaskFlags::options() const {
  Attention options;
  options.causal = causal;
  options.alignment = top_left ? Alignment::top_left : Alignment::bottom_right;
  options.softmax_scale = scale;
  options.softcap = softcap;
  options.dropout_p = dropout;
  if (!window.empty()) {
    const size_t comma = window.find(',');
    options.window_left = window_bound(window.substr(0, comma), window);
    options.window_right = window_bound(comma == std::string::npos ? "" : window.substr(comma + 1), window);
  }
  return options;
}

void MaskFlags::fill(Inputs& inputs) const {
  const auto& shape = inputs.q.shape();
  if (alibi && shape.size() >= 3) {
    const int64_t heads = shape[shape.size() - 2];
    inputs.alibi_slopes = Buffer(DType::f32, {heads});
    for (int64_t h = 0; h < heads; ++h)
      inputs.alibi_slopes.set(h, std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(heads)));
  }
  if (seqused.empty()) return;
  inputs.seqused_q = Buffer(DType::i32, {static_cast<int64_t>(seqused.size())});
  inputs.seqused_k = Buffer(DType::i32, {static_cast<int64_t>(seqused.size())});
  for (size_t b = 0; b < seqused.size(); ++b) {
    for (const Buffer* used : {&inputs.seqused_q, &inputs.seqused_k})
      used->set(static_cast<int64_t>(b), checked_index(seqused[b], "--seqused"));
  }
}

int32_t checked_index(int64_t value, const char* flag) {
  if (value < INT32_MIN || value > INT32_MAX)
    throw io::InputError(std::string(flag) + " (" + std::to_string(value) +
                         ") must fit into 32 bits: use smaller lengths");
  return static_cast<int32_t>(value);
}

int guarded(const std::function<int()>& run) {
  const auto fail = [](int code, const char* sentence) {
    std::fflush(stdout);
    std::fprintf(stderr, "tandem: %s\n", sentence);
    return code;
  };
  try {
    return run();
  } catch (const Error& error) {
    return fail(error.code() == TANDEM_DEVICE_ERROR && !is_out_of_memory(error.what()) ? 1 : 2, error.what());
  } catch (const std::bad_alloc&) {
    return fail(2, "the host has too little memory for this problem: choose fewer heads or a shorter sequence");
  } catch (const std::exception& error) {
    return fail(2, error.what());
  }
}

}  // namespace tandem::tool
