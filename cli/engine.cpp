#include "cli/engine.h"

#include <algorithm>

#include "cli/measure.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"

namespace tandem::tool {
namespace {

std::unique_ptr<Gpu> gpu_of(const std::string& device) {
  return gpu::cuda::is_cuda(device) || gpu::is_virtual(device) ? std::make_unique<Gpu>(device) : nullptr;
}

// Returns the same tensor with another address of its elements.
Tensor moved(const Buffer& buffer, void* data, tandem_device device) {
  Tensor tensor = buffer.tensor();
  tandem_tensor description = *tensor.get();
  description.data = data;
  description.device = device;
  return Tensor(description);
}

Buffer as_type(const Buffer& buffer, DType type) { return buffer ? buffer.converted(type) : Buffer(); }

// Converts float64 to float32, which a GPU reads.
Buffer narrowed(const Buffer& buffer) {
  return as_type(buffer, buffer.dtype() == DType::f64 ? DType::f32 : buffer.dtype());
}

}  // namespace

ToolEngine::ToolEngine(const std::string& device, int threads)
    : emulated_(gpu::is_virtual(device)),
      gpu_(gpu_of(device)),
      context_(Context::Options{.device = device, .threads = gpu_ ? 0 : threads}) {}

void ToolEngine::release_workspace() {
  needed_ = 0;
  workspace_ = {};
  device_workspace_ = {};
}

std::span<std::byte> ToolEngine::workspace(const Attention& attention, tandem_pass pass) {
  const size_t needed = workspace_size(attention, pass, context_);
  needed_ = std::max(needed_, needed);
  const size_t room = std::max<size_t>(1, needed_);  // because with an empty span the call would allocate
  if (!on_gpu()) {
    if (room > workspace_.size()) workspace_ = std::vector<std::byte>(room);
    return workspace_;
  }
  if (room > device_workspace_.bytes()) {
    gpu_->synchronize();  // earlier calls may use the old workspace
    device_workspace_ = Gpu::Memory(*gpu_, room);
  }
  return {device_workspace_.data(), device_workspace_.bytes()};
}

std::optional<Error> ToolEngine::refusal(const Inputs& inputs, const Attention& options, tandem_pass pass) const {
  const Results results(inputs, pass == TANDEM_BACKWARD, false);
  const Inputs::Place place = [&](const Buffer& buffer) {
    return buffer && on_gpu() ? moved(buffer, nullptr, gpu_->place()) : buffer.tensor();
  };
  return check(with_results(inputs.attention(options, place), results, place), pass, context_);
}

Call::Call(ToolEngine& engine, const Inputs& inputs, const Attention& options, const Results& results)
    : engine_(engine) {
  attention_ = inputs.attention(options, [&](const Buffer& buffer) { return place(buffer, false); });
  attention_ = with_results(attention_, results, [&](const Buffer& buffer) { return place(buffer, true); });
}

Tensor Call::place(const Buffer& buffer, bool result) {
  if (!buffer || !engine_.on_gpu()) return buffer.tensor();
  Gpu& gpu = *engine_.gpu_;
  const auto bytes = static_cast<size_t>(buffer.bytes());
  const Copy& copy = copies_.emplace_back(Copy{&buffer, Gpu::Memory(gpu, bytes), result});
  if (result) {
    gpu.fill(copy.device, 0xff);
  } else {
    gpu.upload(copy.device, buffer.data(), bytes);
  }
  return moved(buffer, copy.device.data(), gpu.place());
}

void Call::run(tandem_pass pass) {
  const std::span<std::byte> workspace = engine_.workspace(attention_, pass);
  void* stream = engine_.on_gpu() ? engine_.gpu_->stream() : nullptr;
  if (pass == TANDEM_FORWARD) {
    tandem::forward(attention_, engine_.context_, workspace, stream);
  } else {
    tandem::backward(attention_, engine_.context_, workspace, stream);
  }
}

void Call::fetch() {
  if (!engine_.on_gpu()) return;
  for (const Copy& copy : copies_) {
    if (copy.result) engine_.gpu_->download(copy.host->data(), copy.device, static_cast<size_t>(copy.host->bytes()));
  }
  engine_.gpu_->synchronize();
}

double Call::median_seconds(tandem_pass pass, double seconds) {
  if (!engine_.on_gpu()) return tool::median_seconds([&] { run(pass); }, seconds);
  // The workspace size is computed once, like a caller does once per shape, because a small call takes the GPU less
  // time.
  const std::span<std::byte> workspace = engine_.workspace(attention_, pass);
  const detail::CArgs args(attention_, pass);
  const auto function = pass == TANDEM_FORWARD ? tandem_forward : tandem_backward;
  return engine_.gpu_->median_seconds(
      [&] {
        tandem::throw_if_failed(
            function(engine_.context_.get(), args.get(), workspace.data(), workspace.size(), engine_.gpu_->stream()));
      },
      seconds);
}

Given::Given(Inputs inputs, bool for_gpu) : original(std::move(inputs)) {
  const Inputs& from = original;
  const DType type = from.q.dtype();
  if (!for_gpu || (type != DType::f32 && type != DType::f64)) return;
  if (from.k.dtype() != type || from.v.dtype() != type) return;  // the engine refuses mixed types
  const auto halved = [&](const Buffer& buffer) {
    return as_type(buffer, buffer.dtype() == type ? DType::bf16 : buffer.dtype());
  };
  Inputs& to = converted.emplace();
  to.q = halved(from.q);
  to.k = halved(from.k);
  to.v = halved(from.v);
  to.dout = halved(from.dout);
  to.dlse = narrowed(from.dlse);
  to.bias = narrowed(from.bias);
  to.sink = narrowed(from.sink);
  to.alibi_slopes = narrowed(from.alibi_slopes);
  to.cu_seqlens_q = narrowed(from.cu_seqlens_q);
  to.cu_seqlens_k = narrowed(from.cu_seqlens_k);
  to.seqused_q = narrowed(from.seqused_q);
  to.seqused_k = narrowed(from.seqused_k);
}

std::string Given::note() const {
  if (!converted) return "";
  return std::string(name_of(original.q.dtype())) + " converted to " + name_of(converted->q.dtype()) + " for the GPU";
}

}  // namespace tandem::tool
