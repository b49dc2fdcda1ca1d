#include "kernels/graph.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "gpu/driver/api.h"
#include "support/gpu.h"

namespace tandem::test {
namespace {

using gpu::cuda::CUresult;

// Driver functions that the library does not use. Each call makes the stream's context current, as the driver requires.
struct Driver {
  gpu::cuda::Api api;
  CUresult (*begin)(void* stream, int mode) = nullptr;
  CUresult (*end)(void* stream, void** graph) = nullptr;
  CUresult (*instantiate)(void** executable, void* graph, unsigned long long flags) = nullptr;
  CUresult (*launch)(void* executable, void* stream) = nullptr;
  CUresult (*destroy)(void* graph) = nullptr;
  CUresult (*destroy_executable)(void* executable) = nullptr;

  Driver() {
    require(gpu::cuda::load("libcuda.so.1", &api));
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    };
    find("cuStreamBeginCapture_v2", begin);
    find("cuStreamEndCapture", end);
    find("cuGraphInstantiateWithFlags", instantiate);
    find("cuGraphLaunch", launch);
    find("cuGraphDestroy", destroy);
    find("cuGraphExecDestroy", destroy_executable);
    gpu::cuda::CUcontext context = nullptr;  // retained to the end of the process
    check(api.cuDevicePrimaryCtxRetain(&context, 0), "retaining the context");
    check(api.cuCtxPushCurrent(context), "making the context current");
  }
  void check(CUresult result, const char* what) const { require(api.check(result, what)); }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

}  // namespace

CudaGraph::CudaGraph(gpu::Stream stream) : stream_(stream) {
  constexpr int global = 0;
  driver().check(driver().begin(stream_, global), "beginning a capture");
}

void CudaGraph::end() {
  void* graph = nullptr;
  driver().check(driver().end(stream_, &graph), "ending a capture");
  driver().check(driver().instantiate(&executable_, graph, 0), "instantiating a graph");
  driver().check(driver().destroy(graph), "destroying a graph");
}

void CudaGraph::launch() const { driver().check(driver().launch(executable_, stream_), "launching a graph"); }

CudaGraph::~CudaGraph() {
  if (executable_ != nullptr) (void)driver().destroy_executable(executable_);
}

}  // namespace tandem::test
