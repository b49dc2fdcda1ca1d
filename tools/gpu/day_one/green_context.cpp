#include "green_context.h"

#include <stdexcept>
#include <string>
#include <type_traits>

#include "driver_function.h"
#include "gpu/driver/api.h"
#include "support/gpu.h"

namespace tandem::day_one {
namespace {

using gpu::cuda::CUdevice;
using gpu::cuda::CUresult;

struct alignas(16) Resource {
  unsigned char bytes[256];  // more than CUdevResource has in CUDA 12.4 to 13.0
};

template <class Function>
Function find(const char* name) {
  void* const function = driver_function(name);
  if (function == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(function);
}
void check(CUresult result, const char* what) {
  if (result != gpu::cuda::kSuccess)
    throw std::runtime_error(std::string(what) + " returned error " + std::to_string(result));
}

}  // namespace

GreenContext::GreenContext(unsigned sms) {
  constexpr int kSms = 1;  // CU_DEV_RESOURCE_TYPE_SM
  constexpr unsigned kDefaultStream = 1, kNonBlocking = 1;
  Resource all{}, part{}, rest{};
  unsigned groups = 1;
  void* description = nullptr;
  check(find<CUresult (*)(CUdevice, Resource*, int)>("cuDeviceGetDevResource")(0, &all, kSms),
        "cuDeviceGetDevResource");
  check(find<CUresult (*)(Resource*, unsigned*, const Resource*, Resource*, unsigned, unsigned)>(
            "cuDevSmResourceSplitByCount")(&part, &groups, &all, &rest, 0, sms),
        "cuDevSmResourceSplitByCount");
  check(find<CUresult (*)(void**, Resource*, unsigned)>("cuDevResourceGenerateDesc")(&description, &part, 1),
        "cuDevResourceGenerateDesc");
  check(find<CUresult (*)(void**, void*, CUdevice, unsigned)>("cuGreenCtxCreate")(&context_, description, 0,
                                                                                  kDefaultStream),
        "cuGreenCtxCreate");
  check(find<CUresult (*)(gpu::Stream*, void*, unsigned, int)>("cuGreenCtxStreamCreate")(&stream_, context_,
                                                                                         kNonBlocking, 0),
        "cuGreenCtxStreamCreate");
}

GreenContext::~GreenContext() {
  (void)find<CUresult (*)(gpu::Stream)>("cuStreamDestroy_v2")(stream_);
  (void)find<CUresult (*)(void*)>("cuGreenCtxDestroy")(context_);
}

}  // namespace tandem::day_one
