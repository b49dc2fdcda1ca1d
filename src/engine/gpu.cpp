#include "engine/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <span>

#include "engine/launch.h"
#include "problem/text.h"

namespace tandem {

struct GpuEngine::Compiled {
  uint64_t id = 0;
  std::string name;
  std::unique_ptr<gpu::Module> module;
  gpu::Kernel forward = nullptr, schedule = nullptr;
  const Compiled* next = nullptr;  // of the bucket
};

namespace {

size_t bucket_of(uint64_t id, size_t buckets) { return (id * 0x9e3779b97f4a7c15u >> 32) % buckets; }

jit::Search search_for(const gpu::Properties& device) {
  return {.site_packages = {}, .newest_major = device.driver_version / 1000};
}

std::string driver_text(int32_t version) {
  return version == 0 ? "" : say("driver ", version / 1000, ".", version % 1000 / 10, ", ");
}

}  // namespace

jit::Request request_of(const plan::Tile& tile, const gpu::Properties& device) {
  jit::Request request{.name = plan::name_of(tile),
                       .source = plan::translation_unit(tile),
                       .arch = device.arch(),
                       .options = {"--std=c++20", "--device-as-default-execution-space"}};
  if (device.image == gpu::Image::ptx) {
    request.output = jit::Output::ptx;
    request.options.emplace_back("--generate-line-info");
  }
  return request;
}

GpuEngine::GpuEngine(std::string name, std::unique_ptr<gpu::Device> device, jit::Env env, jit::Cache::Options cache)
    : name_(std::move(name)),
      device_(std::move(device)),
      builder_(search_for(device_->properties()), std::move(env), std::move(cache)),
      logging_([] {
        const char* log = std::getenv("TANDEM_LOG");
        return log != nullptr && *log != '\0' && *log != '0';
      }()),
      watching_(nvtx::tool()) {
  const gpu::Properties& p = device_->properties();
  const std::string compiler = builder_.compiler_name();
  description_ = say(name_, ", ", p.name, ", ", p.sm_count, " SMs, ", driver_text(p.driver_version),
                     compiler.empty() ? "no NVRTC to compile kernels" : "kernels compiled by " + compiler);
}

GpuEngine::~GpuEngine() = default;

Status GpuEngine::check(const Problem& problem) const { return plan::check_forward(problem, device_->properties()); }

plan::ForwardPlan GpuEngine::plan(const Problem& problem) const {
  return plan::plan_forward(problem, device_->properties());
}

const GpuEngine::Compiled* GpuEngine::find(const plan::Tile& tile) const {
  const uint64_t id = plan::id_of(tile);
  const Compiled* at = kernels_[bucket_of(id, kBuckets)].load(std::memory_order_acquire);
  while (at != nullptr && at->id != id) at = at->next;
  return at;
}

// Threads that want one kernel at the same time share its compilation, in builder_; each loads it, one adds it.
Status GpuEngine::compile(const plan::Tile& tile, const Compiled** compiled) {
  std::shared_ptr<const jit::Code> code;
  TANDEM_TRY(builder_.build(request_of(tile, device_->properties()), &code));
  const std::lock_guard lock(adding_);
  if ((*compiled = find(tile)) != nullptr) return {};
  auto made = std::make_unique<Compiled>();
  made->id = plan::id_of(tile);
  made->name = plan::name_of(tile);
  TANDEM_TRY(device_->load(std::as_bytes(std::span(code->bytes)), &made->module));
  TANDEM_TRY(made->module->find("forward", tile.shared_bytes(), &made->forward));
  if (tile.ragged) TANDEM_TRY(made->module->find("schedule", 0, &made->schedule));
  std::atomic<const Compiled*>& bucket = kernels_[bucket_of(made->id, kBuckets)];
  made->next = bucket.load(std::memory_order_relaxed);
  bucket.store(made.get(), std::memory_order_release);
  *compiled = made.get();
  owned_.push_back(std::move(made));
  return {};
}

Status GpuEngine::prepare(const Problem& problem) {
  const plan::Tile tile = plan(problem).tile;
  const Compiled* compiled = find(tile);
  return compiled != nullptr ? Status{} : compile(tile, &compiled);
}

Status GpuEngine::run(const Problem& problem, const plan::ForwardPlan& plan, void* workspace, gpu::Stream stream) {
  if (problem.validate) TANDEM_TRY(check_values(problem, stream));
  const Compiled* compiled = find(plan.tile);
  if (compiled == nullptr) [[unlikely]] {
    bool capturing = false;
    TANDEM_TRY(device_->is_capturing(stream, &capturing));
    if (capturing) {
      return {TANDEM_COLD_KERNEL,
              say("stream is being captured into a graph and kernel ", plan::name_of(plan.tile),
                  " is not loaded yet: call tandem_prepare with these arguments before the capture")};
    }
    TANDEM_TRY(compile(plan.tile, &compiled));
  }
  if (logging_) [[unlikely]]
    log(problem, plan, *compiled);
  const nvtx::Range range(watching_, compiled->name);
  return launch_forward(*device_, problem, plan, {compiled->forward, compiled->schedule}, workspace, stream);
}

// Index tensors are copied to the host and held to the CPU's rules.
Status GpuEngine::check_values(const Problem& problem, gpu::Stream stream) {
  bool capturing = false;
  TANDEM_TRY(device_->is_capturing(stream, &capturing));
  if (capturing) {
    return Status::invalid(
        "validate (1) must be 0 while the stream is being captured into a graph: it waits for the stream and reads "
        "index tensors");
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

void GpuEngine::log(const Problem& p, const plan::ForwardPlan& plan, const Compiled& compiled) const {
  std::fprintf(stderr,
               "tandem: %s: %s, batch %lld, heads %lld/%lld, seqlen %lld x %lld, %d blocks for %s%d tiles, %d heads "
               "together, groups of %d\n",
               name_.c_str(), compiled.name.c_str(), static_cast<long long>(p.batch), static_cast<long long>(p.heads_q),
               static_cast<long long>(p.heads_k), static_cast<long long>(p.seqlen_q),
               static_cast<long long>(p.seqlen_k), plan.grid, plan.tile.ragged ? "up to " : "", plan.tiles,
               plan.together, plan.group);
}

}  // namespace tandem
