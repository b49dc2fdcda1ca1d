// tandem info: properties of this machine.
#include <cstdio>
#include <fstream>
#include <memory>

#include "base/own_folder.h"
#include "base/text.h"
#include "cli/commit.h"
#include "cli/flags.h"
#include "cli/measure.h"
#include "cli/terminal.h"
#include "gpu/virtual.h"
#include "jit/cache.h"
#include "jit/compiler.h"
#include "vgpu/src/machine/machine.h"

namespace tandem::tool {
namespace {

void line(const std::string& name, const std::string& value) { std::printf("%s", entry(name, value, 14).c_str()); }

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string text; std::getline(info, text);) {
    const size_t colon = text.find(": ");
    if (text.starts_with("model name") && colon != std::string::npos) return text.substr(colon + 2);
  }
  return "unknown";
}

std::string compiler(const GpusSeen& seen) {
  std::unique_ptr<jit::Compiler> found;
  const jit::Search search{
      .site_packages = {}, .newest_major = seen.driver_version / 1000, .own_folder = own_folder().string()};
  if (const Status status = jit::Compiler::open(search, Env::get(), &found); !status.ok())
    return "none: " + status.message;
  return str_cat(found->major(), ".", found->minor(), ", ", found->path());
}

std::string kernel_cache() {
  const jit::Cache::Options options = jit::Cache::options(Env::get());
  const jit::Cache cache(options);
  if (const Status status = cache.usable(); !status.ok()) return status.message;
  int64_t bytes = 0;
  const auto kernels = cache.list();
  for (const auto& kernel : kernels) bytes += kernel.bytes;
  return str_cat(options.folder, ", ", kernels.size(), kernels.size() == 1 ? " kernel, " : " kernels, ",
                 bytes_text(static_cast<double>(bytes)), " of ", bytes_text(static_cast<double>(options.max_bytes)));
}

// The command is linked to the virtual GPUs; other programs load them.
std::string virtual_gpus() {
  std::string models, path;
  for (const std::string& model : vgpu::model_names()) models += str_cat(models.empty() ? "" : ", ", "vgpu:", model);
  const Status status = gpu::find_virtual(&path);
  return str_cat(models, "; other programs load ", status.ok() ? path : "them, and cannot here: " + status.message);
}

void print_gpus(const GpusSeen& seen) {
  if (!seen.why_none.empty()) return line("GPUs", "none: " + seen.why_none);
  for (size_t n = 0; n < seen.gpus.size(); ++n) {
    const GpuSeen& gpu = seen.gpus[n];
    line(str_cat("cuda:", n), str_cat(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor, ", ", gpu.sm_count,
                                      " SMs, ", bytes_text(static_cast<double>(gpu.memory_bytes)),
                                      gpu.served() ? "" : "; Tandem has kernels for 9.0 only"));
  }
  line("driver", str_cat("for CUDA ", seen.driver_version / 1000, ".", seen.driver_version % 1000 / 10));
}

int run(const MachineFlags& flags) {
  std::vector<std::string> remarks;
  const std::unique_ptr<Machine> on = flags.open(&remarks);
  const GpusSeen seen = gpus_seen();
  line("version", str_cat(tandem_version(), " (commit ", commit(), ")"));
  line("device", on->engine.context().description());
  for (const std::string& remark : remarks) line("", remark);
  print_gpus(seen);
  line("virtual GPUs", virtual_gpus());
  line("NVRTC", compiler(seen));
  line("kernel cache", kernel_cache());
  line("threads", std::to_string(on->threads.count()));
  line("processor", processor());
  line("BLAS", plain::Blas::best().name());
  line("memory reads", fixed(read_bandwidth(on->threads.count()) / 1e9, 1) + " GB/s");
  return 0;
}

}  // namespace

void add_info(Command app) {
  auto flags = std::make_shared<MachineFlags>();
  Command command = app.add("info", "GPUs, NVRTC, kernel cache, threads, BLAS and memory speed of this machine");
  flags->add_to(command);
  command.run([flags] { return run(*flags); });
}

}  // namespace tandem::tool
