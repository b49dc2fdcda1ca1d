/* The fast way from Python into the C interface: reads tensors where they lie, fills one tandem_attention_args, runs
 * the call without the interpreter lock. Written for the stable ABI of CPython 3.9, so one file serves every later one.
 *
 * tandem/_library.py describes run() and has the same function over ctypes. Tensors are read, in this order,
 *   - through DLPack's C exchange interface of their type (torch from 2.10 on): no Python code, tens of nanoseconds;
 *   - through the buffer protocol (numpy);
 *   - from a description that _arrays.py made of anything else. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tandem/tandem.h>

#include "devices.h"
#include "dlpack/dlpack.h"
#include "threads.h"

enum { kTensors = 20, kSeed = kTensors, kMostDims = 8, kOptions = 14 };
/* Codes of run() beside tandem_status: plus the tensor's index, the GPU's, or the bytes of workspace that are wanted.
 */
enum { kDescribe = 100, kReadOnly = 200, kOpen = 300, kWorkspace = 1000 };

/* The tensors of tandem_attention_args, in its order; the bits say which pass writes them (1 forward, 2 backward). */
static const struct {
  size_t offset;
  int written;
  int copied; /* a last dimension that is not contiguous is reported, for the caller to copy */
} kFields[kTensors] = {
#define FIELD(name, written, copied) \
  { offsetof(tandem_attention_args, name), written, copied }
    FIELD(q, 0, 1),
    FIELD(k, 0, 1),
    FIELD(v, 0, 1),
    FIELD(out, 1, 2),
    FIELD(lse, 1, 0),
    FIELD(dout, 0, 1),
    FIELD(dlse, 0, 0),
    FIELD(dq, 2, 0),
    FIELD(dk, 2, 0),
    FIELD(dv, 2, 0),
    FIELD(bias, 0, 0),
    FIELD(dbias, 2, 0),
    FIELD(sink, 0, 0),
    FIELD(dsink, 2, 0),
    FIELD(alibi_slopes, 0, 0),
    FIELD(cu_seqlens_q, 0, 0),
    FIELD(cu_seqlens_k, 0, 0),
    FIELD(seqused_q, 0, 0),
    FIELD(seqused_k, 0, 0),
    FIELD(page_table, 0, 0),
#undef FIELD
};

/* The buffer protocol. Its layout has not changed since CPython 3.0; the stable ABI names it from 3.11 on. */
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

/* One tensor of a call. */
typedef struct {
  tandem_tensor tensor;
  int64_t shape[kMostDims], strides[kMostDims];
  Buffer buffer;
  int has_buffer;
} Operand;

static void release(Operand* operand) {
  if (operand->has_buffer) PyBuffer_Release(&operand->buffer);
}

/* ---- Reading tensors ------------------------------------------------------------------------------------------- */

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
  PyObject* capsule = PyObject_GetAttrString((PyObject*)type, "__dlpack_c_exchange_api__");
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

/* The caller's references keep the tensor alive; its sizes are copied, lest another thread resize it meanwhile. */
static int read_exchange(const DLPackExchangeAPI* exchange, PyObject* object, int index, Operand* o) {
  DLTensor* t = (DLTensor*)&o->tensor; /* bit for bit; a test of the C interface holds it to that */
  if (exchange->dltensor_from_py_object_no_sync(object, t) != 0) {
    PyErr_Clear();
    return kDescribe + index;
  }
  if (t->ndim > kMostDims) return kDescribe + index;
  int64_t compact = 1;
  for (int32_t d = t->ndim; d-- > 0;) {
    o->shape[d] = t->shape[d];
    o->strides[d] = t->strides != NULL ? t->strides[d] : compact;
    compact *= t->shape[d];
  }
  t->shape = o->shape;
  t->strides = o->strides;
  return 0;
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

static int read_buffer(PyObject* object, int index, int written, Operand* o) {
  if (PyObject_GetBuffer(object, &o->buffer, kStrides | kFormat | (written ? kWritable : 0)) != 0) {
    PyErr_Clear();
    if (!written || PyObject_GetBuffer(object, &o->buffer, kStrides | kFormat) != 0) {
      PyErr_Clear();
      return kDescribe + index;
    }
    PyBuffer_Release(&o->buffer);
    return kReadOnly + index;
  }
  o->has_buffer = 1;
  const Buffer* b = &o->buffer;
  if (b->ndim > kMostDims || !dtype_of(b->format, b->itemsize, &o->tensor.dtype)) return kDescribe + index;
  for (int d = 0; d < b->ndim; ++d) {
    if (b->strides[d] % b->itemsize != 0) return kDescribe + index;
    o->shape[d] = b->shape[d];
    o->strides[d] = b->strides[d] / b->itemsize;
  }
  o->tensor.data = b->buf;
  o->tensor.device.type = TANDEM_CPU;
  o->tensor.ndim = b->ndim;
  o->tensor.shape = o->shape;
  o->tensor.strides = o->strides;
  return 0;
}

static int64_t integer_at(PyObject* tuple, Py_ssize_t i) {
  PyObject* item = PyTuple_GetItem(tuple, i);
  return item == NULL ? 0 : PyLong_AsLongLong(item);
}

/* (address, device type, device index, type code, bits, shape, strides, read-only, owner) */
static int read_description(PyObject* tuple, int index, int written, Operand* o) {
  PyObject *shape = PyTuple_GetItem(tuple, 5), *strides = PyTuple_GetItem(tuple, 6);
  if (PyTuple_Size(tuple) != 9 || !PyTuple_Check(shape) || !PyTuple_Check(strides) || PyTuple_Size(shape) > kMostDims ||
      PyTuple_Size(strides) != PyTuple_Size(shape)) {
    PyErr_SetString(PyExc_TypeError, "a description of a tensor has nine items");
    return -1;
  }
  if (written && integer_at(tuple, 7)) return kReadOnly + index;
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
  return PyErr_Occurred() ? -1 : 0;
}

static int read_tensor(PyObject* object, int index, int written, Operand* o) {
  int code;
  if (PyTuple_Check(object)) {
    code = read_description(object, index, written, o);
  } else {
    const DLPackExchangeAPI* exchange = exchange_of(Py_TYPE(object));
    code = exchange != NULL ? read_exchange(exchange, object, index, o) : read_buffer(object, index, written, o);
  }
  for (int d = 0; code == 0 && d < o->tensor.ndim; ++d)
    if (o->tensor.shape[d] == 0) o->tensor.strides = NULL; /* those of no elements may be anything */
  return code;
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

/* A GPU reads rows in pieces of 16 bytes. A row that is not made of these must be padded, which a copy does not do. */
static int off_16_bytes(const tandem_tensor* t) {
  const int last = t->ndim - 1, bytes = t->dtype.bits / 8;
  if (t->device.type != TANDEM_CUDA || last < 0 || t->strides == NULL || t->shape[last] * bytes % 16 != 0) return 0;
  int64_t off = (int64_t)(((uintptr_t)t->data + t->byte_offset) % 16);
  for (int d = 0; d < last; ++d) off |= t->strides[d] * bytes % 16;
  return off != 0;
}

/* ---- The call --------------------------------------------------------------------------------------------------- */

static void read_window(PyObject* value, int bit, int32_t* window, int64_t* bound) {
  if (value == Py_None) return;
  *bound = PyLong_AsLongLong(value);
  *window |= bit;
}

/* (max_seqlen_q, max_seqlen_k, softmax_scale, softcap, causal, alignment, window_left, window_right, dropout_p, seed,
 *  offset, num_splits, deterministic, batch_invariant) */
static int read_options(PyObject* options, tandem_attention_args* args) {
  PyObject* o[kOptions];
  if (!PyTuple_Check(options) || PyTuple_Size(options) != kOptions) {
    PyErr_SetString(PyExc_TypeError, "options is a tuple of 14");
    return -1;
  }
  for (int i = 0; i < kOptions; ++i) o[i] = PyTuple_GetItem(options, i);
  args->max_seqlen_q = PyLong_AsLongLong(o[0]);
  args->max_seqlen_k = PyLong_AsLongLong(o[1]);
  args->softmax_scale = PyFloat_AsDouble(o[2]);
  args->softcap = PyFloat_AsDouble(o[3]);
  args->causal = (int32_t)PyLong_AsLong(o[4]);
  args->alignment = (int32_t)PyLong_AsLong(o[5]);
  read_window(o[6], TANDEM_WINDOW_LEFT, &args->window, &args->window_left);
  read_window(o[7], TANDEM_WINDOW_RIGHT, &args->window, &args->window_right);
  args->dropout_p = PyFloat_AsDouble(o[8]);
  args->dropout_seed = (uint64_t)PyLong_AsLongLong(o[9]);
  args->dropout_offset = (uint64_t)PyLong_AsLongLong(o[10]);
  args->num_splits = (int32_t)PyLong_AsLong(o[11]);
  args->deterministic = (int32_t)PyLong_AsLong(o[12]);
  args->batch_invariant = (int32_t)PyLong_AsLong(o[13]);
  return PyErr_Occurred() ? -1 : 0;
}

/* What a thread keeps from one call to the next, since asking for the size is as long as a small call. */
typedef struct {
  size_t bytes;
  max_align_t memory[];
} Workspace;
enum { kMostKept = 4 << 20 };
static pthread_key_t kept_workspace;

static tandem_status execute_in(const Workspace* w, tandem_context* context, tandem_pass pass,
                                const tandem_attention_args* args) {
  void* memory = w != NULL ? (void*)w->memory : NULL;
  const size_t bytes = w != NULL ? w->bytes : 0;
  return pass == TANDEM_FORWARD ? tandem_forward(context, args, memory, bytes, NULL)
                                : tandem_backward(context, args, memory, bytes, NULL);
}

static tandem_status execute(tandem_pass pass, const tandem_attention_args* args) {
  tandem_context* context = tandem_python_context();
  Workspace* kept = pthread_getspecific(kept_workspace);
  tandem_status status = execute_in(kept, context, pass, args);
  if (status != TANDEM_WORKSPACE_TOO_SMALL) return status;
  size_t bytes = 0;
  status = tandem_workspace_size(context, pass, args, &bytes);
  if (status != TANDEM_OK) return status;
  Workspace* larger = malloc(sizeof *larger + bytes);
  if (larger != NULL) larger->bytes = bytes;
  status = execute_in(larger, context, pass, args);
  if (larger != NULL && bytes <= kMostKept && pthread_setspecific(kept_workspace, larger) == 0) {
    free(kept);
  } else {
    free(larger);
  }
  return status;
}

/* ---- The call on a GPU ------------------------------------------------------------------------------------------ */

typedef struct {
  void* workspace; /* the device's, from the caller; NULL: none yet */
  size_t bytes;
  void* stream;
} Gpu;

/* The stream that the library of this tensor works on. */
static int find_stream(PyObject* tensor, int32_t device, void** stream) {
  if (PyTuple_Check(tensor)) tensor = PyTuple_GetItem(tensor, 8);
  const DLPackExchangeAPI* exchange = exchange_of(Py_TYPE(tensor));
  if (exchange == NULL || exchange->current_work_stream == NULL) {
    PyErr_SetString(PyExc_TypeError,
                    "q lies on a GPU, but its type does not tell the current stream (DLPack's C "
                    "exchange interface): use tensors of torch 2.10 or newer");
    return -1;
  }
  return exchange->current_work_stream(kDLCUDA, device, stream) == 0 ? 0 : -1;
}

/* A small workspace is asked for before the call: its memory then is there at once. */
static long long execute_on_gpu(tandem_pass pass, const tandem_attention_args* args, const Gpu* gpu) {
  const int32_t index = args->q->device.index;
  const size_t known = tandem_python_gpu_workspace(index);
  if (gpu->workspace == NULL && known != 0) return kWorkspace + (long long)known;
  tandem_context* context = tandem_python_gpu(index);
  tandem_status status = pass == TANDEM_FORWARD
                             ? tandem_forward(context, args, gpu->workspace, gpu->bytes, gpu->stream)
                             : tandem_backward(context, args, gpu->workspace, gpu->bytes, gpu->stream);
  if (status != TANDEM_WORKSPACE_TOO_SMALL) return status;
  size_t wanted = 0;
  status = tandem_workspace_size(context, pass, args, &wanted);
  if (status != TANDEM_OK) return status;
  if (wanted <= kMostKept) tandem_python_gpu_wants(index, wanted);
  return kWorkspace + (long long)wanted;
}

/* ---- From Python ------------------------------------------------------------------------------------------------ */

enum { kCheck = 2, kHeadsFirst = 4, kPrepare = 8 }; /* beside the pass */

/* The code of a call whose tensors have been read, or -1 with an exception. */
static long long serve(long what, const tandem_attention_args* args, PyObject* q, Gpu* gpu) {
  const tandem_pass pass = (tandem_pass)(what & 1);
  const int on_gpu = args->q != NULL && args->q->device.type == TANDEM_CUDA;
  const int32_t index = on_gpu ? args->q->device.index : 0;
  if (on_gpu && (index < 0 || index >= kMostDevices)) {
    PyErr_Format(PyExc_ValueError, "q's device (cuda:%d) must be one of the first %d", (int)index, (int)kMostDevices);
    return -1;
  }
  if (on_gpu && tandem_python_gpu(index) == NULL) return kOpen + index;
  if (on_gpu && find_stream(q, index, &gpu->stream) != 0) return -1;
  long long code = 0;
  Py_BEGIN_ALLOW_THREADS;
  tandem_context* context = on_gpu ? tandem_python_gpu(index) : tandem_python_context();
  if (what & kCheck) {
    code = tandem_check(context, pass, args);
  } else if (what & kPrepare) {
    code = tandem_prepare(context, pass, args);
  } else {
    code = on_gpu ? execute_on_gpu(pass, args, gpu) : (long long)execute(pass, args);
  }
  Py_END_ALLOW_THREADS;
  return code;
}

/* run(what, tensors, options, workspace = 0, bytes = 0) -> code; see _library.py */
static PyObject* run(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  if ((count != 3 && count != 5) || !PyTuple_Check(arguments[1]) || PyTuple_Size(arguments[1]) != kTensors + 1) {
    PyErr_SetString(PyExc_TypeError, "run(what, 21 tensors, 14 options), or with workspace, bytes");
    return NULL;
  }
  const long what = PyLong_AsLong(arguments[0]);
  const tandem_pass pass = (tandem_pass)(what & 1);
  PyObject* tensors = arguments[1];
  Gpu gpu = {0};
  if (count == 5) gpu = (Gpu){.workspace = PyLong_AsVoidPtr(arguments[3]), .bytes = PyLong_AsSize_t(arguments[4])};

  tandem_attention_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  if (PyErr_Occurred() || read_options(arguments[2], &args) != 0) return NULL;

  Operand operands[kTensors + 1];
  int used = 0;
  long long code = 0;
  long to_copy = 0;
  for (int i = 0; i <= kTensors && code == 0; ++i) {
    PyObject* object = PyTuple_GetItem(tensors, i);
    if (object == Py_None) continue;
    Operand* operand = &operands[used++];
    memset(operand, 0, sizeof *operand);
    const int written = i < kTensors && (kFields[i].written >> pass & 1);
    code = read_tensor(object, i, written, operand);
    if (code != 0) break;
    if ((what & kHeadsFirst) && i < 3) swap_heads(operand);
    if (i == kSeed) {
      if (operand->tensor.ndim != 1 || operand->tensor.shape[0] != 2 || operand->tensor.dtype.bits != 64) {
        code = kDescribe + i;
        break;
      }
      args.dropout_seed_ptr = (const uint64_t*)((const char*)operand->tensor.data + operand->tensor.byte_offset);
      args.dropout_offset_ptr = args.dropout_seed_ptr + 1;
      continue;
    }
    const int copied = kFields[i].copied == 1 || (kFields[i].copied == 2 && pass == TANDEM_BACKWARD);
    if (copied && (scattered(&operand->tensor) || off_16_bytes(&operand->tensor))) to_copy |= 1L << i;
    memcpy((char*)&args + kFields[i].offset, &(const tandem_tensor*){&operand->tensor}, sizeof(tandem_tensor*));
  }
  if (code == 0 && to_copy == 0) code = serve(what, &args, PyTuple_GetItem(tensors, 0), &gpu);
  for (int i = 0; i < used; ++i) release(&operands[i]);
  if (code < 0) return NULL;
  return PyLong_FromLongLong(code != 0 ? code : -to_copy);
}

static int32_t gpu_index(PyObject* number) {
  const long index = PyLong_AsLong(number);
  if (!PyErr_Occurred() && (index < 0 || index >= kMostDevices))
    PyErr_Format(PyExc_ValueError, "a GPU's index (%ld) must be at least 0 and below %d", index, (int)kMostDevices);
  return PyErr_Occurred() ? -1 : (int32_t)index;
}

static PyObject* open_gpu(PyObject* module, PyObject* number) {
  (void)module;
  const int32_t index = gpu_index(number);
  if (index < 0) return NULL;
  tandem_status status;
  Py_BEGIN_ALLOW_THREADS;
  status = tandem_python_open_gpu(index);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(status);
}

static PyObject* gpu_description(PyObject* module, PyObject* number) {
  (void)module;
  const int32_t index = gpu_index(number);
  if (index < 0) return NULL;
  tandem_context* context = tandem_python_gpu(index);
  if (context == NULL) Py_RETURN_NONE;
  return PyUnicode_FromString(tandem_context_description(context));
}

static PyObject* last_error(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return PyUnicode_DecodeUTF8(tandem_last_error(), (Py_ssize_t)strlen(tandem_last_error()), "replace");
}

static PyObject* use_openmp_of(PyObject* module, PyObject* path) {
  (void)module;
  PyObject* bytes = NULL;
  if (!PyUnicode_FSConverter(path, &bytes)) return NULL;
  const int found = tandem_python_use_openmp_of(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  return PyBool_FromLong(found);
}

static PyObject* description(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  return PyUnicode_FromString(tandem_context_description(tandem_python_context()));
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, 0x0080 /* METH_FASTCALL: named by the stable ABI from 3.10 on */,
     "run(what, tensors, options, workspace = 0, bytes = 0) -> code"},
    {"last_error", last_error, METH_NOARGS, "the sentence of this thread's last call that failed"},
    {"use_openmp_of", use_openmp_of, METH_O, "use_openmp_of(library) -> whether calls run on its threads from now on"},
    {"description", description, METH_NOARGS, "one line about what will run on the CPU"},
    {"open_gpu", open_gpu, METH_O, "open_gpu(index) -> a tandem_status: makes what calls on that GPU need"},
    {"gpu_description", gpu_description, METH_O, "one line about what will run there; None before it has been opened"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tandem._native",
    .m_doc = "Calls of the C interface; see tandem/_library.py.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
  if (pthread_key_create(&kept_workspace, free) != 0) return PyErr_NoMemory();
  PyObject* module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddStringConstant(module, "version", tandem_version()) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
