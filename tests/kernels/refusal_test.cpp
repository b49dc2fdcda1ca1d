// Unsupported calls on a GPU are refused with a sentence, and nothing is written.
#include <list>

#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

// A call whose arguments a test may change.
struct Spoilt {
  explicit Spoilt(const std::string& flags) : call(flags), args(call.call.args) {}

  // Replaces a tensor of the arguments by a copy.
  tandem_tensor& own(const tandem_tensor* tandem_attention_args::*field) {
    tandem_tensor& tensor = tensors.emplace_back(*(args.*field));
    args.*field = &tensor;
    return tensor;
  }

  void expect(tandem_status code, const std::string& word, gpu::Stream stream = the_gpu()->stream()) {
    EXPECT_EQ(tandem_forward(the_gpu()->context(), &args, workspace, bytes, stream), code) << word;
    EXPECT_NE(std::string(tandem_last_error()).find(word), std::string::npos) << word << ": " << tandem_last_error();
    for (const std::byte b : call.fetch(the_gpu()->stream())) ASSERT_EQ(b, std::byte{0xff}) << word;
  }

  Repeated call;
  tandem_attention_args args;
  std::list<tandem_tensor> tensors;
  void* workspace = call.call.workspace();
  size_t bytes = call.call.workspace_bytes();
};

const std::string kFlags =
    "--dtype bf16 --batch 2 --seqlen-q 70 --seqlen-k 90 --heads-q 2 --head-dim 64 --head-dim-v 64 --causal 1";

TEST(KernelsRefusal, TensorsElsewhere) {
  for (const auto field : {&tandem_attention_args::q, &tandem_attention_args::k, &tandem_attention_args::out,
                           &tandem_attention_args::lse}) {
    Spoilt on_host(kFlags);
    on_host.own(field).device = {TANDEM_CPU, 0};
    on_host.expect(TANDEM_INVALID_ARGUMENT, "device");
    Spoilt on_another(kFlags);
    on_another.own(field).device.index = 7;
    on_another.expect(TANDEM_INVALID_ARGUMENT, "device");
    Spoilt nowhere(kFlags);
    nowhere.own(field).data = nullptr;
    nowhere.own(field).byte_offset = 0;
    nowhere.expect(TANDEM_INVALID_ARGUMENT, "data (NULL)");
  }
}

TEST(KernelsRefusal, TensorsThatAreNotInMultiplesOf16Bytes) {
  const NamedEngine engine = gpu_engine({the_gpu()});
  const struct {
    const tandem_tensor* tandem_attention_args::*field;
    const char *layout, *word;  // 3 elements between the rows of this tensor alone
  } tensors[] = {{&tandem_attention_args::q, "1", "q.strides"},
                 {&tandem_attention_args::k, "4", "k.strides"},
                 {&tandem_attention_args::v, "16", "v.strides"},
                 {&tandem_attention_args::out, "64", "out.strides"}};
  for (const auto& tensor : tensors) {
    Spoilt shifted(kFlags);
    shifted.own(tensor.field).byte_offset += 2;
    shifted.expect(TANDEM_UNSUPPORTED, "multiple of 16");
    const Verdict verdict =
        run_case(from_flags("--gradients none " + kFlags + " --layout " + tensor.layout), engine.run, engine.supports);
    EXPECT_NE(verdict.refusal.find(tensor.word), std::string::npos) << verdict.refusal;
  }
}

TEST(KernelsRefusal, Workspaces) {
  // Packed calls need the longest length.
  const std::string flags = kFlags + " --packed 1 --lengths-q 30,700 --lengths-k 90,20 --max-seqlen 0";
  Spoilt small(flags);
  ASSERT_GT(small.bytes, 0u);
  --small.bytes;
  small.expect(TANDEM_WORKSPACE_TOO_SMALL, "workspace_bytes");
  Spoilt absent(flags);
  absent.workspace = nullptr;
  absent.expect(TANDEM_INVALID_ARGUMENT, "workspace (NULL)");
  Spoilt unbounded(flags);
  unbounded.args.max_seqlen_k = 0;
  unbounded.expect(TANDEM_INVALID_ARGUMENT, "max_seqlen_k");
}

TEST(KernelsRefusal, WhatIsNotServed) {
  Spoilt splits(kFlags);
  splits.args.num_splits = 3;
  splits.args.batch_invariant = 1;
  splits.expect(TANDEM_UNSUPPORTED, "num_splits");

  const NamedEngine engine = gpu_engine({the_gpu()});
  const struct {
    const char *flags, *word;
  } refused[] = {{"--dtype f32", "float32"},
                 {"--dtype bf16 --head-dim 12 --head-dim-v 12", "head_dim (12)"},
                 {"--dtype bf16 --head-dim 264 --head-dim-v 264", "head_dim (264)"},
                 {"--dtype bf16 --page-size 4 --used-k 4", "k.page_size (4) must be a multiple of 16"}};
  for (const auto& one : refused) {
    const Verdict verdict =
        run_case(from_flags(std::string("--gradients none ") + one.flags), engine.run, engine.supports);
    EXPECT_NE(verdict.refusal.find(one.word), std::string::npos) << one.flags << ": " << verdict.refusal;
    EXPECT_EQ(verdict.failure, "");
  }
}

TEST(KernelsRefusal, DevicesThatAreNotThere) {
  for (const char* name : {"cuda:999", "cuda:x", "cuda:-1", "cuda:"}) {
    tandem_context_options options{};
    options.size = sizeof options;
    options.device = name;
    tandem_context* context = nullptr;
    EXPECT_NE(tandem_context_create(&options, &context), TANDEM_OK) << name;
    EXPECT_EQ(context, nullptr);
    EXPECT_NE(std::string(tandem_last_error()).find(name), std::string::npos) << tandem_last_error();
  }
}

// Wrong lengths are clamped to the tensors, so that nothing outside them is read or written. With `validate` such
// lengths are refused with a sentence.
TEST(KernelsRefusal, IndicesThatPointOutside) {
  for (const int liar : {-5, 50, 1 << 30, INT32_MAX}) {
    auto in = std::make_unique<Instance>(from_flags(
        kServed +
        "--dtype bf16 --packed 1 --lengths-q 30,70 --lengths-k 90,20 --max-seqlen 0 --head-dim 64 --head-dim-v 64"));
    in->cu_seqlens_q.set(1, liar);
    in->cu_seqlens_k.set(2, liar);
    Repeated call(std::move(in));
    call.run();
    EXPECT_TRUE(call.outputs.out.guards_intact() && call.outputs.lse.guards_intact()) << liar;
    call.call.args.validate = 1;
    EXPECT_THROW(call.call.forward(call.gpu.stream()), Refused) << liar;
  }
}

}  // namespace
}  // namespace tandem::test
