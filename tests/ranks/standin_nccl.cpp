#include "ranks/standin_nccl.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7 };

using Bytes = std::vector<std::byte>;

struct Clique {
  std::mutex mutex;
  std::condition_variable arrived;
  std::map<std::pair<int, int>, std::deque<Bytes>> messages;  // by sender and receiver
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank, ranks, device;
  StandinFaults faults;
};

struct Operation {
  Comm* comm;
  bool sends;
  void* data;
  size_t bytes;
  int peer;
};

thread_local int groups = 0;
thread_local std::vector<Operation> operations;

Comm& comm_of(void* comm) { return *static_cast<Comm*>(comm); }

void send(const Operation& o) {
  const auto* bytes = static_cast<const std::byte*>(o.data);
  Clique& clique = *o.comm->clique;
  const std::lock_guard lock(clique.mutex);
  clique.messages[{o.comm->rank, o.peer}].emplace_back(bytes, bytes + o.bytes);
  clique.arrived.notify_all();
}

void receive(const Operation& o) {
  Clique& clique = *o.comm->clique;
  std::unique_lock lock(clique.mutex);
  std::deque<Bytes>& list = clique.messages[{o.peer, o.comm->rank}];
  const bool found = clique.arrived.wait_for(lock, std::chrono::milliseconds(o.comm->faults.milliseconds),
                                             [&] { return !list.empty(); });
  if (!found || list.front().size() != o.bytes) {
    o.comm->faults.async_error = kRemoteError;
    return;
  }
  std::memcpy(o.data, list.front().data(), o.bytes);
  list.pop_front();
}

int add(const Operation& o) {
  if (o.peer < 0 || o.peer >= o.comm->ranks) return kInvalidArgument;
  operations.push_back(o);
  return kSuccess;
}

}  // namespace

extern "C" {

int ncclCommInitAll(void** comms, int count, const int* devices) {
  const auto clique = std::make_shared<Clique>();
  for (int r = 0; r < count; ++r) comms[r] = new Comm{clique, r, count, devices != nullptr ? devices[r] : r, {}};
  return kSuccess;
}

int ncclCommDestroy(void* comm) {
  delete static_cast<Comm*>(comm);
  return kSuccess;
}

void standin_nccl_plant(void* comm, const StandinFaults* faults) { comm_of(comm).faults = *faults; }
int standin_nccl_groups() { return groups; }

int ncclCommCount(void* comm, int* count) { return *count = comm_of(comm).ranks, kSuccess; }
int ncclCommUserRank(void* comm, int* rank) { return *rank = comm_of(comm).rank, kSuccess; }
int ncclCommCuDevice(void* comm, int* device) { return *device = comm_of(comm).device, kSuccess; }

int ncclCommGetAsyncError(void* comm, int* result) {
  StandinFaults& faults = comm_of(comm).faults;
  *result = faults.polls_in_progress > 0 && --faults.polls_in_progress > 0 ? kInProgress : faults.async_error;
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited or there was a network error" : "invalid argument";
}
const char* ncclGetLastError(void*) { return "the stand-in's last error"; }

int ncclGroupStart() { return ++groups, kSuccess; }

int ncclGroupEnd() {
  if (--groups > 0) return kSuccess;
  const std::vector<Operation> group = std::exchange(operations, {});
  for (const Operation& o : group) {
    if (o.sends) send(o);
  }
  for (const Operation& o : group) {
    if (!o.sends) receive(o);
  }
  return !group.empty() && group[0].comm->faults.polls_in_progress > 0 ? kInProgress : kSuccess;
}

int ncclSend(const void* data, size_t count, int, int peer, void* comm, void*) {
  if (comm_of(comm).faults.send_error != 0) return comm_of(comm).faults.send_error;
  return add({&comm_of(comm), true, const_cast<void*>(data), count, peer});
}

int ncclRecv(void* data, size_t count, int, int peer, void* comm, void*) {
  return add({&comm_of(comm), false, data, count, peer});
}

int ncclAllGather(const void* data, void* received, size_t count, int, void* comm, void*) {
  Comm& c = comm_of(comm);
  for (int peer = 0; peer < c.ranks; ++peer) send({&c, true, const_cast<void*>(data), count, peer});
  for (int peer = 0; peer < c.ranks; ++peer) {
    receive({&c, false, static_cast<std::byte*>(received) + static_cast<size_t>(peer) * count, count, peer});
  }
  return kSuccess;
}
}
