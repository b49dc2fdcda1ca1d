#include "engine/gpu.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <future>
#include <span>
#include <thread>

#include "base/own_folder.h"
#include "base/text.h"
#include "plan/append_kv.h"
#include "plan/check.h"
#include "plan/make_blocks.h"
#include "plan/merge.h"
#include "plan/serving.h"
#include "problem/bound_expression.h"
#include "problem/use_options.h"

namespace tandem {

struct GpuEngine::Compiled {
  uint64_t id = 0;
  std::string name;
  LoadedKernel loaded;
  const Compiled* next = nullptr;  // next in the bucket
};

namespace {

// Id of the kernels that build block masks from an expression. The multiplication separates this id from ids of
// attention kernels.
uint64_t make_blocks_id(const MakeBlocksProblem& problem) {
  return problem.mask_mod->program->cuda_hash * 0x9e3779b97f4a7c15u + 1;
}

constexpr size_t kMaxBuilders = 16;  // threads that compile at once

// Ids of the kernels that merge parts and that append to a cache.
constexpr uint64_t kMergeId = 0x6d65726765207061, kAppendKvId = 0x617070656e642076;

size_t bucket_of(uint64_t id, size_t buckets) { return (id * 0x9e3779b97f4a7c15u >> 32) % buckets; }

jit::Search search_for(const gpu::Properties& device) {
  return {.site_packages = {}, .newest_major = device.driver_version / 1000, .own_folder = own_folder().string()};
}

std::string driver_text(int32_t version) {
  return version == 0 ? "" : str_cat("driver ", version / 1000, ".", version % 1000 / 10, ", ");
}

}  // namespace

jit::Request request_of(const plan::PlannedKernel& kernel, const gpu::Properties& device) {
  return request_of(plan::name_of(kernel), plan::translation_unit(kernel), device);
}

jit::Request request_of(std::string name, std::string source, const gpu::Properties& device) {
  jit::Request request{.name = std::move(name),
                       .source = std::move(source),
                       .arch = device.arch(),
                       .options = {"--std=c++20", "--device-as-default-execution-space"}};
  if (device.image == gpu::Image::ptx) request.output = jit::Output::ptx;
  if (device.image == gpu::Image::ptx || Env::get().has_line_info()) {
    request.options.emplace_back("--generate-line-info");
  }
  return request;
}

GpuEngine::GpuEngine(std::string name, std::unique_ptr<gpu::Device> device, Env env, jit::Cache::Options cache)
    : name_(std::move(name)),
      device_(std::move(device)),
      logging_(env.logging()),
      tuning_(plan::tuning_of(env)),
      builder_(search_for(device_->properties()), std::move(env), std::move(cache)),
      watching_(nvtx::tool()) {
  const gpu::Properties& p = device_->properties();
  const std::string compiler = builder_.compiler_name();
  description_ = str_cat(name_, ", ", p.name, ", ", p.sm_count, " SMs, ", driver_text(p.driver_version),
                         compiler.empty() ? "no NVRTC to compile kernels" : "kernels compiled by " + compiler);
}

GpuEngine::~GpuEngine() = default;

Status GpuEngine::check(const Problem& problem) const { return plan::check(problem, device_->properties(), tuning_); }

size_t GpuEngine::workspace_size(const Problem& problem) const {
  return plan::make_plan(problem, device_->properties(), tuning_).workspace_bytes;
}

const GpuEngine::Compiled* GpuEngine::find(uint64_t id) const {
  const Compiled* at = kernels_[bucket_of(id, kBuckets)].load(std::memory_order_acquire);
  while (at != nullptr && at->id != id) at = at->next;
  return at;
}

// Returns the loaded kernels of a plan, in its order, up to the first missing kernel.
GpuEngine::Kernels GpuEngine::find(const plan::Plan& plan) const {
  Kernels kernels;
  for (const plan::PlannedKernel& kernel : plan.kernels) {
    const Compiled* compiled = find(kernel.id);
    if (compiled == nullptr) break;
    kernels.push_back(compiled);
  }
  return kernels;
}

// Compiles the missing kernels of a plan in parallel and loads them on this thread. builder_ returns a kernel's code
// from another thread, waits for it, or compiles the kernel and returns the error.
Status GpuEngine::compile(const plan::Plan& plan, Kernels* kernels) {
  std::array<std::future<void>, plan::kMaxKernels> beside;
  for (size_t n = kernels->size() + 1; n < plan.kernels.size(); ++n) {
    if (find(plan.kernels[n].id) != nullptr) continue;
    beside[n] = std::async([this, request = request_of(plan.kernels[n], device_->properties())] {
      std::shared_ptr<const jit::Code> code;
      (void)builder_.build(request, &code);
    });
  }
  for (size_t n = kernels->size(); n < plan.kernels.size(); ++n) {
    const plan::PlannedKernel& kernel = plan.kernels[n];
    const Compiled* compiled = find(kernel.id);
    if (compiled == nullptr) {
      const auto entries = plan::entries_of(kernel.configuration, kernel.unit);
      const jit::Request request = request_of(kernel, device_->properties());
      TANDEM_TRY(compile(kernel.id, request, {entries.begin(), entries.end()}, &compiled));
    }
    kernels->push_back(compiled);
  }
  return {};
}

// Threads that need one kernel at the same time share its compilation in builder_. Each thread loads the kernel, and
// one thread adds it to the table.
Status GpuEngine::compile(uint64_t id, const jit::Request& request, std::span<const plan::KernelEntry> entries,
                          const Compiled** compiled) {
  std::shared_ptr<const jit::Code> code;
  TANDEM_TRY(builder_.build(request, &code));
  const std::lock_guard lock(adding_);
  if ((*compiled = find(id)) != nullptr) return {};
  auto made = std::make_unique<Compiled>();
  made->id = id;
  made->name = request.name;
  TANDEM_TRY(load(*device_, entries, std::as_bytes(std::span(code->bytes)), &made->loaded));
  std::atomic<const Compiled*>& bucket = kernels_[bucket_of(made->id, kBuckets)];
  made->next = bucket.load(std::memory_order_relaxed);
  bucket.store(made.get(), std::memory_order_release);
  *compiled = made.get();
  owned_.push_back(std::move(made));
  return {};
}

Status GpuEngine::prepare(const Problem& problem) {
  const plan::Plan plan = plan::make_plan(problem, device_->properties(), tuning_);
  Kernels kernels = find(plan);
  return compile(plan, &kernels);
}

// Builds kernels on a few threads. builder_ keeps the code, and the later build of a kernel returns its error.
void GpuEngine::build_all(std::span<const jit::Request> requests) {
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t n; (n = next++) < requests.size();) {
      std::shared_ptr<const jit::Code> code;
      (void)builder_.build(requests[n], &code);
    }
  };
  const size_t most = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMaxBuilders);
  std::vector<std::future<void>> workers;
  for (size_t n = 1; n < std::min(most, requests.size()); ++n) workers.push_back(std::async(std::launch::async, work));
  work();
}

Status GpuEngine::prepare_serving(const Problem& problem) {
  TANDEM_TRY(plan::check_serving(problem));
  const std::vector<plan::PlannedKernel> kernels = plan::serving_kernels(problem, device_->properties(), tuning_);
  std::vector<jit::Request> requests;
  for (const plan::PlannedKernel& kernel : kernels) {
    if (find(kernel.id) == nullptr) requests.push_back(request_of(kernel, device_->properties()));
  }
  build_all(requests);
  for (const plan::PlannedKernel& kernel : kernels) {
    if (find(kernel.id) != nullptr) continue;
    const auto entries = plan::entries_of(kernel.configuration, kernel.unit);
    const Compiled* compiled = nullptr;
    TANDEM_TRY(
        compile(kernel.id, request_of(kernel, device_->properties()), {entries.begin(), entries.end()}, &compiled));
  }
  return prepare_append_kv();
}

Status GpuEngine::refuse_while_capturing(const std::string& kernel, const char* remedy, gpu::Stream stream) {
  bool capturing = false;
  TANDEM_TRY(device_->is_capturing(stream, &capturing));
  if (!capturing) return {};
  return {TANDEM_COLD_KERNEL, str_cat("stream is being captured into a graph and kernel ", kernel,
                                      " is not loaded yet: call ", remedy, " before the capture")};
}

Status GpuEngine::run(const Problem& problem, const CallWorkspace& workspace, void* stream) {
  const plan::Plan plan = plan::make_plan(problem, device_->properties(), tuning_);
  TANDEM_TRY(workspace.check(plan.workspace_bytes));
  if (problem.validate) TANDEM_TRY(check_values(problem, stream));
  Kernels kernels = find(plan);
  if (kernels.size() < plan.kernels.size()) [[unlikely]] {
    const plan::PlannedKernel& missing = plan.kernels[kernels.size()];
    TANDEM_TRY(refuse_while_capturing(plan::name_of(missing), "tandem_prepare with these arguments", stream));
    TANDEM_TRY(compile(plan, &kernels));
  }
  if (logging_) [[unlikely]]
    log(problem, plan, kernels[0]->name);
  const nvtx::Range range(watching_, kernels[0]->name);
  FixedVector<const LoadedKernel*, plan::kMaxKernels> loaded;
  for (const Compiled* kernel : kernels) loaded.push_back(&kernel->loaded);
  return launch(*device_, problem, plan, loaded, workspace.data, stream);
}

// One kernel merges any number of parts.
Status GpuEngine::compile_merge(const Compiled** compiled) {
  if ((*compiled = find(kMergeId)) != nullptr) return {};
  return compile(kMergeId, request_of(plan::kMergeKernel, plan::merge_translation_unit(), device_->properties()),
                 plan::kMergeEntries, compiled);
}

Status GpuEngine::prepare_merge() {
  TANDEM_TRY(plan::check_device(device_->properties()));
  const Compiled* compiled = nullptr;
  return compile_merge(&compiled);
}

Status GpuEngine::merge(const MergeProblem& problem, void* stream) {
  TANDEM_TRY(plan::check_merge(problem, device_->properties()));
  const Compiled* compiled = find(kMergeId);
  if (compiled == nullptr) [[unlikely]] {
    TANDEM_TRY(refuse_while_capturing(plan::kMergeKernel, "tandem_prepare_merge", stream));
    TANDEM_TRY(compile_merge(&compiled));
  }
  plan::MergeLaunches launches(problem, device_->properties());
  MergeParams params;
  void* parameters[] = {&params};
  gpu::Launch wanted;
  wanted.kernel = compiled->loaded.at(plan::EntryId::merge);
  wanted.block.x = MergeParams::kThreads;
  wanted.args = parameters;
  wanted.stream = stream;
  while (launches.next(&params, &wanted.grid.x)) {
    std::vector<gpu::NamedBuffer> buffers;
    if (device_->wants_buffers()) wanted.buffers = buffers = launches.tensors(params);
    TANDEM_TRY(device_->launch(wanted));
  }
  return {};
}

// One kernel serves all arguments.
Status GpuEngine::compile_append_kv(const Compiled** compiled) {
  if ((*compiled = find(kAppendKvId)) != nullptr) return {};
  return compile(kAppendKvId,
                 request_of(plan::kAppendKvKernel, plan::append_kv_translation_unit(), device_->properties()),
                 plan::kAppendKvEntries, compiled);
}

Status GpuEngine::prepare_append_kv() {
  TANDEM_TRY(plan::check_device(device_->properties()));
  const Compiled* compiled = nullptr;
  return compile_append_kv(&compiled);
}

Status GpuEngine::append_kv(const AppendKvProblem& problem, void* stream) {
  TANDEM_TRY(plan::check_append_kv(problem, device_->properties()));
  const Compiled* compiled = find(kAppendKvId);
  if (compiled == nullptr) [[unlikely]] {
    TANDEM_TRY(refuse_while_capturing(plan::kAppendKvKernel, "tandem_prepare_append_kv", stream));
    TANDEM_TRY(compile_append_kv(&compiled));
  }
  plan::AppendKvLaunch planned = plan::append_kv_launch(problem, device_->properties());
  void* parameters[] = {&planned.params};
  gpu::Launch wanted;
  wanted.kernel = compiled->loaded.at(plan::EntryId::append_kv);
  wanted.grid = {planned.blocks, planned.parts, 1};
  wanted.block.x = AppendKvParams::kThreads;
  wanted.overlap_previous = plan::overlaps_launches(device_->properties(), tuning_);
  wanted.args = parameters;
  wanted.stream = stream;
  std::vector<gpu::NamedBuffer> buffers;
  if (device_->wants_buffers()) wanted.buffers = buffers = plan::append_kv_buffers(problem);
  return device_->launch(wanted);
}

Status GpuEngine::compile_make_blocks(const MakeBlocksProblem& problem, const Compiled** compiled) {
  const uint64_t id = make_blocks_id(problem);
  if ((*compiled = find(id)) != nullptr) return {};
  return compile(
      id,
      request_of(plan::make_blocks_name(problem), plan::make_blocks_translation_unit(problem), device_->properties()),
      plan::kMakeBlocksEntries, compiled);
}

Status GpuEngine::prepare_make_blocks(const MakeBlocksProblem& problem) {
  TANDEM_TRY(plan::check_make_blocks(problem, device_->properties()));
  const Compiled* compiled = nullptr;
  return compile_make_blocks(problem, &compiled);
}

Status GpuEngine::make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) {
  TANDEM_TRY(plan::check_make_blocks(problem, device_->properties()));
  if (problem.rows() == 0) return {};
  const Compiled* compiled = find(make_blocks_id(problem));
  if (compiled == nullptr) [[unlikely]] {
    TANDEM_TRY(refuse_while_capturing(plan::make_blocks_name(problem), "tandem_prepare_block_mask", stream));
    TANDEM_TRY(compile_make_blocks(problem, &compiled));
  }
  plan::MakeBlocksLaunch planned = plan::make_blocks_launch(problem, device_->properties(), workspace);
  void* parameters[] = {&planned.params};
  for (size_t n = 0; n < 2; ++n) {
    if (planned.grid[n] == 0) continue;
    gpu::Launch wanted;
    wanted.kernel = compiled->loaded.at(plan::kMakeBlocksEntries[n].id);
    wanted.grid.x = planned.grid[n];
    wanted.block.x = planned.threads[n];
    wanted.args = parameters;
    wanted.stream = stream;
    std::vector<gpu::NamedBuffer> buffers;
    if (device_->wants_buffers()) wanted.buffers = buffers = plan::make_blocks_buffers(problem, workspace, n);
    TANDEM_TRY(device_->launch(wanted));
  }
  return {};
}

// Copies index tensors to the host and checks them by the CPU's rules.
Status GpuEngine::check_values(const Problem& problem, gpu::Stream stream) {
  bool capturing = false;
  TANDEM_TRY(device_->is_capturing(stream, &capturing));
  if (capturing) {
    return Status::invalid(
        "validate (1) must be 0 while the stream is being captured into a graph: pass 0, because validation waits for "
        "the stream");
  }
  Problem copy = problem;
  std::vector<int32_t> values[4];
  const struct {
    IndexView* view;
    int64_t count;
    std::vector<int32_t>* values;
  } tensors[] = {{&copy.cu_seqlens_q, problem.batch + 1, &values[0]},
                 {&copy.cu_seqlens_k, problem.batch + 1, &values[1]},
                 {&copy.seqused_q, problem.batch, &values[2]},
                 {&copy.seqused_k, problem.batch, &values[3]}};
  for (const auto& tensor : tensors) {
    if (!*tensor.view || tensor.count == 0) continue;
    tensor.values->resize(static_cast<size_t>((tensor.count - 1) * tensor.view->stride + 1));
    TANDEM_TRY(device_->copy_to_host(tensor.values->data(), tensor.view->data, tensor.values->size() * sizeof(int32_t),
                                     stream));
    tensor.view->data = tensor.values->data();
  }
  TANDEM_TRY(device_->synchronize(stream));
  return tandem::check_values(copy);
}

void GpuEngine::log(const Problem& p, const plan::Plan& plan, const std::string& kernel) const {
  const std::string used = used_options(p);
  std::fprintf(stderr, "tandem: %s: %s, batch %lld, heads %lld/%lld, seqlen %lld x %lld, %s%s%s\n", name_.c_str(),
               kernel.c_str(), static_cast<long long>(p.batch), static_cast<long long>(p.heads_q),
               static_cast<long long>(p.heads_k), static_cast<long long>(p.seqlen_q),
               static_cast<long long>(p.seqlen_k), plan.pass->summary(plan).c_str(), used.empty() ? "" : ", ",
               used.c_str());
}

}  // namespace tandem
