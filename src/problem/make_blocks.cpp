#include "problem/make_blocks.h"

#include <algorithm>
#include <vector>

#include "base/text.h"
#include "problem/bound_expression.h"
#include "problem/builder.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 40;  // blocks of all lists

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

class Reader {
 public:
  Reader(const tandem_block_mask_args& args, const ReadMode& mode, MakeBlocksProblem* problem)
      : args_(args), mode_(mode), m_(*problem) {}

  Status read() {
    TANDEM_TRY(read_sizes());
    TANDEM_TRY(read_text());
    const bool full = args_.full_kv_num_blocks != nullptr, by_keys = args_.q_num_blocks != nullptr;
    TANDEM_TRY(read_list({"kv_num_blocks", args_.kv_num_blocks}, {"kv_indices", args_.kv_indices}, true, false,
                         &m_.partial[0]));
    TANDEM_TRY(read_list({"full_kv_num_blocks", args_.full_kv_num_blocks}, {"full_kv_indices", args_.full_kv_indices},
                         full, false, &m_.full[0]));
    TANDEM_TRY(
        read_list({"q_num_blocks", args_.q_num_blocks}, {"q_indices", args_.q_indices}, by_keys, true, &m_.partial[1]));
    TANDEM_TRY(read_list({"full_q_num_blocks", args_.full_q_num_blocks}, {"full_q_indices", args_.full_q_indices},
                         by_keys && full, true, &m_.full[1]));
    return mode_.with_data ? check_sharing() : Status{};
  }

 private:
  struct Given {
    const char* name;
    const tandem_tensor* tensor;
  };

  Status read_sizes() {
    const struct {
      const char* name;
      int64_t value, least;
      const char* why;
    } sizes[] = {{"batch", args_.batch, 0, "pass the number of sequences, or 1 if all sequences share their lists"},
                 {"heads", args_.heads, 0, "pass the number of heads, or 1 if all heads share their lists"},
                 {"seqlen_q", args_.seqlen_q, 0, "pass the number of queries of a sequence"},
                 {"seqlen_k", args_.seqlen_k, 0, "pass the number of keys of a sequence"},
                 {"mask_block_q", args_.mask_block_q, 1, "pass the number of queries of a block, such as 128"},
                 {"mask_block_k", args_.mask_block_k, 1, "pass the number of keys of a block, such as 128"}};
    for (const auto& [name, value, least, why] : sizes) {
      const bool block = least == 1;
      if (value >= least && (block || value <= INT32_MAX)) continue;
      return Status::invalid(
          str_cat(name, " (", value, ") must be ", block ? "at least 1" : "0 to 2147483647", ": ", why));
    }
    m_.batch = args_.batch;
    m_.heads = args_.heads;
    m_.seqlen_q = args_.seqlen_q;
    m_.seqlen_k = args_.seqlen_k;
    m_.block_q = std::min<int64_t>(args_.mask_block_q, INT32_MAX);
    m_.block_k = std::min<int64_t>(args_.mask_block_k, INT32_MAX);
    m_.blocks_q = ceil_div(m_.seqlen_q, m_.block_q);
    m_.blocks_k = ceil_div(m_.seqlen_k, m_.block_k);
    int64_t blocks = 1;
    for (const int64_t size : {m_.batch, m_.heads, m_.blocks_q, m_.blocks_k}) {
      if (__builtin_mul_overflow(blocks, size, &blocks) || blocks > kMaxBlocks) {
        return Status::unsupported(str_cat("batch (", m_.batch, ") times heads (", m_.heads,
                                           ") times blocks must be at most 2^40: make larger blocks"));
      }
    }
    return {};
  }

  Status read_text() {
    if (args_.mask_mod == nullptr) {
      return Status::invalid("mask_mod (NULL) must be an expression: write one as docs/score_mod.md shows");
    }
    return builder_.read_mask_mod(args_.mask_mod, &m_.mask_mod);
  }

  Status read_list(const Given& count, const Given& index, bool wanted, bool by_keys, MadeList* list) {
    for (const Given* given : {&count, &index}) {
      if ((given->tensor != nullptr) == wanted) continue;
      return Status::invalid(str_cat(given->name, wanted ? " (NULL) must be given" : " must be NULL",
                                     ": pass the counts and indices of partial blocks, and optionally of full blocks"));
    }
    if (!wanted) return {};
    const char* why = "allocate one row per block, and an index for each block of the other side";
    const int64_t rows = by_keys ? m_.blocks_k : m_.blocks_q, columns = by_keys ? m_.blocks_q : m_.blocks_k;
    const Dim dims[] = {{"batch", m_.batch, nullptr, "allocate the size that the argument batch sets"},
                        {"heads", m_.heads, nullptr, "allocate the size that the argument heads sets"},
                        {"blocks", rows, nullptr, why},
                        {"indices", columns, nullptr, why}};
    Operand operands[2];
    for (int n = 0; n < 2; ++n) {
      const Given& given = n == 0 ? count : index;
      const OperandInfo info{given.name, nullptr, Use::write, Use::none};
      TANDEM_TRY(read_operand(*given.tensor,
                              {.info = info,
                               .dtypes = only(DType::i32),
                               .dtype_why = "allocate the list as int32",
                               .dims = {dims, static_cast<size_t>(3 + n)},
                               .dims_why = "",
                               .contiguous_last = false},
                              mode_, &operands[n]));
      written_.push_back(operands[n]);
    }
    list->count = reinterpret_cast<int32_t*>(operands[0].data);
    list->index = reinterpret_cast<int32_t*>(operands[1].data);
    std::copy_n(operands[0].stride, 3, list->count_stride);
    std::copy_n(operands[1].stride, 4, list->index_stride);
    list->present = true;
    return {};
  }

  Status check_sharing() const {
    for (size_t n = 0; n < written_.size(); ++n) {
      for (size_t other = 0; other < n; ++other) TANDEM_TRY(check_apart(written_[n], written_[other]));
      for (int i = 0; i < builder_.captured_count(); ++i) TANDEM_TRY(check_apart(written_[n], builder_.captured(i)));
    }
    return {};
  }
  static Status check_apart(const Operand& written, const Operand& other) {
    if (!overlap(written, other)) return {};
    return Status::invalid(
        str_cat(written.name, ".data overlaps ", other.name, ": pass separate memory for ", written.name));
  }

  const tandem_block_mask_args& args_;
  const ReadMode mode_;
  MakeBlocksProblem& m_;
  const tandem_attention_args no_call_{};
  Problem no_problem_;
  ProblemBuilder builder_{no_call_, mode_, &no_problem_};
  std::vector<Operand> written_;
};

}  // namespace

Status make_blocks_problem(const tandem_block_mask_args* from, tandem_device device, bool with_data,
                           MakeBlocksProblem* problem) {
  tandem_block_mask_args args;
  TANDEM_TRY(read_struct("args", "tandem_block_mask_args", from, sizeof(tandem_block_mask_args), &args));
  *problem = {};
  return Reader(args, {.pass = TANDEM_FORWARD, .device = device, .with_data = with_data}, problem).read();
}

}  // namespace tandem
