#include "plan/make_blocks.h"

#include <algorithm>
#include <cstdio>

#include "base/text.h"
#include "config/block_mask.h"
#include "plan/buffers.h"
#include "plan/check.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

constexpr int64_t kBlocksOfSm = 16;  // CTAs resident on an SM

MadeListParams params_of(const MadeList& list) {
  if (!list) return {};
  const int64_t *count = list.count_stride, *index = list.index_stride;
  return {list.count, list.index, count[0], count[1], count[2], index[0], index[1], index[2], index[3]};
}

}  // namespace

std::string make_blocks_name(const MakeBlocksProblem& m) {
  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(m.mask_mod->program->cuda_hash));
  return str_cat("make_blocks_", hash);
}

std::string make_blocks_translation_unit(const MakeBlocksProblem& m) {
  const score_mod::Program& program = *m.mask_mod->program;
  std::string text = str_cat("#include \"prepost/make_blocks.cuh\"\n\n", program.cuda, program.cuda_ranges);
  const int threads[] = {kClassifyThreads, kListBlocksThreads};
  for (int n = 0; n < 2; ++n) {
    const char* name = kMakeBlocksEntries[n].name;
    text += str_cat("extern \"C\" __global__ void __launch_bounds__(", threads[n], ") ", name,
                    "(const __grid_constant__ MakeBlocksParams p) {\n  ", name, "<0>(p);\n}\n");
  }
  return text;
}

Status check_make_blocks(const MakeBlocksProblem& m, const gpu::Properties& device) {
  TANDEM_TRY(check_device(device));
  TANDEM_TRY(check_mod("mask_mod", m.mask_mod));
  if (m.seqlen_q > kLongestSequence || m.seqlen_k > kLongestSequence) {
    return Status::unsupported(str_cat("seqlen_q (", m.seqlen_q, ") and seqlen_k (", m.seqlen_k,
                                       ") must be at most 2^28 on a GPU: choose device \"cpu\""));
  }
  if (m.rows() <= INT32_MAX) return {};
  return Status::unsupported(
      str_cat("rows of lists (", m.rows(), ") must be below 2^31 on a GPU: use larger blocks or fewer heads"));
}

MakeBlocksLaunch make_blocks_launch(const MakeBlocksProblem& m, const gpu::Properties& device, std::byte* workspace) {
  MakeBlocksLaunch launch{};
  MakeBlocksParams& params = launch.params;
  set_names(m.mask_mod, &params.names);
  for (int n = 0; n < 2; ++n) {
    params.partial[n] = params_of(m.partial[n]);
    params.full[n] = params_of(m.full[n]);
  }
  params.states = reinterpret_cast<MadeState*>(workspace);
  params.batch = static_cast<int>(m.batch);
  params.heads = static_cast<int>(m.heads);
  params.seqlen_q = static_cast<int>(m.seqlen_q);
  params.seqlen_k = static_cast<int>(m.seqlen_k);
  params.block_q = static_cast<int>(m.block_q);
  params.block_k = static_cast<int>(m.block_k);
  params.blocks_q = static_cast<int>(m.blocks_q);
  params.blocks_k = static_cast<int>(m.blocks_k);
  constexpr int64_t kWarps = kClassifyThreads / 32;
  launch.grid[0] = static_cast<uint32_t>(std::min((m.blocks() + kWarps - 1) / kWarps, kBlocksOfSm * device.sm_count));
  launch.grid[1] = static_cast<uint32_t>(m.rows());
  launch.threads[0] = kClassifyThreads;
  launch.threads[1] = kListBlocksThreads;
  return launch;
}

std::vector<gpu::NamedBuffer> make_blocks_buffers(const MakeBlocksProblem& m, std::byte* workspace, size_t launch) {
  Buffers buffers;
  buffers.add_mod(m.mask_mod);
  if (launch == 1) {
    const char* names[2][4] = {{"kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"},
                               {"q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"}};
    for (int n = 0; n < 2; ++n) {
      buffers.add_made_list(names[n][0], names[n][1], m, m.partial[n], n == 1);
      buffers.add_made_list(names[n][2], names[n][3], m, m.full[n], n == 1);
    }
  }
  buffers.list.push_back({.name = "workspace",
                          .address = workspace,
                          .bytes = static_cast<size_t>(m.blocks()),
                          .writable = true,
                          .initialised = launch == 1});
  return std::move(buffers.list);
}

}  // namespace tandem::plan
