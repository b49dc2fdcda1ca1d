// Tests virtual GPUs in the C interface: names, refusals, host pointers, and a result compared with the CPU engine's.
#include "engine/context.h"

#include <gtest/gtest.h>

#include <cmath>

#include "jit/compiler.h"
#include "support/check_accuracy.h"

namespace tandem::test {
namespace {

class Context {
 public:
  explicit Context(const char* device) {
    tandem_context_options options{};
    options.size = sizeof options;
    options.device = device;
    status = tandem_context_create(&options, &handle);
  }
  Context(const Context&) = delete;
  ~Context() { tandem_context_destroy(handle); }

  tandem_context* handle = nullptr;
  tandem_status status;
};

bool says(const std::string& part) {
  const std::string sentence = tandem_last_error();
  return sentence.find(part) != std::string::npos ||
         (ADD_FAILURE() << "\"" << sentence << "\" does not say: " << part, false);
}

TEST(VirtualContexts, HaveNames) {
  for (const char* name : {"vgpu:h200", "vgpu:h100", "vgpu:b200", "vgpu:b300"}) {
    const Context context(name);
    ASSERT_EQ(context.status, TANDEM_OK) << tandem_last_error();
    const std::string description = tandem_context_description(context.handle);
    EXPECT_TRUE(description.starts_with(std::string(name) + ", NVIDIA ")) << description;
    EXPECT_EQ(description.find("driver"), std::string::npos) << description;
  }
  const Context first("vgpu");
  EXPECT_TRUE(std::string(tandem_context_description(first.handle)).starts_with("vgpu:h200, "));
  const Context unknown("vgpu:h300");
  EXPECT_EQ(unknown.status, TANDEM_INVALID_ARGUMENT);
  says("device \"vgpu:h300\" must be \"vgpu:b200\", \"vgpu:b300\", \"vgpu:h100\" or \"vgpu:h200\": choose one");
}

// The arguments of a small call on tensors of the host.
struct Small {
  explicit Small(const std::string& flags)
      : instance(from_flags("--gradients none --align 8 --head-dim 64 --head-dim-v 64 " + flags)),
        outputs(instance.outputs(TANDEM_FORWARD)),
        args(instance.args(TANDEM_FORWARD, &outputs)) {}

  tandem_status run(tandem_context* context) {
    size_t bytes = 0;
    if (const auto status = tandem_workspace_size(context, TANDEM_FORWARD, &args, &bytes); status != TANDEM_OK)
      return status;
    std::vector<std::byte> workspace(bytes + 1);
    return tandem_forward(context, &args, workspace.data() + 1, bytes, nullptr);
  }

  Instance instance;
  Outputs outputs;
  tandem_attention_args args;
};

TEST(VirtualContexts, RefuseWhatTheirKernelsDoNotServe) {
  const Context hopper("vgpu:h200");
  Small call("--dtype bf16 --seqlen-q 40 --seqlen-k 50");
  EXPECT_EQ(tandem_check(hopper.handle, TANDEM_FORWARD, &call.args), TANDEM_OK) << tandem_last_error();
  Small wide("--dtype f32");
  EXPECT_EQ(wide.run(hopper.handle), TANDEM_UNSUPPORTED);
  says("float32");
  EXPECT_TRUE(wide.outputs.out.guards_intact());
  Small liar("--dtype bf16 --packed 1 --lengths-q 30,10 --lengths-k 30,10");
  liar.instance.cu_seqlens_q.set(1, 50);
  EXPECT_EQ(liar.run(hopper.handle), TANDEM_INVALID_ARGUMENT) << "host memory can be looked at";
}

class VirtualCalls : public testing::Test {
 protected:
  void SetUp() override {
    std::unique_ptr<jit::Compiler> compiler;
    if (const Status status = jit::Compiler::open({}, Env::get(), &compiler); !status.ok())
      GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
  }
};

TEST_F(VirtualCalls, ComputeWhatTheCpuComputes) {
  const Context hopper("vgpu:h200"), cpu("cpu");
  for (const std::string flags : {"--seqlen-q 70 --seqlen-k 90 --causal 1",
                                  "--packed 1 --lengths-q 30,0,70 --lengths-k 90,4,33 --max-seqlen 0 --sink f32"}) {
    Small virtually("--dtype bf16 --heads-q 2 " + flags), really("--dtype bf16 --heads-q 2 " + flags);
    ASSERT_EQ(tandem_prepare(hopper.handle, TANDEM_FORWARD, &virtually.args), TANDEM_OK) << tandem_last_error();
    ASSERT_EQ(virtually.run(hopper.handle), TANDEM_OK) << tandem_last_error();
    ASSERT_EQ(really.run(cpu.handle), TANDEM_OK) << tandem_last_error();
    for (int64_t n = 0; n < really.outputs.out.size(); ++n)
      ASSERT_NEAR(virtually.outputs.out.get(n), really.outputs.out.get(n), 0.02) << flags << " at " << n;
    for (int64_t n = 0; n < really.outputs.lse.size(); ++n)
      ASSERT_NEAR(virtually.outputs.lse.get(n), really.outputs.lse.get(n), 1e-3) << flags << " at " << n;
    EXPECT_TRUE(virtually.outputs.out.guards_intact() && virtually.outputs.lse.guards_intact());
  }
}

}  // namespace
}  // namespace tandem::test
