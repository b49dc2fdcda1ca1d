// What the forward kernels do not serve.
#include "plan/forward.h"
#include "plan/tiles.h"
#include "problem/text.h"

namespace tandem::plan {
namespace {

constexpr int64_t kLongest = int64_t{1} << 28;
constexpr int64_t kMostHeadDim = 256;
constexpr int64_t kMaxStride = int64_t{1} << 39;  // of tensor maps: below 2^40 bytes

// Blackwell of data centres: B200, B300.
bool is_blackwell(const gpu::Properties& device) {
  return device.compute_major == 10 && (device.compute_minor == 0 || device.compute_minor == 3);
}

Status check_device(const gpu::Properties& device) {
  if ((device.compute_major == 9 && device.compute_minor == 0) || is_blackwell(device)) return {};
  return Status::unsupported(
      say("device (", device.name, ", compute capability ", device.compute_major, ".", device.compute_minor,
          ") must have compute capability 9.0, 10.0 or 10.3: there are kernels for Hopper (H100, H200) and Blackwell "
          "(B200, B300) in this version; choose device \"cpu\""));
}

Status check_options(const Problem& p) {
  if (p.pass != TANDEM_FORWARD) {
    return Status::unsupported(
        "pass (backward) must be forward on a GPU: gradients are not served there in this version; compute them on the "
        "CPU, or with the library you had from out and lse");
  }
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Status::unsupported(
        say("q.dtype (", name_of(p.dtype),
            ") must be bfloat16 or float16 on a GPU: its tensor cores multiply these; convert to "
            "bfloat16 or float16"));
  }
  if (p.dropout) {
    return Status::unsupported(say("dropout_p (", p.dropout.p,
                                   ") must be 0 on a GPU: dropout is not served there in this version; set it to 0"));
  }
  if (p.page_table) {
    return Status::unsupported(
        "page_table must be NULL on a GPU: pages are not served there in this version; gather each sequence's keys and "
        "values into dense or packed tensors");
  }
  if (p.num_splits > 1) {
    return Status::unsupported(say("num_splits (", p.num_splits,
                                   ") must be 0 or 1 on a GPU: keys are not split there in this version; set it to 0"));
  }
  return {};
}

Status check_head_dim(const char* tensor, int64_t head_dim) {
  if (head_dim % 8 == 0 && head_dim <= kMostHeadDim) return {};
  return Status::unsupported(say(tensor, ".head_dim (", head_dim, ") must be a multiple of 8 up to ", kMostHeadDim,
                                 " on a GPU: ",
                                 head_dim > kMostHeadDim ? "there is no kernel for a longer one; choose device \"cpu\""
                                                         : "rows are copied in pieces of 16 bytes; pad it with zeros"));
}

// Each tensor is seen by the bulk copy engine.
Status check_tensor(const char* name, const View& view, bool packed, bool empty) {
  const int64_t strides[] = {view.batch, view.row, view.head};
  for (int i = packed ? 1 : 0; i < 3; ++i) {
    const int64_t stride = strides[i];
    if (stride % 8 == 0 && stride < kMaxStride) continue;
    return Status::unsupported(say(name, ".strides[", packed ? i - 1 : i, "] (", stride,
                                   ") must be a multiple of 8 elements (16 bytes) below 2^39 on a GPU: rows are copied "
                                   "in pieces of 16 bytes; copy the tensor or pad its rows"));
  }
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (empty || address % 16 == 0) return {};
  return Status::unsupported(
      say(name, ".data + byte_offset (address ", address % 64,
          " modulo 64) must be a multiple of 16 on a GPU: rows are copied in pieces of 16 bytes; "
          "copy the tensor"));
}

Status check_index(const char* name, const IndexView& view) {
  if (!view || view.stride <= INT32_MAX) return {};
  return Status::unsupported(
      say(name, ".strides[0] (", view.stride, ") must be below 2^31 on a GPU: copy it into a compact tensor"));
}

Status check_sizes(const Problem& p) {
  if (p.seqlen_q > kLongest || p.seqlen_q * p.group() > kLongest) {
    return Status::unsupported(say("q.seqlen (", p.seqlen_q, ") times the query heads of a key head (", p.group(),
                                   ") must be at most 2^28 on a GPU: split the queries over several calls"));
  }
  if (p.seqlen_k > kLongest) {
    return Status::unsupported(say("k.seqlen (", p.seqlen_k,
                                   ") must be at most 2^28 on a GPU: split the keys and merge the parts by their lse"));
  }
  // The most tiles there can be; each has 64 rows or more.
  const int64_t heads = p.heads_q, tiles_m = p.packed_q() ? p.total_q / 64 + p.batch : p.batch * (p.seqlen_q / 64 + 1);
  if (heads > 0 && tiles_m > INT32_MAX / heads) {
    return Status::unsupported(say("batch (", p.batch, ") and q.heads (", heads,
                                   ") give 2^31 tiles of 64 queries or more: split the call over batch"));
  }
  return {};
}

}  // namespace

Status check_forward(const Problem& p, const gpu::Properties& device) {
  TANDEM_TRY(check_device(device));
  TANDEM_TRY(check_options(p));
  TANDEM_TRY(check_head_dim("q", p.head_dim));
  TANDEM_TRY(check_head_dim("v", p.head_dim_v));
  TANDEM_TRY(check_tensor("q", p.q, p.packed_q(), p.total_q == 0));
  TANDEM_TRY(check_tensor("k", p.k, p.packed_k(), p.total_k == 0));
  TANDEM_TRY(check_tensor("v", p.v, p.packed_k(), p.total_k == 0));
  TANDEM_TRY(check_tensor("out", p.out, p.packed_q(), p.total_q == 0));
  TANDEM_TRY(check_index("cu_seqlens_q", p.cu_seqlens_q));
  TANDEM_TRY(check_index("cu_seqlens_k", p.cu_seqlens_k));
  TANDEM_TRY(check_index("seqused_q", p.seqused_q));
  TANDEM_TRY(check_index("seqused_k", p.seqused_k));
  return check_sizes(p);
}

}  // namespace tandem::plan
