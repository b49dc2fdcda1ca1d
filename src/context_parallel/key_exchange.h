// Keys and values of other ranks, which arrive in batches of rounds while a rank computes.
//
// Batch 0 is the rank's own shard. A ring has one round in each further batch, and a gather has all rounds in one.
#pragma once

#include <cstdint>
#include <vector>

#include "context_parallel/shard_call.h"
#include "context_parallel/transport.h"

namespace tandem::context_parallel {

// The rounds of each batch after batch 0.
struct RoundBatches {
  int32_t ranks = 1, rounds_at_once = 1;

  int32_t count() const { return 1 + static_cast<int32_t>(ceil_div(ranks - 1, rounds_at_once)); }
  int32_t begin(int32_t batch) const { return batch == 0 ? 0 : 1 + (batch - 1) * rounds_at_once; }
  int32_t end(int32_t batch) const { return batch == 0 ? 1 : std::min(ranks, begin(batch) + rounds_at_once); }
};

// The keys and values of one peer that a rank holds in a round.
struct RoundKeys {
  int32_t peer = 0;
  PlacedRuns places;
  View k, v;
  RowMemory memory;  // empty for the rank's own keys
};

class KeyExchange {
 public:
  KeyExchange(const ShardCall& call, const RoundBatches& batches) : call_(call), batches_(batches) {}

  // Returns the keys of a batch, and starts the exchange of the next batch. Batches are taken in order.
  Status next(int32_t batch, std::vector<RoundKeys>* keys);

 private:
  Status start(int32_t batch);

  const ShardCall& call_;
  RoundBatches batches_;
  Exchange exchange_;  // the next batch is in flight
};

}  // namespace tandem::context_parallel
