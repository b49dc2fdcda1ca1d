// CUDA graphs, as far as tests need them: captured from a stream, launched again and again.
#pragma once

#include "gpu/device.h"

namespace tandem::test {

class Graph {
 public:
  // Captures what is put on the stream until end(), in the mode that allows least. Throws std::runtime_error.
  explicit Graph(gpu::Stream stream);
  Graph(const Graph&) = delete;
  ~Graph();

  void end();
  void launch() const;

 private:
  gpu::Stream stream_;
  void* executable_ = nullptr;
};

}  // namespace tandem::test
