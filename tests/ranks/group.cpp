#include "ranks/group.h"

#include <cstring>
#include <exception>
#include <thread>

namespace tandem::test {

ThreadGroup::ThreadGroup(int32_t ranks, std::chrono::milliseconds timeout)
    : timeout_(timeout), members_(static_cast<size_t>(ranks)) {
  for (int32_t r = 0; r < ranks; ++r) {
    Member& m = members_[static_cast<size_t>(r)];
    m.group = this;
    m.rank = r;
    m.transport = {sizeof(tandem_cp_transport), r, ranks, &m, exchange, wait, all_gather, nullptr, nullptr};
  }
}

int32_t ThreadGroup::exchange(void* data, const tandem_cp_message* sends, int64_t send_count,
                              const tandem_cp_message* receives, int64_t receive_count, void** request) {
  Member& m = *static_cast<Member*>(data);
  const std::lock_guard lock(m.group->mutex_);
  for (int64_t n = 0; n < send_count; ++n) {
    const auto* bytes = static_cast<const std::byte*>(sends[n].data);
    m.group->messages_[{m.rank, sends[n].peer}].emplace_back(bytes, bytes + sends[n].bytes);
  }
  std::vector<Receive> list;
  for (int64_t n = 0; n < receive_count; ++n) list.push_back({receives[n], m.posted[receives[n].peer]++});
  m.exchanges[++m.next_exchange] = std::move(list);
  *request = reinterpret_cast<void*>(m.next_exchange);
  m.group->arrived_.notify_all();
  return 0;
}

const ThreadGroup::Bytes* ThreadGroup::find(int32_t from, int32_t to, int64_t number,
                                            std::unique_lock<std::mutex>& lock) {
  const auto& list = messages_[{from, to}];
  const bool found = arrived_.wait_for(lock, timeout_, [&] { return std::ssize(list) > number; });
  return found ? &list[static_cast<size_t>(number)] : nullptr;
}

int32_t ThreadGroup::wait(void* data, void* request) {
  Member& m = *static_cast<Member*>(data);
  std::unique_lock lock(m.group->mutex_);
  const auto list = m.exchanges.extract(reinterpret_cast<int64_t>(request));
  for (const Receive& r : list.mapped()) {
    const Bytes* bytes = m.group->find(r.message.peer, m.rank, r.number, lock);
    if (bytes == nullptr) return 1;
    if (std::ssize(*bytes) != r.message.bytes) return 2;
    std::memcpy(r.message.data, bytes->data(), bytes->size());
    m.received += r.message.bytes;
  }
  return 0;
}

int32_t ThreadGroup::all_gather(void* data, const void* send, void* receive, int64_t bytes) {
  Member& m = *static_cast<Member*>(data);
  std::unique_lock lock(m.group->mutex_);
  auto& parts = m.group->gathered_[m.gathers++];
  const auto* from = static_cast<const std::byte*>(send);
  parts[m.rank] = Bytes(from, from + bytes);
  m.group->arrived_.notify_all();
  const auto complete = [&] { return parts.size() == m.group->members_.size(); };
  if (!m.group->arrived_.wait_for(lock, m.group->timeout_, complete)) return 1;
  auto* to = static_cast<std::byte*>(receive);
  for (const auto& [rank, part] : parts) {
    if (std::ssize(part) != bytes) return 2;
    to = std::copy(part.begin(), part.end(), to);
  }
  return 0;
}

std::vector<std::string> on_ranks(int32_t ranks, const std::function<std::string(int32_t rank)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        errors[static_cast<size_t>(r)] = body(r);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

}  // namespace tandem::test
