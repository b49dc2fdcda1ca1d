// Random calls, most of them invalid. The calls are refused with a message, or converted to a Problem that stays in
// bounds, which sanitizers check.
#include <gtest/gtest.h>

#include <cmath>

#include "support/random.h"
#include "unit/problem/call.h"

namespace tandem::test {
namespace {

int64_t wild(Random& random) {
  constexpr int64_t values[] = {
      0, 1, -1, 2, 3, 7, INT32_MAX, INT64_MAX, INT64_MIN, INT32_MIN, 1u << 31, 1ll << 62, -(1ll << 62), INT64_MAX / 3};
  return random.chance(0.5) ? values[random.between(0, std::size(values) - 1)] : random.between(-4, 40);
}

double wild_number(Random& random) {
  constexpr double values[] = {0, -0.0, 1, -1, 0.5, 1e308, -1e308, 1e-320, HUGE_VAL, -HUGE_VAL, NAN};
  return values[random.between(0, std::size(values) - 1)];
}

void spoil(Held& held, Random& random) {
  const auto dim = [&] { return static_cast<size_t>(random.between(0, static_cast<int64_t>(held.shape.size()) - 1)); };
  switch (random.between(0, 7)) {
    case 0: held.shape[dim()] = wild(random); break;
    case 1: held.handle.ndim = static_cast<int32_t>(wild(random)); break;
    case 2: held.handle.dtype.code = static_cast<uint8_t>(random.next()); break;
    case 3: held.handle.dtype.bits = static_cast<uint8_t>(random.next()); break;
    case 4: held.handle.byte_offset = random.next() >> random.between(0, 63); break;
    case 5: held.handle.data = reinterpret_cast<void*>(random.next() >> random.between(0, 63)); break;
    default: {
      std::vector<int64_t> strides(held.shape.size());
      for (int64_t& stride : strides) stride = wild(random);
      held.set_strides(strides);
    }
  }
}

// The members of a call that are numbers, by type.
struct Numbers {
  std::vector<int64_t*> integers;
  std::vector<int32_t*> flags;
  std::vector<double*> reals;

  explicit Numbers(tandem_attention_args& args) {
#define OPTION(member, type, kind, schema) add(args.member);
#define MEMBER(member, type) add(args.member);
#include "problem/options.def"
  }
  void add(int64_t& member) { integers.push_back(&member); }
  void add(int32_t& member) { flags.push_back(&member); }
  void add(double& member) { reals.push_back(&member); }
  void add(uint64_t&) {}  // any seed is valid
  template <class T>
  void add(T*&) {}
};

template <class T>
T& pick(const std::vector<T*>& members, Random& random) {
  return *members[random.between(0, static_cast<int64_t>(members.size()) - 1)];
}

void spoil(tandem_attention_args& args, Random& random) {
  const Numbers numbers(args);
  pick(numbers.integers, random) = wild(random);
  if (random.chance(0.3)) pick(numbers.flags, random) = static_cast<int32_t>(wild(random));
  if (random.chance(0.3)) pick(numbers.reals, random) = wild_number(random);
}

void check(const Problem& p) {
  EXPECT_GE(p.batch, 0);
  EXPECT_TRUE(p.head_dim >= 1 && p.head_dim <= 512 && p.head_dim_v >= 1 && p.head_dim_v <= 512);
  EXPECT_TRUE(p.heads_k == 0 ? p.heads_q == 0 : p.heads_q % p.heads_k == 0);
  EXPECT_TRUE(std::isfinite(p.softmax_scale) && std::isfinite(p.softcap) && p.softcap >= 0);
  Sequence s;
  s.q_len = s.q_rows = p.seqlen_q;
  s.k_len = s.k_rows = p.seqlen_k;
  s.diagonal = p.bottom_right ? s.k_len - s.q_len : 0;
  for (const int64_t row : {int64_t{0}, p.seqlen_q / 2, std::max<int64_t>(p.seqlen_q - 1, 0)}) {
    const KeySpan keys = visible_keys(p, s, row);
    EXPECT_TRUE(0 <= keys.begin && keys.begin <= keys.end && keys.end <= s.k_len);
  }
}

TEST(Hostile, NeverCrashes) {
  int accepted = 0;
  for (uint64_t seed = 1; seed <= 20000; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Call call;
    void (Call::*const bases[])() = {&Call::dense, &Call::packed, &Call::paged};
    (call.*bases[random.between(0, 2)])();
    call.pass = random.chance(0.5) ? TANDEM_BACKWARD : TANDEM_FORWARD;
    Held* const floats[] = {&call.q,    &call.k,     &call.v,    &call.out,   &call.lse,
                            &call.dout, &call.dlse,  &call.dq,   &call.dk,    &call.dv,
                            &call.bias, &call.dbias, &call.sink, &call.dsink, &call.alibi_slopes};
    Held* const indices[] = {&call.cu_seqlens_q, &call.cu_seqlens_k, &call.seqused_q, &call.seqused_k,
                             &call.page_table};
    for (int64_t n = random.between(0, 2); n > 0; --n) {
      Held& held = *floats[random.between(0, 14)];
      if (!held.shape.empty()) spoil(held, random);
    }
    if (random.chance(0.5)) spoil(call.args, random);
    Held& index = *indices[random.between(0, 4)];
    if (index.shape.empty()) {
    } else if (random.chance(0.3)) {  // only values change, because a layout needs memory
      index.ints()[random.between(0, index.shape[0] - 1)] = static_cast<int32_t>(wild(random));
    } else if (random.chance(0.3)) {
      spoil(index, random);
      call.with_data = false;
    }
    Problem problem;
    const Status status = call.make(&problem);
    if (status.ok()) {
      ++accepted;
      check(problem);
    } else {
      EXPECT_FALSE(status.message.empty());
      EXPECT_EQ(status.message.find('\n'), std::string::npos);
    }
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 19000);
}

}  // namespace
}  // namespace tandem::test
