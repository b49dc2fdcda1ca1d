// Ranks as threads of one process, which exchange messages through memory.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tandem/context_parallel.h"

namespace tandem::test {

// The connection between the threads. A call fails if a message has another size than its receiver expects, or if it
// does not arrive before the timeout.
class ThreadGroup {
 public:
  explicit ThreadGroup(int32_t ranks, std::chrono::milliseconds timeout = std::chrono::seconds(30));

  // The transport of a rank, valid while the group exists.
  const tandem_cp_transport* transport(int32_t rank) { return &members_[static_cast<size_t>(rank)].transport; }

  // Bytes that a rank has received by exchanges.
  int64_t received(int32_t rank) const { return members_[static_cast<size_t>(rank)].received; }

 private:
  using Bytes = std::vector<std::byte>;
  struct Receive {
    tandem_cp_message message;
    int64_t number;  // counts the messages from this peer
  };
  struct Member {
    ThreadGroup* group;
    int32_t rank;
    tandem_cp_transport transport{};
    std::map<int32_t, int64_t> posted;                  // receives by peer
    std::map<int64_t, std::vector<Receive>> exchanges;  // in flight
    int64_t next_exchange = 0, received = 0, gathers = 0;
  };

  static int32_t exchange(void* data, const tandem_cp_message* sends, int64_t send_count,
                          const tandem_cp_message* receives, int64_t receive_count, void** request);
  static int32_t wait(void* data, void* request);
  static int32_t all_gather(void* data, const void* send, void* receive, int64_t bytes);

  const Bytes* find(int32_t from, int32_t to, int64_t number, std::unique_lock<std::mutex>& lock);

  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<int32_t, int32_t>, std::vector<Bytes>> messages_;  // by sender and receiver
  std::map<int64_t, std::map<int32_t, Bytes>> gathered_;                // by number and rank
  std::vector<Member> members_;
};

// Calls body(rank) on a thread for each rank. Returns the error message of each rank; empty: no error. body returns
// such a message.
std::vector<std::string> on_ranks(int32_t ranks, const std::function<std::string(int32_t rank)>& body);

}  // namespace tandem::test
