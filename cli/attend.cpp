// tandem attend: attention over tensors from files.
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/compare.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/io/npy.h"
#include "cli/io/safetensors.h"

namespace tandem::tool {
namespace {

namespace fs = std::filesystem;

struct Attend {
  MachineFlags machine;
  MaskFlags mask;
  std::vector<std::string> files, names = {"q", "k", "v", "dout"};
  std::string dtype, out;
  bool grad = false, verify = false;
  uint64_t seed = 1;

  int run();
  Buffer load(const io::FileTensor& view, const std::string& what) const;
  void load_safetensors(const std::string& path, Inputs& in) const;
  void load_npy(Inputs& in) const;
  Inputs load_inputs() const;
  void save(const Results& results) const;
  void print_speed(const Speed& speed) const;
};

// Reshapes (seqlen, head_dim) and (seqlen, heads, head_dim) to (1, seqlen, heads, head_dim).
io::FileTensor in_four_dimensions(io::FileTensor view, const std::string& what) {
  auto& shape = view.shape;
  if (shape.size() < 2 || shape.size() > 4) {
    throw io::InputError(what + ": shape " + io::shape_text(shape) +
                         " must be (batch, seqlen, heads, head_dim), (seqlen, heads, head_dim) or (seqlen, head_dim): "
                         "reshape the tensor");
  }
  if (shape.size() == 2) shape.insert(shape.begin() + 1, 1);
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  return view;
}

Buffer Attend::load(const io::FileTensor& view, const std::string& what) const {
  Buffer buffer = buffer_from(in_four_dimensions(view, what), what, dtype == "bf16");
  if (buffer.dtype() == DType::boolean || buffer.dtype() == DType::i32)
    throw io::InputError(what + ": is " + io::name_of(view.element) +
                         " and must be F32, BF16, F16 or F64: convert the tensor");
  return dtype.empty() || dtype_from(dtype) == buffer.dtype() ? std::move(buffer) : buffer.converted(dtype_from(dtype));
}

void Attend::load_safetensors(const std::string& path, Inputs& in) const {
  const io::MappedFile mapped(path);
  const io::Safetensors file = io::parse_safetensors(mapped.bytes(), path);
  Buffer* targets[] = {&in.q, &in.k, &in.v, &in.dout};
  for (size_t n = 0; n < std::min<size_t>(names.size(), 4); ++n) {
    const io::FileTensor* found = file.find(names[n]);
    if (!found && n == 3) continue;
    if (!found) {
      std::string present;
      for (size_t t = 0; t < file.tensors.size() && t < 12; ++t) present += (t ? ", " : "") + file.tensors[t].name;
      if (file.tensors.size() > 12) present += ", ...";
      throw io::InputError(path + ": has no tensor " + io::in_quotes(names[n]) + "; it has " + io::in_quotes(present) +
                           ": choose with --names Q,K,V");
    }
    if (n < 3 || grad) *targets[n] = load(*found, path + ": tensor " + io::in_quotes(names[n]));
  }
}

void Attend::load_npy(Inputs& in) const {
  Buffer* targets[] = {&in.q, &in.k, &in.v, &in.dout};
  for (size_t n = 0; n < files.size(); ++n) {
    const io::MappedFile mapped(files[n]);
    *targets[n] = load(io::parse_npy(mapped.bytes(), files[n]), files[n]);
  }
}

Inputs Attend::load_inputs() const {
  Inputs in;
  if (files.size() == 1 && files[0].ends_with(".safetensors")) {
    load_safetensors(files[0], in);
  } else if (files.size() >= 3 && files.size() <= 4 &&
             std::all_of(files.begin(), files.end(), [](const auto& file) { return file.ends_with(".npy"); })) {
    load_npy(in);
  } else {
    throw io::InputError(
        "files (" + std::to_string(files.size()) +
        ") must be one .safetensors file, or three or four .npy files: pass q, k, v and optionally dout");
  }
  if (grad && !in.dout) {
    Random random(seed);
    std::vector<int64_t> shape = in.q.shape();
    shape.back() = in.v.shape().back();
    in.dout = random_buffer(random, in.q.dtype(), shape);
  }
  mask.fill(in);
  return in;
}

void Attend::save(const Results& results) const {
  std::vector<io::FileTensor> tensors;
  for (const auto& one : results.all(TANDEM_FORWARD)) tensors.push_back(one.buffer->view(one.name));
  for (const auto& one : results.all(TANDEM_BACKWARD)) tensors.push_back(one.buffer->view(one.name));
  if (out.ends_with(".safetensors")) {
    io::write_safetensors(out, tensors);
    std::printf("wrote %s\n", out.c_str());
    return;
  }
  std::error_code failure;
  fs::create_directories(out, failure);
  if (failure) throw io::InputError(out + ": cannot be created: " + failure.message() + "; check the path");
  for (const io::FileTensor& tensor : tensors) {
    const std::string path = (fs::path(out) / (tensor.name + ".npy")).string();
    io::write_npy(path, tensor);
    std::printf("wrote %s\n", path.c_str());
  }
}

int Attend::run() {
  if (out.ends_with(".safetensors"))
    io::check_output_file("--out", out);
  else
    io::check_output_folder("--out", out);
  const Attention options = mask.options();
  const auto [on, given, remarks] = machine.open(load_inputs(), options, grad ? TANDEM_BACKWARD : TANDEM_FORWARD);
  const Inputs& in = given.used();
  print_problem(in, *on, remarks);
  Results results(in, grad, false);
  if (is_empty(results)) std::printf("%s", kNothingRan);
  std::vector<AccuracyCheck> checks;
  if (verify) {
    Progress progress("attending", 1);
    checks = check_exactness(*on, given, options, grad, results, progress);
  } else {
    Progress progress("attending", 0);
    Call call(on->engine, in, options, results);
    call.forward();
    if (grad) call.backward();
    call.fetch();
  }
  if (!is_empty(results)) print_speed(measure_speed(*on, given, options, grad, false, 0.1));
  if (verify && !is_empty(results)) std::printf("\n%s", exactness_table(checks).c_str());
  if (!out.empty()) save(results);
  return all_good(checks) ? 0 : 1;
}

void Attend::print_speed(const Speed& speed) const {
  std::printf("forward %s, %s", seconds_text(speed.forward).c_str(),
              rate_text(speed.flops_forward, speed.forward).c_str());
  if (grad) {
    std::printf("; backward %s, %s", seconds_text(speed.backward).c_str(),
                rate_text(speed.flops_backward, speed.backward).c_str());
  }
  std::printf("; %s beyond inputs and results\n", bytes_text(speed.memory).c_str());
}

}  // namespace

void add_attend(Command app) {
  auto attend = std::make_shared<Attend>();
  Command command = app.add("attend", "Attention over q, k, v from .safetensors or .npy files");
  command.footer(R"(Examples:
  tandem attend qkv.safetensors --out result.safetensors         tensors q, k, v -> out, lse
  tandem attend model.safetensors --names layer0.q,layer0.k,layer0.v --causal --verify
  tandem attend q.npy k.npy v.npy --grad --out result/           random dout -> out, lse, dq, dk, dv as .npy
  tandem attend q.npy k.npy v.npy dout.npy --grad --out result.safetensors
  tandem attend q.npy k.npy v.npy --dtype bf16                   converted first; also reads numpy's V2 as bfloat16

Shapes are (batch, seqlen, heads, head_dim), or the same without batch, or without heads too. lse is (batch, heads, seqlen).
Exit code: 0, 1 when --verify finds an error that is too large, 2 when the input cannot be used.)");
  command.option("files", attend->files, "One .safetensors, or q.npy k.npy v.npy [dout.npy]").required();
  command.option("--names", attend->names, "Names of q, k, v and dout in the .safetensors [q,k,v,dout]")
      .separated_by_commas()
      .count(3, 4);
  command.option("--dtype", attend->dtype, "Convert to f32, bf16, f16 or f64 first");
  command.flag("--grad", attend->grad, "Compute gradients too; dout is random where no file has it");
  command.option("--seed", attend->seed, "Seed of a random dout [1]");
  command.option("--out", attend->out, "Write the results: NAME.safetensors, or a folder for .npy files");
  command.flag("--verify", attend->verify, "Compare with float64");
  attend->mask.add_to(command);
  attend->machine.add_to(command);
  command.run([attend] { return attend->run(); });
}

}  // namespace tandem::tool
