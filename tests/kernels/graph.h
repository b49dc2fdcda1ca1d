// CUDA graphs, as far as tests need them: captured from a stream and launched repeatedly.
#pragma once

#include "gpu/device.h"

namespace tandem::test {

class CudaGraph {
 public:
  // Captures the work of the stream until end(), in the strictest mode. Throws std::runtime_error.
  explicit CudaGraph(gpu::Stream stream);
  CudaGraph(const CudaGraph&) = delete;
  ~CudaGraph();

  void end();
  void launch() const;

 private:
  gpu::Stream stream_;
  void* executable_ = nullptr;
};

}  // namespace tandem::test
