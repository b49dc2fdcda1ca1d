#include "engine/buffers.h"

#include <initializer_list>

namespace tandem {
namespace {

struct Step {
  int64_t count, stride;
};

class Buffers {
 public:
  // A place of the workspace, which a kernel may write.
  void scratch(const char* name, void* address, size_t bytes, bool initialised) {
    list.push_back({name, address, bytes, true, initialised});
  }
  void result(const char* name, std::byte* data, DType dtype, std::initializer_list<Step> steps) {
    add({name, data, 0, true, false}, dtype, steps);
  }
  void operand(const char* name, const void* data, DType dtype, std::initializer_list<Step> steps) {
    add({name, const_cast<void*>(data), 0, false, true}, dtype, steps);
  }

  std::vector<gpu::NamedBuffer> list;

 private:
  void add(gpu::NamedBuffer buffer, DType dtype, std::initializer_list<Step> steps) {
    int64_t last = 0;
    for (const Step& step : steps) {
      if (step.count == 0) return;
      last += (step.count - 1) * step.stride;
    }
    buffer.bytes = static_cast<size_t>((last + 1) * size_of(dtype));
    list.push_back(buffer);
  }
};

void add_lengths(const Problem& p, Buffers& to) {
  const struct {
    const char* name;
    const IndexView& view;
    int64_t count;
  } tensors[] = {{"cu_seqlens_q", p.cu_seqlens_q, p.batch + 1},
                 {"cu_seqlens_k", p.cu_seqlens_k, p.batch + 1},
                 {"seqused_q", p.seqused_q, p.batch},
                 {"seqused_k", p.seqused_k, p.batch}};
  for (const auto& [name, view, count] : tensors) {
    if (view) to.operand(name, view.data, DType::i32, {{count, view.stride}});
  }
}

void add_tensors(const Problem& p, Buffers& to) {
  const int64_t batch_q = p.packed_q() ? 1 : p.batch, rows_q = p.packed_q() ? p.total_q : p.seqlen_q;
  const int64_t batch_k = p.packed_k() ? 1 : p.batch, rows_k = p.packed_k() ? p.total_k : p.seqlen_k;
  const View &q = p.q, &k = p.k, &v = p.v, &out = p.out, &lse = p.lse;
  to.operand("q", q.data, q.dtype, {{batch_q, q.batch}, {rows_q, q.row}, {p.heads_q, q.head}, {p.head_dim, 1}});
  to.operand("k", k.data, k.dtype, {{batch_k, k.batch}, {rows_k, k.row}, {p.heads_k, k.head}, {p.head_dim, 1}});
  to.operand("v", v.data, v.dtype, {{batch_k, v.batch}, {rows_k, v.row}, {p.heads_k, v.head}, {p.head_dim_v, 1}});
  to.result("out", out.data, out.dtype,
            {{batch_q, out.batch}, {rows_q, out.row}, {p.heads_q, out.head}, {p.head_dim_v, 1}});
  if (lse) to.result("lse", lse.data, lse.dtype, {{batch_q, lse.batch}, {rows_q, lse.row}, {p.heads_q, lse.head}});
}

void add_terms(const Problem& p, Buffers& to) {
  const BiasView& bias = p.bias;
  if (bias) {
    to.operand("bias", bias.data, bias.dtype,
               {{bias.shape[0], bias.stride[0]},
                {bias.shape[1], bias.stride[1]},
                {bias.shape[2], bias.stride[2]},
                {bias.shape[3], bias.stride[3]}});
  }
  const auto per_head = [&](const char* name, const HeadView& view) {
    if (view) to.operand(name, view.data, view.dtype, {{p.batch, view.batch}, {p.heads_q, view.head}});
  };
  per_head("alibi_slopes", p.alibi_slopes);
  per_head("sink", p.sink);
}

// prepared: by the host or by the kernel before.
void add_workspace(const plan::ForwardPlan& plan, std::byte* workspace, bool prepared, Buffers& to) {
  if (plan.counted) to.scratch("workspace.counter", workspace + plan::kCounterOffset, 2 * sizeof(int), prepared);
  if (plan.keyless) to.scratch("workspace.zeros", workspace + plan::kZerosOffset, 16, true);
  if (plan.tile.ragged) {
    const size_t bytes = static_cast<size_t>(plan.tiles_m) * sizeof(ForwardWork);
    to.scratch("workspace.work", workspace + plan::kWorkOffset, bytes, prepared);
  }
}

}  // namespace

std::vector<gpu::NamedBuffer> buffers_of_forward(const Problem& p, const plan::ForwardPlan& plan,
                                                 std::byte* workspace) {
  Buffers buffers;
  add_tensors(p, buffers);
  add_terms(p, buffers);
  add_lengths(p, buffers);
  add_workspace(plan, workspace, true, buffers);
  return std::move(buffers.list);
}

std::vector<gpu::NamedBuffer> buffers_of_schedule(const Problem& p, const plan::ForwardPlan& plan,
                                                  std::byte* workspace) {
  Buffers buffers;
  add_lengths(p, buffers);
  add_workspace(plan, workspace, false, buffers);
  return std::move(buffers.list);
}

}  // namespace tandem
