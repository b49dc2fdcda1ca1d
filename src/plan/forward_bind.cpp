// Binds the parameters of a forward's kernels to a call.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "base/text.h"
#include "config/block_mask.h"
#include "plan/arguments.h"
#include "plan/buffers.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"
#include "problem/philox.h"

namespace tandem::plan {
namespace {

// q and out: the rows of a box are neighbours in the order of tiles: the packed heads of each query in turn.
// The caller adds the dimension of sequences.
const MapDimensions& add_rows(const Problem& p, const ForwardSchedule& t, const View& view, int64_t head_dim, int rows,
                              const MapDimensions& map) {
  const int64_t pack_gqa = t.pack_gqa, heads_of_box = std::min<int64_t>(pack_gqa, rows);
  return map.add(head_dim, 1, map.columns())
      .add(pack_gqa, view.head, heads_of_box)
      .add(p.packed_q() ? p.total_q : p.seqlen_q, view.row, rows / heads_of_box)
      .add(p.heads_q / pack_gqa, view.head * pack_gqa, 1);
}

// The results of the splits in the workspace: (splits, batch, rows, heads, head_dim_v), the lse without the last.
int64_t result_sequences(const Problem& p) { return p.packed_q() ? 1 : p.batch; }
int64_t result_rows(const Problem& p) { return p.packed_q() ? p.total_q : p.seqlen_q; }
View split_out(const Problem& p, const ForwardSchedule& t, std::byte* workspace) {
  const int64_t row = p.heads_q * p.head_dim_v;
  return {.data = workspace + t.split_out_offset,
          .dtype = DType::f32,
          .batch = result_rows(p) * row,
          .row = row,
          .head = p.head_dim_v,
          .present = true};
}
View split_lse(const Problem& p, const ForwardSchedule& t, std::byte* workspace) {
  return {.data = workspace + t.split_lse_offset,
          .dtype = DType::f32,
          .batch = result_rows(p) * p.heads_q,
          .row = p.heads_q,
          .head = 1,
          .present = true};
}

// Adds the maps of k and v. Without keys all copied elements are zeros, because a hidden value is still multiplied by a
// probability of 0.
void add_keys(const Problem& p, const ForwardSchedule& t, const View& view, int64_t head_dim, int box,
              const MapDimensions& map) {
  if (t.no_keys) {
    map.add(8, 1, map.columns()).add(1, 0, box).add(1, 0, 1).add(1, 0, 1);
    return;
  }
  if (p.page_table) {
    map.add(head_dim, 1, map.columns())
        .add(p.page_table.page_size, view.row, box)
        .add(p.heads_k, view.head, 1)
        .add(p.page_table.pages, view.batch, 1);
    return;
  }
  map.add(head_dim, 1, map.columns())
      .add(p.packed_k() ? p.total_k : p.seqlen_k, view.row, box)
      .add(p.heads_k, view.head, 1)
      .add(p.packed_k() ? 1 : p.batch, view.batch, 1);
}

void add_maps(const Problem& p, const ForwardSchedule& t, std::byte* workspace, ForwardParams* params,
              Arguments* arguments) {
  const auto map = [&](::TensorMap* place, const void* address, DType type) {
    // With 256 bytes, decoding reads from memory at 0.92 to 0.97 of the rate. Backwards of 1k tokens need them.
    return arguments->add_map(place, address, type).promote(gpu::L2Promotion::b128);
  };
  const ForwardKernel::TmaBoxRows& boxes = t.tile.boxes;
  const std::byte* const zeros = t.no_keys ? workspace + kZerosOffset : nullptr;
  const int64_t sequences = result_sequences(p);
  add_rows(p, t, p.q, p.head_dim, boxes.q, map(&params->q, p.q.data, p.dtype)).add(sequences, p.q.batch, 1);
  add_keys(p, t, p.k, p.head_dim, boxes.k, map(&params->k, t.no_keys ? zeros : p.k.data, p.dtype));
  add_keys(p, t, p.v, p.head_dim_v, boxes.v, map(&params->v, t.no_keys ? zeros : p.v.data, p.dtype));
  const View out = t.splits > 1 ? split_out(p, t, workspace) : p.out;
  add_rows(p, t, out, p.head_dim_v, boxes.out, map(&params->out, out.data, out.dtype))
      .add(sequences * t.splits, out.batch, 1);
}

void set_max_scores(const Problem& p, MaxScoresParams* params) {
  params->data = reinterpret_cast<float*>(p.max_scores.data);
  params->batch = p.max_scores.batch;
  params->row = p.max_scores.row;
  params->head = p.max_scores.head;
  params->q_data = p.q.data;
  params->q_batch = p.q.batch;
  params->q_row = p.q.row;
  params->q_head = p.q.head;
}

// The keys of max_scores, and of kernels with gathers_pages.
void set_key_rows(const Problem& p, MaxScoresParams* params) {
  params->k_data = p.k.data;
  params->k_batch = p.k.batch;
  params->k_row = p.k.row;
  params->k_head = p.k.head;
  params->head_dim = static_cast<int>(p.head_dim);
}
void set_paged_values(const View& v, PagedValues* params) {
  constexpr int64_t kUnit = PagedValues::kUnit;
  params->data = v.data;
  params->page = static_cast<unsigned>(v.batch / kUnit);
  params->row = static_cast<unsigned>(v.row / kUnit);
  params->head = static_cast<unsigned>(v.head / kUnit);
}

template <class Params>
void set_out_and_lse(const View& out, const View& lse, Params* params) {
  params->out_batch = out.batch;
  params->out_row = out.row;
  params->out_head = out.head;
  params->lse = lse ? reinterpret_cast<float*>(lse.data) : nullptr;
  params->lse_batch = lse.batch;
  params->lse_row = lse.row;
  params->lse_head = lse.head;
}

void set_device_splits(const Problem& p, const ForwardSchedule& t, std::byte* workspace, SplitParams* split) {
  split->count = t.split_count;
  split->max_count = t.max_splits;
  split->n_blocks = t.split_n_blocks;
  split->max_queries = split_queries(p, t.split_max_queries);
  split->queries = combined_queries(p, t);
  split->lanes = t.combine_lanes;
  split->f32_out = p.out.dtype == DType::f32;
  split->row_out = reinterpret_cast<float*>(workspace + t.split_out_offset);
  split->row_lse = reinterpret_cast<float*>(workspace + t.split_lse_offset);
}

void set_results(const Problem& p, const ForwardSchedule& t, std::byte* workspace, ForwardParams* params) {
  if (t.splits > 1) {
    const View out = split_out(p, t, workspace);
    params->out_data = out.data;
    set_out_and_lse(out, split_lse(p, t, workspace), params);
    SplitParams& split = params->split;
    split.count = t.splits;
    split.n_blocks = t.split_n_blocks;
    split.batches = static_cast<int>(result_sequences(p));
    split.lanes = t.combine_lanes;
    split.f32_out = p.out.dtype == DType::f32;
    split.out = p.out.data;
    set_out_and_lse(p.out, p.lse, &split);
  } else {
    params->out_data = p.out.data;
    set_out_and_lse(p.out, p.lse, params);
    if (t.split_rows > 0) set_device_splits(p, t, workspace, &params->split);
  }
  if (p.max_scores) set_max_scores(p, &params->max_scores);
  if (p.max_scores || p.page_table) set_key_rows(p, &params->max_scores);
}

void set_order(const Problem& p, const ForwardSchedule& t, std::byte* workspace, ForwardParams* params) {
  params->batch = static_cast<int>(p.batch);
  params->heads_q = static_cast<int>(p.heads_q);
  params->heads_k = static_cast<int>(p.heads_k);
  params->head_dim_v = static_cast<int>(p.head_dim_v);
  params->pack_gqa = t.pack_gqa;
  params->m_blocks = t.m_blocks;
  params->tiles = t.tile.varlen ? 0 : t.tiles * t.splits;
  params->l2_heads = t.l2_heads;
  if (t.dynamic_scheduler) params->counter = reinterpret_cast<int*>(workspace + kCounterOffset);
  if (t.lists_tiles) params->tile_list = reinterpret_cast<ListedTile*>(workspace + kTileListOffset);
}

}  // namespace

void set_lengths(const Problem& p, ForwardParams* params) {
  const auto place = [](const IndexView& view, const int** data, int* stride) {
    *data = view ? view.data : nullptr;
    *stride = static_cast<int>(view.stride);
  };
  place(p.cu_seqlens_q, &params->cu_seqlens_q, &params->cu_seqlens_q_stride);
  place(p.cu_seqlens_k, &params->cu_seqlens_k, &params->cu_seqlens_k_stride);
  place(p.seqused_q, &params->seqused_q, &params->seqused_q_stride);
  place(p.seqused_k, &params->seqused_k, &params->seqused_k_stride);
  params->seqlen_q = static_cast<int>(p.seqlen_q);
  params->seqlen_k = static_cast<int>(p.seqlen_k);
  params->total_q = p.packed_q() ? static_cast<int>(p.total_q) : 0;
  params->total_k = p.packed_k() ? static_cast<int>(p.total_k) : 0;
}

void set_pages(const PageTable& table, PageParams* params) {
  params->table = table.data;
  params->batch = static_cast<int>(table.batch);
  params->column = static_cast<int>(table.column);
  params->page_size = static_cast<int>(table.page_size);
  params->pages = static_cast<int>(table.pages);
}

void set_bias(const Problem& p, ForwardParams* params) {
  params->bias = p.bias.data;
  params->bias_batch = p.bias.stride[0];
  params->bias_head = p.bias.stride[1];
  params->bias_row = p.bias.stride[2];
  params->bias_column = p.bias.stride[3];
}

// Computes coefficients (of x, x^3, ...) of a tanh polynomial for |x| <= within, with x = product * `to_cap` and result
// * `of`. Terms whose coefficient is too small for float32 limit the range. Returns the first product beyond it.
template <int terms>
float set_tanh(const double (&tanh)[terms], double within, double to_cap, double of, float (&polynomial)[terms]) {
  constexpr double error = 3e-7;
  double factor = of * to_cap;
  for (int term = 0; term < terms; ++term, factor *= to_cap * to_cap) {
    const auto rounded = static_cast<float>(factor * tanh[term]);
    polynomial[term] = std::isnormal(rounded) ? rounded : 0;
    if (!std::isnormal(rounded))
      within = std::min(within, std::pow(error / std::fabs(tanh[term]), 1.0 / (2 * term + 1)));
  }
  return static_cast<float>(within / std::fabs(to_cap));
}

// Minimax fits of tanh(x) - x: errors up to 3.2e-7 for |x| <= 1, and 1.8e-7 for |x| <= 0.28.
void set_softcap(const Problem& p, ForwardParams* params) {
  constexpr double tanh[kSoftcapTerms] = {
      1, -0.3332866991268495, 0.13275615259971799, -0.051425354112036775, 0.016532816377251736, -0.002983081860725399};
  constexpr double near[kSoftcapNearTerms] = {1, -0.33317107294619436, 0.12726653182975292};
  const double x = p.softmax_scale / p.softcap, cap = p.softcap * std::numbers::log2e;  // to_cap: x for a product of 1
  params->softcap_log2 = static_cast<float>(cap);
  params->softcap_inverse = static_cast<float>(1 / cap);
  params->scale_softcap = static_cast<float>(2 * std::numbers::log2e * x);
  params->softcap_product = set_tanh(tanh, 1, x, cap, params->softcap_polynomial);
  params->softcap_near_product = set_tanh(near, 0.28, x, cap, params->softcap_near_polynomial);
  // A warp decides by all its products, which may include products of other sequences.
  if (p.batch_invariant) params->softcap_near_product = 0;
}

static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
static_assert(sizeof(::Place) == sizeof(tandem_place));
void set_dropout(const DropoutOptions& dropout, DropoutParams* params) {
  params->seed = dropout.seed;
  params->offset = dropout.offset;
  params->seed_ptr = reinterpret_cast<const unsigned long long*>(dropout.seed_ptr);
  params->offset_ptr = reinterpret_cast<const unsigned long long*>(dropout.offset_ptr);
  params->carry = (256 - dropout_threshold(dropout.p)) * 0x01010101u;
  params->scale = static_cast<float>(1 / (1 - dropout.p));
}

void set_scores(const Problem& p, ForwardParams* params) {
  params->alibi_slopes = reinterpret_cast<const float*>(p.alibi_slopes.data);
  params->alibi_batch = p.alibi_slopes.batch;
  params->alibi_head = p.alibi_slopes.head;
  params->sink = p.sink ? p.sink.data : nullptr;
  params->sink_head = p.sink.head;
  params->sink_is_f32 = p.sink.dtype == DType::f32;
  params->bottom_right = p.bottom_right;
  params->diagonal_offset = p.diagonal_offsets ? p.diagonal_offset : clamp_diagonal(p.diagonal_offset);
  params->diagonal_offsets = p.diagonal_offsets ? p.diagonal_offsets.data : nullptr;
  params->diagonal_offsets_stride = static_cast<int>(p.diagonal_offsets.stride);
  params->window_left = clamped_bound(p.window_left);
  params->window_right = clamped_bound(p.window_right);
  params->scale = static_cast<float>(p.softmax_scale);
  params->scale_log2 = static_cast<float>(p.softmax_scale * std::numbers::log2e);
  if (p.softcap > 0) set_softcap(p, params);
  if (p.dropout) set_dropout(p.dropout, &params->dropout);
  params->places = reinterpret_cast<const ::Place*>(p.places);
}

void set_names(const ModView& mod, ModNames* names) {
  const score_mod::Values& values = mod->values;
  const std::vector<score_mod::Name>& scalars = mod->program->mod.signature.scalars;
  for (size_t i = 0; i < scalars.size(); ++i) {
    const bool real = scalars[i].type == score_mod::Type::real;
    names->scalars[i] =
        real ? std::bit_cast<int>(static_cast<float>(values.scalars[i])) : static_cast<int>(values.scalars[i]);
  }
  for (size_t i = 0; i < values.tensors.size(); ++i) {
    const score_mod::TensorView& tensor = values.tensors[i];
    names->tensors[i].data = tensor.data;
    std::copy_n(tensor.stride, kModRank, names->tensors[i].stride);
    std::copy_n(tensor.size, kModRank, names->tensors[i].size);
  }
}

namespace {

// The box has eight more columns than an iteration, which avoid bank conflicts. All sequences or heads that share a
// bias read the bias of the first sequence or head.
void add_bias_map(const Problem& p, const ForwardSchedule& t, int ctas, BiasedForwardParams* params,
                  Arguments* arguments) {
  const int64_t* const stride = p.bias.stride;
  arguments->add_map(&params->bias_map, p.bias.data, p.bias.dtype, gpu::Swizzle::none)
      .add(p.seqlen_k, 1, t.tile.tile_n + 8)
      .add(p.seqlen_q, stride[2], 64 / ctas)
      .add(stride[1] == 0 ? 1 : p.heads_q, stride[1], 1)
      .add(stride[0] == 0 ? 1 : p.batch, stride[0], 1);
}

ForwardParams& add_forward_params(const Problem& p, const ForwardSchedule& t, std::byte* workspace,
                                  Arguments* arguments) {
  if (p.block_mask) {
    auto& params = arguments->add<BlockMaskedForwardParams>();
    set_mods(p, &params.mods);
    set_block_lists(p, t.tile.tile_n, t.list_heads, t.list_batch, &params.blocks);
    params.blocks.m_blocks = t.list_m_blocks;
    params.blocks.list_words = t.list_words;
    params.blocks.steps = reinterpret_cast<int*>(workspace + t.steps_offset);
    if (t.tile.varlen) return params;  // the tiles are in a list
    params.blocks.order = params.blocks.steps + int64_t{t.list_batch} * t.list_heads * t.m_blocks * t.list_words;
    params.tile_order = params.blocks.order;
    params.order_head = t.list_heads > 1 ? t.m_blocks : 0;
    params.order_batch = t.list_batch > 1 ? t.list_heads * t.m_blocks : 0;
    return params;
  }
  if (const int ctas = t.tile.bias_ctas(); ctas > 0) {
    auto& params = arguments->add<BiasedForwardParams>();
    add_bias_map(p, t, ctas, &params, arguments);
    return params;
  }
  if (!p.score_mod && !p.mask_mod) return arguments->add<ForwardParams>();
  auto& params = arguments->add<ModifiedForwardParams>();
  set_mods(p, &params.mods);
  return params;
}

}  // namespace

void set_mods(const Problem& p, ModParams* params) {
  if (p.score_mod) set_names(p.score_mod, &params->score);
  if (p.mask_mod) set_names(p.mask_mod, &params->mask);
}

void ForwardPass::bind(const Problem& p, const Plan& plan, std::byte* workspace, Arguments* arguments) const {
  const ForwardSchedule& t = plan.forward;
  ForwardParams& params = add_forward_params(p, t, workspace, arguments);
  set_results(p, t, workspace, &params);
  set_lengths(p, &params);
  if (p.page_table) set_pages(p.page_table, &params.pages), set_paged_values(p.v, &params.values);
  set_scores(p, &params);
  if (p.bias && !t.no_keys) set_bias(p, &params);
  // Without keys a bias may have no element. The kernel then reads a zero instead.
  if (p.bias && t.no_keys) params.bias = workspace + kZerosOffset;
  set_order(p, t, workspace, &params);
  add_maps(p, t, workspace, &params, arguments);
}

std::vector<gpu::NamedBuffer> ForwardPass::tensors_of(const Problem& p, const Plan& plan, size_t launch) const {
  Buffers buffers;
  if (plan.launches[launch].entry == EntryId::main) {
    buffers.add_inputs(p);
    if (plan.forward.splits == 1) buffers.add_results(p);
    buffers.add_terms(p);
  } else if (plan.launches[launch].entry == EntryId::combine_splits) {
    buffers.add_results(p);
  } else if (static_cast<int>(launch) == plan.forward.max_scores_launch) {
    buffers.add_inputs(p);
    buffers.add_max_scores(p);
    buffers.add_terms(p);
  } else if (p.block_mask) {
    buffers.add_block_lists(p);
  }
  buffers.add_lengths(p);
  return std::move(buffers.list);
}

std::string ForwardPass::summary(const Plan& plan) const {
  const ForwardSchedule& t = plan.forward;
  return str_cat(t.grid, " blocks for ", t.tile.varlen ? "up to " : "", t.tiles, " tiles, ", t.pack_gqa,
                 " heads together, groups of ", t.l2_heads);
}

}  // namespace tandem::plan
