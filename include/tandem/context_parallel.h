/* Context parallelism: one attention over several ranks, each of which holds a shard of the tokens. The C interface.
 *
 * Every rank creates the same tandem_cp_plan and keeps the rows that the plan assigns to it. All ranks call
 * tandem_cp_forward and tandem_cp_backward at the same time. The caller supplies the transport.
 *
 * Use: create a plan, read the rank's tokens with tandem_cp_plan_tokens, fill tandem_cp_args, then call
 * tandem_cp_forward. docs/design/context_parallel.md explains layouts, executions and chunks. Tensors are on the
 * context's device.
 */
#ifndef TANDEM_CONTEXT_PARALLEL_H_
#define TANDEM_CONTEXT_PARALLEL_H_

#include "tandem/tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Plan ------------------------------------------------------------------------------------------------------- */

/* The ranks of the tokens. BALANCED gives each rank the same number of queries and nearly the same work. */
enum {
  TANDEM_CP_BALANCED = 0,
  TANDEM_CP_CONTIGUOUS = 1,
  TANDEM_CP_ZIGZAG = 2,
  TANDEM_CP_PER_DOCUMENT = 3,
  TANDEM_CP_STRIPED = 4
};

/* Set size, zero the rest, then fill in the fields that the plan uses. Every rank passes the same values. */
typedef struct tandem_cp_plan_args {
  int64_t size; /* sizeof(tandem_cp_plan_args) */
  int32_t ranks;
  int32_t layout;
  /* 0, or the tokens of a chunk. With chunks the bits of every result depend neither on the number of ranks nor on the
   * layout and the execution. Sums over chunks then follow one tree, which needs more memory and messages. */
  int64_t chunk;
  /* The packed sequences: `documents` lengths each. k_lens NULL: q_lens. diagonals: only with TANDEM_EXPLICIT, the
   * position of the first query minus the position of the first key. */
  int64_t documents;
  const int64_t* q_lens;
  const int64_t* k_lens;
  const int64_t* diagonals;
  /* The mask, with the meaning of the same fields of tandem_attention_args. */
  int32_t causal;
  int32_t alignment;
  int32_t window;
  int32_t reserved; /* zero */
  int64_t window_left;
  int64_t window_right;
  /* A block mask for all heads, or zeros. Document d has ceil(q_len / block_q) rows of blocks, and the rows of all
   * documents follow each other. Row r lists key_blocks[block_rows[r]] to key_blocks[block_rows[r + 1] - 1], ascending:
   * block b has the keys [b * block_k, (b + 1) * block_k) of the document. Keys of other blocks are hidden. Entries of
   * full_blocks are nonzero for blocks in which mask_mod is not evaluated; NULL: none. chunk is a multiple of both
   * sizes, and the striped layout needs a chunk. On GPUs both sizes are multiples of 128. tandem_cp_plan_steps does
   * not return the block mask. */
  int64_t block_q;
  int64_t block_k;
  const int64_t* block_rows;
  const int32_t* key_blocks;
  const uint8_t* full_blocks;
} tandem_cp_plan_args;

/* The plan copies its arguments. Several threads may use one plan at once. */
typedef struct tandem_cp_plan tandem_cp_plan;

/* On failure *plan is set to NULL. */
TANDEM_API tandem_status tandem_cp_plan_create(const tandem_cp_plan_args* args, tandem_cp_plan** plan);
/* NULL is ignored. */
TANDEM_API void tandem_cp_plan_destroy(tandem_cp_plan* plan);

/* Equal on ranks that created a plan from equal arguments. */
TANDEM_API uint64_t tandem_cp_plan_hash(const tandem_cp_plan* plan);

/* The numbers of rows of a rank's tensors. */
TANDEM_API tandem_status tandem_cp_plan_rows(const tandem_cp_plan* plan, int32_t rank, int64_t* q_rows,
                                             int64_t* k_rows);

/* Writes the document and the position in it for each row of a rank's queries (keys = 0) or keys (keys = 1). Either
 * array may be NULL; the other has as many entries as tandem_cp_plan_rows returns. */
TANDEM_API tandem_status tandem_cp_plan_tokens(const tandem_cp_plan* plan, int32_t rank, int32_t keys,
                                               int32_t* documents, int64_t* positions);

/* Queries of one rank that attend to keys of one rank. Rows count from 0 in the shards of both ranks. */
typedef struct tandem_cp_step {
  int32_t document;
  int32_t stride; /* distance of neighbouring rows in positions */
  int64_t q_row;
  int64_t q_count;
  int64_t k_row;
  int64_t k_count;
  int64_t q_begin; /* position of the first query */
  int64_t k_begin;
  /* The mask of a call on these rows alone: TANDEM_EXPLICIT with this diagonal, and a window. A bound that hides no key
   * is TANDEM_UNBOUNDED. */
  int64_t diagonal;
  int64_t window_left;
  int64_t window_right;
  /* With chunks, the numbers of the chunks. */
  int64_t q_order;
  int64_t k_order;
  int64_t pairs; /* visible (query, key) pairs, at least 1 */
} tandem_cp_step;

/* Writes the steps that q_rank computes with keys of k_rank, in a fixed order. steps NULL: writes only their number. */
TANDEM_API tandem_status tandem_cp_plan_steps(const tandem_cp_plan* plan, int32_t q_rank, int32_t k_rank,
                                              tandem_cp_step* steps, int64_t* count);

/* ---- Transport -------------------------------------------------------------------------------------------------- */

typedef struct tandem_cp_message {
  void* data;
  int64_t bytes;
  int32_t peer;
  int32_t reserved; /* zero */
} tandem_cp_message;

/* The caller's connection between the ranks. Every function returns 0, or any other number to end the call on this
 * rank with TANDEM_DEVICE_ERROR. A lost rank must end in such an error, for example by a timeout. Must not unwind.
 * Messages are in the memory of the context's device. On a GPU exchange() follows the earlier work of `stream`.
 * wait() returns at once there, and the later work of the stream waits for the messages. */
typedef struct tandem_cp_transport {
  int64_t size; /* sizeof(tandem_cp_transport) */
  int32_t rank;
  int32_t ranks;
  void* user_data;
  /* Starts to send and to receive, and stores a handle for wait(). Every rank calls exchange() in the same order. The
   * messages from one rank to another arrive in the order in which they are sent. Buffers stay valid until wait(). */
  int32_t (*exchange)(void* user_data, const tandem_cp_message* sends, int64_t send_count,
                      const tandem_cp_message* receives, int64_t receive_count, void** request);
  int32_t (*wait)(void* user_data, void* request);
  /* Collects `bytes` bytes of every rank, in the order of the ranks. Both places are in host memory. */
  int32_t (*all_gather)(void* user_data, const void* send, void* receive, int64_t bytes);
  /* NULL, or returns a sentence about the last error of this transport. */
  const char* (*last_error)(void* user_data);
  /* The stream of attention and messages: a CUstream. NULL on the CPU. */
  void* stream;
} tandem_cp_transport;

/* Fills in a transport over NCCL for a context of a GPU. comm is the caller's ncclComm_t, which must stay valid until
 * tandem_cp_nccl_close. libnccl.so.2 is loaded at run time. Every call checks NCCL's asynchronous error and returns it.
 * Errors that NCCL finds after a call has returned are returned by the next call, and by tandem_cp_nccl_close. */
TANDEM_API tandem_status tandem_cp_nccl_open(tandem_context* context, void* comm, void* stream,
                                             tandem_cp_transport* transport);
/* Waits for the messages. The context must still exist. */
TANDEM_API tandem_status tandem_cp_nccl_close(tandem_cp_transport* transport);

/* ---- Attention -------------------------------------------------------------------------------------------------- */

/* Executions of a plan. GATHER: a rank receives all needed keys at once, and computes with its own keys meanwhile.
 * RING: the keys of one rank arrive while a rank computes with another rank's keys. HEADS: ranks exchange tokens for
 * heads, and key heads are replicated if ranks share a group of query heads. */
enum { TANDEM_CP_GATHER = 0, TANDEM_CP_RING = 1, TANDEM_CP_HEADS = 2 };

typedef struct tandem_cp_args {
  int64_t size; /* sizeof(tandem_cp_args) */
  tandem_cp_plan* plan;
  const tandem_cp_transport* transport;
  int32_t execution;
  int32_t reserved; /* zero */
  /* The rank's rows: q, out, dout and dq (q_rows, heads_q, ...), k, v, dk and dv (k_rows, heads_k, ...), lse and dlse
   * (heads_q, q_rows). sink and dsink are whole: every rank passes the same sink and receives the whole dsink. The mask
   * and the lengths are the plan's. Served options: softmax_scale, softcap, alibi_slopes (heads_q) or (documents,
   * heads_q), bias, sink, dropout, score_mod and mask_mod. Positions, sequences and heads are the plan's documents and
   * the whole call's. Tensors of expressions are whole: every rank passes the same ones, and receives their whole
   * gradients. All other options are refused, and so is a float64 gradient of such a tensor on a GPU.
   *
   * bias and dbias: (heads_q|1, q_rows, keys). Column j is for key j of the row's document. All ranks pass equal
   * numbers of columns, at least the longest document's keys. The last stride is 1; equal rows of bias may have stride
   * 0. dbias sums over heads if bias has one, and is 0 in columns without a visible key. */
  const tandem_attention_args* attention;
} tandem_cp_args;

/* The first call with a plan, shapes and options compares a hash between the ranks, and a difference is an error on all
 * ranks. Writes out, and lse unless it is NULL. */
TANDEM_API tandem_status tandem_cp_forward(tandem_context* context, const tandem_cp_args* args);

/* Writes the gradients that are not NULL, on all ranks the same ones. dk, dv and the gradients of tensors of score_mod
 * are summed in float32 in a fixed order. Reads q, k, v, out, lse, dout and dlse. */
TANDEM_API tandem_status tandem_cp_backward(tandem_context* context, const tandem_cp_args* args);

#ifdef __cplusplus
}
#endif

#endif /* TANDEM_CONTEXT_PARALLEL_H_ */
