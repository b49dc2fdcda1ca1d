#include "base/env.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/instruction_set.h"
#include "base/text.h"

namespace tandem {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

Env load() {
  Env env;
  env.cpu_target = variable("TANDEM_CPU_TARGET");
  env.nvrtc = variable("TANDEM_NVRTC");
  env.virtual_env = variable("VIRTUAL_ENV");
  env.conda_prefix = variable("CONDA_PREFIX");
  env.cuda_home = variable("CUDA_HOME");
  env.cache = variable("TANDEM_CACHE");
  env.cache_dir = variable("TANDEM_CACHE_DIR");
  env.xdg_cache_home = variable("XDG_CACHE_HOME");
  env.home = variable("HOME");
  env.temporary = variable("TMPDIR");
  if (env.temporary.empty()) env.temporary = "/tmp";
  env.log = variable("TANDEM_LOG");
  env.line_info = variable("TANDEM_LINE_INFO");
  env.sm100 = variable("TANDEM_SM100");
  env.nvtx = variable("NVTX_INJECTION64_PATH");
  return env;
}

Status check_target(std::string_view target) {
  const std::vector<std::string_view>& all = instruction_sets();
  if (target.empty() || std::ranges::find(all, target) != all.end()) return {};
  std::string names;
  for (const std::string_view name : all) names += str_cat(names.empty() ? "\"" : ", \"", name, "\"");
  return Status::invalid(str_cat("TANDEM_CPU_TARGET (\"", target, "\") must be one of ", names,
                                 ", the instruction sets of this machine: set one of them, or unset the variable"));
}

Status check_switch(const char* name, std::string_view value, const char* on, const char* off, const char* meaning) {
  if (value.empty() || value == on || value == off) return {};
  return Status::invalid(
      str_cat(name, " (\"", value, "\") must be \"", on, "\" or \"", off, "\": set one of them ", meaning));
}

// Calls visit(word) for each word, until it returns false.
template <class Visit>
bool all_words(std::string_view list, Visit&& visit) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (!visit(list.substr(0, end))) return false;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return true;
}

Status check_sm100(std::string_view switches) {
  std::string_view unknown;
  const bool known = all_words(switches, [&](std::string_view word) {
    unknown = word;
    return std::ranges::find(kSm100Switches, word) != std::end(kSm100Switches);
  });
  if (known) return {};
  std::string names;
  for (const std::string_view name : kSm100Switches) names += str_cat(names.empty() ? "" : ", ", name);
  return Status::invalid(str_cat("TANDEM_SM100 (\"", switches, "\") must consist of the words ", names,
                                 ", separated by commas: correct \"", unknown, "\""));
}

}  // namespace

bool lists(std::string_view list, std::string_view word) {
  return !all_words(list, [&](std::string_view other) { return other != word; });
}

// This object is never destroyed, because another library's static destructor may still call.
const Env& Env::get() {
  static const Env& env = *new Env(load());
  return env;
}

Status check(const Env& env) {
  TANDEM_TRY(check_target(env.cpu_target));
  TANDEM_TRY(check_switch("TANDEM_CACHE", env.cache, "on", "off", "to keep compiled kernels on disk, or not"));
  TANDEM_TRY(check_switch("TANDEM_LINE_INFO", env.line_info, "1", "0", "to compile kernels with line numbers or not"));
  TANDEM_TRY(check_sm100(env.sm100));
  return check_switch("TANDEM_LOG", env.log, "1", "0", "to print a line for every call on a GPU or not");
}

}  // namespace tandem
