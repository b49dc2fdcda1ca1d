// The block mask of a call.
#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "base/text.h"
#include "problem/builder.h"

namespace tandem {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// Requires that a dimension of a list is complete or broadcast.
Status check_broadcast(const Operand& o, int dim, const char* name, int64_t size) {
  if (o.shape[dim] == 1 || o.shape[dim] == size) return {};
  return Status::invalid(str_cat(o.name, ".", o.dim_name[dim], " (", o.shape[dim], ") must be 1 or equal ", name, " (",
                                 size, "): expand this dimension"));
}

// Sets the state of the blocks in a row of a list. Counts and indices may have any values.
void set_states(const BlockList& list, int64_t b, int64_t h, int64_t i, BlockState state, std::span<BlockState> row) {
  if (!list.present) return;
  const int64_t *to_count = list.count_stride, *to_index = list.index_stride;
  const int64_t given = list.count[b * to_count[0] + h * to_count[1] + i * to_count[2]];
  const int64_t count = std::clamp<int64_t>(given, 0, list.shape[3]);
  const int32_t* index = list.index + b * to_index[0] + h * to_index[1] + i * to_index[2];
  for (int64_t n = 0; n < count; ++n) {
    const int64_t j = index[n * to_index[3]];
    if (j >= 0 && j < static_cast<int64_t>(row.size())) row[static_cast<size_t>(j)] = state;
  }
}

}  // namespace

Status ProblemBuilder::read_block_list(Field count, Field index, BlockList* list) {
  const int64_t blocks = ceil_div(p_.seqlen_q, args_.mask_block_q);
  constexpr const char* kWhy = "compute the lists for these lengths and this mask_block_q";
  const Dim dims[] = {{"batch"}, {"heads"}, {"blocks", blocks, nullptr, kWhy}, {"indices"}};
  constexpr const char* kType = "convert the list to int32";
  TANDEM_TRY(read(count, only(DType::i32), kType, {dims, 3}, "", false));
  TANDEM_TRY(read(index, only(DType::i32), kType, {dims, 4}, "", false));
  const Operand &counts = operand(count), &indices = operand(index);
  for (const Operand* o : {&counts, &indices}) {
    TANDEM_TRY(check_broadcast(*o, 0, "q.batch", p_.batch));
    TANDEM_TRY(check_broadcast(*o, 1, "q.heads", p_.heads_q));
  }
  list->count = reinterpret_cast<const int32_t*>(counts.data);
  list->index = reinterpret_cast<const int32_t*>(indices.data);
  std::copy_n(counts.stride, 3, list->count_stride);
  std::copy_n(counts.shape, 3, list->count_shape);
  std::copy_n(indices.stride, 4, list->index_stride);
  std::copy_n(indices.shape, 4, list->shape);
  list->present = true;
  return {};
}

Status ProblemBuilder::read_block_mask() {
  const bool partial = given(&Args::kv_num_blocks), full = given(&Args::full_kv_num_blocks);
  const struct {
    const char *name, *other;
    bool given, needed;
  } pairs[] = {{"kv_indices", "kv_num_blocks", given(&Args::kv_indices), partial},
               {"full_kv_indices", "full_kv_num_blocks", given(&Args::full_kv_indices), full},
               {"kv_num_blocks", "full_kv_num_blocks", partial, partial || full}};
  for (const auto& pair : pairs) {
    if (pair.given == pair.needed) continue;
    return Status::invalid(str_cat(pair.name, pair.given ? " must be NULL without " : " (NULL) must be given with ",
                                   pair.other, pair.given ? ": pass NULL or both" : ": pass both"));
  }
  for (const auto& [name, size] :
       {std::pair{"mask_block_q", args_.mask_block_q}, {"mask_block_k", args_.mask_block_k}}) {
    if (partial ? size >= 1 : size == 0) continue;
    return Status::invalid(str_cat(name, " (", size, ") must be ",
                                   partial ? "at least 1: pass the number of queries or keys in a block"
                                           : "0 without kv_num_blocks: pass 0, or the lists of a block mask"));
  }
  if (args_.blocks_of_mask_mod != 0 && !(partial && p_.mask_mod)) {
    return Status::invalid(str_cat("blocks_of_mask_mod (", args_.blocks_of_mask_mod, ") must be 0 without ",
                                   partial ? "mask_mod" : "kv_num_blocks",
                                   ": pass 0, or the mask_mod and its lists from make_block_mask"));
  }
  if (!partial) return {};
  if (packed()) {
    return Status::invalid(
        "kv_num_blocks must be NULL with cu_seqlens_q: pass mask_mod alone, or join the sequences and compare doc[q] "
        "== doc[k]");
  }
  BlockMaskView& mask = p_.block_mask;
  mask.block_q = args_.mask_block_q;
  mask.block_k = args_.mask_block_k;
  mask.of_mask_mod = args_.blocks_of_mask_mod != 0;
  TANDEM_TRY(read_block_list(&Args::kv_num_blocks, &Args::kv_indices, &mask.partial));
  if (full) TANDEM_TRY(read_block_list(&Args::full_kv_num_blocks, &Args::full_kv_indices, &mask.full));
  if (mode_.with_data && on_cpu()) read_block_states();
  return {};
}

void ProblemBuilder::read_block_states() {
  BlockMaskView& mask = p_.block_mask;
  const auto varying = [&](int dim, int64_t size) {
    return mask.partial.varies(dim) || mask.full.varies(dim) ? size : std::min<int64_t>(size, 1);
  };
  const int64_t batch = varying(0, p_.batch), heads = varying(1, p_.heads_q);
  const int64_t blocks_q = ceil_div(p_.seqlen_q, mask.block_q);
  mask.blocks_k = ceil_div(p_.seqlen_k, mask.block_k);
  mask.head_stride = heads > 1 ? blocks_q * mask.blocks_k : 0;
  mask.batch_stride = batch > 1 ? heads * blocks_q * mask.blocks_k : 0;
  const auto states = std::make_shared<BlockState[]>(static_cast<size_t>(batch * heads * blocks_q * mask.blocks_k));
  BlockState* row = states.get();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < blocks_q; ++i, row += mask.blocks_k) {
        const std::span<BlockState> blocks(row, static_cast<size_t>(mask.blocks_k));
        set_states(mask.partial, b, h, i, BlockState::partial, blocks);
        set_states(mask.full, b, h, i, BlockState::full, blocks);
      }
    }
  }
  mask.states = states;
}

}  // namespace tandem
