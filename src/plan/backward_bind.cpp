// Binds the parameters of a backward's kernels to a call.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "config/mods.h"
#include "plan/arguments.h"
#include "plan/backward.h"
#include "plan/buffers.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"

namespace tandem::plan {
namespace {

// Returns dout as products read it: the caller's tensor, or bwd_preprocess's rounded copy if the caller's is float32.
View dout_of(const Problem& p, const BackwardParams& params) {
  if (p.dout.dtype != DType::f32) return p.dout;
  View view = p.dout;
  view.data = static_cast<std::byte*>(params.dout_rounded);
  view.dtype = p.dtype;
  view.head = p.head_dim_v;
  view.row = p.heads_q * view.head;
  view.batch = p.packed_q() ? 0 : p.seqlen_q * view.row;
  return view;
}

void add_maps(const Problem& p, const BackwardKernel& tile, BackwardParams* params, Arguments* arguments) {
  const auto map = [&](::TensorMap* place, const View& view, bool packed, int64_t rows, int64_t heads, int64_t head_dim,
                       int box, gpu::Swizzle swizzle = gpu::Swizzle::b128) {
    if (!view || rows == 0 || heads == 0 || view.dtype != p.dtype) return;  // float32 is stored from registers
    const MapDimensions dimensions = arguments->add_map(place, view.data, p.dtype, swizzle);
    dimensions.add(head_dim, 1, dimensions.columns() / (swizzle == gpu::Swizzle::b64 ? 2 : 1))
        .add(rows, view.row, box)
        .add(heads, view.head, 1)
        .add(packed ? 1 : p.batch, view.batch, 1);
  };
  const bool packed_q = p.packed_q(), packed_k = p.packed_k();
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q, rows_k = packed_k ? p.total_k : p.seqlen_k;
  map(&params->q, p.q, packed_q, rows_q, p.heads_q, p.head_dim, tile.q_box);
  map(&params->dout, dout_of(p, *params), packed_q, rows_q, p.heads_q, p.head_dim_v, tile.q_box);
  map(&params->k, p.k, packed_k, rows_k, p.heads_k, p.head_dim, tile.k_box);
  map(&params->v, p.v, packed_k, rows_k, p.heads_k, p.head_dim_v, tile.k_box);
  if (tile.two_cta_ring) {
    map(&params->qt, p.q, packed_q, rows_q, p.heads_q, p.head_dim, tile.tile_m, gpu::Swizzle::b64);
    map(&params->kt, p.k, packed_k, rows_k, p.heads_k, p.head_dim, tile.k_box, gpu::Swizzle::b64);
  }
  if (!tile.stores_dkv_by_tma) return;
  map(&params->dk, p.dk, packed_k, rows_k, p.heads_k, p.head_dim, 64);
  map(&params->dv, p.dv, packed_k, rows_k, p.heads_k, p.head_dim_v, 64);
}

void set_rows(const Problem& p, BackwardParams* params) {
  params->out_given = p.out.data;
  params->out_batch = p.out.batch;
  params->out_row = p.out.row;
  params->out_head = p.out.head;
  params->dout_data = p.dout.data;
  params->dout_batch = p.dout.batch;
  params->dout_row = p.dout.row;
  params->dout_head = p.dout.head;
  params->lse = reinterpret_cast<float*>(p.lse.data);
  params->lse_batch = p.lse.batch;
  params->lse_row = p.lse.row;
  params->lse_head = p.lse.head;
  params->dlse = p.dlse ? reinterpret_cast<const float*>(p.dlse.data) : nullptr;
  params->dlse_batch = p.dlse.batch;
  params->dlse_row = p.dlse.row;
  params->dlse_head = p.dlse.head;
  params->dq = p.dq ? p.dq.data : nullptr;
  params->dq_batch = p.dq.batch;
  params->dq_row = p.dq.row;
  params->dq_head = p.dq.head;
  params->dk_data = p.dk.data;
  params->dk_batch = p.dk.batch;
  params->dk_row = p.dk.row;
  params->dk_head = p.dk.head;
  params->dv_data = p.dv.data;
  params->dv_batch = p.dv.batch;
  params->dv_row = p.dv.row;
  params->dv_head = p.dv.head;
  params->out_is_f32 = p.out.dtype == DType::f32;
  params->dout_is_f32 = p.dout.dtype == DType::f32;
  params->dq_is_f32 = p.dq.dtype == DType::f32;
  params->dk_is_f32 = p.dk.dtype == DType::f32;
  params->dv_is_f32 = p.dv.dtype == DType::f32;
  params->accumulate = p.accumulate;
}

void set_dbias(const Problem& p, BackwardParams* params) {
  const BiasView& dbias = p.dbias;
  params->dbias = dbias.data;
  params->dbias_is_f32 = dbias.dtype == DType::f32;
  params->dbias_batches = static_cast<int>(dbias.shape[0]);
  params->dbias_heads = static_cast<int>(dbias.shape[1]);
  params->dbias_rows = static_cast<int>(dbias.shape[2]);
  params->dbias_columns = static_cast<int>(dbias.shape[3]);
  params->dbias_batch = dbias.stride[0];
  params->dbias_head = dbias.stride[1];
  params->dbias_row = dbias.stride[2];
  params->dbias_column = dbias.stride[3];
}

void set_order(const Problem& p, const BackwardSchedule& t, std::byte* workspace, BackwardParams* params) {
  params->batch = static_cast<int>(p.batch);
  params->heads_q = static_cast<int>(p.heads_q);
  params->heads_k = static_cast<int>(p.heads_k);
  params->head_dim = static_cast<int>(p.head_dim);
  params->head_dim_v = static_cast<int>(p.head_dim_v);
  params->pack_gqa = 1;
  params->m_blocks = t.m_blocks;
  params->sequence_m_blocks = t.sequence_m_blocks;
  params->n_blocks = t.n_blocks;
  params->spt_heads = t.spt_heads;
  params->m_splits = t.m_splits;
  params->unsplit_tiles = t.unsplit_tiles;
  params->head_parts = t.head_parts;
  params->dq_splits = t.dq_splits;
  params->part_n_blocks = t.part_n_blocks;
  params->tiles = t.tiles;
  params->l2_heads = t.l2_heads;
  params->counter = reinterpret_cast<int*>(workspace);
  params->dq_semaphore = reinterpret_cast<int*>(workspace + t.dq_semaphore_offset);
  params->lse_delta = reinterpret_cast<float*>(workspace + t.lse_delta_offset);
  params->dq_accum = reinterpret_cast<float*>(workspace + t.dq_accum_offset);
  params->dkv_accum = reinterpret_cast<float*>(workspace + t.dkv_accum_offset);
  params->dkv_semaphore = reinterpret_cast<int*>(workspace + t.dkv_semaphore_offset);
  params->dkv_semaphore_count = t.dkv_semaphore_count;
  params->ds = t.tile.ds_gmem && p.dq ? workspace + t.ds_offset : nullptr;
  params->ds_semaphore = reinterpret_cast<int*>(workspace + t.ds_semaphore_offset);
  params->ds_semaphore_count = t.ds_semaphore_count;
  params->ds_heads = static_cast<int>(t.chunk.all_heads);
  params->chunk_heads = static_cast<int>(t.chunk.heads);
  params->chunk_n_blocks = static_cast<int>(t.chunk.n_blocks);
  params->ds_row_stride = static_cast<int>(t.chunk.row_n_blocks);
  params->pack_triangle = t.chunk.pack_triangle;
  params->dq_sum_n_blocks = static_cast<int>(t.chunk.sum_n_blocks);
}

ModElement element_of(DType type) {
  switch (type) {
    case DType::f64: return ModElement::f64;
    case DType::bf16: return ModElement::bf16;
    case DType::f16: return ModElement::f16;
    default: return ModElement::f32;
  }
}

void set_captured(const BoundExpression& mod, std::byte* words, CapturedParams* params) {
  params->words = reinterpret_cast<unsigned long long*>(words);
  params->cells = mod.cells;
  for (size_t n = 0; n < mod.gradients.size(); ++n) {
    const CapturedGradient& gradient = mod.gradients[n];
    CapturedTensor& tensor = params->tensors[n];
    tensor.first = gradient.to ? gradient.first : -1;
    tensor.gradient = gradient.to.data;
    tensor.element = element_of(gradient.to.dtype);
    tensor.count = gradient.to.shape[0] * gradient.to.shape[1] * gradient.to.shape[2] * gradient.to.shape[3];
    std::copy_n(gradient.to.stride, kModRank, tensor.stride);
  }
}

BackwardParams& add_backward_params(const Problem& p, const BackwardSchedule& t, std::byte* workspace,
                                    Arguments* arguments) {
  const auto set = [&](ModifiedBackwardParams& params) -> BackwardParams& {
    set_mods(p, &params.mods);
    if (t.tile.captured) set_captured(*p.score_mod.read, workspace + t.captured_offset, &params.captured);
    return params;
  };
  if (p.block_mask) {
    auto& params = arguments->add<BlockMaskedBackwardParams>();
    set_block_lists(p, t.tile.tile_n / t.tile.ctas, t.list_heads, t.list_batch, &params.blocks);
    params.blocks.m_blocks = t.sequence_m_blocks;
    params.blocks.list_words = t.list_words;
    params.blocks.steps = reinterpret_cast<int*>(workspace + t.steps_offset);
    params.table = reinterpret_cast<int*>(workspace + t.table_offset);
    return set(params);
  }
  if (!p.score_mod && !p.mask_mod) return arguments->add<BackwardParams>();
  return set(arguments->add<ModifiedBackwardParams>());
}

}  // namespace

void BackwardPass::bind(const Problem& p, const Plan& plan, std::byte* workspace, Arguments* arguments) const {
  const BackwardSchedule& t = plan.backward;
  BackwardParams& params = add_backward_params(p, t, workspace, arguments);
  set_rows(p, &params);
  set_order(p, t, workspace, &params);
  set_lengths(p, &params);
  set_scores(p, &params);
  if (p.bias) set_bias(p, &params);
  if (p.dsink) {
    params.dsink = p.dsink.data;
    params.dsink_head = p.dsink.head;
    params.dsink_is_f32 = p.dsink.dtype == DType::f32;
    params.dsink_parts = reinterpret_cast<float*>(workspace + t.dsink_offset);
  }
  if (p.dbias) set_dbias(p, &params);
  if (p.dout.dtype == DType::f32) params.dout_rounded = workspace + t.dout_offset;
  params.has_dk = p.dk.present;
  params.has_dv = p.dv.present;
  add_maps(p, t.tile, &params, arguments);
  for (size_t n = 1; n < plan.kernels.size(); ++n) arguments->share(params);
}

std::vector<gpu::NamedBuffer> BackwardPass::tensors_of(const Problem& p, const Plan& plan, size_t launch) const {
  Buffers buffers;
  const BackwardKernel& tile = plan.backward.tile;
  const auto add_scores = [&] {
    buffers.add_inputs(p);
    buffers.add_result_gradient(p);
    buffers.add_terms(p);
    buffers.add_lengths(p);
  };
  switch (plan.launches[launch].entry) {
    case EntryId::preprocess:
      buffers.add_results_given(p);
      buffers.add_terms(p);
      buffers.add_lengths(p);
      break;
    case EntryId::main:
      add_scores();
      buffers.add_key_gradients(p);
      if (tile.single_n_block) buffers.add_query_gradient(p);
      break;
    case EntryId::dq:
      buffers.add_inputs(p);
      buffers.add_query_gradient(p);
      buffers.add_lengths(p);
      break;
    case EntryId::postprocess:
      buffers.add_query_gradient(p);
      if (plan.backward.m_splits > 1) buffers.add_key_gradients(p);
      buffers.add_lengths(p);
      break;
    case EntryId::dsink: buffers.add_sink_gradient(p); break;
    case EntryId::dbias:
      add_scores();
      buffers.add_bias_gradient(p);
      break;
    case EntryId::captured: add_scores(); break;
    case EntryId::postprocess_captured: buffers.add_captured_gradients(p); break;
    default:  // reads the lists of a block mask
      buffers.add_block_lists(p);
      buffers.add_lengths(p);
  }
  return std::move(buffers.list);
}

std::string BackwardPass::summary(const Plan& plan) const {
  const BackwardSchedule& t = plan.backward;
  return str_cat(
      t.grid, " blocks for ", t.tiles, " tiles, ", t.ds_chunks > 1 ? str_cat(t.ds_chunks, " chunks, ") : "",
      t.m_splits > 1 ? str_cat("steps split by ", t.m_splits, ", ") : "",
      t.tile.spt ? str_cat(t.spt_heads, " heads from the diagonal") : str_cat("groups of ", t.l2_heads, " key heads"));
}

}  // namespace tandem::plan
