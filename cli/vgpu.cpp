// tandem vgpu: attention problems and PTX files on a virtual GPU.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/io/json.h"
#include "cli/io/npy.h"
#include "cli/svg/timeline.h"
#include "cli/terminal.h"
#include "cli/vgpu/count.h"
#include "cli/vgpu/element.h"
#include "cli/vgpu/exec.h"
#include "cli/vgpu/job.h"
#include "cli/vgpu/models.h"
#include "cli/vgpu/perfetto.h"
#include "cli/vgpu/trace.h"
#include "gpu/virtual.h"
#include "vgpu/src/check/checker.h"

namespace tandem::tool {
namespace {

using vgpu::Outcome;

class Reports;

struct Vgpu {
  ProblemFlags problem;
  std::string ptx, launch, device, out, json = "trace.json", svg = "trace.svg";
  std::string findings, letter = "on";  // check only
  std::vector<std::string> command;     // as the user typed it, for the line that repeats it
  int schedule = 0, schedules = 1, threads = 0, block = 0, max_instructions = vgpu::RunOptions::kMaxInstructions;
  uint64_t seed = 1;
  bool backward = false, cluster = false;
  Vgpu() { problem.dtype = "bf16"; }

  int run() const;
  int check() const;
  int trace() const;

 private:
  std::unique_ptr<Job> job() const;
  std::string device_of(const Job& job) const { return device.empty() ? job.device() : device; }
  // Checks the outputs and prints the problem. Returns false if no kernel would run.
  bool begin(const Job& job) const;
  void check_outputs() const;
  vgpu::Options options(int schedule, Progress& progress) const;
  std::string repeated_with(int schedule) const;
  void save(const Job& job) const;
  void write_findings(const Reports& reports, const std::vector<std::string>& complaints, int last) const;
};

std::unique_ptr<Job> Vgpu::job() const {
  const vgpu::Model* model = nullptr;
  if (!device.empty()) {
    if (!gpu::is_virtual(device))
      throw io::InputError("--device (" + device + ") must be a virtual GPU, like vgpu:h200: see tandem vgpu models");
    throw_if_failed(vgpu::find_model(device, &model));
  }
  if (ptx.empty()) {
    Random random(seed);
    return attention_job(problem.random_inputs(random), problem.mask.options(),
                         backward ? TANDEM_BACKWARD : TANDEM_FORWARD);
  }
  if (launch.empty())
    throw io::InputError(ptx + ": needs --launch FILE: pass a JSON file with the grid and the arguments");
  return ptx_job(ptx, launch);
}

void Vgpu::check_outputs() const {
  io::check_output_folder("--out", out);
  io::check_output_file("--json", findings);
}

bool Vgpu::begin(const Job& job) const {
  std::printf("%s\non %s\n", job.description().c_str(), device_of(job).c_str());
  if (job.is_empty()) std::printf("%s", kNothingRan);
  std::fflush(stdout);
  return !job.is_empty();
}

vgpu::Options Vgpu::options(int number, Progress& progress) const {
  vgpu::Options options;
  options.run.schedule = vgpu::Schedule::nth(number);
  options.run.threads = threads;
  options.run.max_instructions = static_cast<uint64_t>(max_instructions);
  options.run.on_long_run = [&progress](const vgpu::LongRun& run) { progress.report(run.text()); };
  options.letter = letter == "on";
  return options;
}

std::string Vgpu::repeated_with(int number) const {
  std::string text;
  for (size_t n = 0; n < command.size(); ++n) {
    const std::string& word = command[n];
    if (word == "--schedule" || word == "--schedules") {
      ++n;
    } else if (!word.starts_with("--schedule=") && !word.starts_with("--schedules=")) {
      const bool plain = word.find_first_of(" '\"*$\\;&|<>()") == std::string::npos && !word.empty();
      text += plain ? word + " " : "'" + word + "' ";
    }
  }
  return str_cat(text, "--schedule ", number);
}

void Vgpu::save(const Job& job) const {
  if (out.empty()) return;
  std::filesystem::create_directories(out);
  for (const io::FileTensor& result : job.results()) {
    const std::string path = (std::filesystem::path(out) / (result.name + ".npy")).string();
    io::write_npy(path, result);
    std::printf("wrote %s\n", path.c_str());
  }
}

// ---- run ----

std::vector<std::string> statistics_of(const io::FileTensor& result) {
  const auto size = static_cast<size_t>(io::size_of(result.element));
  const size_t count = result.data.size() / size;
  double least = INFINITY, most = -INFINITY, sum = 0;
  size_t nans = 0;
  for (size_t i = 0; i < count; ++i) {
    const double value = get_element(result.element, result.data.data() + i * size);
    if (std::isnan(value)) {
      ++nans;
      continue;
    }
    least = std::min(least, value);
    most = std::max(most, value);
    sum += value;
  }
  const bool any = nans < count;
  const auto shown = [&](double value) { return any ? number(value) : std::string("-"); };
  return {result.name,
          io::name_of(result.element),
          io::shape_text(result.shape),
          shown(least),
          shown(sum / static_cast<double>(count - nans)),
          shown(most),
          std::to_string(nans)};
}

int Vgpu::run() const {
  check_outputs();
  const std::unique_ptr<Job> subject = job();
  const std::string where = device_of(*subject);
  if (!begin(*subject)) return 0;
  // A separate run counts the instructions, because counting takes longer than executing.
  const auto counter = std::make_shared<Counter>();
  double seconds = 0;
  {
    Progress progress("running", 2);
    vgpu::Options how = options(schedule, progress);
    how.check = false;
    how.observe = [&](const vgpu::LaunchDescription&, const vgpu::Model&) { return counter; };
    throw_if_failed(subject->run(where, how));
    progress.advance(1);
    how.observe = nullptr;
    how.report = [&](const Outcome& outcome) { seconds += outcome.seconds; };
    throw_if_failed(subject->run(where, how));
  }

  Table table({"result", "type", "shape", "least", "mean", "most", "NaN"});
  for (const io::FileTensor& result : subject->results()) table.add(statistics_of(result));
  std::printf("%s\n", table.text().c_str());
  const auto instructions = static_cast<double>(counter->of_threads());
  std::printf("%s: %s thread-instructions in %s, %s\n", where.c_str(), si_text(instructions, "").c_str(),
              seconds_text(seconds).c_str(), (si_text(instructions / seconds, "") + "/s").c_str());
  save(*subject);
  const std::vector<std::string> complaints = subject->complaints();
  print(complaints.empty() ? subject->remarks() : complaints);
  return complaints.empty() ? 0 : 1;
}

// ---- check ----

// A finding, with the first schedule that has it.
struct Reported {
  vgpu::Finding finding;
  std::string text;  // for users
  std::string kernel;
  std::string place, other;  // places of both accesses; "": none
  int schedule = 0;
};

bool is_error(const vgpu::Finding& finding) { return vgpu::grade_of(finding.rule) == vgpu::Grade::error; }

// The findings under all schedules: one for each rule and line.
class Reports {
 public:
  // Prints the new errors.
  void add(const Outcome& outcome, int schedule) {
    for (const vgpu::Finding& finding : outcome.findings) {
      const std::string& kernel = outcome.program.function().name;
      const std::string place = vgpu::place_of(outcome.program, finding.party.instruction);
      const auto [at, fresh] =
          known_.try_emplace({finding.rule, kernel, place, place.empty() ? finding.message : ""}, all_.size());
      if (!fresh) {
        all_[at->second].finding.times += finding.times;
        continue;
      }
      all_.push_back({finding, vgpu::report(outcome.program, finding), kernel, place,
                      vgpu::place_of(outcome.program, finding.other.instruction), schedule});
      if (is_error(finding)) std::printf("%s\n", all_.back().text.c_str());
    }
  }

  // Prints the first finding of each rule, and the places of the remaining findings.
  void print_letter() const {
    std::map<vgpu::Rule, std::vector<const Reported*>> by_rule;
    for (const Reported& one : all_)
      if (!is_error(one.finding)) by_rule[one.finding.rule].push_back(&one);
    for (const auto& [rule, list] : by_rule) {
      std::printf("%s", list.front()->text.c_str());
      for (size_t i = 1; i < list.size(); ++i)
        std::printf("%s%s%s",
                    i == 1 ? str_cat("  ", list.size(), " lines of this rule in all; the rest: ").c_str() : "; ",
                    list[i]->place.c_str(), i + 1 == list.size() ? "\n" : "");
      std::printf("\n");
    }
  }
  size_t count(vgpu::Grade grade) const {
    return static_cast<size_t>(
        std::ranges::count_if(all_, [&](const Reported& one) { return vgpu::grade_of(one.finding.rule) == grade; }));
  }
  const std::vector<Reported>& all() const { return all_; }

 private:
  std::map<std::tuple<vgpu::Rule, std::string, std::string, std::string>, size_t> known_;  // index in all_
  std::vector<Reported> all_;
};

io::Json json_of(const vgpu::Accessor& party, const std::string& place) {
  io::Json json = io::Json::object();
  const auto add = [&](const char* key, int32_t number) {
    if (number >= 0) json[key] = number;
  };
  add("block", party.cta);
  add("warp", party.warp);
  add("lane", party.lane);
  if (!party.what.empty()) json["does"] = party.what;
  if (!place.empty()) json["at"] = place;
  return json;
}

std::string count_text(size_t count, const char* what) { return str_cat(count, " ", what, count == 1 ? "" : "s"); }

// vgpu/docs/virtual-gpu.md explains the keys.
void Vgpu::write_findings(const Reports& reports, const std::vector<std::string>& complaints, int last) const {
  if (findings.empty()) return;
  io::Json list = io::Json::list();
  for (const Reported& one : reports.all()) {
    const vgpu::Finding& f = one.finding;
    io::Json entry{{"rule", vgpu::name_of(f.rule)}, {"grade", name_of(vgpu::grade_of(f.rule))},
                   {"kernel", one.kernel},          {"message", f.message},
                   {"subject", f.subject},          {"times", f.times},
                   {"addresses", f.places},         {"warps", f.warps}};
    entry["by"] = json_of(f.party, one.place);
    if (f.other.cta >= 0 || f.other.instruction >= 0) entry["and"] = json_of(f.other, one.other);
    entry["advice"] = vgpu::advice_of(f.rule);
    entry["schedule"] = one.schedule;
    entry["repeat"] = repeated_with(one.schedule);
    list.add(std::move(entry));
  }
  const io::Json all{
      {"findings", std::move(list)}, {"wrong_results", complaints}, {"schedules", std::vector{schedule, last}}};
  io::AtomicFile file(findings);
  file.write(all.dump(2) + "\n");
  file.commit();
}

int Vgpu::check() const {
  check_outputs();
  const std::unique_ptr<Job> subject = job();
  const std::string where = device_of(*subject);
  if (!begin(*subject)) return 0;
  Reports reports;
  const auto start = std::chrono::steady_clock::now();
  Progress progress("checking", schedules);
  for (int n = schedule; n < schedule + schedules; ++n) {
    vgpu::Options how = options(n, progress);
    progress.become(str_cat("checking schedule ", n));
    how.report = [&](const Outcome& outcome) {
      progress.clear();
      reports.add(outcome, n);
    };
    const Status status = subject->run(where, how);
    progress.advance(1);
    const size_t errors = reports.count(vgpu::Grade::error);
    if (errors == 0) throw_if_failed(status);
    std::vector<std::string> complaints;
    if (status.ok()) complaints = subject->complaints();
    if (errors == 0 && complaints.empty()) continue;
    progress.clear();
    reports.print_letter();
    print(complaints);
    write_findings(reports, complaints, n);
    std::printf("%s  schedule %d: %s, %zu by the letter\nrepeat: %s\n", bad("FAIL").c_str(), n,
                count_text(errors, "error").c_str(), reports.count(vgpu::Grade::spec_only), repeated_with(n).c_str());
    return 1;
  }
  progress.clear();
  reports.print_letter();
  print(subject->remarks());
  write_findings(reports, {}, schedule + schedules - 1);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%s  %s: no errors, %zu findings by the letter under %s, %s\n", good("PASS").c_str(), where.c_str(),
              reports.count(vgpu::Grade::spec_only), count_text(static_cast<size_t>(schedules), "schedule").c_str(),
              seconds_text(seconds).c_str());
  save(*subject);
  return 0;
}

// ---- trace ----

int Vgpu::trace() const {
  check_outputs();
  io::check_output_file("--json", json);
  io::check_output_file("--svg", svg);
  const std::unique_ptr<Job> subject = job();
  const std::string where = device_of(*subject);
  if (!begin(*subject)) return 0;
  auto [timeline, blocks, size, status] = [&] {
    Progress progress("tracing", 0);
    return trace_of(*subject, where, options(schedule, progress), block, cluster ? Traced::cluster : Traced::block);
  }();
  if (blocks == 0) throw_if_failed(status);  // no launch; a failed kernel is drawn up to its failure
  if (block >= blocks)
    throw io::InputError(
        str_cat("--block (", block, ") must be less than the kernel's ", blocks, " blocks: choose a smaller index"));
  const auto write = [](const std::string& path, const std::string& text) {
    io::AtomicFile file(path);
    file.write(text);
    file.commit();
    std::printf("wrote %s\n", path.c_str());
  };
  if (!json.empty()) write(json, perfetto_json(timeline));
  if (timeline.title.size() > 100)
    timeline.title = timeline.title.substr(0, 60) + "..., block " + std::to_string(block);
  if (!svg.empty()) write(svg, svg::draw(timeline, {.where = str_cat(where, ", schedule ", schedule)}));
  std::printf("%s: %lld steps, %zu rows%s\n", timeline.title.c_str(), static_cast<long long>(timeline.steps),
              timeline.rows.size(),
              json.empty() ? "" : str_cat("; open ", json, " in https://ui.perfetto.dev").c_str());
  throw_if_failed(status);
  return 0;
}

constexpr char kAboutCheck[] =
    R"(Findings have two grades. An error means that hardware can give another result or hang, under a schedule that the
architecture allows. A finding by the letter means that PTX does not promise a behaviour that all hardware has;
--letter=off leaves these out. Each rule and line is one finding, with a count.

Exit code: 0 without errors, 1 with errors or wrong results, 2 when the kernel cannot run (wrong flags or files, unknown
PTX, no NVRTC, no memory). vgpu/docs/sanitizer.md explains the checks with five short kernels.)";

void add_flags(Command app, Vgpu& vgpu, bool many) {
  app.option("ptx", vgpu.ptx, "A PTX file [default: the kernel of the problem below]");
  app.option("--launch", vgpu.launch, "Launch of the file's kernel: JSON, see vgpu/docs/virtual-gpu.md");
  app.option("--device", vgpu.device,
             "vgpu:MODEL, see tandem vgpu models [vgpu:h200; for a PTX file, its architecture]");
  app.option("--schedule", vgpu.schedule, "Order in which warps run and copies complete; 0: early, 1: late")
      .at_least_zero()
      .show_default();
  if (many) {
    app.option("--schedules", vgpu.schedules, "Number of schedules, from --schedule on").above_zero().show_default();
  }
  app.option("--threads", vgpu.threads, "Threads of the host; 0: one per core").within(0, 1024);
  app.option("--max-instructions", vgpu.max_instructions, kAboutMaxInstructions).within(0, INT32_MAX).show_default();
  app.option("--seed", vgpu.seed, "Seed of the problem's random inputs [1]");
  app.option("--out", vgpu.out, "Write the results into this folder, as .npy");
  app.flag("--backward", vgpu.backward, "Run the backward of a problem after its forward");
  vgpu.problem.add_presets_to(app);
  vgpu.problem.add_to(app);
}

}  // namespace

void add_vgpu(Command app, const std::vector<std::string>& arguments) {
  Command command = app.add("vgpu", "Kernels on a virtual GPU: run, check, trace, exec, models");
  command.requires_command();
  command.footer(R"(Examples:
  tandem vgpu run --seqlen 512 --head-dim 128 --causal          results and speed, unchecked
  tandem vgpu check --seqlen 300 --window '64,0' --schedules 20 races, missing fences and waits, deadlocks, ...
  tandem vgpu check kernel.ptx --launch kernel.json             the same for any PTX
  tandem vgpu trace --seqlen 512 --head-dim 128 --svg forward.svg
  tandem vgpu trace --backward --device vgpu:b200 --heads 1 --seqlen 512 --head-dim 128
  tandem vgpu exec ./program                                    a program on the CUDA driver's interface
  tandem vgpu models                                            which GPUs there are

No GPU is needed; problems need NVRTC (pip install nvidia-cuda-nvrtc). vgpu/docs/virtual-gpu.md explains the model.
Exit code: 0, 1 when the kernel or its results are wrong, 2 when the kernel cannot run.)");
  const struct {
    const char *name, *what;
    int (Vgpu::*verb)() const;
    bool many;
  } verbs[] = {{"run", "Run a kernel, and print its results and speed", &Vgpu::run, false},
               {"check", "Find errors of a kernel, under one schedule or many", &Vgpu::check, true},
               {"trace", "Draw one block as a Perfetto trace and as a picture", &Vgpu::trace, false}};
  for (const auto& one : verbs) {
    auto vgpu = std::make_shared<Vgpu>();
    vgpu->command = arguments;
    Command verb = command.add(one.name, one.what);
    add_flags(verb, *vgpu, one.many);
    if (one.verb == &Vgpu::check) {
      verb.option("--json", vgpu->findings, "Write the findings into this file, as JSON");
      verb.option("--letter", vgpu->letter, "off: omit findings that no known hardware shows [on]")
          .one_of({"on", "off"});
      verb.footer(kAboutCheck);
    }
    if (one.verb == &Vgpu::trace) {
      verb.option("--block", vgpu->block, "Index of the block in the grid [0]").at_least_zero();
      verb.flag("--cluster", vgpu->cluster, "Draw all blocks of its cluster");
      verb.option("--json", vgpu->json, "The trace for Perfetto; \"\": none").show_default();
      verb.option("--svg", vgpu->svg, "The picture; \"\": none").show_default();
    }
    verb.run([vgpu, run = one.verb] { return (*vgpu.*run)(); });
  }
  add_exec(command);
  command.add("models", "The GPUs that can be simulated, and their properties").run([] {
    std::printf("%s", models_table().c_str());
    return 0;
  });
}

}  // namespace tandem::tool
