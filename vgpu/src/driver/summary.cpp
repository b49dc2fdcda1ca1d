#include "vgpu/src/driver/summary.h"

#include <cstdio>
#include <cstdlib>

#include "base/text.h"
#include "vgpu/src/check/checker.h"
#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {
namespace {

std::string count_text(size_t count, const char* what) { return str_cat(count, " ", what, count == 1 ? "" : "s"); }

}  // namespace

Summary& Summary::get() {
  static auto* const summary = new Summary;
  return *summary;
}

void Summary::begin(const std::string& model) {
  model_ = model;
  std::atexit([] { Summary::get().finish(); });
}

void Summary::add(const Outcome& outcome) {
  ++launches_;
  const std::string& kernel = outcome.program.function().name;
  for (const Finding& finding : outcome.findings) {
    if (!seen_.emplace(kernel, finding.rule, place_of(outcome.program, finding.party.instruction)).second) continue;
    ++(is_error(finding) ? errors_ : warnings_);
    std::fprintf(stderr, "%s\n", vgpu::report(outcome.program, finding).c_str());
  }
}

void Summary::refused(const char* function) {
  if (!refused_.insert(function).second) return;
  ++refusals_;
  say(function,
      "the virtual GPU does not serve this function of the driver: remove the call (the result is "
      "CUDA_ERROR_NOT_SUPPORTED)");
}

// For `tandem vgpu exec`: writes the numbers to the file that it has created for them.
void Summary::finish() {
  const std::lock_guard lock(DriverState::get().mutex);
  std::fprintf(stderr, "tandem vgpu: vgpu:%s: %s, %s, %s%s\n", model_.c_str(),
               str_cat(launches_, launches_ == 1 ? " launch" : " launches").c_str(),
               count_text(errors_, "finding").c_str(), count_text(warnings_, "warning").c_str(),
               refusals_ == 0 ? "" : str_cat(", ", count_text(refusals_, "function"), " not served").c_str());
  const char* const path = std::getenv("TANDEM_VGPU_SUMMARY");
  std::FILE* const file = path && *path ? std::fopen(path, "a") : nullptr;
  if (file == nullptr) return;
  std::fprintf(file, "%zu %zu %zu %zu\n", launches_, errors_, warnings_, refusals_);
  std::fclose(file);
}

}  // namespace tandem::vgpu::driver
