#include "plan/append_kv.h"

#include <algorithm>
#include <initializer_list>

#include "base/text.h"
#include "plan/buffers.h"
#include "plan/check.h"

namespace tandem::plan {
namespace {

constexpr int64_t kBlocksOfSm = 8;                                          // CTAs per SM that fill the GPU
constexpr int64_t kMaxElements = 1 << 24;                                   // elements of the heads of one row
constexpr int64_t kAlignment = 16;                                          // bytes that a thread moves at once
constexpr int64_t kElementsOfPart = int64_t{8} * AppendKvParams::kThreads;  // one move of each thread

StridedRows rows_of(const View& view) { return {view.data, view.batch, view.row, view.head}; }

ElementType element_type_of(DType type) {
  return type == DType::f32 ? ElementType::f32 : type == DType::f16 ? ElementType::f16 : ElementType::bf16;
}

Numbers<int> numbers_of(const IndexView& view) { return {view.data, view.stride}; }
Numbers<long long> numbers_of(const LongView& view) {
  return {reinterpret_cast<const long long*>(view.data), view.stride};
}

AppendRowsParams params_of(const AppendKvProblem::Rows& rows) {
  return {numbers_of(rows.cu_seqlens), static_cast<int>(rows.total), static_cast<int>(rows.seqlen),
          static_cast<int>(rows.heads)};
}

// Returns true if 16 bytes of each head can be moved at once.
bool is_aligned_row(const View& view, int64_t dim) {
  const int64_t step = kAlignment / size_of(view.dtype);
  return !view || (dim % step == 0 && reinterpret_cast<uintptr_t>(view.data) % kAlignment == 0 &&
                   view.batch % step == 0 && view.row % step == 0 && view.head % step == 0);
}

bool is_aligned(const AppendKvProblem& p) {
  const int64_t step = kAlignment / size_of(p.dtype);
  const int64_t rotated = p.interleaved ? p.rotary_dim : p.rotary_dim / 2;  // elements that a thread's part divides
  return rotated % step == 0 && is_aligned_row(p.k, p.head_dim) && is_aligned_row(p.k_cache, p.head_dim) &&
         is_aligned_row(p.v, p.head_dim_v) && is_aligned_row(p.v_cache, p.head_dim_v) &&
         is_aligned_row(p.q, p.head_dim) && is_aligned_row(p.q_out, p.head_dim);
}

// Returns true if append_by_thread() serves the call: dense rows of 16-bit elements with places by sequence.
bool moves_by_thread(const AppendKvProblem& p, bool aligned) {
  return aligned && size_of(p.dtype) == 2 && !p.interleaved && !p.by_token() && !p.keys.cu_seqlens &&
         !p.queries.cu_seqlens;
}
// The chunks of 16 bytes of a row of new keys and values, or of queries.
int64_t most_chunks(const AppendKvProblem& p) {
  return std::max(p.keys.heads * (p.head_dim + p.head_dim_v), p.queries.heads * p.head_dim) / 8;
}

}  // namespace

std::string append_kv_translation_unit() {
  return str_cat("#include \"prepost/append_kv.cuh\"\n\nextern \"C\" __global__ void __launch_bounds__(",
                 AppendKvParams::kThreads, ") ", kAppendKvKernel,
                 "(const __grid_constant__ AppendKvParams p) {\n  append_rows(p);\n}\n");
}

Status check_append_kv(const AppendKvProblem& p, const gpu::Properties& device) {
  TANDEM_TRY(check_device(device));
  if (p.dtype == DType::f64) {
    return Status::unsupported(
        str_cat(p.k ? "k" : "q", ".dtype (float64) must be float32, bfloat16 or float16 on a GPU: convert it"));
  }
  const int64_t dim = std::max(p.head_dim, p.head_dim_v);
  for (const auto& [name, heads] : {std::pair("k", p.keys.heads), std::pair("q", p.queries.heads)}) {
    if (heads * dim <= kMaxElements) continue;
    return Status::unsupported(str_cat(name, ".heads (", heads, ") times head_dim (", dim,
                                       ") must be at most 2^24 on a GPU: split the heads"));
  }
  return {};
}

AppendKvLaunch append_kv_launch(const AppendKvProblem& p, const gpu::Properties& device) {
  AppendKvLaunch launch{};
  AppendKvParams& params = launch.params;
  params.k = rows_of(p.k), params.v = rows_of(p.v), params.q = rows_of(p.q);
  params.k_cache = rows_of(p.k_cache), params.v_cache = rows_of(p.v_cache), params.q_out = rows_of(p.q_out);
  params.keys = params_of(p.keys);
  params.queries = params_of(p.queries);
  params.slot_mapping = numbers_of(p.slot_mapping);
  params.positions = numbers_of(p.positions);
  params.cache_seqlens = numbers_of(p.cache_seqlens);
  params.cache_batch_idx = numbers_of(p.cache_batch_idx);
  params.rotary_seqlens = numbers_of(p.rotary_seqlens);
  params.page_table = p.page_table.data;
  params.table_batch = p.page_table.batch, params.table_column = p.page_table.column;
  params.table_rows = static_cast<int>(p.table_rows), params.max_pages = static_cast<int>(p.page_table.max_pages);
  params.batch = static_cast<int>(p.batch);
  params.pages = static_cast<int>(p.pages), params.page_size = static_cast<int>(p.page_size);
  params.head_dim = static_cast<int>(p.head_dim), params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.cos = p.cos.data, params.sin = p.sin.data;
  params.cos_row = p.cos.row, params.sin_row = p.sin.row;
  params.rotary_dim = static_cast<int>(p.rotary_dim), params.rotary_rows = static_cast<int>(p.rotary_rows);
  params.type = element_type_of(p.dtype), params.table_type = element_type_of(p.cos.dtype);
  params.interleaved = p.interleaved, params.single_q_position = p.single_q_position;
  params.aligned = is_aligned(p);
  const int64_t rows = p.keys.total + p.queries.total, blocks = kBlocksOfSm * device.sm_count;
  const int64_t rows_of_block = std::clamp<int64_t>(rows / blocks, 1, AppendKvParams::kMaxRows);
  const auto blocks_of = [&](int64_t total) {
    return static_cast<uint32_t>((total + rows_of_block - 1) / rows_of_block);
  };
  params.by_thread = rows_of_block == 1 && moves_by_thread(p, params.aligned);
  params.rows_of_block = static_cast<int>(rows_of_block);
  params.key_blocks = static_cast<int>(blocks_of(p.keys.total));
  launch.blocks = blocks_of(p.keys.total) + blocks_of(p.queries.total);
  const int64_t elements = rows_of_block * std::max(p.keys.heads, p.queries.heads) * std::max(p.head_dim, p.head_dim_v);
  int64_t parts = std::min(elements / kElementsOfPart, blocks / std::max<int64_t>(launch.blocks, 1));
  if (params.by_thread) parts = (most_chunks(p) + AppendKvParams::kThreads - 1) / AppendKvParams::kThreads;
  launch.parts = static_cast<uint32_t>(std::max<int64_t>(parts, 1));
  return launch;
}

std::vector<gpu::NamedBuffer> append_kv_buffers(const AppendKvProblem& p) {
  Buffers buffers;
  buffers.add_append_kv(p);
  return std::move(buffers.list);
}

}  // namespace tandem::plan
