#include "vgpu/src/driver/state.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "vgpu/src/check/checker.h"
#include "vgpu/src/driver/summary.h"

namespace tandem::vgpu::driver {
namespace {

thread_local CUresult last_launch = kSuccess;

// The result that a GPU's driver returns for a rule that ends a kernel.
CUresult result_of(Rule rule) {
  switch (rule) {
    case Rule::out_of_bounds: return kIllegalAddress;
    case Rule::misaligned: return kMisalignedAddress;
    case Rule::wrong_space: return kInvalidAddressSpace;
    case Rule::deadlock:
    case Rule::endless_loop: return kLaunchTimeout;
    case Rule::device_limit: return kLaunchOutOfResources;
    case Rule::trap: return kLaunchFailed;
    default: return kSuccess;
  }
}

}  // namespace

DriverState::DriverState() = default;

DriverState& DriverState::get() {
  static auto* const state = new DriverState;
  return *state;
}

CUresult DriverState::initialise() {
  const std::lock_guard lock(mutex);
  if (device_) return kSuccess;
  if (tried_) return kNoDevice;
  tried_ = true;
  const char* const name = std::getenv("TANDEM_VGPU_DEVICE");
  const std::string wanted = name && *name ? name : "vgpu:h200";
  Options options;
  Status status = options_from_environment(&options);
  options.report = [this](const Outcome& outcome) { report(outcome); };
  options.run.on_long_run = [](const LongRun& run) { say("cuLaunchKernel", run.text()); };
  if (status.ok()) status = find_model(wanted, &model_);
  if (status.ok()) status = open(wanted, std::move(options), &device_);
  if (!status.ok()) return refuse("cuInit", kNoDevice, status.message);
  Summary::get().begin(model_->name);
  return kSuccess;
}

std::map<CUdeviceptr, Memory>::iterator DriverState::around(CUdeviceptr address) {
  auto next = memory.upper_bound(address);
  if (next == memory.begin()) return memory.end();
  --next;
  return address - next->first < std::max<size_t>(next->second.bytes, 1) ? next : memory.end();
}

void DriverState::report(const Outcome& outcome) {
  last_launch = kSuccess;
  for (const Finding& finding : outcome.findings)
    if (last_launch == kSuccess && is_error(finding)) last_launch = result_of(finding.rule);
  const std::lock_guard lock(mutex);
  Summary::get().add(outcome);
}

CUresult DriverState::result_of_last_launch() { return std::exchange(last_launch, kSuccess); }

std::vector<CudaContext*>& context_stack() {
  thread_local std::vector<CudaContext*> stack;
  return stack;
}

CudaContext* current_context() { return context_stack().empty() ? nullptr : context_stack().back(); }

void say(const char* function, const std::string& sentence) {
  std::fprintf(stderr, "tandem vgpu: %s: %s\n", function, sentence.c_str());
}

CUresult refuse(const char* function, CUresult result, const std::string& sentence) {
  say(function, sentence);
  return result;
}

CUresult result_of(const char* function, const Status& status, CUresult otherwise) {
  return status.ok() ? kSuccess : refuse(function, otherwise, status.message);
}

}  // namespace tandem::vgpu::driver
