#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "call.h"

namespace nb = nanobind;
using Array = nb::ndarray<>;

static tandem_tensor view(const Array& x) {
  const auto dtype = x.dtype();
  return {x.data(),
          {x.device_type(), x.device_id()},
          (int32_t)x.ndim(),
          {dtype.code, dtype.bits, dtype.lanes},
          const_cast<int64_t*>(x.shape_ptr()),
          const_cast<int64_t*>(x.stride_ptr()),
          0};
}

static int forward(Array q, Array k, Array v, Array out, double softmax_scale, double softcap, int64_t causal,
                   int64_t window_left, int64_t window_right) {
  const tandem_tensor t[] = {view(q), view(k), view(v), view(out)};
  nb::gil_scoped_release unlocked;
  return boundary_call(&t[0], &t[1], &t[2], &t[3], softmax_scale, softcap, causal, window_left, window_right);
}

NB_MODULE(with_nanobind, m) { m.def("forward", &forward); }
