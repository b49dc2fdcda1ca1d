#include "context_parallel/layout.h"

#include <tuple>

namespace tandem::context_parallel {
namespace {

// Cuts the packed sequence into equal pieces, up to a token. Zigzag: rank r owns the pieces r and 2 * ranks - 1 - r.
std::vector<PackedCut> equal_cuts(LayoutKind kind, int32_t ranks, const PackedTokens& tokens) {
  const int64_t pieces = kind == LayoutKind::zigzag ? 2 * int64_t{ranks} : ranks;
  std::vector<PackedCut> cuts;
  cuts.reserve(static_cast<size_t>(pieces));
  int64_t begin = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t end = tokens.nearest_cut(tokens.total() * (i + 1) / pieces);
    if (begin < end) cuts.push_back({begin, end, static_cast<int32_t>(std::min(i, 2 * int64_t{ranks} - 1 - i))});
    begin = end;
  }
  return cuts;
}

}  // namespace

const char* name_of(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::contiguous: return "contiguous";
    case LayoutKind::zigzag: return "zigzag";
    case LayoutKind::per_document: return "per document";
    case LayoutKind::striped: return "striped";
    case LayoutKind::balanced: return "balanced";
  }
  return "";
}

int64_t PackedTokens::nearest_cut(int64_t packed) const {
  if (chunk == 0 || packed >= total()) return packed;
  const auto next = std::upper_bound(starts.begin(), starts.end(), packed);
  const int64_t start = next[-1], low = start + (packed - start) / chunk * chunk;
  const int64_t high = std::min(low + chunk, *next);
  return packed - low <= high - packed ? low : high;
}

ShardLayout::ShardLayout(LayoutKind kind, int32_t ranks, const PackedTokens& tokens, std::vector<PackedCut> balanced)
    : kind_(kind), ranks_(ranks), chunk_(tokens.chunk), starts_(tokens.starts.begin(), tokens.starts.end()) {
  if (kind == LayoutKind::per_document || kind == LayoutKind::striped) return;
  cuts_ = kind == LayoutKind::balanced ? std::move(balanced) : equal_cuts(kind, ranks, tokens);
  std::sort(cuts_.begin(), cuts_.end(), [](const PackedCut& a, const PackedCut& b) {
    return std::tie(a.rank, a.begin) < std::tie(b.rank, b.begin);
  });
  rank_begin_.assign(static_cast<size_t>(ranks) + 1, 0);
  for (const PackedCut& c : cuts_) ++rank_begin_[static_cast<size_t>(c.rank) + 1];
  for (size_t r = 1; r < rank_begin_.size(); ++r) rank_begin_[r] += rank_begin_[r - 1];
}

std::vector<Shard> ShardLayout::shards(int32_t rank) const {
  std::vector<Shard> shards;
  if (cuts_.empty()) shards.reserve(2 * starts_.size());
  int64_t first = 0;
  for_each_run(rank, [&](const TokenRange& run) {
    Shard* last = shards.empty() ? nullptr : &shards.back();
    if (chunk_ == 0 && run.stride == 1 && last != nullptr && last->tokens.document == run.document &&
        last->tokens.end() == run.begin) {
      last->tokens.count += run.count;
      first += run.count;
      return;
    }
    const int64_t most = chunk_ > 0 ? chunk_ : run.count;
    for (int64_t n = 0; n < run.count; n += most) {
      const int64_t count = std::min(most, run.count - n);
      shards.push_back({run.part(n, count), rank, first});
      first += count;
    }
  });
  return shards;
}

int64_t ShardLayout::tokens(int32_t rank) const {
  int64_t sum = 0;
  for_each_run(rank, [&](const TokenRange& run) { sum += run.count; });
  return sum;
}

TokenPlace ShardLayout::place(int32_t document, int64_t position) const {
  const int32_t rank = owner(document, position);
  int64_t local = 0;
  for_each_run(rank, [&](const TokenRange& run) {
    if (run.document > document || (run.document == document && run.begin > position)) return;
    const bool inside = run.document == document && position < run.end();
    local += inside ? (position - run.begin) / run.stride : run.count;
  });
  return {rank, local};
}

TokenPosition ShardLayout::token(int32_t rank, int64_t local) const {
  TokenPosition found;
  for_each_run(rank, [&](const TokenRange& run) {
    if (local >= 0 && local < run.count) found = {run.document, run.position(local)};
    local -= run.count;
  });
  return found;
}

int32_t ShardLayout::owner(int32_t document, int64_t position) const {
  if (kind_ == LayoutKind::striped) return static_cast<int32_t>((chunk_ > 0 ? position / chunk_ : position) % ranks_);
  if (kind_ == LayoutKind::per_document) {
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      bool owns = false;
      for_each_run_of(document, rank,
                      [&](const TokenRange& run) { owns = owns || (run.begin <= position && position < run.end()); });
      if (owns) return rank;
    }
  }
  const int64_t packed = starts_[static_cast<size_t>(document)] + position;
  for (const PackedCut& c : cuts_) {
    if (c.begin <= packed && packed < c.end) return c.rank;
  }
  return 0;
}

template <class Visit>
void ShardLayout::for_each_run(int32_t rank, Visit&& visit) const {
  const auto documents = static_cast<int32_t>(starts_.size()) - 1;
  if (kind_ == LayoutKind::per_document || kind_ == LayoutKind::striped) {
    for (int32_t d = 0; d < documents; ++d) for_each_run_of(d, rank, visit);
    return;
  }
  for (size_t n = rank_begin_[static_cast<size_t>(rank)]; n < rank_begin_[static_cast<size_t>(rank) + 1]; ++n) {
    const PackedCut& cut = cuts_[n];
    auto d = std::upper_bound(starts_.begin(), starts_.end(), cut.begin) - starts_.begin() - 1;
    for (int64_t begin = cut.begin; begin < cut.end; ++d) {
      const int64_t start = starts_[static_cast<size_t>(d)];
      const int64_t end = std::min(cut.end, starts_[static_cast<size_t>(d) + 1]);
      if (begin < end) visit(TokenRange{static_cast<int32_t>(d), 1, begin - start, end - begin});
      begin = end;
    }
  }
}

template <class Visit>
void ShardLayout::for_each_run_of(int32_t document, int32_t rank, Visit&& visit) const {
  const auto d = static_cast<size_t>(document);
  const int64_t length = starts_[d + 1] - starts_[d];
  if (kind_ == LayoutKind::per_document) {
    const int64_t bounds[] = {0, length};
    const PackedTokens inside{bounds, chunk_};
    const int64_t pieces = 2 * int64_t{ranks_};
    for (const int64_t i : {int64_t{rank}, pieces - 1 - rank}) {
      const int64_t begin = inside.nearest_cut(length * i / pieces);
      const int64_t end = inside.nearest_cut(length * (i + 1) / pieces);
      if (begin < end) visit(TokenRange{document, 1, begin, end - begin});
    }
  } else if (chunk_ > 0) {
    for (int64_t begin = rank * chunk_; begin < length; begin += ranks_ * chunk_) {
      visit(TokenRange{document, 1, begin, std::min(chunk_, length - begin)});
    }
  } else if (rank < length) {
    visit(TokenRange{document, ranks_, rank, ceil_div(length - rank, ranks_)});
  }
}

}  // namespace tandem::context_parallel
