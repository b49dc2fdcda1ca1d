/* A call's call_args, by tandem/_binding.py a dict from names to values, read into tandem_attention_args. */
#ifndef TANDEM_PYTHON_CALL_ARGS_H_
#define TANDEM_PYTHON_CALL_ARGS_H_

#include <Python.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tandem/tandem.h>

#include "score_mod.h"
#include "operand.h"

typedef enum { kTensor, kSeed, kLength, kScale, kReal, kCount, kFlag, kAlignment, kWindow, kMod, kNotOfTheCall } Kind;
enum { kForward = 1 << TANDEM_FORWARD, kBackward = 1 << TANDEM_BACKWARD };

/* What a call_args may have, by name, and where it goes. q, k and v come first. */
static struct {
  const char* name;
  Kind kind;
  size_t offset;
  int written;   /* the passes that write this tensor */
  int compacted; /* the passes that need its last dimension contiguous: the caller then copies it */
  PyObject* key; /* the name, interned: nearly every call_args has this very object */
} fields[] = {
#define FIELD(name, kind) \
  { #name, kind, offsetof(tandem_attention_args, name), 0, 0, NULL }
#define TENSOR(name, written, compacted) \
  { #name, kTensor, offsetof(tandem_attention_args, name), written, compacted, NULL }
    TENSOR(q, 0, kForward | kBackward),
    TENSOR(k, 0, kForward | kBackward),
    TENSOR(v, 0, kForward | kBackward),
    TENSOR(bias, 0, 0),
    TENSOR(sink, 0, 0),
    TENSOR(alibi_slopes, 0, 0),
    TENSOR(cu_seqlens_q, 0, 0),
    TENSOR(cu_seqlens_k, 0, 0),
    TENSOR(seqused_q, 0, 0),
    TENSOR(seqused_k, 0, 0),
    TENSOR(page_table, 0, 0),
    TENSOR(diagonal_offsets, 0, 0),
    TENSOR(kv_num_blocks, 0, 0),
    TENSOR(kv_indices, 0, 0),
    TENSOR(full_kv_num_blocks, 0, 0),
    TENSOR(full_kv_indices, 0, 0),
    {"seed", kSeed, 0, 0, 0, NULL},
    FIELD(max_seqlen_q, kLength),
    FIELD(max_seqlen_k, kLength),
    FIELD(softmax_scale, kScale),
    FIELD(softcap, kReal),
    FIELD(causal, kFlag),
    FIELD(alignment, kAlignment),
    FIELD(window, kWindow),
    FIELD(dropout_p, kReal),
    FIELD(num_splits, kCount),
    FIELD(deterministic, kFlag),
    FIELD(batch_invariant, kFlag),
    FIELD(diagonal_offset, kLength),
    FIELD(accumulate, kFlag),
    FIELD(score_mod, kMod),
    FIELD(mask_mod, kMod),
    FIELD(mask_block_q, kLength),
    FIELD(mask_block_k, kLength),
    FIELD(blocks_of_mask_mod, kFlag),
    {"float32_out", kNotOfTheCall, 0, 0, 0, NULL}, /* out has the type */
    {"layout_of_q", kNotOfTheCall, 0, 0, 0, NULL}, /* out has the strides */
    TENSOR(out, kForward, kBackward),
    TENSOR(lse, kForward, 0),
    TENSOR(max_scores, kForward, 0),
    TENSOR(dout, 0, kBackward),
    TENSOR(dlse, 0, 0),
    TENSOR(dq, kBackward, 0),
    TENSOR(dk, kBackward, 0),
    TENSOR(dv, kBackward, 0),
    TENSOR(dbias, kBackward, 0),
    TENSOR(dsink, kBackward, 0),
#undef TENSOR
#undef FIELD
};
enum { kFields = sizeof fields / sizeof fields[0], kMaxTensors = 27, kMaxMods = 2 };

static int intern_names(void) {
  for (int i = 0; i < kFields; ++i)
    if ((fields[i].key = PyUnicode_InternFromString(fields[i].name)) == NULL) return 0;
  return 1;
}

/* The field of this name, or -1 with an exception. Records are written in the table's order, so the search begins with
 * the one expected. */
static int field_of(PyObject* key, int expected) {
  for (int i = expected; i < kFields; ++i)
    if (fields[i].key == key) return i;
  for (int i = 0; i < expected && i < kFields; ++i)
    if (fields[i].key == key) return i;
  for (int i = 0; i < kFields && PyUnicode_Check(key); ++i)
    if (PyUnicode_CompareWithASCIIString(key, fields[i].name) == 0) return i;
  PyErr_Format(PyExc_TypeError, "a call has no %R", key);
  return -1;
}

/* Says what an argument must be: 0, for the caller to return. It shows the value where that is short, else its type. */
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
  return *number != -1.0 || !PyErr_Occurred() || refuse(value, name, "a number");
}

static int read_flag(PyObject* value, const char* name, int32_t* flag) {
  const int is_set = value == Py_True         ? 1
                     : value == Py_False      ? 0
                     : PyUnicode_Check(value) ? -1
                                              : PyObject_IsTrue(value);
  *flag = is_set > 0;
  return is_set >= 0 || refuse(value, name, "True or False");
}

static int read_alignment(PyObject* value, int32_t* alignment) {
  const int is_text = PyUnicode_Check(value);
  *alignment = TANDEM_BOTTOM_RIGHT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "bottom_right") == 0) return 1;
  *alignment = TANDEM_TOP_LEFT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "top_left") == 0) return 1;
  *alignment = TANDEM_EXPLICIT;
  if (is_text && PyUnicode_CompareWithASCIIString(value, "explicit") == 0) return 1;
  return refuse(value, "alignment", "'bottom_right' or 'top_left'");
}

static int read_bound(PyObject* value, const char* name, int32_t bit, int32_t* window, int64_t* bound) {
  if (value == Py_None) return 1;
  *window |= bit;
  return read_integer(value, name, "an integer of at most 64 bits, or None", bound);
}

static int read_window(PyObject* value, tandem_attention_args* args) {
  if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) return refuse(value, "window", "None or (left, right)");
  return read_bound(PyTuple_GetItem(value, 0), "window[0]", TANDEM_WINDOW_LEFT, &args->window, &args->window_left) &&
         read_bound(PyTuple_GetItem(value, 1), "window[1]", TANDEM_WINDOW_RIGHT, &args->window, &args->window_right);
}

/* Everything but tensors. 0 with an exception where the value is no such thing. */
static int read_option(PyObject* value, int field, tandem_attention_args* args) {
  void* place = (char*)args + fields[field].offset;
  const char* name = fields[field].name;
  int64_t integer = 0;
  switch (fields[field].kind) {
    case kLength: return read_integer(value, name, "an integer of at most 64 bits", place);
    case kScale: /* the least number serves for 0, which the C interface takes for "not given" */
      if (!read_real(value, name, place)) return 0;
      if (*(double*)place == 0.0) *(double*)place = DBL_TRUE_MIN;
      return 1;
    case kReal: return read_real(value, name, place);
    case kCount:
      if (!read_integer(value, name, "an integer of at most 32 bits", &integer)) return 0;
      *(int32_t*)place = (int32_t)integer;
      return integer == (int32_t)integer || refuse(value, name, "an integer of at most 32 bits");
    case kFlag: return read_flag(value, name, place);
    case kAlignment: return read_alignment(value, place);
    case kWindow: return read_window(value, args);
    default: return 1;
  }
}

/* The seed as a number, or as two: the seed and the offset. Any integers, modulo 2^64. */
static int read_seed(PyObject* seed, tandem_attention_args* args) {
  const int is_pair = PyTuple_Check(seed);
  args->dropout_seed = PyLong_AsUnsignedLongLongMask(is_pair ? PyTuple_GetItem(seed, 0) : seed);
  if (is_pair) args->dropout_offset = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(seed, 1));
  return !PyErr_Occurred();
}

/* What run() is asked beside the pass. */
enum { kCheck = 2, kHeadsFirst = 4, kPrepare = 8 };

/* A call_args as it is being read. */
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

/* What the caller must do where a tensor could not be read. */
static PyObject* request_for(Reading reading, int field) {
  if (reading == kNeedsDescription) return Py_BuildValue("(sO)", "describe", fields[field].key);
  return reading == kIsReadOnly ? Py_BuildValue("(sO)", "read-only", fields[field].key) : NULL;
}

/* Puts a tensor into the call. 0 with an exception, or with what the caller must do first in *request. */
static int read_operand(PyObject* object, int field, long what, Call* call, PyObject** request) {
  if (call->used == kMaxTensors) {
    PyErr_SetString(PyExc_TypeError, "a call has too many tensors");
    return 0;
  }
  const int pass = 1 << (what & 1);
  Operand* operand = &call->operands[call->used++];
  memset(operand, 0, sizeof *operand);
  const Reading reading = read_tensor(object, fields[field].written & pass, operand);
  const tandem_tensor* t = &operand->tensor;
  const int is_seed = fields[field].kind == kSeed;
  const int fits = !is_seed || (t->ndim == 1 && t->shape[0] == 2 && t->dtype.bits == 64);
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

/* Puts a modification into the call; 0 as above. */
static int read_modification(PyObject* object, int field, long what, Call* call, PyObject** request) {
  if (call->mods_used == kMaxMods) {
    PyErr_SetString(PyExc_TypeError, "a call has too many modifications");
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

/* Puts all of a call_args into the call; 0 as above. */
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
