// tandem.hpp: the C structs that it builds, and its exceptions.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "tandem/tandem.hpp"

namespace {

using tandem::Attention;
using tandem::Tensor;

// One query head over two keys of equal score: the mean of the values.
struct Small {
  std::vector<float> q = {0, 0}, k = {1, 2, 3, 4}, v = {2, 4, 6, 10}, out = {-1, -1}, lse = {-1};
  std::vector<float> dout = {1, 1}, dv = {-1, -1, -1, -1};

  Attention attention() {
    return {.q = Tensor(q, {1, 1, 1, 2}),
            .k = Tensor(k, {1, 2, 1, 2}),
            .v = Tensor(v, {1, 2, 1, 2}),
            .out = Tensor(out, {1, 1, 1, 2}),
            .lse = Tensor(lse, {1, 1, 1})};
  }
};

std::string thrown(const std::function<void()>& call, tandem_status code = TANDEM_INVALID_ARGUMENT) {
  try {
    call();
  } catch (const tandem::Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "nothing thrown";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST(CppInterface, ForwardAndBackward) {
  Small s;
  Attention a = s.attention();
  tandem::forward(a);
  EXPECT_EQ(s.out, (std::vector<float>{4, 7}));
  a.dout = Tensor(s.dout, {1, 1, 1, 2});
  a.dv = Tensor(s.dv, {1, 2, 1, 2});
  tandem::backward(a);
  EXPECT_EQ(s.dv, (std::vector<float>{0.5f, 0.5f, 0.5f, 0.5f}));
}

TEST(CppInterface, BlockMasks) {
  std::vector<int32_t> counts(3, -1), indices(6, -1), full(3, -1), full_indices(6, -1);
  tandem::BlockMask blocks = {.mask_mod = {.text = "k < shown", .scalars = {{"shown", 5}}},
                              .seqlen_q = 12,
                              .seqlen_k = 8,
                              .mask_block_q = 4,
                              .mask_block_k = 4,
                              .kv_num_blocks = Tensor(counts, {1, 1, 3}),
                              .kv_indices = Tensor(indices, {1, 1, 3, 2}),
                              .full_kv_num_blocks = Tensor(full, {1, 1, 3}),
                              .full_kv_indices = Tensor(full_indices, {1, 1, 3, 2})};
  tandem::make_block_mask(blocks);
  EXPECT_EQ(counts, (std::vector<int32_t>{1, 1, 1}));
  EXPECT_EQ(indices, (std::vector<int32_t>{1, 0, 1, 0, 1, 0}));
  EXPECT_EQ(full, counts);
  EXPECT_EQ(full_indices, (std::vector<int32_t>{0, 1, 0, 1, 0, 1}));
  const std::vector<int32_t> fixed(3);
  blocks.kv_num_blocks = Tensor(fixed, {1, 1, 3});
  EXPECT_TRUE(contains(thrown([&] { tandem::make_block_mask(blocks); }), "lists (read only) must be writable"));
}

// Lists are used unless they equal the mask_mod's and mask_mod is a window.
TEST(CppInterface, BlocksOfMaskMod) {
  Small s;
  const std::vector<int32_t> none = {0}, index = {0};
  Attention a = s.attention();
  a.mask_mod = {.text = "k <= q"};
  a.kv_num_blocks = Tensor(none, {1, 1, 1});
  a.kv_indices = Tensor(index, {1, 1, 1, 1});
  a.mask_block_q = a.mask_block_k = 2;
  tandem::forward(a);
  EXPECT_EQ(s.out, (std::vector<float>{0, 0}));
  a.blocks_of_mask_mod = true;
  tandem::forward(a);
  EXPECT_EQ(s.out, (std::vector<float>{2, 4}));
}

TEST(CppInterface, LargestScores) {
  Small s;
  std::vector<float> largest = {7};
  Attention a = s.attention();
  a.mask_mod = {.text = "k < 0"};
  a.max_scores = Tensor(largest, {1, 1, 1});
  tandem::forward(a);
  EXPECT_EQ(largest[0], -std::numeric_limits<float>::infinity());
}

TEST(CppInterface, Modifications) {
  Small s;
  std::vector<float> bonus = {0, 0}, dbonus = {7, 7};
  Attention a = s.attention();
  a.mask_mod = {.text = "k < shown", .scalars = {{"shown", 1}}};
  tandem::forward(a);
  EXPECT_EQ(s.out, (std::vector<float>{2, 4}));
  a.mask_mod = {};
  a.score_mod = {.text = "score + scale * bonus[k]",
                 .scalars = {{"scale", 2.0}},
                 .tensors = {{"bonus", Tensor(bonus, {2}), Tensor(dbonus, {2})}}};
  tandem::forward(a);
  EXPECT_EQ(s.out, (std::vector<float>{4, 7}));
  a.dout = Tensor(s.dout, {1, 1, 1, 2});
  tandem::backward(a);
  // d out / d score: 1/4 of the difference of the values, 4 + 6.
  EXPECT_EQ(dbonus, (std::vector<float>{-5, 5}));
  a.score_mod.text = "score + bonus[h]";
  EXPECT_TRUE(contains(thrown([&] { tandem::backward(a); }), "score_mod: column 15: 'h' is not a known name"));
  a.score_mod.text = "score";
  a.score_mod.tensors[0].gradient = Tensor(static_cast<const float*>(dbonus.data()), {2});
  EXPECT_TRUE(contains(thrown([&] { tandem::backward(a); }), "bonus (read only) must be writable"));
}

TEST(CppInterface, OwnContextAndWorkspace) {
  Small s;
  const tandem::Context context({.threads = 2});
  EXPECT_EQ(context.threads(), 2);
  EXPECT_TRUE(contains(context.description(), "cpu, 2 threads"));
  std::vector<std::byte> workspace(tandem::workspace_size(s.attention(), TANDEM_FORWARD, context));
  tandem::prepare(s.attention(), TANDEM_FORWARD, context);
  tandem::forward(s.attention(), context, workspace);
  EXPECT_EQ(s.out, (std::vector<float>{4, 7}));
}

TEST(CppInterface, ContextMoves) {
  tandem::Context a({.threads = 3});
  tandem::Context b(std::move(a));
  EXPECT_EQ(b.threads(), 3);
  tandem::Context c;
  c = std::move(b);
  EXPECT_EQ(c.threads(), 3);
  static_assert(!std::is_copy_constructible_v<tandem::Context> && !std::is_copy_assignable_v<tandem::Context>);
  EXPECT_TRUE(contains(thrown([] { tandem::Context({.device = "cuda:1000"}); }, TANDEM_UNSUPPORTED), "device \"cuda"));
}

TEST(CppInterface, CheckReports) {
  Small s;
  Attention a = s.attention();
  EXPECT_FALSE(tandem::check(a).has_value());
  a.softcap = -1;
  const auto refusal = tandem::check(a);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->code(), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(refusal->what(), "softcap (-1)"));
  EXPECT_TRUE(contains(thrown([&] { tandem::forward(a); }), "softcap (-1)"));
  EXPECT_EQ(s.out, (std::vector<float>{-1, -1}));
  EXPECT_TRUE(contains(tandem::check(s.attention(), TANDEM_BACKWARD)->what(), "dout (NULL)"));
}

TEST(CppInterface, ConstIsNotWritten) {
  Small s;
  const std::vector<float> k = s.k, out = s.out;
  Attention a = s.attention();
  a.k = Tensor(k, {1, 2, 1, 2});
  tandem::forward(a);  // an input may be const
  a.out = Tensor(out, {1, 1, 1, 2});
  EXPECT_TRUE(a.out.read_only());
  EXPECT_TRUE(contains(thrown([&] { tandem::forward(a); }), "out (read only)"));
  EXPECT_TRUE(contains(tandem::check(a)->what(), "out (read only)"));
}

TEST(CppInterface, TensorsFromMemory) {
  std::vector<float> x(24);
  const size_t heads = 3;
  Tensor from_vector(x, {1, 4, heads, 2u});
  const tandem_tensor* t = from_vector.get();
  EXPECT_EQ(t->data, x.data());
  EXPECT_EQ(t->ndim, 4);
  EXPECT_EQ(t->shape[2], 3);
  EXPECT_EQ(t->strides, nullptr);
  EXPECT_EQ(t->dtype.code, TANDEM_FLOAT);
  EXPECT_EQ(t->dtype.bits, 32);

  Tensor from_pointer(x.data(), {1, 2, 3, 2}, {0, 12, 4, 1});
  EXPECT_EQ(from_pointer.get()->strides[1], 12);
  EXPECT_EQ(thrown([&] {
              Tensor(x.data(), {1, 2, 3, 2}, {12, 4, 1});
            }),
            "strides (3 of them) must be 4, as many as sizes, or none");

  Tensor copy = from_pointer;  // a copy points into itself
  EXPECT_NE(copy.get()->shape, from_pointer.get()->shape);
  EXPECT_EQ(copy.get()->shape[2], 3);

  std::array<uint16_t, 8> half{};
  Tensor brain(tandem::bfloat16, half.data(), {2, 4});
  EXPECT_EQ(brain.get()->dtype.code, TANDEM_BFLOAT);
  EXPECT_EQ(brain.get()->dtype.bits, 16);

  std::array<int32_t, 3> offsets = {0, 1, 2};
  EXPECT_EQ(Tensor(offsets, {3}).get()->dtype.code, TANDEM_INT);
  EXPECT_EQ(Tensor(std::span<const int32_t>(offsets), {3}).get()->data, offsets.data());
  EXPECT_EQ(Tensor().get(), nullptr);

  EXPECT_TRUE(contains(thrown([&] { Tensor(x, {5, 5}); }), "more elements than the range (24)"));
  EXPECT_TRUE(contains(thrown([&] { Tensor(x, {INT64_MAX, INT64_MAX}); }), "more elements"));
  EXPECT_NO_THROW(Tensor(x, {4, 6}));
  EXPECT_NO_THROW(Tensor(x, {4, 0, 600}));
}

TEST(CppInterface, TensorsFromDlpack) {
  float x[6] = {};
  int64_t shape[] = {2, 3}, strides[] = {3, 1};
  tandem_tensor foreign{x, {TANDEM_CPU, 0}, 2, tandem::float32, shape, strides, 4};
  Tensor tensor(foreign);
  shape[0] = 99;  // copied
  EXPECT_EQ(tensor.get()->shape[0], 2);
  EXPECT_EQ(tensor.get()->strides[0], 3);
  EXPECT_EQ(tensor.get()->byte_offset, 4u);
  std::array<int64_t, 9> nine{};
  foreign.ndim = 9;
  foreign.shape = nine.data();
  foreign.strides = nullptr;
  EXPECT_TRUE(contains(thrown([&] { Tensor{foreign}; }), "ndim (9) must be at most 8"));
}

// Memory of another owner, such as a device. The memory is requested when it is too small, and released.
TEST(CppInterface, WorkspaceGrowsAndIsKept) {
  std::vector<size_t> allocated;
  int alive = 0;
  {
    tandem::Workspace workspace(
        [&](size_t bytes) {
          allocated.push_back(bytes);
          ++alive;
          return std::malloc(bytes);
        },
        [&](void* memory) {
          --alive;
          std::free(memory);
        });
    EXPECT_EQ(workspace.bytes(), 0u);
    Small s;
    const tandem::Context context({.threads = 1});
    for (int repeat = 0; repeat < 3; ++repeat) {
      s.out = {-1, -1};
      tandem::forward(s.attention(), context, workspace);
      EXPECT_EQ(s.out, (std::vector<float>{4, 7}));
    }
    ASSERT_EQ(allocated.size(), 1u);
    EXPECT_EQ(allocated[0], tandem::workspace_size(s.attention(), TANDEM_FORWARD, context));
    workspace.reserve(2 * allocated[0]);
    EXPECT_EQ(allocated.size(), 2u);
    EXPECT_EQ(alive, 1);
    tandem::Workspace moved = std::move(workspace);
    EXPECT_EQ(moved.bytes(), allocated[1]);
    EXPECT_EQ(workspace.bytes(), 0u);  // NOLINT(bugprone-use-after-move): empty, as Workspace says
    EXPECT_EQ(alive, 1);
  }
  EXPECT_EQ(alive, 0);
}

TEST(CppInterface, TensorsOnADevice) {
  float x[2] = {0, 0};
  Tensor there = Tensor(x, {1, 1, 1, 2}).on(tandem::cuda(3));
  EXPECT_EQ(there.get()->device.type, TANDEM_CUDA);
  EXPECT_EQ(there.get()->device.index, 3);
  Small s;
  Attention a = s.attention();
  a.k = there;
  EXPECT_TRUE(contains(thrown([&] { tandem::forward(a); }), "k.device (type 2, index 3) must be the context's"));
  EXPECT_TRUE(tandem::Context().on_host());
}

TEST(CppInterface, MergesParts) {
  std::vector<float> one = {1, 2}, two = {3, 6}, lse = {0.5f}, none = {-INFINITY}, out(2), out_lse(1);
  const auto part = [](std::vector<float>& o, std::vector<float>& l) {
    return tandem::Part{Tensor(o, {1, 1, 1, 2}), Tensor(l, {1, 1, 1})};
  };
  tandem::merge({part(one, lse), part(two, lse)}, part(out, out_lse));
  EXPECT_FLOAT_EQ(out[0], 2);
  EXPECT_FLOAT_EQ(out[1], 4);
  EXPECT_FLOAT_EQ(out_lse[0], 0.5f + std::log(2.0f));
  tandem::merge({part(one, none), part(two, lse)}, part(one, none));  // in place
  EXPECT_EQ(one, two);
  EXPECT_EQ(none, lse);
  const std::vector<float> fixed(2);
  EXPECT_TRUE(contains(thrown([&] { tandem::merge({part(one, lse)}, {Tensor(fixed, {1, 1, 1, 2})}); }), "read only"));
  EXPECT_TRUE(contains(thrown([&] { tandem::merge({}, part(out, out_lse)); }), "parts (0) must be at least 1"));
}

// Each overload gives a field of Attention a value that is not its default.
void set(Tensor& field) { field = Tensor(tandem::float32, reinterpret_cast<void*>(64), {1}); }
void set(tandem::Mod& field) { field.text = "score"; }
void set(tandem::Alignment& field) { field = tandem::Alignment::top_left; }
void set(std::optional<int64_t>& field) { field = 7; }
void set(const uint64_t*& field) { field = reinterpret_cast<const uint64_t*>(64); }
template <class T>
  requires std::is_arithmetic_v<T>
void set(T& field) {
  field = static_cast<T>(7);
}

bool matches(Tensor field, const tandem_tensor* member) {
  return member != nullptr && member->data == field.get()->data;
}
bool matches(const tandem::Mod& field, const tandem_mod* member) {
  return member != nullptr && field.text == member->text;
}
bool matches(const std::optional<int64_t>& field, int64_t member) { return member == *field; }
template <class Field, class Member>
bool matches(const Field& field, const Member& member) {
  return member == static_cast<Member>(field);
}

// Sets one field, and expects that only its member of the C struct changes. A bound sets its bit, too. field_of returns
// the field's address, or NULL. Returns whether the field exists.
template <class Member>
bool check_field(Member tandem_attention_args::*member, auto field_of) {
  Attention a;
  auto* field = field_of(a);
  if constexpr (std::is_same_v<decltype(field), std::nullptr_t*>) {
    return false;
  } else {
    set(*field);
    const tandem::detail::CArgs c_args(a, TANDEM_BACKWARD);
    tandem_attention_args args = *c_args.get(), zero{};
    EXPECT_TRUE(matches(*field, args.*member));
    EXPECT_EQ(args.size, static_cast<int64_t>(sizeof args));
    args.size = 0;
    args.*member = {};
    if constexpr (std::is_same_v<decltype(field), std::optional<int64_t>*>) {
      EXPECT_EQ(args.window, member == &tandem_attention_args::window_left ? TANDEM_WINDOW_LEFT : TANDEM_WINDOW_RIGHT);
      args.window = 0;
    }
    EXPECT_EQ(std::memcmp(&args, &zero, sizeof zero), 0);
    return true;
  }
}

// Every member of the list is copied to its place in the C struct.
TEST(CppInterface, EveryFieldIsPassed) {
  std::vector<std::string> missing;
  const auto check = [&](const char* name, auto member, auto field_of) {
    SCOPED_TRACE(name);
    if (!check_field(member, field_of)) missing.push_back(name);
  };
#define MEMBER(member, type)                                   \
  check(#member, &tandem_attention_args::member, [](auto& a) { \
    if constexpr (requires { a.member; })                      \
      return &a.member;                                        \
    else                                                       \
      return static_cast<std::nullptr_t*>(nullptr);            \
  });
#define TENSOR(member, access, contiguous) MEMBER(member, const tandem_tensor*)
#define OPTION(member, type, kind, schema) MEMBER(member, type)
#include "problem/options.def"
  EXPECT_EQ(missing, (std::vector<std::string>{"window", "reserved", "reserved_2"}));

  const Attention nothing;
  const tandem::detail::CArgs c_nothing(nothing, TANDEM_FORWARD);
  tandem_attention_args zero{};
  zero.size = sizeof zero;
  EXPECT_EQ(std::memcmp(c_nothing.get(), &zero, sizeof zero), 0);  // zero bytes are the defaults
}

}  // namespace
