// The rules of score and mask modifications, each broken once.
#include <gtest/gtest.h>

#include <limits>

#include "problem/bound_expression.h"
#include "unit/problem/call.h"

namespace tandem::test {
namespace {

// A valid backward with one modification each: "score * c - slope[head] * float(n)", "doc[batch, q] == doc[batch, k] &&
// on".
struct ModCall {
  Call call;
  Held slope, dslope, doc;
  tandem_mod_scalar scalars[2] = {{"c", TANDEM_FLOAT, 0, 1.5}, {"n", TANDEM_INT, 0, 3}};
  tandem_mod_scalar mask_scalars[1] = {{"on", TANDEM_BOOL, 0, 1}};
  tandem_mod_tensor tensors[1], mask_tensors[1];
  tandem_mod score, mask;

  ModCall() {
    call.dense();
    call.pass = TANDEM_BACKWARD;
    slope.make({4}, kF32);
    dslope.make({4}, kF32);
    doc.make({2, 5}, kI32);
    tensors[0] = {"slope", &slope.handle, &dslope.handle};
    mask_tensors[0] = {"doc", &doc.handle, nullptr};
    score = {sizeof score, "score * c - slope[head] * float(n)", scalars, 2, tensors, 1};
    mask = {sizeof mask, "doc[batch, q] == doc[batch, k] && on", mask_scalars, 1, mask_tensors, 1};
    call.args.score_mod = &score;
    call.args.mask_mod = &mask;
  }
};

struct ModRule {
  const char* name;
  void (*spoil)(ModCall&);
  std::vector<const char*> says;
  tandem_status code = TANDEM_INVALID_ARGUMENT;
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const ModRule kRules[] = {
    {"Size", [](ModCall& c) { c.score.size = 0; }, {"score_mod.size (0) must be sizeof(tandem_mod)"}},
    {"TextNull", [](ModCall& c) { c.mask.text = nullptr; }, {"mask_mod.text (NULL) must be an expression"}},
    {"TextEmpty", [](ModCall& c) { c.score.text = ""; }, {"score_mod: column 1", "an expression"}},
    {"Column",
     [](ModCall& c) { c.score.text = "score - slpoe[head]"; },
     {"score_mod: column 9: 'slpoe' is not a known name"}},
    {"ScoreInMask", [](ModCall& c) { c.mask.text = "score > 0"; }, {"mask_mod: column 1: ", "score"}},
    {"MaskIsNoBool", [](ModCall& c) { c.mask.text = "q - k"; }, {"mask_mod: column 1: a mask_mod must return a bool"}},
    {"ScoreIsBool",
     [](ModCall& c) { c.score.text = "q < k"; },
     {"score_mod: column 1: a score_mod must return a float"}},
    {"Rank", [](ModCall& c) { c.score.text = "score + slope[head, q]"; }, {"score_mod: column 9", "slope"}},
    {"CountNegative", [](ModCall& c) { c.score.scalar_count = -1; }, {"score_mod.scalar_count (-1) must be 0 to 32"}},
    {"CountLarge", [](ModCall& c) { c.score.tensor_count = 33; }, {"score_mod.tensor_count (33) must be 0 to 32"}},
    {"ListNull", [](ModCall& c) { c.score.scalars = nullptr; }, {"score_mod.scalars (NULL) must point to"}},
    {"NameNull", [](ModCall& c) { c.scalars[1].name = nullptr; }, {"score_mod.scalars[].name (NULL)"}},
    {"TensorNameNull", [](ModCall& c) { c.tensors[0].name = nullptr; }, {"score_mod.tensors[].name (NULL)"}},
    {"NameTwice", [](ModCall& c) { c.scalars[1].name = "c"; }, {"score_mod: the name 'c' must be unique"}},
    {"NameTaken",
     [](ModCall& c) { c.scalars[1].name = "seqlen_q"; },
     {"score_mod: the name 'seqlen_q' must not be a word"}},
    {"NameIllegal", [](ModCall& c) { c.scalars[1].name = "2b"; }, {"score_mod: the name '2b' must be letters"}},
    {"ScalarType", [](ModCall& c) { c.scalars[0].type = 9; }, {"score_mod.c.type (9) must be TANDEM_FLOAT"}},
    {"ScalarReserved", [](ModCall& c) { c.scalars[0].reserved = 1; }, {"score_mod.c.reserved (1) must be 0"}},
    {"ScalarFraction", [](ModCall& c) { c.scalars[1].value = 0.5; }, {"score_mod: 'n' (0.5) must be an integer"}},
    {"ScalarNan", [](ModCall& c) { c.scalars[1].value = kNan; }, {"score_mod: 'n'", "must be an integer"}},
    {"TensorNull", [](ModCall& c) { c.tensors[0].tensor = nullptr; }, {"score_mod.slope.tensor (NULL)"}},
    {"TensorRank", [](ModCall& c) { c.slope.handle.ndim = 5; }, {"score_mod.slope.ndim (5) must be 0 to 4"}},
    {"TensorEmpty", [](ModCall& c) { c.slope.shape[0] = 0; }, {"score_mod.slope.dim0 (0) must be at least 1"}},
    {"TensorType",
     [](ModCall& c) {
       c.slope.handle.dtype = {TANDEM_UINT, 8, 1};
     },
     {"score_mod.slope.dtype (uint8)", "int64"}},
    {"TensorDevice",
     [](ModCall& c) {
       c.slope.handle.device = {TANDEM_CUDA, 0};
     },
     {"score_mod.slope.device (type 2"}},
    {"TensorData", [](ModCall& c) { c.doc.handle.data = nullptr; }, {"mask_mod.doc.data (NULL)"}},
    {"GradientShape",
     [](ModCall& c) { c.dslope.make({5}, kF32); },
     {"score_mod.slope.gradient.dim0 (5) must equal score_mod.slope.dim0 (4)"}},
    {"GradientRank",
     [](ModCall& c) {
       c.dslope.make({2, 2}, kF32);
     },
     {"score_mod.slope.gradient.ndim (2) must be 1"}},
    {"GradientType",
     [](ModCall& c) { c.dslope.make({4}, kBf16); },
     {"score_mod.slope.gradient.dtype (bfloat16) must be float32"}},
    {"GradientOverlapsItself",
     [](ModCall& c) { c.dslope.set_strides({0}); },
     {"score_mod.slope.gradient.strides (0)", "overlap"}},
    {"GradientOfMask",
     [](ModCall& c) { c.mask_tensors[0].gradient = &c.dslope.handle; },
     {"mask_mod.doc.gradient must be NULL: pass NULL, because a mask"}},
    {"GradientOfInt",
     [](ModCall& c) { c.slope.make({4}, kI32); },
     {"score_mod.slope.gradient must be NULL: pass NULL, because only tensors of floats"}},
    {"GradientHuge",
     [](ModCall& c) {
       for (auto* of : {&c.slope, &c.dslope}) {
         of->shape.assign(2, int64_t{1} << 25);
         of->handle.shape = of->shape.data();
         of->handle.ndim = 2;
         of->handle.strides = nullptr;
       }
     },
     {"score_mod.slope.gradient must have at most 2^48 elements: "},
     TANDEM_UNSUPPORTED},
    {"GradientIsItsTensor",
     [](ModCall& c) { c.dslope.lie_in(c.slope, 0); },
     {"score_mod.slope.gradient.data", "overlaps score_mod.slope:"}},
    {"DqInDoc",
     [](ModCall& c) { c.doc.memory.resize(400), c.doc.handle.data = c.doc.memory.data(), c.call.dq.lie_in(c.doc, 4); },
     {"dq.data", "overlaps mask_mod.doc"}},
};

class ModRules : public testing::TestWithParam<ModRule> {};
INSTANTIATE_TEST_SUITE_P(, ModRules, testing::ValuesIn(kRules),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(ModRules, IsRefused) {
  ModCall c;
  ASSERT_EQ(c.call.refusal(), "accepted") << "before it was spoilt";
  GetParam().spoil(c);
  Problem problem;
  const Status status = c.call.make(&problem);
  EXPECT_EQ(status.code, GetParam().code);
  for (const char* part : GetParam().says) EXPECT_NE(status.message.find(part), std::string::npos) << status.message;
  EXPECT_EQ(status.message.find('\n'), std::string::npos) << status.message;
}

TEST(Mods, AreRead) {
  ModCall c;
  Problem p;
  ASSERT_TRUE(c.call.make(&p).ok());
  ASSERT_TRUE(p.score_mod && p.mask_mod);
  EXPECT_EQ(p.score_mod->values.scalars, (std::vector<double>{1.5, 3}));
  EXPECT_EQ(p.score_mod->cells, 4);
  EXPECT_EQ(p.mask_mod->cells, 0);
  // The text is read once, but its values are read in every call.
  c.scalars[0].value = -1;
  Problem again;
  ASSERT_TRUE(c.call.make(&again).ok());
  EXPECT_EQ(p.score_mod->program, again.score_mod->program);
  EXPECT_EQ(again.score_mod->values.scalars[0], -1);
  // A name of another type gives another program for the same text.
  c.scalars[0].type = TANDEM_INT;
  ASSERT_TRUE(c.call.make(&again).ok());
  EXPECT_NE(p.score_mod->program, again.score_mod->program);
}

// A forward computes no gradients, and does not read their tensors.
TEST(Mods, GradientsAreOfTheBackward) {
  ModCall c;
  c.call.pass = TANDEM_FORWARD;
  c.tensors[0].gradient = reinterpret_cast<const tandem_tensor*>(8);
  Problem p;
  ASSERT_TRUE(c.call.make(&p).ok());
  EXPECT_EQ(p.score_mod->cells, 0);
}

TEST(Mods, TensorWithoutDimensions) {
  ModCall c;
  c.score.text = "score * slope";
  c.slope.make(std::vector<int64_t>{}, kF32);
  c.dslope.make(std::vector<int64_t>{}, kF32);
  c.slope.handle.shape = c.dslope.handle.shape = nullptr;
  Problem p;
  const Status status = c.call.make(&p);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(p.score_mod->cells, 1);
}

}  // namespace
}  // namespace tandem::test
