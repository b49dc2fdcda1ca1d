// The rules that need the data: values of index tensors on the CPU, and overlaps of tensors in memory.
#include "base/text.h"
#include "problem/builder.h"

namespace tandem {
namespace {

// The rows that sequences may use, and the argument that bounds their lengths.
struct PackedRows {
  const char* tensor;
  int64_t total;
  const char* bound_name;
  int64_t bound;
  bool may_have_rest;  // rows after the last sequence
};

Status check_cu_seqlens(const char* name, const IndexView& offsets, int64_t batch, const PackedRows& rows) {
  const auto& [tensor, total, bound_name, bound, may_have_rest] = rows;
  if (offsets[0] != 0) {
    return Status::invalid(
        str_cat(name, "[0] (", offsets[0], ") must be 0: subtract the first entry from all entries"));
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = offsets[b], end = offsets[b + 1];
    if (end < begin) {
      return Status::invalid(str_cat(name, "[", b + 1, "] (", end, ") must be at least ", name, "[", b, "] (", begin,
                                     "): pass running sums of the lengths"));
    }
    if (end > total) {
      return Status::invalid(str_cat(name, "[", b + 1, "] (", end, ") must be at most ", tensor, ".total (", total,
                                     "): lower the sums, or pass a longer tensor"));
    }
    if (end - begin > bound) {
      return Status::invalid(str_cat(bound_name, " (", bound, ") must be at least ", end - begin,
                                     ", the length of sequence ", b, ": pass the longest length, or 0"));
    }
  }
  if (offsets[batch] != total && !may_have_rest) {
    return Status::invalid(str_cat(name, "[", batch, "] (", offsets[batch], ") must equal ", tensor, ".total (", total,
                                   "): slice the tensor or extend the sums"));
  }
  return {};
}

Status check_used(const char* name, int64_t b, int64_t used, int64_t rows) {
  if (used >= 0 && used <= rows) return {};
  return Status::invalid(str_cat(name, "[", b, "] (", used, ") must be 0 to ", rows, ", the length of sequence ", b,
                                 ": pass the number of rows in use"));
}

Status check_offsets(const Problem& p) {
  if (p.cu_seqlens_q) {
    TANDEM_TRY(check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, p.batch,
                                {"q", p.total_q, "max_seqlen_q", p.seqlen_q, p.page_table.present}));
  }
  if (!p.cu_seqlens_k) return {};
  return check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, p.batch, {"k", p.total_k, "max_seqlen_k", p.seqlen_k, false});
}

Status check_used_lengths(const Problem& p) {
  if (!p.seqused_q && !p.seqused_k) return {};
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    TANDEM_TRY(check_used("seqused_q", b, s.q_len, s.q_rows));
    TANDEM_TRY(check_used("seqused_k", b, s.k_len, s.k_rows));
  }
  return {};
}

// Entries beyond the used keys, and entries of pages before all visible keys, may have any value.
Status check_pages(const Problem& p) {
  const PageTable& table = p.page_table;
  if (!table) return {};
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    const int64_t used = (s.k_len + table.page_size - 1) / table.page_size;
    for (int64_t i = first_visible_key(p, s) / table.page_size; i < used; ++i) {
      const int64_t page = table.at(b, i);
      if (page >= 0 && page < table.pages) continue;
      return Status::invalid(str_cat("page_table[", b, ", ", i, "] (", page, ") must be at least 0 and below k.pages (",
                                     table.pages, "): correct the page, or lower seqused_k if the page has no keys"));
    }
  }
  return {};
}

}  // namespace

Status check_values(const Problem& problem) {
  TANDEM_TRY(check_offsets(problem));
  TANDEM_TRY(check_used_lengths(problem));
  return check_pages(problem);
}

const Operand& ProblemBuilder::operand(int i) const {
  return i < kOperandCount ? operands_[i] : mod_operands_[static_cast<size_t>(i - kOperandCount)]->operand;
}

Use ProblemBuilder::use(int i) const {
  return i < kOperandCount ? kOperands[i].in(mode_.pass) : mod_operands_[static_cast<size_t>(i - kOperandCount)]->use;
}

Status ProblemBuilder::check_sharing() const {
  for (int i = 0; i < operand_count(); ++i) {
    const Operand& written = operand(i);
    if (!written.present || use(i) != Use::write) continue;
    for (int j = 0; j < operand_count(); ++j) {
      const Operand& other = operand(j);
      if (!other.present) continue;
      const bool seen = j <= i && use(j) == Use::write;  // outputs: each pair once
      if (seen || !overlap(written, other)) continue;
      return Status::invalid(str_cat(written.name, ".data (byte ", written.data - other.data, " from ", other.name,
                                     ".data) overlaps ", other.name, ": pass separate memory for ", written.name));
    }
  }
  return {};
}

}  // namespace tandem
