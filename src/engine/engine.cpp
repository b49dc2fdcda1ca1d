// The path of a call: arguments -> Problem -> options that replace expressions -> the engine that computes it.
#include "engine/engine.h"

#include "base/text.h"
#include "engine/context.h"
#include "engine/guard.h"
#include "problem/bound_expression.h"
#include "problem/operands.h"
#include "problem/problem.h"
#include "problem/use_options.h"

namespace tandem {
namespace {

bool nothing_to_write(const Problem& p) {
  const bool no_queries = p.total_q == 0 || p.heads_q == 0, no_keys = p.total_k == 0 || p.heads_k == 0;
  if (p.pass == TANDEM_FORWARD) return no_queries;
  const bool captured = p.score_mod && p.score_mod->cells > 0;
  return (!p.dq || no_queries) && ((!p.dk && !p.dv) || no_keys) && !p.dbias && !p.dsink && !captured;
}

// Uses an engine for nothing but its check.
Status use_nothing(Engine&, const Problem&) { return {}; }

// Executes no call: use(engine, problem) if the problem is valid, supported, and has an output.
template <class Use>
tandem_status inspect(tandem_context* handle, const tandem_pass& pass, const tandem_attention_args* args, Use&& use,
                      bool with_data = false) {
  return guarded([&]() -> Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(context_or_default(handle, &context));
    Problem problem;
    TANDEM_TRY(make_problem(pass, args, context->device, with_data, &problem));
    use_options(&problem);
    Engine& engine = context->engine_for(problem.dtype);
    TANDEM_TRY(engine.check(problem));
    return nothing_to_write(problem) ? Status{} : use(engine, problem);
  });
}

tandem_status run(tandem_context* handle, tandem_pass pass, const tandem_attention_args* any_version, void* workspace,
                  size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(context_or_default(handle, &context));
    tandem_attention_args args;
    TANDEM_TRY(read_args(any_version, &args));
    Problem problem;
    TANDEM_TRY(make_problem(pass, &args, context->device, true, &problem));
    use_options(&problem);
    Engine& engine = context->engine_for(problem.dtype);
    TANDEM_TRY(engine.check_stream(stream));
    TANDEM_TRY(engine.check(problem));
    if (nothing_to_write(problem)) return {};
    return engine.run(problem, {args, pass, workspace, workspace_bytes}, stream);
  });
}

}  // namespace

Status check_workspace(const void* data, size_t bytes, size_t needed, const char* remedy) {
  if (bytes < needed) {
    return {TANDEM_WORKSPACE_TOO_SMALL,
            str_cat("workspace_bytes (", bytes, ") must be at least ", needed, ": ", remedy)};
  }
  if (needed > 0 && data == nullptr) {
    return Status::invalid(
        str_cat("workspace (NULL) must point to workspace_bytes (", bytes, ") bytes: allocate ", needed, " bytes"));
  }
  return {};
}

Status check_workspace_overlap(const char* tensor, size_t bytes) {
  if (tensor == nullptr) return {};
  return Status::invalid(
      str_cat("workspace (", bytes, " bytes) overlaps ", tensor, ": pass separate memory for the workspace"));
}

Status CallWorkspace::check(size_t needed) const {
  if (needed == 0) return {};
  TANDEM_TRY(check_workspace(data, bytes, needed, "call tandem_workspace_size with this context, pass and shape"));
  return check_workspace_overlap(operand_in_range(pass, args, data, bytes), bytes);
}

}  // namespace tandem

#define TANDEM_TEXT_OF(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_OF(x)

extern "C" {

const char* tandem_version(void) {
  return TANDEM_TEXT(TANDEM_VERSION_MAJOR) "." TANDEM_TEXT(TANDEM_VERSION_MINOR) "." TANDEM_TEXT(TANDEM_VERSION_PATCH);
}

const char* tandem_status_name(int32_t status) {
  switch (status) {
    case TANDEM_OK: return "ok";
    case TANDEM_INVALID_ARGUMENT: return "invalid argument";
    case TANDEM_UNSUPPORTED: return "unsupported";
    case TANDEM_WORKSPACE_TOO_SMALL: return "workspace too small";
    case TANDEM_COLD_KERNEL: return "cold kernel";
    case TANDEM_NO_COMPILER: return "no compiler";
    case TANDEM_DEVICE_ERROR: return "device error";
    case TANDEM_INTERNAL_ERROR: return "internal error";
    default: return "unknown status";
  }
}

tandem_status tandem_check(tandem_context* context, tandem_pass pass, const tandem_attention_args* args) {
  return tandem::inspect(context, pass, args, tandem::use_nothing);
}

tandem_status tandem_check_data(tandem_context* context, tandem_pass pass, const tandem_attention_args* args) {
  return tandem::inspect(context, pass, args, tandem::use_nothing, true);
}

tandem_status tandem_workspace_size(tandem_context* context, tandem_pass pass, const tandem_attention_args* args,
                                    size_t* bytes) {
  if (bytes == nullptr) {
    return tandem::report(TANDEM_INVALID_ARGUMENT,
                          "bytes (NULL) must point to the variable that receives the size: pass its address");
  }
  size_t needed = 0;
  const tandem_status status =
      tandem::inspect(context, pass, args, [&](const tandem::Engine& engine, const tandem::Problem& problem) {
        needed = engine.workspace_size(problem);
        return tandem::Status{};
      });
  if (status == TANDEM_OK) *bytes = needed;
  return status;
}

tandem_status tandem_prepare(tandem_context* context, tandem_pass pass, const tandem_attention_args* args) {
  return tandem::inspect(context, pass, args, [](tandem::Engine& engine, const tandem::Problem& problem) {
    return engine.prepare(problem);
  });
}

tandem_status tandem_prepare_serving(tandem_context* context, const tandem_attention_args* args) {
  return tandem::inspect(context, TANDEM_FORWARD, args, [](tandem::Engine& engine, const tandem::Problem& problem) {
    return engine.prepare_serving(problem);
  });
}

tandem_status tandem_forward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                             size_t workspace_bytes, void* stream) {
  return tandem::run(context, TANDEM_FORWARD, args, workspace, workspace_bytes, stream);
}

tandem_status tandem_backward(tandem_context* context, const tandem_attention_args* args, void* workspace,
                              size_t workspace_bytes, void* stream) {
  return tandem::run(context, TANDEM_BACKWARD, args, workspace, workspace_bytes, stream);
}

}  // extern "C"
