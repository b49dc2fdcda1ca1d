#include <algorithm>
#include <cmath>
#include <map>

#include "base/text.h"
#include "context_parallel/execution.h"
#include "context_parallel/transport.h"
#include "context_parallel/tree_sum.h"
#include "problem/convert.h"

namespace tandem::context_parallel {
namespace {

using HeadSums = std::vector<double>;

void add_head_sums(const HeadSums& from, HeadSums& to) {
  for (size_t h = 0; h < to.size(); ++h) to[h] += from[h];
}

// The sum over a run of rows, for each head.
HeadSums sum_on_host(const Problem& p, int64_t first, int64_t rows) {
  HeadSums sums(static_cast<size_t>(p.heads_q), 0.0);
  for (int64_t i = first; i < first + rows; ++i) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      const double sink = load(p.sink.dtype, p.sink.at(0, h)), lse = load(p.lse.dtype, p.lse.at(0, i, h));
      if (sink == -INFINITY) continue;
      double gradient = p.dlse ? load(p.dlse.dtype, p.dlse.at(0, i, h)) : 0;
      for (int64_t c = 0; c < p.head_dim_v; ++c) {
        gradient -= load(p.dout.dtype, p.dout.at(0, i, h) + c * size_of(p.dout.dtype)) *
                    load(p.out.dtype, p.out.at(0, i, h) + c * size_of(p.out.dtype));
      }
      sums[static_cast<size_t>(h)] += std::exp(sink - lse) * gradient;
    }
  }
  return sums;
}

// The same on a GPU, in float32: the backward of the rows over no keys.
Status sum_on_gpu(const ShardCall& call, int64_t first, int64_t rows, HeadSums* sums) {
  std::vector<float> values(static_cast<size_t>(call.problem.heads_q), 0.0f);
  RowBuffer dsink(call.engine, kSumType, {1, call.problem.heads_q, 1});
  TANDEM_TRY(dsink.clear());
  const View results = dsink.view();
  if (rows > 0) {
    StepRunner runner(call);
    Problem p = runner.problem_of({}, first, from_row(call.problem.k, 0), from_row(call.problem.v, 0));
    p.seqlen_q = p.total_q = rows;
    p.alibi_slopes = {};
    p.sink = call.problem.sink;
    p.dsink = {.data = results.data, .dtype = kSumType, .head = 1, .present = true};
    TANDEM_TRY(runner.run(p));
  }
  gpu::Device& device = call.engine.pool->device();
  TANDEM_TRY(device.copy_to_host(values.data(), results.data, values.size() * sizeof(float), call.engine.stream));
  TANDEM_TRY(device.synchronize(call.engine.stream));
  sums->assign(values.begin(), values.end());
  return {};
}

// The sums of a rank: of each chunk of queries, or of all rows.
Status sum_own_rows(const ShardCall& call, std::vector<double>* sums) {
  const auto append = [&](int64_t first, int64_t rows) -> Status {
    HeadSums part;
    if (call.engine.pool == nullptr) {
      part = sum_on_host(call.problem, first, rows);
    } else {
      TANDEM_TRY(sum_on_gpu(call, first, rows, &part));
    }
    sums->insert(sums->end(), part.begin(), part.end());
    return {};
  };
  if (call.plan->chunk() == 0) return append(0, call.plan->queries().tokens(call.rank));
  for (const Shard& s : call.plan->queries().shards(call.rank)) TANDEM_TRY(append(s.first, s.tokens.count));
  return {};
}

// Merges the chunks of each document by the tree, and then the documents in their order.
Status merge_chunks(const ContextPlan& plan, std::map<std::pair<int32_t, int64_t>, HeadSums> chunks, HeadSums* sums) {
  for (auto chunk = chunks.begin(); chunk != chunks.end();) {
    const int32_t document = chunk->first.first;
    const int64_t q_len = plan.documents()[static_cast<size_t>(document)].q_len;
    std::vector<int64_t> leaves;
    for (int64_t n = 0; n * plan.chunk() < q_len; ++n) leaves.push_back(n);
    TreeSum<HeadSums> tree(std::move(leaves));
    for (; chunk != chunks.end() && chunk->first.first == document; ++chunk) {
      TANDEM_TRY(tree.add({0, chunk->first.second}, std::move(chunk->second), [](HeadSums& left, HeadSums& right) {
        add_head_sums(right, left);
        return Status{};
      }));
    }
    add_head_sums(tree.nodes().begin()->second.value, *sums);
  }
  return {};
}

Status write_dsink(const ShardCall& call, const HeadSums& sums) {
  const HeadView& dsink = call.problem.dsink;
  if (call.engine.pool == nullptr) {
    for (size_t h = 0; h < sums.size(); ++h) store(dsink.dtype, dsink.at(0, static_cast<int64_t>(h)), sums[h]);
    return {};
  }
  const std::vector<float> values(sums.begin(), sums.end());
  RowBuffer rows(call.engine, kSumType, {1, call.problem.heads_q, 1});
  TANDEM_TRY(rows.write(values.data()));
  const View to{.data = dsink.data, .dtype = dsink.dtype, .head = dsink.head, .present = true};
  return call.engine.copy(rows.view(), to, rows.shape());
}

}  // namespace

Status sum_dsink(const ShardCall& call) {
  const Problem& p = call.problem;
  if (!p.dsink) return {};
  const ContextPlan& plan = *call.plan;
  const auto heads = static_cast<size_t>(p.heads_q);
  std::vector<size_t> units(static_cast<size_t>(plan.ranks()), 1);
  if (plan.chunk() > 0) {
    for (int32_t r = 0; r < plan.ranks(); ++r) units[static_cast<size_t>(r)] = plan.queries().shards(r).size();
  }
  const size_t most = *std::max_element(units.begin(), units.end());
  std::vector<double> own, all;
  TANDEM_TRY(sum_own_rows(call, &own));
  own.resize(most * heads);
  TANDEM_TRY(all_gather(*call.transport, std::span<const double>(own), &all));
  HeadSums sums(heads, 0.0);
  std::map<std::pair<int32_t, int64_t>, HeadSums> chunks;
  for (int32_t r = 0; r < plan.ranks(); ++r) {
    const std::vector<Shard> shards = plan.queries().shards(r);
    for (size_t n = 0; n < units[static_cast<size_t>(r)]; ++n) {
      const auto at = all.begin() + static_cast<ptrdiff_t>((static_cast<size_t>(r) * most + n) * heads);
      const HeadSums part(at, at + static_cast<ptrdiff_t>(heads));
      if (plan.chunk() == 0) add_head_sums(part, sums);
      if (plan.chunk() > 0) chunks[{shards[n].tokens.document, shards[n].tokens.begin / plan.chunk()}] = part;
    }
  }
  TANDEM_TRY(merge_chunks(plan, std::move(chunks), &sums));
  return write_dsink(call, sums);
}

}  // namespace tandem::context_parallel
