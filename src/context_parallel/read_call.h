// The check of a rank's call: tandem_cp_args -> ShardCall.
#pragma once

#include "base/status.h"
#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

// Checks the rank's tensors and options, and refuses options that are not served.
Status read_shard(tandem_pass pass, const tandem_attention_args* args, ShardCall* call);

}  // namespace tandem::context_parallel
