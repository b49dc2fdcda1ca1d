#include "cpu/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tandem::cpu {
namespace {

// Returns true if every task of a run is called exactly once.
bool each_once(Threads& threads, int32_t tasks) {
  std::vector<std::atomic<int>> calls(static_cast<size_t>(tasks));
  threads.run(tasks, [&](int32_t task) { ++calls[static_cast<size_t>(task)]; });
  for (const std::atomic<int>& count : calls) {
    if (count != 1) return false;
  }
  return true;
}

TEST(Threads, EveryTaskOnce) {
  for (const int count : {1, 2, 3, 7}) {
    Threads threads(count, nullptr, nullptr);
    EXPECT_EQ(threads.count(), count);
    for (const int32_t tasks : {0, 1, 2, 5, 100, 3000})
      EXPECT_TRUE(each_once(threads, tasks)) << count << ", " << tasks;
  }
}

TEST(Threads, ZeroMeansTheCoresOfThisProcess) {
  Threads threads(0, nullptr, nullptr);
  EXPECT_GE(threads.count(), 1);
  EXPECT_LE(threads.count(), 1024);
}

TEST(Threads, SeveralCallersAtOnce) {
  Threads threads(3, nullptr, nullptr);
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) good += each_once(threads, 1 + round % 9);
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 4 * 200);
}

TEST(Threads, TheCallersOwn) {
  int runs = 0;
  const tandem_parallel_for serial = [](void* user, int32_t tasks, void (*body)(void*, int32_t), void* data) {
    ++*static_cast<int*>(user);
    for (int32_t task = 0; task < tasks; ++task) body(data, task);
  };
  Threads threads(4, serial, &runs);
  EXPECT_TRUE(each_once(threads, 10));
  EXPECT_EQ(runs, 1);
}

TEST(Threads, StartAnewInAForkedChild) {
#ifdef TANDEM_THREAD_SANITIZER
  GTEST_SKIP() << "the thread sanitizer lets no child of a process with threads start threads";
#endif
  Threads threads(3, nullptr, nullptr);
  ASSERT_TRUE(each_once(threads, 20));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends a child that waits for threads it lacks
    _exit(each_once(threads, 20) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(each_once(threads, 20));
}

}  // namespace
}  // namespace tandem::cpu
