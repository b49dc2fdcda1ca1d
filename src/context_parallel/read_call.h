// The check of a rank's call: tandem_cp_args -> ShardCall.
#pragma once

#include "base/status.h"
#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

// Checks the rank's tensors and options, and refuses options that are not served.
Status read_shard(tandem_pass pass, const tandem_attention_args* args, tandem_device device, ShardCall* call);

// Refuses options that GPUs do not serve in context parallelism. With chunks the bits of the chosen kernels do not
// depend on the number of ranks.
Status check_for_gpu(ShardCall* call);

}  // namespace tandem::context_parallel
