#include "context_parallel/plan.h"

#include <tuple>

#include "base/text.h"
#include "context_parallel/balance.h"
#include "context_parallel/word_hash.h"

namespace tandem::context_parallel {
namespace {

// Returns the shards of one document at the front of a list.
std::span<const Shard> first_document(std::span<const Shard> shards) {
  size_t n = 0;
  while (n < shards.size() && shards[n].tokens.document == shards[0].tokens.document) ++n;
  return shards.first(n);
}

Status check_block_mask(const ContextProblem& p) {
  const BlockMask& m = p.block_mask;
  if (!m) return {};
  if (m.block_q < 1 || m.block_k < 1) {
    return Status::invalid(str_cat("block_mask.block_k (", m.block_k, ") must be positive: pass the size of a block"));
  }
  int64_t rows = 0;
  for (const PackedDocument& d : p.documents) rows += ceil_div(d.q_len, m.block_q);
  if (static_cast<int64_t>(m.row_begin.size()) != rows + 1) {
    return Status::invalid(str_cat("block_mask.row_begin (", m.row_begin.size(), " offsets) must have ", rows + 1,
                                   ": one for each row of blocks of each document, and the end"));
  }
  const auto blocks = static_cast<int64_t>(m.key_blocks.size());
  size_t row = 0;
  for (size_t d = 0; d < p.documents.size(); ++d) {
    for (int64_t n = ceil_div(p.documents[d].q_len, m.block_q); n > 0; --n, ++row) {
      int64_t last = -1;
      const int64_t begin = m.row_begin[row], end = m.row_begin[row + 1];
      if (begin < 0 || begin > end || end > blocks) {
        return Status::invalid(str_cat("block_mask.row_begin[", row, "] (", begin, ") must ascend within 0 and ",
                                       blocks, ": pass offsets into key_blocks"));
      }
      for (int64_t i = begin; i < end; last = m.key_blocks[static_cast<size_t>(i++)]) {
        const int64_t block = m.key_blocks[static_cast<size_t>(i)];
        if (block <= last || block >= ceil_div(p.documents[d].k_len, m.block_k)) {
          return Status::invalid(str_cat("block_mask.key_blocks[", i, "] (", block, ") must ascend in row ", row,
                                         " and lie in document ", d, ": sort the row's blocks"));
        }
      }
    }
  }
  return {};
}

// Refuses plans whose number of shards would exhaust memory.
Status check_shards(const ContextProblem& p) {
  const auto documents = static_cast<int64_t>(p.documents.size());
  const bool in_documents = p.layout == LayoutKind::per_document || p.layout == LayoutKind::striped;
  int64_t shards = documents + 2 * p.ranks;
  if (in_documents) shards = 0;
  for (const PackedDocument& d : p.documents) {
    const int64_t tokens = std::max(d.q_len, d.k_len);
    if (in_documents) shards += std::min(tokens, 2 * int64_t{p.ranks});
    if (p.chunk > 0) shards += ceil_div(tokens, p.chunk);
  }
  if (shards <= kMaxShards) return {};
  return Status::invalid(str_cat("chunk (", p.chunk, ") and layout (", name_of(p.layout), ") must cut at most ",
                                 kMaxShards, " shards, not ", shards, ": pass larger chunks or the layout balanced"));
}

Status check_problem(const ContextProblem& p) {
  if (p.ranks < 1 || p.ranks > kMaxRanks) {
    return Status::invalid(str_cat("ranks (", p.ranks, ") must be between 1 and ", kMaxRanks,
                                   ": pass the size of the group that shares the sequence"));
  }
  if (p.chunk < 0) return Status::invalid(str_cat("chunk (", p.chunk, ") must not be negative: pass 0 for no chunks"));
  int64_t queries = 0, keys = 0;
  for (size_t n = 0; n < p.documents.size(); ++n) {
    const PackedDocument& d = p.documents[n];
    if (std::min(d.q_len, d.k_len) < 0 || std::max(d.q_len, d.k_len) > kMaxTokens) {
      return Status::invalid(str_cat("documents[", n, "] (", d.q_len, " queries, ", d.k_len,
                                     " keys) must have between 0 and 2^31 tokens: correct the lengths"));
    }
    if (d.diagonal < -(int64_t{1} << 33) || d.diagonal > int64_t{1} << 33) {
      return Status::invalid(
          str_cat("documents[", n, "].diagonal (", d.diagonal, ") must be within 2^33: pass an offset in keys"));
    }
    queries += d.q_len;
    keys += d.k_len;
    if (std::max(queries, keys) > kMaxTokens) {
      return Status::invalid(str_cat("documents (", std::max(queries, keys),
                                     " tokens or more) must have at most 2^31 tokens: plan fewer documents at once"));
    }
  }
  TANDEM_TRY(check_shards(p));
  return check_block_mask(p);
}

}  // namespace

Status make_context_plan(const ContextProblem& problem, ContextPlan* plan) {
  TANDEM_TRY(check_problem(problem));
  ContextPlan result;
  result.documents_.assign(problem.documents.begin(), problem.documents.end());
  result.window_left_ = problem.window_left;
  result.window_right_ = problem.window_right;
  result.block_mask_ = problem.block_mask;
  result.layout_ = problem.layout;
  result.chunk_ = problem.chunk;
  result.same_shards_ = true;
  const size_t count = problem.documents.size();
  std::vector<int64_t> q_starts(count + 1, 0), k_starts(count + 1, 0), k_lens(count);
  int64_t rows = 0;
  for (size_t n = 0; n < count; ++n) {
    const PackedDocument& d = problem.documents[n];
    q_starts[n + 1] = q_starts[n] + d.q_len;
    k_starts[n + 1] = k_starts[n] + d.k_len;
    k_lens[n] = d.k_len;
    if (d.q_len != d.k_len) result.same_shards_ = false;
    if (!problem.block_mask) continue;
    result.first_rows_.push_back(rows);
    rows += ceil_div(d.q_len, problem.block_mask.block_q);
  }
  const PackedTokens queries{q_starts, problem.chunk}, keys{k_starts, problem.chunk};
  std::vector<PackedCut> cuts;
  if (problem.layout == LayoutKind::balanced) {
    std::vector<DocumentMask> masks(count);
    for (size_t n = 0; n < count; ++n) masks[n] = result.mask_of(static_cast<int32_t>(n));
    cuts = balanced_cuts(WorkCurve(q_starts, k_lens, masks), problem.ranks, queries);
  }
  result.queries_ = ShardLayout(problem.layout, problem.ranks, queries, std::move(cuts));
  if (!result.same_shards_) {
    // Keys have no work. Contiguous shards of equal size balance their memory.
    const LayoutKind kind = problem.layout == LayoutKind::balanced ? LayoutKind::contiguous : problem.layout;
    result.keys_ = ShardLayout(kind, problem.ranks, keys, {});
  }
  *plan = std::move(result);
  return {};
}

std::vector<ContextStep> ContextPlan::steps_between(int32_t q_rank, int32_t k_rank) const {
  const std::vector<Shard> q = queries().shards(q_rank), k = keys().shards(k_rank);
  std::vector<ContextStep> steps;
  steps.reserve(q.size() + k.size());  // a band passes through neighbours only
  append_steps(q, k, steps);
  return steps;
}

std::vector<ContextStep> ContextPlan::steps(int32_t rank) const {
  std::vector<ContextStep> steps;
  const std::vector<Shard> own = queries().shards(rank);
  for (int32_t round = 0; round < ranks(); ++round) append_steps(own, keys().shards(peer(rank, round)), steps);
  return steps;
}

std::vector<ContextStep> ContextPlan::key_steps(int32_t rank) const {
  std::vector<ContextStep> steps;
  const std::vector<Shard> own = keys().shards(rank);
  for (int32_t round = 0; round < ranks(); ++round) append_steps(queries().shards(reader(rank, round)), own, steps);
  return steps;
}

std::vector<KeyTransfer> ContextPlan::transfers(int32_t rank) const {
  std::vector<KeyTransfer> transfers;
  for (int32_t round = 1; round < ranks(); ++round) {
    for (const TokenRange& k : transfers_between(rank, peer(rank, round))) {
      transfers.push_back({k, peer(rank, round), round});
    }
  }
  return transfers;
}

std::vector<TokenRange> ContextPlan::transfers_between(int32_t q_rank, int32_t k_rank) const {
  std::vector<TokenRange> needed, joined;
  for (const ContextStep& s : steps_between(q_rank, k_rank)) needed.push_back(s.k);
  std::sort(needed.begin(), needed.end(), [](const TokenRange& a, const TokenRange& b) {
    return std::tie(a.document, a.begin) < std::tie(b.document, b.begin);
  });
  for (const TokenRange& k : needed) {
    TokenRange* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->document == k.document && k.begin <= last->position(last->count)) {
      last->count = std::max(last->count, (k.end() - 1 - last->begin) / last->stride + 1);
    } else {
      joined.push_back(k);
    }
  }
  return joined;
}

ContextPlan ContextPlan::on_one_rank() const {
  ContextPlan plan;
  // The same documents and mask have passed the checks before.
  (void)make_context_plan({documents_, window_left_, window_right_, block_mask_, 1, LayoutKind::contiguous, chunk_},
                          &plan);
  return plan;
}

int64_t ContextPlan::pairs(int32_t rank) const {
  int64_t sum = 0;
  for (const Shard& q : queries().shards(rank)) {
    const DocumentMask mask = mask_of(q.tokens.document);
    const int64_t k_len = documents_[static_cast<size_t>(q.tokens.document)].k_len;
    if (mask.blocks == nullptr) {
      sum += count_pairs(mask.band, q.tokens, k_len);
      continue;
    }
    const int32_t stride = q.tokens.stride;
    for (int32_t k = 0; k < stride && k < k_len; ++k) {
      sum += visible_rect(mask, q.tokens, {q.tokens.document, stride, k, ceil_div(k_len - k, stride)}).pairs;
    }
  }
  return sum;
}

uint64_t ContextPlan::hash() const {
  WordHash hash;
  for (const int64_t word : {int64_t{ranks()}, static_cast<int64_t>(layout_), chunk_, window_left_, window_right_,
                             block_mask_.block_q, block_mask_.block_k, static_cast<int64_t>(documents_.size())}) {
    hash.add(word);
  }
  for (const PackedDocument& d : documents_) {
    hash.add(d.q_len);
    hash.add(d.k_len);
    hash.add(d.diagonal);
  }
  for (const int64_t offset : block_mask_.row_begin) hash.add(offset);
  for (const int32_t block : block_mask_.key_blocks) hash.add(int64_t{block});
  for (const uint8_t full : block_mask_.full) hash.add(int64_t{full});
  return hash.value();
}

Status ContextPlan::check_shard(int32_t rank, int64_t q_rows, int64_t k_rows) const {
  if (rank < 0 || rank >= ranks()) {
    return Status::invalid(str_cat("rank (", rank, ") must be below ", ranks(), ": pass the rank in the plan's group"));
  }
  const auto refuse = [&](const char* name, int64_t rows, int64_t own) {
    return Status::invalid(str_cat(name, " rows (", rows, ") must be the ", own, " of rank ", rank,
                                   " in this plan: ", "shard the batch by the plan's layout"));
  };
  if (q_rows != queries_.tokens(rank)) return refuse("q", q_rows, queries_.tokens(rank));
  if (k_rows != keys().tokens(rank)) return refuse("k", k_rows, keys().tokens(rank));
  return {};
}

DocumentMask ContextPlan::mask_of(int32_t document) const {
  const auto d = static_cast<size_t>(document);
  const int64_t diagonal = documents_[d].diagonal;
  KeyBand band;
  if (window_left_ != TANDEM_UNBOUNDED) band.low = std::max(-kFar, diagonal - std::clamp(window_left_, -kFar, kFar));
  if (window_right_ != TANDEM_UNBOUNDED) band.high = std::min(kFar, diagonal + std::clamp(window_right_, -kFar, kFar));
  return {band, block_mask_ ? &block_mask_ : nullptr, block_mask_ ? first_rows_[d] : 0};
}

void ContextPlan::append_steps(std::span<const Shard> q, std::span<const Shard> k,
                               std::vector<ContextStep>& steps) const {
  while (!q.empty() && !k.empty()) {
    const int32_t q_document = q[0].tokens.document, k_document = k[0].tokens.document;
    const std::span<const Shard> queries = first_document(q), keys = first_document(k);
    if (q_document <= k_document) q = q.subspan(queries.size());
    if (k_document <= q_document) k = k.subspan(keys.size());
    if (q_document != k_document) continue;
    const DocumentMask mask = mask_of(q_document);
    for (const Shard& each : queries) {
      const int64_t first = each.tokens.begin + mask.band.low, last = each.tokens.end() - 1 + mask.band.high;
      auto shard =
          std::partition_point(keys.begin(), keys.end(), [&](const Shard& s) { return s.tokens.end() <= first; });
      for (; shard != keys.end() && shard->tokens.begin <= last; ++shard) {
        const VisibleRect rect = visible_rect(mask, each.tokens, shard->tokens);
        if (rect.pairs > 0) steps.push_back(make_step(each, *shard, rect));
      }
    }
  }
}

ContextStep ContextPlan::make_step(const Shard& q, const Shard& k, VisibleRect rect) const {
  // With chunks a step is one call, so its rows begin at a block if chunks do.
  if (block_mask_ && chunk_ > 0 && chunk_ % block_mask_.block_q == 0 && chunk_ % block_mask_.block_k == 0) {
    rect.q_begin -= rect.q_begin % block_mask_.block_q;
    rect.k_begin -= rect.k_begin % block_mask_.block_k;
  }
  ContextStep step;
  step.q = q.tokens.part(rect.q_begin, rect.q_end - rect.q_begin);
  step.k = k.tokens.part(rect.k_begin, rect.k_end - rect.k_begin);
  step.rank = q.rank;
  step.peer = k.rank;
  step.round = q.rank >= k.rank ? q.rank - k.rank : q.rank - k.rank + ranks();
  step.key_order = chunk_ > 0 ? k.tokens.begin / chunk_ : k.tokens.begin;
  step.query_order = chunk_ > 0 ? q.tokens.begin / chunk_ : q.tokens.begin;
  step.pairs = rect.pairs;
  const int64_t diagonal = documents_[static_cast<size_t>(q.tokens.document)].diagonal;
  step.diagonal = floor_div(step.q.begin - step.k.begin + diagonal, step.q.stride);
  if (rect.pairs == step.q.count * step.k.count) return step;
  step.mask = block_mask_ ? StepMask::blocks : StepMask::band;
  const KeyBand band = mask_of(q.tokens.document).band.local(step.q, step.k);
  if (step.q.count - 1 + band.low > 0) step.window_left = step.diagonal - band.low;
  if (band.high < step.k.count - 1) step.window_right = band.high - step.diagonal;
  return step;
}

}  // namespace tandem::context_parallel
