// The path of an append: arguments -> AppendKvProblem -> the engine that computes it.
#include "problem/append_kv.h"

#include "base/text.h"
#include "engine/context.h"
#include "engine/guard.h"

extern "C" {

tandem_status tandem_append_kv(tandem_context* handle, const tandem_append_kv_args* args, void* stream) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::AppendKvProblem problem;
    TANDEM_TRY(tandem::make_append_kv_problem(args, context->device, &problem));
    TANDEM_TRY(context->engine->check_stream(stream));
    return problem.empty() ? tandem::Status{} : context->engine->append_kv(problem, stream);
  });
}

tandem_status tandem_prepare_append_kv(tandem_context* handle) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    return context->engine->prepare_append_kv();
  });
}

}  // extern "C"
