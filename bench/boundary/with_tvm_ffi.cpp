#include <tvm/ffi/tvm_ffi.h>

#include "call.h"

static const tandem_tensor* view(DLTensor* x) { return reinterpret_cast<const tandem_tensor*>(x); }  // the same bytes

static int64_t forward(DLTensor* q, DLTensor* k, DLTensor* v, DLTensor* out, double softmax_scale, double softcap,
                       int64_t causal, int64_t window_left, int64_t window_right) {
  return boundary_call(view(q), view(k), view(v), view(out), softmax_scale, softcap, causal, window_left, window_right);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward)
