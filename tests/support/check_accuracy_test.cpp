// The check of accuracy must pass correct results and refuse wrong results, because otherwise it proves nothing.
#include "support/check_accuracy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "problem/convert.h"
#include "support/gpu.h"

namespace tandem::test {
namespace {

constexpr const char* kFlags =
    "--batch 2 --heads-q 4 --heads-k 2 --seqlen-q 20 --seqlen-k 24 --causal 1 --bias f32 --sink f32 --dlse 1 --dtype ";

// Returns the failure of an engine that runs the reference on a problem changed by `before`, and changes its results by
// `after`.
std::string checked(const std::string& dtype, const std::function<void(Problem&)>& before,
                    const std::function<void(const Problem&)>& after) {
  const NamedEngine reference = engine_named("oracle");
  const Engine engine = [&](const Problem& p) {
    Problem changed = p;
    if (before) before(changed);
    reference.run(changed);
    if (after) after(p);
  };
  return run_case(from_flags(kFlags + dtype), engine).failure;
}

void expect_refused(const char* word, const std::function<void(Problem&)>& before,
                    const std::function<void(const Problem&)>& after = nullptr) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const std::string failure = checked(dtype, before, after);
    EXPECT_NE(failure.find(word), std::string::npos) << dtype << ": " << failure;
    EXPECT_NE(failure.find("repeat: tandem_fuzz --case '"), std::string::npos) << failure;
  }
}

TEST(CheckAccuracy, PassesTheReference) {
  for (const char* dtype : {"f64", "f32", "bf16", "f16"}) EXPECT_EQ(checked(dtype, nullptr, nullptr), "");
}

TEST(CheckAccuracy, RefusesAnotherFormula) {
  expect_refused("max error", [](Problem& p) { p.window_right = 1; });
  expect_refused("max error", [](Problem& p) { p.softmax_scale *= 1.02; });
  expect_refused("max error", [](Problem& p) { p.softcap = 10; });
  expect_refused("max error", [](Problem& p) { p.bias.present = false; });
  expect_refused("max error", [](Problem& p) { p.sink.present = false; });
  expect_refused("dq", [](Problem& p) { p.dlse.present = false; });
  expect_refused("max error", [](Problem& p) { p.dropout = {.p = 0.05, .seed = 1, .offset = 1}; });
}

// One number of out has an error of a few units of its type.
TEST(CheckAccuracy, RefusesOneWrongNumber) {
  expect_refused("out of sequence 1, head 3", nullptr, [](const Problem& p) {
    if (p.pass != TANDEM_FORWARD) return;
    std::byte* at = p.out.at(1, 19, 3);
    const double unit = p.dtype == DType::f32 ? 0x1p-21 : p.dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
    store(p.dtype, at, load(p.dtype, at) + 8 * unit);
  });
}

TEST(CheckAccuracy, RefusesACoarserResult) {
  // Every number has an error of half a unit: no single error is large, but their mean is.
  for (const char* name : {"out", "dv"}) {
    const View Problem::*view = name == std::string("out") ? &Problem::out : &Problem::dv;
    expect_refused(name, nullptr, [=](const Problem& p) {
      const View& v = p.*view;
      if (!v || (p.pass == TANDEM_FORWARD) != (view == &Problem::out)) return;
      const bool keys = view == &Problem::dv;
      for (int64_t i = 0; i < (keys ? p.seqlen_k : p.seqlen_q); ++i) {
        for (int64_t h = 0; h < (keys ? p.heads_k : p.heads_q); ++h) {
          for (int64_t c = 0; c < p.head_dim_v; ++c) {
            std::byte* at = v.at(0, i, h) + c * size_of(v.dtype);
            const double unit = p.dtype == DType::f32 ? 0x1p-20 : p.dtype == DType::bf16 ? 0x1.8p-8 : 0x1.8p-11;
            store(v.dtype, at, load(v.dtype, at) * (1 + unit));
          }
        }
      }
    });
  }
}

// A query that sees one key has a dq of 0, except for the rounding errors of dP and delta, which are the same sum. All
// of dq depends on that one number. Six runs of standard attention may have small errors by chance; 32 do not. A much
// larger error is refused.
TEST(CheckAccuracy, OneNumberThatDecidesAll) {
  const Case c = from_flags(
      "--dtype f16 --heads-q 15 --heads-k 3 --seqlen-q 0 --seqlen-k 0 --head-dim 192 --head-dim-v 128 --packed 1 "
      "--lengths-q 12,4,3,32 --lengths-k 1,134,1,32 --causal 1 --float32 og --align 8 --max-seqlen 95 --seed 4029");
  const NamedEngine cpu = engine_named("cpu");
  const Verdict verdict = run_case(c, cpu.run);
  EXPECT_EQ(verdict.failure, "");
  const Verdict worse = run_case(c, [&](const EngineCall& call) {
    cpu.run(call);
    if (call.pass != TANDEM_BACKWARD) return;
    for (int64_t column = 0; column < call.head_dim; ++column) {
      std::byte* at = call.dq.at(0, 12 + 4 + 2, 4) + column * size_of(call.dq.dtype);
      store(call.dq.dtype, at, load(call.dq.dtype, at) + 1e-3);
    }
  });
  EXPECT_NE(worse.failure.find("dq of sequence 2, head 4"), std::string::npos) << worse.failure;
}

// A row of one key has a probability of exactly 1. A result with float32's rounding of the lse is refused.
TEST(CheckAccuracy, RefusesProbabilitiesThatMissOne) {
  const NamedEngine reference = engine_named("oracle");
  for (const double off : {0.0, 2e-6}) {
    const Engine engine = [&](const EngineCall& call) {
      reference.run(call);
      if (call.pass != TANDEM_BACKWARD) return;
      for (int64_t c = 0; c < call.head_dim_v; ++c) {
        std::byte* at = call.dv.at(0, 0, 0) + c * size_of(call.dv.dtype);
        store(call.dv.dtype, at, load(call.dv.dtype, at) * (1 + off));
      }
    };
    const std::string failure =
        run_case(from_flags("--seqlen-q 1 --seqlen-k 1 --head-dim 256 --head-dim-v 256 --values large"), engine)
            .failure;
    EXPECT_EQ(failure.find("dv") == std::string::npos, off == 0) << failure;
  }
}

TEST(CheckAccuracy, RefusesNanAndWhatWasNotWritten) {
  expect_refused("NaN", nullptr, [](const Problem& p) {
    if (p.pass == TANDEM_FORWARD) store(p.dtype, p.out.at(0, 3, 1), NAN);
  });
  const std::string failure = run_case(from_flags("--seqlen-q 3"), [](const Problem&) {}).failure;
  EXPECT_NE(failure.find("NaN"), std::string::npos) << failure;
}

TEST(CheckAccuracy, RefusesAlmostZeroWhereZeroMustBe) {
  const NamedEngine reference = engine_named("oracle");
  const Engine engine = [&](const Problem& p) {
    reference.run(p);
    if (p.pass == TANDEM_FORWARD) store(p.dtype, p.out.at(0, 0, 0), 1e-7);  // a row without visible keys
  };
  const std::string failure = run_case(from_flags("--seqlen-q 5 --seqlen-k 3 --causal 1"), engine).failure;
  EXPECT_NE(failure.find("not exactly zero"), std::string::npos) << failure;
}

TEST(CheckAccuracy, RefusesAFiniteLogSumExpOfNothing) {
  const NamedEngine reference = engine_named("oracle");
  const Engine engine = [&](const Problem& p) {
    reference.run(p);
    if (p.pass == TANDEM_FORWARD) store(p.lse.dtype, p.lse.at(0, 0, 0), -1e30);  // a row without visible keys
  };
  const std::string failure = run_case(from_flags("--seqlen-q 5 --seqlen-k 3 --causal 1"), engine).failure;
  EXPECT_NE(failure.find("infinity"), std::string::npos) << failure;
}

TEST(CheckAccuracy, RefusesStrayWrites) {
  expect_refused("outside its elements", nullptr, [](const Problem& p) {
    if (p.pass == TANDEM_FORWARD) store(p.dtype, p.out.at(0, 0, 0) - size_of(p.dtype), 1);
  });
  expect_refused("an input was written to", nullptr, [](const Problem& p) { store(p.dtype, p.k.at(0, 0, 0), 0.123); });
}

TEST(CheckAccuracy, ReportsWhyACaseIsRefused) {
  const Verdict verdict = run_case(from_flags("--left 3 --right -9"), engine_named("oracle").run);
  EXPECT_EQ(verdict.failure, "");
  EXPECT_NE(verdict.refusal.find("window_left"), std::string::npos) << verdict.refusal;
}

TEST(CheckAccuracy, RefusesACaseThatIsWrittenToAndThenRefused) {
  for (const bool writes : {false, true}) {
    const Verdict verdict = run_case(from_flags("--seqlen-q 3"), [=](const EngineCall& call) {
      if (writes) call.outputs->out.set(0, 1);
      throw Refused("no");
    });
    EXPECT_EQ(verdict.refusal, "no");
    EXPECT_EQ(verdict.failure.empty(), !writes) << verdict.failure;
  }
  const Verdict verdict =
      run_case(from_flags("--seqlen-q 3"), [](const EngineCall&) { throw std::logic_error("lost"); });
  EXPECT_EQ(verdict.refusal, "");
  EXPECT_TRUE(verdict.failure.starts_with("lost\n  repeat: tandem_fuzz --case '")) << verdict.failure;
  const auto lose = [](const EngineCall&) { throw std::logic_error("lost"); };
  const std::string elsewhere = run_case(from_flags("--seqlen-q 3"), lose, nullptr, nullptr, "--device d ").failure;
  EXPECT_TRUE(elsewhere.starts_with("lost\n  repeat: tandem_fuzz --device d --case '")) << elsewhere;
}

TEST(Case, ReadsBackWhatItPrints) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    for (const Case& c : {random_case(seed), random_gpu_case(seed)})
      EXPECT_EQ(from_flags(to_flags(c)), c) << to_flags(c);
  }
  EXPECT_THROW(from_flags("--sequlen 3"), std::invalid_argument);
  EXPECT_THROW(from_flags("--batch"), std::invalid_argument);
}

// Random GPU cases are valid for a device, and nearly all have bases and strides in multiples of 16 bytes, as GPUs
// require.
TEST(Case, RandomGpuCasesAreForGpus) {
  int aligned = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Instance in(random_gpu_case(seed));
    Outputs out = in.outputs(TANDEM_FORWARD);
    tandem_attention_args a = in.args(TANDEM_FORWARD, &out);
    bool all = in.c.head_dim % 8 == 0 && in.c.head_dim_v % 8 == 0;
    for (const tandem_tensor* t : {a.q, a.k, a.v, a.out}) {
      all &= t->byte_offset % 16 == 0;
      for (int dim = 0; t->strides != nullptr && dim + 1 < t->ndim; ++dim) all &= t->strides[dim] % 8 == 0;
    }
    aligned += all;
    Problem p;
    const Status status = make_problem(TANDEM_FORWARD, &a, {TANDEM_CPU, 0}, true, &p);
    EXPECT_TRUE(status.ok()) << status.message << ": " << to_flags(in.c);
    EXPECT_EQ(in.c.packed, a.max_seqlen_q * a.max_seqlen_k > 0);
  }
  EXPECT_GE(aligned, 90);
}

}  // namespace
}  // namespace tandem::test
