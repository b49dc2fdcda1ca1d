// The caller's connection between the ranks (tandem_cp_transport), with errors as Status.
//
// Three calls serve every execution. An exchange of messages with all peers is an all-to-all of any sizes. A
// reduce-scatter is not used, because its order of sums would belong to the transport.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "context_parallel/rows.h"
#include "tandem/context_parallel.h"

namespace tandem::context_parallel {

// The messages of one exchange. The buffers stay valid until the exchange has finished.
struct Messages {
  std::vector<std::pair<int32_t, RowMemory>> sends, receives;  // peer and bytes
};

// An exchange in flight. The destructor waits for it, because the transport may still write to the buffers.
class Exchange {
 public:
  Exchange() = default;
  Exchange(Exchange&& other) noexcept { *this = std::move(other); }
  Exchange& operator=(Exchange&& other) noexcept {
    std::swap(transport_, other.transport_);
    std::swap(request_, other.request_);
    std::swap(messages_, other.messages_);
    return *this;
  }
  ~Exchange() { (void)wait(); }

  // Starts to send and to receive. Empty messages do not travel.
  Status start(const tandem_cp_transport& transport, Messages messages);
  // Returns when the messages have arrived. Does nothing if no exchange is in flight.
  Status wait();

  std::vector<std::pair<int32_t, RowMemory>>& received() { return messages_.receives; }

 private:
  const tandem_cp_transport* transport_ = nullptr;  // null: no exchange is in flight
  void* request_ = nullptr;
  Messages messages_;
};

// Collects the values of all ranks: `values` holds one rank's values, and the result holds each rank's in turn.
Status all_gather(const tandem_cp_transport& transport, std::span<const double> values, std::vector<double>* all);
Status all_gather(const tandem_cp_transport& transport, std::span<const uint64_t> values, std::vector<uint64_t>* all);

}  // namespace tandem::context_parallel
