#include "cli/emulate.h"

#include <cstdio>

#include "base/text.h"
#include "cli/cards.h"
#include "cli/compare.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/machine_code.h"
#include "cli/svg/timeline.h"
#include "cli/vgpu/trace.h"
#include "plan/plan.h"

namespace tandem::tool {
namespace {

constexpr size_t kColumns = 80;
constexpr int64_t kDrawnLength = 4096;  // tokens

constexpr const char* kDevice = "vgpu:b200";

// Draws one CTA in the modelled clocks of a long sequence. Without nvdisasm the picture has the steps of a separate
// run.
std::string drawing_of(Inputs head, tandem_pass pass) {
  ProblemFlags problem;
  problem.dtype = head.q.dtype() == DType::bf16 ? "bf16" : "f16";
  problem.heads_q = 1;
  problem.seqlen_q = kDrawnLength;
  problem.head_dim = head.q.shape()[3];
  problem.head_dim_v = head.v.shape()[3];
  try {
    return picture_of(problem, CardFlags{.device = kDevice, .card = {}}.properties(), pass);
  } catch (const Error& error) {
    if (error.code() != TANDEM_NO_COMPILER) throw;
  }
  const std::string title = str_cat(kDevice, ", ", pass == TANDEM_FORWARD ? "forward" : "backward", ": ",
                                    head.q.shape()[1], " queries, head_dim ", head.q.shape()[3]);
  const Trace trace = trace_of(*attention_job(std::move(head), {}, pass), kDevice, {}, 0, Traced::block);
  throw_if_failed(trace.status);
  return svg::draw(trace.timeline, {.title = title, .where = "One CTA"});
}

// Describes the preceding run, which fails if the checker reports an error.
const char* what_the_checker_says() {
  vgpu::Options options;
  throw_if_failed(vgpu::options_from_environment(&options));
  return options.check ? "The checker found no race and no missing fence or wait."
                       : "The checker was off: TANDEM_VGPU_CHECK=off.";
}

// Names the kernels of the forward and the backward.
std::string what_ran(const Inputs& inputs, bool gradients) {
  const gpu::Properties device = CardFlags{.device = kDevice, .card = {}}.properties();
  std::string text = "ran ";
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    if (pass == TANDEM_BACKWARD && !gradients) continue;
    const Results results(inputs, gradients, false);
    const Problem problem = problem_of(with_results(inputs.attention({}), results), results, pass);
    const plan::Plan plan = plan::make_plan(problem, device, plan::tuning_of(Env::get()));
    for (const plan::PlannedKernel& kernel : plan.kernels)
      text += str_cat(&kernel == plan.kernels.begin() ? "" : ", ", plan::name_of(kernel));
    if (pass == TANDEM_FORWARD && gradients) text += " and ";
  }
  return text;
}

}  // namespace

std::optional<bool> show_on_virtual_gpu(Inputs head, const std::string& what, int threads, tandem_pass drawn,
                                        const std::string& picture) {
  std::printf("%s\n", bold("GPU kernels on a virtual GPU: " + what).c_str());
  Machine on(kDevice, threads);
  Random random(1);
  std::vector<int64_t> shape = head.q.shape();
  shape.back() = head.v.shape().back();
  head.dout = random_buffer(random, head.q.dtype(), shape);
  Given given(std::move(head), true);
  std::vector<std::string> remarks;
  const bool gradients = on.serves_gradients(given.used(), {}, &remarks);
  Results results(given.used(), gradients, false);
  std::vector<AccuracyCheck> checks;
  try {
    Progress progress("emulating", 1);
    checks = check_exactness(on, given, {}, gradients, results, progress);
  } catch (const Error& error) {
    if (error.code() != TANDEM_NO_COMPILER) throw;
    print({std::string("skipped: ") + error.what()}, kColumns);
    std::printf("\n");
    return std::nullopt;
  }
  print(remarks, kColumns);
  print({on.engine.context().description()}, kColumns);
  if (given.converted) print({given.note()}, kColumns);
  print({what_ran(given.used(), gradients)}, kColumns);
  std::printf("%s", exactness_table(checks).c_str());
  std::printf("%s\n", what_the_checker_says());
  if (drawn == TANDEM_FORWARD || gradients) {
    io::AtomicFile file(picture);
    file.write(drawing_of(std::move(given.converted ? *given.converted : given.original), drawn));
    file.commit();
    std::printf("Timeline of one CTA of the %s (open it in a browser):\n  %s\n\n",
                drawn == TANDEM_FORWARD ? "forward" : "backward", bold(picture).c_str());
  }
  return all_good(checks);
}

}  // namespace tandem::tool
