#include <algorithm>
#include <deque>

#include "base/text.h"
#include "context_parallel/bias.h"
#include "context_parallel/execution.h"
#include "context_parallel/heads.h"
#include "context_parallel/transport.h"

namespace tandem::context_parallel {
namespace {

// A tensor of this rank's tokens with all heads, and of all tokens with this rank's heads.
struct MovedTensor {
  View shard, whole;
  bool of_keys = false;
  int64_t dim = 1;
  bool adds = false;  // to_tokens() adds to the shard
  // A bias of all heads: every message has its one head, or its gradient is the sum of the heads of all messages.
  bool has_one_head = false, sums_heads = false;
};

// Moves tensors between the two divisions. A message has the rows of one rank and the heads of another.
class HeadExchange {
 public:
  explicit HeadExchange(const ShardCall& call) : call_(call) {
    int64_t q = 0, k = 0;
    for (const PackedDocument& d : call.plan->documents()) {
      q_starts_.push_back(q);
      k_starts_.push_back(k);
      q += d.q_len;
      k += d.k_len;
    }
    q_rows_ = q;
    k_rows_ = k;
    for (int32_t r = 0; r < call.plan->ranks(); ++r)
      shares_.push_back(share_of(*call.plan, call.problem.heads_q, call.problem.heads_k, r));
  }

  const HeadShare& own() const { return shares_[static_cast<size_t>(call_.rank)]; }
  static int64_t heads_of(const MovedTensor& t, const HeadShare& share) {
    if (t.of_keys) return share.k_heads();
    return t.has_one_head ? std::min<int64_t>(1, share.q_heads()) : share.q_heads();
  }
  int64_t rows(bool of_keys) const { return of_keys ? k_rows_ : q_rows_; }

  Status to_heads(const std::vector<MovedTensor>& tensors) { return move(tensors, true); }
  Status to_tokens(const std::vector<MovedTensor>& tensors) { return move(tensors, false); }

 private:
  Status move(const std::vector<MovedTensor>& tensors, bool from_shards) {
    Messages messages;
    RowMemory own;
    for (int32_t peer = 0; peer < call_.plan->ranks(); ++peer) {
      int64_t sent = 0, received = 0;
      for (const MovedTensor& t : tensors) {
        (from_shards ? sent : received) += shard_shape(t, peer).bytes(t.shard.dtype);
        (from_shards ? received : sent) += whole_shape(t, peer).bytes(t.whole.dtype);
      }
      RowMemory bytes(call_.engine, sent);
      TANDEM_TRY(copy(tensors, peer, from_shards, true, bytes.data()));
      if (peer == call_.rank) {
        own = std::move(bytes);
      } else {
        messages.sends.emplace_back(peer, std::move(bytes));
        messages.receives.emplace_back(peer, RowMemory(call_.engine, received));
      }
    }
    Exchange exchange;
    TANDEM_TRY(exchange.start(*call_.transport, std::move(messages)));
    TANDEM_TRY(exchange.wait());
    // Parts that are added have the order of the ranks, which is the order of the heads.
    auto& received = exchange.received();
    received.insert(received.begin() + call_.rank, {call_.rank, std::move(own)});
    for (auto& [peer, bytes] : received) TANDEM_TRY(copy(tensors, peer, !from_shards, false, bytes.data()));
    return {};
  }

  // Copies the part of each tensor for a peer to or from a message.
  Status copy(const std::vector<MovedTensor>& tensors, int32_t peer, bool shards, bool to_message,
              std::byte* at) const {
    for (const MovedTensor& t : tensors) {
      TANDEM_TRY(shards ? copy_shard(t, peer, at, to_message) : copy_whole(t, peer, at, to_message));
      at += (shards ? shard_shape(t, peer) : whole_shape(t, peer)).bytes(t.shard.dtype);
    }
    return {};
  }

  // The rows of this rank and the heads of a peer.
  RowShape shard_shape(const MovedTensor& t, int32_t peer) const {
    return {layout_of(t).tokens(call_.rank), heads_of(t, shares_[static_cast<size_t>(peer)]), t.dim};
  }
  // The rows of a peer and the heads of this rank.
  RowShape whole_shape(const MovedTensor& t, int32_t peer) const {
    return {layout_of(t).tokens(peer), heads_of(t, own()), t.dim};
  }
  const ShardLayout& layout_of(const MovedTensor& t) const {
    return t.of_keys ? call_.plan->keys() : call_.plan->queries();
  }

  Status copy_shard(const MovedTensor& t, int32_t peer, std::byte* at, bool to_message) const {
    const HeadShare& share = shares_[static_cast<size_t>(peer)];
    const RowShape shape = shard_shape(t, peer);
    if (shape.bytes(t.shard.dtype) == 0) return {};
    const View message = compact_view(at, t.shard.dtype, shape);
    if (t.sums_heads) return add_heads(call_.engine, message, t.shard, shape);
    const int64_t head = t.has_one_head ? 0 : t.of_keys ? share.k_begin() : share.q_begin();
    const View shard = from_head(t.shard, head);
    if (to_message) return call_.engine.copy(shard, message, shape);
    return t.adds ? call_.engine.add(message, shard, shape) : call_.engine.copy(message, shard, shape);
  }

  Status copy_whole(const MovedTensor& t, int32_t peer, std::byte* at, bool to_message) const {
    RowShape shape = whole_shape(t, peer);
    if (shape.bytes(t.whole.dtype) == 0) return {};
    const View message = compact_view(at, t.whole.dtype, shape);
    for (const Shard& run : layout_of(t).shards(peer)) {
      const int64_t start = (t.of_keys ? k_starts_ : q_starts_)[static_cast<size_t>(run.tokens.document)];
      View whole = from_row(t.whole, start + run.tokens.begin);
      whole.row *= run.tokens.stride;
      shape.rows = run.tokens.count;
      const View part = from_row(message, run.first);
      TANDEM_TRY(call_.engine.copy(to_message ? whole : part, to_message ? part : whole, shape));
    }
    return {};
  }

  const ShardCall& call_;
  std::vector<int64_t> q_starts_, k_starts_;
  int64_t q_rows_ = 0, k_rows_ = 0;
  std::vector<HeadShare> shares_;
};

// One call on this rank's heads. `whole_` has all tokens, as one rank would hold them.
class HeadsRun {
 public:
  explicit HeadsRun(const ShardCall& call) : call_(call), exchange_(call), whole_(call.problem) {}

  Status run() {
    const Problem& p = call_.problem;
    add(&Problem::q, p.q, p.head_dim, &inputs_);
    add(&Problem::k, p.k, p.head_dim, &inputs_);
    add(&Problem::v, p.v, p.head_dim_v, &inputs_);
    if (p.bias) add_bias();
    if (p.pass == TANDEM_FORWARD) {
      TANDEM_TRY(to_heads());
      add(&Problem::out, p.out, p.head_dim_v, &outputs_);
      add(&Problem::lse, p.lse, 1, &outputs_);
      TANDEM_TRY(compute());
      return exchange_.to_tokens(outputs_);
    }
    add(&Problem::out, p.out, p.head_dim_v, &inputs_);
    add(&Problem::lse, p.lse, 1, &inputs_);
    add(&Problem::dout, p.dout, p.head_dim_v, &inputs_);
    add(&Problem::dlse, p.dlse, 1, &inputs_);
    TANDEM_TRY(to_heads());
    // Ranks that share a key head each have a part of its gradient.
    const int64_t rows = call_.plan->keys().tokens(call_.rank);
    RowBuffer dk(call_.engine, kSumType, call_.k_shape(rows)), dv(call_.engine, kSumType, call_.v_shape(rows));
    TANDEM_TRY(dk.clear());
    TANDEM_TRY(dv.clear());
    add(&Problem::dk, dk.view(), p.head_dim, &outputs_);
    add(&Problem::dv, dv.view(), p.head_dim_v, &outputs_);
    add(&Problem::dq, p.dq, p.head_dim, &outputs_);
    RowBuffer dbias;
    TANDEM_TRY(add_bias_gradient(&dbias));
    TANDEM_TRY(compute());
    align(&outputs_);
    TANDEM_TRY(exchange_.to_tokens(outputs_));
    if (dbias.shape().rows > 0) TANDEM_TRY(call_.engine.copy(dbias.view(), rows_of(p.dbias), dbias.shape()));
    TANDEM_TRY(call_.engine.copy(dk.view(), p.dk, dk.shape()));
    return call_.engine.copy(dv.view(), p.dv, dv.shape());
  }

 private:
  // Adds a tensor that moves, if the call has it.
  void add(View Problem::*member, const View& shard, int64_t dim, std::vector<MovedTensor>* list) {
    if (!shard) return;
    const bool sums = member == &Problem::dk || member == &Problem::dv;
    const bool of_keys = sums || member == &Problem::k || member == &Problem::v;
    const HeadShare& own = exchange_.own();
    const int64_t heads = of_keys ? own.k_heads() : own.q_heads();
    buffers_.push_back(RowBuffer(call_.engine, shard.dtype, {exchange_.rows(of_keys), heads, dim}));
    whole_.*member = buffers_.back().view();
    list->push_back({shard, whole_.*member, of_keys, dim, sums});
  }

  // Adds the bias with its rows of all tokens. A bias of all heads stays one head.
  void add_bias() {
    const BiasView& bias = call_.problem.bias;
    MovedTensor moved{rows_of(bias), {}, false, bias.shape[3], false, bias.shape[1] == 1, false};
    const int64_t heads = HeadExchange::heads_of(moved, exchange_.own());
    buffers_.push_back(RowBuffer(call_.engine, bias.dtype, {exchange_.rows(false), heads, moved.dim}));
    moved.whole = buffers_.back().view();
    whole_.bias = bias_over(moved.whole, buffers_.back().shape());
    inputs_.push_back(moved);
  }

  // Adds dbias. A bias of all heads has one gradient a head, which to_tokens() adds to `sum`.
  Status add_bias_gradient(RowBuffer* sum) {
    const BiasView& dbias = call_.problem.dbias;
    if (!dbias) return {};
    MovedTensor moved{rows_of(dbias), {}, false, dbias.shape[3]};
    moved.sums_heads = dbias.shape[1] == 1 && call_.problem.heads_q > 1;
    if (moved.sums_heads) {
      *sum = RowBuffer(call_.engine, kSumType, shape_of(dbias));
      TANDEM_TRY(sum->clear());
      moved.shard = sum->view();
    }
    const int64_t heads = exchange_.own().q_heads();
    buffers_.push_back(RowBuffer(call_.engine, moved.shard.dtype, {exchange_.rows(false), heads, moved.dim}));
    moved.whole = buffers_.back().view();
    whole_.dbias = bias_over(moved.whole, buffers_.back().shape());
    outputs_.push_back(moved);
    return {};
  }

  // Larger elements come first in a message, so that all are aligned.
  static void align(std::vector<MovedTensor>* tensors) {
    std::stable_sort(tensors->begin(), tensors->end(), [](const MovedTensor& a, const MovedTensor& b) {
      return size_of(a.shard.dtype) > size_of(b.shard.dtype);
    });
  }

  Status to_heads() {
    align(&inputs_);
    return exchange_.to_heads(inputs_);
  }

  Status compute() {
    const ContextPlan plan = call_.plan->on_one_rank();
    for (const HeadRun& run : exchange_.own().runs) {
      ShardCall call = call_;
      call.plan = &plan;
      call.rank = 0;
      call.problem = problem_of(run);
      call.transport = nullptr;
      call.first_head = run.q_begin;
      TANDEM_TRY(call.problem.pass == TANDEM_FORWARD ? forward_by_rounds(call, 1) : backward_by_rounds(call, 1));
    }
    return {};
  }

  Problem problem_of(const HeadRun& run) const {
    const int64_t q = exchange_.own().q_begin(), k = exchange_.own().k_begin();
    Problem p = whole_;
    p.seqlen_q = p.total_q = exchange_.rows(false);
    p.seqlen_k = p.total_k = exchange_.rows(true);
    p.sink = from_head(p.sink, run.q_begin);
    p.alibi_slopes = from_head(p.alibi_slopes, q);
    return heads_of(p, {run.q_begin - q, run.q_end - q, run.k_begin - k, run.k_end - k});
  }

  const ShardCall& call_;
  HeadExchange exchange_;
  Problem whole_;
  std::deque<RowBuffer> buffers_;
  std::vector<MovedTensor> inputs_, outputs_;
};

}  // namespace

Status run_by_heads(const ShardCall& call) { return HeadsRun(call).run(); }

}  // namespace tandem::context_parallel
