/* The binding in C: reads a call's arguments into one tandem_attention_args and runs the call without the interpreter
 * lock. The module uses the stable ABI of CPython 3.9, so that one file serves every later version.
 *
 * tandem/_binding.py describes run(); tandem/_ctypes.py has the same functions over ctypes. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tandem/tandem.h>

#include "call_args.h"
#include "devices.h"
#include "threads.h"

/* ---- The call on the CPU ---------------------------------------------------------------------------------------- */

/* A thread keeps its workspace for later calls, because a query of the size takes as long as a small call. */
typedef struct {
  size_t bytes;
  max_align_t memory[];
} Workspace;
enum { kMaxKept = 4 << 20 };
static pthread_key_t kept_workspace;

/* A call after its arguments were read. */
typedef struct {
  long what; /* the pass and the flags of run() */
  const tandem_attention_args* args;
  const tandem_cascade_args* cascade; /* NULL: args are the whole call */
} Job;

static tandem_status execute_in(tandem_context* context, const Job* job, void* memory, size_t bytes, void* stream) {
  if (job->cascade != NULL) return tandem_cascade(context, job->cascade, memory, bytes, stream);
  return (job->what & 1) == TANDEM_FORWARD ? tandem_forward(context, job->args, memory, bytes, stream)
                                           : tandem_backward(context, job->args, memory, bytes, stream);
}

static tandem_status workspace_size(tandem_context* context, const Job* job, size_t* bytes) {
  if (job->cascade != NULL) return tandem_cascade_workspace_size(context, job->cascade, bytes);
  return tandem_workspace_size(context, (tandem_pass)(job->what & 1), job->args, bytes);
}

static tandem_status execute(const Job* job) {
  tandem_context* context = tandem_python_context();
  Workspace* kept = pthread_getspecific(kept_workspace);
  tandem_status status = kept != NULL ? execute_in(context, job, kept->memory, kept->bytes, NULL)
                                      : execute_in(context, job, NULL, 0, NULL);
  if (status != TANDEM_WORKSPACE_TOO_SMALL) return status;
  size_t bytes = 0;
  status = workspace_size(context, job, &bytes);
  if (status != TANDEM_OK) return status;
  Workspace* larger = malloc(sizeof *larger + bytes);
  if (larger == NULL) return execute_in(context, job, NULL, 0, NULL);
  larger->bytes = bytes;
  status = execute_in(context, job, larger->memory, bytes, NULL);
  if (bytes <= kMaxKept && pthread_setspecific(kept_workspace, larger) == 0) {
    free(kept);
  } else {
    free(larger);
  }
  return status;
}

/* ---- The call on a GPU ------------------------------------------------------------------------------------------ */

typedef struct {
  void* workspace; /* memory of the device from the caller; NULL: none yet */
  size_t bytes;
  size_t wanted; /* bytes needed, if the call had too few */
  void* stream;
} Gpu;

/* The stream that the library of this tensor works on. */
static int find_stream(PyObject* tensor, int32_t device, void** stream) {
  if (PyTuple_Check(tensor)) tensor = PyTuple_GetItem(tensor, kDescribedOwner);
  const DLPackExchangeAPI* exchange = exchange_of(Py_TYPE(tensor));
  if (exchange == NULL || exchange->current_work_stream == NULL) {
    PyErr_SetString(PyExc_TypeError,
                    "q (on a GPU) must have a type that reports its stream by DLPack's C exchange interface: "
                    "use tensors of torch 2.10 or later");
    return 0;
  }
  return exchange->current_work_stream(kDLCUDA, device, stream) == 0;
}

/* A small workspace is requested before the call, so that the call does not fail first. */
static tandem_status execute_on_gpu(const Job* job, Gpu* gpu) {
  const int32_t index = job->args->q->device.index;
  gpu->wanted = gpu->workspace == NULL ? tandem_python_gpu_workspace(index) : 0;
  if (gpu->wanted != 0) return TANDEM_WORKSPACE_TOO_SMALL;
  tandem_context* context = tandem_python_gpu(index);
  tandem_status status = execute_in(context, job, gpu->workspace, gpu->bytes, gpu->stream);
  if (status != TANDEM_WORKSPACE_TOO_SMALL) return status;
  const tandem_status sized = workspace_size(context, job, &gpu->wanted);
  if (sized != TANDEM_OK) return sized;
  if (gpu->wanted <= kMaxKept) tandem_python_gpu_wants(index, gpu->wanted);
  return status;
}

/* ---- From Python ------------------------------------------------------------------------------------------------ */

static PyObject* result_of(tandem_status status) {
  if (status != TANDEM_OK) return Py_BuildValue("(si)", "refused", (int)status);
  Py_RETURN_NONE;
}

/* Runs a call after its arguments were read. Returns the request of this call, or NULL with an exception. */
static PyObject* serve(const Job* job, PyObject* q, Gpu* gpu) {
  const tandem_attention_args* args = job->args;
  const tandem_pass pass = (tandem_pass)(job->what & 1);
  const int on_gpu = args->q != NULL && args->q->device.type == TANDEM_CUDA;
  const int32_t index = on_gpu ? args->q->device.index : 0;
  if (on_gpu && (index < 0 || index >= kMaxDevices))
    return PyErr_Format(PyExc_ValueError, "q's device (cuda:%d) must be one of the first %d: move q to one", (int)index,
                        (int)kMaxDevices);
  if (on_gpu && tandem_python_gpu(index) == NULL) return Py_BuildValue("(si)", "open", (int)index);
  /* Other calls need no stream, and q may be only described. */
  const int runs = (job->what & (kCheck | kPrepare | kServing | kCheckData)) == 0;
  if (on_gpu && runs && !find_stream(q, index, &gpu->stream)) return NULL;
  tandem_status status;
  Py_BEGIN_ALLOW_THREADS;
  tandem_context* context = on_gpu ? tandem_python_gpu(index) : tandem_python_context();
  if (job->what & kCheck) {
    status = tandem_check(context, pass, args);
  } else if (job->what & kCheckData) {
    status = tandem_check_data(context, pass, args);
  } else if (job->what & kServing) {
    status = tandem_prepare_serving(context, args);
  } else if (job->what & kPrepare) {
    status = tandem_prepare(context, pass, args);
  } else {
    status = on_gpu ? execute_on_gpu(job, gpu) : execute(job);
  }
  Py_END_ALLOW_THREADS;
  if (gpu->wanted > gpu->bytes) return Py_BuildValue("(sn)", "workspace", (Py_ssize_t)gpu->wanted);
  return result_of(status);
}

/* Reads call_args and runs the call. cascade: NULL, or the members of a cascade other than own. */
static PyObject* read_and_serve(long what, PyObject* call_args, tandem_cascade_args* cascade, Gpu* gpu) {
  Call call;
  memset(&call.args, 0, sizeof call.args);
  call.args.size = sizeof call.args;
  call.used = call.mods_used = 0;
  call.q = call.scattered = NULL;
  PyObject* request = NULL;
  if (read_call_args(call_args, what, &call, &request)) {
    if (cascade != NULL) cascade->own = &call.args;
    const Job job = {what, &call.args, cascade};
    request = call.scattered != NULL ? Py_BuildValue("(sO)", "copy", call.scattered) : serve(&job, call.q, gpu);
  }
  release_call(&call);
  return request;
}

/* run(what, call_args, workspace = 0, bytes = 0) -> None or a request; see _binding.py */
static PyObject* run(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  (void)module;
  if ((count != 2 && count != 4) || !PyDict_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError,
                    "run() must have two or four arguments: pass (what, call_args[, workspace, bytes])");
    return NULL;
  }
  const long what = PyLong_AsLong(arguments[0]);
  Gpu gpu = {0};
  if (count == 4) gpu = (Gpu){.workspace = PyLong_AsVoidPtr(arguments[2]), .bytes = PyLong_AsSize_t(arguments[3])};
  if (PyErr_Occurred()) return NULL;
  return read_and_serve(what, arguments[1], NULL, &gpu);
}

/* ---- Tensors by their descriptions ------------------------------------------------------------------------------- */

/* Descriptions of tensors, read into a list of them; 0 with an exception. */
static int read_tensors(PyObject* described, Operand* operands, const tandem_tensor** tensors) {
  for (Py_ssize_t n = 0; n < PyTuple_Size(described); ++n) {
    memset(&operands[n], 0, sizeof operands[n]);
    if (read_tensor(PyTuple_GetItem(described, n), 0, &operands[n]) != kRead) {
      if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a list must have descriptions of tensors: use _arrays.describe");
      return 0;
    }
    tensors[n] = &operands[n].tensor;
  }
  return 1;
}

/* The context and the stream of a call. */
typedef struct {
  tandem_context* context;
  void* stream;
  PyObject* request; /* the step that must come first */
} Place;

/* Finds the place of a call on this device and on the stream of the tensor that `described` describes. Returns 0 with a
 * request, or with an exception. */
static int find_place(tandem_device device, PyObject* described, Place* place) {
  memset(place, 0, sizeof *place);
  if (device.type != TANDEM_CUDA) {
    place->context = tandem_python_context();
    return 1;
  }
  place->context = device.index >= 0 && device.index < kMaxDevices ? tandem_python_gpu(device.index) : NULL;
  if (place->context != NULL) return find_stream(described, device.index, &place->stream);
  place->request = Py_BuildValue("(si)", "open", (int)device.index);
  return 0;
}

/* Acquires the interpreter lock after a call, and returns the call's request. */
static PyObject* finish(PyThreadState* thread, tandem_status status) {
  PyEval_RestoreThread(thread);
  return result_of(status);
}

/* ---- Merging ----------------------------------------------------------------------------------------------------- */

/* Runs the call on the device of the first tensor, on the stream of its library. */
static PyObject* serve_merge(const tandem_merge_args* args, PyObject* first) {
  const tandem_device device = args->out->device;
  Place place;
  if (!find_place(device, first, &place)) return place.request;
  PyThreadState* const thread = PyEval_SaveThread();
  return finish(thread, tandem_merge(place.context, args, place.stream));
}

/* merge(outs, lses, (out, lse)): tuples of descriptions -> None or a request, as run() */
static PyObject* merge(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *outs, *lses, *result;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyTuple_Type, &outs, &PyTuple_Type, &lses, &PyTuple_Type, &result))
    return NULL;
  const Py_ssize_t parts = PyTuple_Size(outs);
  if (PyTuple_Size(lses) != parts || PyTuple_Size(result) != 2) {
    PyErr_SetString(PyExc_TypeError, "lses must have as many items as outs: pass (outs, lses, (out, lse))");
    return NULL;
  }
  Operand* operands = calloc((size_t)(2 * parts + 2), sizeof *operands);
  const tandem_tensor** tensors = calloc((size_t)(2 * parts + 2), sizeof *tensors);
  PyObject* request = NULL;
  if (operands == NULL || tensors == NULL) {
    PyErr_NoMemory();
  } else if (read_tensors(outs, operands, tensors) && read_tensors(lses, operands + parts, tensors + parts) &&
             read_tensors(result, operands + 2 * parts, tensors + 2 * parts)) {
    const tandem_merge_args args = {.size = sizeof args,
                                    .parts = parts,
                                    .part_out = tensors,
                                    .part_lse = tensors + parts,
                                    .out = tensors[2 * parts],
                                    .lse = tensors[2 * parts + 1]};
    request = serve_merge(&args, PyTuple_GetItem(result, 0));
  }
  free(operands);
  free(tensors);
  return request;
}

/* ---- Shared prefixes ----------------------------------------------------------------------------------------------
 */

enum { kGroupTensors = 3 };

/* cascade(call_args, (cu_seqlens_group, group_page_table, group_seqused_k), max_rows_group, workspace = 0, bytes = 0):
 * call_args of each request's own keys, and descriptions -> None or a request, as run() */
static PyObject* cascade(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *call_args, *groups, *address = NULL;
  long long max_rows;
  Py_ssize_t bytes = 0;
  if (!PyArg_ParseTuple(arguments, "O!O!L|On", &PyDict_Type, &call_args, &PyTuple_Type, &groups, &max_rows, &address,
                        &bytes))
    return NULL;
  Operand operands[kGroupTensors];
  const tandem_tensor* t[kGroupTensors];
  if (PyTuple_Size(groups) != kGroupTensors) {
    PyErr_SetString(PyExc_TypeError, "groups must have 3 items: pass the first rows, pages and lengths of the groups");
    return NULL;
  }
  if (!read_tensors(groups, operands, t)) return NULL;
  Gpu gpu = {.workspace = address != NULL ? PyLong_AsVoidPtr(address) : NULL, .bytes = (size_t)bytes};
  if (PyErr_Occurred()) return NULL;
  tandem_cascade_args args = {.size = sizeof args,
                              .cu_seqlens_group = t[0],
                              .group_page_table = t[1],
                              .group_seqused_k = t[2],
                              .max_rows_group = max_rows};
  return read_and_serve(TANDEM_FORWARD, call_args, &args, &gpu);
}

/* ---- Appending to a cache ---------------------------------------------------------------------------------------- */

enum { kAppendTensors = 16 };

/* append_kv(tensors, interleaved, single_q_position): descriptions or None, in the order of tandem_append_kv_args ->
 * None or a request, as run() */
static PyObject* append_kv(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject* described;
  int interleaved, single_q_position;
  if (!PyArg_ParseTuple(arguments, "O!pp", &PyTuple_Type, &described, &interleaved, &single_q_position)) return NULL;
  if (PyTuple_Size(described) != kAppendTensors) {
    PyErr_SetString(PyExc_TypeError, "tensors must have 16 items: pass each member of tandem_append_kv_args, or None");
    return NULL;
  }
  Operand operands[kAppendTensors];
  const tandem_tensor* t[kAppendTensors] = {NULL};
  PyObject* first = NULL;
  tandem_device device = {TANDEM_CPU, 0};
  for (Py_ssize_t n = 0; n < kAppendTensors; ++n) {
    PyObject* item = PyTuple_GetItem(described, n);
    if (item == Py_None) continue;
    memset(&operands[n], 0, sizeof operands[n]);
    if (read_tensor(item, 0, &operands[n]) != kRead) {
      if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "tensors must have descriptions of tensors: use _arrays.describe");
      return NULL;
    }
    t[n] = &operands[n].tensor;
    if (first == NULL) first = item, device = t[n]->device;
  }
  const tandem_append_kv_args args = {.size = sizeof args,
                                      .k = t[0],
                                      .v = t[1],
                                      .k_cache = t[2],
                                      .v_cache = t[3],
                                      .slot_mapping = t[4],
                                      .page_table = t[5],
                                      .cache_seqlens = t[6],
                                      .cache_batch_idx = t[7],
                                      .cu_seqlens_new = t[8],
                                      .q = t[9],
                                      .q_out = t[10],
                                      .cu_seqlens_q = t[11],
                                      .rotary_cos = t[12],
                                      .rotary_sin = t[13],
                                      .rotary_seqlens = t[14],
                                      .positions = t[15],
                                      .rotary_interleaved = interleaved,
                                      .single_q_position = single_q_position};
  Place place;
  if (!find_place(device, first, &place)) return place.request;
  PyThreadState* const thread = PyEval_SaveThread();
  return finish(thread, tandem_append_kv(place.context, &args, place.stream));
}

/* ---- Block masks ------------------------------------------------------------------------------------------------- */

enum { kSizes = 6, kLists = 8 };

/* Runs the call on the device of the first list, on the stream of its library. */
static PyObject* serve_blocks(const tandem_block_mask_args* args, PyObject* first, void* workspace, size_t bytes) {
  const tandem_device device = args->kv_num_blocks->device;
  Place place;
  if (!find_place(device, first, &place)) return place.request;
  PyThreadState* const thread = PyEval_SaveThread();
  return finish(thread, tandem_make_block_mask(place.context, args, workspace, bytes, place.stream));
}

/* make_block_mask(mask_mod, (batch, heads, seqlen_q, seqlen_k, block_q, block_k), lists, workspace, bytes). lists
 * describe kv_num_blocks, kv_indices and the full ones, then maybe the lists by keys. Returns None or a request, as
 * run() does. */
static PyObject* make_block_mask(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *mod, *lists, *address;
  long long sizes[kSizes];
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(arguments, "O!(LLLLLL)O!On", &PyTuple_Type, &mod, &sizes[0], &sizes[1], &sizes[2], &sizes[3],
                        &sizes[4], &sizes[5], &PyTuple_Type, &lists, &address, &bytes))
    return NULL;
  void* workspace = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return NULL;
  if (PyTuple_Size(lists) != kLists && PyTuple_Size(lists) != kLists / 2) {
    PyErr_SetString(PyExc_TypeError, "lists must have four or eight items: pass kv lists, or kv and q lists");
    return NULL;
  }
  Operand operands[kLists];
  const tandem_tensor* tensors[kLists] = {NULL};
  ReadMod* read = NULL;
  PyObject* request = NULL;
  if (read_tensors(lists, operands, tensors)) {
    const Reading reading = read_mod(mod, TANDEM_FORWARD, &read);
    if (reading == kRead) {
      const tandem_block_mask_args args = {.size = sizeof args,
                                           .mask_mod = &read->mod,
                                           .batch = sizes[0],
                                           .heads = sizes[1],
                                           .seqlen_q = sizes[2],
                                           .seqlen_k = sizes[3],
                                           .mask_block_q = sizes[4],
                                           .mask_block_k = sizes[5],
                                           .kv_num_blocks = tensors[0],
                                           .kv_indices = tensors[1],
                                           .full_kv_num_blocks = tensors[2],
                                           .full_kv_indices = tensors[3],
                                           .q_num_blocks = tensors[4],
                                           .q_indices = tensors[5],
                                           .full_q_num_blocks = tensors[6],
                                           .full_q_indices = tensors[7]};
      request = serve_blocks(&args, PyTuple_GetItem(lists, 0), workspace, (size_t)bytes);
    } else if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_TypeError, "mask_mod must have descriptions of tensors: use _score_mod.described");
    }
    release_mod(read);
  }
  return request;
}

static int32_t gpu_index(PyObject* number) {
  const long index = PyLong_AsLong(number);
  if (!PyErr_Occurred() && (index < 0 || index >= kMaxDevices))
    PyErr_Format(PyExc_ValueError, "a GPU's index (%ld) must be at least 0 and below %d: use one of the first GPUs",
                 index, (int)kMaxDevices);
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
     "run(what, call_args, workspace = 0, bytes = 0) -> None or a request"},
    {"merge", merge, METH_VARARGS, "merge(outs, lses, (out, lse)) -> None or a request"},
    {"cascade", cascade, METH_VARARGS,
     "cascade(call_args, groups, max_rows_group, workspace = 0, bytes = 0) -> None or a request"},
    {"append_kv", append_kv, METH_VARARGS, "append_kv(tensors, interleaved, single_q_position) -> None or a request"},
    {"make_block_mask", make_block_mask, METH_VARARGS,
     "make_block_mask(mask_mod, sizes, lists, workspace, bytes) -> None or a request"},
    {"last_error", last_error, METH_NOARGS, "the sentence of this thread's last call that failed"},
    {"use_openmp_of", use_openmp_of, METH_O,
     "use_openmp_of(library) -> True if later calls run on the threads of that library"},
    {"description", description, METH_NOARGS, "one line that describes the CPU kernels"},
    {"open_gpu", open_gpu, METH_O, "open_gpu(index) -> a tandem_status: prepares that GPU for calls"},
    {"gpu_description", gpu_description, METH_O,
     "one line that describes the GPU's kernels; None before open_gpu(index)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tandem._native",
    .m_doc = "Calls of the C interface; see tandem/_binding.py.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
  if (!intern_names()) return NULL;
  if (pthread_key_create(&kept_workspace, free) != 0) return PyErr_NoMemory();
  PyObject* module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddStringConstant(module, "version", tandem_version()) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
