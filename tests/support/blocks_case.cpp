#include "support/blocks_case.h"

#include <algorithm>

#include "problem/bound_expression.h"
#include "problem/make_blocks.h"
#include "score_mod/evaluate.h"
#include "support/random.h"

namespace tandem::test {
namespace {

constexpr int kFull = 2, kPartial = 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the state of each block, from every query and key in it.
std::vector<int> states_of(const BlocksCase& c, const BoundExpression& mod) {
  const score_mod::Mod& text = mod.program->mod;
  score_mod::Evaluator<float> evaluator(text.graph, {&text.result, 1});
  std::vector<int> states;
  for (int64_t list = 0; list < c.batch * c.heads; ++list) {
    for (int64_t i = 0; i < c.seqlen_q; i += c.block_q) {
      for (int64_t j = 0; j < c.seqlen_k; j += c.block_k) {
        const int64_t end_q = std::min(i + c.block_q, c.seqlen_q), end_k = std::min(j + c.block_k, c.seqlen_k);
        bool some = false, hidden = end_q != i + c.block_q || end_k != j + c.block_k;
        for (int64_t q = i; q < end_q; ++q) {
          for (int64_t k = j; k < end_k; ++k) {
            evaluator.run(
                0,
                {static_cast<int32_t>(list / c.heads), static_cast<int32_t>(list % c.heads), static_cast<int32_t>(q),
                 static_cast<int32_t>(k), static_cast<int32_t>(c.seqlen_q), static_cast<int32_t>(c.seqlen_k)},
                mod.values);
            const bool sees = evaluator[text.result].integer != 0;
            some = some || sees;
            hidden = hidden || !sees;
          }
        }
        states.push_back(!some ? 0 : hidden ? kPartial : kFull);
      }
    }
  }
  return states;
}

std::string compare_row(const std::string& name, Tensor& counts, Tensor& indices, int64_t row, int64_t columns,
                        const std::vector<int>& wanted) {
  if (counts.get(row) != static_cast<double>(std::count(wanted.begin(), wanted.end(), 1)))
    return name + ": count of row " + std::to_string(row) + " is " + std::to_string(counts.get(row));
  int64_t at = row * columns;
  for (const int listed : {1, 0}) {
    for (int64_t column = 0; column < columns; ++column) {
      if (wanted[static_cast<size_t>(column)] != listed || indices.get(at++) == static_cast<double>(column)) continue;
      return name + ": index " + std::to_string(at - 1) + " is " + std::to_string(indices.get(at - 1)) + ", not " +
             std::to_string(column);
    }
  }
  return "";
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const BlocksCase& c) {
  return stream << "'" << c.text << "', " << c.batch << " x " << c.heads << ", " << c.seqlen_q << " x " << c.seqlen_k
                << " in " << c.block_q << " x " << c.block_k << (c.full ? "" : ", one kind")
                << (c.by_keys ? "" : ", by queries") << ", layout " << c.layout << ", seed " << c.seed;
}

BlocksInstance::BlocksInstance(const BlocksCase& its) : c(its) {
  Random r(static_cast<uint64_t>(c.seed));
  const int64_t longest = std::max({c.seqlen_q, c.seqlen_k, int64_t{1}});
  doc = Tensor(DType::i32, {std::max<int64_t>(c.batch, 1), longest});
  page = Tensor(DType::i64, {longest});
  seen = Tensor(DType::boolean, {longest});
  slope = Tensor(DType::f32, {std::max<int64_t>(c.heads, 1)});
  for (int64_t b = 0, n = 0; b < std::max<int64_t>(c.batch, 1); ++b) {
    for (int64_t at = 0, number = 0; at < longest; ++at, ++n)
      doc.set(n, static_cast<double>(number += r.chance(0.008)));
  }
  const bool stretches = r.chance(0.5);
  bool shown = true;
  for (int64_t at = 0; at < longest; ++at) {
    page.set(at, static_cast<double>(r.between(-3, 3)));
    if (!stretches || r.chance(0.005)) shown = r.chance(0.5);
    seen.set(at, shown ? 1 : 0);
  }
  for (int64_t h = 0; h < slope.size(); ++h) slope.set(h, r.normal());
  const int64_t rows = ceil_div(c.seqlen_q, c.block_q), columns = ceil_div(c.seqlen_k, c.block_k);
  for (int n = 0; n < 4; ++n) {
    const bool keys = n >= 2;
    if ((n % 2 == 1 && !c.full) || (keys && !c.by_keys)) continue;
    counts[n] = Tensor(DType::i32, {c.batch, c.heads, keys ? columns : rows}, c.layout);
    indices[n] = Tensor(DType::i32, {c.batch, c.heads, keys ? columns : rows, keys ? rows : columns}, c.layout);
  }
}

int64_t BlocksInstance::blocks() const {
  return c.batch * c.heads * ceil_div(c.seqlen_q, c.block_q) * ceil_div(c.seqlen_k, c.block_k);
}

tandem_block_mask_args BlocksInstance::args() {
  Tensor* const given[] = {&doc, &page, &seen, &slope};
  const char* const names[] = {"doc", "page", "seen", "slope"};
  for (int n = 0; n < 4; ++n) named_[n] = {names[n], given[n]->describe(), nullptr};
  scalars_[0] = {"n", TANDEM_INT, 0, 100};
  scalars_[1] = {"x", TANDEM_FLOAT, 0, 0.75};
  mod_ = {.size = sizeof mod_,
          .text = c.text.c_str(),
          .scalars = scalars_,
          .scalar_count = 2,
          .tensors = named_,
          .tensor_count = 4};
  tandem_block_mask_args a{};
  a.size = sizeof a;
  a.mask_mod = &mod_;
  a.batch = c.batch, a.heads = c.heads;
  a.seqlen_q = c.seqlen_q, a.seqlen_k = c.seqlen_k;
  a.mask_block_q = c.block_q, a.mask_block_k = c.block_k;
  a.kv_num_blocks = counts[0].describe(), a.kv_indices = indices[0].describe();
  a.full_kv_num_blocks = counts[1].describe(), a.full_kv_indices = indices[1].describe();
  a.q_num_blocks = counts[2].describe(), a.q_indices = indices[2].describe();
  a.full_q_num_blocks = counts[3].describe(), a.full_q_indices = indices[3].describe();
  return a;
}

std::vector<Tensor*> BlocksInstance::tensors() {
  std::vector<Tensor*> all = {&doc, &page, &seen, &slope};
  for (int n = 0; n < 4; ++n) {
    if (counts[n]) all.insert(all.end(), {&counts[n], &indices[n]});
  }
  return all;
}

std::string check_blocks_accuracy(const BlocksCase& c, const std::function<void(BlocksInstance&)>& make) {
  BlocksInstance instance(c);
  const tandem_block_mask_args args = instance.args();
  MakeBlocksProblem m;
  const Status status = make_blocks_problem(&args, {TANDEM_CPU, 0}, true, &m);
  if (!status.ok()) return status.message;
  make(instance);
  const std::vector<int> states = states_of(c, *m.mask_mod.read);
  for (int n = 0; n < 4; ++n) {
    if (!instance.counts[n]) continue;
    const bool keys = n >= 2;
    const int64_t rows = keys ? m.blocks_k : m.blocks_q, columns = keys ? m.blocks_q : m.blocks_k;
    for (int64_t row = 0; row < m.lists() * rows; ++row) {
      std::vector<int> wanted;
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t i = keys ? column : row % rows, j = keys ? row % rows : column;
        const int state = states[static_cast<size_t>((row / rows * m.blocks_q + i) * m.blocks_k + j)];
        wanted.push_back(n % 2 == 1 ? state == kFull : state == kPartial || (state == kFull && !c.full));
      }
      const std::string wrong =
          compare_row(n % 2 == 1 ? "full" : "partial", instance.counts[n], instance.indices[n], row, columns, wanted);
      if (!wrong.empty()) return wrong + (keys ? ", by keys" : ", by queries");
    }
    if (!instance.counts[n].guards_intact() || !instance.indices[n].guards_intact()) return "written to a guard";
  }
  return "";
}

std::vector<BlocksCase> blocks_cases() {
  std::vector<BlocksCase> cases = {
      {.text = "k <= q", .seqlen_q = 512, .seqlen_k = 640},
      {.text = "k <= q and doc[batch, q] == doc[batch, k]", .batch = 2, .seqlen_q = 700, .seqlen_k = 700},
      {.text = "0 <= q - k < n", .seqlen_q = 513, .seqlen_k = 400, .block_q = 64, .block_k = 32},
      {.text = "k <= q and (k < 4 or q - k < n)", .seqlen_q = 600, .seqlen_k = 600, .full = false},
      {.text = "abs(q % 32 - k % 32) <= 3 and abs(q // 32 - k // 32) <= 3", .seqlen_q = 384, .seqlen_k = 512},
      {.text = "abs(q % n - k % n) <= 3 and abs(q // n - k // n) <= 3", .seqlen_q = 900, .seqlen_k = 1000},
      {.text = "k <= q and (q - k) % 4 == 0", .seqlen_q = 256, .seqlen_k = 256, .by_keys = false},
      {.text = "seen[k] and seen[q]", .seqlen_q = 300, .seqlen_k = 900, .layout = kGaps | kHeadsFirst, .seed = 3},
      {.text = "page[k] < 3", .seqlen_q = 260, .seqlen_k = 390, .block_q = 1, .block_k = 130},
      {.text = "float(q - k) * x < slope[head] * 200", .heads = 3, .seqlen_q = 400, .seqlen_k = 400},
      {.text = "slope[head] > 0", .heads = 4, .seqlen_q = 256, .seqlen_k = 128},
      {.text = "tanh(float(q - k) / 100.0) < x", .seqlen_q = 300, .seqlen_k = 300},
      {.text = "q < seqlen_k and k + batch < seqlen_q", .batch = 3, .seqlen_q = 200, .seqlen_k = 210},
      {.text = "true", .seqlen_q = 256, .seqlen_k = 384},
      {.text = "false", .seqlen_q = 1, .seqlen_k = 1},
      {.text = "k <= q", .seqlen_q = 0, .seqlen_k = 300},
      {.text = "k <= q", .seqlen_q = 300, .seqlen_k = 0},
      {.text = "k <= q", .batch = 0, .seqlen_q = 300, .seqlen_k = 300},
      {.text = "k <= q", .seqlen_q = 300, .seqlen_k = 300, .block_q = int64_t{1} << 40, .block_k = 1000},
      {.text = "q * 0x7fffffff < k << 25", .seqlen_q = 300, .seqlen_k = 300},
      {.text = "q // (k - 100) > 2 or q % (k - 100) == 1", .seqlen_q = 300, .seqlen_k = 300, .block_k = 50},
      {.text = "doc[batch, q + n] == doc[0, k - n]", .batch = 2, .seqlen_q = 300, .seqlen_k = 500, .block_q = 100}};
  // Random expressions whose intervals can decide blocks, and some that cannot.
  Random r(7);
  const auto pick = [&r](std::initializer_list<const char*> of) {
    return std::string(of.begin()[r.between(0, static_cast<int64_t>(of.size()) - 1)]);
  };
  const auto term = [&] {
    return pick({"q", "k", "q - k", "k - q", "q // 64", "k // 48", "q % 96", "abs(q - k)", "doc[batch, k]", "doc[0, q]",
                 "page[q // 100]", "(q >> 5)", "(k & 224)", "min(q, k)", "max(q, n)", "(q ^ k)",
                 "select(seen[q], k, q)", "(q | 15)", "-k"});
  };
  for (int64_t seed = 0; seed < 12; ++seed) {
    std::string text;
    for (int64_t n = r.between(1, 3); n > 0; --n) {
      text += (text.empty() ? "" : pick({" and ", " or ", " and not "})) + "(" + term() +
              pick({" < ", " <= ", " == ", " != ", " > "}) + pick({"n", "3", "q - 64", "k + 32", "100", "doc[0, q]"}) +
              ")";
    }
    cases.push_back({.text = text,
                     .heads = r.between(1, 2),
                     .seqlen_q = r.between(1, 500),
                     .seqlen_k = r.between(1, 500),
                     .block_q = r.between(1, 4) * 32,
                     .block_k = r.between(1, 5) * 30,
                     .full = r.chance(0.7),
                     .by_keys = r.chance(0.7),
                     .seed = seed});
  }
  return cases;
}

}  // namespace tandem::test
