// E3 and E5 to E8 with calls of the library: the same bits in every launch, exits, semaphores, CLC; and times.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "base/text.h"
#include "green_context.h"
#include "kernels/graph.h"
#include "lab.h"
#include "plan/tuning.h"

namespace tandem::day_one {
namespace {

constexpr const char* kCommon = "--dtype bf16 --align 8 --max-seqlen 0 --gradients qkv ";
constexpr unsigned kDifferBlocks = 64;

plan::Tuning with_switches(const std::string& switches) {
  Env env = Env::get();
  env.sm100 += (env.sm100.empty() ? "" : ",") + switches;
  return plan::tuning_of(env);
}

// A call of one pass with its tensors on the GPU.
class Call {
 public:
  Call(Lab& lab, const std::string& flags, tandem_pass pass)
      : lab_(lab), pass_(pass), instance_(test::from_flags(kCommon + flags)), outputs_(instance_.outputs(pass)) {
    if (pass == TANDEM_BACKWARD) {
      test::Outputs results = instance_.outputs(TANDEM_FORWARD);
      test::DeviceCall forward(lab.gpu(), instance_, TANDEM_FORWARD, results);
      forward.allocate_workspace();
      forward.forward(lab.gpu().stream());
      forward.fetch(lab.gpu().stream());
      instance_.give_results(&results);
    }
    call_.emplace(lab.gpu(), instance_, pass, outputs_);
    prepare();
  }
  // After a change of the tuning, which may need another kernel and workspace.
  void prepare() {
    call_->allocate_workspace();
    call_->prepare();
  }
  void run(gpu::Stream stream = nullptr) { call_->forward(stream != nullptr ? stream : lab_.gpu().stream()); }
  tandem_attention_args& args() { return call_->args; }

  // Keeps the current results. differing() counts the words of later results that differ from these.
  void keep() {
    for (const tandem_tensor* tensor : results()) {
      kept_.emplace_back(lab_.gpu(), "kept", bytes_of(*tensor), true);
      test::require(lab_.gpu().device().copy_on_device(kept_.back().address(), data_of(*tensor), bytes_of(*tensor),
                                                       lab_.gpu().stream()));
    }
    count_.emplace(lab_.gpu(), "count", 4, true);
  }
  void compare() {
    void* count = count_->address();
    size_t n = 0;
    for (const tandem_tensor* tensor : results()) {
      void *x = data_of(*tensor), *y = kept_[n++].address();
      int words = static_cast<int>(bytes_of(*tensor) / 4);
      lab_.launch("machine.cuh", "differ", 1, {.blocks = lab_.is_virtual() ? 1 : kDifferBlocks, .threads = 256},
                  {&x, &y, &words, &count}, {});
    }
  }
  int differing() const { return count_->read<int>().front(); }

 private:
  std::vector<const tandem_tensor*> results() const {
    const tandem_attention_args& a = call_->args;
    if (pass_ == TANDEM_FORWARD) return {a.out, a.lse};
    return {a.dq, a.dk, a.dv};
  }
  static void* data_of(const tandem_tensor& tensor) {
    return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  }
  static size_t bytes_of(const tandem_tensor& tensor) {
    size_t bytes = tensor.dtype.bits / 8u;
    for (int i = 0; i < tensor.ndim; ++i) bytes *= static_cast<size_t>(tensor.shape[i]);
    return bytes;
  }

  Lab& lab_;
  const tandem_pass pass_;
  test::Instance instance_;
  test::Outputs outputs_;
  std::optional<test::DeviceCall> call_;
  std::vector<GpuBuffer> kept_;
  std::optional<GpuBuffer> count_;
};

// Runs a call many times and compares the bits of each result with the first result. Returns what differs, or nothing.
std::string same_bits(Lab& lab, Call& call, int launches) {
  call.run();
  call.keep();
  for (int i = 1; i < launches; ++i) {
    call.run();
    call.compare();
    if (i % 1000 == 0) lab.synchronize();
  }
  const int differing = call.differing();
  return differing == 0 ? "" : str_cat(differing, " words differ in ", launches, " launches");
}

Outcome order_of_calls(Lab& lab) {
  struct Shape {
    const char *name, *flags;
  };
  const std::string sizes =
      lab.is_virtual() ? "--seqlen-q 140 --seqlen-k 270 " : "--seqlen-q 1024 --seqlen-k 2048 --heads-q 8 --heads-k 8 ";
  const int launches = lab.count(20'000, 1);
  for (const Shape& shape :
       {Shape{"d128", "--head-dim 128 --head-dim-v 128"}, Shape{"d64", "--head-dim 64 --head-dim-v 64"},
        Shape{"(96,48)", "--head-dim 96 --head-dim-v 48"}, Shape{"(192,128)", "--head-dim 192 --head-dim-v 128"},
        Shape{"d256", "--head-dim 256 --head-dim-v 256"}}) {
    lab.gpu().set_tuning(with_switches(""));
    Call call(lab, sizes + shape.flags, TANDEM_BACKWARD);
    std::string wrong = same_bits(lab, call, launches);
    if (wrong.empty() && lab.is_blackwell()) {
      lab.gpu().set_tuning(with_switches("wait_products"));
      call.prepare();
      call.run();
      call.compare();
      if (call.differing() > 0) wrong = "other bits if each product waits for the previous one";
    }
    std::printf("%s: %s\n", shape.name, wrong.empty() ? "same bits" : wrong.c_str());
    std::fflush(stdout);
    if (!wrong.empty()) return {Verdict::failed, str_cat("backward ", shape.name, ": ", wrong)};
  }
  return {Verdict::ok, str_cat("backward d128, d64, (96,48), (192,128), d256: same bits in ", launches, " launches",
                               lab.is_blackwell() ? ", and if each product waits for the previous one" : "")};
}

Outcome exits(Lab& lab) {
  struct One {
    const char *name, *flags;
    tandem_pass pass;
  };
  const int launches = lab.count(125'000, 2), replays = lab.is_virtual() ? 0 : lab.count(1250, 0), captured = 100;
  plan::Tuning tuning = with_switches("clc");
  tuning.sm100.backward.two_cta_clocks = 0;
  lab.gpu().set_tuning(tuning);
  for (const One& one :
       {One{"forward", "--seqlen-q 512 --seqlen-k 256 --head-dim 128 --head-dim-v 128", TANDEM_FORWARD},
        One{"forward with CLC", "--seqlen-q 256 --seqlen-k 256 --causal 1 --head-dim 256 --head-dim-v 256",
            TANDEM_FORWARD},
        One{"backward", "--seqlen-q 128 --seqlen-k 256 --head-dim 128 --head-dim-v 128", TANDEM_BACKWARD},
        One{"backward of (192,128)", "--seqlen-q 128 --seqlen-k 256 --head-dim 192 --head-dim-v 128",
            TANDEM_BACKWARD}}) {
    Call call(lab, one.flags, one.pass);
    std::string wrong = same_bits(lab, call, launches);
    if (wrong.empty() && replays > 0) {
      test::CudaGraph graph(lab.gpu().stream());
      for (int i = 0; i < captured; ++i) call.run();
      graph.end();
      for (int i = 0; i < replays; ++i) graph.launch();
      call.compare();
      if (call.differing() > 0) wrong = "other bits in a graph";
    }
    std::printf("%s: %s\n", one.name, wrong.empty() ? "right" : wrong.c_str());
    std::fflush(stdout);
    if (!wrong.empty()) return {Verdict::failed, str_cat(one.name, " of one tile: ", wrong)};
  }
  return {Verdict::ok,
          str_cat("calls of one tile, back to back: ", launches, " launches",
                  replays > 0 ? str_cat(" and ", captured * replays, " in graphs") : "", " of each kernel")};
}

// Occupies whole SMs for a while on another stream.
class OtherWork {
 public:
  OtherWork(Lab& lab, int sms, uint64_t duration)
      : lab_(lab), to_(lab.gpu(), "to", static_cast<size_t>(std::max(sms, 1)) * 4, true) {
    test::require(lab.gpu().device().create_stream(&stream_));
    lab.synchronize();
    void* to_p = to_.address();
    if (sms == 0 || lab.is_virtual()) return;
    lab.launch("machine.cuh", "spin", 1,
               {.blocks = static_cast<unsigned>(sms),
                .threads = 32,
                .dynamic_smem_bytes = static_cast<unsigned>(lab.properties().max_dynamic_smem_bytes),
                .stream = stream_},
               {&to_p, &duration}, {&to_});
  }
  OtherWork(const OtherWork&) = delete;
  ~OtherWork() {
    (void)lab_.gpu().device().synchronize(stream_);
    (void)lab_.gpu().device().destroy_stream(stream_);
  }

 private:
  Lab& lab_;
  GpuBuffer to_;
  gpu::Stream stream_ = nullptr;
};

constexpr const char* kManyBlocks =
    "--seqlen-q 4096 --seqlen-k 8192 --heads-q 8 --heads-k 8 --causal 1 --head-dim 128 --head-dim-v 128";

Outcome semaphores(Lab& lab) {
  const char* const flags =
      lab.is_virtual() ? "--seqlen-q 140 --seqlen-k 1100 --head-dim 64 --head-dim-v 64" : kManyBlocks;
  Call call(lab, flags, TANDEM_BACKWARD);
  call.run();
  call.keep();
  {
    const OtherWork other(lab, lab.properties().sm_count * 2 / 3, 3'000'000'000);
    for (int i = 0; i < lab.count(50, 1); ++i) {
      call.run();
      call.compare();
    }
    lab.synchronize();
  }
  if (call.differing() > 0)
    return {Verdict::failed, "a backward next to a kernel on two thirds of the SMs has other bits"};
  call.args().sm_limit = lab.is_virtual() ? 3 : 20;
  call.prepare();
  call.run();
  call.compare();
  if (call.differing() > 0) return {Verdict::failed, "a backward with sm_limit has other bits"};
  return {Verdict::ok, lab.is_virtual()
                           ? "the backward ends with the same bits on three SMs"
                           : "the backward ends with the same bits next to a kernel on two thirds of the SMs, "
                             "and on 20 SMs"};
}

// A grid that is larger than the green context's multiprocessors: CTAs with later tiles start when earlier ones end.
Outcome semaphores_in_green_context(Lab& lab) {
  if (lab.is_virtual()) return {Verdict::skipped, "a virtual GPU has no green contexts"};
  Call call(lab, kManyBlocks, TANDEM_BACKWARD);
  call.run();
  call.keep();
  lab.synchronize();
  std::optional<GreenContext> few;
  try {
    few.emplace(16);
    call.run(few->stream());
  } catch (const std::runtime_error& error) {
    return {Verdict::skipped, str_cat("the driver refuses a green context: ", error.what())};
  }
  test::require(lab.gpu().device().synchronize(few->stream()));
  call.compare();
  if (call.differing() > 0) return {Verdict::failed, "a backward in a green context of 16 SMs has other bits"};
  return {Verdict::ok, "the backward ends with the same bits in a green context of 16 SMs"};
}

Outcome cluster_launch_control(Lab& lab) {
  if (!lab.is_blackwell()) return {Verdict::skipped, "only Blackwell has cluster launch control"};
  const char* const small[] = {"--seqlen-q 600 --seqlen-k 600 --causal 1 --head-dim 256 --head-dim-v 256"};
  const char* const large[] = {
      "--seqlen-q 4096 --seqlen-k 4096 --heads-q 48 --heads-k 48 --causal 1 --head-dim 256 --head-dim-v 256",
      "--packed 1 --lengths-q 5000,1,300,4000,77 --lengths-k 5000,1,300,4000,77 --heads-q 48 --heads-k 48 --head-dim "
      "256 "
      "--head-dim-v 256"};
  const std::span<const char* const> all = lab.is_virtual() ? std::span<const char* const>(small) : large;
  for (const char* flags : all) {
    lab.gpu().set_tuning(with_switches("no_clc"));
    Call call(lab, flags, TANDEM_FORWARD);
    call.run();
    call.keep();
    lab.gpu().set_tuning(with_switches("clc"));
    call.prepare();
    {
      const OtherWork other(lab, lab.properties().sm_count / 10, 1'000'000'000);
      for (int i = 0; i < lab.count(100, 1); ++i) {
        call.run();
        call.compare();
      }
      lab.synchronize();
    }
    if (call.differing() > 0) return {Verdict::failed, str_cat("CLC gives other bits than static tiles: ", flags)};
  }
  return {Verdict::ok, "CLC with more clusters than SMs gives the bits of static tiles"};
}

// Milliseconds of a call.
double time_of(Lab& lab, Call& call) {
  gpu::Device& device = lab.gpu().device();
  gpu::Event start = nullptr, stop = nullptr;
  test::require(device.create_event(&start));
  test::require(device.create_event(&stop));
  call.run();
  double best = 1e30;
  for (int round = 0, calls = 1; round < 4; ++round) {
    test::require(device.record(start, lab.gpu().stream()));
    for (int i = 0; i < calls; ++i) call.run();
    test::require(device.record(stop, lab.gpu().stream()));
    test::require(device.synchronize_event(stop));
    float milliseconds = 0;
    test::require(device.elapsed_ms(start, stop, &milliseconds));
    best = std::min(best, static_cast<double>(milliseconds) / calls);
    calls = std::clamp(static_cast<int>(60 / best), 1, 1000);
  }
  (void)device.destroy_event(start);
  (void)device.destroy_event(stop);
  return best;
}

double flops_of(const test::Case& c, tandem_pass pass) {
  const double pairs = static_cast<double>(c.batch * c.heads_q * c.seqlen_q * c.seqlen_k) / (c.causal ? 2 : 1);
  const auto qk = static_cast<double>(c.head_dim), pv = static_cast<double>(c.head_dim_v);
  return pass == TANDEM_FORWARD ? 2 * pairs * (qk + pv) : 2 * pairs * (3 * qk + 2 * pv);
}

// The clocks between two m_blocks of a backward, which show whether dq or the tensor core is the limit.
Outcome iteration_clocks(Lab& lab) {
  if (lab.is_virtual()) return {Verdict::skipped, "time has no meaning on a virtual GPU"};
  std::string found;
  for (const int head_dim : {128, 192}) {
    const std::string flags =
        str_cat("--seqlen-q 8192 --seqlen-k 8192 --heads-q 37 --heads-k 37 --head-dim ", head_dim, " --head-dim-v 128");
    Call call(lab, flags, TANDEM_BACKWARD);
    const double milliseconds = time_of(lab, call),
                 flops = flops_of(test::from_flags(kCommon + flags), TANDEM_BACKWARD);
    const double clocks = milliseconds * lab.properties().clock_khz;
    const double iterations = 37.0 * (8192 / 128) * (8192 / 128.0) / lab.properties().sm_count;
    found += str_cat(found.empty() ? "" : "; ", "(", head_dim, ",128): ", static_cast<int>(flops / milliseconds / 1e9),
                     " TFLOP/s, ", static_cast<int>(clocks / iterations),
                     " clocks (tensor core of Blackwell: ", 4 * (3 * head_dim + 2 * 128), ")");
  }
  return {Verdict::measured,
          str_cat("backward, 8192 full, clocks at the nominal rate for 128 x 128 scores of an SM: ", found)};
}

// A line of the file: "forward" or "backward", and flags.
Outcome sweep(Lab& lab) {
  if (lab.is_virtual()) return {Verdict::skipped, "time has no meaning on a virtual GPU"};
  std::ifstream file(lab.setup.shapes);
  if (!file)
    return {Verdict::failed, str_cat("--shapes (", lab.setup.shapes, ") must be a readable file: correct the path")};
  int count = 0, failures = 0;
  double least = 1e30, most = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.find(' ');
    const tandem_pass pass = line.substr(0, space) == "forward" ? TANDEM_FORWARD : TANDEM_BACKWARD;
    ++count;
    try {
      Call call(lab, line.substr(space + 1), pass);
      const double rate = flops_of(test::from_flags(kCommon + line.substr(space + 1)), pass) / time_of(lab, call) / 1e9;
      least = std::min(least, rate);
      most = std::max(most, rate);
      std::printf("%7.0f TFLOP/s  %s\n", rate, line.c_str());
    } catch (const std::runtime_error& error) {
      ++failures;
      std::printf("FAILED %s: %s\n", line.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  return {failures == 0 ? Verdict::measured : Verdict::failed,
          str_cat(count - failures, " of ", count, " shapes run, at ", static_cast<int>(least), " to ",
                  static_cast<int>(most), " TFLOP/s; the log lists them")};
}

Outcome under_mps(Lab& lab) {
  const char* const percentage = std::getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  if (percentage == nullptr || lab.is_virtual())
    return {Verdict::skipped, "only with --mps, which starts an MPS server for this experiment"};
  Outcome outcome = semaphores(lab);
  outcome.text += str_cat("; under MPS with ", percentage, " % of the threads");
  return outcome;
}

}  // namespace

std::vector<Experiment> call_experiments() {
  return {{"e3-calls", order_of_calls}, {"e5", exits},
          {"e6", semaphores},           {"e6-green", semaphores_in_green_context},
          {"e6-mps", under_mps},        {"e7", cluster_launch_control},
          {"e8", iteration_clocks},     {"sweep", sweep}};
}

}  // namespace tandem::day_one
