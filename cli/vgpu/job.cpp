#include "cli/vgpu/job.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/text.h"
#include "cli/compare.h"
#include "cli/io/file.h"
#include "cli/io/npy.h"
#include "cli/vgpu/element.h"
#include "engine/context.h"
#include "engine/gpu.h"
#include "vgpu/src/ptx/parser.h"

namespace tandem::tool {
namespace {

// ---- An attention problem ----

class AttentionJob final : public Job {
 public:
  AttentionJob(Inputs inputs, const Attention& options, tandem_pass pass)
      : inputs_(std::move(inputs)), options_(options), pass_(pass), results_(inputs_, pass == TANDEM_BACKWARD, false) {}

  Status run(const std::string& device, const vgpu::Options& options) override {
    std::unique_ptr<gpu::Device> opened;
    TANDEM_TRY(vgpu::open(device, options, &opened));
    const Env& env = Env::get();
    auto engine = std::make_unique<GpuEngine>(device, std::move(opened), env, jit::Cache::options(env));
    tandem_context context(std::move(engine), {TANDEM_CPU, 0});
    for (int pass = TANDEM_FORWARD; pass <= pass_; ++pass) TANDEM_TRY(call(context, static_cast<tandem_pass>(pass)));
    return {};
  }

  std::string description() const override {
    return str_cat("q ", io::shape_text(inputs_.q.shape()), "  k ", io::shape_text(inputs_.k.shape()), "  v ",
                   io::shape_text(inputs_.v.shape()), "  ", short_name(inputs_.q.dtype()),
                   pass_ == TANDEM_FORWARD ? "" : "  backward");
  }
  bool is_empty() const override { return tool::is_empty(results_); }
  std::string kernel() const override { return pass_ == TANDEM_FORWARD ? "forward" : "backward"; }

  std::vector<io::FileTensor> results() const override {
    std::vector<io::FileTensor> views;
    for (const Results::Named& one : results_.all(pass_)) views.push_back(one.buffer->view(one.name));
    return views;
  }

 private:
  Status call(tandem_context& context, tandem_pass pass) const {
    for (const Results::Named& one : results_.all(pass))
      std::fill_n(one.buffer->data(), one.buffer->bytes(), std::byte{0xff});
    const Attention attention = with_results(inputs_.attention(options_), results_);
    const detail::CArgs args(attention, pass);
    size_t bytes = 0;
    tandem_status code = tandem_workspace_size(&context, pass, args.get(), &bytes);
    std::vector<std::byte> workspace(bytes);
    const auto run = pass == TANDEM_FORWARD ? &tandem_forward : &tandem_backward;
    if (code == TANDEM_OK) code = run(&context, args.get(), workspace.data(), bytes, nullptr);
    return code == TANDEM_OK ? Status{} : Status{code, tandem_last_error()};
  }

  const Inputs inputs_;
  const Attention options_;
  const tandem_pass pass_;
  const Results results_;
};

// ---- A kernel of a PTX file ----

// Memory of a device with the contents of a launch file.
class DeviceBuffer {
 public:
  DeviceBuffer(gpu::Device& device, size_t bytes) : device_(device) {
    throw_if_failed(device.allocate(bytes, &address_));
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : device_(other.device_), address_(std::exchange(other.address_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer() { (void)device_.free(address_); }

  std::byte* data() const { return static_cast<std::byte*>(address_); }

 private:
  gpu::Device& device_;
  void* address_ = nullptr;
};

class PtxJob final : public Job {
 public:
  PtxJob(const std::string& ptx, const std::string& launch) : ptx_(ptx), launch_(read_launch(launch)) {
    const std::span<const std::byte> text = ptx_.bytes();
    vgpu::ptx::Module module;
    throw_if_failed(vgpu::ptx::parse({reinterpret_cast<const char*>(text.data()), text.size()}, &module));
    choose_entry(module);
    target_ = module.target;
    for (const LaunchBuffer& buffer : launch_.buffers) contents_.push_back(content_of(buffer));
  }

  std::string device() const override {
    if (target_.starts_with("sm_103")) return "vgpu:b300";
    return target_.starts_with("sm_10") ? "vgpu:b200" : Job::device();
  }

  std::string description() const override {
    return str_cat("kernel ", launch_.entry, "  grid ", launch_.grid.x, " x ", launch_.grid.y, " x ", launch_.grid.z,
                   "  block ", launch_.block.x, " x ", launch_.block.y, " x ", launch_.block.z);
  }

  Status run(const std::string& name, const vgpu::Options& options) override {
    std::unique_ptr<gpu::Device> device;
    std::unique_ptr<gpu::Module> module;
    gpu::Kernel kernel = nullptr;
    TANDEM_TRY(vgpu::open(name, options, &device));
    TANDEM_TRY(device->load(ptx_.bytes(), &module));
    TANDEM_TRY(module->find(launch_.entry.c_str(), static_cast<int32_t>(launch_.dynamic_shared_bytes), &kernel));
    std::vector<DeviceBuffer> memory;
    std::vector<gpu::NamedBuffer> buffers;
    for (size_t n = 0; n < launch_.buffers.size(); ++n) {
      const LaunchBuffer& buffer = launch_.buffers[n];
      std::byte* data = memory.emplace_back(*device, buffer.bytes).data();
      std::ranges::copy(contents_[n], data);
      buffers.push_back({buffer.name.c_str(), data, buffer.bytes, !buffer.read_only, !contents_[n].empty()});
    }
    std::vector<std::byte> block;
    TANDEM_TRY(fill_block(*device, vgpu::program_of(kernel), memory, &block));
    const Status status = start(*device, kernel, buffers, block);
    results_.clear();
    for (size_t n = 0; n < memory.size(); ++n)
      results_.emplace_back(memory[n].data(), memory[n].data() + launch_.buffers[n].bytes);
    return status;
  }

  std::vector<io::FileTensor> results() const override {
    std::vector<io::FileTensor> views;
    for (size_t n = 0; n < results_.size(); ++n) {
      const LaunchBuffer& buffer = launch_.buffers[n];
      if (!buffer.read_only) views.push_back({buffer.name, buffer.type, buffer.shape, results_[n]});
    }
    return views;
  }

  std::vector<std::string> complaints() const override { return verdicts(false); }
  std::vector<std::string> remarks() const override { return verdicts(true); }

 private:
  void choose_entry(const vgpu::ptx::Module& module);
  std::vector<std::byte> content_of(const LaunchBuffer& buffer) const;
  Status bytes_of(const LaunchParameter& parameter, gpu::Device& device, const std::vector<DeviceBuffer>& memory,
                  std::vector<std::byte>* bytes) const;
  Status place_of(size_t n, size_t bytes, const vgpu::Program& program, size_t* next, size_t* at) const;
  Status fill_block(gpu::Device& device, const vgpu::Program& program, const std::vector<DeviceBuffer>& memory,
                    std::vector<std::byte>* block) const;
  Status start(gpu::Device& device, gpu::Kernel kernel, std::span<const gpu::NamedBuffer> buffers,
               std::span<std::byte> block) const;
  // Returns sentences about the expected results: the correct results, or the wrong results.
  std::vector<std::string> verdicts(bool good) const;

  const io::MappedFile ptx_;
  LaunchFile launch_;
  std::string target_;                            // "sm_90a"
  std::vector<std::vector<std::byte>> contents_;  // by buffer, before the launch; empty: not initialised
  std::vector<std::vector<std::byte>> results_;
};

// Without a name in the file, selects the only kernel of the module.
void PtxJob::choose_entry(const vgpu::ptx::Module& module) {
  std::string known;
  int entries = 0;
  for (const vgpu::ptx::Function& function : module.functions) {
    if (!function.is_entry) continue;
    if (function.name == launch_.entry) return;
    known += str_cat(known.empty() ? "" : ", ", function.name);
    ++entries;
  }
  if (!launch_.entry.empty() || entries != 1) {
    throw io::InputError(str_cat(launch_.path, ": entry (", io::in_quotes(launch_.entry), ") must be one of ", known,
                                 ": correct the name"));
  }
  launch_.entry = known;
}

std::vector<std::byte> PtxJob::content_of(const LaunchBuffer& buffer) const {
  using Fill = LaunchBuffer::Fill;
  if (buffer.fill == Fill::none) return {};
  if (buffer.fill == Fill::file) {
    const io::MappedFile mapped(launch_.beside(buffer.file));
    const io::FileTensor view = io::parse_npy(mapped.bytes(), buffer.file);
    if (view.data.size() != buffer.bytes) {
      throw io::InputError(str_cat(launch_.path, ": buffer ", io::in_quotes(buffer.name), " has ", buffer.bytes,
                                   " bytes, and ", buffer.file, " holds ", view.data.size()));
    }
    return {view.data.begin(), view.data.end()};
  }
  std::vector<std::byte> bytes(buffer.bytes);
  const auto size = static_cast<size_t>(io::size_of(buffer.type));
  const auto count = static_cast<int64_t>(buffer.bytes / size);
  Random random(buffer.seed);
  const Buffer numbers =
      buffer.fill == Fill::normal ? random_buffer(random, DType::f32, {count}, buffer.scale) : Buffer();
  for (int64_t i = 0; buffer.fill != Fill::zeros && i < count; ++i) {
    const double value = numbers ? numbers.get(i) : static_cast<double>(i) * buffer.scale;
    set_element(buffer.type, bytes.data() + static_cast<size_t>(i) * size, value);
  }
  return bytes;
}

// Computes the bytes of a value after the buffers have addresses.
Status PtxJob::bytes_of(const LaunchParameter& parameter, gpu::Device& device, const std::vector<DeviceBuffer>& memory,
                        std::vector<std::byte>* bytes) const {
  *bytes = parameter.bytes;
  uintptr_t address = static_cast<uintptr_t>(parameter.offset);
  if (parameter.buffer >= 0)
    address += reinterpret_cast<uintptr_t>(memory[static_cast<size_t>(parameter.buffer)].data());
  const auto take = [&](const auto& value) {
    bytes->resize(sizeof value);
    std::memcpy(bytes->data(), &value, sizeof value);
  };
  if (parameter.map) {
    gpu::TensorMapSpec spec = *parameter.map;
    spec.address = reinterpret_cast<void*>(address);
    gpu::TensorMap map;
    TANDEM_TRY(device.encode(spec, &map));
    take(map);
  } else if (parameter.buffer >= 0) {
    take(address);
  }
  for (const LaunchParameter& part : parameter.parts) {
    std::vector<std::byte> inner;
    TANDEM_TRY(bytes_of(part, device, memory, &inner));
    const size_t end = bytes->size(), alignment = part.alignment;
    const size_t at = part.at ? *part.at : (end + alignment - 1) / alignment * alignment;
    bytes->resize(std::max(end, at + inner.size()));
    std::ranges::copy(inner, bytes->begin() + static_cast<std::ptrdiff_t>(at));
  }
  return {};
}

// Computes the place of a parameter. next counts the parameters without an explicit place.
Status PtxJob::place_of(size_t n, size_t bytes, const vgpu::Program& program, size_t* next, size_t* at) const {
  const LaunchParameter& parameter = launch_.parameters[n];
  const std::string name = str_cat(launch_.path, ": parameters[", n, "] (", bytes, " bytes)");
  const vgpu::ptx::Function& function = program.function();
  if (parameter.at) {
    *at = *parameter.at;
    const auto size = static_cast<size_t>(program.parameter_bytes());
    if (*at <= size && bytes <= size - *at) return {};
    return Status::invalid(str_cat(name, " at ", *at, " must lie within the kernel's ", size,
                                   " bytes of parameters: correct the offset (at)"));
  }
  if (*next == function.parameters.size()) {
    return Status::invalid(str_cat(name, " is one more than the ", *next,
                                   " of the kernel: remove this parameter, or set the offset (at)"));
  }
  *at = static_cast<size_t>(program.parameter_offset(static_cast<int>(*next)));
  const vgpu::ptx::Symbol& symbol = function.symbols[static_cast<size_t>(function.parameters[(*next)++])];
  const auto size = static_cast<size_t>(symbol.bytes());
  if (bytes == size || (!parameter.parts.empty() && bytes < size)) return {};
  return Status::invalid(str_cat(name, " must have the ", size, " bytes of the kernel's ", symbol.name,
                                 ": change the type, or set the offset (at)"));
}

Status PtxJob::fill_block(gpu::Device& device, const vgpu::Program& program, const std::vector<DeviceBuffer>& memory,
                          std::vector<std::byte>* block) const {
  block->resize(static_cast<size_t>(program.parameter_bytes()));
  size_t next = 0;
  bool placed = false;
  for (size_t n = 0; n < launch_.parameters.size(); ++n) {
    std::vector<std::byte> bytes;
    size_t at = 0;
    TANDEM_TRY(bytes_of(launch_.parameters[n], device, memory, &bytes));
    TANDEM_TRY(place_of(n, bytes.size(), program, &next, &at));
    std::ranges::copy(bytes, block->begin() + static_cast<std::ptrdiff_t>(at));
    placed = placed || launch_.parameters[n].at;
  }
  const size_t count = program.function().parameters.size();
  if (placed || next == count) return {};
  return Status::invalid(str_cat(launch_.path, ": parameters (", next, ") must be all ", count,
                                 " of the kernel: add the missing parameters, or set the offsets (at)"));
}

Status PtxJob::start(gpu::Device& device, gpu::Kernel kernel, std::span<const gpu::NamedBuffer> buffers,
                     std::span<std::byte> block) const {
  const vgpu::Program& program = vgpu::program_of(kernel);
  std::vector<void*> args;
  for (size_t i = 0; i < program.function().parameters.size(); ++i)
    args.push_back(block.data() + program.parameter_offset(static_cast<int>(i)));
  return device.launch({.kernel = kernel,
                        .grid = launch_.grid,
                        .block = launch_.block,
                        .cluster = launch_.cluster,
                        .dynamic_smem_bytes = launch_.dynamic_shared_bytes,
                        .cooperative = launch_.cooperative,
                        .args = args.data(),
                        .buffers = buffers});
}

// Comparison of a result with its expectation.
struct Comparison {
  size_t count = 0, wrong = 0;
  size_t worst = 0;                                    // element with the largest error over its bound
  double got = 0, wanted = 0, error = 0, allowed = 0;  // values at the worst element
};

Comparison compare(const LaunchBuffer& buffer, std::span<const std::byte> result, const io::FileTensor& expected) {
  // "<V2" of .npy are two bytes without a meaning, which get the type of the buffer.
  const io::Element type = expected.element == io::Element::raw16 ? buffer.type : expected.element;
  const auto size = static_cast<size_t>(io::size_of(buffer.type)),
             expected_size = static_cast<size_t>(io::size_of(type));
  Comparison all{.count = result.size() / size};
  double most = -1;
  for (size_t i = 0; i < all.count; ++i) {
    const double got = get_element(buffer.type, result.data() + i * size);
    const double wanted = get_element(type, expected.data.data() + i * expected_size);
    const double allowed = buffer.tolerance * std::max(1.0, std::fabs(wanted));
    double error = got == wanted || (std::isnan(got) && std::isnan(wanted)) ? 0 : std::fabs(got - wanted);
    if (std::isnan(error)) error = INFINITY;
    if (error > allowed) ++all.wrong;
    const double part = allowed > 0 ? error / allowed : error;
    if (part > most)
      most = part, all.worst = i, all.got = got, all.wanted = wanted, all.error = error, all.allowed = allowed;
  }
  return all;
}

std::vector<std::string> PtxJob::verdicts(bool good) const {
  std::vector<std::string> sentences;
  for (size_t n = 0; n < results_.size(); ++n) {
    const LaunchBuffer& buffer = launch_.buffers[n];
    if (buffer.expected.empty()) continue;
    const io::MappedFile mapped(launch_.beside(buffer.expected));
    const io::FileTensor expected = io::parse_npy(mapped.bytes(), buffer.expected);
    const size_t elements = expected.data.size() / static_cast<size_t>(io::size_of(expected.element));
    const size_t count = buffer.bytes / static_cast<size_t>(io::size_of(buffer.type));
    if (elements != count) {
      if (!good)
        sentences.push_back(str_cat(buffer.name, " has ", count, " elements, ", buffer.expected, " has ", elements));
      continue;
    }
    const Comparison c = compare(buffer, results_[n], expected);
    if (good != (c.wrong == 0)) continue;
    sentences.push_back(good ? str_cat(buffer.name, ": all ", c.count, " elements are as in ", buffer.expected,
                                       "; the largest error is ", c.error, ", ", c.allowed, " is allowed")
                             : str_cat(buffer.name, ": ", c.wrong, " of ", c.count, " elements are not as in ",
                                       buffer.expected, "; the worst is ", c.got, " at ", c.worst, ", expected ",
                                       c.wanted));
  }
  return sentences;
}

}  // namespace

std::unique_ptr<Job> attention_job(Inputs inputs, const Attention& options, tandem_pass pass) {
  return std::make_unique<AttentionJob>(std::move(inputs), options, pass);
}

std::unique_ptr<Job> ptx_job(const std::string& ptx, const std::string& launch) {
  return std::make_unique<PtxJob>(ptx, launch);
}

}  // namespace tandem::tool
