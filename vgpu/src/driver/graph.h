// Graphs of work, created node by node or captured from streams. The nodes are executed in an order that satisfies
// their dependencies.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "vgpu/src/driver/cuda.h"

namespace tandem::vgpu::driver {

using Work = std::function<CUresult()>;

struct GraphNode {
  enum Type : int { kernel = 0, copy = 1, fill = 2, host = 3, child = 4, empty = 5 };
  Type type = empty;
  Work work;
  std::set<const GraphNode*> after;
};

// CUgraph.
struct Graph {
  std::vector<std::unique_ptr<GraphNode>> nodes;
};

// Streams that record work instead of executing it. Two streams share a capture after one of them waits for an event of
// another.
struct Capture {
  std::shared_ptr<Graph> graph;
  const void* origin = nullptr;  // the stream that must end it
  uint64_t id = 0;
  bool active = true;
};

// Adds the work to the graph that the stream captures. If the stream captures no graph, executes the work.
CUresult submit(const char* name, void* stream, GraphNode::Type type, Work work);
bool is_capturing(void* stream);

}  // namespace tandem::vgpu::driver
