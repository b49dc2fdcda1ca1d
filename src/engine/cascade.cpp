// The path of a cascade: arguments -> CascadeCall -> two forwards into the workspace and a merge.
#include "problem/cascade.h"

#include <algorithm>
#include <cstdint>

#include "engine/context.h"
#include "engine/guard.h"
#include "problem/use_options.h"

namespace tandem {
namespace {

struct Calls {
  CascadeCall call;
  Engine* engine = nullptr;
  size_t run_bytes = 0, bytes = 0;  // workspace: each forward's, the call's
  bool empty = false;               // no queries
};

// Checks the call and both forwards. memory: the parts, or NULL for a call without data.
Status place_parts(tandem_device device, void* memory, Calls* calls, MergeProblem* merge) {
  CascadeCall& call = calls->call;
  TANDEM_TRY(call.place(memory, device, merge));
  for (CascadePart* part : {&call.shared, &call.own}) {
    use_options(&part->problem);
    TANDEM_TRY(with_group_names(calls->engine->check(part->problem)));
  }
  return {};
}

Status read_calls(tandem_context* context, const tandem_cascade_args* args, bool with_data, Calls* calls) {
  CascadeCall& call = calls->call;
  TANDEM_TRY(call.read(args, context->device, with_data));
  const Problem& p = call.own.problem;
  calls->engine = &context->engine_for(p.dtype);
  MergeProblem none;
  TANDEM_TRY(place_parts(context->device, nullptr, calls, &none));
  calls->empty = p.total_q == 0 || p.heads_q == 0;
  if (calls->empty) return {};
  const Engine& engine = *calls->engine;
  calls->run_bytes = std::max(engine.workspace_size(call.shared.problem), engine.workspace_size(call.own.problem));
  calls->bytes = CascadeCall::kPartAlignment - 1 + call.part_bytes() + calls->run_bytes;
  return {};
}

Status run_cascade(tandem_context* context, Calls* calls, void* workspace, void* stream) {
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  const size_t skipped =
      (CascadeCall::kPartAlignment - begin % CascadeCall::kPartAlignment) % CascadeCall::kPartAlignment;
  std::byte* const parts = static_cast<std::byte*>(workspace) + skipped;
  CascadeCall& call = calls->call;
  MergeProblem merge;
  TANDEM_TRY(place_parts(context->device, parts, calls, &merge));
  std::byte* const scratch = calls->run_bytes > 0 ? parts + call.part_bytes() : nullptr;
  for (CascadePart* part : {&call.shared, &call.own}) {
    const CallWorkspace memory{part->args, TANDEM_FORWARD, scratch, calls->run_bytes};
    TANDEM_TRY(with_group_names(calls->engine->run(part->problem, memory, stream)));
  }
  return with_group_names(calls->engine->merge(merge, stream));
}

}  // namespace
}  // namespace tandem

extern "C" {

tandem_status tandem_cascade_workspace_size(tandem_context* handle, const tandem_cascade_args* args, size_t* bytes) {
  return tandem::guarded([&]() -> tandem::Status {
    if (bytes == nullptr) {
      return tandem::Status::invalid(
          "bytes (NULL) must point to the variable that receives the size: pass its address");
    }
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::Calls calls;
    TANDEM_TRY(tandem::read_calls(context, args, false, &calls));
    *bytes = calls.bytes;
    return {};
  });
}

tandem_status tandem_prepare_cascade(tandem_context* handle, const tandem_cascade_args* args) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::Calls calls;
    TANDEM_TRY(tandem::read_calls(context, args, false, &calls));
    if (calls.empty) return {};
    TANDEM_TRY(calls.engine->prepare(calls.call.shared.problem));
    TANDEM_TRY(calls.engine->prepare(calls.call.own.problem));
    return calls.engine->prepare_merge();
  });
}

tandem_status tandem_cascade(tandem_context* handle, const tandem_cascade_args* args, void* workspace,
                             size_t workspace_bytes, void* stream) {
  return tandem::guarded([&]() -> tandem::Status {
    tandem_context* context = nullptr;
    TANDEM_TRY(tandem::context_or_default(handle, &context));
    tandem::Calls calls;
    TANDEM_TRY(tandem::read_calls(context, args, true, &calls));
    TANDEM_TRY(calls.engine->check_stream(stream));
    if (calls.empty) return {};
    TANDEM_TRY(tandem::check_workspace(workspace, workspace_bytes, calls.bytes,
                                       "call tandem_cascade_workspace_size with these shapes"));
    TANDEM_TRY(
        tandem::check_workspace_overlap(calls.call.operand_in_range(workspace, workspace_bytes), workspace_bytes));
    return tandem::run_cascade(context, &calls, workspace, stream);
  });
}

}  // extern "C"
