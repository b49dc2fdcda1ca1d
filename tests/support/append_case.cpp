#include "support/append_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "problem/convert.h"
#include "support/random.h"
#include "support/rounded.h"

namespace tandem::test {
namespace {

constexpr int64_t kPositions = 96, kSparePages = 3, kSpareRows = 2;

int64_t sum_of(const std::vector<int64_t>& list) { return std::accumulate(list.begin(), list.end(), int64_t{0}); }

void fill(Tensor& t, Random& r) {
  for (int64_t n = 0; n < t.size(); ++n) t.set(n, r.normal());
}

Tensor list_of(DType type, const std::vector<int64_t>& values) {
  Tensor t(type, {static_cast<int64_t>(values.size())});
  for (size_t n = 0; n < values.size(); ++n) {
    if (type == DType::i64) {
      write_as(t.element(static_cast<int64_t>(n)), values[n]);  // exact beyond 2^53
    } else {
      t.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
    }
  }
  return t;
}

int64_t entry(const Tensor& t, int64_t n) {
  return t.dtype() == DType::i64 ? read_as<int64_t>(t.element(n)) : static_cast<int64_t>(t.get(n));
}

// The expected place in the cache (page -1: none) and the expected position of a row of k or q.
struct Target {
  int64_t row, page = -1, place = 0, position = -1;
};

class Expected {
 public:
  explicit Expected(AppendInstance& before) : x_(before) {}

  std::vector<Target> keys() const {
    std::vector<Target> list;
    const int64_t page_size = x_.k_cache.shape()[1], pages = x_.k_cache.shape()[0];
    if (!x_.c.appends) return list;
    for (const Target& row : rows(false)) {
      Target t = row;
      const int64_t place = t.place, cache_row = t.page;
      t.page = -1;
      const int64_t columns = x_.page_table ? x_.page_table.shape()[1] : 1;
      const int64_t cache_rows = x_.page_table ? x_.page_table.shape()[0] : pages;
      if (x_.slot_mapping) {
        if (place >= 0 && place < pages * page_size) t.page = place / page_size, t.place = place % page_size;
      } else if (place - index_of(row) >= 0 && place < columns * page_size && cache_row >= 0 &&
                 cache_row < cache_rows) {
        const int64_t page = x_.page_table ? entry(x_.page_table, cache_row * columns + place / page_size) : cache_row;
        if (page >= 0 && page < pages) t.page = page, t.place = place % page_size;
      }
      // The last key of a slot is written.
      for (Target& other : list) {
        if (t.page >= 0 && other.page == t.page && other.place == t.place) other.page = -1;
      }
      list.push_back(t);
    }
    return list;
  }

  std::vector<Target> queries() const {
    std::vector<Target> list;
    if (x_.c.heads_q == 0) return list;
    for (Target t : rows(x_.c.single_q)) list.push_back({t.row, 0, 0, t.position});
    return list;
  }

 private:
  // Rows of sequences: `page` is the row of the cache or of page_table, and `place` the place in the sequence or the
  // slot.
  std::vector<Target> rows(bool single_position) const {
    std::vector<Target> list;
    if (x_.slot_mapping || x_.positions) {
      const int64_t count = x_.slot_mapping ? x_.slot_mapping.size() : x_.positions.size();
      for (int64_t n = 0; n < count; ++n) {
        list.push_back(
            {n, -1, x_.slot_mapping ? entry(x_.slot_mapping, n) : 0, x_.positions ? entry(x_.positions, n) : -1});
      }
      return list;
    }
    int64_t row = 0;
    for (size_t b = 0; b < x_.c.new_keys.size(); ++b) {
      const auto n = static_cast<int64_t>(b);
      const int64_t begin = x_.cache_seqlens ? entry(x_.cache_seqlens, n) : 0;
      const int64_t position = x_.rotary_seqlens ? entry(x_.rotary_seqlens, n) : begin;
      for (int64_t i = 0; i < x_.c.new_keys[b]; ++i) {
        list.push_back({row++, x_.cache_batch_idx ? entry(x_.cache_batch_idx, n) : n, begin + i,
                        position + (single_position ? 0 : i)});
      }
    }
    return list;
  }

  int64_t index_of(const Target& row) const {
    int64_t first = 0;
    for (const int64_t count : x_.c.new_keys) {
      if (row.row < first + count) return row.row - first;
      first += count;
    }
    return 0;
  }

  AppendInstance& x_;
};

// Compares the rotated or copied elements of one head.
class HeadCheck {
 public:
  explicit HeadCheck(AppendInstance& before) : x_(before) {}

  // from: the first element of the head, in row-major order.
  void compare(const Tensor& from, int64_t at, const Tensor& to, int64_t target, int64_t dim, int64_t position) {
    const int64_t columns = x_.c.rotary_dim / 2;
    const bool rotates = &from != &x_.v && columns > 0 && position >= 0 && position < kPositions;
    for (int64_t d = 0; d < dim; ++d) {
      if (!rotates || d >= x_.c.rotary_dim) {
        if (std::memcmp(from.element(at + d), to.element(target + d), static_cast<size_t>(size_of(from.dtype()))) !=
            0) {
          wrong = "an element that is not rotated has other bits";
        }
        continue;
      }
      const int64_t pair = x_.c.interleaved ? d / 2 : d % columns;
      const bool second = x_.c.interleaved ? d % 2 == 1 : d >= columns;
      const int64_t apart = x_.c.interleaved ? 1 : columns;
      const double own = from.get(at + d), other = from.get(at + (second ? d - apart : d + apart));
      const double c = x_.cos.get(position * columns + pair), s = x_.sin.get(position * columns + pair);
      const double exact = second ? other * s + own * c : own * c - other * s;
      const auto a = static_cast<float>(own * c), b = static_cast<float>(other * s);
      const double plain = rounded(to.dtype(), static_cast<float>(second ? b + a : a - b));
      const double result = to.get(target + d);
      if (!(std::fabs(result) <= 1e9)) wrong = "a rotated element is not finite";
      error = std::max(error, std::fabs(result - exact));
      plain_error = std::max(plain_error, std::fabs(plain - exact));
    }
  }

  std::string verdict() const {
    if (!wrong.empty()) return wrong;
    if (error <= 2 * plain_error + 1e-300) return "";
    return "rotation: max error " + std::to_string(error) + ", float32 formula " + std::to_string(plain_error);
  }

 private:
  AppendInstance& x_;
  std::string wrong;
  double error = 0, plain_error = 0;
};

// Compares one cache, or q_out, with its contents before. Returns an error, or "".
std::string compare_rest(const Tensor& before, const Tensor& after, const std::vector<bool>& written) {
  for (int64_t n = 0; n < before.size(); ++n) {
    if (written[static_cast<size_t>(n)]) continue;
    if (std::memcmp(before.element(n), after.element(n), static_cast<size_t>(size_of(before.dtype()))) != 0) {
      return "element " + std::to_string(n) + " was written to";
    }
  }
  return "";
}

struct Moved {
  const Tensor *from, *before, *after;  // the source; the target before and after the call
  int64_t heads, dim;
  bool to_cache;
};

std::string check_moved(AppendInstance& before, const Moved& m, const std::vector<Target>& targets) {
  std::vector<bool> written(static_cast<size_t>(m.before->size()), false);
  HeadCheck check(before);
  for (const Target& t : targets) {
    if (t.page < 0) continue;
    for (int64_t h = 0; h < m.heads; ++h) {
      const int64_t row = m.to_cache ? t.page * before.k_cache.shape()[1] + t.place : t.row;
      const int64_t target = (row * m.heads + h) * m.dim;
      check.compare(*m.from, (t.row * m.heads + h) * m.dim, *m.after, target, m.dim, t.position);
      std::fill_n(written.begin() + target, m.dim, true);
    }
  }
  const std::string verdict = check.verdict();
  return verdict.empty() ? compare_rest(*m.before, *m.after, written) : verdict;
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const AppendCase& c) {
  constexpr const char* kPlaces[] = {"slots", "pages", "rows"};
  stream << kPlaces[static_cast<int>(c.places)] << ", " << name_of(c.type) << ", tables " << name_of(c.table)
         << ", heads " << c.heads_k << " and " << c.heads_q << ", dims " << c.head_dim << ", " << c.head_dim_v
         << ", page_size " << c.page_size << ", rotary_dim " << c.rotary_dim << (c.interleaved ? " interleaved" : "")
         << ", new";
  for (const int64_t n : c.new_keys) stream << " " << n;
  stream << ", slots";
  for (const int64_t n : c.slots) stream << " " << n;
  return stream << (c.packed ? ", packed" : "") << (c.batch_idx ? ", batch_idx" : "")
                << (c.rotary_seqlens ? ", rotary_seqlens" : "") << (c.single_q ? ", single_q" : "")
                << (c.in_place ? ", in place" : "") << ", layout " << c.layout << ", gap " << c.gap;
}

AppendInstance::AppendInstance(const AppendCase& wanted) : c(wanted) {
  Random r(static_cast<uint64_t>(c.head_dim * 100 + c.page_size));
  const bool by_slot = c.places == Places::slots;
  const auto batch = static_cast<int64_t>(c.new_keys.size());
  const int64_t rows = by_slot ? static_cast<int64_t>(c.slots.size()) : sum_of(c.new_keys);
  const bool packed = by_slot || c.packed;
  const auto rows_tensor = [&](int64_t heads, int64_t dim) {
    const std::vector<int64_t> shape = packed ? std::vector<int64_t>{rows + c.rest, heads, dim}
                                              : std::vector<int64_t>{batch, c.new_keys[0], heads, dim};
    Tensor t(c.type, shape, c.layout, 32, c.gap);
    fill(t, r);
    return t;
  };
  int64_t places = 1;
  for (int64_t b = 0; b < batch; ++b) {
    places = std::max(places, c.cached[static_cast<size_t>(b)] + c.new_keys[static_cast<size_t>(b)]);
  }
  const int64_t columns = (places + c.page_size - 1) / c.page_size, table_rows = batch + (c.batch_idx ? kSpareRows : 0);
  const int64_t pages = by_slot ? 5 : c.places == Places::rows ? table_rows : table_rows * columns + kSparePages;
  const int64_t page_size = c.places == Places::rows ? places + 2 : c.page_size;
  if (c.appends) {
    k = rows_tensor(c.heads_k, c.head_dim), v = rows_tensor(c.heads_k, c.head_dim_v);
    k_cache = Tensor(c.type, {pages, page_size, c.heads_k, c.head_dim}, c.layout, 32, c.gap);
    v_cache = Tensor(c.type, {pages, page_size, c.heads_k, c.head_dim_v}, c.layout, 32, c.gap);
    fill(k_cache, r), fill(v_cache, r);
  }
  if (c.heads_q > 0) q = rows_tensor(c.heads_q, c.head_dim);
  if (c.heads_q > 0 && !c.in_place) q_out = Tensor(c.type, q.shape(), c.layout, 32, c.gap);
  if (c.rotary_dim > 0) {
    cos = Tensor(c.table, {kPositions, c.rotary_dim / 2}, c.layout & kGaps, 32, 8);
    sin = Tensor(c.table, {kPositions, c.rotary_dim / 2}, c.layout & kGaps, 32, 8);
    for (int64_t n = 0; n < cos.size(); ++n) {
      const double angle = 7 * r.uniform();
      cos.set(n, std::cos(angle)), sin.set(n, std::sin(angle));
    }
  }
  std::vector<int64_t> list;
  if (by_slot) {
    if (c.appends) slot_mapping = list_of(DType::i64, c.slots);
    for (int64_t n = 0; n < rows; ++n) list.push_back(r.between(0, kPositions - 1));
    if (c.rotary_dim > 0) positions = list_of(DType::i64, list);
    return;
  }
  cache_seqlens = list_of(DType::i32, c.cached);
  if (c.packed) {
    list = {0};
    for (const int64_t count : c.new_keys) list.push_back(list.back() + count);
    cu_seqlens = list_of(DType::i32, list);
  }
  list.clear();
  for (int64_t b = 0; b < batch; ++b) list.push_back(table_rows - 1 - b);
  if (c.batch_idx) cache_batch_idx = list_of(DType::i32, list);
  for (int64_t& n : list) n = r.between(0, 30);
  if (c.rotary_seqlens) rotary_seqlens = list_of(DType::i32, list);
  if (c.places == Places::rows || !c.appends) return;
  std::vector<int64_t> order(static_cast<size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  for (size_t n = order.size(); n-- > 1;)
    std::swap(order[n], order[static_cast<size_t>(r.between(0, static_cast<int64_t>(n)))]);
  page_table = Tensor(DType::i32, {table_rows, columns}, c.layout & kGaps);
  for (int64_t n = 0; n < page_table.size(); ++n) {
    const int64_t s = n / columns, b = c.batch_idx ? table_rows - 1 - s : s, first = n % columns * c.page_size;
    const bool used = b < batch && first + c.page_size > c.cached[static_cast<size_t>(b)] &&
                      first < c.cached[static_cast<size_t>(b)] + c.new_keys[static_cast<size_t>(b)];
    page_table.set(n, used ? static_cast<double>(order[static_cast<size_t>(n)]) : r.chance(0.5) ? -7.0 : 1e9);
  }
}

tandem_append_kv_args AppendInstance::args() {
  tandem_append_kv_args a{};
  a.size = sizeof a;
  a.k = k.describe(), a.v = v.describe(), a.k_cache = k_cache.describe(), a.v_cache = v_cache.describe();
  a.q = q.describe(), a.q_out = c.in_place ? a.q : q_out.describe();
  a.slot_mapping = slot_mapping.describe(), a.page_table = page_table.describe();
  a.cache_seqlens = cache_seqlens.describe(), a.cache_batch_idx = cache_batch_idx.describe();
  a.cu_seqlens_new = k ? cu_seqlens.describe() : nullptr, a.cu_seqlens_q = q ? cu_seqlens.describe() : nullptr;
  a.rotary_cos = cos.describe(), a.rotary_sin = sin.describe();
  a.rotary_seqlens = rotary_seqlens.describe(), a.positions = positions.describe();
  a.rotary_interleaved = c.interleaved, a.single_q_position = c.single_q;
  return a;
}

std::vector<Tensor*> AppendInstance::tensors() {
  std::vector<Tensor*> present;
  for (Tensor* t : {&k, &v, &k_cache, &v_cache, &q, &q_out, &cos, &sin, &slot_mapping, &page_table, &cache_seqlens,
                    &cache_batch_idx, &cu_seqlens, &rotary_seqlens, &positions}) {
    if (*t) present.push_back(t);
  }
  return present;
}

std::string check_append(const AppendCase& c, const ChangesAppend& append, const ChangesAppend& adjust) {
  AppendInstance instance(c), before(c);
  if (adjust) adjust(instance), adjust(before);
  append(instance);
  const Expected expected(before);
  if (c.appends) {
    const std::vector<Target> keys = expected.keys();
    for (const Moved& m : {Moved{&before.k, &before.k_cache, &instance.k_cache, c.heads_k, c.head_dim, true},
                           Moved{&before.v, &before.v_cache, &instance.v_cache, c.heads_k, c.head_dim_v, true}}) {
      const std::string verdict = check_moved(before, m, keys);
      if (!verdict.empty()) return (m.from == &before.k ? "k_cache: " : "v_cache: ") + verdict;
    }
  }
  if (c.heads_q > 0) {
    const Tensor *target = c.in_place ? &before.q : &before.q_out, *result = c.in_place ? &instance.q : &instance.q_out;
    const std::string verdict =
        check_moved(before, {&before.q, target, result, c.heads_q, c.head_dim, false}, expected.queries());
    if (!verdict.empty()) return "q_out: " + verdict;
  }
  const std::vector<Tensor*> now = instance.tensors(), then = before.tensors();
  for (size_t n = 0; n < now.size(); ++n) {
    if (!now[n]->guards_intact()) return "a tensor was written to outside its elements";
    const bool result = now[n] == &instance.k_cache || now[n] == &instance.v_cache || now[n] == &instance.q_out ||
                        (c.in_place && now[n] == &instance.q);
    if (!result && now[n]->fingerprint() != then[n]->fingerprint()) return "an input was written to";
  }
  return "";
}

std::vector<AppendCase> append_cases() {
  std::vector<AppendCase> cases;
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    cases.push_back({.type = type, .heads_q = 4, .rotary_dim = 64});
    cases.push_back({.places = Places::rows,
                     .type = type,
                     .table = type,
                     .heads_q = 2,
                     .head_dim = 128,
                     .rotary_dim = 64,
                     .interleaved = true,
                     .layout = kHeadsFirst});
    cases.push_back({.places = Places::slots, .type = type, .head_dim_v = 32, .slots = {3, 79, 17, 0, 64}});
  }
  // Negative and repeated slots, more keys than slots, odd pages.
  cases.push_back({.places = Places::slots,
                   .heads_q = 3,
                   .page_size = 7,
                   .rotary_dim = 32,
                   .slots = {4, -1, 4, 34, -9, 4, 0, INT64_MIN, 34},
                   .rest = 3});
  AppendCase many{.places = Places::slots, .heads_k = 1, .head_dim = 8, .head_dim_v = 8, .page_size = 128};
  for (int64_t n = 0; n < 2000; ++n) many.slots.push_back(n * 7919 % 640 - (n % 11 == 0 ? 700 : 0));
  cases.push_back(many);
  // Rows of many heads, which several CTAs of a GPU divide.
  cases.push_back({.heads_q = 66, .head_dim = 128, .rotary_dim = 96, .new_keys = {1, 1}, .in_place = true});
  cases.push_back({.places = Places::slots, .heads_k = 70, .slots = {4, 9, 4}});
  cases.push_back({.places = Places::slots, .slots = {}, .rest = 2});
  cases.push_back({.places = Places::slots, .heads_q = 2, .rotary_dim = 64, .slots = {1, 2, 3}, .appends = false});
  // Packed lengths, some 0; rows after the last sequence; odd pages; heads before rows.
  for (const int64_t page_size : {16, 1, 5}) {
    cases.push_back({.heads_q = 4,
                     .page_size = page_size,
                     .rotary_dim = 48,
                     .new_keys = {0, 9, 1, 0, 17, 0},
                     .cached = {0, 30, 15, 7, 0, 0},
                     .packed = true,
                     .rest = 2,
                     .interleaved = page_size == 5,
                     .batch_idx = page_size == 1,
                     .rotary_seqlens = page_size == 5,
                     .layout = kGaps | kHeadsFirst});
  }
  cases.push_back({.places = Places::rows,
                   .heads_q = 2,
                   .rotary_dim = 64,
                   .new_keys = {2, 5},
                   .cached = {0, 11},
                   .packed = true,
                   .batch_idx = true,
                   .single_q = true,
                   .in_place = true});
  // Elements that are moved one at a time.
  for (const bool interleaved : {false, true}) {
    cases.push_back({.heads_q = 2,
                     .head_dim = 33,
                     .head_dim_v = 7,
                     .rotary_dim = 22,
                     .interleaved = interleaved,
                     .in_place = true,
                     .layout = kGaps,
                     .gap = 3});
    cases.push_back({.type = DType::f32, .heads_q = 2, .rotary_dim = 20, .interleaved = interleaved, .gap = 1});
  }
  cases.push_back({.heads_k = 1, .head_dim = 512, .head_dim_v = 256, .rotary_dim = 512});
  cases.push_back({.heads_q = 4, .rotary_dim = 64, .new_keys = {0, 0}});
  cases.push_back({.heads_q = 2, .rotary_dim = 64, .appends = false});
  return cases;
}

}  // namespace tandem::test
