/* Tandem: exact attention, forward and backward. The C interface (C11, C++ friendly, needs no other header).
 *
 *   out = softmax(mask(score_mod(bias(softcap(softmax_scale * q k^T))))) v
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
#define TANDEM_VERSION_MINOR 2
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

/* "0.2.0"; static storage. */
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

/* ---- Score and mask modifications: since 0.2 (docs/mods.md) -------------------------------------------------------
 */

/* A number that a text names. Its value comes with each call: another one needs no compilation. One that is to be
 * trained is given as a tensor without dimensions. */
typedef struct tandem_mod_scalar {
  const char* name;
  int32_t type;     /* TANDEM_FLOAT, TANDEM_INT (32 bits) or TANDEM_BOOL */
  int32_t reserved; /* zero */
  double value;
} tandem_mod_scalar;

/* A tensor that a text reads: 0 to 4 dimensions, any strides, bool, int32, int64 or float. backward: gradient, of the
 * tensor's shape, its dtype or float32; NULL: not wanted. Of floats in a score_mod only. */
typedef struct tandem_mod_tensor {
  const char* name;
  const tandem_tensor* tensor;
  const tandem_tensor* gradient;
} tandem_mod_tensor;

/* One line such as "score - slope[head] * abs(q - k)", with what it names. Read in each call, and not kept. */
typedef struct tandem_mod {
  int64_t size; /* sizeof(tandem_mod) */
  const char* text;
  const tandem_mod_scalar* scalars;
  int64_t scalar_count;
  const tandem_mod_tensor* tensors;
  int64_t tensor_count;
} tandem_mod;

/* ---- Attention -------------------------------------------------------------------------------------------------- */

/* Where the diagonal of causal, window and ALiBi lies: key j is at distance i + offset - j from query i. */
enum {
  TANDEM_BOTTOM_RIGHT = 0, /* offset = seqlen_k - seqlen_q (the used lengths): the last query meets the last key */
  TANDEM_TOP_LEFT = 1,     /* offset = 0: the first query meets the first key */
  TANDEM_EXPLICIT = 2      /* offset = diagonal_offset + diagonal_offsets[sequence] */
};

/* A window bound that bounds nothing. */
#define TANDEM_UNBOUNDED INT64_MAX

/* Bits of tandem_attention_args.window. */
enum { TANDEM_WINDOW_LEFT = 1, TANDEM_WINDOW_RIGHT = 2 };

/* One struct for every function below. Set size, zero the rest, fill in what the problem has: zero bytes are the
 * defaults, a NULL tensor is an absent one. The struct of an older version, which is shorter, is accepted as if it
 * ended with zeros; that of a later one, when what this version does not know of it is zero (docs/abi.md).
 *
 * dtype T below: float32, bfloat16 or float16 (float64 is served on the CPU by the reference loops). q, k and v share
 * it. A result (out and every gradient), and what backward reads of one (out, dout), is of T or float32, each for
 * itself: float32 has what T would lose where parts are merged or gradients added up. float64 goes with float64. */
typedef struct tandem_attention_args {
  int64_t size; /* sizeof(tandem_attention_args) */

  /* Inputs, T. Dense (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_k, head_dim) and
   * (batch, seqlen_k, heads_k, head_dim_v); packed (total_q, ...), (total_k, ...), (total_k, ...).
   * With page_table k and v are (pages, page_size, heads_k, ...). */
  const tandem_tensor* q;
  const tandem_tensor* k;
  const tandem_tensor* v;

  /* Outputs of forward, inputs of backward. out like q with head_dim_v, T or float32. lse float32 (or float64 where T
   * is), natural logarithm, (batch, heads_q, seqlen_q) or packed (heads_q, total_q), any strides; includes the sink;
   * -inf for a row that sees no key. forward: lse is optional. backward: both are required. */
  const tandem_tensor* out;
  const tandem_tensor* lse;

  /* backward: the gradient of out (required) and of lse (optional), then the wanted gradients: each may be NULL, and is
   * of T or float32. Of a float32 dout products take what T has of it. */
  const tandem_tensor* dout;
  const tandem_tensor* dlse;
  const tandem_tensor* dq;
  const tandem_tensor* dk;
  const tandem_tensor* dv;

  /* Added to the scores after softcap: (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), float32 or T, with gradient dbias
   * (same shape, its dtype or float32, summed over broadcast dimensions); or boolean, true = visible. Not for packed
   * calls. */
  const tandem_tensor* bias;
  const tandem_tensor* dbias;

  /* One extra logit per query head that takes part in the softmax and has no value: (heads_q), float32 or T, with
   * gradient dsink (its dtype or float32). Of parts that are to be merged one alone has it: see tandem_merge. */
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
  int32_t alignment;    /* TANDEM_BOTTOM_RIGHT, TANDEM_TOP_LEFT or TANDEM_EXPLICIT */
  int32_t window;       /* TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT: which of the two bounds below hold */
  int32_t reserved;     /* zero */
  int64_t window_left;  /* key j is visible when i + offset - window_left <= j <= i + offset + window_right; */
  int64_t window_right; /* either sign; left + right >= 0 */

  /* Philox4x32-7 with key (seed.lo, seed.hi + offset.hi) and counter (column / 16, row, sequence * heads_q + head,
   * offset.lo). With c = column % 16, byte (c / 2) % 4, from the least, of word 2 * (c / 8) + c % 2 drops the entry
   * when it is below t = dropout_p * 256, rounded to an integer, but from 1 to 255 unless dropout_p is 0. Kept entries
   * are scaled by 256 / (256 - t). The LSE is that of the undropped softmax. */
  double dropout_p; /* [0, 1), and 0: nothing is dropped */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t* dropout_seed_ptr;   /* when not NULL, read on the device in place of dropout_seed */
  const uint64_t* dropout_offset_ptr; /* when not NULL, read on the device in place of dropout_offset */

  int32_t num_splits;      /* decode: number of parts the keys are split into; 0: chosen for the device */
  int32_t deterministic;   /* nonzero: backward is bitwise reproducible (on the CPU it always is) */
  int32_t batch_invariant; /* nonzero: a sequence's result depends on nothing else in the batch and on no split */
  int32_t validate;        /* nonzero: synchronise and check index tensors that live on a device */

  /* ---- From here on since 0.2 ---- */

  /* With TANDEM_EXPLICIT, else 0 and NULL: the diagonal's offset, in keys, of either sign, is their sum, as when
   * queries and keys are parts of longer sequences (offset = where the first query lies - where the first key lies).
   * diagonal_offsets: (batch), int32, read on the device; NULL: zeros. A sum beyond +-2^29 counts as +-2^29. */
  int64_t diagonal_offset;
  const tandem_tensor* diagonal_offsets;

  /* backward, nonzero: every gradient is added to what its tensor holds, in float32 (float64 where T is), and rounded
   * once to the tensor's dtype. Rows beyond the used lengths stay as they are. The same bits in every run. */
  int32_t accumulate;

  /* At most so many of a GPU's multiprocessors are taken, for other work to run beside (a cluster of kernels that
   * multiply in pairs takes two); 0: all. Changes no bits. Ignored on the CPU: see tandem_context_options.threads. */
  int32_t sm_limit;

  /* Changes every score: a float of score, batch, head, q, k, seqlen_q, seqlen_k and what it names. After softcap,
   * ALiBi and bias, before masks; -inf hides. Positions are counted from 0 in their sequence, wherever the diagonal
   * lies. */
  const tandem_mod* score_mod;
  /* Says which keys are visible, beside causal, window and boolean bias: a bool of the same, but for score. */
  const tandem_mod* mask_mod;

  /* A block mask, as torch's BlockMask has it: for each block of mask_block_q queries the blocks of mask_block_k keys
   * of which it may see some keys, in any order. Its other blocks are hidden, and on GPUs left out. In full_kv_indices
   * are blocks that are seen whole, whatever mask_mod says; in kv_indices those of which mask_mod, where there is one,
   * says what is seen. One in both is seen whole; causal, window and boolean bias hide what they hide. int32:
   * kv_num_blocks (batch|1, heads_q|1, blocks of queries), kv_indices (batch|1, heads_q|1, blocks of queries, any
   * number), any strides; both, or NULL. full_kv_num_blocks and full_kv_indices likewise, beside those. Of a row of
   * indices the first kv_num_blocks[...] count. They are read where they lie: counts are clamped to the row, and an
   * index that is no block of keys is none. Dense calls only. */
  const tandem_tensor* kv_num_blocks;
  const tandem_tensor* kv_indices;
  const tandem_tensor* full_kv_num_blocks;
  const tandem_tensor* full_kv_indices;
  int64_t mask_block_q; /* with them at least 1, else 0 */
  int64_t mask_block_k;

  /* Output of forward, optional, like lse: the largest score that a query sees, as the softmax takes it (after
   * score_mod and masks, the sink left out). -inf for a row that sees no key; NaN where one of its scores is. On a GPU
   * a kernel of its own makes all scores anew. */
  const tandem_tensor* max_scores;

  /* Nonzero: the block mask's lists are those that tandem_make_block_mask makes of this mask_mod, with what it names as
   * it is now, and of these lengths. So they say nothing that mask_mod does not say, and are not read where that is a
   * window: such a mask_mod, alone or with this, is as fast as causal and window. */
  int32_t blocks_of_mask_mod;
  int32_t reserved_2; /* zero */
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

/* ---- Merging: since 0.2 ----------------------------------------------------------------------------------------- */

/* What queries give over all keys, from what they give over parts of them, each the result of a tandem_forward:
 *
 *   lse = log(sum over parts of exp(part_lse)),   out = sum over parts of exp(part_lse - lse) * part_out
 *
 * A part whose lse is -inf (it shows the query no key) weighs nothing, and its out is not looked at; where all are, out
 * is 0 and lse -inf. An lse that is NaN or +inf makes out and lse of that query and head NaN. Sums are of float32, in
 * the order of the parts.
 *
 * A sink belongs to the whole softmax: give it to the forward of exactly one part, whichever, or it counts several
 * times. The backward of every part takes the merged out and lse; sink and dsink belong in one of these calls. */
typedef struct tandem_merge_args {
  int64_t size;  /* sizeof(tandem_merge_args) */
  int64_t parts; /* how many there are, at least 1; on a GPU more than 60 need a float32 out, and lse */

  /* `parts` tensors each. out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), of float32, bfloat16 or
   * float16, each for itself (float64 where all are, on the CPU). lse: (batch, heads, seqlen) or (heads, total),
   * float32 (or float64 where out is). Any strides with a contiguous head_dim. */
  const tandem_tensor* const* part_out;
  const tandem_tensor* const* part_lse;

  /* The result, of the same shapes; lse may be NULL. They may be a part's own tensors, in place; else they overlap
   * none. */
  const tandem_tensor* out;
  const tandem_tensor* lse;
} tandem_merge_args;

/* stream: as for tandem_forward. Needs no workspace. */
TANDEM_API tandem_status tandem_merge(tandem_context* context, const tandem_merge_args* args, void* stream);

/* Compiles ahead what every merge on the context's GPU needs; nothing on the CPU. */
TANDEM_API tandem_status tandem_prepare_merge(tandem_context* context);

/* ---- Block masks of a mask_mod: since 0.2 ----------------------------------------------------------------------- */

/* The lists of blocks that tandem_attention_args takes, made from a mask_mod. A block is full where it is seen whole
 * and lies within the sequences, else partial where some of it is seen: as torch's create_block_mask has it. Of each
 * block the text is first asked for all of it at once, by interval arithmetic; where that does not decide, for one
 * query and key after the other. Nothing of seqlen_q x seqlen_k is held. */
typedef struct tandem_block_mask_args {
  int64_t size; /* sizeof(tandem_block_mask_args) */
  const tandem_mod* mask_mod;
  int64_t batch; /* that have lists of their own, from 0 on: 1 where the text does not read it */
  int64_t heads;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t mask_block_q; /* at least 1 */
  int64_t mask_block_k;

  /* Results, int32, any strides. For each block of queries how many blocks of keys, (batch, heads, blocks of queries),
   * and which, (batch, heads, blocks of queries, blocks of keys): those of the list first and then the others, each in
   * rising order. Without the full ones, which may be NULL, the first list has both kinds. */
  const tandem_tensor* kv_num_blocks;
  const tandem_tensor* kv_indices;
  const tandem_tensor* full_kv_num_blocks;
  const tandem_tensor* full_kv_indices;
  /* The same for each block of keys, (batch, heads, blocks of keys[, blocks of queries]): may be NULL. */
  const tandem_tensor* q_num_blocks;
  const tandem_tensor* q_indices;
  const tandem_tensor* full_q_num_blocks;
  const tandem_tensor* full_q_indices;
} tandem_block_mask_args;

/* workspace: a byte for each block of each list: batch * heads * blocks of queries * blocks of keys. stream: as for
 * tandem_forward. On a GPU each text is a kernel. */
TANDEM_API tandem_status tandem_make_block_mask(tandem_context* context, const tandem_block_mask_args* args,
                                                void* workspace, size_t workspace_bytes, void* stream);

/* Compiles ahead what that call needs; nothing on the CPU. Ignores data pointers. */
TANDEM_API tandem_status tandem_prepare_block_mask(tandem_context* context, const tandem_block_mask_args* args);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_TANDEM_H_ */
