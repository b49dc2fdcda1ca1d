// Tensors of 2^31 elements and more, where products of indices exceed 32 bits. The check samples runs of rows at both
// ends, in the middle, and on either side of 2^31 elements and of 2^31 bytes.
#include <cstring>

#include "kernels/on_gpu.h"
#include "support/random.h"

namespace tandem::test {
namespace {

constexpr int64_t kHeads = 2, kDim = 128, kRow = kHeads * kDim;
constexpr int64_t kLength = 128;  // rows of a sequence
constexpr int64_t kBatch = (int64_t{1} << 31) / (kLength * kRow) + 4;
constexpr int64_t kRows = kBatch * kLength;  // > 2^31 elements
constexpr int64_t kPeriod = 100'003;         // repeated random rows; no power of two is a period

// q, k and v begin at different places of the same random values.
class KernelsLarge : public testing::Test {
 protected:
  void SetUp() override {
    const size_t bytes = static_cast<size_t>(kRows * kRow * 2);
    if (the_gpu()->device().properties().memory_bytes < static_cast<int64_t>(4 * bytes) + (int64_t{3} << 30)) {
      GTEST_SKIP() << "NOT RUN: four tensors of 2^31 elements do not fit this GPU's memory";
    }
    Random random(31);
    values_.resize(static_cast<size_t>(kPeriod * kRow * 2));
    for (size_t n = 0; n < values_.size(); n += 2) store(DType::bf16, &values_[n], random.normal());
    try {
      for (int64_t tensor = 0; tensor < 4; ++tensor) memory_.emplace_back(device_, bytes);
      lse_ = std::make_unique<DeviceMemory>(device_, static_cast<size_t>(kRows * kHeads * 4));
    } catch (const std::runtime_error& error) {
      GTEST_SKIP() << "NOT RUN: " << error.what();
    }
    for (int64_t tensor = 0; tensor < 3; ++tensor) fill_periodically(memory_[static_cast<size_t>(tensor)], tensor);
  }

  // Row i is row (i + shift) % kPeriod of the values. The values are copied from the host once, then doubled
  // repeatedly.
  void fill_periodically(const DeviceMemory& to, int64_t shift) {
    const size_t row = kRow * 2, all = to.bytes();
    std::vector<std::byte> period(kPeriod * row);
    for (int64_t i = 0; i < kPeriod; ++i) std::memcpy(&period[static_cast<size_t>(i) * row], value_row(i + shift), row);
    require(device_.copy_to_device(to.at(0), period.data(), period.size(), stream_));
    for (size_t done = period.size(); done < all; done *= 2) {
      require(device_.copy_on_device(to.at(done), to.at(0), std::min(done, all - done), stream_));
    }
    require(device_.synchronize(stream_));
  }
  const std::byte* value_row(int64_t i) const { return &values_[static_cast<size_t>(i % kPeriod * kRow * 2)]; }

  // Runs the kernel over the whole memory: batches of sequences, packed sequences, or one long sequence.
  enum class Form { dense, packed, one };
  void run(Form form, tandem_attention_args a) {
    for (const DeviceMemory* output : {&memory_[3], lse_.get()}) {
      require(device_.fill(output->at(0), 0xff, output->bytes(), stream_));
    }
    int64_t dense[] = {kBatch, kLength, kHeads, kDim}, one[] = {1, kRows, kHeads, kDim},
            packed[] = {kRows, kHeads, kDim};
    int64_t dense_lse[] = {kBatch, kHeads, kLength}, one_lse[] = {1, kHeads, kRows}, packed_lse[] = {kHeads, kRows};
    int64_t offsets_shape[] = {kBatch + 1};
    tandem_tensor tensors[4];
    for (size_t n = 0; n < 4; ++n) {
      tensors[n] = {memory_[n].at(0),
                    the_gpu()->where(),
                    form == Form::packed ? 3 : 4,
                    {TANDEM_BFLOAT, 16, 1},
                    form == Form::dense ? dense
                    : form == Form::one ? one
                                        : packed,
                    nullptr,
                    0};
    }
    const tandem_tensor lse = {lse_->at(0),
                               the_gpu()->where(),
                               form == Form::packed ? 2 : 3,
                               {TANDEM_FLOAT, 32, 1},
                               form == Form::dense ? dense_lse
                               : form == Form::one ? one_lse
                                                   : packed_lse,
                               nullptr,
                               0};
    std::vector<int32_t> offsets(kBatch + 1);
    for (size_t b = 0; b < offsets.size(); ++b) offsets[b] = static_cast<int32_t>(b * kLength);
    const DeviceMemory cu_seqlens(device_, offsets.size() * 4);
    require(device_.copy_to_device(cu_seqlens.at(0), offsets.data(), cu_seqlens.bytes(), stream_));
    const tandem_tensor indices = {
        cu_seqlens.at(0), the_gpu()->where(), 1, {TANDEM_INT, 32, 1}, offsets_shape, nullptr, 0};
    a.size = sizeof a;
    a.q = &tensors[0], a.k = &tensors[1], a.v = &tensors[2], a.out = &tensors[3], a.lse = &lse;
    if (form == Form::packed) {
      a.cu_seqlens_q = a.cu_seqlens_k = &indices;
      a.max_seqlen_q = a.max_seqlen_k = kLength;
    }
    size_t bytes = 0;
    tandem_context* context = the_gpu()->context();
    ASSERT_EQ(tandem_workspace_size(context, TANDEM_FORWARD, &a, &bytes), TANDEM_OK) << tandem_last_error();
    const DeviceMemory workspace(device_, bytes);
    ASSERT_EQ(tandem_forward(context, &a, workspace.at(0), bytes, stream_), TANDEM_OK) << tandem_last_error();
    require(device_.synchronize(stream_));
  }

  // Checks rows [row, row + rows) of head `head` as a separate case, whose keys begin at row `key`.
  void expect_good_rows(const std::string& flags, int64_t row, int64_t key, int64_t head, Form form) {
    const Case c = from_flags("--dtype bf16 --gradients none --head-dim 128 --head-dim-v 128 " + flags);
    const auto engine = [&](const EngineCall& call) {
      Tensor &out = call.outputs->out, &lse = call.outputs->lse;
      for (int64_t i = 0; i < c.seqlen_q; ++i) {
        const int64_t at = row + i;
        const int64_t lse_at =
            form == Form::dense ? (at / kLength * kHeads + head) * kLength + at % kLength : head * kRows + at;
        require(device_.copy_to_host(out.element(i * kDim),
                                     memory_[3].at(static_cast<size_t>((at * kRow + head * kDim) * 2)), kDim * 2,
                                     stream_));
        require(device_.copy_to_host(lse.element(i), lse_->at(static_cast<size_t>(lse_at * 4)), 4, stream_));
      }
      require(device_.synchronize(stream_));
    };
    const Verdict verdict = run_case(c, engine, nullptr, [&](Instance& in) {
      const auto take = [&](Tensor& to, int64_t first, int64_t shift) {
        for (int64_t i = 0; i < to.shape()[1]; ++i) {
          std::memcpy(to.element(i * kDim), value_row(first + i + shift) + head * kDim * 2, kDim * 2);
        }
      };
      take(in.q, row, 0);
      take(in.k, key, 1);
      take(in.v, key, 2);
    });
    EXPECT_EQ(verdict.failure, "") << "rows from " << row << " on, head " << head;
    EXPECT_EQ(verdict.refusal, "");
  }

  static std::vector<int64_t> sampled_sequences() {
    const int64_t edge = (int64_t{1} << 31) / (kLength * kRow);  // the row with element 2^31; byte 2^31 is in its half
    return {0, 1, edge / 2 - 1, edge / 2, edge - 1, edge, kBatch - 1};
  }

  gpu::Device& device_ = the_gpu()->device();
  const gpu::Stream stream_ = the_gpu()->stream();
  std::vector<std::byte> values_;
  std::vector<DeviceMemory> memory_;
  std::unique_ptr<DeviceMemory> lse_;
};

TEST_F(KernelsLarge, BatchesPackedSequencesAndOneLongSequence) {
  for (const Form form : {Form::dense, Form::packed}) {
    tandem_attention_args args{};
    args.causal = 1;
    ASSERT_NO_FATAL_FAILURE(run(form, args));
    for (const int64_t b : sampled_sequences()) {
      for (int64_t head = 0; head < kHeads; ++head) {
        expect_good_rows("--seqlen-q 128 --seqlen-k 128 --causal 1", b * kLength, b * kLength, head, form);
      }
    }
  }
  tandem_attention_args args{};
  args.causal = 1;
  args.window = TANDEM_WINDOW_LEFT;
  args.window_left = 200;
  ASSERT_NO_FATAL_FAILURE(run(Form::one, args));
  for (const int64_t b : sampled_sequences()) {
    if (b < 2) continue;
    // The window's last rows: 64 rows see 200 keys before the first.
    expect_good_rows("--seqlen-q 64 --seqlen-k 264 --causal 1 --left 200", b * kLength, b * kLength - 200, b % kHeads,
                     Form::one);
  }
}

// Two batches 2^31 elements from each other, of all inputs or of all results. float32 has half as many elements, so
// that the bytes are equal. No byte between the two batches is accessed.
class FarApart {
 public:
  enum class Which { inputs, results };
  explicit FarApart(Which which) : which_(which) {}

  void run(const EngineCall& call) const {
    const bool forward = call.pass == TANDEM_FORWARD;
    tandem_attention_args args = call.instance->args(call.pass, call.outputs);
    std::vector<Placed> all = placed(call, args);
    for (size_t n = 0; n < all.size(); ++n) {
      const bool far = all[n].is_result == (which_ == Which::results);
      place(all[n], (far ? far_ : near_).at(n * kRoom), far ? kBytesApart : kRoom * all.size());
    }
    size_t bytes = 0;
    tandem_context* const context = the_gpu()->context();
    ASSERT_EQ(tandem_workspace_size(context, call.pass, &args, &bytes), TANDEM_OK) << tandem_last_error();
    const DeviceMemory workspace(device_, bytes);
    const auto launch = forward ? &tandem_forward : &tandem_backward;
    ASSERT_EQ(launch(context, &args, workspace.at(0), bytes, stream_), TANDEM_OK) << tandem_last_error();
    require(device_.synchronize(stream_));
    for (const Placed& one : all)
      if (one.is_result) copy(one, false);
    require(device_.synchronize(stream_));
  }

 private:
  static constexpr size_t kBytesApart = size_t{1} << 32, kRoom = 1 << 20;  // bytes per batch
  static constexpr size_t kTensors = 16;

  struct Placed {
    const tandem_tensor** argument;
    Tensor* host;
    bool is_result;
    std::byte* data = nullptr;
    size_t apart = 0;
    tandem_tensor tensor{};
    std::vector<int64_t> strides{};
  };

  static std::vector<Placed> placed(const EngineCall& call, tandem_attention_args& a) {
    Instance& in = *call.instance;
    Outputs& out = *call.outputs;
    std::vector<Placed> all = {{&a.q, &in.q, false}, {&a.k, &in.k, false}, {&a.v, &in.v, false}};
    if (call.pass == TANDEM_FORWARD) {
      all.insert(all.end(), {{&a.out, &out.out, true}, {&a.lse, &out.lse, true}});
    } else {
      all.insert(all.end(), {{&a.dout, &in.dout, false}, {&a.out, &in.given_out, false}});
      all.insert(all.end(), {{&a.lse, &in.given_lse, false}, {&a.dq, &out.dq, true}});
      all.insert(all.end(), {{&a.dk, &out.dk, true}, {&a.dv, &out.dv, true}});
    }
    return all;
  }
  void place(Placed& one, std::byte* data, size_t apart) const {
    one.data = data;
    one.apart = apart;
    one.tensor = **one.argument;
    one.strides = one.host->strides();
    one.strides[0] = static_cast<int64_t>(apart) / size_of(one.host->dtype());
    one.tensor.data = data;
    one.tensor.byte_offset = 0;
    one.tensor.device = the_gpu()->where();
    one.tensor.strides = one.strides.data();
    *one.argument = &one.tensor;
    copy(one, true);
  }
  void copy(const Placed& one, bool to_device) const {
    const int64_t elements = one.host->size() / 2;
    const auto bytes = static_cast<size_t>(elements * size_of(one.host->dtype()));
    ASSERT_LE(bytes, kRoom);
    for (size_t batch = 0; batch < 2; ++batch) {
      std::byte* const there = one.data + batch * one.apart;
      std::byte* const here = one.host->element(static_cast<int64_t>(batch) * elements);
      require(to_device ? device_.copy_to_device(there, here, bytes, stream_)
                        : device_.copy_to_host(here, there, bytes, stream_));
    }
  }

  const Which which_;
  gpu::Device& device_ = the_gpu()->device();
  const gpu::Stream stream_ = the_gpu()->stream();
  const DeviceMemory far_{device_, kBytesApart + kTensors* kRoom}, near_{device_, 2 * kTensors* kRoom};
};

// On Blackwell one CTA or two compute the tile; heads may be wide, and threads may store dk and dv.
TEST(KernelsLargeStrides, FlashAttention2214OffsetsOfMoreThan32Bits) {
  for (const FarApart::Which which : {FarApart::Which::inputs, FarApart::Which::results}) {
    const FarApart engine(which);
    for (const char* flags : {"--head-dim 64 --head-dim-v 64 --causal 1", "--head-dim 128 --head-dim-v 128",
                              "--head-dim 256 --head-dim-v 256", "--head-dim 64 --head-dim-v 40 --float32 g"}) {
      const Case c = from_flags(
          std::string("--dtype bf16 --align 8 --batch 2 --seqlen-q 70 --seqlen-k 270 --gradients qkv ") + flags);
      const Verdict verdict = run_case(c, [&](const EngineCall& call) { engine.run(call); });
      EXPECT_EQ(verdict.failure, "") << flags;
      EXPECT_EQ(verdict.refusal, "") << flags;
    }
  }
}

}  // namespace
}  // namespace tandem::test
