// tandem info: what will run here.
#include <cstdio>
#include <fstream>
#include <memory>

#include "tandem/flags.h"
#include "tandem/measure.h"
#include "tandem/terminal.h"

namespace tandem::tool {
namespace {

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

int run(const MachineFlags& flags) {
  const Engine engine(flags.device, flags.threads);
  const int threads = engine.context().threads();
  const auto line = [](const char* name, const std::string& value) {
    std::printf("%s%s\n", bold(std::string(name) + std::string(14 - std::string(name).size(), ' ')).c_str(),
                value.c_str());
  };
  line("version", tandem_version());
  line("device", engine.context().description());
  line("threads", std::to_string(threads));
  line("processor", processor());
  line("BLAS", plain::Blas::best().name());
  line("memory reads", fixed(read_bandwidth(threads) / 1e9, 1) + " GB/s");
  return 0;
}

}  // namespace

void add_info(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<MachineFlags>();
  CLI::App* command = app.add_subcommand("info", "Version, device, threads, BLAS and memory speed of this machine");
  flags->add_to(*command);
  command->callback([flags, exit_code] { *exit_code = guarded([&] { return run(*flags); }); });
}

}  // namespace tandem::tool
