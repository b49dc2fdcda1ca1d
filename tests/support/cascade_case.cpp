#include "support/cascade_case.h"

#include <algorithm>
#include <numeric>

namespace tandem::test {
namespace {

constexpr double kNoPage = 1e9;

int64_t max_pages(const Instance& in) { return in.page_table.shape()[1]; }

// Calls visit(group, request) for every request.
template <class Visit>
void each_request(const CascadeCase& c, const Visit& visit) {
  for (size_t g = 0, b = 0; g < c.requests.size(); ++g)
    for (int64_t n = 0; n < c.requests[g]; ++n) visit(g, static_cast<int64_t>(b++));
}

// Returns the first request of a group.
int64_t first_of(const CascadeCase& c, size_t group) {
  return std::accumulate(c.requests.begin(), c.requests.begin() + static_cast<int64_t>(group), int64_t{0});
}

void share_pages(const CascadeCase& c, Instance& in) {
  each_request(c, [&](size_t g, int64_t b) {
    for (int64_t n = 0; n < c.pages[g]; ++n)
      in.page_table.set(b * max_pages(in) + n, in.page_table.get(first_of(c, g) * max_pages(in) + n));
  });
}

}  // namespace

CascadeInstance::CascadeInstance(const CascadeCase& c, Instance& in, Outputs& outputs)
    : own_args(in.args(TANDEM_FORWARD, &outputs)), args{}, instance_(in), outputs_(outputs) {
  const auto batch = static_cast<int64_t>(in.seqused_k.size()), groups = static_cast<int64_t>(c.requests.size());
  const int64_t columns = max_pages(in), shared = std::max<int64_t>(1, *std::ranges::max_element(c.pages));
  page_table = Tensor(DType::i32, {batch, columns}, kGaps);
  seqused_k = Tensor(DType::i32, {batch});
  cu_seqlens_group = Tensor(DType::i32, {groups + 1}, kGaps);
  group_page_table = Tensor(DType::i32, {groups, shared});
  group_seqused_k = Tensor(DType::i32, {groups}, kGaps);
  for (Tensor* table : {&page_table, &group_page_table})
    for (int64_t n = 0; n < table->size(); ++n) table->set(n, kNoPage);
  each_request(c, [&](size_t g, int64_t b) {
    for (int64_t n = c.pages[g]; n < columns; ++n)
      page_table.set(b * columns + n - c.pages[g], in.page_table.get(b * columns + n));
    seqused_k.set(b, in.seqused_k.get(b) - static_cast<double>(c.pages[g] * in.c.page_size));
  });
  for (size_t g = 0; g <= c.requests.size(); ++g) {
    const auto n = static_cast<int64_t>(g);
    cu_seqlens_group.set(n, in.cu_seqlens_q.get(first_of(c, g)));
    if (g == c.requests.size()) break;
    group_seqused_k.set(n, static_cast<double>(c.pages[g] * in.c.page_size));
    for (int64_t page = 0; page < c.pages[g]; ++page)
      group_page_table.set(n * shared + page, in.page_table.get(first_of(c, g) * columns + page));
  }
  own_args.page_table = page_table.describe();
  own_args.seqused_k = seqused_k.describe();
  args.size = sizeof args;
  args.own = &own_args;
  args.cu_seqlens_group = cu_seqlens_group.describe();
  args.group_page_table = group_page_table.describe();
  args.group_seqused_k = group_seqused_k.describe();
}

std::vector<Tensor*> CascadeInstance::tensors() {
  std::vector<Tensor*> all = {&page_table, &seqused_k, &cu_seqlens_group, &group_page_table, &group_seqused_k};
  for (Tensor* tensor : instance_.inputs()) all.push_back(tensor);
  for (Tensor* tensor : {&outputs_.out, &outputs_.lse}) all.push_back(tensor);
  std::erase_if(all, [](const Tensor* tensor) { return !*tensor; });
  return all;
}

std::vector<const tandem_tensor**> CascadeInstance::fields() {
  return {&own_args.q,
          &own_args.k,
          &own_args.v,
          &own_args.out,
          &own_args.lse,
          &own_args.sink,
          &own_args.page_table,
          &own_args.seqused_k,
          &own_args.cu_seqlens_q,
          &args.cu_seqlens_group,
          &args.group_page_table,
          &args.group_seqused_k};
}

std::string check_cascade(const CascadeCase& c, const std::function<void(CascadeInstance&)>& run) {
  const Engine engine = [&](const EngineCall& call) {
    CascadeInstance cascade(c, *call.instance, *call.outputs);
    run(cascade);
  };
  const Verdict verdict = run_case(from_flags(c.flags), engine, nullptr, [&](Instance& in) { share_pages(c, in); });
  return verdict.failure + verdict.refusal;
}

std::vector<CascadeCase> cascade_cases() {
  const std::string decode =
      "--gradients none --align 8 --dtype bf16 --packed 1 --head-dim 64 --head-dim-v 64 --heads-q 4 --heads-k 2 "
      "--lengths-q 1,1,1,1,1 --used-k 161,150,129,70,16 --seqlen-k 192 --page-size 16 --causal 1 ";
  const std::string mixed =
      "--gradients none --align 8 --dtype f16 --packed 1 --head-dim 32 --head-dim-v 48 --heads-q 2 --heads-k 1 "
      "--lengths-q 3,0,40,1 --used-k 147,96,140,33 --seqlen-k 192 --page-size 48 --causal 1 ";
  return {{decode, {3, 1, 1}, {8, 0, 1}},
          {decode + "--softcap 5 --sink f32", {3, 2}, {8, 1}},
          {decode + "--scale 0.4 --invariant 1 --lse 0", {5}, {1}},
          {decode + "--float32 o --sink same", {1, 1, 1, 1, 1}, {10, 0, 8, 4, 0}},
          {mixed, {3, 1}, {2, 0}},
          {mixed + "--causal 0", {2, 2}, {1, 0}}};
}

}  // namespace tandem::test
