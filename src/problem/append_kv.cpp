#include "problem/append_kv.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <span>

#include "base/fixed_vector.h"
#include "base/text.h"
#include "problem/operands.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

constexpr int64_t kMaxHeadDim = 512;

class Reader {
 public:
  Reader(const tandem_append_kv_args& args, tandem_device device, AppendKvProblem* problem)
      : args_(args), device_(device), p_(*problem) {}

  Status read() {
    TANDEM_TRY(check_combinations());
    TANDEM_TRY(read_lengths());
    if (args_.k != nullptr) TANDEM_TRY(read_keys());
    if (args_.q != nullptr) TANDEM_TRY(read_queries());
    TANDEM_TRY(read_places());
    if (args_.rotary_cos != nullptr) TANDEM_TRY(read_tables());
    return check_overlaps();
  }

 private:
  struct Member {
    const char* name;
    const tandem_tensor* tensor;
  };

  bool by_token() const { return args_.slot_mapping != nullptr || args_.positions != nullptr; }

  static Status check_both(const Member& a, const Member& b) {
    if ((a.tensor == nullptr) == (b.tensor == nullptr)) return {};
    const auto& [missing, present] = a.tensor == nullptr ? std::pair(a, b) : std::pair(b, a);
    return Status::invalid(
        str_cat(missing.name, " (NULL) must be given with ", present.name, ": pass both tensors, or neither"));
  }

  static Status check_absent(std::initializer_list<Member> members, const char* with, const char* remedy) {
    for (const auto& [name, tensor] : members) {
      if (tensor != nullptr) return Status::invalid(str_cat(name, " must be NULL with ", with, ": ", remedy));
    }
    return {};
  }

  Status check_combinations() const {
    const Member k{"k", args_.k}, q{"q", args_.q}, slots{"slot_mapping", args_.slot_mapping};
    const Member positions{"positions", args_.positions}, cos{"rotary_cos", args_.rotary_cos};
    const Member new_lengths{"cu_seqlens_new", args_.cu_seqlens_new}, q_lengths{"cu_seqlens_q", args_.cu_seqlens_q};
    const Member offsets{"rotary_seqlens", args_.rotary_seqlens}, rows{"cache_batch_idx", args_.cache_batch_idx};
    const Member table{"page_table", args_.page_table}, lengths{"cache_seqlens", args_.cache_seqlens};
    if (k.tensor == nullptr && q.tensor == nullptr) {
      return Status::invalid("k and q (NULL) must not both be NULL: pass new keys, or queries to rotate");
    }
    for (const Member& other : {Member{"v", args_.v}, {"k_cache", args_.k_cache}, {"v_cache", args_.v_cache}}) {
      TANDEM_TRY(check_both(k, other));
    }
    TANDEM_TRY(check_both(q, {"q_out", args_.q_out}));
    TANDEM_TRY(check_both(cos, {"rotary_sin", args_.rotary_sin}));
    if (q.tensor != nullptr && cos.tensor == nullptr) {
      return Status::invalid("rotary_cos (NULL) must be given with q: pass the tables, because q is only rotated");
    }
    if (cos.tensor == nullptr) {
      TANDEM_TRY(check_absent({offsets, positions}, "rotary_cos (NULL)", "pass the tables, or omit the positions"));
    }
    if (k.tensor == nullptr) {
      TANDEM_TRY(check_absent({slots, table, rows, new_lengths}, "k (NULL)", "omit it, because nothing is appended"));
    }
    if (!by_token()) return q.tensor == nullptr ? check_absent({q_lengths}, "q (NULL)", "omit it") : Status{};
    TANDEM_TRY(check_absent({table, lengths, rows, new_lengths, q_lengths, offsets},
                            slots.tensor != nullptr ? "slot_mapping" : "positions",
                            "each row has its own slot and position"));
    if (args_.single_q_position != 0) {
      return Status::invalid("single_q_position (1) must be 0 with positions: pass equal positions");
    }
    if (k.tensor != nullptr) TANDEM_TRY(check_both(k, slots));
    return cos.tensor != nullptr ? check_both(cos, positions) : Status{};
  }

  Status read(const char* name, const tandem_tensor* tensor, const OperandFormat& format, Operand* operand,
              Use use = Use::read) const {
    return read_operand(name, use, *tensor, format, device_, operand);
  }

  Status read_index(const char* name, const tandem_tensor* tensor, const Dim& length, IndexView* view,
                    int64_t* count = nullptr) {
    if (tensor == nullptr) return {};
    Operand o;
    const Dim dims[] = {length};
    TANDEM_TRY(read(name, tensor, {only(DType::i32), "convert the tensor to int32", dims}, &o));
    others_.push_back(o);
    if (count != nullptr) *count = o.shape[0];
    *view = {.data = reinterpret_cast<const int32_t*>(o.data), .stride = o.stride[0], .present = true};
    return {};
  }

  Status read_longs(const char* name, const tandem_tensor* tensor, const Dim& length, LongView* view) {
    if (tensor == nullptr) return {};
    Operand o;
    const Dim dims[] = {length};
    TANDEM_TRY(read(name, tensor, {only(DType::i64), "convert the tensor to int64", dims}, &o));
    others_.push_back(o);
    *view = {reinterpret_cast<const int64_t*>(o.data), o.stride[0], o.shape[0], true};
    return {};
  }

  // Reads the tensors that give the number of sequences, or of rows with their own slots.
  Status read_lengths() {
    TANDEM_TRY(read_longs("slot_mapping", args_.slot_mapping, {"length"}, &p_.slot_mapping));
    Dim length{"length"};
    if (p_.slot_mapping) length = {"length", p_.slot_mapping.length, "slot_mapping", "pass one position per slot"};
    TANDEM_TRY(read_longs("positions", args_.positions, length, &p_.positions));
    const struct {
      const char* name;
      const tandem_tensor* tensor;
      IndexView* view;
    } cumulative[] = {{"cu_seqlens_new", args_.cu_seqlens_new, &p_.keys.cu_seqlens},
                      {"cu_seqlens_q", args_.cu_seqlens_q, &p_.queries.cu_seqlens}};
    for (const auto& [name, tensor, view] : cumulative) {
      if (tensor == nullptr) continue;
      int64_t entries = 0;
      TANDEM_TRY(read_index(name, tensor, {"length"}, view, &entries));
      if (entries < 1) {
        return Status::invalid(str_cat(name, ".length (0) must be at least 1: pass batch + 1 entries"));
      }
      TANDEM_TRY(set_batch(name, ".length - 1", entries - 1));
    }
    return {};
  }

  // The first tensor with a number of sequences decides it.
  Status set_batch(const char* name, const char* what, int64_t batch) {
    if (batch_owner_ == nullptr) {
      batch_owner_ = name;
      p_.batch = batch;
      return {};
    }
    if (batch == p_.batch) return {};
    return Status::invalid(str_cat(name, what, " (", batch, ") must be the number of sequences in ", batch_owner_, " (",
                                   p_.batch, "): pass tensors of the same sequences"));
  }

  // Reads a tensor (batch, seqlen, heads, dim) or (total, heads, dim).
  Status read_rows(const char* name, const tandem_tensor* tensor, bool packed, const Dim (&last)[2], Operand* o) const {
    const Dim dense[] = {{"batch"}, {"seqlen"}, last[0], last[1]};
    const Dim rows[] = {{"total"}, last[0], last[1]};
    const DTypes dtypes = has_dtype_ ? only(p_.dtype) : kFloats;
    const char* why =
        has_dtype_ ? "all tensors share one type; convert one of them" : "convert it to one of these types";
    const char* dims_why = packed ? " with packed lengths, slot_mapping or positions" : " without packed lengths";
    return read(name, tensor, {dtypes, why, packed ? std::span<const Dim>(rows) : dense, dims_why, true}, o);
  }

  Status set_rows(const Operand& o, bool packed, AppendKvProblem::Rows* rows) {
    rows->heads = o.shape[o.rank - 2];
    rows->seqlen = o.shape[o.rank - 3];
    rows->total = rows->seqlen;
    if (packed) return {};
    rows->total *= o.shape[0];
    if (rows->total > INT32_MAX) {
      return Status::invalid(str_cat(o.name, " (", rows->total, " rows) must have below 2^31 rows: split the call"));
    }
    return set_batch(o.name, ".batch", o.shape[0]);
  }

  // Rows after the first `length` rows are not read.
  static Status limit_rows(const Operand& o, const char* by, const LongView& length, AppendKvProblem::Rows* rows) {
    if (rows->total < length.length) {
      return Status::invalid(str_cat(o.name, ".total (", rows->total, ") must be at least ", by, ".length (",
                                     length.length, "): pass a row for each entry"));
    }
    rows->total = rows->seqlen = length.length;
    return {};
  }

  Status read_keys() {
    const bool packed = args_.cu_seqlens_new != nullptr || by_token();
    TANDEM_TRY(read_rows("k", args_.k, packed, {{"heads"}, {"head_dim"}}, &k_));
    p_.dtype = k_.dtype;
    has_dtype_ = true;
    TANDEM_TRY(set_rows(k_, packed, &p_.keys));
    p_.head_dim = k_.shape[k_.rank - 1];
    const char* why = "pass one value per key";
    const Dim heads{"heads", p_.keys.heads, "k", why};
    TANDEM_TRY(read_rows("v", args_.v, packed, {heads, {"head_dim"}}, &v_));
    for (int i = 0; i < k_.rank - 2; ++i) {
      if (v_.shape[i] == k_.shape[i]) continue;
      return Status::invalid(str_cat("v.", v_.dim_name[i], " (", v_.shape[i], ") must equal k.", v_.dim_name[i], " (",
                                     k_.shape[i], "): ", why));
    }
    p_.head_dim_v = v_.shape[v_.rank - 1];
    if (p_.slot_mapping) TANDEM_TRY(limit_rows(k_, "slot_mapping", p_.slot_mapping, &p_.keys));
    for (const auto& [name, size] : {std::pair("k", p_.head_dim), std::pair("v", p_.head_dim_v)}) {
      if (size >= 1 && size <= kMaxHeadDim) continue;
      return Status::invalid(
          str_cat(name, ".head_dim (", size, ") must be 1 to ", kMaxHeadDim, ": split longer heads"));
    }
    p_.k = view_of(k_);
    p_.v = view_of(v_);
    return read_caches();
  }

  Status read_caches() {
    const bool paged = args_.page_table != nullptr || args_.slot_mapping != nullptr;
    const char* why = "allocate the cache with the heads of the new keys";
    const Dim first{paged ? "pages" : "rows"}, second{paged ? "page_size" : "seqlen_cache"};
    const Dim heads{"heads", p_.keys.heads, "k", why};
    const Dim of_k[] = {first, second, heads, {"head_dim", p_.head_dim, "k", why}};
    const OperandFormat format{only(p_.dtype), "all tensors share one type; convert the new keys", of_k, "", true};
    TANDEM_TRY(read("k_cache", args_.k_cache, format, &k_cache_, Use::write));
    p_.pages = k_cache_.shape[0];
    p_.page_size = k_cache_.shape[1];
    const char* same = "allocate both caches with the same places";
    const Dim of_v[] = {{first.name, p_.pages, "k_cache", same},
                        {second.name, p_.page_size, "k_cache", same},
                        heads,
                        {"head_dim", p_.head_dim_v, "v", why}};
    TANDEM_TRY(
        read("v_cache", args_.v_cache, {format.dtypes, format.dtype_why, of_v, "", true}, &v_cache_, Use::write));
    p_.k_cache = view_of(k_cache_);
    p_.v_cache = view_of(v_cache_);
    return {};
  }

  Status read_queries() {
    const bool packed = args_.cu_seqlens_q != nullptr || by_token();
    Dim head_dim{"head_dim"};
    if (p_.k) head_dim = {"head_dim", p_.head_dim, "k", "queries and keys have one head_dim"};
    TANDEM_TRY(read_rows("q", args_.q, packed, {{"heads"}, head_dim}, &q_));
    p_.dtype = q_.dtype;
    has_dtype_ = true;
    p_.head_dim = q_.shape[q_.rank - 1];
    if (p_.head_dim < 1 || p_.head_dim > kMaxHeadDim) {
      return Status::invalid(
          str_cat("q.head_dim (", p_.head_dim, ") must be 1 to ", kMaxHeadDim, ": split longer heads"));
    }
    TANDEM_TRY(set_rows(q_, packed, &p_.queries));
    if (p_.positions) TANDEM_TRY(limit_rows(q_, "positions", p_.positions, &p_.queries));
    Dim dims[kMaxRank];
    for (int i = 0; i < q_.rank; ++i) dims[i] = {q_.dim_name[i], q_.shape[i], "q", "allocate q_out with q's shape"};
    const OperandFormat format{
        only(p_.dtype), "allocate q_out with q's type", {dims, static_cast<size_t>(q_.rank)}, "", true};
    TANDEM_TRY(read("q_out", args_.q_out, format, &q_out_, Use::write));
    p_.q = view_of(q_);
    p_.q_out = view_of(q_out_);
    return {};
  }

  Status read_places() {
    if (p_.by_token()) return {};
    const Dim batch{"batch", p_.batch, batch_owner_, "pass one entry per sequence"};
    const struct {
      const char* name;
      const tandem_tensor* tensor;
      IndexView* view;
    } lists[] = {{"cache_seqlens", args_.cache_seqlens, &p_.cache_seqlens},
                 {"cache_batch_idx", args_.cache_batch_idx, &p_.cache_batch_idx},
                 {"rotary_seqlens", args_.rotary_seqlens, &p_.rotary_seqlens}};
    for (const auto& [name, tensor, view] : lists) {
      TANDEM_TRY(read_index(name, tensor, {"batch", batch.size, nullptr, batch.why}, view));
    }
    if (args_.page_table == nullptr) return check_cache_rows();
    Operand o;
    Dim rows{"batch", p_.batch, nullptr, "pass one row of pages per sequence, or cache_batch_idx"};
    if (p_.cache_batch_idx) rows = {"rows"};
    const Dim dims[] = {rows, {"max_pages"}};
    TANDEM_TRY(read("page_table", args_.page_table, {only(DType::i32), "convert the page numbers to int32", dims}, &o));
    others_.push_back(o);
    p_.page_table = {.data = reinterpret_cast<const int32_t*>(o.data),
                     .batch = o.stride[0],
                     .column = o.stride[1],
                     .pages = p_.pages,
                     .page_size = p_.page_size,
                     .max_pages = o.shape[1],
                     .present = true};
    p_.table_rows = o.shape[0];
    return {};
  }

  Status check_cache_rows() const {
    if (!p_.k || p_.cache_batch_idx || p_.batch <= p_.pages) return {};
    return Status::invalid(str_cat("k_cache.rows (", p_.pages, ") must be at least the number of sequences (", p_.batch,
                                   "): pass cache_batch_idx, or a row for each sequence"));
  }

  Status read_tables() {
    const DTypes dtypes = only(p_.dtype) | (p_.dtype == DType::f64 ? 0 : only(DType::f32));
    const Dim of_cos[] = {{"table_rows"}, {"columns"}};
    Operand cos, sin;
    TANDEM_TRY(read("rotary_cos", args_.rotary_cos, {dtypes, "convert the table", of_cos, "", true}, &cos));
    const char* why = "pass both tables of one shape";
    const Dim of_sin[] = {{"table_rows", cos.shape[0], "rotary_cos", why},
                          {"columns", cos.shape[1], "rotary_cos", why}};
    TANDEM_TRY(read("rotary_sin", args_.rotary_sin, {dtypes, "convert the table", of_sin, "", true}, &sin));
    others_.push_back(cos);
    others_.push_back(sin);
    if (2 * cos.shape[1] > p_.head_dim) {
      return Status::invalid(str_cat("rotary_cos.columns (", cos.shape[1],
                                     ") must be at most head_dim / 2, with head_dim (", p_.head_dim,
                                     "): pass a table of fewer columns"));
    }
    p_.cos = {cos.data, cos.dtype, cos.stride[0]};
    p_.sin = {sin.data, sin.dtype, sin.stride[0]};
    p_.rotary_rows = cos.shape[0];
    p_.rotary_dim = 2 * cos.shape[1];
    p_.interleaved = args_.rotary_interleaved != 0;
    p_.single_q_position = args_.single_q_position != 0;
    return {};
  }

  // A written tensor shares no byte with another tensor, but q_out may be q.
  Status check_overlaps() const {
    const Operand* const written[] = {&k_cache_, &v_cache_, &q_out_};
    FixedVector<const Operand*, 6 + kMaxOthers> all;
    for (const Operand* operand : {&k_cache_, &v_cache_, &q_out_, &k_, &v_, &q_}) all.push_back(operand);
    for (const Operand& other : others_) all.push_back(&other);
    for (const Operand* result : written) {
      for (const Operand* other : all) {
        if (result == other || !result->present || !other->present || !overlap(*result, *other)) continue;
        const bool same =
            result->data == other->data && std::equal(result->stride, result->stride + kMaxRank, other->stride);
        if (result == &q_out_ && other == &q_ && same) continue;
        return Status::invalid(str_cat(result->name, ".data overlaps ", other->name, ": pass separate memory"));
      }
    }
    return {};
  }

  const tandem_append_kv_args& args_;
  const tandem_device device_;
  AppendKvProblem& p_;
  bool has_dtype_ = false;
  const char* batch_owner_ = nullptr;
  Operand k_, v_, k_cache_, v_cache_, q_, q_out_;
  static constexpr size_t kMaxOthers = 10;
  FixedVector<Operand, kMaxOthers> others_;  // places, lengths and tables
};

}  // namespace

Status make_append_kv_problem(const tandem_append_kv_args* from, tandem_device device, AppendKvProblem* problem) {
  tandem_append_kv_args args;
  TANDEM_TRY(read_struct("args", "tandem_append_kv_args", from, sizeof(tandem_append_kv_args), &args));
  *problem = {};
  return Reader(args, device, problem).read();
}

}  // namespace tandem
