// The kernels of a server's forwards: calls of any lengths use no other kernel.
#include "plan/serving.h"

#include <cmath>
#include <set>
#include <vector>

#include "support/random.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

constexpr Sizes kMost{.batch = 256,
                      .seqlen_q = 8192,
                      .seqlen_k = 131072,
                      .heads_q = 32,
                      .heads_k = 8,
                      .head_dim = 128,
                      .head_dim_v = 128};

Problem paged(const Sizes& s, int64_t page_size) {
  Problem p = packed(s, s.batch * s.seqlen_q, s.batch * s.seqlen_k);
  p.cu_seqlens_k.present = false;
  p.seqused_k.present = true;
  p.page_table = {.pages = 4096, .page_size = page_size, .max_pages = s.seqlen_k / page_size, .present = true};
  p.total_k = 4096 * page_size;
  p.bottom_right = true;
  return p;
}

// Most lengths of a server are short, but each magnitude is as frequent as another.
int64_t random_length(Random& r, int64_t most) {
  return std::min(most, static_cast<int64_t>(std::exp(r.uniform() * std::log(static_cast<double>(most) + 1))));
}

// A call with the same options and other lengths.
Problem shorter(const Problem& most, Random& r) {
  Problem p = most;
  p.batch = random_length(r, most.batch);
  p.seqlen_q = r.chance(0.4) ? 1 : random_length(r, most.seqlen_q);
  p.seqlen_k = random_length(r, most.seqlen_k);
  p.total_q = most.packed_q() ? std::min(most.total_q, p.seqlen_q + r.between(0, (p.batch - 1) * p.seqlen_q))
                              : p.batch * p.seqlen_q;
  if (!most.page_table)
    p.total_k = most.packed_k() ? p.seqlen_k + r.between(0, (p.batch - 1) * p.seqlen_k) : p.batch * p.seqlen_k;
  return p;
}

std::vector<Problem> servers() {
  std::vector<Problem> list;
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    Sizes s = kMost;
    s.head_dim = s.head_dim_v = head_dim;
    list.push_back(causal(paged(s, 16)));
  }
  const Problem pages = causal(paged(kMost, 64));
  list.push_back(pages);
  list.push_back(pages), list.back().batch_invariant = true;
  list.push_back(pages), list.back().window_left = 4000;
  list.push_back(pages), list.back().softcap = 30, list.back().window_left = 127;
  list.push_back(pages), list.back().sink.present = true;
  list.push_back(pages), list.back().num_splits = 8;
  list.push_back(pages), list.back().heads_q = 128, list.back().heads_k = 1;
  list.push_back(packed(kMost, 1 << 20, 1 << 20));
  Sizes few = kMost;
  few.batch = 16, few.seqlen_k = 16384;
  list.push_back(dense(few));
  list.push_back(causal(dense(few)));
  list.push_back(causal(dense(few))), list.back().batch_invariant = true;
  return list;
}

TEST(Serving, NoOtherKernelIsChosen) {
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    size_t number = 0;
    for (const Problem& most : servers()) {
      ASSERT_TRUE(plan::check(most, device).ok()) << plan::check(most, device).message;
      std::set<uint64_t> prepared;
      for (const plan::PlannedKernel& kernel : plan::serving_kernels(most, device)) prepared.insert(kernel.id);
      EXPECT_LE(prepared.size(), most.page_table ? 16u : 40u) << number;
      Random r(7);
      std::set<std::string> others;
      for (int n = 0; n < 2000; ++n) {
        const Problem p = shorter(most, r);
        if (p.total_q == 0 || !plan::check(p, device).ok()) continue;
        for (const plan::PlannedKernel& kernel : plan::make_plan(p, device).kernels) {
          if (!prepared.contains(kernel.id)) others.insert(plan::name_of(kernel));
        }
      }
      EXPECT_TRUE(others.empty()) << device.name << ", server " << number << ": " << others.size() << " such as "
                                  << *others.begin();
      ++number;
    }
  }
}

// Many CTAs share the keys of a long sequence: 8 heads and 16 splits occupy 128 of 132 SMs.
TEST(Serving, SplitsOfPages) {
  Sizes one = kMost;
  one.batch = one.seqlen_q = 1;
  const auto splits = [&one](int64_t page_size) {
    return plan::make_plan(paged(one, page_size), hopper()).forward.splits;
  };
  EXPECT_EQ(splits(16), 16);
  EXPECT_EQ(splits(64), 16);
  EXPECT_EQ(splits(256), 16);
  one.batch = 64;
  EXPECT_EQ(splits(16), 1);
}

TEST(Serving, ShapesWithLengthsAreRefused) {
  Problem p = dense(kMost);
  p.bias.present = true;
  EXPECT_EQ(plan::check_serving(p).message.substr(0, 44), "bias must be NULL, because its shape has len");
  EXPECT_TRUE(plan::check_serving(dense(kMost)).ok());
}

}  // namespace
}  // namespace tandem::test
