/* Reads call_args, a dict from names to values (tandem/_binding.py), into tandem_attention_args. */
#ifndef TANDEM_PYTHON_CALL_ARGS_H_
#define TANDEM_PYTHON_CALL_ARGS_H_

#include <Python.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tandem/tandem.h>

#include "operand.h"
#include "score_mod.h"

typedef enum {
  kTensor,
  kSeed,
  kLength,
  kScale,
  kReal,
  kCount,
  kFlag,
  kAlignment,
  kWindow,
  kMod,
  kOutputOnly /* decides how Python allocates out */
} Kind;

/* The passes by which options.def names a tensor's access and contiguity. */
enum {
  kNone = 0,
  kInput = 0,
  kOther = 0,
  kForward = 1 << TANDEM_FORWARD,
  kBackward = 1 << TANDEM_BACKWARD,
  kBoth = kForward | kBackward
};

/* The names that call_args may have, and the members that they set. q, k and v come first. The caller copies a tensor
 * whose last dimension must be contiguous and is not. */
static struct {
  const char* name;
  Kind kind;
  size_t offset;
  int written;   /* passes that write the tensor */
  int compacted; /* passes that need a contiguous last dimension */
  PyObject* key; /* the interned name */
} fields[] = {
#define TENSOR(member, access, contiguous) \
  {#member, kTensor, offsetof(tandem_attention_args, member), k##access, k##contiguous, NULL},
#define OPTION(member, type, kind, schema) {#member, k##kind, offsetof(tandem_attention_args, member), 0, 0, NULL},
#define ARGUMENT(name, kind, schema) {#name, k##kind, 0, 0, 0, NULL},
#include "problem/options.def"
};

enum {
  kFields = sizeof fields / sizeof fields[0],
#define TENSOR(member, access, contiguous) +1
  kMaxTensors = 1 /* seed */
#include "problem/options.def"
  ,
  kMaxMods = 2
};

static int intern_names(void) {
  for (int i = 0; i < kFields; ++i)
    if ((fields[i].key = PyUnicode_InternFromString(fields[i].name)) == NULL) return 0;
  return 1;
}

/* The field of this name, or -1 with an exception. A call names most arguments in the order of the list, so the search
 * begins with the expected one. */
static int field_of(PyObject* key, int expected) {
  for (int i = expected; i < kFields; ++i)
    if (fields[i].key == key) return i;
  for (int i = 0; i < expected && i < kFields; ++i)
    if (fields[i].key == key) return i;
  for (int i = 0; i < kFields && PyUnicode_Check(key); ++i)
    if (PyUnicode_CompareWithASCIIString(key, fields[i].name) == 0) return i;
  PyErr_Format(PyExc_TypeError, "a call has no %R: correct the name of the argument", key);
  return -1;
}

/* Sets an exception with the rule of an argument and returns 0. The exception shows a short value, else its type. */
static int refuse(PyObject* value, const char* name, const char* rule) {
  const int is_short = PyUnicode_Check(value) || PyLong_Check(value) || PyFloat_Check(value);
  PyErr_Clear();
  PyObject* shown = is_short ? PyObject_Repr(value) : PyObject_GetAttrString((PyObject*)Py_TYPE(value), "__name__");
  if (shown != NULL)
    PyErr_Format(PyLong_Check(value) ? PyExc_ValueError : PyExc_TypeError, "%s (%U) must be %s", name, shown, rule);
  Py_XDECREF(shown);
  return 0;
}

static int read_integer(PyObject* value, const char* name, const char* rule, int64_t* number) {
  PyObject* index = PyNumber_Index(value); /* before Python 3.10 a fraction would be cut */
  *number = index == NULL ? -1 : PyLong_AsLongLong(index);
  Py_XDECREF(index);
  return *number != -1 || !PyErr_Occurred() || refuse(value, name, rule);
}

static int read_real(PyObject* value, const char* name, double* number) {
  *number = PyFloat_AsDouble(value);
  return *number != -1.0 || !PyErr_Occurred() || refuse(value, name, "a number: convert it");
}

static int read_flag(PyObject* value, const char* name, int32_t* flag) {
  const int is_set = value == Py_True         ? 1
                     : value == Py_False      ? 0
                     : PyUnicode_Check(value) ? -1
                                              : PyObject_IsTrue(value);
  *flag = is_set > 0;
  return is_set >= 0 || refuse(value, name, "True or False: pass one of them");
}

static int read_alignment(PyObject* value, int32_t* alignment) {
  const int is_text = PyUnicode_Check(value);
  *alignment = TANDEM_BOTTOM_RIGHT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "bottom_right") == 0) return 1;
  *alignment = TANDEM_TOP_LEFT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "top_left") == 0) return 1;
  *alignment = TANDEM_EXPLICIT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "explicit") == 0) return 1;
  return refuse(value, "alignment", "'bottom_right' or 'top_left': pass one of them");
}

static int read_bound(PyObject* value, const char* name, int32_t bit, int32_t* window, int64_t* bound) {
  if (value == Py_None) return 1;
  *window |= bit;
  return read_integer(value, name, "an integer of at most 64 bits, or None: pass one", bound);
}

static int read_window(PyObject* value, tandem_attention_args* args) {
  if (!PyTuple_Check(value) || PyTuple_Size(value) != 2)
    return refuse(value, "window", "None or (left, right): pass one");
  return read_bound(PyTuple_GetItem(value, 0), "window[0]", TANDEM_WINDOW_LEFT, &args->window, &args->window_left) &&
         read_bound(PyTuple_GetItem(value, 1), "window[1]", TANDEM_WINDOW_RIGHT, &args->window, &args->window_right);
}

/* Reads an option. Returns 0 with an exception if the value has the wrong type. */
static int read_option(PyObject* value, int field, tandem_attention_args* args) {
  void* place = (char*)args + fields[field].offset;
  const char* name = fields[field].name;
  int64_t integer = 0;
  switch (fields[field].kind) {
    case kLength: return read_integer(value, name, "an integer of at most 64 bits: pass one", place);
    case kScale: /* the least number replaces 0, which means "not given" */
      if (!read_real(value, name, place)) return 0;
      if (*(double*)place == 0.0) *(double*)place = DBL_TRUE_MIN;
      return 1;
    case kReal: return read_real(value, name, place);
    case kCount:
      if (!read_integer(value, name, "an integer of at most 32 bits: pass one", &integer)) return 0;
      *(int32_t*)place = (int32_t)integer;
      return integer == (int32_t)integer || refuse(value, name, "an integer of at most 32 bits: pass one");
    case kFlag: return read_flag(value, name, place);
    case kAlignment: return read_alignment(value, place);
    case kWindow: return read_window(value, args);
    default: return 1;
  }
}

/* The seed as a number, or as two: the seed and the offset. Integers count modulo 2^64. */
static int read_seed(PyObject* seed, tandem_attention_args* args) {
  const int is_pair = PyTuple_Check(seed);
  args->dropout_seed = PyLong_AsUnsignedLongLongMask(is_pair ? PyTuple_GetItem(seed, 0) : seed);
  if (is_pair) args->dropout_offset = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(seed, 1));
  return !PyErr_Occurred();
}

/* Flags of run() in addition to the pass. */
enum { kCheck = 2, kHeadsFirst = 4, kPrepare = 8, kServing = 16, kCheckData = 32 };

/* The state of reading call_args. */
typedef struct {
  tandem_attention_args args;
  Operand operands[kMaxTensors];
  int used;
  ReadMod* mods[kMaxMods];
  int mods_used;
  PyObject* q;
  PyObject* scattered; /* the names of the tensors to copy, or NULL */
} Call;

static int note(PyObject** names, PyObject* name) {
  if (*names == NULL && (*names = PyList_New(0)) == NULL) return 0;
  return PyList_Append(*names, name) == 0;
}

static void release_call(Call* call) {
  for (int i = 0; i < call->used; ++i) release(&call->operands[i]);
  for (int i = 0; i < call->mods_used; ++i) release_mod(call->mods[i]);
  Py_XDECREF(call->scattered);
}

/* The request for a tensor that could not be read. */
static PyObject* request_for(Reading reading, int field) {
  if (reading == kNeedsDescription) return Py_BuildValue("(sO)", "describe", fields[field].key);
  return reading == kIsReadOnly ? Py_BuildValue("(sO)", "read-only", fields[field].key) : NULL;
}

/* Reads a tensor into the call. Returns 0 with an exception or with a request for the caller in *request. */
static int read_operand(PyObject* object, int field, long what, Call* call, PyObject** request) {
  if (call->used == kMaxTensors) {
    PyErr_SetString(PyExc_TypeError, "call_args must have each tensor once: omit the rest");
    return 0;
  }
  const int pass = 1 << (what & 1);
  Operand* operand = &call->operands[call->used++];
  memset(operand, 0, sizeof *operand);
  const Reading reading = read_tensor(object, fields[field].written & pass, operand);
  const tandem_tensor* t = &operand->tensor;
  const int is_seed = fields[field].kind == kSeed;
  const int is_int64 = t->dtype.bits == 64 && (t->dtype.code == TANDEM_INT || t->dtype.code == TANDEM_UINT);
  const int is_pair = reading == kRead && t->ndim == 1 && t->shape[0] == 2 && t->strides[0] == 1;
  const int fits = !is_seed || (is_int64 && is_pair);
  if (reading == kFailed) return 0;
  if (reading != kRead || !fits) {
    *request = request_for(fits ? reading : kNeedsDescription, field);
    return 0;
  }
  if (is_seed) {
    call->args.dropout_seed_ptr = (const uint64_t*)((const char*)t->data + t->byte_offset);
    call->args.dropout_offset_ptr = call->args.dropout_seed_ptr + 1;
    return 1;
  }
  if (field == 0) call->q = object;
  if ((what & kHeadsFirst) && field < 3) swap_heads(operand);
  const int is_off = (fields[field].compacted & pass) && (scattered(t) || off_16_bytes(t));
  memcpy((char*)&call->args + fields[field].offset, &t, sizeof t);
  return !is_off || note(&call->scattered, fields[field].key);
}

/* Reads a score_mod or mask_mod into the call; 0 as above. */
static int read_modification(PyObject* object, int field, long what, Call* call, PyObject** request) {
  if (call->mods_used == kMaxMods) {
    PyErr_SetString(PyExc_TypeError, "call_args must have at most one score_mod and one mask_mod: omit the rest");
    return 0;
  }
  ReadMod** mod = &call->mods[call->mods_used++];
  *mod = NULL;
  const Reading reading = read_mod(object, (int)(what & 1), mod);
  if (reading != kRead) {
    *request = request_for(reading, field);
    return 0;
  }
  const tandem_mod* read = &(*mod)->mod;
  memcpy((char*)&call->args + fields[field].offset, &read, sizeof read);
  return 1;
}

/* Reads all of call_args into the call; 0 as above. */
static int read_call_args(PyObject* call_args, long what, Call* call, PyObject** request) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (int expected = 0; PyDict_Next(call_args, &position, &key, &value); ++expected) {
    if (value == Py_None) continue;
    const int field = field_of(key, expected);
    if (field < 0) return 0;
    expected = field;
    const int is_number = PyLong_Check(value) || (PyTuple_Check(value) && PyTuple_Size(value) == 2);
    int fine;
    if (fields[field].kind == kSeed && is_number) {
      fine = read_seed(value, &call->args);
    } else if (fields[field].kind == kTensor || fields[field].kind == kSeed) {
      fine = read_operand(value, field, what, call, request);
    } else if (fields[field].kind == kMod) {
      fine = read_modification(value, field, what, call, request);
    } else {
      fine = read_option(value, field, &call->args);
    }
    if (!fine) return 0;
  }
  return 1;
}

#endif /* TANDEM_PYTHON_CALL_ARGS_H_ */
