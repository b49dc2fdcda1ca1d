// context_parallel.hpp: a plan, a transport of one rank, both passes, and exceptions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "tandem/context_parallel.hpp"

namespace {

// A group of one rank has no messages.
class Alone : public tandem::CpTransport {
 public:
  explicit Alone(bool fails = false) : CpTransport(0, 1), fails_(fails) {}

  void* exchange(std::span<const tandem_cp_message>, std::span<const tandem_cp_message>) override {
    if (fails_) throw std::runtime_error("the connection is lost");
    return nullptr;
  }
  void wait(void*) override {}
  void all_gather(std::span<const std::byte> send, std::span<std::byte> received) override {
    if (fails_) throw std::runtime_error("the connection is lost");
    std::copy(send.begin(), send.end(), received.begin());
  }

 private:
  bool fails_;
};

std::vector<float> numbers(size_t count) {
  std::vector<float> x(count);
  for (size_t n = 0; n < count; ++n) x[n] = static_cast<float>((n * 37) % 19) / 10 - 0.9f;
  return x;
}

TEST(RankCpp, BothPassesOnOneRank) {
  const std::vector<float> q = numbers(10 * 2 * 4), k = numbers(10 * 4), v = numbers(10 * 4),
                           dout = numbers(10 * 2 * 4);
  std::vector<float> out(q.size()), lse(20), dq(q.size()), dk(k.size()), dv(v.size());
  std::vector<float> whole(q.size());
  std::vector<int32_t> starts{0, 7, 10};
  tandem::forward({.q = {q, {10, 2, 4}},
                   .k = {k, {10, 1, 4}},
                   .v = {v, {10, 1, 4}},
                   .out = {whole, {10, 2, 4}},
                   .cu_seqlens_q = {starts, {3}},
                   .cu_seqlens_k = {starts, {3}},
                   .causal = true});
  tandem::CpPlan plan({.q_lens = {7, 3}, .causal = true});
  EXPECT_EQ(plan.rows(0), (std::pair<int64_t, int64_t>{10, 10}));
  EXPECT_EQ(plan.queries(0)[8].document, 1);
  EXPECT_EQ(plan.keys(0)[8].position, 1);
  EXPECT_NE(plan.hash(), tandem::CpPlan({.q_lens = {7, 4}}).hash());
  Alone rank;
  const tandem::Attention call{.q = {q, {10, 2, 4}},
                               .k = {k, {10, 1, 4}},
                               .v = {v, {10, 1, 4}},
                               .out = {out, {10, 2, 4}},
                               .lse = {lse, {2, 10}},
                               .dout = {dout, {10, 2, 4}},
                               .dq = {dq, {10, 2, 4}},
                               .dk = {dk, {10, 1, 4}},
                               .dv = {dv, {10, 1, 4}}};
  for (const auto execution : {tandem::CpExecution::gather, tandem::CpExecution::ring, tandem::CpExecution::heads}) {
    tandem::forward(call, plan, rank, execution);
    for (size_t n = 0; n < out.size(); ++n) EXPECT_NEAR(out[n], whole[n], 1e-6);
    tandem::backward(call, plan, rank, execution);
    // Rows of P sum to 1, so that dv has the sum of dout.
    EXPECT_NEAR(std::accumulate(dv.begin(), dv.end(), 0.0), std::accumulate(dout.begin(), dout.end(), 0.0), 1e-5);
  }
}

TEST(RankCpp, GradientsOfCapturedTensors) {
  const std::vector<float> x = numbers(6 * 2 * 4), factors = {0.5f, 2};
  std::vector<float> out(x.size()), lse(12), gradient(2), sums(2);
  tandem::Attention call{.q = {x, {6, 2, 4}},
                         .k = {x, {6, 2, 4}},
                         .v = {x, {6, 2, 4}},
                         .out = {out, {6, 2, 4}},
                         .lse = {lse, {2, 6}},
                         .dout = {x, {6, 2, 4}}};
  call.score_mod = {.text = "score * t[head]", .tensors = {{"t", {factors, {2}}, {gradient, {2}}}}};
  tandem::CpPlan plan({.chunk = 4, .q_lens = {6}});
  Alone rank;
  tandem::forward(call, plan, rank);
  for (size_t h = 0; h < 2; ++h) {
    // Each row of the gradient of the scores is P (dP - delta), with P and dP of the same numbers.
    for (size_t i = 0; i < 6; ++i) {
      const auto dot = [&](size_t a, size_t b) {
        double sum = 0;
        for (size_t c = 0; c < 4; ++c) sum += double{x[(a * 2 + h) * 4 + c]} * x[(b * 2 + h) * 4 + c];
        return sum;
      };
      double delta = 0;
      for (size_t c = 0; c < 4; ++c) delta += double{out[(i * 2 + h) * 4 + c]} * x[(i * 2 + h) * 4 + c];
      for (size_t j = 0; j < 6; ++j) {
        const double p = std::exp(0.5 * dot(i, j) * factors[h] - lse[h * 6 + i]);
        sums[h] += static_cast<float>(p * (dot(i, j) - delta) * 0.5 * dot(i, j));
      }
    }
  }
  for (const auto execution : {tandem::CpExecution::gather, tandem::CpExecution::heads}) {
    std::fill(gradient.begin(), gradient.end(), 0.0f);
    tandem::backward(call, plan, rank, execution);
    for (size_t h = 0; h < 2; ++h) EXPECT_NEAR(gradient[h], sums[h], 1e-5);
  }
}

// Blocks on the diagonal are documents of the size of a block.
TEST(RankCpp, BlockMasks) {
  const std::vector<float> x = numbers(6 * 4);
  std::vector<float> blocked(x.size()), divided(x.size());
  tandem::Attention call{.q = {x, {6, 1, 4}}, .k = {x, {6, 1, 4}}, .v = {x, {6, 1, 4}}, .out = {blocked, {6, 1, 4}}};
  const tandem::CpPlan::Options options{.q_lens = {6},
                                        .block_q = 2,
                                        .block_k = 2,
                                        .block_rows = {0, 1, 2, 3},
                                        .key_blocks = {0, 1, 2},
                                        .full_blocks = {1, 0, 1}};
  Alone rank;
  tandem::CpPlan plan(options);
  tandem::forward(call, plan, rank);
  call.out = {divided, {6, 1, 4}};
  tandem::CpPlan documents({.q_lens = {2, 2, 2}});
  tandem::forward(call, documents, rank);
  for (size_t n = 0; n < x.size(); ++n) EXPECT_NEAR(blocked[n], divided[n], 1e-6);
  EXPECT_NE(plan.hash(), tandem::CpPlan({.q_lens = {6}}).hash());
  for (const int wrong : {0, 1, 2}) {
    tandem::CpPlan::Options o = options;
    if (wrong == 0) o.block_rows.pop_back();
    if (wrong == 1) o.key_blocks.pop_back();
    if (wrong == 2) o.full_blocks.pop_back();
    EXPECT_THROW(tandem::CpPlan{o}, tandem::Error);
  }
}

TEST(RankCpp, ThrowsTheErrorsOfTheLibraryAndTheTransport) {
  EXPECT_THROW(tandem::CpPlan({.ranks = 0}), tandem::Error);
  EXPECT_THROW(tandem::CpPlan({.q_lens = {3}, .k_lens = {3, 4}}), tandem::Error);
  EXPECT_THROW(tandem::CpPlan({.q_lens = {3}, .diagonals = {3, 4}}), tandem::Error);
  tandem::CpPlan plan({.q_lens = {2}});
  std::vector<float> x(2 * 4), out(x.size());
  tandem::Attention call{.q = {x, {2, 1, 4}}, .k = {x, {2, 1, 4}}, .v = {x, {2, 1, 4}}, .out = {out, {2, 1, 4}}};
  Alone lost(true), alone;
  try {
    tandem::forward(call, plan, lost);
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the connection is lost");
  }
  call.causal = true;
  EXPECT_THROW(tandem::forward(call, plan, alone), tandem::Error);
}

}  // namespace
