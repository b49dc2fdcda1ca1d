/* Tandem: exact attention, forward and backward. The C interface (C11, C++ friendly, needs no other header).
 *
 *   out = softmax(mask(bias(softcap(softmax_scale * q k^T)))) v
 *
 * Shapes. Dense tensors are (batch, seqlen, heads, head_dim); packed ones are (total, heads, head_dim) with cu_seqlens.
 * Any strides with a contiguous last dimension. Query head h reads key/value head h / (heads_q / heads_k).
 *
 * A call: fill one tandem_attention_args, ask tandem_workspace_size once per shape, then tandem_forward and
 * tandem_backward as often as wanted. Nothing is written before the whole call has been checked. No function throws,
 * aborts or prints (but for the environment variable TANDEM_LOG=1: a line to stderr for every call on a GPU, saying
 * which kernel runs). A failed call returns a code; tandem_last_error() has one sentence that names the argument, its
 * value, the rule and the way out.
 *
 * GPUs. A context of device "cuda:N" works on tensors of device {TANDEM_CUDA, N}, through the device's primary context,
 * which it shares with torch and others. tandem_forward puts the work on the caller's stream and returns; it neither
 * allocates nor waits, so it can be captured into a graph. A kernel that was not used before is compiled first, by
 * NVRTC or from the cache on disk: tandem_prepare does that ahead. The host reads no device memory (but see validate):
 * indices that lie there are clamped to the tensors by the kernels. Errors of the device itself may surface in a later
 * call. "vgpu:h200" and others of its kind run the same kernels on a virtual GPU, which checks them: tensors are in
 * host memory, calls return when their work is done, and streams are ignored (docs/virtual-gpu.md).
 *
 * Threads. Every function may be called from any thread. One context may serve several threads at once; each call needs
 * its own workspace.
 */
#ifndef TANDEM_TANDEM_H_
#define TANDEM_TANDEM_H_

#include <stddef.h>
#include <stdint.h>

#define TANDEM_VERSION_MAJOR 0
#define TANDEM_VERSION_MINOR 1
#define TANDEM_VERSION_PATCH 0

#if defined(__GNUC__)
#define TANDEM_API __attribute__((visibility("default")))
#else
#define TANDEM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tensors: DLPack's DLTensor, bit for bit ------------------------------------------------------------------- */

/* DLPack's device types that Tandem knows by name. */
enum { TANDEM_CPU = 1, TANDEM_CUDA = 2 };

/* DLPack's type codes. bool is (TANDEM_BOOL, 8), bf16 is (TANDEM_BFLOAT, 16), f16 is (TANDEM_FLOAT, 16). */
enum { TANDEM_INT = 0, TANDEM_UINT = 1, TANDEM_FLOAT = 2, TANDEM_BFLOAT = 4, TANDEM_BOOL = 6 };

typedef struct tandem_device {
  int32_t type;
  int32_t index;
} tandem_device;

typedef struct tandem_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* must be 1 */
} tandem_dtype;

typedef struct tandem_tensor {
  void* data;
  tandem_device device;
  int32_t ndim;
  tandem_dtype dtype;
  int64_t* shape;   /* ndim entries */
  int64_t* strides; /* ndim entries, in elements; NULL means compact (row-major) */
  uint64_t byte_offset;
} tandem_tensor;

/* ---- Codes ----------------------------------------------------------------------------------------------------- */

typedef enum tandem_status {
  TANDEM_OK = 0,
  TANDEM_INVALID_ARGUMENT = 1,    /* the call contradicts itself or these semantics */
  TANDEM_UNSUPPORTED = 2,         /* a meaningful call that this device or version does not serve */
  TANDEM_WORKSPACE_TOO_SMALL = 3, /* give at least tandem_workspace_size() bytes */
  TANDEM_COLD_KERNEL = 4,         /* a kernel would be compiled during graph capture: call tandem_prepare first */
  TANDEM_NO_COMPILER = 5,         /* a kernel must be compiled and no NVRTC was found */
  TANDEM_DEVICE_ERROR = 6,        /* the device or its driver reported an error */
  TANDEM_INTERNAL_ERROR = 7       /* a defect of Tandem: please report it */
} tandem_status;

/* "0.1.0"; static storage. */
TANDEM_API const char* tandem_version(void);

/* The sentence for the last call of this thread that failed, or "". Valid until this thread's next failing call. */
TANDEM_API const char* tandem_last_error(void);

/* "invalid argument", "unsupported", ...; static storage. Any integer may be passed. */
TANDEM_API const char* tandem_status_name(int32_t status);

/* ---- Context ---------------------------------------------------------------------------------------------------- */

/* Owns what is not a call's: the device, its compiled kernels, the threads. NULL is accepted wherever a context is
 * asked for and means the process default: device "cpu", one thread per core this process may run on. */
typedef struct tandem_context tandem_context;

/* Calls body(body_data, task) once for every task in [0, tasks), in any order, on any threads, and returns when all
 * have returned. Serving it serially is allowed. Must not unwind. */
typedef void (*tandem_parallel_for)(void* user_data, int32_t tasks, void (*body)(void* body_data, int32_t task),
                                    void* body_data);

typedef struct tandem_context_options {
  int64_t size;                     /* sizeof(tandem_context_options) */
  const char* device;               /* "cpu" (NULL means "cpu"), "cuda" (the first GPU), "cuda:N", "vgpu:MODEL" */
  int32_t threads;                  /* most threads a call may use, 1..1024; 0: one per available core. GPUs: ignored */
  tandem_parallel_for parallel_for; /* the caller's threads; NULL: the context starts its own, asleep between calls */
  void* parallel_for_data;
} tandem_context_options;

/* options may be NULL. On failure *context is set to NULL. */
TANDEM_API tandem_status tandem_context_create(const tandem_context_options* options, tandem_context** context);
/* NULL is ignored. No call may be under way on the context. */
TANDEM_API void tandem_context_destroy(tandem_context* context);
/* One line about what will run: "cpu, 2 threads, AVX3_ZEN4 with bf16 dot products", or "cuda:0, NVIDIA H200, 132 SMs,
 * driver 13.0, kernels compiled by NVRTC 13.0". Valid while the context lives. */
TANDEM_API const char* tandem_context_description(tandem_context* context);
/* The number of threads a call may use; 1 on a GPU. */
TANDEM_API int32_t tandem_context_threads(tandem_context* context);

/* ---- Attention -------------------------------------------------------------------------------------------------- */

/* Where the diagonal of causal, window and ALiBi lies: key j is at distance i + offset - j from query i. */
enum {
  TANDEM_BOTTOM_RIGHT = 0, /* offset = seqlen_k - seqlen_q (the used lengths): the last query meets the last key */
  TANDEM_TOP_LEFT = 1      /* offset = 0: the first query meets the first key */
};

/* A window bound that bounds nothing. */
#define TANDEM_UNBOUNDED INT64_MAX

/* Bits of tandem_attention_args.window. */
enum { TANDEM_WINDOW_LEFT = 1, TANDEM_WINDOW_RIGHT = 2 };

/* One struct for every function below. Set size, zero the rest, fill in what the problem has: zero bytes are the
 * defaults, a NULL tensor is an absent one. A longer struct of a later version is accepted when its unknown tail is
 * zero.
 *
 * dtype T below: float32, bfloat16 or float16 (float64 is served on the CPU by the reference loops). q, k, v, out and
 * their gradients share it. */
typedef struct tandem_attention_args {
  int64_t size; /* sizeof(tandem_attention_args) */

  /* Inputs, T. Dense (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_k, head_dim) and
   * (batch, seqlen_k, heads_k, head_dim_v); packed (total_q, ...), (total_k, ...), (total_k, ...).
   * With page_table k and v are (pages, page_size, heads_k, ...). */
  const tandem_tensor* q;
  const tandem_tensor* k;
  const tandem_tensor* v;

  /* Outputs of forward, inputs of backward. out like q with head_dim_v, T. lse float32 (or float64 where T is), natural
   * logarithm, (batch, heads_q, seqlen_q) or packed (heads_q, total_q), any strides; includes the sink; -inf for a row
   * that sees no key. forward: lse is optional. backward: both are required. */
  const tandem_tensor* out;
  const tandem_tensor* lse;

  /* backward: the gradient of out (required) and of lse (optional), then the wanted gradients: each may be NULL. */
  const tandem_tensor* dout;
  const tandem_tensor* dlse;
  const tandem_tensor* dq;
  const tandem_tensor* dk;
  const tandem_tensor* dv;

  /* Added to the scores after softcap: (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), float32 or T, with gradient dbias
   * (same shape and dtype, summed over broadcast dimensions); or boolean, true = visible. Not for packed calls. */
  const tandem_tensor* bias;
  const tandem_tensor* dbias;

  /* One extra logit per query head that takes part in the softmax and has no value: (heads_q), float32 or T, with
   * gradient dsink. */
  const tandem_tensor* sink;
  const tandem_tensor* dsink;

  /* Adds -slope * |i + offset - j|: (heads_q) or (batch, heads_q), float32. */
  const tandem_tensor* alibi_slopes;

  /* Packed calls: (batch + 1), int32, from 0, not decreasing, ending at total. Both or cu_seqlens_q with page_table. */
  const tandem_tensor* cu_seqlens_q;
  const tandem_tensor* cu_seqlens_k;
  /* Used lengths: (batch), int32, at most the sequence's own length. Rows of out, dq, dk and dv beyond them are
   * set to zero, of lse to -inf. */
  const tandem_tensor* seqused_q;
  const tandem_tensor* seqused_k;
  /* (batch, max_pages), int32: the page that holds keys [p * page_size, (p + 1) * page_size) of a sequence. */
  const tandem_tensor* page_table;
  /* At least the longest sequence. Packed calls: 0 is taken as total on the CPU and refused on other devices. */
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  double softmax_scale; /* 0: 1 / sqrt(head_dim) */
  double softcap;       /* 0: off; else scores become softcap * tanh(score / softcap); > 0 */

  int32_t causal;       /* nonzero: window_right is 0, or its own value where that is less */
  int32_t alignment;    /* TANDEM_BOTTOM_RIGHT or TANDEM_TOP_LEFT */
  int32_t window;       /* TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT: which of the two bounds below hold */
  int32_t reserved;     /* zero */
  int64_t window_left;  /* key j is visible when i + offset - window_left <= j <= i + offset + window_right; */
  int64_t window_right; /* either sign; left + right >= 0 */

  /* Philox4x32-10 with key (seed.lo, seed.hi + offset.hi) and counter (column / 4, row, sequence * heads_q + head,
   * offset.lo); word column % 4 drops the entry when it is below dropout_p * 2^32. Kept entries are scaled by
   * 1 / (1 - dropout_p). The LSE is that of the undropped softmax. */
  double dropout_p; /* [0, 1) */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t* dropout_seed_ptr;   /* when not NULL, read on the device in place of dropout_seed */
  const uint64_t* dropout_offset_ptr; /* when not NULL, read on the device in place of dropout_offset */

  int32_t num_splits;      /* decode: number of parts the keys are split into; 0: chosen for the device */
  int32_t deterministic;   /* nonzero: backward is bitwise reproducible (on the CPU it always is) */
  int32_t batch_invariant; /* nonzero: a sequence's result depends on nothing else in the batch and on no split */
  int32_t validate;        /* nonzero: synchronise and check index tensors that live on a device */
} tandem_attention_args;

/* What a check, a workspace or a preparation is for. */
typedef enum tandem_pass { TANDEM_FORWARD = 0, TANDEM_BACKWARD = 1 } tandem_pass;

/* Whether the call would be served, and if not, why (tandem_last_error). Ignores data pointers: tensors may be
 * unallocated. */
TANDEM_API tandem_status tandem_check(tandem_context* context, tandem_pass pass, const tandem_attention_args* args);

/* Bytes of scratch memory the call needs, for this context; the same for equal shapes. Ignores data pointers. */
TANDEM_API tandem_status tandem_workspace_size(tandem_context* context, tandem_pass pass,
                                               const tandem_attention_args* args, size_t* bytes);

/* Compiles ahead what the call needs (nothing on the CPU), so that the call itself only launches. Ignores data
 * pointers. */
TANDEM_API tandem_status tandem_prepare(tandem_context* context, tandem_pass pass, const tandem_attention_args* args);

/* out and lse. workspace: workspace_bytes of the device's memory, any alignment; NULL when 0 are needed.
 * stream: a CUstream (cudaStream_t) of the context's device, NULL for its default stream; NULL on the CPU, where the
 * call returns when the work is done. */
TANDEM_API tandem_status tandem_forward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                                        size_t workspace_bytes, void* stream);

/* The gradients that are not NULL, from q, k, v, out, lse, dout and dlse. */
TANDEM_API tandem_status tandem_backward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                                         size_t workspace_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_TANDEM_H_ */
