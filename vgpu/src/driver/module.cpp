// Modules and libraries, which are equal here, their functions and variables.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "vgpu/src/driver/image.h"
#include "vgpu/src/driver/state.h"
#include "vgpu/src/ptx/parser.h"

namespace tandem::vgpu::driver {
namespace {

// Compiler options that receive the log.
enum JitOption : int { kErrorLog = 5, kErrorLogBytes = 6 };

void log_error(unsigned count, const int* options, void** values, const std::string& sentence) {
  char* log = nullptr;
  size_t bytes = 0;
  for (unsigned i = 0; options != nullptr && values != nullptr && i < count; ++i) {
    if (options[i] == kErrorLog) log = static_cast<char*>(values[i]);
    if (options[i] == kErrorLogBytes) bytes = reinterpret_cast<uintptr_t>(values[i]);
  }
  if (log != nullptr && bytes > 0) std::snprintf(log, bytes, "%s", sentence.c_str());
}

Status load_text(DriverState& state, const std::string& text, CudaModule* module) {
  auto parsed = std::make_shared<ptx::Module>();
  TANDEM_TRY(ptx::parse(text, parsed.get()));
  module->text = std::move(parsed);
  return state.device().load(std::as_bytes(std::span(text)), &module->code);
}

CUresult load(const char* name, CudaModule** module, const void* image, unsigned count = 0,
              const int* options = nullptr, void** values = nullptr) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (module == nullptr || image == nullptr) return kInvalidValue;
    auto made = std::make_unique<CudaModule>();
    const int capability = 10 * state.model().compute_major + state.model().compute_minor;
    std::string text;
    Status status = ptx_of(image, capability, &text);
    CUresult result = kNoBinaryForGpu;
    if (status.ok()) {
      status = load_text(state, text, made.get());
      result = kInvalidPtx;
    }
    if (!status.ok()) {
      log_error(count, options, values, status.message);
      return refuse(name, result, status.message);
    }
    const std::lock_guard lock(state.mutex);
    *module = made.get();
    state.modules[made.get()] = std::move(made);
    return kSuccess;
  });
}

CUresult load_file(const char* name, CudaModule** module, const char* path) {
  if (path == nullptr) return kInvalidValue;
  std::ifstream file(path, std::ios::binary);
  if (!file) return refuse(name, kFileNotFound, str_cat("the file \"", path, "\" must be readable: correct the path"));
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  return load(name, module, bytes.c_str());
}

CUresult unload(const char* name, CudaModule* module) {
  return serve(name, Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    const auto found = state.modules.find(module);
    if (found == state.modules.end()) return kInvalidHandle;
    for (const auto& [entry, function] : module->functions) state.functions.erase(function.get());
    state.modules.erase(found);
    return kSuccess;
  });
}

constexpr int32_t kPlainSharedBytes = 48 << 10;

// Decodes the kernel on first use. The caller has the lock.
CUresult find(const char* caller, DriverState& state, CudaModule* module, std::string_view name,
              CudaFunction** function) {
  if (!state.modules.contains(module)) return kInvalidHandle;
  const ptx::Function* const entry = module->text->find(name);
  if (entry == nullptr || !entry->is_entry) return kNotFound;
  std::unique_ptr<CudaFunction>& known = module->functions[std::string(name)];
  if (!known) {
    auto made = std::make_unique<CudaFunction>();
    made->module = module;
    made->name = name;
    Status status = module->code->find(made->name.c_str(), 0, &made->kernel);
    if (status.ok()) status = module->code->attributes(made->kernel, &made->attributes);
    if (!status.ok()) return refuse(caller, kUnsupportedPtx, status.message);
    made->max_dynamic_bytes = std::max(0, kPlainSharedBytes - made->attributes.static_smem_bytes);
    std::copy_n(entry->required_cluster, 3, made->cluster);
    state.functions.insert(made.get());
    known = std::move(made);
  }
  *function = known.get();
  return kSuccess;
}

CUresult get_function(const char* caller, CudaFunction** function, CudaModule* module, const char* name) {
  return serve(caller, Needs::context, [&](DriverState& state) {
    if (function == nullptr || name == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    return find(caller, state, module, name, function);
  });
}

// Variables live with the module's kernels: the first kernel of it knows them.
CUresult get_global(const char* caller, CUdeviceptr* address, size_t* bytes, CudaModule* module, const char* name) {
  return serve(caller, Needs::context, [&](DriverState& state) {
    if (name == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    if (!state.modules.contains(module)) return kInvalidHandle;
    for (const ptx::Function& entry : module->text->functions) {
      if (!entry.is_entry) continue;
      CudaFunction* function = nullptr;
      if (const CUresult result = find(caller, state, module, entry.name, &function); result != kSuccess) return result;
      for (const Buffer& variable : function->program().variables()) {
        if (variable.name != name) continue;
        if (address != nullptr) *address = reinterpret_cast<CUdeviceptr>(variable.address);
        if (bytes != nullptr) *bytes = variable.bytes;
        return kSuccess;
      }
      return kNotFound;
    }
    return kNotFound;
  });
}

template <class F>
void each_entry(const CudaModule& module, F&& f) {
  for (const ptx::Function& function : module.text->functions)
    if (function.is_entry) f(function.name);
}

CUresult count_functions(const char* caller, unsigned* count, CudaModule* module) {
  return serve(caller, Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (!state.modules.contains(module)) return kInvalidHandle;
    *count = 0;
    each_entry(*module, [&](const std::string&) { ++*count; });
    return kSuccess;
  });
}

CUresult enumerate(const char* caller, CudaFunction** functions, unsigned count, CudaModule* module) {
  return serve(caller, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (!state.modules.contains(module)) return kInvalidHandle;
    CUresult result = kSuccess;
    unsigned at = 0;
    each_entry(*module, [&](const std::string& name) {
      if (at < count && result == kSuccess) result = find(caller, state, module, name, &functions[at++]);
    });
    return result;
  });
}

CUresult name_of(const char* caller, const char** name, const CudaFunction* function) {
  return serve(caller, Needs::device, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (name == nullptr || !state.functions.contains(function)) return kInvalidValue;
    *name = function->name.c_str();
    return kSuccess;
  });
}

}  // namespace

TANDEM_DRIVER(cuModuleLoadData, (CudaModule * *module, const void* image)) {
  return load("cuModuleLoadData", module, image);
}
TANDEM_DRIVER(cuModuleLoadDataEx,
              (CudaModule * *module, const void* image, unsigned count, int* options, void** values)) {
  return load("cuModuleLoadDataEx", module, image, count, options, values);
}
TANDEM_DRIVER(cuModuleLoadFatBinary, (CudaModule * *module, const void* image)) {
  return load("cuModuleLoadFatBinary", module, image);
}
TANDEM_DRIVER(cuModuleLoad, (CudaModule * *module, const char* path)) {
  return load_file("cuModuleLoad", module, path);
}
TANDEM_DRIVER(cuModuleUnload, (CudaModule * module)) { return unload("cuModuleUnload", module); }
TANDEM_DRIVER(cuModuleGetLoadingMode, (int* mode)) {
  if (mode == nullptr) return kInvalidValue;
  *mode = 2;  // lazy: kernels are decoded on first use
  return kSuccess;
}
TANDEM_DRIVER(cuModuleGetFunction, (CudaFunction * *function, CudaModule* module, const char* name)) {
  return get_function("cuModuleGetFunction", function, module, name);
}
TANDEM_DRIVER(cuModuleGetFunctionCount, (unsigned* count, CudaModule* module)) {
  return count_functions("cuModuleGetFunctionCount", count, module);
}
TANDEM_DRIVER(cuModuleEnumerateFunctions, (CudaFunction * *functions, unsigned count, CudaModule* module)) {
  return enumerate("cuModuleEnumerateFunctions", functions, count, module);
}
TANDEM_DRIVER(cuModuleGetGlobal_v2, (CUdeviceptr * address, size_t* bytes, CudaModule* module, const char* name)) {
  return get_global("cuModuleGetGlobal", address, bytes, module, name);
}

TANDEM_DRIVER(cuLibraryLoadData, (CudaModule * *library, const void* image, int* options, void** values, unsigned count,
                                  int*, void**, unsigned)) {
  return load("cuLibraryLoadData", library, image, count, options, values);
}
TANDEM_DRIVER(cuLibraryLoadFromFile,
              (CudaModule * *library, const char* path, int*, void**, unsigned, int*, void**, unsigned)) {
  return load_file("cuLibraryLoadFromFile", library, path);
}
TANDEM_DRIVER(cuLibraryUnload, (CudaModule * library)) { return unload("cuLibraryUnload", library); }
TANDEM_DRIVER(cuLibraryGetKernel, (CudaFunction * *kernel, CudaModule* library, const char* name)) {
  return get_function("cuLibraryGetKernel", kernel, library, name);
}
TANDEM_DRIVER(cuLibraryGetKernelCount, (unsigned* count, CudaModule* library)) {
  return count_functions("cuLibraryGetKernelCount", count, library);
}
TANDEM_DRIVER(cuLibraryEnumerateKernels, (CudaFunction * *kernels, unsigned count, CudaModule* library)) {
  return enumerate("cuLibraryEnumerateKernels", kernels, count, library);
}
TANDEM_DRIVER(cuLibraryGetModule, (CudaModule * *module, CudaModule* library)) {
  return serve("cuLibraryGetModule", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (module == nullptr || !state.modules.contains(library)) return kInvalidHandle;
    *module = library;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuLibraryGetGlobal, (CUdeviceptr * address, size_t* bytes, CudaModule* library, const char* name)) {
  return get_global("cuLibraryGetGlobal", address, bytes, library, name);
}
TANDEM_DRIVER(cuLibraryGetManaged, (CUdeviceptr * address, size_t* bytes, CudaModule* library, const char* name)) {
  return get_global("cuLibraryGetManaged", address, bytes, library, name);
}
TANDEM_DRIVER(cuKernelGetFunction, (CudaFunction * *function, CudaFunction* kernel)) {
  return serve("cuKernelGetFunction", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (function == nullptr || !state.functions.contains(kernel)) return kInvalidHandle;
    *function = kernel;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuKernelGetLibrary, (CudaModule * *library, CudaFunction* kernel)) {
  return serve("cuKernelGetLibrary", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (library == nullptr || !state.functions.contains(kernel)) return kInvalidHandle;
    *library = kernel->module;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuFuncGetModule, (CudaModule * *module, CudaFunction* function)) {
  return cuKernelGetLibrary(module, function);
}
TANDEM_DRIVER(cuFuncGetName, (const char** name, const CudaFunction* function)) {
  return name_of("cuFuncGetName", name, function);
}
TANDEM_DRIVER(cuKernelGetName, (const char** name, const CudaFunction* kernel)) {
  return name_of("cuKernelGetName", name, kernel);
}
// The kernel is decoded already.
TANDEM_DRIVER(cuFuncLoad, (CudaFunction*)) {
  return serve("cuFuncLoad", Needs::context, [](DriverState&) { return kSuccess; });
}
TANDEM_DRIVER(cuFuncIsLoaded, (int* loaded, CudaFunction*)) {
  return serve("cuFuncIsLoaded", Needs::context, [&](DriverState&) { return *loaded = 1, kSuccess; });
}

}  // namespace tandem::vgpu::driver
