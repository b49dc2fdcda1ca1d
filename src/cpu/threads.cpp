#include "cpu/threads.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem::cpu {

namespace {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

}  // namespace

// Workers that sleep on a condition variable between jobs. The pool runs one job at a time. A caller that finds the
// pool busy computes alone, so that calls from several threads never wait for each other.
class Pool {
 public:
  explicit Pool(int workers) : process_(getpid()) {
    workers_.reserve(static_cast<size_t>(workers));  // nothing below may throw once a worker runs
    // If the system limits threads, fewer workers than requested start. The results do not change.
    try {
      for (int i = 0; i < workers; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    }
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
  }

  bool belongs_to_this_process() const { return process_ == getpid(); }

  // Returns false if another caller uses the pool.
  bool run(int32_t tasks, void (*body)(void*, int32_t), void* data) {
    if (!free_.exchange(false, std::memory_order_acquire)) return false;
    {
      std::lock_guard lock(mutex_);
      body_ = body, data_ = data, tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      ++job_;
    }
    const auto helpers = static_cast<size_t>(tasks - 1);
    if (helpers >= workers_.size()) {
      wake_.notify_all();
    } else {
      for (size_t i = 0; i < helpers; ++i) wake_.notify_one();
    }
    take_tasks(tasks, body, data);
    {
      // Workers that have not started this job yet will find it finished.
      std::unique_lock lock(mutex_);
      tasks_ = 0;
      idle_.wait(lock, [this] { return active_ == 0; });
    }
    free_.store(true, std::memory_order_release);
    return true;
  }

 private:
  void take_tasks(int32_t tasks, void (*body)(void*, int32_t), void* data) {
    for (int32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(data, i);
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || (job_ != seen && tasks_ > 0); });
      if (stop_) return;
      seen = job_;
      const int32_t tasks = tasks_;
      const auto body = body_;
      void* const data = data_;
      ++active_;
      lock.unlock();
      take_tasks(tasks, body, data);
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  const pid_t process_;
  std::atomic<bool> free_{true};
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  uint64_t job_ = 0;
  int32_t tasks_ = 0;
  int active_ = 0;
  bool stop_ = false;
  void (*body_)(void*, int32_t) = nullptr;
  void* data_ = nullptr;
  std::atomic<int32_t> next_{0};
  std::vector<std::thread> workers_;
};

Threads::Threads(int count, tandem_parallel_for parallel_for, void* parallel_for_data)
    : count_(count > 0 ? count : available_cores()), parallel_for_(parallel_for), data_(parallel_for_data) {}

Threads::~Threads() {
  Pool* pool = pool_.load();
  // In a forked child the workers do not exist, so that their pool cannot be joined. The pool is leaked.
  if (pool != nullptr && pool->belongs_to_this_process()) delete pool;
}

Pool* Threads::pool() {
  Pool* pool = pool_.load(std::memory_order_acquire);
  if (pool != nullptr && pool->belongs_to_this_process()) return pool;
  auto* fresh = new (std::nothrow) Pool(count_ - 1);
  if (fresh == nullptr) return nullptr;
  if (pool_.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return pool;
}

void Threads::run(int32_t tasks, void (*body)(void* data, int32_t task), void* data) {
  if (tasks > 1 && parallel_for_ != nullptr) return parallel_for_(data_, tasks, body, data);
  if (tasks > 1 && count_ > 1) {
    Pool* p = pool();
    if (p != nullptr && p->run(tasks, body, data)) return;
  }
  for (int32_t i = 0; i < tasks; ++i) body(data, i);
}

}  // namespace tandem::cpu
