#include "ranks/shards.h"

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "context_parallel/rows.h"
#include "problem/bound_expression.h"
#include "problem/convert.h"
#include "ranks/group.h"

namespace tandem::test {
namespace {

using context_parallel::from_row;
using context_parallel::RowBuffer;
using context_parallel::RowShape;

const context_parallel::RowEngine kHost;  // only allocates

void copy_rows(const View& from, const View& to, const RowShape& s) {
  const auto bytes = static_cast<size_t>(s.dim * size_of(from.dtype));
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) std::memcpy(to.at(0, row, head), from.at(0, row, head), bytes);
  }
}

void fill_with_nan(const View& v, const RowShape& s) {
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) {
      for (int64_t c = 0; c < s.dim; ++c) store(v.dtype, v.at(0, row, head) + c * size_of(v.dtype), NAN);
    }
  }
}

// Calls use(i, j, k, l) for the elements of a tensor.
template <class Use>
void for_elements(const BiasView& v, Use&& use) {
  for (int64_t i = 0; i < v.shape[0] * v.shape[1]; ++i) {
    for (int64_t j = 0; j < v.shape[2] * v.shape[3]; ++j) {
      use(i / v.shape[1], i % v.shape[1], j / v.shape[3], j % v.shape[3]);
    }
  }
}

tandem_dtype c_dtype(DType t) {
  if (t == DType::boolean) return {TANDEM_BOOL, 8, 1};
  const auto bits = static_cast<uint8_t>(8 * size_of(t));
  return {static_cast<uint8_t>(t == DType::bf16 ? TANDEM_BFLOAT : TANDEM_FLOAT), bits, 1};
}

// The tokens of a rank and the copies of their rows.
class Shards {
 public:
  Shards(const Problem& p, const tandem_cp_plan* plan, int32_t rank) : p_(p) {
    int64_t rows[2];
    check(tandem_cp_plan_rows(plan, rank, &rows[0], &rows[1]));
    for (int32_t keys = 0; keys < 2; ++keys) {
      documents_[keys].resize(static_cast<size_t>(rows[keys]));
      positions_[keys].resize(static_cast<size_t>(rows[keys]));
      check(tandem_cp_plan_tokens(plan, rank, keys, documents_[keys].data(), positions_[keys].data()));
    }
    args.size = sizeof args;
    args.softmax_scale = p.softmax_scale;
    args.softcap = p.softcap;
    const int64_t d = p.head_dim, dv = p.head_dim_v;
    args.q = input(p.q, false, d);
    args.k = input(p.k, true, d);
    args.v = input(p.v, true, dv);
    const bool forward = p.pass == TANDEM_FORWARD;
    args.out = forward ? output(p.out, false, dv) : input(p.out, false, dv);
    args.lse = forward ? output(p.lse, false, 0) : input(p.lse, false, 0);
    args.dout = input(p.dout, false, dv);
    args.dlse = input(p.dlse, false, 0);
    args.dq = output(p.dq, false, d);
    args.dk = output(p.dk, true, d);
    args.dv = output(p.dv, true, dv);
    args.sink = heads(p.sink, 1);
    args.dsink = heads(p.dsink, 1);
    args.bias = bias(p.bias, true);
    args.dbias = bias(p.dbias, false);
    args.alibi_slopes = heads(p.alibi_slopes, p.alibi_slopes.batch != 0 ? p.batch : 1);
  }

  // Gives this rank its own gradients of score_mod's tensors, whose elements have gaps between them.
  void own_captured() {
    if (args.score_mod == nullptr || !p_.score_mod || p_.score_mod->cells == 0) return;
    mod_ = *args.score_mod;
    mod_tensors_.assign(mod_.tensors, mod_.tensors + mod_.tensor_count);
    for (size_t n = 0; n < mod_tensors_.size(); ++n) {
      BiasView own = p_.score_mod->gradients[n].to;
      if (!own) continue;
      const int rank = mod_tensors_[n].tensor->ndim;
      int64_t end = 2;
      for (int dim = rank - 1; dim >= 0; --dim) {
        own.stride[dim] = end;
        end = end * own.shape[dim] + 1;
      }
      buffers_.emplace_back(kHost, own.dtype, RowShape{end, 1, 1});
      fill_with_nan(buffers_.back().view(), buffers_.back().shape());
      own.data = buffers_.back().view().data;
      captured_[n] = own;
      sizes_.emplace_back(own.shape, own.shape + rank);
      sizes_.back().insert(sizes_.back().end(), own.stride, own.stride + rank);
      mod_tensors_[n].gradient = add(own.data, own.dtype);
    }
    mod_.tensors = mod_tensors_.data();
    args.score_mod = &mod_;
  }

  // Copies the results to the problem.
  void collect() {
    if (p_.dbias) copy_bias(p_.dbias, false);
    for (auto& [view, buffer, keys] : outputs_) copy(view, buffer->view(), keys, buffer->shape(), false);
    static std::mutex mutex;  // all ranks copy whole gradients to the same places
    const std::lock_guard lock(mutex);
    collect_captured();
    for (int64_t h = 0; p_.dsink && h < p_.heads_q; ++h) {
      const View from = dsink_->view();
      std::memcpy(p_.dsink.at(0, h), from.at(0, 0, h), static_cast<size_t>(size_of(from.dtype)));
    }
  }

  static void check(tandem_status status) {
    if (status != TANDEM_OK) throw std::runtime_error(tandem_last_error());
  }

  tandem_attention_args args{};

 private:
  struct Output {
    View view;
    RowBuffer* buffer;
    bool keys;
  };

  void copy(const View& whole, const View& shard, bool keys, RowShape shape, bool to_shard) {
    shape.rows = 1;
    for (size_t row = 0; row < documents_[keys].size(); ++row) {
      const Sequence s = sequence_of(p_, documents_[keys][row]);
      View at = from_row(whole, (keys ? s.k_begin : s.q_begin) + positions_[keys][row]);
      at.data += s.batch_index * whole.batch * size_of(whole.dtype);
      const View part = from_row(shard, static_cast<int64_t>(row));
      copy_rows(to_shard ? at : part, to_shard ? part : at, shape);
    }
  }

  // dim 0: a log-sum-exp, (heads, rows).
  const tandem_tensor* allocate(const View& whole, bool keys, int64_t dim) {
    const int64_t rows = std::ssize(documents_[keys]), heads = keys ? p_.heads_k : p_.heads_q;
    buffers_.emplace_back(kHost, whole.dtype, RowShape{rows, heads, std::max<int64_t>(dim, 1)});
    const View v = buffers_.back().view();
    sizes_.push_back(dim > 0 ? std::vector<int64_t>{rows, heads, dim, v.row, v.head, 1}
                             : std::vector<int64_t>{heads, rows, v.head, v.row});
    return add(v.data, whole.dtype);
  }
  const tandem_tensor* add(std::byte* data, DType dtype) {
    std::vector<int64_t>& sizes = sizes_.back();
    const auto ndim = static_cast<int32_t>(sizes.size() / 2);
    tensors_.push_back({data, {TANDEM_CPU, 0}, ndim, c_dtype(dtype), sizes.data(), sizes.data() + ndim, 0});
    return &tensors_.back();
  }
  const tandem_tensor* input(const View& whole, bool keys, int64_t dim) {
    if (!whole) return nullptr;
    const tandem_tensor* tensor = allocate(whole, keys, dim);
    copy(whole, buffers_.back().view(), keys, buffers_.back().shape(), true);
    return tensor;
  }
  const tandem_tensor* output(const View& whole, bool keys, int64_t dim) {
    if (!whole) return nullptr;
    const tandem_tensor* tensor = allocate(whole, keys, dim);
    fill_with_nan(buffers_.back().view(), buffers_.back().shape());
    outputs_.push_back({whole, &buffers_.back(), keys});
    return tensor;
  }
  // The rows of the rank's queries: (heads, rows, keys).
  const tandem_tensor* bias(const BiasView& whole, bool is_input) {
    if (!whole) return nullptr;
    const RowShape shape{std::ssize(documents_[0]), whole.shape[1], p_.seqlen_k};
    buffers_.emplace_back(kHost, whole.dtype, shape);
    const View v = buffers_.back().view();
    if (is_input) {
      bias_ = &buffers_.back();
      copy_bias(whole, true);
    } else {
      dbias_ = &buffers_.back();
      fill_with_nan(v, shape);
    }
    sizes_.push_back({shape.heads, shape.rows, shape.dim, v.head, v.row, 1});
    return add(v.data, whole.dtype);
  }
  void copy_bias(const BiasView& whole, bool to_shard) {
    RowBuffer& shard = to_shard ? *bias_ : *dbias_;
    for (int64_t row = 0; row < shard.shape().rows; ++row) {
      const auto n = static_cast<size_t>(row);
      for (int64_t head = 0; head < shard.shape().heads; ++head) {
        for (int64_t key = 0; key < shard.shape().dim; ++key) {
          std::byte* at = whole.at(documents_[0][n], head, positions_[0][n], key);
          std::byte* part = shard.view().at(0, row, head) + key * size_of(whole.dtype);
          std::memcpy(to_shard ? part : at, to_shard ? at : part, static_cast<size_t>(size_of(whole.dtype)));
        }
      }
    }
  }
  // All ranks have the same gradients. The first rank to copy them finds NaN in the problem.
  void collect_captured() {
    for (const auto& [n, own] : captured_) {
      const BiasView& to = p_.score_mod->gradients[n].to;
      for_elements(to, [&, &from = own](int64_t i, int64_t j, int64_t k, int64_t l) {
        std::byte* const at = to.at(i, j, k, l);
        const auto size = static_cast<size_t>(size_of(to.dtype));
        if (!std::isnan(load(to.dtype, at)) && std::memcmp(at, from.at(i, j, k, l), size) != 0) {
          throw std::runtime_error("ranks have unequal gradients of a captured tensor");
        }
        std::memcpy(at, from.at(i, j, k, l), size);
      });
    }
  }
  const tandem_tensor* heads(const HeadView& whole, int64_t batch) {
    if (!whole) return nullptr;
    buffers_.emplace_back(kHost, whole.dtype, RowShape{batch, p_.heads_q, 1});
    const View v = buffers_.back().view();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < p_.heads_q; ++h) {
        std::memcpy(v.at(0, b, h), whole.at(b, h), static_cast<size_t>(size_of(v.dtype)));
      }
    }
    if (whole.data == p_.dsink.data) dsink_ = &buffers_.back();
    sizes_.push_back(batch > 1 ? std::vector<int64_t>{batch, p_.heads_q, p_.heads_q, 1}
                               : std::vector<int64_t>{p_.heads_q, 1});
    return add(v.data, whole.dtype);
  }

  const Problem& p_;
  std::vector<int32_t> documents_[2];
  std::vector<int64_t> positions_[2];
  std::deque<RowBuffer> buffers_;
  std::deque<std::vector<int64_t>> sizes_;
  std::deque<tandem_tensor> tensors_;
  std::vector<Output> outputs_;
  RowBuffer *dsink_ = nullptr, *bias_ = nullptr, *dbias_ = nullptr;
  tandem_mod mod_{};
  std::vector<tandem_mod_tensor> mod_tensors_;
  std::map<size_t, BiasView> captured_;  // gradients by the number of the tensor
};

// The block mask of a problem whose heads share it.
class Blocks {
 public:
  explicit Blocks(const Problem& p) : mask_(p.block_mask) {
    for (int64_t b = 0; mask_ && b < p.batch; ++b) {
      const Sequence s = sequence_of(p, b);
      for (int64_t i = 0; i < s.q_len; i += mask_.block_q) {
        for (int64_t j = 0; j < s.k_len; j += mask_.block_k) {
          const BlockState state = mask_.at(b, 0, i, j);
          if (state == BlockState::hidden) continue;
          blocks_.push_back(static_cast<int32_t>(j / mask_.block_k));
          full_.push_back(state == BlockState::full);
        }
        rows_.push_back(std::ssize(blocks_));
      }
    }
  }
  void add_to(tandem_cp_plan_args* a) const {
    a->block_q = mask_.block_q;
    a->block_k = mask_.block_k;
    a->block_rows = rows_.data();
    a->key_blocks = blocks_.data();
    a->full_blocks = full_.data();
  }

 private:
  const BlockMaskView& mask_;
  std::vector<int64_t> rows_{0};
  std::vector<int32_t> blocks_;
  std::vector<uint8_t> full_;
};

}  // namespace

std::string Division::text() const {
  constexpr const char* kNames[] = {"gather", "ring", "heads"};
  return std::to_string(ranks) + " ranks, layout " + std::to_string(layout) + ", " + kNames[execution] + ", chunk " +
         std::to_string(chunk);
}

CpPlan plan_of(const Problem& p, const Division& division) {
  std::vector<int64_t> q_lens, k_lens, diagonals;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    q_lens.push_back(s.q_len);
    k_lens.push_back(s.k_len);
    diagonals.push_back(s.diagonal);
  }
  tandem_cp_plan_args a{};
  a.size = sizeof a;
  a.ranks = division.ranks;
  a.layout = division.layout;
  a.chunk = division.chunk;
  a.documents = p.batch;
  a.q_lens = q_lens.data();
  a.k_lens = k_lens.data();
  a.diagonals = diagonals.data();
  a.alignment = TANDEM_EXPLICIT;
  a.window = TANDEM_WINDOW_LEFT | TANDEM_WINDOW_RIGHT;
  a.window_left = p.window_left;
  a.window_right = p.window_right;
  const Blocks blocks(p);
  if (p.block_mask) blocks.add_to(&a);
  tandem_cp_plan* plan = nullptr;
  Shards::check(tandem_cp_plan_create(&a, &plan));
  return {plan, tandem_cp_plan_destroy};
}

void fill_unused(const Problem& p) {
  if (!p.seqused_q && !p.seqused_k) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto fill = [&](View v, int64_t rows, int64_t heads, int64_t dim, double value) {
      for (int64_t row = 0; v && row < rows; ++row) {
        for (int64_t n = 0; n < heads * dim; ++n) {
          store(v.dtype, v.at(b, row, n / dim) + n % dim * size_of(v.dtype), value);
        }
      }
    };
    const bool forward = p.pass == TANDEM_FORWARD;
    if (forward) fill(p.out, p.seqlen_q, p.heads_q, p.head_dim_v, 0);
    if (forward) fill(p.lse, p.seqlen_q, p.heads_q, 1, -INFINITY);
    fill(p.dq, p.seqlen_q, p.heads_q, p.head_dim, 0);
    fill(p.dk, p.seqlen_k, p.heads_k, p.head_dim, 0);
    fill(p.dv, p.seqlen_k, p.heads_k, p.head_dim_v, 0);
    for (int64_t n = 0; p.dbias && n < p.dbias.shape[1] * p.seqlen_q * p.seqlen_k; ++n) {
      store(p.dbias.dtype, p.dbias.at(b, n / p.seqlen_k / p.seqlen_q, n / p.seqlen_k % p.seqlen_q, n % p.seqlen_k), 0);
    }
  }
}

std::string run_rank(const Problem& p, const RankRun& run, const AdjustArgs& adjust) {
  tandem_context_options options{};
  options.size = sizeof options;
  options.threads = 1;
  tandem_context* context = run.context;
  if (context == nullptr) Shards::check(tandem_context_create(&options, &context));
  const std::unique_ptr<tandem_context, void (*)(tandem_context*)> owner(run.context == nullptr ? context : nullptr,
                                                                         tandem_context_destroy);
  Shards shards(p, run.plan, run.transport->rank);
  if (adjust) adjust(shards.args);
  shards.own_captured();
  const tandem_cp_args args{sizeof(tandem_cp_args), run.plan, run.transport, run.execution, 0, &shards.args};
  const auto call = p.pass == TANDEM_FORWARD ? tandem_cp_forward : tandem_cp_backward;
  if (call(context, &args) != TANDEM_OK) return tandem_last_error();
  shards.collect();
  return "";
}

void run_on_ranks(const Problem& p, const Division& division, const AdjustArgs& adjust) {
  const CpPlan plan = plan_of(p, division);
  fill_unused(p);
  ThreadGroup group(division.ranks);
  const auto errors = on_ranks(division.ranks, [&](int32_t rank) {
    return run_rank(p, {plan.get(), group.transport(rank), division.execution}, adjust);
  });
  for (const std::string& error : errors) {
    if (!error.empty()) throw std::runtime_error(division.text() + ": " + error);
  }
}

Engine engine_on_ranks(const Division& division) {
  return [division](const EngineCall& call) {
    run_on_ranks(call, division, options_of(call.instance->args(call.pass, call.outputs)));
  };
}

AdjustArgs options_of(const tandem_attention_args& args) {
  return [args](tandem_attention_args& a) {
    a.score_mod = args.score_mod;
    a.mask_mod = args.mask_mod;
    a.dropout_p = args.dropout_p;
    a.dropout_seed = args.dropout_seed;
    a.dropout_offset = args.dropout_offset;
  };
}

}  // namespace tandem::test
