#include "score_mod/options.h"

#include <algorithm>
#include <cstdlib>

namespace tandem::score_mod {
namespace {

// The value that all scores share at a node; 0 if it is not known before the call.
double value_of(const Mod& mod, NodeId id, const Values& values) {
  const Node& node = mod.graph[id];
  if (node.op == Op::to_real) return value_of(mod, node.operands[0], values);
  if (node.op == Op::scalar) return values.scalars[static_cast<size_t>(node.index)];
  return node.op == Op::constant ? node.value : 0;
}

bool is_input(const Node& node, Input input) { return node.op == Op::input && static_cast<Input>(node.index) == input; }

// A linear combination of q, k, seqlen_q, seqlen_k and 1.
struct Sum {
  int64_t q = 0, k = 0, seqlen_q = 0, seqlen_k = 0, constant = 0;

  Sum plus(const Sum& o, int64_t times) const {
    return {q + times * o.q, k + times * o.k, seqlen_q + times * o.seqlen_q, seqlen_k + times * o.seqlen_k,
            constant + times * o.constant};
  }
};

// A distance times a sign, plus a constant.
struct Distance {
  bool bottom_right = false;
  int64_t sign = 1, constant = 0;
};

// Recognises options in an expression. Shared nodes are read once per use, and the number of reads is limited, because
// an expression for an option is short.
class Reader {
 public:
  // known: lengths count as numbers if they are exact.
  Reader(const Mod& mod, const Values& values, const Lengths& lengths, bool known)
      : mod_(mod), values_(values), lengths_(lengths), known_(known && lengths.exact) {}

  const Node& at(NodeId id) const { return mod_.graph[id]; }

  // Returns a sum only if it cannot overflow, because expressions wrap around if a sum overflows an int.
  std::optional<Sum> sum(NodeId id) {
    const std::optional<Sum> found = may_read() ? sum_of(at(id)) : std::nullopt;
    if (!found) return {};
    const int64_t q = std::abs(found->q) + std::abs(found->seqlen_q),
                  k = std::abs(found->k) + std::abs(found->seqlen_k);
    constexpr int64_t kBeyond = int64_t{1} << 31;
    const int64_t most = q * std::clamp<int64_t>(lengths_.seqlen_q, 1, kBeyond) +
                         k * std::clamp<int64_t>(lengths_.seqlen_k, 1, kBeyond) + std::abs(found->constant);
    return most <= INT32_MAX ? found : std::nullopt;
  }

  std::optional<Distance> distance(const Sum& s) const {
    const int64_t sign = s.q, lengths = sign * s.seqlen_k;
    const bool measures = std::abs(s.q) == 1 && s.k == -s.q && s.seqlen_q == -s.seqlen_k;
    if (!measures || (lengths != 0 && lengths != 1)) return {};
    return Distance{lengths == 1, sign, s.constant};
  }

  VisibleBand band() {
    VisibleBand band;
    band.whole = add(mod_.result, &band);
    return band;
  }

 private:
  bool may_read() { return ++read_ <= kMaxRead; }

  std::optional<Sum> sum_of(const Node& node) {
    if (node.type != Type::integer) return {};
    const auto [a, b, unused, no] = node.operands;
    switch (node.op) {
      case Op::constant: return Sum{.constant = static_cast<int64_t>(node.value)};
      case Op::scalar: return Sum{.constant = static_cast<int64_t>(values_.scalars[static_cast<size_t>(node.index)])};
      case Op::input: return input(static_cast<Input>(node.index));
      case Op::negate: return combined(Sum{}, sum(a), -1);
      case Op::add: return combined(sum(a), sum(b), 1);
      case Op::subtract: return combined(sum(a), sum(b), -1);
      default: return {};
    }
  }

  static std::optional<Sum> combined(const std::optional<Sum>& a, const std::optional<Sum>& b, int64_t times) {
    return a && b ? std::optional(a->plus(*b, times)) : std::nullopt;
  }

  std::optional<Sum> input(Input input) const {
    switch (input) {
      case Input::q: return Sum{.q = 1};
      case Input::k: return Sum{.k = 1};
      case Input::seqlen_q: return known_ ? Sum{.constant = lengths_.seqlen_q} : Sum{.seqlen_q = 1};
      case Input::seqlen_k: return known_ ? Sum{.constant = lengths_.seqlen_k} : Sum{.seqlen_k = 1};
      default: return {};
    }
  }

  // Adds the keys that a node hides to the band. Returns false if the node hides more than bounds of distances can
  // express.
  bool add(NodeId id, VisibleBand* band) {
    if (!may_read()) return false;
    const Node& node = at(id);
    const auto [a, b, unused, no] = node.operands;
    switch (node.op) {
      case Op::constant: return node.value != 0;
      case Op::scalar: return values_.scalars[static_cast<size_t>(node.index)] != 0;
      case Op::bit_and: {
        const bool first = add(a, band), second = add(b, band);
        return first && second;
      }
      case Op::less:
      case Op::less_equal: return add_less(a, b, node.op == Op::less, band);
      case Op::equal: return at(a).type == Type::integer && add_less(a, b, false, band) && add_less(b, a, false, band);
      default: return false;
    }
  }

  // a < b, or a <= b. A bound on an absolute value bounds both the value and its negative.
  bool add_less(NodeId a, NodeId b, bool strict, VisibleBand* band) {
    const bool absolute = at(a).op == Op::abs;
    const std::optional<Sum> low = sum(absolute ? at(a).operands[0] : a), high = sum(b);
    if (!low || !high) return false;
    const Sum room = high->plus({.constant = 1}, strict ? -1 : 0);
    return add_at_least_0(room.plus(*low, -1), band) && (!absolute || add_at_least_0(room.plus(*low, 1), band));
  }

  // The first bound decides the diagonal, and all other bounds must use the same diagonal.
  bool add_at_least_0(const Sum& s, VisibleBand* band) {
    const std::optional<Distance> d = distance(s);
    if (!d || bottom_right_.value_or(d->bottom_right) != d->bottom_right) return false;
    bottom_right_ = band->diagonal.bottom_right = d->bottom_right;
    int64_t& bound = d->sign > 0 ? band->right : band->left;
    bound = std::min(bound, d->constant);
    return true;
  }

  const Mod& mod_;
  const Values& values_;
  const Lengths& lengths_;
  const bool known_;
  std::optional<bool> bottom_right_;
  static constexpr int kMaxRead = 256;
  int read_ = 0;
};

std::optional<Alibi> alibi_of(const Mod& mod, Reader&& reader) {
  const Node& result = reader.at(mod.result);
  const auto [a, b, unused, no] = result.operands;
  const bool swapped = result.op == Op::add && !is_input(reader.at(a), Input::score);
  if ((result.op != Op::add && result.op != Op::subtract) || !is_input(reader.at(swapped ? b : a), Input::score))
    return {};
  // The term is sign * slope * distance.
  int64_t sign = result.op == Op::subtract ? -1 : 1;
  const auto without_sign = [&](NodeId id) {
    for (; reader.at(id).op == Op::negate; id = reader.at(id).operands[0]) sign = -sign;
    return id;
  };
  const Node& product = reader.at(without_sign(swapped ? a : b));
  if (product.op != Op::multiply) return {};
  const NodeId first = without_sign(product.operands[0]), second = without_sign(product.operands[1]);
  const bool slope_first = reader.at(first).op == Op::gather;
  const Node &slope = reader.at(slope_first ? first : second), &factor = reader.at(slope_first ? second : first);
  if (slope.op != Op::gather || factor.op != Op::to_real) return {};

  const int rank = mod.signature.tensors[static_cast<size_t>(slope.index)].rank;
  const auto index_is = [&](int dim, Input input) {
    return is_input(reader.at(slope.operands[static_cast<size_t>(dim)]), input);
  };
  if (rank != 1 && rank != 2) return {};
  if (!index_is(rank - 1, Input::head) || (rank == 2 && !index_is(0, Input::batch))) return {};

  const NodeId inner = without_sign(factor.operands[0]);
  const bool absolute = reader.at(inner).op == Op::abs;
  const std::optional<Sum> sum = reader.sum(absolute ? reader.at(inner).operands[0] : inner);
  const std::optional<Distance> d = sum ? reader.distance(*sum) : std::nullopt;
  if (!d || (absolute && sign > 0)) return {};
  const Alibi::Of of = absolute ? Alibi::Of::absolute : sign * d->sign < 0 ? Alibi::Of::distance : Alibi::Of::ahead;
  return Alibi{of, {d->bottom_right, d->sign * d->constant}, slope.index};
}

}  // namespace

double softcap_of(const Mod& mod, const Values& values) {
  const Graph& graph = mod.graph;
  const Node& product = graph[mod.result];
  if (product.op != Op::multiply) return 0;
  const auto [a, b, unused, no] = product.operands;
  const bool first = graph[a].op == Op::tanh;
  if (!first && graph[b].op != Op::tanh) return 0;
  const double cap = value_of(mod, first ? b : a, values);
  const Node& quotient = graph[graph[first ? a : b].operands[0]];
  if (quotient.op != Op::divide && quotient.op != Op::multiply) return 0;
  if (!is_input(graph[quotient.operands[0]], Input::score)) return 0;
  const double by = value_of(mod, quotient.operands[1], values);
  return (quotient.op == Op::divide ? by == cap : by * cap == 1) ? cap : 0;
}

// Lengths count as numbers only if necessary. A diagonal that ends at the last query and key is the usual form of the
// option.
VisibleBand band_of(const Mod& mod, const Values& values, const Lengths& lengths) {
  const VisibleBand band = Reader(mod, values, lengths, false).band();
  return band.whole ? band : Reader(mod, values, lengths, true).band();
}

std::optional<Alibi> alibi_of(const Mod& mod, const Values& values, const Lengths& lengths) {
  const std::optional<Alibi> found = alibi_of(mod, Reader(mod, values, lengths, false));
  return found ? found : alibi_of(mod, Reader(mod, values, lengths, true));
}

}  // namespace tandem::score_mod
