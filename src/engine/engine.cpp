// The way of a call: arguments -> Problem -> the engine that serves it.
#include <algorithm>
#include <exception>
#include <mutex>

#include "cpu/cpu.h"
#include "engine/context.h"
#include "engine/guard.h"
#include "oracle/oracle.h"
#include "problem/operands.h"
#include "problem/problem.h"
#include "problem/text.h"

namespace tandem {
namespace {

// float64 is not worth fast loops: it is what others are judged by.
bool served_by_oracle(const Problem& p) { return p.dtype == DType::f64; }

Status check_served(const tandem_context& context, const Problem& p) {
  if (context.gpu) return context.gpu->check(p);
  if (p.page_table) {
    return Status::unsupported(
        "page_table must be NULL on the CPU: pages are not served there; gather each sequence's keys and values into "
        "dense or packed tensors");
  }
  return served_by_oracle(p) ? Status{} : cpu::check(p);
}

bool nothing_to_write(const Problem& p) {
  const bool no_queries = p.total_q == 0 || p.heads_q == 0, no_keys = p.total_k == 0 || p.heads_k == 0;
  if (p.pass == TANDEM_FORWARD) return no_queries;
  return (!p.dq || no_queries) && ((!p.dk && !p.dv) || no_keys) && !p.dbias && !p.dsink;
}

size_t workspace_needed(const tandem_context& context, const Problem& p) {
  if (nothing_to_write(p)) return 0;
  if (context.gpu) return context.gpu->plan(p).workspace_bytes;
  return served_by_oracle(p) ? 0 : cpu::workspace_size(p, context.threads.count());
}

Status check_workspace(const Problem& p, const tandem_attention_args& args, size_t needed, const void* workspace,
                       size_t bytes) {
  if (needed == 0) return {};
  if (bytes < needed) {
    return {TANDEM_WORKSPACE_TOO_SMALL, say("workspace_bytes (", bytes, ") must be at least ", needed,
                                            ": ask tandem_workspace_size with this context, pass and shape")};
  }
  if (workspace == nullptr) {
    return Status::invalid(
        say("workspace (NULL) must point to workspace_bytes (", bytes, ") bytes: the call needs ", needed, " of them"));
  }
  if (const char* tensor = operand_in_range(p.pass, args, workspace, bytes)) {
    return Status::invalid(say("workspace (", bytes, " bytes) overlaps ", tensor,
                               ": it is written while the tensor is in use; give it memory of its own"));
  }
  return {};
}

// The oracle's tasks on the context's threads. An exception of a task surfaces on the calling thread.
oracle::ParallelFor on(cpu::Threads& threads) {
  return [&threads](int64_t tasks, const std::function<void(int64_t)>& body) {
    const auto strands = static_cast<int32_t>(std::min<int64_t>(tasks, 1 << 16));
    std::exception_ptr failure;
    std::mutex mutex;
    threads.run(strands, [&](int32_t strand) {
      try {
        for (int64_t task = strand; task < tasks; task += strands) body(task);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
      }
    });
    if (failure) std::rethrow_exception(failure);
  };
}

void execute_on_cpu(tandem_context& context, const Problem& p, void* workspace) {
  const bool forward = p.pass == TANDEM_FORWARD;
  if (served_by_oracle(p))
    return forward ? oracle::forward(p, on(context.threads)) : oracle::backward(p, on(context.threads));
  return forward ? cpu::forward(p, context.threads, workspace) : cpu::backward(p, context.threads, workspace);
}

// Calls without data: use(context, problem) when the problem is valid and served.
template <class Use>
tandem_status inspect(tandem_context* handle, const tandem_pass& pass, const tandem_attention_args* args, Use&& use) {
  return guarded([&]() -> Status {
    tandem_context& context = context_or_default(handle);
    Problem problem;
    TANDEM_TRY(make_problem(pass, args, context.device, false, &problem));
    TANDEM_TRY(check_served(context, problem));
    return use(context, problem);
  });
}

tandem_status run(tandem_context* handle, tandem_pass pass, const tandem_attention_args* args, void* workspace,
                  size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    tandem_context& context = context_or_default(handle);
    Problem problem;
    TANDEM_TRY(make_problem(pass, args, context.device, true, &problem));
    if (stream != nullptr && !context.gpu) {
      return Status::invalid("stream (not NULL) must be NULL on the CPU: the call returns when its work is done");
    }
    TANDEM_TRY(check_served(context, problem));
    if (nothing_to_write(problem)) return {};
    const auto enough = [&](size_t needed) {
      return check_workspace(problem, *args, needed, workspace, workspace_bytes);
    };
    if (context.gpu) {
      const plan::ForwardPlan plan = context.gpu->plan(problem);
      TANDEM_TRY(enough(plan.workspace_bytes));
      return context.gpu->run(problem, plan, workspace, stream);
    }
    TANDEM_TRY(enough(workspace_needed(context, problem)));
    execute_on_cpu(context, problem, workspace);
    return {};
  });
}

}  // namespace
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
  return tandem::inspect(context, pass, args, [](tandem_context&, const tandem::Problem&) { return tandem::Status{}; });
}

tandem_status tandem_workspace_size(tandem_context* context, tandem_pass pass, const tandem_attention_args* args,
                                    size_t* bytes) {
  if (bytes == nullptr) {
    return tandem::report(TANDEM_INVALID_ARGUMENT, "bytes (NULL) must point to where the size shall be put");
  }
  return tandem::inspect(context, pass, args, [&](tandem_context& c, const tandem::Problem& problem) {
    *bytes = tandem::workspace_needed(c, problem);
    return tandem::Status{};
  });
}

tandem_status tandem_prepare(tandem_context* context, tandem_pass pass, const tandem_attention_args* args) {
  return tandem::inspect(context, pass, args, [](tandem_context& c, const tandem::Problem& problem) {
    // The CPU engine is compiled already.
    return c.gpu && !tandem::nothing_to_write(problem) ? c.gpu->prepare(problem) : tandem::Status{};
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
