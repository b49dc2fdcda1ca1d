// The transport over NCCL. Messages have a stream, and events order it with the stream of attention, so that messages
// and attention overlap. NCCL chooses the algorithm, and point-to-point messages never use NVLink multicast.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "context_parallel/nccl_library.h"
#include "engine/context.h"
#include "engine/guard.h"
#include "tandem/context_parallel.h"

namespace tandem::context_parallel {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

class NcclTransport {
 public:
  NcclTransport(const NcclLibrary& library, NcclComm comm, tandem_context& context, gpu::Stream stream)
      : nccl_(library), comm_(comm), pool_(*context.pool), device_(pool_.device()), stream_(stream) {}
  NcclTransport(const NcclTransport&) = delete;
  ~NcclTransport() {
    for (const gpu::Event event : events_) (void)device_.destroy_event(event);
    if (ready_ != nullptr) (void)device_.destroy_event(ready_);
    if (messages_ != nullptr) (void)device_.destroy_stream(messages_);
  }

  Status open(tandem_device place, tandem_cp_transport* transport) {
    int ranks = 0, rank = 0, device = 0;
    TANDEM_TRY(check("ncclCommCount", nccl_.ncclCommCount(comm_, &ranks)));
    TANDEM_TRY(check("ncclCommUserRank", nccl_.ncclCommUserRank(comm_, &rank)));
    TANDEM_TRY(check("ncclCommCuDevice", nccl_.ncclCommCuDevice(comm_, &device)));
    if (place.type == TANDEM_CUDA && device != place.index) {
      return Status::invalid(str_cat("comm (of cuda:", device, ") must be of the context's GPU, cuda:", place.index,
                                     ": create the context for the device of the communicator"));
    }
    TANDEM_TRY(check_async());
    TANDEM_TRY(device_.create_stream(&messages_));
    TANDEM_TRY(device_.create_event(&ready_));
    *transport = {sizeof(tandem_cp_transport), rank, ranks, this, exchange, wait, all_gather, last_error, stream_};
    return {};
  }

  // A failed communicator never completes its messages, so that a wait for them would not end.
  Status close() {
    TANDEM_TRY(check_async());
    return device_.synchronize(messages_);
  }

 private:
  static NcclTransport& self(void* data) { return *static_cast<NcclTransport*>(data); }
  static int32_t exchange(void* data, const tandem_cp_message* sends, int64_t send_count,
                          const tandem_cp_message* receives, int64_t receive_count, void** request) {
    return self(data).report([&](NcclTransport& t) -> Status {
      TANDEM_TRY(t.check_async());
      TANDEM_TRY(t.device_.record(t.ready_, t.stream_));
      TANDEM_TRY(t.device_.wait(t.messages_, t.ready_));
      TANDEM_TRY(
          t.send_and_receive({sends, static_cast<size_t>(send_count)}, {receives, static_cast<size_t>(receive_count)}));
      gpu::Event arrived = nullptr;
      TANDEM_TRY(t.take_event(&arrived));
      *request = arrived;
      return t.device_.record(arrived, t.messages_);
    });
  }
  static int32_t wait(void* data, void* request) {
    return self(data).report([&](NcclTransport& t) -> Status {
      const auto arrived = static_cast<gpu::Event>(request);
      const Status waited = t.device_.wait(t.stream_, arrived);
      t.events_.push_back(arrived);
      TANDEM_TRY(waited);
      return t.check_async();
    });
  }
  static int32_t all_gather(void* data, const void* send, void* receive, int64_t bytes) {
    return self(data).report([&](NcclTransport& t) { return t.gather(send, receive, static_cast<size_t>(bytes)); });
  }
  static const char* last_error(void* data) { return self(data).error_.c_str(); }

  template <class Body>
  int32_t report(Body&& body) noexcept {
    try {
      const Status status = body(*this);
      if (!status.ok()) error_ = status.message;
      return status.ok() ? 0 : 1;
    } catch (const std::exception& error) {
      error_ = error.what();
      return 1;
    }
  }

  // A communicator that does not block returns before its work has started.
  Status check(const char* call, int result) {
    while (result == kNcclInProgress) {
      std::this_thread::yield();
      if (nccl_.ncclCommGetAsyncError(comm_, &result) != kNcclSuccess) break;
    }
    if (result == kNcclSuccess) return {};
    const char* last = nccl_.ncclGetLastError(comm_);
    return {TANDEM_DEVICE_ERROR,
            str_cat(call, " failed: ", nccl_.ncclGetErrorString(result), " (", last != nullptr ? last : "", ")")};
  }

  Status check_async() {
    int result = kNcclSuccess;
    TANDEM_TRY(check("ncclCommGetAsyncError", nccl_.ncclCommGetAsyncError(comm_, &result)));
    return check("NCCL's earlier work", result);
  }

  Status send_and_receive(std::span<const tandem_cp_message> sends, std::span<const tandem_cp_message> receives) {
    TANDEM_TRY(check("ncclGroupStart", nccl_.ncclGroupStart()));
    Status status;
    for (const tandem_cp_message& m : receives) {
      if (!status.ok()) break;
      status =
          check("ncclRecv", nccl_.ncclRecv(m.data, static_cast<size_t>(m.bytes), kNcclInt8, m.peer, comm_, messages_));
    }
    for (const tandem_cp_message& m : sends) {
      if (!status.ok()) break;
      status =
          check("ncclSend", nccl_.ncclSend(m.data, static_cast<size_t>(m.bytes), kNcclInt8, m.peer, comm_, messages_));
    }
    // A group must end after an error too, because later groups of the thread would belong to it.
    const Status ended = check("ncclGroupEnd", nccl_.ncclGroupEnd());
    TANDEM_TRY(status);
    return ended;
  }

  Status gather(const void* send, void* receive, size_t bytes) {
    TANDEM_TRY(check_async());
    int ranks = 0;
    TANDEM_TRY(check("ncclCommCount", nccl_.ncclCommCount(comm_, &ranks)));
    const size_t all = bytes * static_cast<size_t>(ranks);
    const DevicePool::Block block = pool_.take(bytes + all, messages_);
    const Status status = gather_on_device(send, receive, bytes, all, static_cast<std::byte*>(block.address));
    pool_.release(block);
    return status;
  }

  Status gather_on_device(const void* send, void* receive, size_t bytes, size_t all, std::byte* memory) {
    TANDEM_TRY(device_.copy_to_device(memory + all, send, bytes, messages_));
    TANDEM_TRY(check("ncclAllGather", nccl_.ncclAllGather(memory + all, memory, bytes, kNcclInt8, comm_, messages_)));
    TANDEM_TRY(device_.copy_to_host(receive, memory, all, messages_));
    TANDEM_TRY(device_.synchronize(messages_));
    return check_async();
  }

  Status take_event(gpu::Event* event) {
    if (events_.empty()) return device_.create_event(event);
    *event = events_.back();
    events_.pop_back();
    return {};
  }

  const NcclLibrary nccl_;
  const NcclComm comm_;
  DevicePool& pool_;
  gpu::Device& device_;
  const gpu::Stream stream_;        // runs attention
  gpu::Stream messages_ = nullptr;  // runs messages
  gpu::Event ready_ = nullptr;      // the sent data is complete
  std::vector<gpu::Event> events_;  // not in use
  std::string error_;
};

Status open_nccl(tandem_context* handle, NcclComm comm, gpu::Stream stream, tandem_cp_transport* transport) {
  tandem_context* context = nullptr;
  TANDEM_TRY(context_or_default(handle, &context));
  if (transport == nullptr) {
    return Status::invalid("transport (NULL) must point to a tandem_cp_transport: pass its address");
  }
  if (comm == nullptr) return Status::invalid("comm (NULL) must be an ncclComm_t: pass a communicator");
  if (context->pool == nullptr) {
    return Status::invalid("context (of the CPU) must be a context of a GPU: create it with device \"cuda:N\"");
  }
  NcclLibrary library;
  TANDEM_TRY(load_nccl(kLibrary, &library));
  auto nccl = std::make_unique<NcclTransport>(library, comm, *context, stream);
  TANDEM_TRY(nccl->open(context->device, transport));
  (void)nccl.release();
  return {};
}

Status close_nccl(tandem_cp_transport* transport) {
  if (transport == nullptr || transport->user_data == nullptr) {
    return Status::invalid("transport (not open) must be from tandem_cp_nccl_open: pass an open transport");
  }
  const std::unique_ptr<NcclTransport> nccl(static_cast<NcclTransport*>(transport->user_data));
  *transport = {};
  return nccl->close();
}

}  // namespace
}  // namespace tandem::context_parallel

extern "C" {

tandem_status tandem_cp_nccl_open(tandem_context* context, void* comm, void* stream, tandem_cp_transport* transport) {
  return tandem::guarded([&] { return tandem::context_parallel::open_nccl(context, comm, stream, transport); });
}

tandem_status tandem_cp_nccl_close(tandem_cp_transport* transport) {
  return tandem::guarded([&] { return tandem::context_parallel::close_nccl(transport); });
}

}  // extern "C"
