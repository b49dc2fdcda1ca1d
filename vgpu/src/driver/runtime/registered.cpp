// Registrations that nvcc generates before main(): fat binaries, their kernels and variables. Addresses identify
// kernels and variables in the program. A module is loaded on first use.
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "vgpu/src/driver/runtime/runtime.h"

namespace tandem::vgpu::driver::runtime {

extern "C" {
CUresult cuModuleLoadData(void** module, const void* image);
CUresult cuModuleUnload(void* module);
CUresult cuModuleGetFunction(void** function, void* module, const char* name);
CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, void* module, const char* name);
}

namespace {

struct Binary {
  const void* image = nullptr;
  void* module = nullptr;
  std::map<void**, std::string> managed;  // pointers that the program has to managed variables
};

struct Symbol {
  Binary* binary = nullptr;
  std::string name;
};

// Programs register before any constructor of this library has run, and unregister after every destructor.
struct Registry {
  std::mutex mutex;
  std::deque<Binary> binaries;
  std::map<const void*, Symbol> symbols;
};
Registry& registry() {
  static auto* const one = new Registry;
  return *one;
}

CUresult load(Binary* binary) {
  if (binary->module != nullptr) return kSuccess;
  if (const CUresult result = cuModuleLoadData(&binary->module, binary->image); result != kSuccess) return result;
  for (const auto& [place, name] : binary->managed) {
    CUdeviceptr address = 0;
    if (cuModuleGetGlobal_v2(&address, nullptr, binary->module, name.c_str()) == kSuccess)
      *place = reinterpret_cast<void*>(address);
  }
  return kSuccess;
}

template <class Find>
CUresult find(const void* symbol, CUresult otherwise, Find&& of_module) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.symbols.find(symbol);
  if (found == all.symbols.end()) return otherwise;
  const CUresult result = load(found->second.binary);
  return result != kSuccess ? result : of_module(found->second.binary->module, found->second.name.c_str());
}

// `kernel<<<...>>>` stores this for the stub of the kernel.
struct Configuration {
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
std::vector<Configuration>& configurations() {
  thread_local std::vector<Configuration> stack;
  return stack;
}

}  // namespace

CUresult find_kernel(const void* symbol, void** function) {
  const CUresult result = find(symbol, kInvalidDeviceFunction, [&](void* module, const char* name) {
    return cuModuleGetFunction(function, module, name);
  });
  if (result != kInvalidDeviceFunction) return result;
  *function = const_cast<void*>(symbol);  // a cudaKernel_t, which the driver knows or refuses
  return kSuccess;
}

CUresult find_variable(const void* symbol, CUdeviceptr* address, size_t* bytes) {
  return find(symbol, kInvalidSymbol,
              [&](void* module, const char* name) { return cuModuleGetGlobal_v2(address, bytes, module, name); });
}

extern "C" {
#define TANDEM_EXPORTED [[gnu::visibility("default")]]

TANDEM_EXPORTED void** __cudaRegisterFatBinary(const void* image) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.binaries.push_back({image, nullptr, {}});
  return reinterpret_cast<void**>(&all.binaries.back());
}
TANDEM_EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
// At exit the driver prints the findings, and frees all memory.
TANDEM_EXPORTED void __cudaUnregisterFatBinary(void**) {}

TANDEM_EXPORTED void __cudaRegisterFunction(void** binary, const char* symbol, char*, const char* name, int, void*,
                                            void*, void*, void*, int*) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.symbols[symbol] = {reinterpret_cast<Binary*>(binary), name};
}
TANDEM_EXPORTED void __cudaRegisterVar(void** binary, char* symbol, char*, const char* name, int, size_t, int, int) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.symbols[symbol] = {reinterpret_cast<Binary*>(binary), name};
}
TANDEM_EXPORTED void __cudaRegisterManagedVar(void** binary, void** place, char*, const char* name, int, size_t, int,
                                              int) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto* const owner = reinterpret_cast<Binary*>(binary);
  owner->managed[place] = name;
  all.symbols[place] = {owner, name};
}
TANDEM_EXPORTED char __cudaInitModule(void** binary) {
  if (make_ready() != kSuccess) return 0;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return load(reinterpret_cast<Binary*>(binary)) == kSuccess ? 1 : 0;
}

TANDEM_EXPORTED unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void* stream) {
  configurations().push_back({grid, block, shared_bytes, stream});
  return 0;
}
TANDEM_EXPORTED CUresult __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared_bytes, void** stream) {
  if (configurations().empty()) return remember(kInvalidConfiguration);
  const Configuration last = configurations().back();
  configurations().pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *stream = last.stream;
  return kSuccess;
}
}

TANDEM_RUNTIME(__cudaGetKernel, (void** kernel, const void* symbol), find_kernel(symbol, kernel));
TANDEM_RUNTIME(cudaGetKernel, (void** kernel, const void* symbol), find_kernel(symbol, kernel));
TANDEM_RUNTIME(cudaGetFuncBySymbol, (void** function, const void* symbol), find_kernel(symbol, function));
TANDEM_RUNTIME(cudaGetSymbolAddress, (CUdeviceptr * address, const void* symbol),
               find_variable(symbol, address, nullptr));
TANDEM_RUNTIME(cudaGetSymbolSize, (size_t * bytes, const void* symbol), [&] {
  CUdeviceptr address = 0;
  return find_variable(symbol, &address, bytes);
}());

}  // namespace tandem::vgpu::driver::runtime
