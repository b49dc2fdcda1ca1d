// Runs tasks in parallel, on the context's pool or by the caller's parallel_for.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "tandem/tandem.h"

namespace tandem::cpu {

class Pool;

class Threads {
 public:
  // count 0: one thread per core that this process may use. The pool's threads start at the first call that needs them,
  // sleep between calls, and start again in a forked child.
  Threads(int count, tandem_parallel_for parallel_for, void* parallel_for_data);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls body(data, task) for every task in [0, tasks); returns when all are done. Several threads may call at once.
  // body must not throw.
  void run(int32_t tasks, void (*body)(void* data, int32_t task), void* data);

  template <class F>
  void run(int32_t tasks, F&& f) {
    run(
        tasks, [](void* data, int32_t task) { (*static_cast<std::remove_reference_t<F>*>(data))(task); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  Pool* pool();

  int count_;
  tandem_parallel_for parallel_for_;
  void* data_;
  std::atomic<Pool*> pool_{nullptr};
};

}  // namespace tandem::cpu
