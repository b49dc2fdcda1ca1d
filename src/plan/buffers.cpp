#include "plan/buffers.h"

#include "problem/bound_expression.h"

namespace tandem::plan {

void Buffers::add(const char* name, Access access, const void* data, DType dtype,
                  std::initializer_list<DimStep> steps) {
  int64_t last = 0;
  for (const DimStep& step : steps) {
    if (step.count == 0) return;
    last += (step.count - 1) * step.stride;
  }
  list.push_back({.name = name,
                  .address = const_cast<void*>(data),
                  .bytes = static_cast<size_t>((last + 1) * size_of(dtype)),
                  .writable = access != Access::read,
                  .initialised = access != Access::write});
}

// Adds a tensor of queries and query heads, or of keys and key heads. Adds nothing if the tensor is absent.
void Buffers::add_rows(const char* name, Access access, const Problem& p, const View& t, int64_t dim) {
  const int64_t batch = p.packed_q() ? 1 : p.batch, rows = p.packed_q() ? p.total_q : p.seqlen_q;
  if (t) add(name, access, t.data, t.dtype, {{batch, t.batch}, {rows, t.row}, {p.heads_q, t.head}, {dim, 1}});
}
void Buffers::add_keys(const char* name, Access access, const Problem& p, const View& t, int64_t dim) {
  const PageTable& pages = p.page_table;
  const int64_t batch = p.packed_k() ? 1 : pages ? pages.pages : p.batch;
  const int64_t rows = p.packed_k() ? p.total_k : pages ? pages.page_size : p.seqlen_k;
  if (t) add(name, access, t.data, t.dtype, {{batch, t.batch}, {rows, t.row}, {p.heads_k, t.head}, {dim, 1}});
}

void Buffers::add_inputs(const Problem& p) {
  add_rows("q", Access::read, p, p.q, p.head_dim);
  add_keys("k", Access::read, p, p.k, p.head_dim);
  add_keys("v", Access::read, p, p.v, p.head_dim_v);
}

void Buffers::add_results(const Problem& p) {
  add_rows("out", Access::write, p, p.out, p.head_dim_v);
  add_rows("lse", Access::write, p, p.lse, 1);
}

void Buffers::add_max_scores(const Problem& p) { add_rows("max_scores", Access::write, p, p.max_scores, 1); }

void Buffers::add_results_given(const Problem& p) {
  add_rows("out", Access::read, p, p.out, p.head_dim_v);
  add_rows("lse", Access::read, p, p.lse, 1);
  add_rows("dout", Access::read, p, p.dout, p.head_dim_v);
  add_rows("dlse", Access::read, p, p.dlse, 1);
}

void Buffers::add_result_gradient(const Problem& p) { add_rows("dout", Access::read, p, p.dout, p.head_dim_v); }

void Buffers::add_key_gradients(const Problem& p) {
  add_keys("dk", gradient_access(p), p, p.dk, p.head_dim);
  add_keys("dv", gradient_access(p), p, p.dv, p.head_dim_v);
}

void Buffers::add_query_gradient(const Problem& p) { add_rows("dq", gradient_access(p), p, p.dq, p.head_dim); }

void Buffers::add_sink_gradient(const Problem& p) {
  add("dsink", gradient_access(p), p.dsink.data, p.dsink.dtype, {{p.heads_q, p.dsink.head}});
}

void Buffers::add_bias_gradient(const Problem& p) { add_bias("dbias", gradient_access(p), p.dbias); }

void Buffers::add_captured_gradients(const Problem& p) {
  for (const CapturedGradient& gradient : p.score_mod->gradients) add_bias("gradient", gradient_access(p), gradient.to);
}

void Buffers::add_bias(const char* name, Access access, const BiasView& bias) {
  if (!bias) return;
  add(name, access, bias.data, bias.dtype,
      {{bias.shape[0], bias.stride[0]},
       {bias.shape[1], bias.stride[1]},
       {bias.shape[2], bias.stride[2]},
       {bias.shape[3], bias.stride[3]}});
}

void Buffers::add_terms(const Problem& p) {
  add_bias("bias", Access::read, p.bias);
  const auto per_head = [&](const char* name, const HeadView& view) {
    if (view) add(name, Access::read, view.data, view.dtype, {{p.batch, view.batch}, {p.heads_q, view.head}});
  };
  per_head("alibi_slopes", p.alibi_slopes);
  per_head("sink", p.sink);
  const auto number = [&](const char* name, const uint64_t* data) {
    if (p.dropout && data != nullptr) add(name, Access::read, data, DType::f64, {{1, 1}});  // size of one number
  };
  for (const ModView* mod : {&p.score_mod, &p.mask_mod}) add_mod(*mod);
  number("dropout_seed", p.dropout.seed_ptr);
  number("dropout_offset", p.dropout.offset_ptr);
  if (p.placed) {
    constexpr int64_t kMembers = sizeof(tandem_place) / sizeof(int32_t);
    add("places", Access::read, p.places, DType::i32, {{p.batch, kMembers}, {kMembers, 1}});
  }
}

void Buffers::add_mod(const ModView& mod) {
  for (size_t n = 0; mod && n < mod->values.tensors.size(); ++n) {
    const score_mod::TensorView& t = mod->values.tensors[n];
    add(mod->program->mod.signature.tensors[n].name.c_str(), Access::read, t.data, mod->dtypes[n],
        {{t.size[0], t.stride[0]}, {t.size[1], t.stride[1]}, {t.size[2], t.stride[2]}, {t.size[3], t.stride[3]}});
  }
}

void Buffers::add_made_list(const char* count, const char* index, const MakeBlocksProblem& m, const MadeList& made,
                            bool by_keys) {
  if (!made) return;
  const int64_t rows = by_keys ? m.blocks_k : m.blocks_q, columns = by_keys ? m.blocks_q : m.blocks_k;
  const int64_t *n = made.count_stride, *i = made.index_stride;
  add(count, Access::write, made.count, DType::i32, {{m.batch, n[0]}, {m.heads, n[1]}, {rows, n[2]}});
  add(index, Access::write, made.index, DType::i32, {{m.batch, i[0]}, {m.heads, i[1]}, {rows, i[2]}, {columns, i[3]}});
}

void Buffers::add_block_lists(const Problem& p) {
  const auto add_list = [&](const char* count, const char* index, const BlockList& l) {
    if (!l.present) return;
    const int64_t *counts = l.count_stride, *indices = l.index_stride, *n = l.count_shape, *m = l.shape;
    add(count, Access::read, l.count, DType::i32, {{n[0], counts[0]}, {n[1], counts[1]}, {n[2], counts[2]}});
    add(index, Access::read, l.index, DType::i32,
        {{m[0], indices[0]}, {m[1], indices[1]}, {m[2], indices[2]}, {m[3], indices[3]}});
  };
  add_list("kv_num_blocks", "kv_indices", p.block_mask.partial);
  add_list("full_kv_num_blocks", "full_kv_indices", p.block_mask.full);
}

void Buffers::add_lengths(const Problem& p) {
  const struct {
    const char* name;
    const IndexView& view;
    int64_t count;
  } tensors[] = {{"cu_seqlens_q", p.cu_seqlens_q, p.batch + 1},
                 {"cu_seqlens_k", p.cu_seqlens_k, p.batch + 1},
                 {"seqused_q", p.seqused_q, p.batch},
                 {"seqused_k", p.seqused_k, p.batch},
                 {"diagonal_offsets", p.diagonal_offsets, p.batch}};
  for (const auto& [name, view, count] : tensors) {
    if (view) add(name, Access::read, view.data, DType::i32, {{count, view.stride}});
  }
  if (const PageTable& t = p.page_table)
    add("page_table", Access::read, t.data, DType::i32, {{p.batch, t.batch}, {t.max_pages, t.column}});
}

void Buffers::add_append_kv(const AppendKvProblem& p) {
  const auto add_tensor = [&](const char* name, Access access, const View& t, const AppendKvProblem::Rows& rows,
                              int64_t dim) {
    const bool packed = rows.cu_seqlens || p.by_token();
    const int64_t batch = packed ? 1 : p.batch, count = packed ? rows.total : rows.seqlen;
    if (t) add(name, access, t.data, t.dtype, {{batch, t.batch}, {count, t.row}, {rows.heads, t.head}, {dim, 1}});
  };
  const auto add_cache = [&](const char* name, const View& t, int64_t dim) {
    if (!t) return;
    add(name, Access::update, t.data, t.dtype,
        {{p.pages, t.batch}, {p.page_size, t.row}, {p.keys.heads, t.head}, {dim, 1}});
  };
  const auto add_index = [&](const char* name, const IndexView& view, int64_t count) {
    if (view) add(name, Access::read, view.data, DType::i32, {{count, view.stride}});
  };
  const auto add_longs = [&](const char* name, const LongView& view) {
    if (view) add(name, Access::read, view.data, DType::i64, {{view.length, view.stride}});
  };
  const auto add_table = [&](const char* name, const RotaryTable& table) {
    if (p.rotary_dim > 0)
      add(name, Access::read, table.data, table.dtype, {{p.rotary_rows, table.row}, {p.rotary_dim / 2, 1}});
  };
  add_tensor("k", Access::read, p.k, p.keys, p.head_dim);
  add_tensor("v", Access::read, p.v, p.keys, p.head_dim_v);
  add_cache("k_cache", p.k_cache, p.head_dim);
  add_cache("v_cache", p.v_cache, p.head_dim_v);
  if (p.q && p.q_out.data == p.q.data) {
    add_tensor("q_out", Access::update, p.q_out, p.queries, p.head_dim);
  } else {
    add_tensor("q", Access::read, p.q, p.queries, p.head_dim);
    add_tensor("q_out", Access::write, p.q_out, p.queries, p.head_dim);
  }
  add_index("cu_seqlens_new", p.keys.cu_seqlens, p.batch + 1);
  add_index("cu_seqlens_q", p.queries.cu_seqlens, p.batch + 1);
  add_index("cache_seqlens", p.cache_seqlens, p.batch);
  add_index("cache_batch_idx", p.cache_batch_idx, p.batch);
  add_index("rotary_seqlens", p.rotary_seqlens, p.batch);
  add_longs("slot_mapping", p.slot_mapping);
  add_longs("positions", p.positions);
  if (const PageTable& t = p.page_table) {
    add("page_table", Access::read, t.data, DType::i32, {{p.table_rows, t.batch}, {t.max_pages, t.column}});
  }
  add_table("rotary_cos", p.cos);
  add_table("rotary_sin", p.sin);
}

}  // namespace tandem::plan
