// The forward pass on GPUs.
#pragma once

#include <cstddef>
#include <numeric>

#include "config/block_mask.h"
#include "plan/arithmetic.h"
#include "plan/plan.h"

namespace tandem::plan {

class ForwardPass final : public Pass {
 public:
  Status check(const Problem& problem, const gpu::Properties& device, const Tuning& tuning) const override;
  void plan(const Problem& problem, const gpu::Properties& device, const Tuning& tuning, Plan* plan) const override;
  void bind(const Problem& problem, const Plan& plan, std::byte* workspace, Arguments* arguments) const override;
  std::vector<gpu::NamedBuffer> tensors_of(const Problem& problem, const Plan& plan, size_t launch) const override;
  std::string summary(const Plan& plan) const override;
};

// Offsets in the workspace.
inline constexpr size_t kCounterOffset = 0;    // two ints
inline constexpr size_t kZerosOffset = 16;     // zeros that replace absent keys and values
inline constexpr size_t kTileListOffset = 32;  // ListedTile[m_blocks], varlen only

// batch_invariant: the most queries of a sequence that is split, and the most rows of these queries in a packed head. A
// sequence of one query may have more rows.
inline constexpr int64_t kMaxSplitQueries = 8, kMaxSplitTileRows = 64;

// The most queries of a sequence of this call that is split.
inline int split_queries(const Problem& p, int64_t max_queries) {
  return static_cast<int>(p.seqlen_q < max_queries ? p.seqlen_q : max_queries);
}

// The limit of queries and of keys.
inline constexpr int64_t kLongestSequence = int64_t{1} << 28;

// Larger window bounds have the same effect, and sums with this bound fit an int.
inline constexpr int kFarWindow = 1 << 30;

// Returns true if a left or right bound hides a key from some query.
bool needs_left_mask(const Problem& problem);
bool needs_right_mask(const Problem& problem);

// Returns true if lengths or the diagonal are known only on the device. Kernels with pages always read lengths there.
inline bool varlen(const Problem& p) {
  return p.packed_q() || p.packed_k() || p.seqused_q || p.seqused_k || p.diagonal_offsets || p.page_table;
}

// The backward also uses the following functions: the score options of a kernel, and their parameters.
int clamped_bound(int64_t bound);
// Returns true if a bias may be divided by the scale and added to products without a loss of digits.
bool is_near_one(double scale);
// The multiprocessors that the call may use; a cluster needs `ctas` of them.
int usable_sms(const Problem& problem, const gpu::Properties& device, int ctas);
ScoreOptions options_of(const Problem& problem);
// A forward configuration with the properties of the problem that every kernel needs.
template <class Config>
Config forward_options(const Problem& p) {
  Config t;
  t.head_dim = static_cast<int>(round_up(p.head_dim, 16));
  t.head_dim_v = static_cast<int>(round_up(p.head_dim_v, 16));
  t.f32_out = p.out.dtype == DType::f32;
  t.max_scores = static_cast<bool>(p.max_scores);
  t.options = options_of(p);
  return t;
}
// Returns the configuration for the problem's pages: TMA boxes that lie in one page.
template <class Config>
Config with_pages(Config t, const Problem& p) {
  if (p.page_table) t.page_rows = static_cast<int>(std::gcd(p.page_table.page_size, int64_t{t.tile_n}));
  return t;
}
// The queries of a sequence that combine_splits() visits with T.device_splits: all that may share a tile with a split.
int combined_queries(const Problem& problem, const ForwardSchedule& schedule);
void set_lengths(const Problem& problem, ForwardParams* params);
void set_pages(const PageTable& table, PageParams* params);
void set_dropout(const DropoutOptions& dropout, DropoutParams* params);
void set_scores(const Problem& problem, ForwardParams* params);
void set_bias(const Problem& problem, ForwardParams* params);
void set_mods(const Problem& problem, ModParams* params);
void set_names(const ModView& mod, ModNames* names);

// For block masks. True if blocks have a multiple of this number of queries and keys, or if there is only one block;
// otherwise also returns the reason.
bool fits_blocks(const Problem& problem, int64_t queries, int64_t keys);
Status check_blocks(const Problem& problem, int64_t queries, int64_t keys);
// The number of lists: 1, or one for each sequence (dim 0) or head (dim 1).
int lists_of(const Problem& problem, int dim);
// keys: the kernel's n_block size.
void set_block_lists(const Problem& problem, int keys, int heads, int batch, BlockMaskParams* params);

}  // namespace tandem::plan
