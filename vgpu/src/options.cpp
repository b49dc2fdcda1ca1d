// The environment variables of the virtual GPU.
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/text.h"
#include "vgpu/src/device.h"

namespace tandem::vgpu {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Status read_count(const char* name, int most, const char* meaning, int* count) {
  const std::string_view text = variable(name);
  if (text.empty()) return {};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *count);
  if (error == std::errc() && end == text.data() + text.size() && *count >= 0 && *count <= most) return {};
  return Status::invalid(str_cat(name, " (\"", text, "\") must be a whole number from 0 to ", most, ": ", meaning));
}

Status read_switch(const char* name, bool* on) {
  const std::string_view text = variable(name);
  if (!text.empty() && text != "on" && text != "off")
    return Status::invalid(str_cat(name, " (\"", text, "\") must be \"on\" or \"off\": choose one of them"));
  *on = text != "off";
  return {};
}

Status read(Options* options) {
  int schedule = 0, threads = 0, instructions = RunOptions::kMaxInstructions;
  TANDEM_TRY(read_count("TANDEM_VGPU_SCHEDULE", 1'000'000'000, "set the number of a schedule, such as 0", &schedule));
  TANDEM_TRY(read_count("TANDEM_VGPU_THREADS", 1024, "set the number of host threads, or 0 for all cores", &threads));
  TANDEM_TRY(read_count("TANDEM_VGPU_MAX_INSTRUCTIONS", INT32_MAX,
                        "set the warp instructions that a block may execute, or 0 for no limit", &instructions));
  TANDEM_TRY(read_switch("TANDEM_VGPU_CHECK", &options->check));
  TANDEM_TRY(read_switch("TANDEM_VGPU_LETTER", &options->letter));
  options->run.schedule = Schedule::nth(schedule);
  options->run.threads = threads;
  options->run.max_instructions = static_cast<uint64_t>(instructions);
  return {};
}

}  // namespace

Status options_from_environment(Options* options) {
  static Options at_first;
  static const Status status = read(&at_first);
  if (status.ok()) *options = at_first;
  return status;
}

}  // namespace tandem::vgpu
