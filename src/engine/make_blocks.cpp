// The path of a block-mask call: arguments -> MakeBlocksProblem -> the engine that computes it.
#include "problem/make_blocks.h"

#include "engine/context.h"
#include "engine/guard.h"

extern "C" {

tandem_status tandem_make_block_mask(tandem_context* handle, const tandem_block_mask_args* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::MakeBlocksProblem problem;
    TANDEM_TRY(tandem::make_blocks_problem(args, context->device, true, &problem));
    TANDEM_TRY(context->engine->check_stream(stream));
    const auto needed = static_cast<size_t>(problem.blocks());
    TANDEM_TRY(
        tandem::check_workspace(workspace, workspace_bytes, needed, "allocate one byte for each block of each list"));
    return context->engine->make_blocks(problem, static_cast<std::byte*>(workspace), stream);
  });
}

tandem_status tandem_prepare_block_mask(tandem_context* handle, const tandem_block_mask_args* args) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::MakeBlocksProblem problem;
    TANDEM_TRY(tandem::make_blocks_problem(args, context->device, false, &problem));
    return context->engine->prepare_make_blocks(problem);
  });
}

}  // extern "C"
