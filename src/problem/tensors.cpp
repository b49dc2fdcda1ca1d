// The tensors of a call: their shapes and types, and how these depend on each other.
#include <algorithm>

#include "base/text.h"
#include "problem/builder.h"

namespace tandem {
namespace {

constexpr int64_t kMaxHeadDim = 512;

constexpr int position_of(Field field) {
  int i = 0;
  while (kOperands[i].field != field) ++i;
  return i;
}

// The view of a tensor (head) or (batch, head).
HeadView head_view_of(const Operand& o) {
  return {.data = o.data,
          .dtype = o.dtype,
          .batch = o.rank == 2 ? o.stride[0] : 0,
          .head = o.stride[o.rank - 1],
          .present = o.present};
}

BiasView bias_view_of(const Operand& o) {
  BiasView view{.data = o.data, .dtype = o.dtype, .present = o.present};
  std::copy_n(o.shape, 4, view.shape);
  std::copy_n(o.stride, 4, view.stride);
  return view;
}

// The types of a result that is computed in t: t, or float32 with the digits that 16-bit types lose.
DTypes or_f32(DType t) { return only(t) | (t == DType::f64 ? 0 : only(DType::f32)); }

Status check_head_dim(const char* tensor, int64_t size) {
  if (size >= 1 && size <= kMaxHeadDim) return {};
  return Status::invalid(str_cat(tensor, ".head_dim (", size, ") must be 1 to ", kMaxHeadDim, ": split longer heads"));
}

}  // namespace

const Operand& ProblemBuilder::operand(Field field) const { return operands_[position_of(field)]; }

Status ProblemBuilder::read(Field field, DTypes dtypes, const char* dtype_why, std::span<const Dim> dims,
                            const char* dims_why, bool contiguous_last) {
  const int i = position_of(field);
  if (!given(field)) {
    return Status::invalid(str_cat(kOperands[i].name, " (NULL) must be a tensor: pass a tensor for the ",
                                   backward() ? "backward" : "forward", " pass"));
  }
  return read_operand(*(args_.*field),
                      {.info = kOperands[i],
                       .dtypes = dtypes,
                       .dtype_why = dtype_why,
                       .dims = dims,
                       .dims_why = dims_why,
                       .contiguous_last = contiguous_last},
                      mode_, &operands_[i]);
}

Status ProblemBuilder::read_like(Field field, Field model, DType type, bool contiguous_last) {
  const Operand& m = operand(model);
  Dim dims[kMaxRank];
  for (int i = 0; i < m.rank; ++i)
    dims[i] = {m.dim_name[i], m.shape[i], m.name, "allocate the gradient with the shape of its tensor"};
  return read(field, or_f32(type), "allocate the gradient with one of these types", {dims, static_cast<size_t>(m.rank)},
              "", contiguous_last);
}

Status ProblemBuilder::read_index(Field field, const Dim& length, IndexView* view) {
  TANDEM_TRY(read(field, only(DType::i32), "convert the tensor to int32", {length}));
  const Operand& o = operand(field);
  *view = {.data = reinterpret_cast<const int32_t*>(o.data), .stride = o.stride[0], .present = true};
  return {};
}

Status ProblemBuilder::read_queries() {
  constexpr Dim dense[] = {{"batch"}, {"seqlen"}, {"heads"}, {"head_dim"}};
  constexpr Dim rows[] = {{"total"}, {"heads"}, {"head_dim"}};
  const std::span<const Dim> dims = packed() ? std::span<const Dim>(rows) : dense;
  TANDEM_TRY(read(&Args::q, kFloats, "convert q, k and v to one of these types", dims,
                  packed() ? " where cu_seqlens_q is given" : " unless cu_seqlens_q is given", true));
  const Operand& q = operand(&Args::q);
  p_.q = view_of(q);
  p_.dtype = q.dtype;
  p_.heads_q = q.shape[q.rank - 2];
  p_.head_dim = q.shape[q.rank - 1];
  TANDEM_TRY(check_head_dim("q", p_.head_dim));
  if (!packed()) {
    p_.batch = q.shape[0];
    p_.seqlen_q = q.shape[1];
    p_.total_q = p_.batch * p_.seqlen_q;
    return {};
  }
  TANDEM_TRY(read_index(&Args::cu_seqlens_q, {"length"}, &p_.cu_seqlens_q));
  const int64_t entries = operand(&Args::cu_seqlens_q).shape[0];
  if (entries == 0) {
    return Status::invalid(
        "cu_seqlens_q.length (0) must be at least 1: pass batch + 1 entries, of which the first is 0");
  }
  p_.batch = entries - 1;
  p_.total_q = p_.seqlen_q = q.shape[0];
  return {};
}

Status ProblemBuilder::read_keys() {
  const bool packed_k = given(&Args::cu_seqlens_k);
  if (packed() && !packed_k && !paged()) {
    return Status::invalid("cu_seqlens_k (NULL) must be given with cu_seqlens_q: pack k and v too, or pass page_table");
  }
  if (packed_k && !packed()) {
    return Status::invalid("cu_seqlens_q (NULL) must be given with cu_seqlens_k: pack q too, or pass dense k and v");
  }
  if (packed_k && paged()) {
    return Status::invalid("cu_seqlens_k must be NULL with page_table: pass the lengths of the sequences in seqused_k");
  }

  const Dim heads{"heads"};
  const Dim head_dim{"head_dim", p_.head_dim, "q", "pad or slice one of the two tensors"};
  const Dim dense[] = {{"batch", p_.batch, "q", "expand k and v by a stride of 0 if sequences share their keys"},
                       {"seqlen"},
                       heads,
                       head_dim};
  const Dim pages[] = {{"pages"}, {"page_size"}, heads, head_dim};
  const Dim rows[] = {{"total"}, heads, head_dim};
  const std::span<const Dim> dims = packed_k ? std::span<const Dim>(rows) : paged() ? pages : dense;
  const char* dims_why = packed_k  ? " where cu_seqlens_k is given"
                         : paged() ? " where page_table is given"
                                   : " unless cu_seqlens_k is given";
  const char* dtype_why = "q, k and v share one type; convert one of them";
  TANDEM_TRY(read(&Args::k, only(p_.dtype), dtype_why, dims, dims_why, true));

  const Operand& k = operand(&Args::k);
  Dim v_dims[kMaxRank];
  for (int i = 0; i < k.rank - 1; ++i) {
    v_dims[i] = {k.dim_name[i], k.shape[i], "k", "pass one value per key"};
  }
  v_dims[k.rank - 1] = {"head_dim"};
  TANDEM_TRY(read(&Args::v, only(p_.dtype), dtype_why, {v_dims, dims.size()}, dims_why, true));
  const Operand& v = operand(&Args::v);
  p_.k = view_of(k);
  p_.v = view_of(v);
  p_.heads_k = k.shape[k.rank - 2];
  p_.head_dim_v = v.shape[v.rank - 1];
  TANDEM_TRY(check_head_dim("v", p_.head_dim_v));
  if (p_.heads_k == 0 ? p_.heads_q != 0 : p_.heads_q % p_.heads_k != 0) {
    return Status::invalid(str_cat("q.heads (", p_.heads_q, ") must be a multiple of k.heads (", p_.heads_k,
                                   "): repeat or drop heads of k and v"));
  }

  if (packed_k) {
    TANDEM_TRY(read_index(&Args::cu_seqlens_k,
                          {"length", p_.batch + 1, "cu_seqlens_q", "pass batch + 1 entries in both tensors"},
                          &p_.cu_seqlens_k));
    p_.total_k = p_.seqlen_k = k.shape[0];
    return {};
  }
  if (paged()) return read_page_table();
  p_.seqlen_k = k.shape[1];
  p_.total_k = p_.batch * p_.seqlen_k;
  return {};
}

Status ProblemBuilder::read_page_table() {
  TANDEM_TRY(
      read(&Args::page_table, only(DType::i32), "convert the page numbers to int32",
           {{"batch", p_.batch, packed() ? nullptr : "q", "pass one row of pages per sequence"}, {"max_pages"}}));
  const Operand& k = operand(&Args::k);
  const Operand& table = operand(&Args::page_table);
  if (k.shape[1] < 1) {
    return Status::invalid(str_cat("k.page_size (", k.shape[1], ") must be at least 1: allocate pages with keys"));
  }
  p_.page_table = {.data = reinterpret_cast<const int32_t*>(table.data),
                   .batch = table.stride[0],
                   .column = table.stride[1],
                   .pages = k.shape[0],
                   .page_size = k.shape[1],
                   .max_pages = table.shape[1],
                   .present = true};
  p_.seqlen_k = p_.page_table.max_pages * p_.page_table.page_size;
  p_.total_k = p_.page_table.pages * p_.page_table.page_size;
  if (p_.seqlen_k > INT32_MAX) {
    return Status::invalid(str_cat("page_table.max_pages (", p_.page_table.max_pages, ") * k.page_size (",
                                   p_.page_table.page_size, ") must be at most ", INT32_MAX,
                                   ": drop columns of page_table"));
  }
  return {};
}

Status ProblemBuilder::read_results() {
  const Operand& q = operand(&Args::q);
  Dim dims[kMaxRank];
  for (int i = 0; i < q.rank - 1; ++i)
    dims[i] = {q.dim_name[i], q.shape[i], "q", "allocate one vector of out per query"};
  dims[q.rank - 1] = {"head_dim", p_.head_dim_v, "v", "allocate vectors of out as long as the values"};
  TANDEM_TRY(read(&Args::out, or_f32(p_.dtype), "allocate out with one of these types",
                  {dims, static_cast<size_t>(q.rank)}, "", true));
  p_.out = view_of(operand(&Args::out));
  if (!backward() && given(&Args::max_scores)) TANDEM_TRY(read_lse(&Args::max_scores, &p_.max_scores));
  if (!given(&Args::lse) && !backward()) return {};
  return read_lse(&Args::lse, &p_.lse);
}

Status ProblemBuilder::read_lse(Field field, View* view) {
  const char* why = "allocate one value per query and head";
  const DTypes dtypes = only(DType::f32) | (p_.dtype == DType::f64 ? only(DType::f64) : 0);
  const char* dtype_why = "allocate the tensor with this type, because 16-bit types lose digits";
  if (packed()) {
    TANDEM_TRY(read(field, dtypes, dtype_why, {{"heads", p_.heads_q, "q", why}, {"total", p_.total_q, "q", why}}));
  } else {
    TANDEM_TRY(
        read(field, dtypes, dtype_why,
             {{"batch", p_.batch, "q", why}, {"heads", p_.heads_q, "q", why}, {"seqlen", p_.seqlen_q, "q", why}}));
  }
  *view = lse_view_of(operand(field));
  return {};
}

Status ProblemBuilder::read_gradients() {
  TANDEM_TRY(read_like(&Args::dout, &Args::out, p_.dtype, true));
  p_.dout = view_of(operand(&Args::dout));
  if (given(&Args::dlse)) TANDEM_TRY(read_lse(&Args::dlse, &p_.dlse));
  const struct {
    Field field, model;
    View* view;
  } wanted[] = {{&Args::dq, &Args::q, &p_.dq}, {&Args::dk, &Args::k, &p_.dk}, {&Args::dv, &Args::v, &p_.dv}};
  for (const auto& gradient : wanted) {
    if (!given(gradient.field)) continue;
    TANDEM_TRY(read_like(gradient.field, gradient.model, p_.dtype, true));
    *gradient.view = view_of(operand(gradient.field));
  }
  return {};
}

Status ProblemBuilder::read_bias() {
  if (!given(&Args::bias)) {
    if (!backward() || !given(&Args::dbias)) return {};
    return Status::invalid("dbias must be NULL without bias: pass bias too");
  }
  if (packed()) {
    return Status::invalid("bias must be NULL with cu_seqlens_q: pass dense tensors with seqused_q and seqused_k");
  }
  const DTypes dtypes = only(DType::f32) | only(p_.dtype) | only(DType::boolean);
  constexpr Dim dims[] = {{"batch"}, {"heads"}, {"seqlen_q"}, {"seqlen_k"}};
  TANDEM_TRY(read(&Args::bias, dtypes, "convert the bias to one of these types", dims, "", is_shard()));
  TANDEM_TRY(check_bias_shape());
  p_.bias = bias_view_of(operand(&Args::bias));
  if (!backward() || !given(&Args::dbias)) return {};
  if (p_.bias.boolean()) {
    return Status::invalid("dbias must be NULL when bias.dtype is bool: pass NULL, because a mask has no gradient");
  }
  TANDEM_TRY(read_like(&Args::dbias, &Args::bias, p_.bias.dtype, is_shard()));
  p_.dbias = bias_view_of(operand(&Args::dbias));
  return {};
}

Status ProblemBuilder::check_bias_shape() const {
  const Operand& bias = operand(&Args::bias);
  const struct {
    const char* name;
    int64_t size;
  } full[] = {{"q.batch", p_.batch}, {"q.heads", p_.heads_q}, {"q.seqlen", p_.seqlen_q}, {"k.seqlen", p_.seqlen_k}};
  for (int i = 0; i < (is_shard() ? 2 : 4); ++i) {
    if (bias.shape[i] == 1 || bias.shape[i] == full[i].size) continue;
    return Status::invalid(str_cat("bias.", bias.dim_name[i], " (", bias.shape[i], ") must be 1 or equal ",
                                   full[i].name, " (", full[i].size, "): slice or expand this dimension"));
  }
  if (!is_shard()) return {};
  if (bias.shape[2] != p_.seqlen_q) {
    return Status::invalid(str_cat("bias.seqlen_q (", bias.shape[2], ") must equal the ", p_.seqlen_q,
                                   " q rows of the rank: pass the rows of the rank's queries"));
  }
  if (bias.shape[3] >= mode_.bias_keys) return {};
  return Status::invalid(str_cat("bias.seqlen_k (", bias.shape[3], ") must be at least ", mode_.bias_keys,
                                 ", the keys of the longest document: pass a column for each key position"));
}

Status ProblemBuilder::read_per_head() {
  const char* why = "expand the tensor to one value per query head";
  if (given(&Args::sink)) {
    TANDEM_TRY(read(&Args::sink, only(DType::f32) | only(p_.dtype), "convert the sink to one of these types",
                    {{"heads", p_.heads_q, "q", why}}));
    p_.sink = head_view_of(operand(&Args::sink));
  }
  if (backward() && given(&Args::dsink)) {
    if (!given(&Args::sink)) {
      return Status::invalid("dsink must be NULL without sink: pass sink too");
    }
    TANDEM_TRY(read_like(&Args::dsink, &Args::sink, p_.sink.dtype, false));
    p_.dsink = head_view_of(operand(&Args::dsink));
  }
  if (!given(&Args::alibi_slopes)) return {};
  const Dim dims[] = {{"batch", p_.batch, packed() ? nullptr : "q", "expand the tensor to one row per sequence"},
                      {"heads", p_.heads_q, "q", why}};
  const bool per_batch = args_.alibi_slopes->ndim == 2;
  TANDEM_TRY(read(&Args::alibi_slopes, only(DType::f32), "convert the slopes to float32",
                  std::span<const Dim>(dims).subspan(per_batch ? 0 : 1), ", or (batch, heads)", false));
  p_.alibi_slopes = head_view_of(operand(&Args::alibi_slopes));
  return {};
}

Status ProblemBuilder::read_used_lengths() {
  const Dim length{"length", p_.batch, nullptr, "expand the tensor to one length per sequence"};
  if (given(&Args::seqused_q)) TANDEM_TRY(read_index(&Args::seqused_q, length, &p_.seqused_q));
  if (given(&Args::seqused_k)) TANDEM_TRY(read_index(&Args::seqused_k, length, &p_.seqused_k));
  const Dim offset{"length", p_.batch, nullptr, "expand the tensor to one offset per sequence"};
  if (given(&Args::diagonal_offsets)) TANDEM_TRY(read_index(&Args::diagonal_offsets, offset, &p_.diagonal_offsets));
  return {};
}

Status ProblemBuilder::read_places() {
  if (!given(&Args::places)) return {};
  constexpr int64_t kMembers = sizeof(tandem_place) / sizeof(int32_t);
  TANDEM_TRY(read(&Args::places, only(DType::i32), "convert the tensor to int32",
                  {{"batch", p_.batch, nullptr, "pass one place per sequence"},
                   {"members", kMembers, "tandem_place", "pass all members of each place"}}));
  const Operand& o = operand(&Args::places);
  if (o.shape[0] > 1 && (o.stride[0] != kMembers || o.stride[1] != 1)) {
    return Status::invalid(str_cat("places.strides (", o.stride[0], ", ", o.stride[1], ") must be ", kMembers,
                                   " and 1: copy the places into a compact tensor"));
  }
  p_.placed = true;
  p_.places = reinterpret_cast<const tandem_place*>(o.data);
  return {};
}

// Reads the longest sequence of a packed call, which the caller passes; otherwise the total bounds it. The values of
// cu_seqlens do not bound it, so that a call and its workspace_size see the same Problem. With pages and seqused_k the
// caller may pass a bound below the capacity of the page table.
Status ProblemBuilder::read_longest() {
  const struct {
    const char* name;
    int64_t given;
    bool packed;
    int64_t* longest;
  } sides[] = {{"max_seqlen_q", args_.max_seqlen_q, p_.packed_q(), &p_.seqlen_q},
               {"max_seqlen_k", args_.max_seqlen_k, p_.packed_k(), &p_.seqlen_k}};
  for (const auto& side : sides) {
    if (side.given < 0) {
      return Status::invalid(
          str_cat(side.name, " (", side.given, ") must be at least 0: pass the longest sequence, or 0 if unknown"));
    }
    const bool bounded = side.packed || (side.longest == &p_.seqlen_k && paged() && p_.seqused_k);
    if (!bounded && side.given != 0 && side.given < *side.longest) {
      return Status::invalid(str_cat(side.name, " (", side.given, ") must be at least seqlen (", *side.longest,
                                     "), or 0: pass 0 in a dense call"));
    }
    if (side.packed && side.given == 0 && *side.longest != 0 && !on_cpu()) {
      return Status::invalid(str_cat(
          side.name, " (0) must be given for packed tensors on a device: ", "pass the length of the longest sequence"));
    }
    if (bounded && side.given != 0) *side.longest = std::min(*side.longest, side.given);
  }
  return {};
}

}  // namespace tandem
