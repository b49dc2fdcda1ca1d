/* Tandem: exact attention, forward and backward. The C interface (C11 and C++; includes no other header of Tandem).
 *
 *   out = softmax(mask(score_mod(bias(softcap(softmax_scale * q k^T))))) v
 *
 * Shapes: dense tensors are (batch, seqlen, heads, head_dim); packed tensors are (total, heads, head_dim) with
 * cu_seqlens. Strides are free, but the last dimension is contiguous. Query head h reads key/value head
 * h / (heads_q / heads_k).
 *
 * Use: fill tandem_attention_args, call tandem_workspace_size once per shape, then tandem_forward and tandem_backward.
 *
 * Errors: a call is checked completely before anything is written. No function throws, aborts or prints. A failed call
 * returns a code, and tandem_last_error() names the argument, its value, the rule and the remedy. TANDEM_LOG=1 in the
 * environment writes one line to stderr for every call on a GPU: it names the kernel. */
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

/* DLPack's device types with a name in Tandem. */
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
  TANDEM_INVALID_ARGUMENT = 1,    /* the arguments contradict each other or a rule of this file */
  TANDEM_UNSUPPORTED = 2,         /* a valid call that this device or version does not serve */
  TANDEM_WORKSPACE_TOO_SMALL = 3, /* workspace_bytes is below tandem_workspace_size() */
  TANDEM_COLD_KERNEL = 4,         /* capture would compile a kernel: call tandem_prepare first */
  TANDEM_NO_COMPILER = 5,         /* a kernel must be compiled and no NVRTC was found */
  TANDEM_DEVICE_ERROR = 6,        /* the device or its driver reported an error */
  TANDEM_INTERNAL_ERROR = 7       /* a defect of Tandem: please report it */
} tandem_status;

/* "0.2.0"; static storage. */
TANDEM_API const char* tandem_version(void);

/* The error message of this thread's last failed call, or "". The message is valid until this thread's next failed
 * call. */
TANDEM_API const char* tandem_last_error(void);

/* "invalid argument", "unsupported", ...; static storage. Any integer may be passed. */
TANDEM_API const char* tandem_status_name(int32_t status);

/* ---- Context ---------------------------------------------------------------------------------------------------- */

/* GPUs. A context of device "cuda:N" works on tensors of device {TANDEM_CUDA, N}. The context uses the device's primary
 * context, which torch and other libraries share. tandem_forward enqueues its kernels on the caller's stream and
 * returns. The call neither allocates nor synchronizes, so that a graph can capture it. NVRTC compiles a kernel before
 * its first use, unless the cache on disk has it; tandem_prepare does this in advance. The host reads no device memory
 * unless validate is set: kernels clamp indices on the device to the tensors. A later call may report errors of the
 * device.
 *
 * Virtual GPUs ("vgpu:h200", ...) run the same kernels in software and check them. Tensors are in host memory, streams
 * are ignored, and a call returns when its results are written (vgpu/docs/virtual-gpu.md).
 *
 * Threads. Any thread may call any function. Several threads may use one context at once; each call needs its own
 * workspace. */

/* Owns the device, its compiled kernels and its threads. Every function accepts NULL for the process default: device
 * "cpu" with one thread per core that this process may use. */
typedef struct tandem_context tandem_context;

/* Calls body(body_data, task) once for every task in [0, tasks), in any order and on any threads. Returns after all
 * calls have returned. A serial loop is allowed. Must not unwind. */
typedef void (*tandem_parallel_for)(void* user_data, int32_t tasks, void (*body)(void* body_data, int32_t task),
                                    void* body_data);

typedef struct tandem_context_options {
  /* threads: the maximum per call, 1..1024; 0 means one per available core. GPUs ignore threads. parallel_for runs
   * tasks on the caller's threads. NULL: the context starts threads, which sleep between calls. */
  int64_t size;
  const char* device; /* "cpu" (default), "cuda" (first GPU), "cuda:N", "vgpu:MODEL" */
  int32_t threads;
  tandem_parallel_for parallel_for;
  void* parallel_for_data;
} tandem_context_options;

/* options may be NULL. On failure *context is set to NULL. */
TANDEM_API tandem_status tandem_context_create(const tandem_context_options* options, tandem_context** context);
/* NULL is ignored. No call may be running on the context. */
TANDEM_API void tandem_context_destroy(tandem_context* context);
/* One line that describes the context. Examples: "cpu, 2 threads, avx512_bf16 with bfloat16 dot products" and "cuda:0,
 * NVIDIA H200, 132 SMs, driver 13.0, kernels compiled by NVRTC 13.0". The text is valid while the context exists. */
TANDEM_API const char* tandem_context_description(tandem_context* context);
/* The number of threads that a call may use; 1 on a GPU. */
TANDEM_API int32_t tandem_context_threads(tandem_context* context);

/* ---- Score and mask modifications: since 0.2 (docs/score_mod.md)
 * -------------------------------------------------------
 */

/* A number that an expression names. Each call passes its value; a new value needs no compilation. A number that
 * needs a gradient is passed as a tensor without dimensions. */
typedef struct tandem_mod_scalar {
  const char* name;
  int32_t type;     /* TANDEM_FLOAT, TANDEM_INT (32 bits) or TANDEM_BOOL */
  int32_t reserved; /* zero */
  double value;
} tandem_mod_scalar;

/* A tensor that an expression reads: 0 to 4 dimensions, any strides; bool, int32, int64 or float. backward writes
 * gradient, which has the tensor's shape and its dtype or float32. NULL: no gradient. Only float tensors of a
 * score_mod have one. */
typedef struct tandem_mod_tensor {
  const char* name;
  const tandem_tensor* tensor;
  const tandem_tensor* gradient;
} tandem_mod_tensor;

/* One line such as "score - slope[head] * abs(q - k)", with the scalars and tensors that it names. The call reads the
 * struct and keeps no pointer to it. */
typedef struct tandem_mod {
  int64_t size; /* sizeof(tandem_mod) */
  const char* text;
  const tandem_mod_scalar* scalars;
  int64_t scalar_count;
  const tandem_mod_tensor* tensors;
  int64_t tensor_count;
} tandem_mod;

/* ---- Attention -------------------------------------------------------------------------------------------------- */

/* The diagonal of causal masks, windows and ALiBi: key j is at distance i + offset - j from query i. */
enum {
  /* offset = seqlen_k - seqlen_q (used lengths): the diagonal ends at the last query and the last key. */
  TANDEM_BOTTOM_RIGHT = 0,
  /* offset = 0: the diagonal begins at the first query and the first key. */
  TANDEM_TOP_LEFT = 1,
  /* offset = diagonal_offset + diagonal_offsets[sequence]. */
  TANDEM_EXPLICIT = 2
};

/* An unbounded side of a window. */
#define TANDEM_UNBOUNDED INT64_MAX

/* Bits of tandem_attention_args.window. */
enum { TANDEM_WINDOW_LEFT = 1, TANDEM_WINDOW_RIGHT = 2 };

/* The place of a sequence's rows in a longer sequence, the document. Row i is query first_query + i * stride. Key j is
 * key first_key + j * stride. */
typedef struct tandem_place {
  int32_t document; /* `batch` of expressions, and `sequence` of dropout */
  int32_t first_query;
  int32_t first_key;
  int32_t stride;
  int32_t seqlen_q; /* lengths of the document */
  int32_t seqlen_k;
  int32_t diagonal;   /* the document's offset, for ALiBi */
  int32_t first_head; /* the first query head of the call, */
  int32_t heads_q;    /* among this number of query heads */
} tandem_place;

/* The arguments of every function below. Set size, zero the rest, then fill in the fields that the call uses: zero
 * is the default, and a NULL tensor is absent. A shorter struct of an older version is accepted: the missing fields
 * are zero. A longer struct of a later version is accepted if the fields unknown to this version are zero
 * (docs/abi.md).
 *
 * dtype T: float32, bfloat16 or float16; also float64 on the CPU, by reference loops. q, k and v have dtype T. out,
 * dout and every gradient have dtype T or float32, each chosen separately. float32 keeps digits that T would lose
 * when parts are merged or gradients are added. A float64 call uses float64 for all of them. */
typedef struct tandem_attention_args {
  int64_t size; /* sizeof(tandem_attention_args) */

  /* Inputs of dtype T. Dense: (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_k, head_dim) and (batch,
   * seqlen_k, heads_k, head_dim_v). Packed: (total_q, ...), (total_k, ...) and (total_k, ...). page_table gives k
   * and v the shape (pages, page_size, heads_k, ...). */
  const tandem_tensor* q;
  const tandem_tensor* k;
  const tandem_tensor* v;

  /* Outputs of forward, inputs of backward. out: the shape of q with head_dim_v; T or float32. lse: natural
   * logarithm, float32 (float64 if T is), any strides; (batch, heads_q, seqlen_q) or packed (heads_q, total_q). The
   * LSE includes the sink and is -inf for a row without visible keys. forward: lse is optional. backward: both are
   * required. */
  const tandem_tensor* out;
  const tandem_tensor* lse;

  /* backward: dout (required) and dlse (optional) are the gradients of out and lse. dq, dk and dv are outputs of T
   * or float32; a NULL gradient is not computed. A float32 dout is rounded to T before it enters a matrix product. */
  const tandem_tensor* dout;
  const tandem_tensor* dlse;
  const tandem_tensor* dq;
  const tandem_tensor* dk;
  const tandem_tensor* dv;

  /* A bias is added to the scores after softcap: (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), float32 or T. The
   * gradient dbias has the same shape and the bias's dtype or float32, and sums over broadcast dimensions. A boolean
   * bias is a mask: true means visible. Dense calls only. */
  const tandem_tensor* bias;
  const tandem_tensor* dbias;

  /* One extra logit per query head, which enters the softmax and has no value: (heads_q), float32 or T. The gradient
   * dsink has sink's dtype or float32. If parts are merged, exactly one part has the sink: see tandem_merge. */
  const tandem_tensor* sink;
  const tandem_tensor* dsink;

  /* ALiBi adds -slope * |i + offset - j| to the scores: (heads_q) or (batch, heads_q), float32. */
  const tandem_tensor* alibi_slopes;

  /* Packed calls: (batch + 1), int32, from 0, not decreasing, ending at total. Give both, or cu_seqlens_q with
   * page_table. With page_table cu_seqlens_q may end before total_q: the rows after it are not read or written. */
  const tandem_tensor* cu_seqlens_q;
  const tandem_tensor* cu_seqlens_k;
  /* Used lengths: (batch), int32, at most the sequence's own length. Rows beyond the used lengths are set to zero in
   * out, dq, dk and dv, and to -inf in lse. */
  const tandem_tensor* seqused_q;
  const tandem_tensor* seqused_k;
  /* (batch, max_pages), int32, any strides: page_table[b, p] is the page of keys [p * page_size, (p + 1) * page_size)
   * of sequence b. seqused_k has the lengths. Entries are unused after the last key, and if their page ends before all
   * visible keys; they may have any value. On a GPU page_size is a multiple of 16, and a used entry that is no page has
   * keys and values of 0. The backward refuses a page_table. */
  const tandem_tensor* page_table;
  /* At least the longest sequence's length. Packed calls: 0 means total in host memory and is refused on "cuda:N".
   * With page_table and seqused_k, 0 means max_pages * page_size. */
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  /* softmax_scale: 0 means 1 / sqrt(head_dim). softcap: 0 means off; a positive softcap replaces a score by softcap *
   * tanh(score / softcap). */
  double softmax_scale;
  double softcap;

  int32_t causal;    /* nonzero: window_right is at most 0 */
  int32_t alignment; /* TANDEM_BOTTOM_RIGHT, TANDEM_TOP_LEFT or TANDEM_EXPLICIT */
  /* The bounds that apply: TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT. */
  int32_t window;
  int32_t reserved; /* zero */
  /* Key j is visible if i + offset - window_left <= j <= i + offset + window_right. Bounds have either sign, but
   * their sum is at least 0. */
  int64_t window_left;
  int64_t window_right;

  /* Dropout uses Philox4x32-7 with key (seed.lo, seed.hi + offset.hi) and counter (column / 16, row, sequence *
   * heads_q + head, offset.lo). With c = column % 16, the entry's byte is byte (c / 2) % 4 (0 is least significant)
   * of word 2 * (c / 8) + c % 2. An entry is dropped if its byte is below t. t is dropout_p * 256, rounded to an
   * integer in [1, 255], or 0 if dropout_p is 0. Kept entries are scaled by 256 / (256 - t). lse is the LSE of the
   * softmax without dropout.
   *
   * If seed_ptr or offset_ptr is not NULL, the device reads the value there instead. */
  double dropout_p; /* [0, 1) */
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t* dropout_seed_ptr;
  const uint64_t* dropout_offset_ptr;

  /* The forward on a GPU divides the keys into this number of splits, fewer if keys are few. The splits'
   * float32 results are merged in order. 0: chosen by the problem's sizes, with batch_invariant by each sequence's.
   * Not above 1 with block lists or batch_invariant. The CPU and the backward do not read num_splits. 0..1024. */
  int32_t num_splits;
  /* Engines ignore deterministic: forward and backward are always bitwise reproducible, on the CPU and on GPUs. */
  int32_t deterministic;
  /* Nonzero: a sequence's result depends on that sequence alone (docs/semantics.md). This always holds on the CPU. */
  int32_t batch_invariant;
  /* Nonzero: a GPU's call synchronises and checks the index tensors. The CPU always checks index tensors. */
  int32_t validate;

  /* ---- Fields since 0.2 ---- */

  /* Both must be 0 and NULL without TANDEM_EXPLICIT. The sum of both is the diagonal's offset in keys, of either
   * sign. Queries and keys that are parts of longer sequences use offset = first query's position - first key's
   * position. diagonal_offsets: (batch), int32, read on the device; NULL means zeros. Sums are clamped to +-2^29. */
  int64_t diagonal_offset;
  const tandem_tensor* diagonal_offsets;

  /* backward, nonzero: every gradient is added to its tensor's contents. The sum is float32 (float64 if T is), is
   * rounded once to the tensor's dtype, and is bitwise reproducible. Rows beyond the used lengths do not change. */
  int32_t accumulate;

  /* The number of a GPU's multiprocessors that a call may use; 0 means all. The rest stay free for other work. A
   * kernel with clusters of two CTAs uses at least two. sm_limit changes no bits. The CPU ignores sm_limit: see
   * tandem_context_options.threads. */
  int32_t sm_limit;

  /* Changes every score: a float expression of score, batch, head, q, k, seqlen_q, seqlen_k and the names of its
   * scalars and tensors. The expression is applied after softcap, ALiBi and bias, and before masks; -inf hides a
   * key. Positions count from 0 in their sequence and do not depend on the diagonal. */
  const tandem_mod* score_mod;
  /* Hides keys in addition to causal, window and boolean bias: a bool expression of the same names without score. */
  const tandem_mod* mask_mod;

  /* A block mask in the format of torch's BlockMask. For each block of mask_block_q queries it lists blocks of
   * mask_block_k keys, in any order. A GPU skips the blocks that are in no list: their keys are hidden.
   *
   *   full_kv_indices  all keys of the block are visible; mask_mod is not evaluated
   *   kv_indices       mask_mod decides; without a mask_mod all keys are visible
   *
   * A block in both lists counts as full. Causal, window and boolean bias apply in addition. All are int32 with any
   * strides: kv_num_blocks (batch|1, heads_q|1, blocks of queries), kv_indices (batch|1, heads_q|1, blocks of queries,
   * any number). Give both or neither; the full lists follow the same rule. The first kv_num_blocks[...] indices of a
   * row count. The device clamps counts to the row and ignores an index that is no block of keys. Dense calls only. */
  const tandem_tensor* kv_num_blocks;
  const tandem_tensor* kv_indices;
  const tandem_tensor* full_kv_num_blocks;
  const tandem_tensor* full_kv_indices;
  int64_t mask_block_q; /* at least 1 with a block mask, else 0 */
  int64_t mask_block_k;

  /* Output of forward, optional, with the shape and dtype rules of lse: the largest visible score of each query. The
   * maximum is read after score_mod and masks, without the sink. -inf: no visible key; NaN: a score is NaN. A GPU
   * runs one more kernel, which computes all scores again. */
  const tandem_tensor* max_scores;

  /* Nonzero: the lists equal the result of tandem_make_block_mask for this mask_mod, with its present scalars and
   * tensors, and these lengths. A mask_mod that is a causal mask or a window then runs as fast as those options, and
   * the lists are not read. */
  int32_t blocks_of_mask_mod;
  int32_t reserved_2; /* zero */

  /* (batch, 9), int32, compact, read on the device: the members of a tandem_place for each sequence. score_mod,
   * mask_mod, dropout and ALiBi's distances have its positions. Other masks, bias and block lists count from 0 in the
   * call. NULL: sequences are whole. */
  const tandem_tensor* places;
} tandem_attention_args;

/* The pass that a check, a workspace size or a preparation is for. */
typedef enum tandem_pass { TANDEM_FORWARD = 0, TANDEM_BACKWARD = 1 } tandem_pass;

/* Returns TANDEM_OK if the call would be served, else the error of the call. Ignores data pointers: tensors may be
 * unallocated. */
TANDEM_API tandem_status tandem_check(tandem_context* context, tandem_pass pass, const tandem_attention_args* args);

/* The same for tensors that exist. Data that the call would refuse is refused too: a result that overlaps an input,
 * and on the CPU invalid lengths and pages. Writes nothing. */
TANDEM_API tandem_status tandem_check_data(tandem_context* context, tandem_pass pass,
                                           const tandem_attention_args* args);

/* The number of bytes of workspace that the call needs on this context. Equal shapes need the same number. Ignores
 * data pointers. */
TANDEM_API tandem_status tandem_workspace_size(tandem_context* context, tandem_pass pass,
                                               const tandem_attention_args* args, size_t* bytes);

/* Compiles the kernels of the call, so that the call itself only launches them. Does nothing on the CPU. Ignores
 * data pointers. */
TANDEM_API tandem_status tandem_prepare(tandem_context* context, tandem_pass pass, const tandem_attention_args* args);

/* Compiles every kernel that the forwards of a server can choose, for the options, heads and page size of args. The
 * lengths of args are the largest ones. The lengths are batch, seqlen_q, total_q, max_seqlen_q, seqlen_k, max_seqlen_k
 * and max_pages. Also compiles the kernel of tandem_append_kv. Processes that share a cache on disk compile each kernel
 * once. Refuses a bias and block lists, whose shapes have lengths. Does nothing on the CPU. Ignores data pointers.
 * Since 0.2. */
TANDEM_API tandem_status tandem_prepare_serving(tandem_context* context, const tandem_attention_args* args);

/* Writes out, and lse unless it is NULL. workspace: workspace_bytes of the device's memory, any alignment; NULL if 0
 * are needed. stream: a CUstream (cudaStream_t) of the context's device; NULL is its default stream. On the CPU
 * stream is NULL, and the call returns when the results are written. */
TANDEM_API tandem_status tandem_forward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                                        size_t workspace_bytes, void* stream);

/* Writes the gradients that are not NULL. Reads q, k, v, out, lse, dout and dlse. */
TANDEM_API tandem_status tandem_backward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                                         size_t workspace_bytes, void* stream);

/* ---- Merging: since 0.2 ----------------------------------------------------------------------------------------- */

/* Merges attention over disjoint sets of keys, each computed by one tandem_forward, into attention over all keys:
 *
 *   lse = log(sum over parts of exp(part_lse)),   out = sum over parts of exp(part_lse - lse) * part_out
 *
 * Sums are float32, in the order of the parts. A part with lse -inf (no visible key) has weight 0, and its out is not
 * read. If every part has lse -inf, out is 0 and lse is -inf. An lse of NaN or +inf makes out and lse of that query and
 * head NaN.
 *
 * A sink belongs to the whole softmax: pass it to the forward of exactly one part, or it counts several times. The
 * backward of every part reads the merged out and lse; pass sink and dsink to exactly one of these calls. */
typedef struct tandem_merge_args {
  int64_t size; /* sizeof(tandem_merge_args) */
  /* The number of parts, at least 1. On a GPU more than 60 parts need a float32 out, and lse. */
  int64_t parts;

  /* `parts` tensors each. out: (batch, seqlen, heads, head_dim) or (total, heads, head_dim), float32, bfloat16 or
   * float16, each chosen separately. On the CPU all may be float64. lse: (batch, heads, seqlen) or (heads, total),
   * float32, or float64 if out is. Strides are free, but head_dim is contiguous. */
  const tandem_tensor* const* part_out;
  const tandem_tensor* const* part_lse;

  /* The results, with the same shapes; lse may be NULL. A result may be a part's tensor (in place); otherwise it
   * must not overlap any part. */
  const tandem_tensor* out;
  const tandem_tensor* lse;
} tandem_merge_args;

/* stream: see tandem_forward. No workspace is needed. */
TANDEM_API tandem_status tandem_merge(tandem_context* context, const tandem_merge_args* args, void* stream);

/* Compiles every kernel that a merge on the context's GPU needs. Does nothing on the CPU. */
TANDEM_API tandem_status tandem_prepare_merge(tandem_context* context);

/* ---- Shared prefixes: since 0.2 --------------------------------------------------------------------------------- */

/* Attention of requests to keys that their group shares, and to their own keys, which follow the shared keys. The
 * shared keys are read once for each group. The call runs a forward for the shared keys and a forward for the own keys,
 * and merges both float32 results in this order. In the first forward the queries of a group are one sequence without
 * a mask. With batch_invariant a request's result depends on its group alone. */
typedef struct tandem_cascade_args {
  int64_t size; /* sizeof(tandem_cascade_args) */

  /* The forward of each request's own keys: packed q, cu_seqlens_q, k and v in pages, page_table, seqused_k. out and
   * lse are the results of the whole call, and lse may be NULL. causal hides own keys only. The sink counts once. bias,
   * alibi_slopes, dropout, score_mod, mask_mod, block lists, windows, other alignments, seqused_q and max_scores are
   * refused. If cu_seqlens_q ends before total_q, the rows after it have undefined results. */
  const tandem_attention_args* own;

  /* (groups + 1), int32: the first row of q of each group. Groups are whole requests, and the last entry equals
   * cu_seqlens_q's, which the CPU checks. */
  const tandem_tensor* cu_seqlens_group;
  /* (groups, max_pages) and (groups), int32: the pages and the number of each group's shared keys. The number may be 0.
   * The rules of page_table and seqused_k apply. */
  const tandem_tensor* group_page_table;
  const tandem_tensor* group_seqused_k;
  int64_t max_rows_group; /* at least the rows of q of the largest group; 0: total_q */
} tandem_cascade_args;

/* Returns the bytes of workspace, or the error of the call. Ignores data pointers. */
TANDEM_API tandem_status tandem_cascade_workspace_size(tandem_context* context, const tandem_cascade_args* args,
                                                       size_t* bytes);

/* Compiles the kernels of the call. Does nothing on the CPU. Ignores data pointers. */
TANDEM_API tandem_status tandem_prepare_cascade(tandem_context* context, const tandem_cascade_args* args);

/* workspace, stream: see tandem_forward. A GPU reads all lengths and tables on the device, so that a captured graph may
 * be replayed with other values. out and lse are written by the merge alone. */
TANDEM_API tandem_status tandem_cascade(tandem_context* context, const tandem_cascade_args* args, void* workspace,
                                        size_t workspace_bytes, void* stream);

/* ---- Appending to a cache: since 0.2 ---------------------------------------------------------------------------- */

/* Writes new keys and values into a cache, and rotates new keys and queries (rotary position embedding).
 *
 * Place. With slot_mapping new key i has slot slot_mapping[i]: row slot % page_size of page slot / page_size; a
 * negative slot skips the key. Otherwise key i of sequence b has place p = cache_seqlens[b] + i. With page_table the
 * place is row p % page_size of page page_table[s, p / page_size], else row p of row s of the cache. s is
 * cache_batch_idx[b], or b.
 *
 * A GPU skips a new key whose slot, place, page or s is outside the cache, and never writes there. The CPU refuses such
 * a call before it writes. If several new keys have one slot of slot_mapping, the last of them is written. Without
 * slot_mapping no two new keys that differ may have one place: the CPU refuses them.
 *
 * Rotation. A pair of dimensions (x, y) becomes (x cos - y sin, x sin + y cos). Products and sums are float32 (float64
 * if T is), and the result is rounded once to T. cos and sin are row `position` of the tables: positions[i] if
 * positions is given, else rotary_seqlens[b] + i (NULL: cache_seqlens[b] + i). A GPU does not rotate at a position
 * outside the tables; the CPU refuses it. */
typedef struct tandem_append_kv_args {
  int64_t size; /* sizeof(tandem_append_kv_args) */

  /* New keys and values of dtype T: (batch, seqlen_new, heads_k, head_dim) and (batch, seqlen_new, heads_k,
   * head_dim_v). With cu_seqlens_new or slot_mapping (total_new, heads_k, ...). k, v and both caches may be
   * NULL: only q is rotated. */
  const tandem_tensor* k;
  const tandem_tensor* v;
  /* The caches of dtype T: (pages, page_size, heads_k, head_dim) and (pages, page_size, heads_k, head_dim_v), with any
   * page_size. Without page_table and slot_mapping: (rows, seqlen_cache, heads_k, ...). Strides are free, but the last
   * dimension is contiguous: both may be views of one cache, and heads may come before rows. */
  const tandem_tensor* k_cache;
  const tandem_tensor* v_cache;

  /* (length), int64: the slot of each of the first `length` new keys. All other tensors of places must be NULL. */
  const tandem_tensor* slot_mapping;
  /* (rows, max_pages), int32, any strides; batch rows without cache_batch_idx. Only entries of new keys are read. */
  const tandem_tensor* page_table;
  /* (batch), int32: the keys that the cache already has, with a left pad. NULL: 0. */
  const tandem_tensor* cache_seqlens;
  const tandem_tensor* cache_batch_idx; /* (batch), int32 */
  /* (batch + 1), int32, from 0, not decreasing. The last sum may be below total_new: the rows after it are not read. */
  const tandem_tensor* cu_seqlens_new;

  /* Queries of dtype T, (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with cu_seqlens_q or
   * positions. q_out has q's shape and dtype, and may be q's tensor. Both NULL: no queries. Rows of no sequence are
   * neither read nor written. */
  const tandem_tensor* q;
  const tandem_tensor* q_out;
  const tandem_tensor* cu_seqlens_q; /* with the rules of cu_seqlens_new */

  /* (table_rows, rotary_dim / 2), dtype T or float32. Both NULL: no rotation. rotary_dim is at most head_dim; later
   * dimensions are copied. */
  const tandem_tensor* rotary_cos;
  const tandem_tensor* rotary_sin;
  const tandem_tensor* rotary_seqlens; /* (batch), int32: the position of the first new key */
  /* (length), int64: the position of each row of q, and of each row of k with slot_mapping. */
  const tandem_tensor* positions;
  /* Nonzero: pairs are dimensions (2 i, 2 i + 1). 0: pairs are dimensions (i, i + rotary_dim / 2). */
  int32_t rotary_interleaved;
  /* Nonzero: all queries of a sequence have the position of its first new key. */
  int32_t single_q_position;
} tandem_append_kv_args;

/* stream: see tandem_forward. No workspace is needed. A GPU runs one kernel, which a graph can capture: lengths, slots
 * and tables are read on the device. */
TANDEM_API tandem_status tandem_append_kv(tandem_context* context, const tandem_append_kv_args* args, void* stream);

/* Compiles the kernel of tandem_append_kv, one for all arguments. Does nothing on the CPU. */
TANDEM_API tandem_status tandem_prepare_append_kv(tandem_context* context);

/* ---- Block masks of a mask_mod: since 0.2 ----------------------------------------------------------------------- */

/* Computes the block lists of tandem_attention_args from a mask_mod, with the rules of torch's create_block_mask. A
 * block is full if all its pairs are visible and lie within the sequences. A block is partial if some are visible.
 * Interval arithmetic evaluates the mask_mod for a whole block first; undecided blocks are evaluated pair by pair.
 * Memory does not grow with seqlen_q * seqlen_k. */
typedef struct tandem_block_mask_args {
  int64_t size; /* sizeof(tandem_block_mask_args) */
  const tandem_mod* mask_mod;
  /* batch and heads: the size of the lists, for sequences and heads from 0 on; 1 if the mask_mod does not read batch
   * or head. */
  int64_t batch;
  int64_t heads;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t mask_block_q; /* at least 1 */
  int64_t mask_block_k;

  /* Results, int32, any strides. kv_num_blocks: (batch, heads, blocks of queries). kv_indices: (batch, heads, blocks
   * of queries, blocks of keys); the listed blocks come first, then all remaining blocks, each group in rising
   * order. The full lists may be NULL: the first lists then hold both kinds. */
  const tandem_tensor* kv_num_blocks;
  const tandem_tensor* kv_indices;
  const tandem_tensor* full_kv_num_blocks;
  const tandem_tensor* full_kv_indices;
  /* The same lists for each block of keys, (batch, heads, blocks of keys[, blocks of queries]). These lists may be
   * NULL. */
  const tandem_tensor* q_num_blocks;
  const tandem_tensor* q_indices;
  const tandem_tensor* full_q_num_blocks;
  const tandem_tensor* full_q_indices;
} tandem_block_mask_args;

/* workspace: batch * heads * blocks of queries * blocks of keys bytes. stream: see tandem_forward. A GPU compiles
 * one kernel for each mask_mod. */
TANDEM_API tandem_status tandem_make_block_mask(tandem_context* context, const tandem_block_mask_args* args,
                                                void* workspace, size_t workspace_bytes, void* stream);

/* Compiles the kernel of tandem_make_block_mask. Does nothing on the CPU. Ignores data pointers. */
TANDEM_API tandem_status tandem_prepare_block_mask(tandem_context* context, const tandem_block_mask_args* args);

/* ---- XLA: since 0.2 --------------------------------------------------------------------------------------------- */

/* Handlers of XLA's foreign function interface (FFI), which JAX registers as targets of jax.ffi.ffi_call. The handlers
 * depend on XLA's C structs alone, and on no version of jaxlib. The CUDA handlers run on XLA's stream, and XLA
 * allocates their workspace. Buffers are row-major. These attributes describe a call:
 *
 *   inputs, outputs  names of the buffers, in order, separated by commas: members of tandem_attention_args, "seed", and
 *                    "score_mod.NAME" or "mask_mod.NAME" for the tensors of an expression. The output
 *                    "dscore_mod.NAME" is the gradient of "score_mod.NAME".
 *   other names      numbers of tandem_attention_args, such as causal and softcap (int32, int64 or float64)
 *   score_mod        an expression (string); "score_mod.NAME" is the value of a number that it names. mask_mod has the
 *                    same form.
 *
 * A seed is two uint32, one 64-bit integer, or two for seed and offset. */
struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;
TANDEM_API struct XLA_FFI_Error* tandem_xla_cpu_forward(struct XLA_FFI_CallFrame* frame);
TANDEM_API struct XLA_FFI_Error* tandem_xla_cpu_backward(struct XLA_FFI_CallFrame* frame);
TANDEM_API struct XLA_FFI_Error* tandem_xla_cuda_forward(struct XLA_FFI_CallFrame* frame);
TANDEM_API struct XLA_FFI_Error* tandem_xla_cuda_backward(struct XLA_FFI_CallFrame* frame);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_TANDEM_H_ */
