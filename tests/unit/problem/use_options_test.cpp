// Texts that equal options, and similar texts that do not.
#include "problem/use_options.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "problem/bound_expression.h"
#include "score_mod/evaluate.h"
#include "support/random.h"
#include "unit/problem/call.h"

namespace tandem::test {
namespace {

constexpr int64_t kNone = TANDEM_UNBOUNDED;

// A dense call of 2 x 4 heads, 30 queries and 50 keys, without options, and texts whose names have a meaning.
struct Texts {
  Call call;
  Held slope, each, own, wide, short_one, doc, gradient, blocks, indices;
  tandem_mod_scalar scalars[4] = {{"c", TANDEM_FLOAT, 0, 2.5},
                                  {"n", TANDEM_INT, 0, 3},
                                  {"on", TANDEM_BOOL, 0, 1},
                                  {"most", TANDEM_INT, 0, INT32_MAX}};
  tandem_mod_tensor tensors[6];
  tandem_mod score, mask;

  Texts() {
    call.dense_of(30, 50);
    tandem_attention_args& a = call.args;
    a.bias = a.dbias = a.sink = a.dsink = a.alibi_slopes = a.seqused_q = a.seqused_k = nullptr;
    slope.make({4}, kF32);
    each.make({2, 4}, kF32);
    own.make({2}, kF32);
    wide.make({4}, kF64);
    short_one.make({3}, kF32);
    doc.make({50}, kI32);
    gradient.make({4}, kF32);
    tensors[0] = {"slope", &slope.handle, nullptr};
    tensors[1] = {"each", &each.handle, nullptr};
    tensors[2] = {"own", &own.handle, nullptr};
    tensors[3] = {"wide", &wide.handle, nullptr};
    tensors[4] = {"short", &short_one.handle, nullptr};
    tensors[5] = {"doc", &doc.handle, nullptr};
    score = {sizeof score, "", scalars, 4, tensors, 6};
    mask = {sizeof mask, "", scalars, 4, tensors, 6};
  }

  Problem read(const char* score_text, const char* mask_text) {
    score.text = score_text;
    mask.text = mask_text;
    call.args.score_mod = score_text != nullptr ? &score : nullptr;
    call.args.mask_mod = mask_text != nullptr ? &mask : nullptr;
    Problem p;
    const Status status = call.make(&p);
    EXPECT_TRUE(status.ok()) << status.message;
    use_options(&p);
    return p;
  }

  void pack() {
    call.packed();
    call.args.sink = call.args.dsink = call.args.alibi_slopes = call.args.seqused_q = call.args.seqused_k = nullptr;
  }

  // Adds lists that equal the mask_mod, or arbitrary lists.
  void give_blocks(bool of_mask_mod) {
    blocks.make({1, 1, 1}, kI32);
    indices.make({1, 1, 1, 1}, kI32);
    call.args.kv_num_blocks = &blocks.handle;
    call.args.kv_indices = &indices.handle;
    call.args.mask_block_q = call.args.mask_block_k = 128;
    call.args.blocks_of_mask_mod = of_mask_mod;
  }
};

// Describes the diagonal and the visible keys around it. "bottom right, -2 to 7" counts the keys before and after the
// diagonal, and "none" is any number. The answer is "text" if only an expression hides keys. The answer begins with
// "text within" if an expression hides keys of a window.
std::string window_of(const Problem& p) {
  if (p.mask_mod && !p.taken.window) return "text";
  const auto bound = [](int64_t x, int64_t sign) {
    return x == kNone ? std::string("none") : std::to_string(sign * x);
  };
  const char* within = p.mask_mod ? "text within " : "";
  return within + (p.bottom_right ? "bottom right" : std::to_string(p.diagonal_offset)) + ", " +
         bound(p.window_left, -1) + " to " + bound(p.window_right, 1);
}

TEST(UseOptions, MasksThatAreWindows) {
  const struct {
    const char *text, *dense, *packed;
  } cases[] = {
      {"k <= q", "0, none to 0", "0, none to 0"},
      {"q >= k", "0, none to 0", "0, none to 0"},
      {"k < q", "0, none to -1", "0, none to -1"},
      {"q - k >= 0", "0, none to 0", "0, none to 0"},
      {"0 >= k - q", "0, none to 0", "0, none to 0"},
      {"not (k > q)", "0, none to 0", "0, none to 0"},
      {"k - 5 <= q + n", "0, none to 8", "0, none to 8"},
      {"q - k < n", "0, -2 to none", "0, -2 to none"},
      {"q - k < most", "0, -2147483646 to none", "0, -2147483646 to none"},
      {"0 <= q - k < 64", "0, -63 to 0", "0, -63 to 0"},
      {"k <= q && q - k <= n && on", "0, -3 to 0", "0, -3 to 0"},
      {"k <= q and q - k < 9 and q - k < 7 and k - q < 7", "0, -6 to 0", "0, -6 to 0"},
      {"abs(q - k) <= 4", "0, -4 to 4", "0, -4 to 4"},
      {"5 > abs(k - q + 1)", "0, -5 to 3", "0, -5 to 3"},
      {"q == k", "0, 0 to 0", "0, 0 to 0"},
      {"true if k <= q else false", "0, none to 0", "0, none to 0"},
      {"d = q - k; d >= 0 and d < 3", "0, -2 to 0", "0, -2 to 0"},
      {"true", "bottom right, none to none", "bottom right, none to none"},
      {"k <= q + seqlen_k - seqlen_q", "bottom right, none to 0", "bottom right, none to 0"},
      {"seqlen_q - q <= seqlen_k - k", "bottom right, none to 0", "bottom right, none to 0"},
      {"abs(q - k + seqlen_k - seqlen_q) < 4", "bottom right, -3 to 3", "bottom right, -3 to 3"},
      // Two diagonals, or lengths: recognised if they are numbers.
      {"k <= q + seqlen_k - seqlen_q && q - k < 9", "0, -8 to 20", "text within bottom right, none to 0"},
      {"q - k < seqlen_q", "0, -29 to none", "text"},
      {"k <= q + seqlen_k", "0, none to 50", "text"},
      // Masks that hide more than a window.
      {"q < seqlen_q && k <= q", "text within 0, none to 0", "text within 0, none to 0"},
      {"k <= q and doc[q] == doc[k]", "text within 0, none to 0", "text within 0, none to 0"},
      {"(k < 4 or q - k < 9) and k <= q", "text within 0, none to 0", "text within 0, none to 0"},
      {"abs(q - k) < 5 and (q - k) % 2 == 0", "text within 0, -4 to 4", "text within 0, -4 to 4"},
      {"abs(q) <= k", "text within 0, 0 to none", "text within 0, 0 to none"},
      {"k <= q != on", "text within 0, none to 0", "text within 0, none to 0"},
      {"k < q and q < k and head == 0", "text", "text"},  // no key is visible
      // Masks that are no windows.
      {"k <= 5", "text", "text"},
      {"q < 5", "text", "text"},
      {"k <= q + doc[k]", "text", "text"},
      {"k <= q or q < 3", "text", "text"},
      {"k <= q + head", "text", "text"},
      {"k <= q + batch", "text", "text"},
      {"k <= 2 * q", "text", "text"},
      {"k + q <= 9", "text", "text"},
      {"k <= q + q", "text", "text"},
      {"abs(q - k) >= 4", "text", "text"},
      {"q - k != 3", "text", "text"},
      {"(q - k) % 4 == 0", "text", "text"},
      {"float(k) <= q", "text", "text"},
      {"k <= q + c", "text", "text"},
      {"not on or k <= q", "text", "text"},
      {"(k <= q) == on", "text", "text"},
      // No key is visible, which no window can express.
      {"false", "text", "text"},
      {"not on", "text", "text"},
      {"3 <= q - k < 3", "text", "text"},
      {"k < q and q < k", "text", "text"},
      // Sums that overflow ints, where texts wrap around.
      {"q < k + most", "text", "text"},
      {"k - most - 9 <= q", "text", "text"},
  };
  for (const auto& one : cases) {
    Texts dense, packed;
    packed.pack();
    EXPECT_EQ(window_of(dense.read(nullptr, one.text)), one.dense) << one.text;
    EXPECT_EQ(window_of(packed.read(nullptr, one.text)), one.packed) << one.text;
    dense.call.args.seqused_q = &dense.call.seqused_q.handle;  // separate lengths, too
    EXPECT_EQ(window_of(dense.read(nullptr, one.text)), one.packed) << one.text;
  }
}

// A text may use each of its parts twice, and the number of reads is limited: here 2^60 sums, and as many conditions.
TEST(UseOptions, TextsThatUseTheirPartsAgain) {
  std::string sums = "a0 = k - q; ", conditions = "c0 = head < 1; ";
  for (int n = 0; n < 60; ++n) {
    const std::string a = "a" + std::to_string(n), c = "c" + std::to_string(n), i = std::to_string(n + 1);
    sums += "a" + i + " = (" + a + " + " + i + ") - (" + a + " - 1); ";
    conditions += "c" + i + " = (" + c + " and k > " + i + ") and (" + c + " and q > " + i + "); ";
  }
  Texts t;
  EXPECT_EQ(window_of(t.read(nullptr, (sums + "a60 <= 9999").c_str())), "text");
  EXPECT_EQ(window_of(t.read(nullptr, (conditions + "c60").c_str())), "text");
}

// Texts together with causal, a window and ALiBi, which measure from the call's diagonal.
TEST(UseOptions, WindowsMeet) {
  const auto beside = [](const char* text, int32_t alignment, bool alibi, bool packed, int64_t offset = 0) {
    Texts t;
    if (packed) t.pack();
    t.call.args.causal = 1;
    t.call.args.alignment = alignment;
    t.call.args.diagonal_offset = offset;
    t.call.args.window = TANDEM_WINDOW_LEFT;
    t.call.args.window_left = 10;
    t.call.args.alibi_slopes = alibi ? &t.call.alibi_slopes.handle : nullptr;
    return window_of(t.read(nullptr, text));
  };
  EXPECT_EQ(beside("q - k < 9", TANDEM_TOP_LEFT, true, true), "0, -8 to 0");
  EXPECT_EQ(beside("q - k < 9", TANDEM_BOTTOM_RIGHT, false, false), "0, 10 to 20");  // 20 keys more than queries
  EXPECT_EQ(beside("k <= q + 30", TANDEM_BOTTOM_RIGHT, false, false), "0, 10 to 20");
  EXPECT_EQ(beside("q - k < 9", TANDEM_EXPLICIT, false, true, 4), "0, -6 to 4");
  EXPECT_EQ(beside("k < q + seqlen_k - seqlen_q", TANDEM_BOTTOM_RIGHT, true, true), "bottom right, -10 to -1");
  // These diagonals differ from the call's diagonal and cannot replace it, because ALiBi uses it or lengths are
  // unknown.
  EXPECT_EQ(beside("q - k < 9", TANDEM_BOTTOM_RIGHT, true, false), "text");
  EXPECT_EQ(beside("q - k < 9", TANDEM_BOTTOM_RIGHT, false, true), "text");
  EXPECT_EQ(beside("k < q - 10", TANDEM_TOP_LEFT, false, false), "text");  // together they hide all keys
}

TEST(UseOptions, DiagonalsOfEachSequence) {
  Texts t;
  Held offsets;
  offsets.make({3, 4});
  t.call.args.alignment = TANDEM_EXPLICIT;
  t.call.args.diagonal_offsets = &offsets.handle;
  EXPECT_EQ(window_of(t.read(nullptr, "k <= q")), "0, none to 0");  // no distance was measured from the lengths
  EXPECT_FALSE(t.read(nullptr, "k <= q").diagonal_offsets);
  t.call.args.causal = 1;
  EXPECT_EQ(window_of(t.read(nullptr, "k <= q")), "text");
}

// Lists are read, unless the caller declares that they hide no more than the mask.
TEST(UseOptions, BlocksOfTheMask) {
  for (const bool of_mask_mod : {false, true}) {
    Texts t;
    t.give_blocks(of_mask_mod);
    const Problem window = t.read(nullptr, "k <= q");
    EXPECT_EQ(window_of(window), of_mask_mod ? "0, none to 0" : "text");
    EXPECT_NE(of_mask_mod, bool{window.block_mask});
    EXPECT_TRUE(t.read(nullptr, "k <= q || k < 3").block_mask);
    const Problem part = t.read(nullptr, "k <= q && k != 3");
    EXPECT_EQ(window_of(part), "text");
    EXPECT_TRUE(part.block_mask);
  }
  Texts t;
  t.give_blocks(true);
  t.call.args.kv_num_blocks = t.call.args.kv_indices = nullptr;
  t.call.args.mask_block_q = t.call.args.mask_block_k = 0;
  EXPECT_NE(t.call.refusal().find("blocks_of_mask_mod (1) must be 0 without kv_num_blocks"), std::string::npos);
  t.give_blocks(true);
  EXPECT_NE(t.call.refusal().find("blocks_of_mask_mod (1) must be 0 without mask_mod"), std::string::npos);
}

// Random masks and scores together with options, with numbers up to the ends of the ints. Each key's visibility and
// score follow the given texts and options.
TEST(UseOptions, FollowTheTexts) {
  Random r(1);
  const auto one_of = [&](auto... choices) {
    const char* all[] = {choices...};
    return std::string(all[r.between(0, sizeof...(choices) - 1)]);
  };
  const auto distance = [&] {
    return one_of("(q-k)", "(k-q)", "(q-k+n)", "(q-(k-n))", "(q-k+seqlen_k-seqlen_q)", "(n-q+k)", "(k+seqlen_q-q)");
  };
  const auto part = [&] {
    const std::string d = distance();
    if (r.chance(0.1)) return one_of("on", "true", "(q^k)&3!=0", "k<9", "(k<=q or k<3)");
    return (r.chance(0.2) ? "abs" + d : d) + one_of("<", "<=", ">", ">=", "==") + one_of("0", "9", "n", "-n", "most");
  };
  int taken[2] = {};
  for (int n = 0; n < 4000; ++n) {
    Texts t;
    const auto seqlen_q = static_cast<int32_t>(r.between(2, 20)), seqlen_k = static_cast<int32_t>(r.between(1, 20));
    t.call.dense_of(seqlen_q, seqlen_k);
    tandem_attention_args& a = t.call.args;
    a.bias = a.dbias = a.sink = a.dsink = a.alibi_slopes = a.seqused_q = a.seqused_k = nullptr;
    if (r.chance(0.3)) a.seqused_q = &t.call.seqused_q.handle;
    t.scalars[1].value =
        r.chance(0.1) ? (r.chance(0.5) ? INT32_MIN : INT32_MAX) : static_cast<double>(r.between(-9, 9));
    t.scalars[2].value = r.chance(0.9);
    reinterpret_cast<float*>(t.slope.memory.data())[0] = 0.5F;
    a.causal = r.chance(0.3);
    if (r.chance(0.3)) a.window = TANDEM_WINDOW_LEFT;
    a.window_left = a.window != 0 ? r.between(0, 12) : 0;
    a.alignment = static_cast<int32_t>(r.between(TANDEM_BOTTOM_RIGHT, TANDEM_EXPLICIT));
    a.diagonal_offset = a.alignment == TANDEM_EXPLICIT ? r.between(-9, 9) : 0;
    const std::string mask = part() + (r.chance(0.6) ? " and " + part() : "");
    const std::string score = one_of("score-", "score+") + "slope[head]*" + one_of("abs", "") + distance();
    t.score.text = score.c_str();
    t.mask.text = mask.c_str();
    a.score_mod = r.chance(0.5) ? &t.score : nullptr;
    a.mask_mod = &t.mask;
    Problem given;
    const Status status = t.call.make(&given);
    ASSERT_TRUE(status.ok()) << status.message;
    Problem p = given;
    use_options(&p);
    taken[0] += p.taken.window;
    taken[1] += p.taken.alibi;
    const Sequence s = sequence_of(given, 1), there = sequence_of(p, 1);
    const auto value = [&](const ModView& mod, int64_t i, int64_t j) {
      const score_mod::Mod& read = mod->program->mod;
      score_mod::Evaluator<double> evaluate(read.graph, {&read.result, 1});
      const auto q = static_cast<int32_t>(i), k = static_cast<int32_t>(j);
      evaluate.run(0.25, {1, 0, q, k, static_cast<int32_t>(s.q_len), static_cast<int32_t>(s.k_len)}, mod->values);
      return evaluate[read.result];
    };
    for (int64_t i = 0; i < s.q_len; ++i) {
      const KeySpan before = visible_keys(given, s, i), after = visible_keys(p, there, i);
      for (int64_t j = 0; j < s.k_len; ++j) {
        const bool seen = before.begin <= j && j < before.end && value(given.mask_mod, i, j).integer != 0;
        const bool shown = after.begin <= j && j < after.end && (!p.mask_mod || value(p.mask_mod, i, j).integer != 0);
        ASSERT_EQ(seen, shown) << mask << ", n = " << t.scalars[1].value << ": " << i << " " << j;
        if (!seen || !given.score_mod || p.score_mod) continue;
        const auto away = static_cast<double>(std::abs(i + there.diagonal - j));
        ASSERT_EQ(value(given.score_mod, i, j).real, 0.25 - 0.5 * away) << score << ": " << i << " " << j;
      }
    }
  }
  EXPECT_GT(taken[0], 1000);
  EXPECT_GT(taken[1], 300);
}

// A text equals a softcap, of a constant or of the call's scalar, but not with an operation between them.
TEST(UseOptions, ScoresThatAreTheSoftcap) {
  const auto cap_of = [](const char* text, double c = 1, bool alibi = false, bool with_gradient = false) {
    Texts t;
    t.call.pass = with_gradient ? TANDEM_BACKWARD : TANDEM_FORWARD;
    t.scalars[0].value = c;
    t.tensors[0].gradient = &t.gradient.handle;
    t.call.args.alibi_slopes = alibi ? &t.call.alibi_slopes.handle : nullptr;
    const Problem p = t.read(text, nullptr);
    EXPECT_NE(p.softcap != 0, bool{p.score_mod});
    EXPECT_EQ(used_options(p), p.softcap != 0 ? "score_mod is softcap" : "");
    return p.softcap;
  };
  EXPECT_EQ(cap_of("30 * tanh(score / 30)"), 30);
  EXPECT_EQ(cap_of("tanh(score / 32) * 32"), 32);
  EXPECT_EQ(cap_of("c * tanh(score / c)", 2.5), 2.5);
  EXPECT_EQ(cap_of("n * tanh(score / n)"), 3);
  for (const char* text :
       {"30 * tanh(score / 31)", "30 * tanh(score * 30)", "tanh(score / 30)", "30 * tanh(30 / score)",
        "slope[head] * tanh(score / slope[head])", "score + 30 * tanh(score / 30)", "30 * score"}) {
    EXPECT_EQ(cap_of(text), 0) << text;
  }
  EXPECT_EQ(cap_of("c * tanh(score / c)", -2), 0);
  EXPECT_EQ(cap_of("c * tanh(score / c)", 0), 0);
  EXPECT_EQ(cap_of("30 * tanh(score / 30)", 1, true), 0);
  EXPECT_EQ(cap_of("30 * tanh(score / 30)", 1, false, true), 0);  // slope needs a gradient, which is zero
}

// "slope from 0": the tensor of the slopes, and the diagonal; or the text.
std::string alibi_of(const Texts& t, const Problem& p) {
  if (p.score_mod) return "text";
  const bool each = p.alibi_slopes.data == static_cast<std::byte*>(t.each.handle.data);
  EXPECT_TRUE(each || p.alibi_slopes.data == static_cast<std::byte*>(t.slope.handle.data));
  EXPECT_EQ(p.alibi_slopes.batch, each ? 4 : 0);
  EXPECT_EQ(p.alibi_slopes.head, 1);
  EXPECT_EQ(p.alibi_slopes.dtype, DType::f32);
  return (each ? "each" : "slope") + std::string(" from ") +
         (p.bottom_right ? "bottom right" : std::to_string(p.diagonal_offset));
}

TEST(UseOptions, ScoresThatAreAlibi) {
  const struct {
    const char *text, *alone, *causal, *ahead;  // causal: with k <= q; ahead: with k >= q
  } cases[] = {
      {"score - slope[head] * abs(q - k)", "slope from 0", "slope from 0", "slope from 0"},
      {"score - abs(k - q) * slope[head]", "slope from 0", "slope from 0", "slope from 0"},
      {"score + -slope[head] * abs(q - k)", "slope from 0", "slope from 0", "slope from 0"},
      {"-abs(q - k) * slope[head] + score", "slope from 0", "slope from 0", "slope from 0"},
      {"score - each[batch, head] * abs(q - k)", "each from 0", "each from 0", "each from 0"},
      {"score - slope[head] * abs(q - k + 4)", "slope from 4", "slope from 4", "slope from 4"},
      {"score - slope[head] * abs(k - q + n)", "slope from -3", "slope from -3", "slope from -3"},
      {"score - slope[head] * abs(q + seqlen_k - seqlen_q - k)", "slope from bottom right", "slope from bottom right",
       "slope from bottom right"},
      {"score + slope[head] * (k - q)", "text", "slope from 0", "text"},
      {"score - (q - k) * slope[head]", "text", "slope from 0", "text"},
      {"score - -slope[head] * (k - q)", "text", "slope from 0", "text"},
      {"score + slope[head] * (q - k)", "text", "text", "slope from 0"},
      {"score - slope[head] * (k - q)", "text", "text", "slope from 0"},
      {"score - slope[head] * (q - k - 1)", "text", "text", "text"},
      {"score - slope[head] * (q - k + 1)", "text", "slope from 1", "text"},
      // Texts that are not ALiBi.
      {"score + slope[head] * abs(q - k)", "text", "text", "text"},
      {"slope[head] * abs(q - k) - score", "text", "text", "text"},
      {"score - slope[batch] * abs(q - k)", "text", "text", "text"},
      {"score - slope[head % 4] * abs(q - k)", "text", "text", "text"},
      {"score - slope[3 - head] * abs(q - k)", "text", "text", "text"},
      {"score - slope[q] * abs(q - k)", "text", "text", "text"},
      {"score - each[head, batch] * abs(q - k)", "text", "text", "text"},
      {"score - each[0, head] * abs(q - k)", "text", "text", "text"},
      {"score - own[head] * abs(q - k)", "text", "text", "text"},    // two, and four heads
      {"score - short[head] * abs(q - k)", "text", "text", "text"},  // three
      {"score - wide[head] * abs(q - k)", "text", "text", "text"},   // float64
      {"score - doc[head] * abs(q - k)", "text", "text", "text"},    // int32
      {"score - c * abs(q - k)", "text", "text", "text"},
      {"score - slope[head] * abs(q - 2 * k)", "text", "text", "text"},
      {"score - slope[head] * (abs(q - k) + 1)", "text", "text", "text"},
      {"2 * score - slope[head] * abs(q - k)", "text", "text", "text"},
      {"score - slope[head] * abs(q - k) + 1", "text", "text", "text"},
      {"score - slope[head] * abs(float(q - k))", "text", "text", "text"},
      {"score - slope[head] / abs(q - k)", "text", "text", "text"},
  };
  for (const auto& one : cases) {
    Texts t;
    EXPECT_EQ(alibi_of(t, t.read(one.text, nullptr)), one.alone) << one.text;
    EXPECT_EQ(alibi_of(t, t.read(one.text, "k <= q")), one.causal) << one.text;
    EXPECT_EQ(alibi_of(t, t.read(one.text, "k >= q")), one.ahead) << one.text;
  }
}

// The window shows the same keys for any diagonal of ALiBi.
TEST(UseOptions, AlibiMovesTheDiagonal) {
  Texts t;
  const Problem p = t.read("score - slope[head] * abs(q - k + 4)", "q - k < 9 and k <= q");
  EXPECT_EQ(window_of(p), "4, -12 to -4");
  EXPECT_EQ(used_options(p), "score_mod is ALiBi, mask_mod is a window");
  t.call.args.causal = 1;  // at the last query and key, 20 keys further
  EXPECT_EQ(window_of(t.read("score - slope[head] * abs(q - k)", nullptr)), "0, none to 20");
  t.pack();
  EXPECT_EQ(alibi_of(t, t.read("score - slope[head] * abs(q - k)", nullptr)), "text");
  t.call.args.causal = 0;
  EXPECT_EQ(alibi_of(t, t.read("score - slope[head] * abs(q - k)", nullptr)), "slope from 0");
  EXPECT_EQ(alibi_of(t, t.read("score - slope[head] * abs(q - k + seqlen_k - seqlen_q)", nullptr)),
            "slope from bottom right");
  EXPECT_EQ(alibi_of(t, t.read("score - slope[head] * abs(q - k + 1 + seqlen_k - seqlen_q)", nullptr)), "text");
}

TEST(UseOptions, AlibiWithAnOperationBetween) {
  const char* text = "score - slope[head] * abs(q - k)";
  Texts t;
  t.call.args.softcap = 5;  // softcap precedes ALiBi, as it precedes the text
  EXPECT_EQ(alibi_of(t, t.read(text, nullptr)), "slope from 0");
  t.call.args.bias = &t.call.bias.handle;  // bias follows ALiBi
  EXPECT_EQ(alibi_of(t, t.read(text, nullptr)), "text");
  t.call.args.bias = nullptr;
  t.call.args.alibi_slopes = &t.call.alibi_slopes.handle;
  EXPECT_EQ(alibi_of(t, t.read(text, nullptr)), "text");
  t.call.args.alibi_slopes = nullptr;
  t.tensors[0].gradient = &t.gradient.handle;
  EXPECT_EQ(alibi_of(t, t.read(text, nullptr)), "slope from 0");  // a forward has no gradients
  t.call.pass = TANDEM_BACKWARD;
  EXPECT_EQ(alibi_of(t, t.read(text, nullptr)), "text");
}

// With lists that kernels read, the gradients use the option, and the forward uses its text.
TEST(UseOptions, AlibiWithLists) {
  Texts t;
  t.give_blocks(false);
  const char* text = "score - slope[head] * abs(q - k)";
  EXPECT_EQ(alibi_of(t, t.read(text, "k <= q")), "text");
  t.call.pass = TANDEM_BACKWARD;
  EXPECT_EQ(alibi_of(t, t.read(text, "k <= q")), "slope from 0");
  t.give_blocks(true);  // kernels do not read these lists
  t.call.pass = TANDEM_FORWARD;
  EXPECT_EQ(alibi_of(t, t.read(text, "k <= q")), "slope from 0");
}

// One slope for all heads, because an index beyond the tensor reads the nearest element.
TEST(UseOptions, OneSlope) {
  Texts t;
  t.slope.make({1}, kF32);
  const Problem p = t.read("score - slope[head] * abs(q - k)", nullptr);
  EXPECT_FALSE(p.score_mod);
  EXPECT_EQ(p.alibi_slopes.head, 0);
}

}  // namespace
}  // namespace tandem::test
