// The rules of a tandem_append_kv that need the values of index tensors, which the CPU reads.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "problem/append_kv.h"

namespace tandem {
namespace {

using Rows = AppendKvProblem::Rows;

class Reader {
 public:
  Reader(const AppendKvProblem& problem, AppendRows* rows) : p_(problem), rows_(*rows) {}

  Status read() {
    TANDEM_TRY(check_cu_seqlens("cu_seqlens_new", p_.keys));
    TANDEM_TRY(check_cu_seqlens("cu_seqlens_q", p_.queries));
    if (p_.slot_mapping) TANDEM_TRY(read_slots());
    if (p_.positions && p_.q) TANDEM_TRY(read_query_positions());
    for (int64_t b = 0; !p_.by_token() && b < p_.batch; ++b) {
      if (p_.k) TANDEM_TRY(read_keys(b));
      if (p_.q) TANDEM_TRY(read_queries(b));
    }
    return p_.slot_mapping ? Status{} : check_shared_places();
  }

 private:
  struct Span {
    int64_t first, count;
  };
  Span rows_of(const Rows& rows, int64_t b) const {
    if (!rows.cu_seqlens) return {b * rows.seqlen, rows.seqlen};
    return {rows.cu_seqlens[b], rows.cu_seqlens[b + 1] - rows.cu_seqlens[b]};
  }
  static AppendRow source(const Rows& rows, int64_t b, int64_t row) {
    if (rows.cu_seqlens) return {.batch = 0, .row = row};
    return {.batch = b, .row = row - b * rows.seqlen};
  }

  Status check_cu_seqlens(const char* name, const Rows& rows) const {
    if (!rows.cu_seqlens) return {};
    const IndexView& sums = rows.cu_seqlens;
    if (sums[0] != 0) {
      return Status::invalid(str_cat(name, "[0] (", sums[0], ") must be 0: subtract the first entry from all entries"));
    }
    for (int64_t b = 0; b < p_.batch; ++b) {
      if (sums[b + 1] >= sums[b] && sums[b + 1] <= rows.total) continue;
      return Status::invalid(str_cat(name, "[", b + 1, "] (", sums[b + 1], ") must be ", sums[b], " to ", rows.total,
                                     ": pass running sums of the lengths"));
    }
    return {};
  }

  Status check_position(int64_t position, const char* name, int64_t entry) const {
    if (p_.rotary_dim == 0 || (position >= 0 && position < p_.rotary_rows)) return {};
    if (position < 0) {
      return Status::invalid(
          str_cat(name, "[", entry, "] (", position, ") must be at least 0 with rotary_cos: pass a row of the tables"));
    }
    return Status::invalid(str_cat("rotary_cos.table_rows (", p_.rotary_rows, ") must be above position ", position,
                                   ", which ", name, "[", entry, "] gives: pass tables for all positions"));
  }

  Status read_slots() {
    const int64_t slots = p_.pages * p_.page_size;
    for (int64_t i = 0; i < p_.slot_mapping.length; ++i) {
      const int64_t slot = p_.slot_mapping[i];
      if (slot < 0) continue;
      if (slot >= slots) {
        return Status::invalid(str_cat("slot_mapping[", i, "] (", slot, ") must be below pages * page_size (", slots,
                                       "): pass a slot of the cache, or a negative number to skip the key"));
      }
      const int64_t position = p_.positions ? p_.positions[i] : 0;
      TANDEM_TRY(check_position(position, "positions", i));
      rows_.keys.push_back({0, i, slot / p_.page_size, slot % p_.page_size, position});
    }
    return {};
  }

  Status read_query_positions() {
    for (int64_t i = 0; i < p_.positions.length; ++i) {
      TANDEM_TRY(check_position(p_.positions[i], "positions", i));
      rows_.queries.push_back({.row = i, .position = p_.positions[i]});
    }
    return {};
  }

  int64_t first_place(int64_t b) const { return p_.cache_seqlens ? p_.cache_seqlens[b] : 0; }
  int64_t first_position(int64_t b) const { return p_.rotary_seqlens ? p_.rotary_seqlens[b] : first_place(b); }
  const char* position_name() const { return p_.rotary_seqlens ? "rotary_seqlens" : "cache_seqlens"; }

  Status read_keys(int64_t b) {
    const auto [first, count] = rows_of(p_.keys, b);
    if (count == 0) return {};
    const int64_t begin = first_place(b), s = p_.cache_batch_idx ? p_.cache_batch_idx[b] : b;
    const int64_t rows = p_.page_table ? p_.table_rows : p_.pages;
    const int64_t places = p_.page_size * (p_.page_table ? p_.page_table.max_pages : 1);
    if (count > places) {
      return Status::invalid(str_cat("k (", count, " new keys of sequence ", b, ") must have at most ", places,
                                     " keys per sequence, the places of the cache: enlarge the cache"));
    }
    if (begin < 0 || begin + count > places) {
      return Status::invalid(str_cat("cache_seqlens[", b, "] (", begin, ") must be 0 to ", places - count,
                                     ", because the cache has ", places, " places and ", count,
                                     " keys are new: enlarge the cache"));
    }
    if (s < 0 || s >= rows) {
      return Status::invalid(str_cat("cache_batch_idx[", b, "] (", s, ") must be at least 0 and below ", rows,
                                     ": pass a row of ", p_.page_table ? "page_table" : "the cache"));
    }
    TANDEM_TRY(check_position(first_position(b), position_name(), b));
    TANDEM_TRY(check_position(first_position(b) + count - 1, position_name(), b));
    for (int64_t i = 0; i < count; ++i) {
      AppendRow row = source(p_.keys, b, first + i);
      row.page = s;
      row.place = begin + i;
      row.position = first_position(b) + i;
      if (p_.page_table) {
        const int64_t column = row.place / p_.page_size;
        row.page = p_.page_table.at(s, column);
        row.place %= p_.page_size;
        if (row.page < 0 || row.page >= p_.pages) {
          return Status::invalid(str_cat("page_table[", s, ", ", column, "] (", row.page,
                                         ") must be at least 0 and below k_cache.pages (", p_.pages,
                                         "): give new keys pages before the call"));
        }
      }
      rows_.keys.push_back(row);
    }
    return {};
  }

  Status read_queries(int64_t b) {
    const auto [first, count] = rows_of(p_.queries, b);
    if (count == 0) return {};
    const int64_t last = p_.single_q_position ? 0 : count - 1;
    TANDEM_TRY(check_position(first_position(b), position_name(), b));
    TANDEM_TRY(check_position(first_position(b) + last, position_name(), b));
    for (int64_t i = 0; i < count; ++i) {
      AppendRow row = source(p_.queries, b, first + i);
      row.position = first_position(b) + (p_.single_q_position ? 0 : i);
      rows_.queries.push_back(row);
    }
    return {};
  }

  // Several new keys of one place must be equal. Samples that share a prompt have equal keys.
  Status check_shared_places() const {
    std::vector<const AppendRow*> rows;
    rows.reserve(rows_.keys.size());
    for (const AppendRow& row : rows_.keys) rows.push_back(&row);
    const auto place = [this](const AppendRow* row) { return row->page * p_.page_size + row->place; };
    std::ranges::sort(rows, {}, place);
    const auto differ = [&](const AppendRow* a, const AppendRow* b) {
      return place(a) == place(b) && !are_equal(*a, *b);
    };
    const auto found = std::ranges::adjacent_find(rows, differ);
    if (found == rows.end()) return {};
    return Status::invalid(
        str_cat("cache_seqlens (place ", (*found)->place, " of ", p_.page_table ? "page " : "row ", (*found)->page,
                " for two new keys that differ) must give each its own place: correct ", "cache_seqlens, ",
                p_.page_table ? "page_table" : "cache_batch_idx", " or the number of new keys"));
  }
  bool are_equal(const AppendRow& a, const AppendRow& b) const {
    if (p_.rotary_dim > 0 && a.position != b.position) return false;
    for (const auto& [view, dim] : {std::pair(&p_.k, p_.head_dim), std::pair(&p_.v, p_.head_dim_v)}) {
      const auto bytes = static_cast<size_t>(dim) * static_cast<size_t>(size_of(p_.dtype));
      for (int64_t h = 0; h < p_.keys.heads; ++h)
        if (std::memcmp(view->at(a.batch, a.row, h), view->at(b.batch, b.row, h), bytes) != 0) return false;
    }
    return true;
  }

  const AppendKvProblem& p_;
  AppendRows& rows_;
};

}  // namespace

Status read_append_rows(const AppendKvProblem& problem, AppendRows* rows) { return Reader(problem, rows).read(); }

}  // namespace tandem
