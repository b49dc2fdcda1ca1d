// A stream of a green context, whose kernels run on a few multiprocessors.
#pragma once

#include "gpu/device.h"

namespace tandem::day_one {

class GreenContext {
 public:
  // Throws std::runtime_error if the driver has no green contexts or refuses one.
  explicit GreenContext(unsigned sms);
  GreenContext(const GreenContext&) = delete;
  ~GreenContext();

  gpu::Stream stream() const { return stream_; }

 private:
  gpu::Stream stream_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace tandem::day_one
