// The forward pass on GPUs.
#pragma once

#include <cstddef>

#include "plan/plan.h"
#include "shared/block_mask.h"

namespace tandem::plan {

class ForwardPass final : public Pass {
 public:
  Status check(const Problem& problem, const gpu::Properties& device) const override;
  void plan(const Problem& problem, const gpu::Properties& device, Plan* plan) const override;
  void bind(const Problem& problem, const Plan& plan, std::byte* workspace, Arguments* arguments) const override;
  std::vector<gpu::NamedBuffer> tensors_of(const Problem& problem, const Plan& plan, size_t launch) const override;
  std::string summary(const Plan& plan) const override;
};

// The workspace.
inline constexpr size_t kCounterOffset = 0;    // two ints
inline constexpr size_t kZerosOffset = 16;     // what stands for keys and values where there are none
inline constexpr size_t kTileListOffset = 32;  // ListedTile[m_blocks], varlen only

// Of queries, and of keys.
inline constexpr int64_t kLongestSequence = int64_t{1} << 28;

// Bounds beyond are as good as these, and sums stay in int.
inline constexpr int kFarWindow = 1 << 30;

// A left or right bound that hides a key from some query.
bool binds_left(const Problem& problem);
bool binds_right(const Problem& problem);

// Lengths, or where the diagonal lies, are known on the device only.
inline bool varlen(const Problem& p) {
  return p.packed_q() || p.packed_k() || p.seqused_q || p.seqused_k || p.diagonal_offsets;
}

// What follows is the backward's too: what a problem asks of a kernel, however it is cut, and what the kernel is told
// of scores.
Bias bias_of(const Problem& problem);
int clamped_bound(int64_t bound);
// Whether a bias may be divided by it and added to products, and neither is lost beside the other.
bool is_near_one(double scale);
// Multiprocessors that the call may take, of which a cluster needs so many.
int sms_for(const Problem& problem, const gpu::Properties& device, int ctas);
template <class Kernel>
void set_options(const Problem& p, Kernel* t) {
  t->f16 = p.dtype == DType::f16;
  t->left = binds_left(p);
  t->right = binds_right(p);
  t->varlen = varlen(p);
  t->unscaled = static_cast<float>(p.softmax_scale) <= 0;
  t->softcap = p.softcap > 0;
  t->alibi = p.alibi_slopes.present;
  t->bias = bias_of(p);
  t->score_mod = p.score_mod.present;
  t->mask_mod = p.mask_mod.present;
  t->block_mask = static_cast<bool>(p.block_mask);
}
void set_lengths(const Problem& problem, ForwardParams* params);
void set_dropout(const Dropout& dropout, DropoutParams* params);
void set_scores(const Problem& problem, ForwardParams* params);
void set_bias(const Problem& problem, ForwardParams* params);
void set_mods(const Problem& problem, ModParams* params);
void set_names(const ModView& mod, ModNames* names);

// Block masks. Whether blocks are of so many queries and keys, or multiples, or there is but one; and why not.
bool fits_blocks(const Problem& problem, int64_t queries, int64_t keys);
Status check_blocks(const Problem& problem, int64_t queries, int64_t keys);
// Lists that there are: 1, or for all of the batch (0) or heads (1).
int lists_of(const Problem& problem, int dim);
// keys: in which the kernel counts blocks.
void set_block_lists(const Problem& problem, int keys, int heads, int batch, BlockMaskParams* params);

}  // namespace tandem::plan
