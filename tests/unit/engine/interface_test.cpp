// Tests the C interface: codes, sentences, contexts and workspaces. A refusal must write nothing.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

#include "cpu/cpu.h"
#include "engine/guard.h"
#include "reference/reference.h"
#include "support/random.h"
#include "unit/problem/call.h"

namespace tandem::test {
namespace {

struct Destroy {
  void operator()(tandem_context* context) const { tandem_context_destroy(context); }
};
using ContextPtr = std::unique_ptr<tandem_context, Destroy>;

tandem_context_options options_of(int32_t threads) {
  tandem_context_options options{};
  options.size = sizeof options;
  options.threads = threads;
  return options;
}

ContextPtr context_of(const tandem_context_options& options) {
  tandem_context* context = nullptr;
  EXPECT_EQ(tandem_context_create(&options, &context), TANDEM_OK) << tandem_last_error();
  return ContextPtr(context);
}

bool says(const std::string& fragment) { return std::string(tandem_last_error()).find(fragment) != std::string::npos; }

std::vector<Held*> inputs_of(Call& call) {
  return {&call.q, &call.k, &call.v, &call.dout, &call.dlse, &call.bias, &call.sink, &call.alibi_slopes};
}
std::vector<Held*> outputs_of(Call& call) {
  return {&call.out, &call.lse, &call.dq, &call.dk, &call.dv, &call.dbias, &call.dsink};
}

void fill(Call& call) {
  Random random(3);
  for (Held* held : inputs_of(call)) {
    const size_t bytes = held->memory.size() * 8;
    if (held->handle.dtype.bits == 64) {
      auto* x = reinterpret_cast<double*>(held->memory.data());
      for (size_t i = 0; i < bytes / 8; ++i) x[i] = random.normal();
    } else {
      auto* x = reinterpret_cast<float*>(held->memory.data());
      for (size_t i = 0; i < bytes / 4; ++i) x[i] = static_cast<float>(random.normal());
    }
  }
}

constexpr uint64_t kUntouched = 0xfff8'dead'fff8'beef;

void spread(std::vector<Held*> outputs) {
  for (Held* held : outputs) std::fill(held->memory.begin(), held->memory.end(), kUntouched);
}

bool untouched(Call& call) {
  for (const Held* held : outputs_of(call)) {
    for (const uint64_t word : held->memory) {
      if (word != kUntouched) return false;
    }
  }
  return true;
}

std::vector<uint64_t> bits_of(const std::vector<Held*>& outputs) {
  std::vector<uint64_t> bits;
  for (const Held* held : outputs) bits.insert(bits.end(), held->memory.begin(), held->memory.end());
  return bits;
}

// Runs both passes with workspaces of exactly the requested size. Returns the bits of all outputs.
std::vector<uint64_t> run(tandem_context* context, Call& call) {
  spread(outputs_of(call));
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    size_t bytes = 0;
    EXPECT_EQ(tandem_workspace_size(context, pass, &call.args, &bytes), TANDEM_OK) << tandem_last_error();
    std::vector<char> workspace(bytes);
    const auto function = pass == TANDEM_FORWARD ? tandem_forward : tandem_backward;
    EXPECT_EQ(function(context, &call.args, workspace.data(), bytes, nullptr), TANDEM_OK) << tandem_last_error();
  }
  return bits_of(outputs_of(call));
}

TEST(Interface, VersionAndNames) {
  const std::string version = std::to_string(TANDEM_VERSION_MAJOR) + "." + std::to_string(TANDEM_VERSION_MINOR) + "." +
                              std::to_string(TANDEM_VERSION_PATCH);
  EXPECT_EQ(tandem_version(), version);
  EXPECT_STREQ(tandem_status_name(TANDEM_OK), "ok");
  EXPECT_STREQ(tandem_status_name(TANDEM_INVALID_ARGUMENT), "invalid argument");
  EXPECT_STREQ(tandem_status_name(TANDEM_WORKSPACE_TOO_SMALL), "workspace too small");
  EXPECT_STREQ(tandem_status_name(TANDEM_INTERNAL_ERROR), "internal error");
  EXPECT_STREQ(tandem_status_name(-1), "unknown status");
  EXPECT_STREQ(tandem_status_name(99), "unknown status");
}

TEST(Interface, ErrorsBelongToTheThread) {
  Call call;
  call.dense();
  call.args.reserved = 1;
  EXPECT_EQ(tandem_check(nullptr, TANDEM_FORWARD, &call.args), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("reserved (1)")) << tandem_last_error();
  std::thread([&] {
    EXPECT_STREQ(tandem_last_error(), "");
    EXPECT_EQ(tandem_check(nullptr, TANDEM_FORWARD, nullptr), TANDEM_INVALID_ARGUMENT);
    EXPECT_TRUE(says("args (NULL)"));
  }).join();
  EXPECT_TRUE(says("reserved (1)"));
  call.args.reserved = 0;
  EXPECT_EQ(tandem_check(nullptr, TANDEM_FORWARD, &call.args), TANDEM_OK);
  EXPECT_TRUE(says("reserved (1)"));  // a successful call keeps the sentence
}

TEST(Interface, NothingIsThrown) {
  EXPECT_EQ(guarded([]() -> Status { throw std::bad_alloc(); }), TANDEM_INTERNAL_ERROR);
  EXPECT_TRUE(says("out of memory"));
  EXPECT_EQ(guarded([]() -> Status { throw std::runtime_error("the reason"); }), TANDEM_INTERNAL_ERROR);
  EXPECT_STREQ(tandem_last_error(), "the reason");
  EXPECT_EQ(guarded([]() -> Status { throw 7; }), TANDEM_INTERNAL_ERROR);
  EXPECT_TRUE(says("unknown exception"));
  EXPECT_EQ(guarded([] { return Status::unsupported(std::string(5000, 'x')); }), TANDEM_UNSUPPORTED);
  EXPECT_GT(std::strlen(tandem_last_error()), 500u);
}

TEST(Interface, ContextOptions) {
  EXPECT_EQ(tandem_context_create(nullptr, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("context (NULL)"));
  tandem_context* const nowhere = reinterpret_cast<tandem_context*>(uintptr_t{8});
  const auto refused = [&](const tandem_context_options& options, tandem_status code, const char* sentence) {
    tandem_context* context = nowhere;
    EXPECT_EQ(tandem_context_create(&options, &context), code) << sentence;
    EXPECT_EQ(context, nullptr);
    EXPECT_TRUE(says(sentence)) << tandem_last_error();
  };
  tandem_context_options options = options_of(1025);
  refused(options, TANDEM_INVALID_ARGUMENT, "options.threads (1025) must be 0 to 1024");
  options = options_of(-1);
  refused(options, TANDEM_INVALID_ARGUMENT, "options.threads (-1)");
  options = options_of(1);
  options.size = 8;
  refused(options, TANDEM_INVALID_ARGUMENT, "options.size (8) must be");
  options.size = INT64_MAX;
  refused(options, TANDEM_INVALID_ARGUMENT, "options.size (9223372036854775807)");
  options = options_of(1);
  options.device = "vgpu:h300";
  refused(options, TANDEM_INVALID_ARGUMENT, "device \"vgpu:h300\" must be \"vgpu:b200\", ");
  options.device = "cuda:1000";  // more GPUs than the machine has, or no driver
  refused(options, TANDEM_UNSUPPORTED, "device \"cuda");
  options.device = "cuda:x";
  refused(options, TANDEM_INVALID_ARGUMENT, "device \"cuda:x\" must be \"cuda\" or \"cuda:N\"");
  for (const char* device : {"", "cpu:1", "CPU", "gpu", "cpu "}) {
    options.device = device;
    refused(options, TANDEM_INVALID_ARGUMENT, "options.device (\"");
  }
  struct {
    tandem_context_options options;
    uint64_t later[2];
  } longer{options_of(1), {0, 0}};
  longer.options.size = sizeof longer;
  EXPECT_TRUE(context_of(longer.options));
  longer.later[1] = 1;
  refused(longer.options, TANDEM_UNSUPPORTED, "must be 0 beyond the");
}

TEST(Interface, ContextDescribesItself) {
  for (const char* device : {static_cast<const char*>(nullptr), "cpu", "cpu:0"}) {
    tandem_context_options options = options_of(3);
    options.device = device;
    const ContextPtr context = context_of(options);
    EXPECT_EQ(tandem_context_threads(context.get()), 3);
    EXPECT_EQ(tandem_context_description(context.get()), "cpu, 3 threads, " + cpu::target_description());
  }
  tandem_context* context = nullptr;
  ASSERT_EQ(tandem_context_create(nullptr, &context), TANDEM_OK);
  EXPECT_GE(tandem_context_threads(context), 1);
  tandem_context_destroy(context);
  tandem_context_destroy(nullptr);
}

TEST(Interface, DefaultContextFromManyThreads) {
  std::array<const char*, 8> descriptions{};
  std::vector<std::thread> threads;
  for (const char*& description : descriptions) {
    threads.emplace_back([&description] { description = tandem_context_description(nullptr); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(tandem_context_threads(nullptr), 1);
  for (const char* description : descriptions) EXPECT_EQ(description, descriptions[0]);
}

TEST(Interface, InspectionNeedsNoData) {
  Call call;
  call.dense();
  for (Held* held : inputs_of(call)) held->handle.data = nullptr;
  for (Held* held : outputs_of(call)) held->handle.data = nullptr;
  size_t bytes = 0;
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    EXPECT_EQ(tandem_check(nullptr, pass, &call.args), TANDEM_OK) << tandem_last_error();
    EXPECT_EQ(tandem_prepare(nullptr, pass, &call.args), TANDEM_OK) << tandem_last_error();
    EXPECT_EQ(tandem_workspace_size(nullptr, pass, &call.args, &bytes), TANDEM_OK) << tandem_last_error();
  }
  EXPECT_EQ(tandem_workspace_size(nullptr, TANDEM_FORWARD, &call.args, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("bytes (NULL)"));
  EXPECT_EQ(tandem_forward(nullptr, &call.args, nullptr, 0, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("q.data (NULL)"));
}

TEST(Interface, SameBitsFromEveryContext) {
  Call call;
  call.dense_of(200, 300);  // enough work for several threads
  call.drop(&tandem_attention_args::seqused_q);
  call.drop(&tandem_attention_args::seqused_k);
  fill(call);
  const std::vector<uint64_t> expected = run(nullptr, call);
  EXPECT_FALSE(untouched(call));
  for (const int32_t threads : {1, 4}) {
    const ContextPtr context = context_of(options_of(threads));
    EXPECT_EQ(run(context.get(), call), expected);
  }

  // Runs tasks from the last to the first, as a caller's threads may.
  std::atomic<int> tasks_run{0};
  tandem_context_options options = options_of(4);
  options.parallel_for_data = &tasks_run;
  options.parallel_for = [](void* data, int32_t tasks, void (*body)(void*, int32_t), void* body_data) {
    for (int32_t task = tasks - 1; task >= 0; --task) body(body_data, task);
    *static_cast<std::atomic<int>*>(data) += tasks;
  };
  const ContextPtr own = context_of(options);
  EXPECT_EQ(run(own.get(), call), expected);
  EXPECT_GT(tasks_run, 0);
}

// One context serves several concurrent calls, each with a separate workspace.
TEST(Interface, OneContextServesSeveralThreads) {
  const ContextPtr context = context_of(options_of(2));
  std::array<std::vector<uint64_t>, 4> bits;
  std::vector<std::thread> threads;
  for (std::vector<uint64_t>& mine : bits) {
    threads.emplace_back([&] {
      Call call;
      call.dense();
      fill(call);
      for (int repeat = 0; repeat < 5; ++repeat) mine = run(context.get(), call);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<uint64_t>& each : bits) EXPECT_EQ(each, bits[0]);
}

// The C interface does not change the engine's results.
TEST(Interface, CpuEngineServesFloat32) {
  Call call;
  call.dense();
  fill(call);
  const ContextPtr context = context_of(options_of(2));
  const std::vector<uint64_t> bits = run(context.get(), call);
  spread(outputs_of(call));
  cpu::Threads threads(2, nullptr, nullptr);
  for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
    call.pass = pass;
    Problem problem;
    ASSERT_TRUE(call.make(&problem).ok());
    std::vector<char> workspace(cpu::workspace_size(problem, 2));
    (pass == TANDEM_FORWARD ? cpu::forward : cpu::backward)(problem, threads, workspace.data());
  }
  EXPECT_EQ(bits_of(outputs_of(call)), bits);
}

TEST(Interface, ReferenceServesFloat64) {
  Call call;
  call.dense();
  for (Held* held : {&call.q, &call.k, &call.v, &call.out, &call.dout, &call.dq, &call.dk, &call.dv, &call.lse,
                     &call.dlse, &call.bias, &call.dbias, &call.sink, &call.dsink}) {
    held->make(held->shape, kF64);
  }
  fill(call);
  size_t bytes = 1;
  ASSERT_EQ(tandem_workspace_size(nullptr, TANDEM_BACKWARD, &call.args, &bytes), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(bytes, 0u);
  const ContextPtr context = context_of(options_of(4));
  const std::vector<uint64_t> bits = run(context.get(), call);
  spread(outputs_of(call));
  Problem problem;
  ASSERT_TRUE(call.make(&problem).ok());
  reference::forward(problem);
  call.pass = TANDEM_BACKWARD;
  ASSERT_TRUE(call.make(&problem).ok());
  reference::backward(problem);
  EXPECT_EQ(bits_of(outputs_of(call)), bits);
}

// A check of data refuses what the call refuses, and writes nothing.
TEST(Interface, DataIsCheckedWithoutACall) {
  Call call;
  call.dense();
  fill(call);
  spread(outputs_of(call));
  const auto bits = bits_of(outputs_of(call));
  EXPECT_EQ(tandem_check_data(nullptr, TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(bits_of(outputs_of(call)), bits);
  tandem_tensor out = *call.args.out;
  out.data = call.args.q->data;
  call.args.out = &out;
  EXPECT_EQ(tandem_check(nullptr, TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(tandem_check_data(nullptr, TANDEM_FORWARD, &call.args), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlaps")) << tandem_last_error();
  out.data = nullptr;
  EXPECT_EQ(tandem_check_data(nullptr, TANDEM_FORWARD, &call.args), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("NULL")) << tandem_last_error();
}

TEST(Interface, GradientsOfPagesAreNotServed) {
  Call call;
  call.paged();
  call.args.dk = call.args.dv = call.args.dbias = nullptr;
  spread(outputs_of(call));
  size_t bytes = 0;
  EXPECT_EQ(tandem_check(nullptr, TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(tandem_check(nullptr, TANDEM_BACKWARD, &call.args), TANDEM_UNSUPPORTED);
  EXPECT_TRUE(says("page_table")) << tandem_last_error();
  EXPECT_EQ(tandem_workspace_size(nullptr, TANDEM_BACKWARD, &call.args, &bytes), TANDEM_UNSUPPORTED);
  EXPECT_EQ(tandem_prepare(nullptr, TANDEM_BACKWARD, &call.args), TANDEM_UNSUPPORTED);
  EXPECT_EQ(tandem_backward(nullptr, &call.args, nullptr, 0, nullptr), TANDEM_UNSUPPORTED);
  EXPECT_TRUE(untouched(call));
}

TEST(Interface, Workspace) {
  Call call;
  call.dense();
  fill(call);
  const ContextPtr context = context_of(options_of(2));
  const std::vector<uint64_t> expected = run(context.get(), call);
  size_t needed = 0;
  ASSERT_EQ(tandem_workspace_size(context.get(), TANDEM_BACKWARD, &call.args, &needed), TANDEM_OK);
  ASSERT_GT(needed, 0u);
  const std::vector<Held*> gradients = {&call.dq, &call.dk, &call.dv, &call.dbias, &call.dsink};
  spread(gradients);
  const std::vector<uint64_t> before = bits_of(outputs_of(call));
  std::vector<char> memory(needed + 64);
  const auto backward = [&](void* workspace, size_t bytes) {
    return tandem_backward(context.get(), &call.args, workspace, bytes, nullptr);
  };

  EXPECT_EQ(backward(memory.data(), needed - 1), TANDEM_WORKSPACE_TOO_SMALL);
  EXPECT_TRUE(says("workspace_bytes (" + std::to_string(needed - 1) + ") must be at least " + std::to_string(needed)))
      << tandem_last_error();
  EXPECT_EQ(backward(nullptr, 0), TANDEM_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(backward(nullptr, needed), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("workspace (NULL)")) << tandem_last_error();

  // The workspace overlaps an input, an output, or the first byte of a tensor.
  EXPECT_EQ(backward(call.k.handle.data, needed), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlaps")) << tandem_last_error();
  EXPECT_EQ(backward(static_cast<char*>(call.dq.handle.data) + 8, needed), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlaps")) << tandem_last_error();
  EXPECT_EQ(backward(static_cast<char*>(call.v.handle.data) + 1 - needed, needed), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlaps")) << tandem_last_error();
  EXPECT_EQ(bits_of(outputs_of(call)), before);

  EXPECT_EQ(backward(memory.data() + 3, needed), TANDEM_OK) << tandem_last_error();  // any alignment
  EXPECT_EQ(bits_of(outputs_of(call)), expected);
}

TEST(Interface, StreamIsRefused) {
  Call call;
  call.dense();
  spread(outputs_of(call));
  std::vector<char> workspace(1 << 20);
  EXPECT_EQ(tandem_forward(nullptr, &call.args, workspace.data(), workspace.size(), &call), TANDEM_INVALID_ARGUMENT);
  EXPECT_TRUE(says("stream")) << tandem_last_error();
  EXPECT_TRUE(untouched(call));
}

// These rules are checked last, when all outputs are known, and still no byte may be written.
TEST(Interface, RefusalWritesNothing) {
  const auto refused = [](void (*spoil)(Call&), const char* sentence) {
    Call call;
    call.dense();
    spread(outputs_of(call));
    spoil(call);
    std::vector<char> workspace(1 << 20);
    for (const auto function : {tandem_forward, tandem_backward}) {
      EXPECT_EQ(function(nullptr, &call.args, workspace.data(), workspace.size(), nullptr), TANDEM_INVALID_ARGUMENT);
      EXPECT_TRUE(says(sentence)) << tandem_last_error();
    }
    EXPECT_TRUE(untouched(call)) << sentence;
  };
  refused([](Call& call) { call.args.dropout_p = 1; }, "dropout_p (1)");
  refused([](Call& call) { call.seqused_k.make({2, 6}); }, "seqused_k[1] (6)");
  refused([](Call& call) { call.args.max_seqlen_k = 1; }, "max_seqlen_k (1)");
  refused([](Call& call) { call.q.handle.dtype.lanes = 2; }, "q.dtype.lanes (2)");
}

TEST(Interface, NothingToDo) {
  Call call;
  call.dense();
  call.pass = TANDEM_BACKWARD;
  call.args.bias = call.args.dbias = call.args.sink = call.args.dsink = nullptr;
  call.args.seqused_q = call.args.seqused_k = nullptr;
  call.args.alibi_slopes = nullptr;
  for (Held* held : {&call.q, &call.k, &call.v, &call.out, &call.dout, &call.dq, &call.dk, &call.dv}) {
    held->make({0, 3, 2, 8}, kF32);
    held->handle.data = nullptr;
  }
  for (Held* held : {&call.lse, &call.dlse}) held->make({0, 2, 3}, kF32);
  EXPECT_EQ(tandem_forward(nullptr, &call.args, nullptr, 0, nullptr), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(tandem_backward(nullptr, &call.args, nullptr, 0, nullptr), TANDEM_OK) << tandem_last_error();
}

}  // namespace
}  // namespace tandem::test
