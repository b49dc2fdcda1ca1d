#include "engine/cpu.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include "base/text.h"
#include "cpu/cpu.h"
#include "problem/refusals.h"
#include "reference/reference.h"

namespace tandem {
namespace {

// Runs tasks of the reference on the context's threads. An exception of a task is rethrown on the calling thread.
reference::ParallelFor on(cpu::Threads& threads) {
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

}  // namespace

std::string HostEngine::description() const {
  const int count = threads_.count();
  return str_cat("cpu, ", count, count == 1 ? " thread, " : " threads, ", cpu::target_description());
}

Status HostEngine::check_stream(void* stream) const {
  if (stream == nullptr) return {};
  return Status::invalid("stream (not NULL) must be NULL on the CPU: pass NULL");
}

Status HostEngine::append_kv(const AppendKvProblem& problem, void*) {
  AppendRows rows;
  TANDEM_TRY(read_append_rows(problem, &rows));
  cpu::append_kv(problem, rows, threads_);
  return {};
}

Status HostEngine::make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void*) {
  cpu::make_blocks(problem, threads_, workspace);
  return {};
}

Status CpuEngine::check(const Problem& problem) const { return cpu::check(problem); }

size_t CpuEngine::workspace_size(const Problem& problem) const {
  return cpu::workspace_size(problem, threads_.count());
}

Status CpuEngine::run(const Problem& problem, const CallWorkspace& workspace, void*) {
  TANDEM_TRY(workspace.check(workspace_size(problem)));
  const auto pass = problem.pass == TANDEM_FORWARD ? cpu::forward : cpu::backward;
  pass(problem, threads_, workspace.data);
  return {};
}

Status CpuEngine::merge(const MergeProblem& problem, void*) {
  cpu::merge(problem, threads_);
  return {};
}

Status OracleEngine::check(const Problem& problem) const { return refuse_paged_backward(problem); }

Status OracleEngine::run(const Problem& problem, const CallWorkspace&, void*) {
  const auto pass = problem.pass == TANDEM_FORWARD ? reference::forward : reference::backward;
  pass(problem, on(threads_));
  return {};
}

Status OracleEngine::merge(const MergeProblem& problem, void*) {
  reference::merge(problem, on(threads_));
  return {};
}

}  // namespace tandem
