// The handlers of XLA's foreign function interface: buffers, attributes, workspaces, streams and errors. XLA is a fake,
// and so is the GPU.
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "gpu/virtual.h"
#include "unit/engine/gpu_call.h"
#include "unit/xla/fake_xla.h"
#include "vgpu/src/device.h"
#include "xla/handlers.h"

namespace tandem::test {
namespace {

const std::vector<int64_t> kQ{2, 9, 4, 8}, kK{2, 11, 2, 8}, kLse{2, 4, 9};

XlaError* forward_on_cpu(XlaFrame* frame) {
  return reinterpret_cast<XlaError*>(tandem_xla_cpu_forward(reinterpret_cast<XLA_FFI_CallFrame*>(frame)));
}

XlaError* backward_on_cpu(XlaFrame* frame) {
  return reinterpret_cast<XlaError*>(tandem_xla_cpu_backward(reinterpret_cast<XLA_FFI_CallFrame*>(frame)));
}

int64_t elements(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

// float32 arrays of a call on the CPU, and the same call by the C interface.
class XlaOnCpu : public testing::Test {
 protected:
  struct Array {
    std::vector<float> values;
    std::vector<int64_t> dims;
    tandem_tensor tensor{};
  };

  Array array(const std::vector<int64_t>& dims) {
    Array made{std::vector<float>(static_cast<size_t>(elements(dims))), dims};
    for (float& x : made.values) x = normal_(random_);
    return made;
  }
  static const tandem_tensor* tensor_of(Array& x) {
    x.tensor = {x.values.data(),
                {TANDEM_CPU, 0},
                static_cast<int32_t>(x.dims.size()),
                {TANDEM_FLOAT, 32, 1},
                x.dims.data(),
                nullptr,
                0};
    return &x.tensor;
  }
  void input(const std::string& name, Array& x) { frame.input(name, kXlaF32, x.values.data(), x.dims); }
  void output(const std::string& name, Array& x) { frame.output(name, kXlaF32, x.values.data(), x.dims); }
  void forward_call() {
    input("q", q);
    input("k", k);
    input("v", v);
    output("out", out);
    output("lse", lse);
  }
  // The arguments of forward_call() with other results.
  tandem_attention_args direct(Array& other_out, Array& other_lse) {
    tandem_attention_args args{};
    args.size = sizeof args;
    args.q = tensor_of(q);
    args.k = tensor_of(k);
    args.v = tensor_of(v);
    args.out = tensor_of(other_out);
    args.lse = tensor_of(other_lse);
    return args;
  }
  static void run_directly(tandem_pass pass, const tandem_attention_args& args) {
    size_t bytes = 0;
    ASSERT_EQ(tandem_workspace_size(nullptr, pass, &args, &bytes), TANDEM_OK) << tandem_last_error();
    std::vector<std::byte> workspace(bytes);
    const auto call = pass == TANDEM_FORWARD ? tandem_forward : tandem_backward;
    ASSERT_EQ(call(nullptr, &args, workspace.data(), bytes, nullptr), TANDEM_OK) << tandem_last_error();
  }
  void refused(const std::string& fragment, int32_t code = kXlaInvalidArgument) {
    const std::vector<float> before = out.values;
    const std::string message = frame.run(forward_on_cpu);
    EXPECT_NE(message.find(fragment), std::string::npos) << message;
    EXPECT_EQ(frame.code, code);
    EXPECT_EQ(out.values, before);
  }

  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  FakeXla xla;
  FakeFrame frame{&xla};
  Array q = array(kQ), k = array(kK), v = array(kK), out = array(kQ), lse = array(kLse);
};

TEST_F(XlaOnCpu, OptionsOfEveryTypeReachTheCall) {
  forward_call();
  frame.number("causal", int32_t{1});
  frame.number("alignment", int32_t{TANDEM_EXPLICIT});
  frame.number("diagonal_offset", int64_t{3});
  frame.number("window", int32_t{TANDEM_WINDOW_LEFT});
  frame.number("window_left", int64_t{5});
  frame.number("softmax_scale", 0.3);
  frame.number("softcap", int64_t{2});
  ASSERT_EQ(frame.run(forward_on_cpu), "");
  Array other_out = array(kQ), other_lse = array(kLse);
  tandem_attention_args args = direct(other_out, other_lse);
  args.causal = 1;
  args.alignment = TANDEM_EXPLICIT;
  args.diagonal_offset = 3;
  args.window = TANDEM_WINDOW_LEFT;
  args.window_left = 5;
  args.softmax_scale = 0.3;
  args.softcap = 2;
  run_directly(TANDEM_FORWARD, args);
  EXPECT_EQ(out.values, other_out.values);
  EXPECT_EQ(lse.values, other_lse.values);
}

TEST_F(XlaOnCpu, ExpressionsHaveNumbersTensorsAndGradients) {
  constexpr char kText[] = "score * weight[head] + (shift if flag else half * 2.0)";
  ASSERT_EQ((forward_call(), frame.run(forward_on_cpu)), "");
  Array weight = array({4}), dout = array(kQ), dq = array(kQ), dweight = array({4});
  FakeFrame backward(&xla);
  const auto give = [&](const char* name, Array& x) { backward.input(name, kXlaF32, x.values.data(), x.dims); };
  give("q", q), give("k", k), give("v", v), give("out", out), give("lse", lse), give("dout", dout);
  give("score_mod.weight", weight);
  backward.output("dq", kXlaF32, dq.values.data(), dq.dims);
  backward.output("dscore_mod.weight", kXlaF32, dweight.values.data(), dweight.dims);
  backward.text("score_mod", kText);
  backward.number("score_mod.flag", false);
  backward.number("score_mod.shift", 1.5);
  backward.number("score_mod.half", 0.25);
  ASSERT_EQ(backward.run(backward_on_cpu), "");

  Array other_dq = array(kQ), other_dweight = array({4});
  tandem_attention_args args = direct(out, lse);
  args.dout = tensor_of(dout);
  args.dq = tensor_of(other_dq);
  const tandem_mod_scalar scalars[] = {
      {"flag", TANDEM_BOOL, 0, 0}, {"shift", TANDEM_FLOAT, 0, 1.5}, {"half", TANDEM_FLOAT, 0, 0.25}};
  const tandem_mod_tensor tensors[] = {{"weight", tensor_of(weight), tensor_of(other_dweight)}};
  const tandem_mod mod{sizeof mod, kText, scalars, 3, tensors, 1};
  args.score_mod = &mod;
  run_directly(TANDEM_BACKWARD, args);
  EXPECT_EQ(dq.values, other_dq.values);
  EXPECT_EQ(dweight.values, other_dweight.values);
}

TEST_F(XlaOnCpu, SeedsAreReadFromBuffers) {
  forward_call();
  uint32_t words[] = {7, 9, 11, 13};
  frame.input("seed", kXlaU32, words, {4});
  frame.number("dropout_p", 0.5);
  ASSERT_EQ(frame.run(forward_on_cpu), "");
  Array other_out = array(kQ), other_lse = array(kLse);
  tandem_attention_args args = direct(other_out, other_lse);
  args.dropout_p = 0.5;
  args.dropout_seed = 7 + (uint64_t{9} << 32);
  args.dropout_offset = 11 + (uint64_t{13} << 32);
  run_directly(TANDEM_FORWARD, args);
  EXPECT_EQ(out.values, other_out.values);
}

TEST_F(XlaOnCpu, SeedsOfOtherSizesAreRefused) {
  forward_call();
  uint32_t words[] = {7, 9, 11};
  frame.input("seed", kXlaU32, words, {3});
  refused("seed must be one dimension of two uint32");
}

TEST_F(XlaOnCpu, TheLibrarysRefusalIsTheError) {
  forward_call();
  frame.number("softcap", -1.0);
  refused("softcap (-1) must be");
}

TEST_F(XlaOnCpu, UnknownAttributesAreRefused) {
  forward_call();
  frame.number("sotfcap", 1.0);
  refused("attribute sotfcap must be an option of tandem_attention_args");
}

TEST_F(XlaOnCpu, NumbersOfOtherTypesAreRefused) {
  forward_call();
  float value = 1;
  frame.scalar("softcap", kXlaF32, &value);
  refused("attribute softcap (XLA type 11) must be an int32, an int64, or a float64");
}

TEST_F(XlaOnCpu, AFractionIsNoInteger) {
  forward_call();
  frame.number("causal", 0.5);
  refused("attribute causal (XLA type 12) must be an int32, an int64");
}

TEST_F(XlaOnCpu, LongNumbersAreRefusedForShortOptions) {
  forward_call();
  frame.number("causal", int64_t{1} << 32);
  refused("attribute causal (4294967296) must be an integer of at most 32 bits");
}

TEST_F(XlaOnCpu, MembersWithoutANumberAreRefused) {
  forward_call();
  frame.number("dropout_seed_ptr", int64_t{1});
  refused("attribute dropout_seed_ptr (a number) must be a buffer or an expression");
}

TEST_F(XlaOnCpu, TextsOfOtherNamesAreRefused) {
  forward_call();
  frame.text("alignment", "top_left");
  refused("attribute alignment must be a number, or a string for an expression");
}

TEST_F(XlaOnCpu, BuffersAndNamesMustAgree) {
  forward_call();
  frame.input_names = "q,k";
  refused("attribute inputs must name each of the 3 buffers");
}

TEST_F(XlaOnCpu, MoreNamesThanBuffersAreRefused) {
  forward_call();
  frame.output_names += ",dq";
  refused("attribute outputs must name each of the 2 buffers");
}

TEST_F(XlaOnCpu, UnknownBuffersAreRefused) {
  forward_call();
  input("query", q);
  refused("buffer query must have the name of a tensor");
}

TEST_F(XlaOnCpu, GradientsOfMissingTensorsAreRefused) {
  forward_call();
  output("dscore_mod.weight", q);
  refused("output dscore_mod.weight must be the gradient of an input score_mod.weight");
}

TEST_F(XlaOnCpu, OtherTypesOfBuffersAreRefused) {
  frame.input("q", 20, q.values.data(), q.dims);  // float8_e4m3fn
  refused("q (XLA type 20) must be bool, integer, float or bfloat16", kXlaUnimplemented);
}

TEST_F(XlaOnCpu, RegistrationReadsTheVersion) {
  for (const auto& [runtime, reported] : {std::pair{5, 3}, {3, 3}, {1, 1}}) {
    xla.api.version.minor = runtime;
    XlaMetadata metadata{sizeof metadata, {sizeof metadata.version, nullptr, -1, -1}, 77};
    XlaMetadataExtension extension{{sizeof extension, kXlaMetadata, nullptr}, &metadata};
    XlaFrame registration{};
    registration.extensions = &extension.base;
    registration.api = &xla.api;
    EXPECT_EQ(forward_on_cpu(&registration), nullptr);
    EXPECT_EQ(metadata.version.major, 0);
    EXPECT_EQ(metadata.version.minor, reported);
    EXPECT_EQ(metadata.traits, 0u);
  }
}

class FakeGpus final : public xla::Gpus {
 public:
  explicit FakeGpus(tandem_context* context) : context_(context) {}
  std::vector<int32_t> opened;
  bool is_missing = false;

 protected:
  Status open(int32_t ordinal, tandem_context** context, tandem_device* device) override {
    if (is_missing) return Status::unsupported("no GPU");
    opened.push_back(ordinal);
    *context = context_;
    *device = {TANDEM_CUDA, 3};
    return {};
  }

 private:
  tandem_context* context_;
};

// A virtual GPU computes the results, whose memory is the host's.
class VirtualGpus final : public xla::Gpus {
 protected:
  Status open(int32_t, tandem_context** context, tandem_device* device) override {
    tandem_context_options options{};
    options.size = sizeof options;
    options.device = "vgpu:h200";
    gpu::use_linked_virtual(vgpu::open);
    *device = {TANDEM_CPU, 0};
    const tandem_status status = tandem_context_create(&options, context);
    return {status, status == TANDEM_OK ? "" : tandem_last_error()};
  }
};

TEST(XlaOnVirtualGpu, ComputesAttention) {
  const std::vector<int64_t> dims{1, 70, 2, 64}, lse_dims{1, 2, 70};
  const auto size = static_cast<size_t>(elements(dims));
  std::mt19937 random(1);
  std::vector<uint16_t> q(size), out(size);
  for (uint16_t& x : q) x = static_cast<uint16_t>(0x3f00 + random() % 256 + (random() % 2 << 15));  // 0.5 to 1.99
  std::vector<float> lse(140);
  FakeXla xla;
  FakeFrame frame(&xla);
  for (const char* name : {"q", "k", "v"}) frame.input(name, kXlaBF16, q.data(), dims);
  frame.output("out", kXlaBF16, out.data(), dims);
  frame.output("lse", kXlaF32, lse.data(), lse_dims);
  frame.number("causal", true);
  static VirtualGpus& gpus = *new VirtualGpus;
  const auto on_gpu = [](const XlaFrame* made) { return xla::handle(*made, TANDEM_FORWARD, &gpus); };
  const std::string message = frame.run(on_gpu);
  if (frame.code == kXlaFailedPrecondition) GTEST_SKIP() << message;  // no NVRTC
  ASSERT_EQ(message, "");
  std::vector<uint16_t> expected(size);
  std::vector<float> expected_lse(140);
  FakeFrame on_cpu(&xla);
  for (const char* name : {"q", "k", "v"}) on_cpu.input(name, kXlaBF16, q.data(), dims);
  on_cpu.output("out", kXlaBF16, expected.data(), dims);
  on_cpu.output("lse", kXlaF32, expected_lse.data(), lse_dims);
  on_cpu.number("causal", true);
  ASSERT_EQ(on_cpu.run(forward_on_cpu), "");
  const auto value = [](uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); };
  for (size_t i = 0; i < size; ++i) ASSERT_NEAR(value(out[i]), value(expected[i]), 0x1p-7) << i;
  for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], expected_lse[i], 1e-4) << i;
}

class XlaOnGpu : public GpuCalls {
 protected:
  void SetUp() override {
    GpuCalls::SetUp();
    call_.dense_on_gpu(kSmall);
    xla.ordinal = 3;
    xla.stream = &xla;
  }
  std::string run() {
    FakeFrame frame(&xla);
    const auto give = [](const Held& held) {
      return std::vector<int64_t>(held.handle.shape, held.handle.shape + held.handle.ndim);
    };
    frame.input("q", kXlaBF16, call_.q.handle.data, give(call_.q));
    frame.input("k", kXlaBF16, call_.k.handle.data, give(call_.k));
    frame.input("v", kXlaBF16, call_.v.handle.data, give(call_.v));
    frame.output("out", kXlaBF16, call_.out.handle.data, give(call_.out));
    frame.output("lse", kXlaF32, call_.lse.handle.data, give(call_.lse));
    frame.number("softcap", softcap);
    const std::string message =
        frame.run([&](const XlaFrame* made) { return xla::handle(*made, TANDEM_FORWARD, &gpus()); });
    code = frame.code;
    return message;
  }
  FakeGpus& gpus() {
    if (gpus_ == nullptr) gpus_ = std::make_unique<FakeGpus>(context.get());
    return *gpus_;
  }

  FakeXla xla;
  double softcap = 0;
  int32_t code = 0;
  GpuCall call_;
  std::unique_ptr<FakeGpus> gpus_;
};

TEST_F(XlaOnGpu, KernelsRunOnXlasStream) {
  for (int i = 0; i < 3; ++i) ASSERT_EQ(run(), "");
  ASSERT_EQ(gpu.launched.size(), 3u);
  for (const FakeGpu::Launched& each : gpu.launched) EXPECT_EQ(each.launch.stream, &xla);
  EXPECT_EQ(gpus().opened, std::vector<int32_t>{3});  // once
  EXPECT_EQ(gpu.allocations, 0);
  EXPECT_EQ(gpu.synchronisations, 0);
}

TEST_F(XlaOnGpu, XlaAllocatesTheWorkspace) {
  ASSERT_EQ(run(), "");
  size_t bytes = 0;
  ASSERT_EQ(tandem_workspace_size(context.get(), TANDEM_FORWARD, &call_.args, &bytes), TANDEM_OK);
  EXPECT_EQ(xla.allocated, bytes > 0 ? std::vector<size_t>{bytes} : std::vector<size_t>{});
  EXPECT_EQ(xla.released, xla.allocated);
}

TEST_F(XlaOnGpu, ARefusedCallLaunchesNothing) {
  softcap = -1;
  EXPECT_NE(run().find("softcap (-1) must be"), std::string::npos);
  EXPECT_EQ(code, kXlaInvalidArgument);
  EXPECT_EQ(xla.released, xla.allocated);
  EXPECT_TRUE(gpu.launched.empty());
}

TEST_F(XlaOnGpu, AnOldRuntimeIsRefused) {
  xla.api.struct_size = offsetof(XlaApi, ordinal);
  EXPECT_NE(run().find("upgrade jax"), std::string::npos);
  EXPECT_EQ(code, kXlaUnimplemented);
}

TEST_F(XlaOnGpu, AMissingGpuIsReportedAtEveryCall) {
  gpus().is_missing = true;
  EXPECT_EQ(run(), "no GPU");
  EXPECT_EQ(run(), "no GPU");
  gpus().is_missing = false;
  EXPECT_EQ(run(), "");
}

TEST_F(XlaOnGpu, OrdinalsHaveALimit) {
  xla.ordinal = 64;
  EXPECT_NE(run().find("device ordinal (64) must be below 64"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
