// The path of a merge: arguments -> MergeProblem -> the engine that computes it.
#include "problem/merge.h"

#include "base/text.h"
#include "engine/context.h"
#include "engine/guard.h"

extern "C" {

tandem_status tandem_merge(tandem_context* handle, const tandem_merge_args* args, void* stream) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::MergeProblem problem;
    TANDEM_TRY(tandem::make_merge_problem(args, context->device, &problem));
    tandem::Engine& engine = context->engine_for(problem.out.dtype);
    TANDEM_TRY(engine.check_stream(stream));
    return problem.empty() ? tandem::Status{} : engine.merge(problem, stream);
  });
}

tandem_status tandem_prepare_merge(tandem_context* handle) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    return context->engine->prepare_merge();
  });
}

}  // extern "C"
