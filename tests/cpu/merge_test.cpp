// Merges: attention to parts of the keys, merged, must equal attention to all keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/reference.h"
#include "support/merge_case.h"
#include "support/random.h"
#include "unit/problem/call.h"

namespace tandem::test {
namespace {

void merge_on_cpu(MergeInstance& instance) {
  const tandem_merge_args args = instance.args();
  ASSERT_EQ(tandem_merge(nullptr, &args, nullptr), TANDEM_OK) << tandem_last_error();
}

TEST(CpuMerge, ByTheJudge) {
  for (const MergeCase& c : merge_cases()) EXPECT_EQ(check_merge_accuracy(c, merge_on_cpu), "") << c;
  const MergeCase many{.parts = 300, .seqlen = 3, .out = DType::bf16};
  EXPECT_EQ(check_merge_accuracy(many, merge_on_cpu), "") << many;
  const MergeCase f64{.parts = 3, .types = {DType::f64}, .out = DType::f64};
  EXPECT_EQ(check_merge_accuracy(f64, merge_on_cpu), "") << f64;
}

template <class T>
constexpr tandem_dtype kType = sizeof(T) == 8 ? kF64 : kF32;
template <class T>
T* numbers(Held& held) {
  return reinterpret_cast<T*>(held.memory.data());
}

// Returns a compact (1, rows, heads, dim) tensor of T.
template <class T>
Held random_tensor(Random& r, int64_t rows, int64_t heads, int64_t dim) {
  Held held;
  held.make({1, rows, heads, dim}, kType<T>);
  for (int64_t n = 0; n < rows * heads * dim; ++n) numbers<T>(held)[n] = static_cast<T>(r.normal());
  return held;
}

void run(tandem_pass pass, const tandem_attention_args& args) {
  size_t bytes = 0;
  ASSERT_EQ(tandem_workspace_size(nullptr, pass, &args, &bytes), TANDEM_OK) << tandem_last_error();
  std::vector<char> workspace(bytes);
  const auto function = pass == TANDEM_FORWARD ? tandem_forward : tandem_backward;
  ASSERT_EQ(function(nullptr, &args, workspace.data(), bytes, nullptr), TANDEM_OK) << tandem_last_error();
}

template <class T>
constexpr double kTolerance = sizeof(T) == 8 ? 1e-13 : 2e-5;

template <class T>
void expect_close(Held& got, Held& expected, int64_t count, const char* what) {
  for (int64_t n = 0; n < count; ++n) {
    ASSERT_NEAR(numbers<T>(got)[n], numbers<T>(expected)[n], kTolerance<T> * (1 + std::fabs(numbers<T>(expected)[n])))
        << what << " " << n;
  }
}

// A ring: the keys are divided into parts, and each part's forward gets the position of the part's keys. Only one part
// has the sink. Then each part's backward, from the merged out and lse, adds to one dq, and writes dk and dv of its
// keys.
template <class T>
void expect_parts_to_be_the_whole() {
  constexpr int64_t kQueries = 40, kHeads = 2, kDim = 16, kPart = 25, kParts = 3, kKeys = kPart * kParts;
  constexpr int64_t kQ = kQueries * kHeads * kDim, kK = kKeys * kHeads * kDim;
  Random r(5);
  Held q = random_tensor<T>(r, kQueries, kHeads, kDim), k = random_tensor<T>(r, kKeys, kHeads, kDim);
  Held v = random_tensor<T>(r, kKeys, kHeads, kDim), dout = random_tensor<T>(r, kQueries, kHeads, kDim), sink;
  sink.make({kHeads}, kType<T>);
  numbers<T>(sink)[0] = 0.5, numbers<T>(sink)[1] = -1;
  for (const bool windowed : {false, true}) {
    Held out, lse, dq, dk, dv, dsink;
    const auto make_results = [](Held& o, Held& l) {
      o.make({1, kQueries, kHeads, kDim}, kType<T>), l.make({1, kHeads, kQueries}, kType<T>);
    };
    make_results(out, lse);
    dq.make({1, kQueries, kHeads, kDim}, kType<T>), dk.make({1, kKeys, kHeads, kDim}, kType<T>);
    dv.make({1, kKeys, kHeads, kDim}, kType<T>), dsink.make({kHeads}, kType<T>);
    tandem_attention_args whole{};
    whole.size = sizeof whole;
    whole.q = &q.handle, whole.k = &k.handle, whole.v = &v.handle, whole.sink = &sink.handle;
    whole.causal = 1;
    if (windowed) whole.window = TANDEM_WINDOW_LEFT, whole.window_left = 33;
    whole.alignment = TANDEM_EXPLICIT;
    whole.diagonal_offset = 20;  // the queries begin at the 20th key
    tandem_attention_args backward = whole;
    whole.out = &out.handle, whole.lse = &lse.handle;
    run(TANDEM_FORWARD, whole);
    backward.out = &out.handle, backward.lse = &lse.handle, backward.dout = &dout.handle;
    backward.dq = &dq.handle, backward.dk = &dk.handle, backward.dv = &dv.handle, backward.dsink = &dsink.handle;
    run(TANDEM_BACKWARD, backward);

    Held merged_out, merged_lse, part_out[kParts], part_lse[kParts], part_k[kParts], part_v[kParts];
    make_results(merged_out, merged_lse);
    const tandem_tensor *outs[kParts], *lses[kParts];
    std::vector<tandem_attention_args> calls;
    for (int64_t n = 0; n < kParts; ++n) {
      const auto slice = [&](Held& from, Held& to) {
        to.make({1, kPart, kHeads, kDim}, kType<T>);
        std::copy_n(numbers<T>(from) + n * kPart * kHeads * kDim, kPart * kHeads * kDim, numbers<T>(to));
      };
      slice(k, part_k[n]), slice(v, part_v[n]);
      make_results(part_out[n], part_lse[n]);
      tandem_attention_args part = whole;
      part.k = &part_k[n].handle, part.v = &part_v[n].handle;
      part.out = outs[n] = &part_out[n].handle, part.lse = lses[n] = &part_lse[n].handle;
      part.sink = n == 1 ? &sink.handle : nullptr;
      part.diagonal_offset = 20 - n * kPart;
      run(TANDEM_FORWARD, part);
      calls.push_back(part);
    }
    tandem_merge_args merge{};
    merge.size = sizeof merge;
    merge.parts = kParts, merge.part_out = outs, merge.part_lse = lses;
    merge.out = &merged_out.handle, merge.lse = &merged_lse.handle;
    ASSERT_EQ(tandem_merge(nullptr, &merge, nullptr), TANDEM_OK);
    expect_close<T>(merged_out, out, kQ, "out");
    expect_close<T>(merged_lse, lse, kHeads * kQueries, "lse");

    Held sum_dq, sum_dsink;
    sum_dq.make({1, kQueries, kHeads, kDim}, kType<T>), sum_dsink.make({kHeads}, kType<T>);
    std::vector<T> all_dk, all_dv;
    for (tandem_attention_args& part : calls) {
      Held part_dk, part_dv;
      part_dk.make({1, kPart, kHeads, kDim}, kType<T>), part_dv.make({1, kPart, kHeads, kDim}, kType<T>);
      part.out = &merged_out.handle, part.lse = &merged_lse.handle, part.dout = &dout.handle;
      part.dq = &sum_dq.handle, part.dk = &part_dk.handle, part.dv = &part_dv.handle;
      part.dsink = part.sink != nullptr ? &sum_dsink.handle : nullptr;
      part.accumulate = 1;
      run(TANDEM_BACKWARD, part);
      all_dk.insert(all_dk.end(), numbers<T>(part_dk), numbers<T>(part_dk) + kK / kParts);
      all_dv.insert(all_dv.end(), numbers<T>(part_dv), numbers<T>(part_dv) + kK / kParts);
    }
    expect_close<T>(sum_dq, dq, kQ, "dq");
    expect_close<T>(sum_dsink, dsink, kHeads, "dsink");
    for (int64_t n = 0; n < kK; ++n) {
      ASSERT_NEAR(all_dk[static_cast<size_t>(n)], numbers<T>(dk)[n], kTolerance<T>) << "dk " << n;
      ASSERT_NEAR(all_dv[static_cast<size_t>(n)], numbers<T>(dv)[n], kTolerance<T>) << "dv " << n;
    }
  }
}

TEST(CpuMerge, PartsOfTheKeysAreTheWhole) { expect_parts_to_be_the_whole<float>(); }
TEST(CpuMerge, PartsOfTheKeysAreTheWholeInFloat64) { expect_parts_to_be_the_whole<double>(); }

}  // namespace
}  // namespace tandem::test
