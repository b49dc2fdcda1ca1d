/* A hand-written module for the stable ABI: python/native/native.c reduced to this one call. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* buffer protocol's names; native.c has them for 3.9 */
#include <Python.h>
#include <string.h>

#include "call.h"
#include "dlpack/dlpack.h"

typedef struct {
  tandem_tensor tensor;
  int64_t strides[8];
  DLManagedTensorVersioned* managed;
  Py_buffer buffer;
} Operand;

static const DLPackExchangeAPI* exchange_of(PyTypeObject* type) {
  static PyTypeObject* known_type;
  static const DLPackExchangeAPI* known;
  if (type == known_type) return known;
  PyObject* capsule = PyObject_GetAttrString((PyObject*)type, "__dlpack_c_exchange_api__");
  known = capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  PyErr_Clear();
  Py_XDECREF(capsule);
  known_type = type;
  return known;
}

static int read_operand(PyObject* object, Operand* o) {
  const DLPackExchangeAPI* exchange = exchange_of(Py_TYPE(object));
  if (exchange != NULL) {
    if (exchange->managed_tensor_from_py_object_no_sync(object, &o->managed) != 0) return 0;
    memcpy(&o->tensor, &o->managed->dl_tensor, sizeof o->tensor);
    return 1;
  }
  Py_buffer* b = &o->buffer;
  if (PyObject_GetBuffer(object, b, PyBUF_STRIDES | PyBUF_FORMAT) != 0 || b->ndim > 8 || b->format[0] != 'f') return 0;
  for (int i = 0; i < b->ndim; ++i) o->strides[i] = b->strides[i] / b->itemsize;
  o->tensor =
      (tandem_tensor){b->buf, {TANDEM_CPU, 0}, b->ndim, {TANDEM_FLOAT, 32, 1}, (int64_t*)b->shape, o->strides, 0};
  return 1;
}

static PyObject* forward(PyObject* module, PyObject* const* a, Py_ssize_t count) {
  (void)module;
  Operand o[4] = {0};
  int status = -1, read = count == 9;
  for (int i = 0; i < 4 && read; ++i) read = read_operand(a[i], &o[i]);
  if (read) {
    const double softmax_scale = PyFloat_AsDouble(a[4]), softcap = PyFloat_AsDouble(a[5]);
    const long long causal = PyLong_AsLongLong(a[6]), left = PyLong_AsLongLong(a[7]), right = PyLong_AsLongLong(a[8]);
    Py_BEGIN_ALLOW_THREADS;
    status = boundary_call(&o[0].tensor, &o[1].tensor, &o[2].tensor, &o[3].tensor, softmax_scale, softcap, causal, left,
                           right);
    Py_END_ALLOW_THREADS;
  }
  for (int i = 0; i < 4; ++i) {
    if (o[i].managed != NULL) o[i].managed->deleter(o[i].managed);
    if (o[i].buffer.obj != NULL) PyBuffer_Release(&o[i].buffer);
  }
  return PyErr_Occurred() ? NULL : PyLong_FromLong(status);
}

static PyMethodDef methods[] = {{"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "with_c", NULL, -1, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_with_c(void) { return PyModule_Create(&definition); }
