/* One tensor of a call, read where it lies, in this order,
 *   - through DLPack's C exchange interface of its type (torch from 2.10 on): no Python code, tens of nanoseconds;
 *   - through the buffer protocol (numpy);
 *   - from a description that _arrays.py made of anything else. */
#ifndef TANDEM_PYTHON_OPERAND_H_
#define TANDEM_PYTHON_OPERAND_H_

#include <Python.h>
#include <stdint.h>
#include <tandem/tandem.h>

#include "dlpack/dlpack.h"

enum { kMaxDims = 8 };

/* The buffer protocol. The protocol's layout has not changed since CPython 3.0; the stable ABI names it from 3.11 on.
 */
typedef struct {
  void* buf;
  PyObject* obj;
  Py_ssize_t len, itemsize;
  int readonly, ndim;
  char* format;
  Py_ssize_t *shape, *strides, *suboffsets;
  void* internal;
} Buffer;
enum { kWritable = 0x1, kFormat = 0x4, kStrides = 0x10 | 0x8 };
PyAPI_FUNC(int) PyObject_GetBuffer(PyObject* exporter, Buffer* view, int flags);
PyAPI_FUNC(void) PyBuffer_Release(Buffer* view);

typedef struct {
  tandem_tensor tensor;
  int64_t shape[kMaxDims], strides[kMaxDims];
  Buffer buffer;
  int has_buffer;
} Operand;

/* The result of reading a tensor. kFailed: an exception is set. */
typedef enum { kRead, kFailed, kNeedsDescription, kIsReadOnly } Reading;

static void release(Operand* operand) {
  if (operand->has_buffer) PyBuffer_Release(&operand->buffer);
}

/* torch's fake tensors have no memory. Reading their address through DLPack gives a warning. */
static int is_fake(PyTypeObject* type) {
  PyObject* name = PyObject_GetAttrString((PyObject*)type, "__name__");
  const int fake = name != NULL && PyUnicode_CompareWithASCIIString(name, "FakeTensor") == 0;
  Py_XDECREF(name);
  return fake;
}

/* The exchange interface of a type, or NULL. The first types of a process are remembered; types outlive the process. */
static const DLPackExchangeAPI* exchange_of(PyTypeObject* type) {
  static struct {
    PyTypeObject* type;
    const DLPackExchangeAPI* exchange;
  } known[16];
  int i = 0;
  for (; i < 16 && known[i].type != NULL; ++i)
    if (known[i].type == type) return known[i].exchange;
  const DLPackExchangeAPI* exchange = NULL;
  PyObject* capsule = is_fake(type) ? NULL : PyObject_GetAttrString((PyObject*)type, "__dlpack_c_exchange_api__");
  if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
    exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (exchange != NULL && exchange->header.version.major > 1)
      exchange = (const DLPackExchangeAPI*)exchange->header.prev_api;
    if (exchange != NULL && exchange->dltensor_from_py_object_no_sync == NULL) exchange = NULL;
  }
  PyErr_Clear();
  Py_XDECREF(capsule);
  if (i < 16) {
    Py_INCREF(type);
    known[i].type = type;
    known[i].exchange = exchange;
  }
  return exchange;
}

/* The caller's references keep the tensor alive; its sizes are copied, because another thread may resize it. */
static Reading read_exchange(const DLPackExchangeAPI* exchange, PyObject* object, Operand* o) {
  DLTensor* t = (DLTensor*)&o->tensor; /* bit for bit, as a test of the C interface checks */
  if (exchange->dltensor_from_py_object_no_sync(object, t) != 0) {
    PyErr_Clear();
    return kNeedsDescription;
  }
  if (t->ndim > kMaxDims) return kNeedsDescription;
  int64_t compact = 1;
  for (int32_t d = t->ndim; d-- > 0;) {
    o->shape[d] = t->shape[d];
    o->strides[d] = t->strides != NULL ? t->strides[d] : compact;
    compact *= t->shape[d];
  }
  t->shape = o->shape;
  t->strides = o->strides;
  return kRead;
}

static int dtype_of(const char* format, Py_ssize_t itemsize, tandem_dtype* dtype) {
  if (format == NULL) return 0;
  if (*format == '<' || *format == '=' || *format == '@') ++format; /* little-endian, as every machine served here */
  if (format[0] == 0 || format[1] != 0) return 0;
  dtype->bits = (uint8_t)(8 * itemsize);
  dtype->lanes = 1;
  switch (*format) {
    case 'e':
    case 'f':
    case 'd': dtype->code = TANDEM_FLOAT; return 1;
    case '?': dtype->code = TANDEM_BOOL; return 1;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q': dtype->code = TANDEM_INT; return 1;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q': dtype->code = TANDEM_UINT; return 1;
    default: return 0;
  }
}

static Reading read_buffer(PyObject* object, int written, Operand* o) {
  if (PyObject_GetBuffer(object, &o->buffer, kStrides | kFormat | (written ? kWritable : 0)) != 0) {
    PyErr_Clear();
    if (!written || PyObject_GetBuffer(object, &o->buffer, kStrides | kFormat) != 0) {
      PyErr_Clear();
      return kNeedsDescription;
    }
    PyBuffer_Release(&o->buffer);
    return kIsReadOnly;
  }
  o->has_buffer = 1;
  const Buffer* b = &o->buffer;
  if (b->ndim > kMaxDims || !dtype_of(b->format, b->itemsize, &o->tensor.dtype)) return kNeedsDescription;
  for (int d = 0; d < b->ndim; ++d) {
    if (b->strides[d] % b->itemsize != 0) return kNeedsDescription;
    o->shape[d] = b->shape[d];
    o->strides[d] = b->strides[d] / b->itemsize;
  }
  o->tensor.data = b->buf;
  o->tensor.device.type = TANDEM_CPU;
  o->tensor.ndim = b->ndim;
  o->tensor.shape = o->shape;
  o->tensor.strides = o->strides;
  return kRead;
}

static int64_t integer_at(PyObject* tuple, Py_ssize_t i) {
  PyObject* item = PyTuple_GetItem(tuple, i);
  return item == NULL ? 0 : PyLong_AsLongLong(item);
}

enum { kDescriptionItems = 9, kDescribedOwner = 8 };

/* (address, device type, device index, type code, bits, shape, strides, read-only, owner) */
static Reading read_description(PyObject* tuple, int written, Operand* o) {
  const int whole = PyTuple_Size(tuple) == kDescriptionItems;
  PyObject *shape = whole ? PyTuple_GetItem(tuple, 5) : NULL, *strides = whole ? PyTuple_GetItem(tuple, 6) : NULL;
  if (!whole || !PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_Size(strides) != PyTuple_Size(shape)) {
    PyErr_SetString(PyExc_TypeError, "a description of a tensor must have nine items: use _arrays.describe");
    return kFailed;
  }
  if (PyTuple_Size(shape) > kMaxDims) {
    PyErr_Format(PyExc_ValueError, "a tensor (%zd dimensions) must have at most %d dimensions: reshape the tensor",
                 PyTuple_Size(shape), (int)kMaxDims);
    return kFailed;
  }
  if (written && integer_at(tuple, 7)) return kIsReadOnly;
  o->tensor.data = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, 0));
  o->tensor.device.type = (int32_t)integer_at(tuple, 1);
  o->tensor.device.index = (int32_t)integer_at(tuple, 2);
  o->tensor.dtype.code = (uint8_t)integer_at(tuple, 3);
  o->tensor.dtype.bits = (uint8_t)integer_at(tuple, 4);
  o->tensor.dtype.lanes = 1;
  o->tensor.ndim = (int32_t)PyTuple_Size(shape);
  o->tensor.shape = o->shape;
  o->tensor.strides = o->strides;
  for (int32_t d = 0; d < o->tensor.ndim; ++d) {
    o->shape[d] = integer_at(shape, d);
    o->strides[d] = integer_at(strides, d);
  }
  return PyErr_Occurred() ? kFailed : kRead;
}

static Reading read_tensor(PyObject* object, int written, Operand* o) {
  Reading reading;
  if (PyTuple_Check(object)) {
    reading = read_description(object, written, o);
  } else {
    const DLPackExchangeAPI* exchange = exchange_of(Py_TYPE(object));
    reading = exchange != NULL ? read_exchange(exchange, object, o) : read_buffer(object, written, o);
  }
  for (int d = 0; reading == kRead && d < o->tensor.ndim; ++d)
    if (o->tensor.shape[d] == 0) o->tensor.strides = NULL; /* strides of empty tensors are arbitrary */
  return reading;
}

static void swap(int64_t* a, int64_t* b) {
  const int64_t x = *a;
  *a = *b;
  *b = x;
}

/* (batch, heads, seqlen, head_dim) becomes (batch, seqlen, heads, head_dim). */
static void swap_heads(Operand* o) {
  if (o->tensor.ndim != 4) return;
  swap(&o->shape[1], &o->shape[2]);
  swap(&o->strides[1], &o->strides[2]);
}

static int scattered(const tandem_tensor* t) {
  const int last = t->ndim - 1;
  return last >= 0 && t->strides != NULL && t->shape[last] > 1 && t->strides[last] != 1;
}

/* A GPU reads rows in units of 16 bytes. Rows of other lengths must be padded, which a copy does not do. */
static int off_16_bytes(const tandem_tensor* t) {
  const int last = t->ndim - 1, bytes = t->dtype.bits / 8;
  if (t->device.type != TANDEM_CUDA || last < 0 || t->strides == NULL || t->shape[last] * bytes % 16 != 0) return 0;
  int64_t off = (int64_t)(((uintptr_t)t->data + t->byte_offset) % 16);
  for (int d = 0; d < last; ++d) off |= t->strides[d] * bytes % 16;
  return off != 0;
}

#endif /* TANDEM_PYTHON_OPERAND_H_ */
