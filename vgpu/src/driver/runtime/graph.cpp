// Graphs and stream capture, implemented by the driver's functions.
#include "vgpu/src/driver/runtime/runtime.h"

namespace tandem::vgpu::driver::runtime {

struct KernelNode {
  void* function;
  unsigned grid[3], block[3], shared_bytes;
  void **parameters, **extra;
};

extern "C" {
CUresult cuStreamBeginCapture_v2(void* stream, int mode);
CUresult cuStreamBeginCaptureToGraph(void* stream, void* graph, void* after, void* edges, size_t count, int mode);
CUresult cuStreamEndCapture(void* stream, void** graph);
CUresult cuGraphCreate(void** graph, unsigned flags);
CUresult cuGraphDestroy(void* graph);
CUresult cuGraphAddKernelNode_v2(void** node, void* graph, void* const* after, size_t count, const KernelNode* how);
CUresult cuGraphAddMemcpyNode(void** node, void* graph, void* const* after, size_t count, const void* how,
                              void* context);
CUresult cuGraphAddMemsetNode(void** node, void* graph, void* const* after, size_t count, const void* how,
                              void* context);
CUresult cuGraphAddHostNode(void** node, void* graph, void* const* after, size_t count, const void* how);
CUresult cuGraphAddEmptyNode(void** node, void* graph, void* const* after, size_t count);
CUresult cuGraphAddChildGraphNode(void** node, void* graph, void* const* after, size_t count, void* child);
CUresult cuGraphAddDependencies_v2(void* graph, void* const* from, void* const* to, const void* edges, size_t count);
CUresult cuGraphGetNodes(void* graph, void** nodes, size_t* count);
CUresult cuGraphNodeGetType(void* node, int* type);
CUresult cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags);
CUresult cuGraphExecDestroy(void* exec);
CUresult cuGraphUpload(void* exec, void* stream);
CUresult cuGraphLaunch(void* exec, void* stream);
CUresult cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const KernelNode* how);
CUresult cuGraphExecUpdate_v2(void* exec, void* graph, int* result);
}

namespace {

// CUDA_MEMCPY3D.
struct Copy3D {
  struct Side {
    size_t x, y, z, level;
    unsigned memory;
    const void* host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, height;
  };
  Side from, to;
  size_t width, height, depth;
};
constexpr unsigned kUnified = 4;

Copy3D::Side side_of(const void* at, size_t pitch, size_t height) {
  Copy3D::Side side{};
  side.memory = kUnified;
  side.device = reinterpret_cast<CUdeviceptr>(at);
  side.pitch = pitch;
  side.height = height;
  return side;
}

// cudaMemcpy3DParms.
struct CopyParameters {
  struct Side {
    void* array;
    size_t x, y, z;
    void* at;
    size_t pitch, width, height;
  };
  Side from, to;
  size_t width, height, depth;
  int kind;
};

CUresult add_copy(void** node, void* graph, void* const* after, size_t count, const CopyParameters* how) {
  if (how == nullptr) return kInvalidValue;
  if (how->from.array != nullptr || how->to.array != nullptr)
    return refuse("cudaGraphAddMemcpyNode", kNotSupported, "copies of arrays are not served: use linear memory");
  const auto side = [](const CopyParameters::Side& from) {
    Copy3D::Side to = side_of(from.at, from.pitch, from.height);
    to.x = from.x, to.y = from.y, to.z = from.z;
    return to;
  };
  const Copy3D copy{side(how->from), side(how->to), how->width, how->height, how->depth};
  return cuGraphAddMemcpyNode(node, graph, after, count, &copy, nullptr);
}

CUresult add_row(void** node, void* graph, void* const* after, size_t count, void* to, const void* from, size_t bytes) {
  const Copy3D copy{side_of(from, bytes, 1), side_of(to, bytes, 1), bytes, 1, 1};
  return cuGraphAddMemcpyNode(node, graph, after, count, &copy, nullptr);
}

template <class Use>
CUresult with_kernel(const KernelNode* how, Use&& use) {
  if (how == nullptr) return kInvalidValue;
  KernelNode found = *how;
  const CUresult result = find_kernel(how->function, &found.function);
  return result == kSuccess ? use(found) : result;
}

}  // namespace

TANDEM_RUNTIME(cudaStreamBeginCapture, (void* stream, int mode), cuStreamBeginCapture_v2(stream, mode));
TANDEM_RUNTIME(cudaStreamBeginCaptureToGraph,
               (void* stream, void* graph, void* after, void* edges, size_t count, int mode),
               cuStreamBeginCaptureToGraph(stream, graph, after, edges, count, mode));
TANDEM_RUNTIME(cudaStreamEndCapture, (void* stream, void** graph), cuStreamEndCapture(stream, graph));

TANDEM_RUNTIME(cudaGraphCreate, (void** graph, unsigned flags), cuGraphCreate(graph, flags));
TANDEM_RUNTIME(cudaGraphDestroy, (void* graph), cuGraphDestroy(graph));
TANDEM_RUNTIME(cudaGraphAddKernelNode,
               (void** node, void* graph, void* const* after, size_t count, const KernelNode* how),
               with_kernel(how, [&](const KernelNode& found) {
                 return cuGraphAddKernelNode_v2(node, graph, after, count, &found);
               }));
TANDEM_RUNTIME(cudaGraphAddMemcpyNode,
               (void** node, void* graph, void* const* after, size_t count, const CopyParameters* how),
               add_copy(node, graph, after, count, how));
TANDEM_RUNTIME(cudaGraphAddMemcpyNode1D,
               (void** node, void* graph, void* const* after, size_t count, void* to, const void* from, size_t bytes,
                int),
               add_row(node, graph, after, count, to, from, bytes));
TANDEM_RUNTIME(cudaGraphAddMemsetNode, (void** node, void* graph, void* const* after, size_t count, const void* how),
               cuGraphAddMemsetNode(node, graph, after, count, how, nullptr));
TANDEM_RUNTIME(cudaGraphAddHostNode, (void** node, void* graph, void* const* after, size_t count, const void* how),
               cuGraphAddHostNode(node, graph, after, count, how));
TANDEM_RUNTIME(cudaGraphAddEmptyNode, (void** node, void* graph, void* const* after, size_t count),
               cuGraphAddEmptyNode(node, graph, after, count));
TANDEM_RUNTIME(cudaGraphAddChildGraphNode, (void** node, void* graph, void* const* after, size_t count, void* child),
               cuGraphAddChildGraphNode(node, graph, after, count, child));
TANDEM_RUNTIME(cudaGraphAddDependencies,
               (void* graph, void* const* from, void* const* to, const void* edges, size_t count),
               cuGraphAddDependencies_v2(graph, from, to, edges, count));
TANDEM_RUNTIME(cudaGraphGetNodes, (void* graph, void** nodes, size_t* count), cuGraphGetNodes(graph, nodes, count));
TANDEM_RUNTIME(cudaGraphNodeGetType, (void* node, int* type), cuGraphNodeGetType(node, type));

TANDEM_RUNTIME(cudaGraphInstantiate, (void** exec, void* graph, unsigned long long flags),
               cuGraphInstantiateWithFlags(exec, graph, flags));
TANDEM_RUNTIME(cudaGraphInstantiateWithFlags, (void** exec, void* graph, unsigned long long flags),
               cuGraphInstantiateWithFlags(exec, graph, flags));
TANDEM_RUNTIME(cudaGraphInstantiateWithParams, (void** exec, void* graph, void*),
               cuGraphInstantiateWithFlags(exec, graph, 0));
TANDEM_RUNTIME(cudaGraphExecDestroy, (void* exec), cuGraphExecDestroy(exec));
TANDEM_RUNTIME(cudaGraphUpload, (void* exec, void* stream), cuGraphUpload(exec, stream));
TANDEM_RUNTIME(cudaGraphLaunch, (void* exec, void* stream), cuGraphLaunch(exec, stream));
TANDEM_RUNTIME(cudaGraphExecKernelNodeSetParams, (void* exec, void* node, const KernelNode* how),
               with_kernel(how, [&](const KernelNode& found) {
                 return cuGraphExecKernelNodeSetParams_v2(exec, node, &found);
               }));
TANDEM_RUNTIME(cudaGraphExecUpdate, (void* exec, void* graph, int* result), cuGraphExecUpdate_v2(exec, graph, result));

TANDEM_RUNTIME_ALIAS(cudaStreamBeginCapture_ptsz, cudaStreamBeginCapture);
TANDEM_RUNTIME_ALIAS(cudaStreamBeginCaptureToGraph_ptsz, cudaStreamBeginCaptureToGraph);
TANDEM_RUNTIME_ALIAS(cudaStreamEndCapture_ptsz, cudaStreamEndCapture);
TANDEM_RUNTIME_ALIAS(cudaGraphInstantiateWithParams_ptsz, cudaGraphInstantiateWithParams);
TANDEM_RUNTIME_ALIAS(cudaGraphLaunch_ptsz, cudaGraphLaunch);
TANDEM_RUNTIME_ALIAS(cudaGraphUpload_ptsz, cudaGraphUpload);

}  // namespace tandem::vgpu::driver::runtime
