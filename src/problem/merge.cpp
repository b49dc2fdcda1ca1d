#include "problem/merge.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>

#include "base/text.h"
#include "problem/operands.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

constexpr int64_t kMaxHeadDim = 512;

bool same_place(const Operand& a, const Operand& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank &&
         std::equal(a.stride, a.stride + a.rank, b.stride);
}

class Reader {
 public:
  Reader(const tandem_merge_args& args, tandem_device device, MergeProblem* problem)
      : args_(args), device_(device), m_(*problem) {}

  Status read() {
    if (args_.parts < 1) {
      return Status::invalid(str_cat("parts (", args_.parts, ") must be at least 1: pass one part or more"));
    }
    for (const auto& [name, list] : {Pointer{"part_out", args_.part_out}, Pointer{"part_lse", args_.part_lse}}) {
      if (list != nullptr) continue;
      return Status::invalid(
          str_cat(name, " (NULL) must point to parts (", args_.parts, ") tensors: pass their address"));
    }
    TANDEM_TRY(read_result());
    for (int64_t n = 0; n < args_.parts; ++n) TANDEM_TRY(read_part(n));
    m_.parts = args_.parts;
    m_.part_out = args_.part_out;
    m_.part_lse = args_.part_lse;
    return {};
  }

 private:
  struct Pointer {
    const char* name;
    const tandem_tensor* const* list;
  };

  bool f64() const { return out_.dtype == DType::f64; }
  bool packed() const { return out_.rank == 3; }

  Status read(const char* name, Use use, const tandem_tensor* tensor, const OperandFormat& format, Operand* operand) {
    if (tensor == nullptr) return Status::invalid(str_cat(name, " (NULL) must be a tensor: pass a tensor"));
    return read_operand(name, use, *tensor, format, device_, operand);
  }

  Status read_result() {
    constexpr Dim dense[] = {{"batch"}, {"seqlen"}, {"heads"}, {"head_dim"}};
    constexpr Dim rows[] = {{"total"}, {"heads"}, {"head_dim"}};
    const bool three = args_.out != nullptr && args_.out->ndim == 3;
    TANDEM_TRY(
        read("out", Use::write, args_.out,
             {kFloats, "allocate out with one of these types", three ? std::span<const Dim>(rows) : dense, "", true},
             &out_));
    const int64_t* shape = out_.shape;
    m_.batch = three ? 1 : shape[0];
    m_.seqlen = shape[out_.rank - 3];
    m_.heads = shape[out_.rank - 2];
    m_.head_dim = shape[out_.rank - 1];
    if (m_.head_dim < 1 || m_.head_dim > kMaxHeadDim) {
      return Status::invalid(
          str_cat("out.head_dim (", m_.head_dim, ") must be 1 to ", kMaxHeadDim, ": split longer heads"));
    }
    m_.out = view_of(out_);
    if (args_.lse == nullptr) return {};
    TANDEM_TRY(read_lse("lse", Use::write, args_.lse, &lse_));
    m_.lse = lse_view_of(lse_);
    return overlap(out_, lse_) ? refuse_overlap(out_, "out", lse_, "lse") : Status{};
  }

  Status read_lse(const char* name, Use use, const tandem_tensor* tensor, Operand* lse) {
    const char* why = "allocate one value per query and head";
    const Dim heads{"heads", m_.heads, "out", why};
    const Dim dense[] = {{"batch", m_.batch, "out", why}, heads, {"seqlen", m_.seqlen, "out", why}};
    const Dim rows[] = {heads, {"total", m_.seqlen, "out", why}};
    return read(
        name, use, tensor,
        {only(DType::f32) | (f64() ? only(DType::f64) : 0), "convert the log-sum-exp, because 16-bit types lose digits",
         packed() ? std::span<const Dim>(rows) : dense},
        lse);
  }

  Status read_part(int64_t n) {
    char out_name[40], lse_name[40];
    std::snprintf(out_name, sizeof out_name, "part_out[%lld]", static_cast<long long>(n));
    std::snprintf(lse_name, sizeof lse_name, "part_lse[%lld]", static_cast<long long>(n));
    Dim dims[kMaxRank];
    for (int i = 0; i < out_.rank; ++i) dims[i] = {out_.dim_name[i], out_.shape[i], "out", "pass parts of out's shape"};
    Operand out, lse;
    TANDEM_TRY(
        read(out_name, Use::read, args_.part_out[n],
             {f64() ? only(DType::f64) : kFloats & ~only(DType::f64),
              f64() ? "convert the part to float64, the type of out" : "convert the part, or allocate a float64 out",
              {dims, static_cast<size_t>(out_.rank)},
              "",
              true},
             &out));
    TANDEM_TRY(read_lse(lse_name, Use::read, args_.part_lse[n], &lse));
    if (overlap(out_, out) && !same_place(out_, out)) return refuse_overlap(out_, "out", out, out_name);
    if (overlap(out_, lse)) return refuse_overlap(out_, "out", lse, lse_name);
    if (overlap(lse_, out)) return refuse_overlap(lse_, "lse", out, out_name);
    if (overlap(lse_, lse) && !same_place(lse_, lse)) return refuse_overlap(lse_, "lse", lse, lse_name);
    return {};
  }

  static Status refuse_overlap(const Operand& result, const char* name, const Operand& other, const char* other_name) {
    return Status::invalid(str_cat(name, ".data (byte ", result.data - other.data, " from ", other_name,
                                   ".data) overlaps ", other_name, ": pass the part's own tensor, or separate memory"));
  }

  const tandem_merge_args& args_;
  const tandem_device device_;
  MergeProblem& m_;
  Operand out_, lse_;
};

}  // namespace

Status make_merge_problem(const tandem_merge_args* from, tandem_device device, MergeProblem* problem) {
  tandem_merge_args args;
  TANDEM_TRY(read_struct("args", "tandem_merge_args", from, sizeof(tandem_merge_args), &args));
  *problem = {};
  return Reader(args, device, problem).read();
}

MergeProblem::Part MergeProblem::part(int64_t n) const {
  return {view_of(operand_of(*part_out[n])), sum ? View{} : lse_view_of(operand_of(*part_lse[n]))};
}

}  // namespace tandem
