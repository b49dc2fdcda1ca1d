#include "unit/problem/call.h"

namespace tandem::test {

void Held::make(std::vector<int64_t> sizes, tandem_dtype dtype) {
  shape = std::move(sizes);
  strides.clear();
  uint64_t bytes = dtype.bits / 8;
  for (const int64_t size : shape) bytes *= static_cast<uint64_t>(size);
  memory.assign(bytes / 8 + 1, 0);
  handle = {memory.data(), {TANDEM_CPU, 0}, static_cast<int32_t>(shape.size()), dtype, shape.data(), nullptr, 0};
}

void Held::make(const std::vector<int32_t>& values) {
  make({static_cast<int64_t>(values.size())}, kI32);
  for (size_t i = 0; i < values.size(); ++i) ints()[i] = values[i];
}

void Held::set_strides(std::vector<int64_t> elements) {
  strides = std::move(elements);
  handle.strides = strides.data();
}

void Held::lie_in(const Held& other, int64_t first_element) {
  handle.data = other.handle.data;
  handle.byte_offset = static_cast<uint64_t>(first_element * handle.dtype.bits / 8);
}

Call::Call() {
  args.size = sizeof args;
  args.q = &q.handle;
  args.k = &k.handle;
  args.v = &v.handle;
  args.out = &out.handle;
  args.lse = &lse.handle;
  args.dout = &dout.handle;
  args.dlse = &dlse.handle;
  args.dq = &dq.handle;
  args.dk = &dk.handle;
  args.dv = &dv.handle;
  args.seqused_q = &seqused_q.handle;
  args.seqused_k = &seqused_k.handle;
}

void Call::per_head(int64_t batch, int64_t heads) {
  sink.make({heads}, kF32);
  dsink.make({heads}, kF32);
  alibi_slopes.make({batch, heads}, kF32);
  args.sink = &sink.handle;
  args.dsink = &dsink.handle;
  args.alibi_slopes = &alibi_slopes.handle;
}

void Call::dense_of(int32_t seqlen_q, int32_t seqlen_k) {
  q.make({2, seqlen_q, 4, 8}, kF32);
  k.make({2, seqlen_k, 2, 8}, kF32);
  v.make({2, seqlen_k, 2, 6}, kF32);
  out.make({2, seqlen_q, 4, 6}, kF32);
  lse.make({2, 4, seqlen_q}, kF32);
  dout.make({2, seqlen_q, 4, 6}, kF32);
  dlse.make({2, 4, seqlen_q}, kF32);
  dq.make({2, seqlen_q, 4, 8}, kF32);
  dk.make({2, seqlen_k, 2, 8}, kF32);
  dv.make({2, seqlen_k, 2, 6}, kF32);
  bias.make({1, 4, seqlen_q, seqlen_k}, kF32);
  dbias.make({1, 4, seqlen_q, seqlen_k}, kF32);
  args.bias = &bias.handle;
  args.dbias = &dbias.handle;
  seqused_q.make({seqlen_q, 2});
  seqused_k.make({0, seqlen_k});
  per_head(2, 4);
}

void Call::packed() {
  q.make({5, 4, 8}, kF32);
  k.make({7, 2, 8}, kF32);
  v.make({7, 2, 6}, kF32);
  out.make({5, 4, 6}, kF32);
  lse.make({4, 5}, kF32);
  dout.make({5, 4, 6}, kF32);
  dlse.make({4, 5}, kF32);
  dq.make({5, 4, 8}, kF32);
  dk.make({7, 2, 8}, kF32);
  dv.make({7, 2, 6}, kF32);
  cu_seqlens_q.make({0, 2, 5});
  cu_seqlens_k.make({0, 3, 7});
  args.cu_seqlens_q = &cu_seqlens_q.handle;
  args.cu_seqlens_k = &cu_seqlens_k.handle;
  seqused_q.make({2, 2});
  seqused_k.make({0, 4});
  per_head(2, 4);
}

void Call::paged() {
  dense();
  k.make({6, 4, 2, 8}, kF32);
  v.make({6, 4, 2, 6}, kF32);
  bias.make({1, 1, 1, 12}, kF32);
  seqused_k.make({5, 9});
  page_table.make({4, 0, -1, 1, 5, 2});
  page_table.shape = {2, 3};
  page_table.handle.ndim = 2;
  page_table.handle.shape = page_table.shape.data();
  args.page_table = &page_table.handle;
}

std::string Call::refusal() const {
  Problem problem;
  const Status status = make(&problem);
  return status.ok() ? "accepted" : status.message;
}

}  // namespace tandem::test
