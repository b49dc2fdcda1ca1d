#include "cli/call.h"

#include <algorithm>
#include <mutex>

#include "reference/reference.h"

namespace tandem::tool {

namespace {

// Returns the length of the longest packed sequence, from lengths on the host; 0 without packing.
int64_t longest(const Buffer& cu_seqlens) {
  double most = 0;
  for (int64_t b = 1; b < cu_seqlens.count(); ++b) most = std::max(most, cu_seqlens.get(b) - cu_seqlens.get(b - 1));
  return static_cast<int64_t>(most);
}

}  // namespace

Attention Inputs::attention(const Attention& options, const Place& place) const {
  Attention a = options;
  a.q = place(q);
  a.k = place(k);
  a.v = place(v);
  a.dout = place(dout);
  a.dlse = place(dlse);
  a.bias = place(bias);
  a.sink = place(sink);
  a.alibi_slopes = place(alibi_slopes);
  a.cu_seqlens_q = place(cu_seqlens_q);
  a.cu_seqlens_k = place(cu_seqlens_k);
  a.seqused_q = place(seqused_q);
  a.seqused_k = place(seqused_k);
  a.max_seqlen_q = longest(cu_seqlens_q);
  a.max_seqlen_k = longest(cu_seqlens_k);
  return a;
}

Results::Results(const Inputs& in, bool backward, bool exact) {
  const auto room = [&](DType dtype, const std::vector<int64_t>& shape) {
    return in.q.data() == nullptr ? Buffer::without_memory(dtype, shape) : Buffer(dtype, shape);
  };
  const auto type = [exact](DType dtype) { return exact ? DType::f64 : dtype; };
  const DType dtype = type(in.q.dtype());
  std::vector<int64_t> shape = in.q.shape();
  // The engine's check refuses wrong shapes with a sentence.
  if (!shape.empty() && !in.v.shape().empty()) shape.back() = in.v.shape().back();
  out = room(dtype, shape);
  const auto& q = in.q.shape();
  if (q.size() == 4) shape = {q[0], q[2], q[1]};
  if (q.size() == 3) shape = {q[1], q[0]};
  lse = room(type(DType::f32), shape);
  if (!backward) return;
  dq = room(dtype, in.q.shape());
  dk = room(dtype, in.k.shape());
  dv = room(dtype, in.v.shape());
  if (in.bias && in.bias.dtype() != DType::boolean) dbias = room(type(in.bias.dtype()), in.bias.shape());
  if (in.sink) dsink = room(type(in.sink.dtype()), in.sink.shape());
}

std::vector<Results::Named> Results::all(tandem_pass pass) const {
  const bool packed = out.shape().size() == 3;
  const size_t head = packed ? 1 : 2;
  std::vector<Named> named;
  if (pass == TANDEM_FORWARD) {
    named = {{"out", &out, head}, {"lse", &lse, packed ? 0u : 1u}};
  } else {
    named = {{"dq", &dq, head}, {"dk", &dk, head}, {"dv", &dv, head}, {"dbias", &dbias, 1}, {"dsink", &dsink, 0}};
  }
  std::erase_if(named, [](const Named& one) { return !*one.buffer; });
  return named;
}

Attention with_results(Attention a, const Results& results, const Inputs::Place& place) {
  a.out = place(results.out);
  a.lse = place(results.lse);
  a.dq = place(results.dq);
  a.dk = place(results.dk);
  a.dv = place(results.dv);
  a.dbias = place(results.dbias);
  a.dsink = place(results.dsink);
  return a;
}

Problem problem_of(const Attention& attention, const Results& results, tandem_pass pass) {
  const detail::CArgs args(attention, pass);
  Problem p;
  if (const Status status = make_problem(pass, args.get(), {TANDEM_CPU, 0}, true, &p); !status.ok())
    throw Error(status.code, status.message);
  const auto place = [](auto& view, const Buffer& buffer) {
    if (!view) return;
    view.data = buffer.data();
    view.dtype = buffer.dtype();
  };
  place(p.out, results.out);
  place(p.lse, results.lse);
  place(p.dq, results.dq);
  place(p.dk, results.dk);
  place(p.dv, results.dv);
  place(p.dbias, results.dbias);
  place(p.dsink, results.dsink);
  return p;
}

void truth(const Attention& attention, const Results& exact, bool backward, cpu::Threads& threads,
           const std::function<void(double)>& on_progress) {
  std::mutex mutex;
  const auto parallel = [&](int64_t tasks, const std::function<void(int64_t)>& body) {
    threads.run(static_cast<int32_t>(tasks), [&](int32_t task) {
      body(task);
      const std::lock_guard lock(mutex);
      if (on_progress) on_progress(1.0 / static_cast<double>(tasks));
    });
  };
  reference::forward(problem_of(attention, exact, TANDEM_FORWARD), parallel);
  if (backward) reference::backward(problem_of(attention, exact, TANDEM_BACKWARD), parallel);
}

double forward_flops(const Problem& p) {
  double pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_of(p, b);
    for (int64_t i = 0; i < s.q_len; ++i) {
      const KeySpan keys = visible_keys(p, s, i);
      pairs += static_cast<double>(keys.end - keys.begin);
    }
  }
  return 2.0 * pairs * static_cast<double>(p.heads_q * (p.head_dim + p.head_dim_v));
}

}  // namespace tandem::tool
