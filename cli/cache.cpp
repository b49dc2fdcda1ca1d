// tandem cache: the compiled kernels on disk.
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cli/cards.h"
#include "cli/terminal.h"
#include "engine/gpu.h"
#include "jit/builder.h"
#include "plan/append_kv.h"
#include "plan/serving.h"

namespace tandem::tool {
namespace {

jit::Cache::Options usable_options() {
  jit::Cache::Options options = jit::Cache::options(Env::get());
  throw_if_failed(jit::Cache(options).usable());
  return options;
}

std::string age_text(std::chrono::seconds age) {
  const auto hours = age.count() / 3600;
  if (hours < 1) return "within the hour";
  return hours < 48 ? str_cat(hours, hours == 1 ? " hour ago" : " hours ago") : str_cat(hours / 24, " days ago");
}

std::string count_text(int64_t kernels) { return str_cat(kernels, kernels == 1 ? " kernel" : " kernels"); }

int list() {
  const jit::Cache::Options options = usable_options();
  Table table({"kernel", "size", "last used"});
  double bytes = 0;
  const auto kernels = jit::Cache(options).list();
  for (const auto& kernel : kernels) {
    table.add({kernel.description, bytes_text(static_cast<double>(kernel.bytes)), age_text(kernel.age)});
    bytes += static_cast<double>(kernel.bytes);
  }
  if (!kernels.empty()) std::printf("%s\n", table.text().c_str());
  std::printf("%s in %s, %s of %s\n", count_text(static_cast<int64_t>(kernels.size())).c_str(), options.folder.c_str(),
              bytes_text(bytes).c_str(), bytes_text(static_cast<double>(options.max_bytes)).c_str());
  return 0;
}

int clear() {
  const jit::Cache::Options options = usable_options();
  std::printf("removed %s from %s\n", count_text(jit::Cache(options).clear()).c_str(), options.folder.c_str());
  return 0;
}

struct Warm {
  ProblemFlags problem;
  CardFlags card;
  bool all_presets = false, backward = false, serving = false;
  int64_t page_size = 0;
  Warm() { problem.dtype = "bf16"; }

  int run() const;
  std::vector<plan::PlannedKernel> serving_kernels(const ProblemFlags& flags, const gpu::Properties& device) const;
  std::vector<std::pair<std::string, ProblemFlags>> problems() const;  // with the presets' names
};

void compile(const jit::Request& request, jit::KernelBuilder& builder) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t compiled = builder.counters().compiled;
  std::shared_ptr<const jit::Code> code;
  throw_if_failed(builder.build(request, &code));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%s: %s in %s\n", request.name.c_str(),
              builder.counters().compiled > compiled ? "compiled" : "was there, read", seconds_text(seconds).c_str());
  std::fflush(stdout);
}

std::vector<std::pair<std::string, ProblemFlags>> Warm::problems() const {
  if (!all_presets) return {{"", problem}};
  std::vector<std::pair<std::string, ProblemFlags>> all;
  for (const Preset& preset : presets()) {
    ProblemFlags& flags = all.emplace_back(preset.name, ProblemFlags()).second;
    flags.dtype = problem.dtype;
    preset.apply(flags);
  }
  return all;
}

// A preset's forward is compiled even if its gradients are unsupported. A single problem is refused instead.
std::optional<plan::Plan> plan_of(const std::string& preset, const ProblemFlags& flags, const gpu::Properties& device,
                                  tandem_pass pass) {
  try {
    return Planned(flags, device, pass).plan;
  } catch (const Error& error) {
    if (preset.empty() || pass == TANDEM_FORWARD || error.code() != TANDEM_UNSUPPORTED) throw;
    std::printf("left out: %s: %s\n", preset.c_str(), error.what());
    return std::nullopt;
  }
}

// The forwards of a server: packed queries, and keys in pages if page_size is not 0.
std::vector<plan::PlannedKernel> Warm::serving_kernels(const ProblemFlags& flags, const gpu::Properties& device) const {
  const Planned planned(flags, device);
  Problem p = planned.problem;
  if (p.packed_q() || !planned.plan) {
    throw Error(TANDEM_INVALID_ARGUMENT, "--serving must not be with --lengths-q or without queries: pass --seqlen-q");
  }
  p.cu_seqlens_q.present = true;
  p.q.batch = p.out.batch = 0;
  if (page_size > 0) {
    const int64_t pages = (p.seqlen_k + page_size - 1) / page_size;
    p.page_table = {.pages = p.batch * pages, .page_size = page_size, .max_pages = pages, .present = true};
    p.seqused_k.present = true;
    p.total_k = p.batch * pages * page_size;
  } else {
    p.cu_seqlens_k.present = true;
  }
  throw_if_failed(plan::check_serving(p));
  throw_if_failed(plan::check(p, device));
  return plan::serving_kernels(p, device);
}

int Warm::run() const {
  const gpu::Properties device = card.properties();
  jit::KernelBuilder builder({.site_packages = {}, .newest_major = device.driver_version / 1000}, Env::get(),
                             usable_options());
  std::set<std::string> done;
  const auto compile_once = [&](const jit::Request& request) {
    if (done.insert(request.name).second) compile(request, builder);
  };
  for (const auto& [preset, flags] : problems()) {
    if (serving) {
      for (const plan::PlannedKernel& kernel : serving_kernels(flags, device)) compile_once(request_of(kernel, device));
      compile_once(request_of(plan::kAppendKvKernel, plan::append_kv_translation_unit(), device));
    }
    for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
      if (pass == TANDEM_BACKWARD ? !backward : serving) continue;
      const std::optional<plan::Plan> plan = plan_of(preset, flags, device, pass);
      if (!plan) continue;
      for (const plan::PlannedKernel& kernel : plan->kernels) compile_once(request_of(kernel, device));
    }
  }
  return 0;
}

}  // namespace

void add_cache(Command app) {
  Command command = app.add("cache", "The compiled kernels on disk: list, clear, warm");
  command.requires_command();
  command.footer(R"(Examples:
  tandem cache list
  tandem cache clear
  tandem cache warm --presets                             kernels of well-known models
  tandem cache warm --presets --backward                  the kernels of their gradients, too
  tandem cache warm --preset llama --dtype f16 --card h100
  tandem cache warm --serving --page-size 16 --seqlen 8192 --batch 64 --heads 32 --head-dim 128 --causal
  tandem cache warm --head-dim 128 --seqlen 4096 --heads 16 --causal

The folder is TANDEM_CACHE_DIR, else tandem/ in XDG_CACHE_HOME, else ~/.cache/tandem. TANDEM_CACHE=off does without.)");
  Command lister = command.add("list", "List the kernels, their sizes and their last use");
  lister.run(list);
  Command cleaner = command.add("clear", "Remove all kernels");
  cleaner.run(clear);
  auto warm = std::make_shared<Warm>();
  Command warmer = command.add("warm", "Compile the kernels of a problem; no GPU is needed");
  warmer.flag("--presets", warm->all_presets, "The kernels of all presets of `tandem explain`");
  warmer.flag("--backward", warm->backward, "The kernels of gradients, too");
  warmer.flag("--serving", warm->serving,
              "The kernels of packed forwards of any lengths up to the problem's, and of appending");
  warmer.option("--page-size", warm->page_size, "With --serving: keys of a page; 0: packed keys");
  warm->card.add_to(warmer);
  warm->problem.add_presets_to(warmer);
  warm->problem.add_to(warmer);
  warmer.run([warm] { return warm->run(); });
}

}  // namespace tandem::tool
