#include "plan/merge.h"

#include <algorithm>
#include <bit>

#include "base/text.h"
#include "plan/check.h"

namespace tandem::plan {
namespace {

constexpr int64_t kBlocksOfSm = 16;  // CTAs resident on an SM

StridedRows tensor_of(const View& view) { return {view.data, view.batch, view.row, view.head}; }

ElementType type_of(DType type) {
  if (type == DType::boolean) return ElementType::boolean;
  return type == DType::f32 ? ElementType::f32 : type == DType::f16 ? ElementType::f16 : ElementType::bf16;
}

// Returns true if each run of kColumns columns is aligned to its size.
bool is_aligned(const View& view) {
  constexpr int64_t step = MergeParams::kColumns;
  return view.dtype != DType::boolean &&
         reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(step * size_of(view.dtype)) == 0 &&
         view.batch % step == 0 && view.row % step == 0 && view.head % step == 0;
}

gpu::NamedBuffer buffer_of(const MergeProblem& m, const char* name, const View& view, int64_t dim, bool written) {
  const int64_t last = (m.batch - 1) * view.batch + (m.seqlen - 1) * view.row + (m.heads - 1) * view.head + (dim - 1);
  return {.name = name,
          .address = view.data,
          .bytes = static_cast<size_t>((last + 1) * size_of(view.dtype)),
          .writable = written,
          .initialised = !written};
}

}  // namespace

std::string merge_translation_unit() {
  return str_cat("#include \"prepost/combine.cuh\"\n\nextern \"C\" __global__ void __launch_bounds__(",
                 MergeParams::kThreads, ") ", kMergeKernel,
                 "(const __grid_constant__ MergeParams p) {\n  merge_parts(p);\n}\n");
}

Status check_merge(const MergeProblem& m, const gpu::Properties& device) {
  TANDEM_TRY(check_device(device));
  if (m.out.dtype == DType::f64) {
    return Status::unsupported(
        "out.dtype (float64) must be float32, bfloat16 or float16 on a GPU: merge float64 on the CPU");
  }
  if (m.parts > MergeParams::kMaxParts && (m.out.dtype != DType::f32 || !m.lse)) {
    return Status::unsupported(str_cat(
        "parts (", m.parts, ") must be at most ", MergeParams::kMaxParts,
        " on a GPU unless out is float32 and lse is present: pass a float32 out and lse, or merge some parts first"));
  }
  return {};
}

MergeLaunches::MergeLaunches(const MergeProblem& problem, const gpu::Properties& device)
    : m_(problem), most_blocks_(static_cast<uint32_t>(kBlocksOfSm * device.sm_count)) {}

bool MergeLaunches::next(MergeParams* params, uint32_t* grid) {
  if (done_ == m_.parts) return false;
  *params = {};
  params->out = tensor_of(m_.out);
  params->out_type = type_of(m_.out.dtype);
  if (m_.lse) params->lse = tensor_of(m_.lse);
  params->batch = static_cast<int>(m_.batch);
  params->seqlen = static_cast<int>(m_.seqlen);
  params->heads = static_cast<int>(m_.heads);
  params->head_dim = static_cast<int>(m_.head_dim);
  const auto columns = static_cast<uint32_t>((m_.head_dim + MergeParams::kColumns - 1) / MergeParams::kColumns);
  params->lanes = static_cast<int>(std::min(32u, std::bit_ceil(columns)));
  bool aligned = m_.head_dim % MergeParams::kColumns == 0 && is_aligned(m_.out);
  const auto add = [&](const MergeProblem::Part& part) {
    const int n = params->parts++;
    params->part_out[n] = tensor_of(part.out);
    if (!m_.sum) params->part_lse[n] = tensor_of(part.lse);
    params->part_type[n] = type_of(part.out.dtype);
    aligned = aligned && is_aligned(part.out);
  };
  if (done_ > 0) add({m_.out, m_.lse});
  while (done_ < m_.parts && params->parts < MergeParams::kMaxParts) add(m_.part(done_++));
  params->aligned = aligned;
  params->sum = m_.sum;
  const int64_t rows_of_block = MergeParams::kThreads / params->lanes;
  *grid = static_cast<uint32_t>(std::min<int64_t>(most_blocks_, (m_.rows() + rows_of_block - 1) / rows_of_block));
  return true;
}

std::vector<gpu::NamedBuffer> MergeLaunches::tensors(const MergeParams& params) const {
  std::vector<gpu::NamedBuffer> list;
  list.push_back(buffer_of(m_, "out", m_.out, m_.head_dim, true));
  if (m_.lse) list.push_back(buffer_of(m_, "lse", m_.lse, 1, true));
  for (int n = 0; n < params.parts; ++n) {
    const auto add = [&](const char* name, const View& view, int64_t dim) {
      // In place: one buffer, which the kernel reads before it writes.
      const auto same = std::ranges::find(list, static_cast<void*>(view.data), &gpu::NamedBuffer::address);
      if (same != list.end()) {
        same->initialised = true;
      } else {
        list.push_back(buffer_of(m_, name, view, dim, false));
      }
    };
    const bool is_sum = n == 0 && done_ > params.parts;  // a part is the result of the previous launch
    const MergeProblem::Part part = is_sum ? MergeProblem::Part{m_.out, m_.lse} : m_.part(done_ - params.parts + n);
    add("part_out", part.out, m_.head_dim);
    if (!m_.sum) add("part_lse", part.lse, 1);
  }
  return list;
}

}  // namespace tandem::plan
