// The C interface of context parallelism.
#include <cstddef>
#include <memory>

#include "base/text.h"
#include "context_parallel/agreement.h"
#include "context_parallel/captured.h"
#include "context_parallel/execution.h"
#include "context_parallel/read_call.h"
#include "engine/context.h"
#include "engine/guard.h"
#include "problem/struct_size.h"

struct tandem_cp_plan {
  // The lists of a block mask.
  std::vector<int64_t> row_begin;
  std::vector<int32_t> key_blocks;
  std::vector<uint8_t> full_blocks;
  tandem::context_parallel::ContextPlan plan;
  tandem::context_parallel::Agreement agreement;
};

namespace tandem::context_parallel {
namespace {

Status check_null(const char* name, const void* pointer, const char* remedy) {
  if (pointer != nullptr) return {};
  return Status::invalid(str_cat(name, " (NULL) must not be NULL: ", remedy));
}

Status read_layout(int32_t value, LayoutKind* layout) {
  switch (value) {
    case TANDEM_CP_BALANCED: *layout = LayoutKind::balanced; return {};
    case TANDEM_CP_CONTIGUOUS: *layout = LayoutKind::contiguous; return {};
    case TANDEM_CP_ZIGZAG: *layout = LayoutKind::zigzag; return {};
    case TANDEM_CP_PER_DOCUMENT: *layout = LayoutKind::per_document; return {};
    case TANDEM_CP_STRIPED: *layout = LayoutKind::striped; return {};
    default:
      return Status::invalid(
          str_cat("args.layout (", value, ") must be 0 to 4: choose a value of tandem_cp_plan_args"));
  }
}

Status read_documents(const tandem_cp_plan_args& a, std::vector<PackedDocument>* documents) {
  if (a.documents < 0) {
    return Status::invalid(
        str_cat("args.documents (", a.documents, ") must not be negative: pass a number of lengths"));
  }
  if (a.documents > 0) TANDEM_TRY(check_null("args.q_lens", a.q_lens, "pass the length of each document"));
  if (a.alignment < TANDEM_BOTTOM_RIGHT || a.alignment > TANDEM_EXPLICIT) {
    return Status::invalid(str_cat("args.alignment (", a.alignment, ") must be 0 to 2: choose a value of tandem.h"));
  }
  if ((a.alignment == TANDEM_EXPLICIT) != (a.diagonals != nullptr) && a.documents > 0) {
    return Status::invalid("args.diagonals must be passed with TANDEM_EXPLICIT and only then: pass both or neither");
  }
  for (int64_t n = 0; n < a.documents; ++n) {
    PackedDocument d{a.q_lens[n], a.k_lens != nullptr ? a.k_lens[n] : a.q_lens[n], 0};
    if (a.alignment == TANDEM_BOTTOM_RIGHT) d.diagonal = d.k_len - d.q_len;
    if (a.alignment == TANDEM_EXPLICIT) d.diagonal = a.diagonals[n];
    documents->push_back(d);
  }
  return {};
}

Status read_window(const tandem_cp_plan_args& a, ContextProblem* problem) {
  if ((a.window & ~(TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT)) != 0 || a.reserved != 0) {
    return Status::invalid(str_cat("args.window (", a.window, ") must be bits of TANDEM_WINDOW_LEFT and ",
                                   "TANDEM_WINDOW_RIGHT, and args.reserved must be 0: correct the fields"));
  }
  if ((a.window & TANDEM_WINDOW_LEFT) != 0) problem->window_left = a.window_left;
  if ((a.window & TANDEM_WINDOW_RIGHT) != 0) problem->window_right = a.window_right;
  if (a.causal != 0) problem->window_right = std::min<int64_t>(problem->window_right, 0);
  int64_t width = 0;
  if (problem->window_left != TANDEM_UNBOUNDED && problem->window_right != TANDEM_UNBOUNDED &&
      (__builtin_add_overflow(problem->window_left, problem->window_right, &width) || width < 0)) {
    return Status::invalid(str_cat("args.window_left (", problem->window_left, ") and window_right (",
                                   problem->window_right, ") must have a sum of at least 0: widen the window"));
  }
  return {};
}

// Copies the block mask to the plan. make_context_plan() checks its lists.
Status read_block_mask(const tandem_cp_plan_args& a, ContextProblem* problem, tandem_cp_plan* plan) {
  const bool none = a.block_q == 0 && a.block_k == 0;
  if (none && a.block_rows == nullptr && a.key_blocks == nullptr && a.full_blocks == nullptr) return {};
  if (a.block_q < 1 || a.block_k < 1) {
    return Status::invalid(str_cat("args.block_q (", a.block_q, ") and block_k (", a.block_k,
                                   ") must be at least 1 with a block mask: pass the sizes of a block"));
  }
  TANDEM_TRY(check_null("args.block_rows", a.block_rows, "pass the offsets of the rows of blocks"));
  if (problem->layout == LayoutKind::striped && a.chunk == 0) {
    return Status::invalid("args.layout (striped) must have a chunk with a block mask: pass a chunk or another layout");
  }
  if (a.chunk % a.block_q != 0 || a.chunk % a.block_k != 0) {
    return Status::invalid(str_cat("args.chunk (", a.chunk, ") must be a multiple of block_q (", a.block_q,
                                   ") and block_k (", a.block_k, "): pass such a chunk, or 0"));
  }
  int64_t rows = 0;
  for (const PackedDocument& d : problem->documents) rows += ceil_div(std::max<int64_t>(d.q_len, 0), a.block_q);
  plan->row_begin.assign(a.block_rows, a.block_rows + rows + 1);
  const int64_t blocks = plan->row_begin.back();
  if (blocks < 0) {
    return Status::invalid(str_cat("args.block_rows[", rows, "] (", blocks, ") must be the number of key_blocks"));
  }
  if (blocks > 0) TANDEM_TRY(check_null("args.key_blocks", a.key_blocks, "pass the blocks of each row"));
  plan->key_blocks.assign(a.key_blocks, a.key_blocks + blocks);
  if (a.full_blocks != nullptr) plan->full_blocks.assign(a.full_blocks, a.full_blocks + blocks);
  problem->block_mask = {a.block_q, a.block_k, plan->row_begin, plan->key_blocks, plan->full_blocks};
  return {};
}

Status create(const tandem_cp_plan_args* from, tandem_cp_plan** result) {
  TANDEM_TRY(check_null("plan", result, "pass the address of a variable for the new plan"));
  *result = nullptr;
  tandem_cp_plan_args a;
  TANDEM_TRY(read_struct("args", "tandem_cp_plan_args", from, offsetof(tandem_cp_plan_args, block_q), &a));
  std::vector<PackedDocument> documents;
  TANDEM_TRY(read_documents(a, &documents));
  ContextProblem problem;
  problem.documents = documents;
  problem.ranks = a.ranks;
  problem.chunk = a.chunk;
  TANDEM_TRY(read_layout(a.layout, &problem.layout));
  TANDEM_TRY(read_window(a, &problem));
  auto plan = std::make_unique<tandem_cp_plan>();
  TANDEM_TRY(read_block_mask(a, &problem, plan.get()));
  TANDEM_TRY(make_context_plan(problem, &plan->plan));
  *result = plan.release();
  return {};
}

Status check_rank(const tandem_cp_plan* plan, int32_t rank) {
  TANDEM_TRY(check_null("plan", plan, "create a plan with tandem_cp_plan_create"));
  if (rank >= 0 && rank < plan->plan.ranks()) return {};
  return Status::invalid(
      str_cat("rank (", rank, ") must be below ", plan->plan.ranks(), ": pass the rank in the plan's group"));
}

Status check_transport(const tandem_cp_transport& t, const ContextPlan& plan) {
  if (t.exchange == nullptr || t.wait == nullptr || t.all_gather == nullptr) {
    return Status::invalid("transport (a function is NULL) must have all functions: set exchange, wait and all_gather");
  }
  if (t.ranks != plan.ranks()) {
    return Status::invalid(str_cat("transport.ranks (", t.ranks, ") must equal the ", plan.ranks(),
                                   " ranks of the plan: create the plan for this group"));
  }
  if (t.rank >= 0 && t.rank < t.ranks) return {};
  return Status::invalid(str_cat("transport.rank (", t.rank, ") must be below ", t.ranks, ": pass this rank's number"));
}

Status check_call(const tandem_cp_args& args, tandem_context& context, tandem_pass pass, ShardCall* call) {
  if (args.execution < TANDEM_CP_GATHER || args.execution > TANDEM_CP_HEADS) {
    return Status::invalid(str_cat("args.execution (", args.execution, ") must be 0 to 2: choose TANDEM_CP_GATHER, ",
                                   "TANDEM_CP_RING or TANDEM_CP_HEADS"));
  }
  if (args.reserved != 0) {
    return Status::invalid(str_cat("args.reserved (", args.reserved, ") must be 0: zero the struct before the call"));
  }
  TANDEM_TRY(read_shard(pass, args.attention, context.device, call));
  Engine& engine = context.engine_for(call->problem.dtype);
  call->engine.engine = &engine;
  TANDEM_TRY(engine.check_stream(call->engine.stream));
  TANDEM_TRY(engine.check(call->problem));
  return engine.device() != nullptr ? check_for_gpu(call) : Status{};
}

Status run_execution(const ShardCall& call, int32_t execution) {
  const bool forward = call.problem.pass == TANDEM_FORWARD;
  if (execution == TANDEM_CP_HEADS) return run_by_heads(call);
  const int32_t rounds_at_once = execution == TANDEM_CP_RING ? 1 : std::max(1, call.plan->ranks() - 1);
  return forward ? forward_by_rounds(call, rounds_at_once) : backward_by_rounds(call, rounds_at_once);
}

tandem_status run(tandem_context* handle, tandem_pass pass, const tandem_cp_args* from) {
  return guarded([&]() -> Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(context_or_default(handle, &context));
    tandem_cp_args args;
    TANDEM_TRY(read_struct("args", "tandem_cp_args", from, sizeof(tandem_cp_args), &args));
    TANDEM_TRY(check_null("args.plan", args.plan, "create a plan with tandem_cp_plan_create"));
    tandem_cp_transport transport;
    TANDEM_TRY(read_struct("args.transport", "tandem_cp_transport", args.transport, sizeof transport, &transport));
    TANDEM_TRY(check_transport(transport, args.plan->plan));
    ShardCall call;
    call.plan = &args.plan->plan;
    call.rank = transport.rank;
    call.transport = &transport;
    call.engine = {nullptr, context->pool.get(), transport.stream};
    RowMemory places(call.engine, sizeof(tandem_place));
    call.places = reinterpret_cast<tandem_place*>(places.data());
    const Status own = check_call(args, *context, pass, &call);
    TANDEM_TRY(args.plan->agreement.agree(call, args.execution, own));
    CapturedSums captured(&call, args.execution == TANDEM_CP_HEADS);
    TANDEM_TRY(run_execution(call, args.execution));
    TANDEM_TRY(captured.finish());
    return pass == TANDEM_BACKWARD ? sum_dsink(call) : Status{};
  });
}

Status write_tokens(const std::vector<Shard>& shards, int32_t* documents, int64_t* positions) {
  for (const Shard& s : shards) {
    for (int64_t n = 0; n < s.tokens.count; ++n) {
      if (documents != nullptr) documents[s.first + n] = s.tokens.document;
      if (positions != nullptr) positions[s.first + n] = s.tokens.position(n);
    }
  }
  return {};
}

Status write_steps(const ContextPlan& plan, int32_t q_rank, int32_t k_rank, tandem_cp_step* steps, int64_t* count) {
  const std::vector<ContextStep> found = plan.steps_between(q_rank, k_rank);
  *count = std::ssize(found);
  if (steps == nullptr) return {};
  const PlacedRuns queries(plan.queries().shards(q_rank)), keys(plan.keys().shards(k_rank));
  for (const ContextStep& s : found) {
    *steps++ = {s.q.document, s.q.stride, queries.row(s.q), s.q.count,      keys.row(s.k), s.k.count,   s.q.begin,
                s.k.begin,    s.diagonal, s.window_left,    s.window_right, s.query_order, s.key_order, s.pairs};
  }
  return {};
}

}  // namespace
}  // namespace tandem::context_parallel

namespace cp = tandem::context_parallel;

extern "C" {

tandem_status tandem_cp_plan_create(const tandem_cp_plan_args* args, tandem_cp_plan** plan) {
  return tandem::guarded([&] { return cp::create(args, plan); });
}

void tandem_cp_plan_destroy(tandem_cp_plan* plan) { delete plan; }

uint64_t tandem_cp_plan_hash(const tandem_cp_plan* plan) { return plan != nullptr ? plan->plan.hash() : 0; }

tandem_status tandem_cp_plan_rows(const tandem_cp_plan* plan, int32_t rank, int64_t* q_rows, int64_t* k_rows) {
  return tandem::guarded([&]() -> tandem::Status {
    TANDEM_TRY(cp::check_rank(plan, rank));
    if (q_rows != nullptr) *q_rows = plan->plan.queries().tokens(rank);
    if (k_rows != nullptr) *k_rows = plan->plan.keys().tokens(rank);
    return {};
  });
}

tandem_status tandem_cp_plan_tokens(const tandem_cp_plan* plan, int32_t rank, int32_t keys, int32_t* documents,
                                    int64_t* positions) {
  return tandem::guarded([&]() -> tandem::Status {
    TANDEM_TRY(cp::check_rank(plan, rank));
    const cp::ShardLayout& layout = keys != 0 ? plan->plan.keys() : plan->plan.queries();
    return cp::write_tokens(layout.shards(rank), documents, positions);
  });
}

tandem_status tandem_cp_plan_steps(const tandem_cp_plan* plan, int32_t q_rank, int32_t k_rank, tandem_cp_step* steps,
                                   int64_t* count) {
  return tandem::guarded([&]() -> tandem::Status {
    TANDEM_TRY(cp::check_rank(plan, q_rank));
    TANDEM_TRY(cp::check_rank(plan, k_rank));
    TANDEM_TRY(cp::check_null("count", count, "pass the address of a variable for the number of steps"));
    return cp::write_steps(plan->plan, q_rank, k_rank, steps, count);
  });
}

tandem_status tandem_cp_forward(tandem_context* context, const tandem_cp_args* args) {
  return cp::run(context, TANDEM_FORWARD, args);
}

tandem_status tandem_cp_backward(tandem_context* context, const tandem_cp_args* args) {
  return cp::run(context, TANDEM_BACKWARD, args);
}

}  // extern "C"
