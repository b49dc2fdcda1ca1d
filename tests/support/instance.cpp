#include "support/instance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "problem/bound_expression.h"
#include "problem/convert.h"
#include "support/random.h"

namespace tandem::test {
namespace {

// Positions in Case::layout.
enum Which { kQ, kK, kV, kOut, kDout, kDq, kDk, kDv, kBias, kDbias, kLse };

View view_of(Tensor& t) {
  const std::vector<int64_t>& s = t.strides();
  const bool packed = s.size() == 3;
  return {t.element(0), t.dtype(), packed ? 0 : s[0], s[packed ? 0 : 1], s[packed ? 1 : 2], true};
}

View lse_view_of(Tensor& t) {
  const std::vector<int64_t>& s = t.strides();
  const bool packed = s.size() == 2;
  return {t.element(0), t.dtype(), packed ? 0 : s[0], s[packed ? 1 : 2], s[packed ? 0 : 1], true};
}

Tensor index_tensor(const std::vector<int64_t>& values) {
  Tensor t(DType::i32, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) t.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
  return t;
}

std::vector<int64_t> prefix_sums(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

int64_t total(const std::vector<int64_t>& lengths) { return prefix_sums(lengths).back(); }

// 0 would mean that the length is unknown.
int64_t max_seqlen(const std::vector<int64_t>& lengths, int64_t more) {
  const auto longest = std::max_element(lengths.begin(), lengths.end());
  return std::max<int64_t>((longest == lengths.end() ? 0 : *longest) + more, 1);
}

DType dtype_named(const std::string& name, DType same) { return name == "f32" ? DType::f32 : same; }

// Calls f(element) for row i < rows(b) of every sequence, head and column of a tensor like q or k.
template <class Rows, class Begin, class F>
void each_used(Tensor& t, View view, const Case& c, int64_t heads, int64_t dim, Rows rows, Begin begin, F f) {
  for (int64_t b = 0; b < c.sequences(); ++b) {
    for (int64_t i = 0; i < rows(b); ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          store(t.dtype(), view.at(b, begin(b) + i, h) + d * size_of(t.dtype()), f());
        }
      }
    }
  }
}

template <class T>
void assign(T& member, double value) {
  if constexpr (std::is_arithmetic_v<T>) member = static_cast<T>(value);
}

// Sets numbers by name: "deterministic=1,validate=1".
void set_members(const std::string& list, tandem_attention_args* args) {
  std::stringstream in(list);
  for (std::string item; std::getline(in, item, ',');) {
    const std::string name = item.substr(0, item.find('='));
    bool known = false;
#define OPTION(member, type, kind, schema) \
  if (name == #member) known = true, assign(args->member, std::stod(item.substr(name.size() + 1)));
#define MEMBER(member, type) OPTION(member, type, , )
#include "problem/options.def"
    if (!known) throw std::invalid_argument("members (" + item + ") must name a number of tandem_attention_args");
  }
}

}  // namespace

int64_t used_q(const Case& c, int64_t b) { return c.used_q.empty() ? c.length_q(b) : c.used_q[static_cast<size_t>(b)]; }
int64_t used_k(const Case& c, int64_t b) { return c.used_k.empty() ? c.length_k(b) : c.used_k[static_cast<size_t>(b)]; }

int64_t Instance::layout_of(int tensor) const { return c.layout >> 2 * tensor & 3; }
int64_t Instance::margin_of(int tensor) const {
  const int64_t margin = 16 + (c.layout == 0 ? 0 : (c.seed + tensor) % 17);
  return (margin + c.align - 1) / c.align * c.align;
}

Tensor Instance::tensor(DType dtype, std::vector<int64_t> shape, int which) const {
  return {dtype, std::move(shape), layout_of(which), margin_of(which), c.align > 1 ? c.align : 3};
}

std::vector<int64_t> Instance::shape_q(int64_t dim) const {
  if (c.packed) return {total(c.lengths_q), c.heads_q, dim};
  return {c.batch, c.seqlen_q, c.heads_q, dim};
}

std::vector<int64_t> Instance::shape_k(int64_t dim) const {
  if (c.page_size) return {c.sequences() * (c.seqlen_k / c.page_size) + 2, c.page_size, c.heads_k, dim};
  if (c.packed) return {total(c.lengths_k), c.heads_k, dim};
  return {c.batch, c.seqlen_k, c.heads_k, dim};
}

std::vector<int64_t> Instance::shape_lse() const {
  if (c.packed) return {c.heads_q, total(c.lengths_q)};
  return {c.batch, c.heads_q, c.seqlen_q};
}

DType Instance::result_type(char which, DType otherwise) const {
  const bool wide = c.float32.find(which) != std::string::npos && c.type() != DType::f64;
  return wide ? DType::f32 : otherwise;
}

DType Instance::lse_type() const { return c.type() == DType::f64 ? DType::f64 : DType::f32; }

std::vector<int64_t> Instance::shape_bias() const {
  std::vector<int64_t> shape = {c.batch, c.heads_q, c.seqlen_q, c.seqlen_k};
  for (size_t n = 0; n < 4; ++n) {
    if (c.bias_shape[n] == '1') shape[n] = 1;
  }
  return shape;
}

Instance::Instance(const Case& wanted) : c(wanted) {
  const DType t = c.type();
  q = tensor(t, shape_q(c.head_dim), kQ);
  k = tensor(t, shape_k(c.head_dim), kK);
  v = tensor(t, shape_k(c.head_dim_v), kV);
  dout = tensor(result_type('d', t), shape_q(c.head_dim_v), kDout);
  given_out = tensor(result_type('o', t), shape_q(c.head_dim_v), kOut);
  given_lse = Tensor(lse_type(), shape_lse(), layout_of(kLse));
  if (c.dlse) dlse = Tensor(lse_type(), shape_lse(), layout_of(kLse));
  if (c.packed) cu_seqlens_q = index_tensor(prefix_sums(c.lengths_q));
  if (c.packed && !c.page_size) cu_seqlens_k = index_tensor(prefix_sums(c.lengths_k));
  if (!c.used_q.empty()) seqused_q = index_tensor(c.used_q);
  if (!c.used_k.empty()) seqused_k = index_tensor(c.used_k);
  if (!c.diagonals.empty()) diagonal_offsets = index_tensor(c.diagonals);
  if (c.alibi == "head") alibi_slopes = Tensor(DType::f32, {c.heads_q});
  if (c.alibi == "batch") alibi_slopes = Tensor(DType::f32, {c.sequences(), c.heads_q});
  if (!c.sink.empty()) sink = Tensor(dtype_named(c.sink, t), {c.heads_q});
  if (!c.bias.empty()) {
    bias = tensor(c.bias == "bool" ? DType::boolean : dtype_named(c.bias, t), shape_bias(), kBias);
  }
  fill();
}

void Instance::fill() {
  Random r(static_cast<uint64_t>(c.seed));
  const auto rows_q = [&](int64_t b) { return used_q(c, b); };
  const auto rows_k = [&](int64_t b) { return used_k(c, b); };
  const auto begin_q = [&](int64_t b) { return c.packed ? prefix_sums(c.lengths_q)[static_cast<size_t>(b)] : 0; };
  const auto begin_k = [&](int64_t b) { return c.packed ? prefix_sums(c.lengths_k)[static_cast<size_t>(b)] : 0; };
  const auto normal = [&] { return r.normal(); };
  const auto small_integer = [&] { return static_cast<double>(r.between(-4, 4)); };
  const double q_size = c.values == "large" ? 30 : c.values == "integer" ? 0 : 1;
  each_used(q, view_of(q), c, c.heads_q, c.head_dim, rows_q, begin_q, [&] { return q_size * r.normal(); });
  each_used(dout, view_of(dout), c, c.heads_q, c.head_dim_v, rows_q, begin_q, normal);
  if (dlse) each_used(dlse, lse_view_of(dlse), c, c.heads_q, 1, rows_q, begin_q, normal);
  if (c.page_size) {
    fill_pages();
  } else {
    each_used(k, view_of(k), c, c.heads_k, c.head_dim, rows_k, begin_k, normal);
    if (c.values == "integer") {
      each_used(v, view_of(v), c, c.heads_k, c.head_dim_v, rows_k, begin_k, small_integer);
    } else {
      each_used(v, view_of(v), c, c.heads_k, c.head_dim_v, rows_k, begin_k, normal);
    }
  }
  if (c.sharp()) sharpen();
  for (int64_t n = 0; alibi_slopes && n < alibi_slopes.size(); ++n) alibi_slopes.set(n, 0.6 * r.uniform() - 0.1);
  for (int64_t n = 0; sink && n < sink.size(); ++n) sink.set(n, 2 * r.normal());
  if (bias) fill_bias();
  dropout_seed_ = r.next();
  dropout_offset_ = r.next();
  if (!c.score_mod.empty() || !c.mask_mod.empty()) bind_mods();
  if (!c.blocks.empty()) fill_blocks();
  if (c.places > 0) fill_places();
}

void Instance::fill_places() {
  constexpr int64_t kMembers = sizeof(tandem_place) / sizeof(int32_t);
  Random r(static_cast<uint64_t>(c.seed) + 19);
  places = Tensor(DType::i32, {c.sequences(), kMembers});
  for (int64_t b = 0; b < c.sequences(); ++b) {
    const int64_t first_q = r.between(0, 90), first_k = r.chance(0.3) ? 16 * r.between(0, 4) : r.between(0, 90);
    const int64_t stride = r.between(1, c.places), first_head = r.between(0, 3);
    const int64_t members[kMembers] = {r.between(0, 5),
                                       first_q,
                                       first_k,
                                       stride,
                                       first_q + used_q(c, b) * stride,
                                       first_k + used_k(c, b) * stride,
                                       r.between(-40, 40),
                                       first_head,
                                       first_head + c.heads_q + r.between(0, 2)};
    for (int64_t n = 0; n < kMembers; ++n) places.set(b * kMembers + n, static_cast<double>(members[n]));
  }
}

// Entries after a row's count are valid indices too. Some rows have no visible block.
void Instance::fill_blocks() {
  Random r(static_cast<uint64_t>(c.seed) + 17);
  const int64_t batch = c.block_shape[0] == '1' ? 1 : c.batch, heads = c.block_shape[1] == '1' ? 1 : c.heads_q;
  const int64_t rows = (c.seqlen_q + c.block_q - 1) / c.block_q, blocks = (c.seqlen_k + c.block_k - 1) / c.block_k;
  const bool hostile = c.blocks == "hostile", late = c.blocks == "late";
  const int64_t columns = hostile ? blocks + 3 : blocks;
  kv_num_blocks = Tensor(DType::i32, {batch, heads, rows}, layout_of(kBias));
  kv_indices = Tensor(DType::i32, {batch, heads, rows, columns}, layout_of(kBias));
  if (c.blocks != "partial") {
    full_kv_num_blocks = Tensor(DType::i32, {batch, heads, rows});
    full_kv_indices = Tensor(DType::i32, {batch, heads, rows, columns});
  }
  static constexpr int64_t kWild[] = {-1, INT32_MIN, INT32_MAX, 1 << 20};
  for (int64_t row = 0; row < batch * heads * rows; ++row) {
    std::vector<int64_t> listed[2];
    const bool empty = r.chance(0.15);
    for (int64_t block = 0; block < blocks; ++block) {
      const double kind = r.uniform();
      if (empty || kind < 0.45 || (late && block < blocks / 2)) continue;
      listed[kind > 0.72].push_back(block);
      if (hostile && r.chance(0.2)) listed[kind < 0.72].push_back(block);  // the block is in both lists
    }
    size_t which = 0;
    for (auto [count, index] : {std::pair{&kv_num_blocks, &kv_indices}, {&full_kv_num_blocks, &full_kv_indices}}) {
      std::vector<int64_t>& list = listed[which++];
      if (!*count) continue;
      for (int64_t n = 0; hostile && n < 3; ++n) list.push_back(r.chance(0.5) ? kWild[r.between(0, 3)] : blocks);
      for (size_t n = list.size(); n > 1; --n)
        std::swap(list[n - 1], list[static_cast<size_t>(r.between(0, static_cast<int64_t>(n) - 1))]);
      list.resize(std::min(list.size(), static_cast<size_t>(columns)));
      const bool wild = hostile && r.chance(0.4);
      count->set(row, static_cast<double>(wild ? kWild[r.between(0, 3)] : static_cast<int64_t>(list.size())));
      for (int64_t n = 0; n < columns; ++n) {
        const auto at = static_cast<size_t>(n);
        index->set(row * columns + n, static_cast<double>(at < list.size() ? list[at] : r.between(0, blocks)));
      }
    }
  }
}

// Some indices of expressions are out of range: positions exceed doc and seen, and q is no row of table.
void Instance::bind_mods() {
  Random r(static_cast<uint64_t>(c.seed) + 13);
  constexpr int64_t kPlaces = 50;
  slope = Tensor(DType::f32, {std::max<int64_t>(c.heads_q, 1)}, layout_of(kBias));
  table = tensor(c.type(), {std::max<int64_t>(c.heads_q, 1), 9}, kDbias);
  temperature = Tensor(DType::f32, {});
  doc = Tensor(c.seed % 2 ? DType::i64 : DType::i32, {std::max<int64_t>(c.sequences(), 1), kPlaces}, layout_of(kBias));
  seen = Tensor(DType::boolean, {kPlaces});
  for (int64_t n = 0; n < slope.size(); ++n) slope.set(n, 0.6 * r.uniform() - 0.1);
  for (int64_t n = 0; n < table.size(); ++n) table.set(n, r.normal());
  temperature.set(0, 1 + 0.2 * r.normal());
  for (int64_t n = 0; n < doc.size(); ++n) doc.set(n, static_cast<double>(n % kPlaces / 17));
  for (int64_t n = 0; n < seen.size(); ++n) seen.set(n, r.chance(0.7));
  scalars = {{"c", TANDEM_FLOAT, 0, r.normal()},
             {"n", TANDEM_INT, 0, static_cast<double>(r.between(-2, 9))},
             {"on", TANDEM_BOOL, 0, r.chance(0.7) ? 1.0 : 0.0}};
}

const tandem_mod* Instance::mod(size_t which, const std::string& text, Outputs* o) {
  if (text.empty()) return nullptr;
  const bool differentiable = which == 0 && o != nullptr;
  captured_[which] = {{"slope", slope.describe(), differentiable ? o->dslope.describe() : nullptr},
                      {"table", table.describe(), differentiable ? o->dtable.describe() : nullptr},
                      {"temperature", temperature.describe(), differentiable ? o->dtemperature.describe() : nullptr},
                      {"doc", doc.describe(), nullptr},
                      {"seen", seen.describe(), nullptr}};
  mods_[which] = {.size = sizeof(tandem_mod),
                  .text = text.c_str(),
                  .scalars = scalars.data(),
                  .scalar_count = static_cast<int64_t>(scalars.size()),
                  .tensors = captured_[which].data(),
                  .tensor_count = static_cast<int64_t>(captured_[which].size())};
  return &mods_[which];
}

// One key of every row has nearly all its weight. The first column marks a sink or a needle, the same for all queries.
// A copying row is the key before its own, made longer.
void Instance::sharpen() {
  const bool copies = c.values == "copy", needle = c.values.starts_with("needle");
  if (c.page_size || (!copies && !needle && !c.values.starts_with("sink"))) {
    throw std::invalid_argument("no such --values as " + c.values + " here");
  }
  const auto dim = static_cast<double>(c.head_dim);
  const double scale = c.scale != 0 ? c.scale : 1 / std::sqrt(dim);
  const double above = copies ? 30 : std::stod(c.values.substr(needle ? 6 : 4));
  const View queries = view_of(q), keys = view_of(k);
  constexpr double kMark = 7.3;  // so that scores are not exact
  int64_t q_begin = 0, k_begin = 0;
  for (int64_t b = 0; b < c.sequences(); ++b) {
    const int64_t q_rows = used_q(c, b), k_rows = used_k(c, b), marked = needle ? k_rows / 2 : 0;
    const auto q_at = [&](int64_t i, int64_t h, int64_t d) {
      return queries.at(b, q_begin + i, h) + d * size_of(q.dtype());
    };
    const auto k_at = [&](int64_t j, int64_t h, int64_t d) {
      return keys.at(b, k_begin + j, h) + d * size_of(k.dtype());
    };
    for (int64_t h = 0; h < c.heads_k && !copies; ++h) {
      for (int64_t j = 0; j < k_rows; ++j) {
        // Unmarked scores deviate by 1, and the largest of some hundred is near 3.
        store(k.dtype(), k_at(j, h, 0), j == marked ? (above + 3.07) / scale / kMark : 0);
        for (int64_t d = 1; j == marked && d < c.head_dim; ++d) store(k.dtype(), k_at(j, h, d), 0);
      }
    }
    for (int64_t h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < q_rows; ++i) {
        if (!copies) store(q.dtype(), q_at(i, h, 0), kMark);
        const int64_t before = i + k_rows - q_rows - 1;
        if (!copies || before < 0 || before >= k_rows) continue;
        for (int64_t d = 0; d < c.head_dim; ++d) {
          store(q.dtype(), q_at(i, h, d),
                33 / scale / dim * load(k.dtype(), k_at(before, h * c.heads_k / c.heads_q, d)));
        }
      }
    }
    if (c.packed) q_begin += c.length_q(b), k_begin += c.length_k(b);
  }
}

void Instance::fill_bias() {
  Random r(static_cast<uint64_t>(c.seed) + 11);
  const std::vector<int64_t> shape = bias.shape();
  std::vector<bool> filled(static_cast<size_t>(bias.size()), false);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < used_q(c, b); ++i) {
        for (int64_t j = 0; j < used_k(c, b); ++j) {
          const int64_t n =
              ((b % shape[0] * shape[1] + h % shape[1]) * shape[2] + i % shape[2]) * shape[3] + j % shape[3];
          if (filled[static_cast<size_t>(n)]) continue;
          filled[static_cast<size_t>(n)] = true;
          if (bias.dtype() == DType::boolean) {
            bias.set(n, r.chance(0.7));
          } else {
            bias.set(n, c.bias_inf && r.chance(0.3) ? -std::numeric_limits<double>::infinity() : 2 * r.normal());
          }
        }
      }
    }
  }
}

Outputs Instance::outputs(tandem_pass pass) const {
  const DType t = c.type();
  const auto wanted = [&](char gradient) {
    return pass == TANDEM_BACKWARD && c.gradients.find(gradient) != std::string::npos;
  };
  Outputs o;
  if (pass == TANDEM_FORWARD) {
    o.out = tensor(result_type('o', t), shape_q(c.head_dim_v), kOut);
    if (c.lse) o.lse = Tensor(lse_type(), shape_lse(), layout_of(kLse));
    if (c.max_scores) o.max_scores = Tensor(lse_type(), shape_lse(), layout_of(kLse));
  }
  const DType gradient = result_type('g', t);
  if (wanted('q')) o.dq = tensor(gradient, shape_q(c.head_dim), kDq);
  if (wanted('k')) o.dk = tensor(gradient, shape_k(c.head_dim), kDk);
  if (wanted('v')) o.dv = tensor(gradient, shape_k(c.head_dim_v), kDv);
  if (wanted('b') && bias && bias.dtype() != DType::boolean) {
    o.dbias = tensor(result_type('g', bias.dtype()), shape_bias(), kDbias);
  }
  if (wanted('s') && sink) o.dsink = Tensor(result_type('g', sink.dtype()), {c.heads_q});
  if ((wanted('m') || wanted('t')) && slope && !c.score_mod.empty()) {
    o.dtable = tensor(result_type('g', table.dtype()), table.shape(), kDbias);
    if (wanted('m')) o.dslope = Tensor(DType::f32, slope.shape());
    if (wanted('m')) o.dtemperature = Tensor(DType::f32, {});
  }
  if (c.accumulate) fill_gradients(&o);
  return o;
}

// All calls use the same numbers.
void Instance::fill_gradients(Outputs* o) const {
  Random r(static_cast<uint64_t>(c.seed) + 11);
  for (Tensor* t : o->gradients()) {
    for (int64_t n = 0; *t && n < t->size(); ++n) t->set(n, r.normal());
  }
}

Outputs Instance::exact_outputs(tandem_pass pass) const {
  Outputs o = outputs(pass);
  if (pass == TANDEM_FORWARD) o.lse = Tensor(DType::f64, shape_lse());
  for (Tensor* t : o.all()) {
    if (!*t || t == &o.lse) continue;
    Tensor exact(DType::f64, t->shape());
    for (int64_t n = 0; c.accumulate && pass == TANDEM_BACKWARD && n < t->size(); ++n) exact.set(n, t->get(n));
    *t = std::move(exact);
  }
  return o;
}

tandem_attention_args Instance::args(tandem_pass pass, Outputs* o) {
  tandem_attention_args a = {};
  a.size = sizeof a;
  a.q = q.describe();
  a.k = k.describe();
  a.v = v.describe();
  if (pass == TANDEM_FORWARD) {
    a.out = o->out.describe();
    a.lse = o->lse.describe();
    a.max_scores = o->max_scores.describe();
  } else {
    a.out = given_out.describe();
    a.lse = given_lse.describe();
    a.dout = dout.describe();
    a.dlse = dlse.describe();
    a.dq = o->dq.describe();
    a.dk = o->dk.describe();
    a.dv = o->dv.describe();
    a.dbias = o->dbias.describe();
    a.dsink = o->dsink.describe();
  }
  a.bias = bias.describe();
  a.sink = sink.describe();
  a.alibi_slopes = alibi_slopes.describe();
  a.cu_seqlens_q = cu_seqlens_q.describe();
  a.cu_seqlens_k = cu_seqlens_k.describe();
  a.seqused_q = seqused_q.describe();
  a.seqused_k = seqused_k.describe();
  a.page_table = page_table.describe();
  if (c.packed && c.max_seqlen >= 0) {
    a.max_seqlen_q = max_seqlen(c.lengths_q, c.max_seqlen);
    if (!c.page_size) a.max_seqlen_k = max_seqlen(c.lengths_k, c.max_seqlen);
  }
  if (c.page_size && c.max_seqlen >= 0) a.max_seqlen_k = max_seqlen(c.used_k, c.max_seqlen);
  a.softmax_scale = c.scale;
  a.softcap = c.softcap;
  a.causal = c.causal;
  a.alignment = c.explicit_diagonal ? TANDEM_EXPLICIT : c.top_left ? TANDEM_TOP_LEFT : TANDEM_BOTTOM_RIGHT;
  a.diagonal_offset = c.diagonal;
  a.diagonal_offsets = diagonal_offsets.describe();
  if (c.left != TANDEM_UNBOUNDED) {
    a.window |= TANDEM_WINDOW_LEFT;
    a.window_left = c.left;
  }
  if (c.right != TANDEM_UNBOUNDED) {
    a.window |= TANDEM_WINDOW_RIGHT;
    a.window_right = c.right;
  }
  a.dropout_p = c.dropout;
  if (c.dropout_pointers) {
    a.dropout_seed_ptr = &dropout_seed_;
    a.dropout_offset_ptr = &dropout_offset_;
  } else {
    a.dropout_seed = dropout_seed_;
    a.dropout_offset = dropout_offset_;
  }
  a.num_splits = static_cast<int32_t>(c.splits);
  a.batch_invariant = c.invariant;
  a.places = places.describe();
  a.accumulate = c.accumulate;
  a.sm_limit = static_cast<int32_t>(c.sm_limit);
  set_members(c.members, &a);
  a.score_mod = mod(0, c.score_mod, o);
  a.mask_mod = mod(1, c.mask_mod, o);
  if (kv_num_blocks) {
    a.kv_num_blocks = kv_num_blocks.describe();
    a.kv_indices = kv_indices.describe();
    a.full_kv_num_blocks = full_kv_num_blocks.describe();
    a.full_kv_indices = full_kv_indices.describe();
    a.mask_block_q = c.block_q;
    a.mask_block_k = c.block_k;
  }
  return a;
}

Problem Instance::problem(tandem_pass pass, Outputs* o) {
  const tandem_attention_args a = args(pass, o);
  Problem p;
  const Status status = make_problem(pass, &a, {TANDEM_CPU, 0}, true, &p);
  if (!status.ok()) throw std::runtime_error(status.message);
  return p;
}

namespace {

void replace_captured(Problem& p, Outputs* o) {
  auto copy = std::make_shared<BoundExpression>(*p.score_mod.read);
  Tensor* const tensors[] = {&o->dslope, &o->dtable, &o->dtemperature};
  for (size_t n = 0; n < std::size(tensors); ++n) {
    BiasView& to = copy->gradients[n].to;
    if (!to) continue;
    to.data = tensors[n]->element(0);
    to.dtype = tensors[n]->dtype();
    std::copy(tensors[n]->strides().begin(), tensors[n]->strides().end(), to.stride);
  }
  p.score_mod.read = std::move(copy);
}

}  // namespace

Problem with_outputs(Problem p, Outputs* o) {
  const auto replace = [](Tensor& t, View* view) {
    if (t) *view = view_of(t);
  };
  replace(o->out, &p.out);
  replace(o->dq, &p.dq);
  replace(o->dk, &p.dk);
  replace(o->dv, &p.dv);
  if (o->lse) p.lse = lse_view_of(o->lse);
  if (o->max_scores) p.max_scores = lse_view_of(o->max_scores);
  if (o->dsink) p.dsink = {o->dsink.element(0), o->dsink.dtype(), 0, 1, true};
  if (o->dbias) {
    p.dbias.data = o->dbias.element(0);
    p.dbias.dtype = o->dbias.dtype();
    for (size_t n = 0; n < 4; ++n) p.dbias.stride[n] = p.dbias.shape[n] == 1 ? 0 : o->dbias.strides()[n];
  }
  if (o->dtable) replace_captured(p, o);
  return p;
}

Problem Instance::exact_problem(tandem_pass pass, Outputs* exact) {
  Outputs replaced = outputs(pass);
  return with_outputs(problem(pass, &replaced), exact);
}

void Instance::give_results(Outputs* results) {
  const View from = view_of(results->out), to = view_of(given_out);
  const View lse_from = lse_view_of(results->lse), lse_to = lse_view_of(given_lse);
  const std::vector<int64_t> begins = c.packed ? prefix_sums(c.lengths_q) : std::vector<int64_t>();
  for (int64_t b = 0; b < c.sequences(); ++b) {
    const int64_t begin = c.packed ? begins[static_cast<size_t>(b)] : 0;
    for (int64_t i = begin; i < begin + used_q(c, b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          store(to.dtype, to.at(b, i, h) + d * size_of(to.dtype),
                load(from.dtype, from.at(b, i, h) + d * size_of(from.dtype)));
        }
        store(lse_to.dtype, lse_to.at(b, i, h), load(lse_from.dtype, lse_from.at(b, i, h)));
      }
    }
  }
}

std::vector<Tensor*> Instance::inputs() {
  return {&q,
          &k,
          &v,
          &bias,
          &sink,
          &alibi_slopes,
          &cu_seqlens_q,
          &cu_seqlens_k,
          &seqused_q,
          &seqused_k,
          &page_table,
          &dout,
          &dlse,
          &given_out,
          &given_lse,
          &diagonal_offsets,
          &places,
          &slope,
          &table,
          &temperature,
          &doc,
          &seen,
          &kv_num_blocks,
          &kv_indices,
          &full_kv_num_blocks,
          &full_kv_indices};
}

uint64_t Instance::fingerprint() const {
  uint64_t sum = 0;
  for (const Tensor* t : const_cast<Instance*>(this)->inputs()) {
    // Absent late inputs must not change the fingerprint, so that older recordings stay valid.
    const bool late = t == &diagonal_offsets || t == &places || t == &slope || t == &table || t == &temperature ||
                      t == &doc || t == &seen || t == &kv_num_blocks || t == &kv_indices || t == &full_kv_num_blocks ||
                      t == &full_kv_indices;
    if (late && !*t) continue;
    sum = sum * 31 + t->fingerprint();
  }
  return sum;
}

}  // namespace tandem::test
