// Flags that several commands share.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/compare.h"

namespace tandem::tool {

struct Opened {
  std::unique_ptr<Machine> machine;
  Given given;
  std::vector<std::string> remarks;  // why a GPU is not used, and conversions of inputs
};

struct MachineFlags {
  std::string device;  // "": the best device
  int threads = 0;
  void add_to(Command app);

  // Opens the requested device, or else the best device.
  std::unique_ptr<Machine> open(std::vector<std::string>* remarks) const;
  // Opens a device for one call: the requested device, or else a device that supports the call.
  Opened open(Inputs inputs, const Attention& options, tandem_pass pass) const;
};

// Flags of the mask and the scores.
struct MaskFlags {
  bool causal = false, top_left = false, alibi = false;
  std::string window;
  double softcap = 0, scale = 0, dropout = 0;
  std::vector<int64_t> seqused;
  void add_to(Command app);

  Attention options() const;        // throws io::InputError
  void fill(Inputs& inputs) const;  // alibi_slopes and seqused, by the shape of inputs.q
};

// A problem from flags: sizes, mask and scores. A preset sets several flags, and later flags change these values.
struct ProblemFlags {
  MaskFlags mask;
  std::string dtype = "f32", bias;
  int64_t batch = 1, heads_q = 8, heads_k = 0, seqlen_q = 512, seqlen_k = 0, head_dim = 64, head_dim_v = 0;
  std::vector<int64_t> lengths_q, lengths_k;
  bool sink = false;

  void add_to(Command app);
  void add_presets_to(Command app);  // must precede add_to()

  // make fills in a tensor: q, k, v, dout, sink and bias, in this order. magnitude: of q.
  using Make = std::function<Buffer(DType dtype, const std::vector<int64_t>& shape, double magnitude)>;
  Inputs inputs(const Make& make, double magnitude = 1) const;
  // Returns inputs filled with normal numbers. A boolean bias shows most keys.
  Inputs random_inputs(Random& random, double magnitude = 1) const;
};

// Problems of well-known models.
struct Preset {
  const char *name, *what;
  void (*apply)(ProblemFlags& flags);
};
std::span<const Preset> presets();

int32_t checked_index(int64_t value, const char* flag);  // converts to int32, or throws io::InputError

// Runs a command. An exception becomes one sentence on standard error. The exit code is 1 for an error of a device that
// runs a kernel, and 2 if the command cannot run: input, memory, compiler.
int guarded(const std::function<int()>& run);

// Functions that add one command each.
void add_attend(Command app);
void add_verify(Command app);
void add_bench(Command app);
void add_explain(Command app);
void add_cache(Command app);
void add_info(Command app);
void add_demo(Command app, const std::string& program);  // program: the command as the user typed it
// arguments: the command line, for the line that repeats a failure.
void add_vgpu(Command app, const std::vector<std::string>& arguments);

}  // namespace tandem::tool
