// tandem_tensor is DLPack's DLTensor, bit for bit.
#include "dlpack/dlpack.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "tandem/tandem.h"

namespace {

#define SAME_FIELD(ours, a, theirs, b) \
  static_assert(offsetof(ours, a) == offsetof(theirs, b) && sizeof(ours::a) == sizeof(theirs::b), #a)

static_assert(sizeof(tandem_tensor) == sizeof(DLTensor) && alignof(tandem_tensor) == alignof(DLTensor));
SAME_FIELD(tandem_tensor, data, DLTensor, data);
SAME_FIELD(tandem_tensor, device, DLTensor, device);
SAME_FIELD(tandem_tensor, ndim, DLTensor, ndim);
SAME_FIELD(tandem_tensor, dtype, DLTensor, dtype);
SAME_FIELD(tandem_tensor, shape, DLTensor, shape);
SAME_FIELD(tandem_tensor, strides, DLTensor, strides);
SAME_FIELD(tandem_tensor, byte_offset, DLTensor, byte_offset);
SAME_FIELD(tandem_device, type, DLDevice, device_type);
SAME_FIELD(tandem_device, index, DLDevice, device_id);
SAME_FIELD(tandem_dtype, code, DLDataType, code);
SAME_FIELD(tandem_dtype, bits, DLDataType, bits);
SAME_FIELD(tandem_dtype, lanes, DLDataType, lanes);
static_assert(std::is_signed_v<std::underlying_type_t<DLDeviceType>>);
static_assert(int{TANDEM_CPU} == kDLCPU && int{TANDEM_CUDA} == kDLCUDA);
static_assert(int{TANDEM_INT} == kDLInt && int{TANDEM_UINT} == kDLUInt && int{TANDEM_FLOAT} == kDLFloat);
static_assert(int{TANDEM_BFLOAT} == kDLBfloat && int{TANDEM_BOOL} == kDLBool);

}  // namespace
