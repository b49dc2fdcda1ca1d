/* A score_mod or mask_mod of a call: (expression, ((name, number or tensor, tensor for its gradient or None), ...)). */
#ifndef TANDEM_PYTHON_SCORE_MOD_H_
#define TANDEM_PYTHON_SCORE_MOD_H_

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <tandem/tandem.h>

#include "operand.h"

/* CPython has exported this function since 3.3; the stable ABI names it from 3.10 on. */
PyAPI_FUNC(const char*) PyUnicode_AsUTF8AndSize(PyObject* text, Py_ssize_t* size);

/* The state of reading a mod. The state points into its own operands and must not move. */
typedef struct {
  tandem_mod mod;
  tandem_mod_scalar* scalars;
  tandem_mod_tensor* tensors;
  Operand* operands; /* tensors and their gradients */
  int used;
} ReadMod;

static void release_mod(ReadMod* read) {
  if (read == NULL) return;
  for (int i = 0; i < read->used; ++i) release(&read->operands[i]);
  free(read->scalars);
  free(read->tensors);
  free(read->operands);
  free(read);
}

static ReadMod* new_mod(size_t names) {
  ReadMod* read = calloc(1, sizeof *read);
  if (read == NULL) return NULL;
  read->scalars = calloc(names + 1, sizeof *read->scalars);
  read->tensors = calloc(names + 1, sizeof *read->tensors);
  read->operands = calloc(2 * names + 1, sizeof *read->operands);
  read->mod = (tandem_mod){.size = sizeof read->mod, .scalars = read->scalars, .tensors = read->tensors};
  if (read->scalars != NULL && read->tensors != NULL && read->operands != NULL) return read;
  release_mod(read);
  return NULL;
}

static int read_scalar(const char* name, PyObject* number, ReadMod* read) {
  const int type = PyBool_Check(number) ? TANDEM_BOOL : PyLong_Check(number) ? TANDEM_INT : TANDEM_FLOAT;
  const double value = PyFloat_AsDouble(number);
  if (value == -1.0 && PyErr_Occurred()) return 0;
  read->scalars[read->mod.scalar_count++] = (tandem_mod_scalar){.name = name, .type = type, .value = value};
  return 1;
}

static Reading read_part(PyObject* tensor, int written, ReadMod* read, const tandem_tensor** part) {
  Operand* operand = &read->operands[read->used++];
  *part = &operand->tensor;
  return read_tensor(tensor, written, operand);
}

/* If it returns kFailed, a Python exception is set. */
static Reading read_name(PyObject* item, int pass, ReadMod* read) {
  PyObject *name_object, *value, *gradient;
  if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "UOO", &name_object, &value, &gradient)) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_TypeError, "a name of a mod must be a tuple: pass (name, value, gradient)");
    return kFailed;
  }
  const char* name = PyUnicode_AsUTF8AndSize(name_object, NULL);
  if (name == NULL) return kFailed;
  if (PyLong_Check(value) || PyFloat_Check(value)) return read_scalar(name, value, read) ? kRead : kFailed;
  tandem_mod_tensor* tensor = &read->tensors[read->mod.tensor_count++];
  tensor->name = name;
  const Reading reading = read_part(value, 0, read, &tensor->tensor);
  if (reading != kRead || gradient == Py_None || pass != TANDEM_BACKWARD) return reading;
  return read_part(gradient, 1, read, &tensor->gradient);
}

/* The caller releases *mod in every case. */
static Reading read_mod(PyObject* tuple, int pass, ReadMod** mod) {
  PyObject *text, *names;
  if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "UO!", &text, &PyTuple_Type, &names)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a mod must be a tuple: pass (expression, names)");
    return kFailed;
  }
  const Py_ssize_t count = PyTuple_Size(names);
  ReadMod* read = *mod = new_mod((size_t)count);
  if (read == NULL) {
    PyErr_NoMemory();
    return kFailed;
  }
  if ((read->mod.text = PyUnicode_AsUTF8AndSize(text, NULL)) == NULL) return kFailed;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Reading reading = read_name(PyTuple_GetItem(names, i), pass, read);
    if (reading != kRead) return reading;
  }
  return kRead;
}

#endif /* TANDEM_PYTHON_SCORE_MOD_H_ */
