#include "vgpu/src/device.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "base/text.h"
#include "vgpu/src/allocator.h"
#include "vgpu/src/check/checker.h"
#include "vgpu/src/ptx/inlining.h"
#include "vgpu/src/ptx/parser.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kFirstModel = "h200";  // the model of the name "vgpu"

// A gpu::Kernel points to an entry.
struct KernelEntry {
  std::unique_ptr<const Program> program;
};
const KernelEntry& entry_of(gpu::Kernel kernel) { return *reinterpret_cast<const KernelEntry*>(kernel); }

class VirtualModule final : public gpu::Module {
 public:
  VirtualModule(std::shared_ptr<const ptx::Module> module, const Model& model)
      : module_(std::move(module)), model_(model) {}

  Status find(const char* name, int32_t dynamic_smem_bytes, gpu::Kernel* kernel) override {
    const std::lock_guard lock(mutex_);
    KernelEntry& entry = entries_[name];
    if (entry.program == nullptr) TANDEM_TRY(Program::decode(module_, name, model_, &entry.program));
    const int32_t left = model_.shared_bytes_per_block - entry.program->static_shared_bytes();
    if (dynamic_smem_bytes > left) {
      return {TANDEM_DEVICE_ERROR, str_cat("dynamic shared memory of kernel \"", name, "\" (", dynamic_smem_bytes,
                                           " bytes) must be at most the ", left, " that a block of the ",
                                           model_.marketing_name, " can use dynamically: request less")};
    }
    *kernel = reinterpret_cast<gpu::Kernel>(&entry);
    return {};
  }

  Status attributes(gpu::Kernel kernel, gpu::KernelAttributes* attributes) override {
    const Program& program = program_of(kernel);
    const ptx::Function& function = program.function();
    attributes->registers = program.registers_needed();
    attributes->static_smem_bytes = program.static_shared_bytes();
    attributes->local_bytes = 0;
    for (const ptx::Symbol& symbol : function.symbols) {
      if (symbol.space == ptx::Space::local) attributes->local_bytes += static_cast<int32_t>(symbol.bytes());
    }
    attributes->max_threads = model_.max_threads_per_block;
    for (const auto& bound : {function.max_threads, function.required_threads}) {
      if (bound[0] > 0) attributes->max_threads = bound[0] * std::max(bound[1], 1) * std::max(bound[2], 1);
    }
    return {};
  }

 private:
  const std::shared_ptr<const ptx::Module> module_;
  const Model model_;
  std::mutex mutex_;                            // guards the entries, which are decoded on first use
  std::map<std::string, KernelEntry> entries_;  // addresses of entries never change
};

// Streams need no order: a handle is an address that is never dereferenced.
struct VirtualStream {};
struct VirtualEvent {
  Clock::time_point recorded;
};
VirtualEvent& event_of(gpu::Event event) { return *reinterpret_cast<VirtualEvent*>(event); }

gpu::Properties properties_of(const Model& model) {
  gpu::Properties p;
  p.name = model.marketing_name;
  p.opened_as = str_cat("vgpu:", model.name);
  p.compute_major = model.compute_major;
  p.compute_minor = model.compute_minor;
  p.image = gpu::Image::ptx;
  p.sm_count = model.sm_count;
  p.clock_khz = model.clock_khz;
  p.memory_clock_khz = model.memory_clock_khz;
  p.memory_bus_bits = model.memory_bus_bits;
  p.max_dynamic_smem_bytes = model.shared_bytes_per_block;
  p.l2_bytes = model.l2_bytes;
  p.memory_bytes = model.memory_bytes;
  return p;
}

Model with_sms(Model model, int32_t sm_count) {
  if (sm_count > 0) model.sm_count = sm_count;
  return model;
}

class VirtualDevice final : public gpu::Device {
 public:
  VirtualDevice(const Model& model, Options options)
      : model_(with_sms(model, options.sm_count)),
        options_(std::move(options)),
        properties_(properties_of(model_)),
        memory_(model.memory_bytes) {}

  const gpu::Properties& properties() const override { return properties_; }

  Status allocate(size_t bytes, void** address) override { return memory_.allocate(bytes, address); }
  Status free(void* address) override { return memory_.free(address); }
  Status allocate_pinned(size_t bytes, void** address) override { return memory_.allocate(bytes, address); }
  Status free_pinned(void* address) override { return memory_.free(address); }
  Status copy_to_device(void* to, const void* from, size_t bytes, gpu::Stream) override {
    return copy(to, from, bytes);
  }
  Status copy_to_host(void* to, const void* from, size_t bytes, gpu::Stream) override { return copy(to, from, bytes); }
  Status copy_on_device(void* to, const void* from, size_t bytes, gpu::Stream) override {
    return copy(to, from, bytes);
  }
  Status fill(void* to, unsigned char value, size_t bytes, gpu::Stream) override {
    TANDEM_TRY(memory_.check("to", to, bytes));
    std::memset(to, value, bytes);
    memory_.written(to, bytes);
    return {};
  }

  Status create_stream(gpu::Stream* stream) override { return *stream = new VirtualStream, Status{}; }
  Status destroy_stream(gpu::Stream stream) override { return delete static_cast<VirtualStream*>(stream), Status{}; }
  Status synchronize(gpu::Stream) override { return {}; }
  Status is_capturing(gpu::Stream, bool* capturing) override { return *capturing = false, Status{}; }
  Status create_event(gpu::Event* event) override {
    return *event = reinterpret_cast<gpu::Event>(new VirtualEvent), Status{};
  }
  Status destroy_event(gpu::Event event) override { return delete &event_of(event), Status{}; }
  Status record(gpu::Event event, gpu::Stream) override { return event_of(event).recorded = Clock::now(), Status{}; }
  Status wait(gpu::Stream, gpu::Event) override { return {}; }
  Status synchronize_event(gpu::Event) override { return {}; }
  Status elapsed_ms(gpu::Event start, gpu::Event stop, float* milliseconds) override {
    const auto passed = event_of(stop).recorded - event_of(start).recorded;
    *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
    return {};
  }

  Status load(std::span<const std::byte> image, std::unique_ptr<gpu::Module>* module) override {
    auto parsed = std::make_shared<ptx::Module>();
    TANDEM_TRY(ptx::parse({reinterpret_cast<const char*>(image.data()), image.size()}, parsed.get()));
    *module = std::make_unique<VirtualModule>(std::move(parsed), model_);
    return {};
  }
  bool wants_buffers() const override { return options_.check; }
  Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map) override {
    if (spec.type >= gpu::TensorType::u4_align8 && !model_.tcgen05)
      return Status::unsupported(str_cat("tensor map: packed types of 4 or 6 bits must not be used on the ",
                                         model_.marketing_name, ": use types of 8 bits"));
    return units::encode(spec, map);
  }
  Status launch(const gpu::Launch& launch) override;
  void adopt(void* address, size_t bytes) { memory_.adopt(address, bytes); }

 private:
  Status copy(void* to, const void* from, size_t bytes) {
    TANDEM_TRY(memory_.check("to", to, bytes));
    TANDEM_TRY(memory_.check("from", from, bytes));
    if (bytes > 0) std::memcpy(to, from, bytes);
    memory_.written(to, bytes);
    return {};
  }
  std::vector<Buffer> buffers_of(const gpu::Launch& launch);
  Status verdict(const Outcome& outcome) const;

  const Model model_;
  const Options options_;
  const gpu::Properties properties_;
  Allocator memory_;
};

std::vector<Buffer> VirtualDevice::buffers_of(const gpu::Launch& launch) {
  if (launch.buffers.empty()) return memory_.buffers();
  std::vector<Buffer> buffers;
  for (const gpu::NamedBuffer& b : launch.buffers)
    buffers.push_back({b.name, b.address, b.bytes, b.writable, b.initialised});
  return buffers;
}

// Copies each parameter from the caller's address to its offset in the parameter block.
std::vector<std::byte> parameters_of(const Program& program, void** args) {
  std::vector<std::byte> block(static_cast<size_t>(program.parameter_bytes()));
  const ptx::Function& function = program.function();
  for (size_t i = 0; i < function.parameters.size(); ++i) {
    const ptx::Symbol& symbol = function.symbols[static_cast<size_t>(function.parameters[i])];
    std::memcpy(block.data() + program.parameter_offset(static_cast<int>(i)), args[i],
                static_cast<size_t>(symbol.bytes()));
  }
  return block;
}

Status VirtualDevice::launch(const gpu::Launch& launch) {
  const Program& program = program_of(launch.kernel);
  const std::vector<std::byte> parameters = parameters_of(program, launch.args);
  const LaunchDescription description{
      &program, launch.grid, launch.block, launch.cluster, launch.dynamic_smem_bytes, parameters, launch.cooperative};
  std::unique_ptr<Checker> checker;
  std::shared_ptr<Observer> other;
  if (options_.observe) {
    other = options_.observe(description, model_);
  } else if (options_.check) {
    checker = Checker::create(description, model_, buffers_of(launch), {.letter = options_.letter});
  }
  const auto start = Clock::now();
  const Status status = run(description, model_, options_.run, checker ? checker.get() : other.get());
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const std::vector<Finding> findings = checker ? checker->findings() : std::vector<Finding>();
  const Outcome outcome{program, options_.run, findings, seconds};
  if (options_.report) {
    options_.report(outcome);
  } else if (!findings.empty()) {
    std::fprintf(stderr, "tandem: vgpu:%s: %s", model_.name.c_str(), text_of(outcome).c_str());
  }
  TANDEM_TRY(verdict(outcome));
  return status;
}

// The first error as a sentence short enough for tandem_last_error(). Findings by the letter are no failure.
Status VirtualDevice::verdict(const Outcome& outcome) const {
  size_t errors = 0;
  const Finding* first = nullptr;
  for (const Finding& finding : outcome.findings) {
    if (grade_of(finding.rule) == Grade::spec_only) continue;
    if (errors++ == 0) first = &finding;
  }
  if (first == nullptr) return {};
  const Program& program = outcome.program;
  std::string text =
      str_cat("kernel \"", program.function().name, "\" on vgpu:", model_.name, ": ", name_of(first->rule));
  if (first->party.instruction >= 0)
    text += " at " + place_text(program.module(), program.source(first->party.instruction).location);
  if (!first->subject.empty()) text += ": " + first->subject;
  text += ": " + first->message.substr(0, first->message.find('\n'));
  if (errors > 1) text += str_cat(" (and ", errors - 1, " more)");
  return {TANDEM_DEVICE_ERROR, str_cat(text, "; to repeat it set TANDEM_VGPU_SCHEDULE=", outcome.run.schedule.text())};
}

}  // namespace

std::string text_of(const Outcome& outcome) {
  if (outcome.findings.empty()) return "";
  const size_t count = outcome.findings.size();
  std::string text = str_cat("kernel \"", outcome.program.function().name, "\", schedule ", outcome.run.schedule.text(),
                             ": ", count, count == 1 ? " finding\n" : " findings\n");
  for (const Finding& finding : outcome.findings) {
    text += '\n';
    text += report(outcome.program, finding);
    if (!text.ends_with('\n')) text += '\n';
  }
  return text;
}

void adopt(gpu::Device& device, void* address, size_t bytes) {
  static_cast<VirtualDevice&>(device).adopt(address, bytes);
}

const Program& program_of(gpu::Kernel kernel) { return *entry_of(kernel).program; }

Status find_model(std::string_view device, const Model** model) {
  std::vector<const Model*> models;
  TANDEM_TRY(all_models(&models));
  const std::string_view name = device == "vgpu" ? kFirstModel : device.substr(std::string_view("vgpu:").size());
  *model = find_model(name);
  if (*model != nullptr) return {};
  std::string known;
  for (const Model* each : models)
    known += str_cat(known.empty() ? "" : each == models.back() ? " or " : ", ", "\"vgpu:", each->name, "\"");
  return Status::invalid(str_cat("device \"", device, "\" must be ", known, ": choose one of them"));
}

Status open(std::string_view name, std::unique_ptr<gpu::Device>* device) {
  Options options;
  TANDEM_TRY(options_from_environment(&options));
  return open(name, std::move(options), device);
}

Status open(std::string_view name, Options options, std::unique_ptr<gpu::Device>* device) {
  const Model* model = nullptr;
  TANDEM_TRY(find_model(name, &model));
  *device = std::make_unique<VirtualDevice>(*model, std::move(options));
  return {};
}

}  // namespace tandem::vgpu
