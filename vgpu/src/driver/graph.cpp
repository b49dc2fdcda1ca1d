#include "vgpu/src/driver/graph.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {

extern "C" {
CUresult cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                        void** extra);
CUresult cuMemcpy2D_v2(const Copy2D* how);
CUresult cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height);
CUresult cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height);
CUresult cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned value, size_t width, size_t height);
}

namespace {

// CUgraphExec.
struct GraphExec {
  struct Step {
    const GraphNode* node;
    Work work;
  };
  std::vector<Step> steps;
};

struct Graphs {
  std::map<const Graph*, std::shared_ptr<Graph>> graphs;
  std::map<const GraphExec*, std::shared_ptr<GraphExec>> execs;
};
// The mutex of the state guards these graphs.
Graphs& all() {
  static auto* const graphs = new Graphs;
  return *graphs;
}

template <class Body>
CUresult with_graph(const char* name, const Graph* graph, Body&& body) {
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    const auto found = all().graphs.find(graph);
    return found == all().graphs.end() ? kInvalidValue : body(*found->second);
  });
}

bool owns(const Graph& graph, const GraphNode* node) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const auto& each) { return each.get() == node; });
}

// Sorts nodes so that each follows its dependencies; false: the dependencies have a cycle.
bool sort_nodes(const Graph& graph, std::vector<GraphExec::Step>* steps) {
  std::set<const GraphNode*> done;
  steps->clear();
  for (size_t before = SIZE_MAX; steps->size() != before;) {
    before = steps->size();
    for (const auto& node : graph.nodes) {
      if (done.contains(node.get())) continue;
      if (!std::includes(done.begin(), done.end(), node->after.begin(), node->after.end())) continue;
      done.insert(node.get());
      steps->push_back({node.get(), node->work});
    }
  }
  return steps->size() == graph.nodes.size();
}

CUresult execute(const std::vector<GraphExec::Step>& steps) {
  for (const GraphExec::Step& step : steps)
    if (const CUresult result = step.work ? step.work() : kSuccess; result != kSuccess) return result;
  return kSuccess;
}

CUresult add_node(const char* name, GraphNode** made, Graph* graph, const GraphNode* const* after, size_t count,
                  GraphNode::Type type, Work work) {
  return with_graph(name, graph, [&](Graph& to) {
    if (made == nullptr || (count > 0 && after == nullptr)) return kInvalidValue;
    auto node = std::make_unique<GraphNode>();
    node->type = type;
    node->work = std::move(work);
    for (const GraphNode* each : std::span(after, count)) {
      if (!owns(to, each))
        return refuse(name, kInvalidValue, "a dependency must be a node of the same graph: correct the dependency");
      node->after.insert(each);
    }
    *made = node.get();
    to.nodes.push_back(std::move(node));
    return kSuccess;
  });
}

// The common members of CUDA_KERNEL_NODE_PARAMS and cudaKernelNodeParams.
struct KernelNode {
  CudaFunction* function;
  unsigned grid[3], block[3], shared_bytes;
  void **parameters, **extra;
};
static_assert(sizeof(KernelNode) == 56 && offsetof(KernelNode, parameters) == 40);

// The parameters may change after the call, so that the node keeps their values.
CUresult make_launch(const char* name, const KernelNode* how, Work* work) {
  return serve(name, Needs::context, [&](DriverState& state) {
    if (how == nullptr) return kInvalidValue;
    if (how->extra != nullptr)
      return refuse(name, kNotSupported, "extra must be null: pass kernelParams, an address for each parameter");
    const std::lock_guard lock(state.mutex);
    if (!state.functions.contains(how->function)) return kInvalidHandle;
    const Program& program = how->function->program();
    if (how->parameters == nullptr && !program.function().parameters.empty()) return kInvalidValue;
    auto block = keep_parameters(program, how->parameters);
    *work = [how = *how, block, &program] {
      std::vector<void*> addresses = addresses_of(program, *block);
      return cuLaunchKernel(how.function, how.grid[0], how.grid[1], how.grid[2], how.block[0], how.block[1],
                            how.block[2], how.shared_bytes, nullptr, addresses.data(), nullptr);
    };
    return kSuccess;
  });
}

// CUDA_MEMCPY3D; memory: as in Copy2D.
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
static_assert(sizeof(Copy3D) == 200 && offsetof(Copy3D, width) == 176);

CUresult copy(const Copy3D& how) {
  const auto side = [](const Copy3D::Side& from, size_t plane) {
    return Copy2D::Side{
        from.x, from.y + (from.z + plane) * from.height, from.memory, from.host, from.device, from.array, from.pitch};
  };
  for (size_t plane = 0; plane < how.depth; ++plane) {
    const Copy2D rows{side(how.from, plane), side(how.to, plane), how.width, how.height};
    if (const CUresult result = cuMemcpy2D_v2(&rows); result != kSuccess) return result;
  }
  return kSuccess;
}

// CUDA_MEMSET_NODE_PARAMS.
struct Fill {
  CUdeviceptr to;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
};

CUresult fill(const Fill& how) {
  switch (how.element_bytes) {
    case 1: return cuMemsetD2D8_v2(how.to, how.pitch, static_cast<unsigned char>(how.value), how.width, how.height);
    case 2: return cuMemsetD2D16_v2(how.to, how.pitch, static_cast<unsigned short>(how.value), how.width, how.height);
    case 4: return cuMemsetD2D32_v2(how.to, how.pitch, how.value, how.width, how.height);
    default: return kInvalidValue;
  }
}

struct HostNode {
  void (*function)(void*);
  void* data;
};

template <class Params>
CUresult add_with(const char* name, GraphNode** node, Graph* graph, const GraphNode* const* after, size_t count,
                  GraphNode::Type type, const Params* how, CUresult (*act)(const Params&)) {
  if (how == nullptr) return kInvalidValue;
  return add_node(name, node, graph, after, count, type, [how = *how, act] { return act(how); });
}

CUresult instantiate(const char* name, GraphExec** exec, const Graph* graph) {
  return with_graph(name, graph, [&](Graph& from) {
    if (exec == nullptr) return kInvalidValue;
    auto made = std::make_shared<GraphExec>();
    if (!sort_nodes(from, &made->steps))
      return refuse(name, kInvalidValue,
                    "the dependencies of the graph's nodes must have no cycle: remove one dependency");
    *exec = made.get();
    all().execs[made.get()] = std::move(made);
    return kSuccess;
  });
}

template <class Body>
CUresult with_exec(const char* name, const GraphExec* exec, Body&& body) {
  return serve(name, Needs::context, [&](DriverState& state) {
    std::shared_ptr<GraphExec> found;
    {
      const std::lock_guard lock(state.mutex);
      if (const auto at = all().execs.find(exec); at != all().execs.end()) found = at->second;
    }
    return found ? body(state, found) : kInvalidValue;
  });
}

CUresult begin_capture(const char* name, Stream* stream, Graph* graph) {
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (!state.streams.contains(stream))
      return refuse(
          name, kStreamCaptureUnsupported,
          "the stream must be created by the program: call cuStreamCreate, because default streams cannot be captured");
    if (stream->capture) return kIllegalState;
    std::shared_ptr<Graph> into;
    if (graph != nullptr) {
      const auto found = all().graphs.find(graph);
      if (found == all().graphs.end()) return kInvalidValue;
      into = found->second;
    } else {
      into = std::make_shared<Graph>();
    }
    stream->capture = std::make_shared<Capture>(Capture{into, stream, state.next_id++, true});
    return kSuccess;
  });
}

}  // namespace

bool is_capturing(void* stream) {
  DriverState& state = DriverState::get();
  const std::lock_guard lock(state.mutex);
  const auto* const known = static_cast<const Stream*>(stream);
  return state.streams.contains(known) && known->capture != nullptr;
}

CUresult submit(const char* name, void* stream, GraphNode::Type type, Work work) {
  if (!is_capturing(stream)) return work();
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    std::vector<std::unique_ptr<GraphNode>>& nodes = static_cast<Stream*>(stream)->capture->graph->nodes;
    auto node = std::make_unique<GraphNode>();
    node->type = type;
    node->work = std::move(work);
    // The order of the calls satisfies every order that streams and events require.
    if (!nodes.empty()) node->after.insert(nodes.back().get());
    nodes.push_back(std::move(node));
    return kSuccess;
  });
}

// ---- capture ----

TANDEM_DRIVER(cuStreamBeginCapture_v2, (Stream * stream, int)) {
  return begin_capture("cuStreamBeginCapture", stream, nullptr);
}
TANDEM_DRIVER(cuStreamBeginCaptureToGraph, (Stream * stream, Graph* graph, void*, void*, size_t, int)) {
  return graph == nullptr ? kInvalidValue : begin_capture("cuStreamBeginCaptureToGraph", stream, graph);
}
TANDEM_DRIVER(cuStreamEndCapture, (Stream * stream, Graph** graph)) {
  return serve("cuStreamEndCapture", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (!state.streams.contains(stream) || graph == nullptr) return kInvalidValue;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return kIllegalState;
    if (capture->origin != stream) return kStreamCaptureUnmatched;
    capture->active = false;
    for (const Stream* each : state.streams)
      if (each->capture == capture) const_cast<Stream*>(each)->capture = nullptr;
    *graph = capture->graph.get();
    all().graphs[*graph] = capture->graph;
    return kSuccess;
  });
}

// ---- graphs and their nodes ----

TANDEM_DRIVER(cuGraphCreate, (Graph * *graph, unsigned flags)) {
  return serve("cuGraphCreate", Needs::context, [&](DriverState& state) {
    if (graph == nullptr || flags != 0) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    auto made = std::make_shared<Graph>();
    *graph = made.get();
    all().graphs[made.get()] = std::move(made);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuGraphDestroy, (Graph * graph)) {
  return with_graph("cuGraphDestroy", graph, [&](Graph&) { return all().graphs.erase(graph), kSuccess; });
}
TANDEM_DRIVER(cuGraphAddKernelNode_v2,
              (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count, const KernelNode* how)) {
  Work work;
  const CUresult result = make_launch("cuGraphAddKernelNode", how, &work);
  if (result != kSuccess) return result;
  return add_node("cuGraphAddKernelNode", node, graph, after, count, GraphNode::kernel, std::move(work));
}
TANDEM_DRIVER(cuGraphAddMemcpyNode, (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count,
                                     const Copy3D* how, void*)) {
  return add_with("cuGraphAddMemcpyNode", node, graph, after, count, GraphNode::copy, how, copy);
}
TANDEM_DRIVER(cuGraphAddMemsetNode,
              (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count, const Fill* how, void*)) {
  return add_with("cuGraphAddMemsetNode", node, graph, after, count, GraphNode::fill, how, fill);
}
TANDEM_DRIVER(cuGraphAddHostNode,
              (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count, const HostNode* how)) {
  return add_with<HostNode>("cuGraphAddHostNode", node, graph, after, count, GraphNode::host, how,
                            [](const HostNode& host) { return host.function(host.data), kSuccess; });
}
TANDEM_DRIVER(cuGraphAddEmptyNode, (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count)) {
  return add_node("cuGraphAddEmptyNode", node, graph, after, count, GraphNode::empty, {});
}
TANDEM_DRIVER(cuGraphAddChildGraphNode,
              (GraphNode * *node, Graph* graph, const GraphNode* const* after, size_t count, const Graph* child)) {
  std::vector<GraphExec::Step> steps;
  const CUresult result = with_graph("cuGraphAddChildGraphNode", child,
                                     [&](Graph& from) { return sort_nodes(from, &steps) ? kSuccess : kInvalidValue; });
  if (result != kSuccess) return result;
  return add_node("cuGraphAddChildGraphNode", node, graph, after, count, GraphNode::child,
                  [steps = std::move(steps)] { return execute(steps); });
}
TANDEM_DRIVER(cuGraphAddDependencies_v2,
              (Graph * graph, const GraphNode* const* from, GraphNode* const* to, const void*, size_t count)) {
  return with_graph("cuGraphAddDependencies", graph, [&](Graph& of) {
    for (size_t i = 0; i < count; ++i)
      if (!owns(of, from[i]) || !owns(of, to[i])) return kInvalidValue;
    for (size_t i = 0; i < count; ++i) to[i]->after.insert(from[i]);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuGraphGetNodes, (Graph * graph, GraphNode** nodes, size_t* count)) {
  return with_graph("cuGraphGetNodes", graph, [&](Graph& of) {
    if (count == nullptr) return kInvalidValue;
    if (nodes != nullptr)
      for (size_t i = 0; i < *count; ++i) nodes[i] = i < of.nodes.size() ? of.nodes[i].get() : nullptr;
    *count = nodes == nullptr ? of.nodes.size() : std::min(*count, of.nodes.size());
    return kSuccess;
  });
}
TANDEM_DRIVER(cuGraphNodeGetType, (const GraphNode* node, int* type)) {
  return serve("cuGraphNodeGetType", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    for (const auto& [graph, owner] : all().graphs) {
      if (!owns(*graph, node) || type == nullptr) continue;
      *type = node->type;
      return kSuccess;
    }
    return kInvalidValue;
  });
}

// ---- executable graphs ----

TANDEM_DRIVER(cuGraphInstantiateWithFlags, (GraphExec * *exec, const Graph* graph, unsigned long long)) {
  return instantiate("cuGraphInstantiate", exec, graph);
}
TANDEM_DRIVER(cuGraphInstantiate_v2, (GraphExec * *exec, const Graph* graph, void*, char*, size_t)) {
  return instantiate("cuGraphInstantiate", exec, graph);
}
TANDEM_DRIVER(cuGraphInstantiateWithParams, (GraphExec * *exec, const Graph* graph, void*)) {
  return instantiate("cuGraphInstantiateWithParams", exec, graph);
}
TANDEM_DRIVER(cuGraphExecDestroy, (GraphExec * exec)) {
  return with_exec("cuGraphExecDestroy", exec, [&](DriverState& state, const auto&) {
    const std::lock_guard lock(state.mutex);
    return all().execs.erase(exec), kSuccess;
  });
}
TANDEM_DRIVER(cuGraphUpload, (GraphExec * exec, void*)) {
  return with_exec("cuGraphUpload", exec, [](DriverState&, const auto&) { return kSuccess; });
}
TANDEM_DRIVER(cuGraphLaunch, (GraphExec * exec, void* stream)) {
  return with_exec("cuGraphLaunch", exec, [&](DriverState&, const std::shared_ptr<GraphExec>& found) {
    return submit("cuGraphLaunch", stream, GraphNode::child, [found] { return execute(found->steps); });
  });
}
TANDEM_DRIVER(cuGraphExecKernelNodeSetParams_v2, (GraphExec * exec, const GraphNode* node, const KernelNode* how)) {
  Work work;
  const CUresult result = make_launch("cuGraphExecKernelNodeSetParams", how, &work);
  if (result != kSuccess) return result;
  return with_exec("cuGraphExecKernelNodeSetParams", exec, [&](DriverState& state, const auto& found) {
    const std::lock_guard lock(state.mutex);
    for (GraphExec::Step& step : found->steps) {
      if (step.node != node) continue;
      step.work = std::move(work);
      return kSuccess;
    }
    return kInvalidValue;
  });
}
// result: cudaGraphExecUpdateResult, and the nodes of an error. A graph with other nodes is refused.
TANDEM_DRIVER(cuGraphExecUpdate_v2, (GraphExec * exec, const Graph* graph, int* result)) {
  return with_exec("cuGraphExecUpdate", exec, [&](DriverState&, const auto& found) {
    return with_graph("cuGraphExecUpdate", graph, [&](Graph& from) {
      constexpr int kUpdated = 0, kTopologyChanged = 2;
      constexpr auto kUpdateFailed = static_cast<CUresult>(910);
      std::vector<GraphExec::Step> steps;
      const bool sorted = sort_nodes(from, &steps) && steps.size() == found->steps.size();
      if (result != nullptr) *result = sorted ? kUpdated : kTopologyChanged;
      if (!sorted) return kUpdateFailed;
      found->steps = std::move(steps);
      return kSuccess;
    });
  });
}

TANDEM_DRIVER_ALIAS(cuStreamBeginCapture_v2_ptsz, cuStreamBeginCapture_v2);
TANDEM_DRIVER_ALIAS(cuStreamEndCapture_ptsz, cuStreamEndCapture);
TANDEM_DRIVER_ALIAS(cuGraphLaunch_ptsz, cuGraphLaunch);
TANDEM_DRIVER_ALIAS(cuGraphUpload_ptsz, cuGraphUpload);

}  // namespace tandem::vgpu::driver
