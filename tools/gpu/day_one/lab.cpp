#include "lab.h"

#include <algorithm>
#include <stdexcept>

#include "base/embedded.h"
#include "base/env.h"
#include "base/text.h"
#include "jit/compiler.h"

namespace tandem::day_one {

std::span<const Text> kernel_texts();  // cmake/Embed.cmake writes it

using test::require;

GpuBuffer::GpuBuffer(const test::Gpu& gpu, const char* name, size_t bytes, bool writable)
    : gpu_(gpu), name_(name), memory_(gpu.device(), bytes), writable_(writable) {
  if (writable) clear();
}
void GpuBuffer::clear() const { require(gpu_.device().fill(memory_.at(0), 0, memory_.bytes(), gpu_.stream())); }
void GpuBuffer::upload(const void* from) const {
  require(gpu_.device().copy_to_device(memory_.at(0), from, memory_.bytes(), gpu_.stream()));
  require(gpu_.device().synchronize(gpu_.stream()));
}
void GpuBuffer::download(void* to) const {
  require(gpu_.device().copy_to_host(to, memory_.at(0), memory_.bytes(), gpu_.stream()));
  require(gpu_.device().synchronize(gpu_.stream()));
}

Lab::Lab(const Setup& its_setup) : setup(its_setup), gpu_(its_setup.device) {}

int Lab::count(double real, int reduced) const {
  return is_virtual() ? reduced : std::max(1, static_cast<int>(real * setup.scale));
}
void Lab::synchronize() const { require(gpu_.device().synchronize(gpu_.stream())); }

gpu::Kernel Lab::kernel_of(const std::string& file, const char* entry, int ctas, unsigned dynamic_smem_bytes) {
  const std::string key = str_cat(file, " ", ctas);
  auto loaded = std::ranges::find(modules_, key, &Loaded::key);
  if (loaded == modules_.end()) {
    std::vector<Text> sources(jit::kernels().begin(), jit::kernels().end());
    sources.insert(sources.end(), kernel_texts().begin(), kernel_texts().end());
    const jit::Request request{.name = str_cat("experiment_", entry),
                               .source = str_cat("#define CTAS ", ctas, "\n#include \"", file, "\"\n"),
                               .arch = properties().arch(),
                               .options = {"--std=c++20", "--device-as-default-execution-space"},
                               .output = properties().image == gpu::Image::ptx ? jit::Output::ptx : jit::Output::cubin};
    std::unique_ptr<jit::Compiler> compiler;
    require(jit::Compiler::open({}, Env::get(), &compiler));
    std::string code, log;
    require(compiler->compile(request, jit::included_by(request.source, sources), &code, &log));
    modules_.push_back({key, nullptr});
    loaded = modules_.end() - 1;
    require(gpu_.device().load(std::as_bytes(std::span(code)), &loaded->module));
  }
  gpu::Kernel kernel = nullptr;
  require(loaded->module->find(entry, static_cast<int32_t>(dynamic_smem_bytes), &kernel));
  return kernel;
}

void Lab::launch(const char* file, const char* entry, int ctas, const Grid& grid, std::vector<void*> args,
                 const std::vector<const GpuBuffer*>& buffers) {
  std::vector<gpu::NamedBuffer> named;
  for (const GpuBuffer* buffer : buffers) named.push_back(buffer->named());
  gpu::Launch launch{.kernel = kernel_of(file, entry, ctas, grid.dynamic_smem_bytes),
                     .grid = {.x = grid.blocks},
                     .block = {.x = grid.threads},
                     .cluster = {},
                     .dynamic_smem_bytes = grid.dynamic_smem_bytes,
                     .cooperative = grid.cooperative,
                     .args = args.data(),
                     .stream = grid.stream != nullptr ? grid.stream : gpu_.stream(),
                     .buffers = named};
  require(gpu_.device().launch(launch));
}

}  // namespace tandem::day_one
