// Reads any arguments: the bytes choose a small valid call and then spoil parts of it. make_problem() must refuse it
// with a sentence or return a problem whose every index is inside its tensors.
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "problem/bound_expression.h"
#include "problem/problem.h"
#include "problem/use_options.h"

namespace {

using namespace tandem;

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  template <class T>
  T take() {
    T value{};
    const size_t n = sizeof value < left_ ? sizeof value : left_;
    if (n > 0) std::memcpy(&value, data_, n);
    data_ += n;
    left_ -= n;
    return value;
  }
  // Returns small numbers, and occasionally a number that breaks arithmetic.
  int64_t number() {
    constexpr int64_t extreme[] = {-1, INT64_MAX, INT64_MIN, INT64_MAX / 2, int64_t{1} << 32, int64_t{1} << 62, 65536};
    const auto byte = take<uint8_t>();
    return byte < 240 ? byte % 20 : byte < 254 ? extreme[byte % std::size(extreme)] : take<int64_t>();
  }
  bool empty() const { return left_ == 0; }

 private:
  const uint8_t* data_;
  size_t left_;
};

struct Tensor {
  tandem_tensor handle{};
  std::array<int64_t, 8> shape{}, strides{};
  std::vector<int32_t> memory;
};

constexpr size_t tensor_fields = 23;
constexpr size_t first_index = 16;  // cu_seqlens_q and later tensors hold int32

class FuzzedCall {
 public:
  explicit FuzzedCall(Bytes& in) {
    const auto flags = in.take<uint16_t>();
    const bool packed = flags & 1;
    const int64_t batch = in.take<uint8_t>() % 4, heads_k = in.take<uint8_t>() % 3, group = 1 + in.take<uint8_t>() % 3;
    const int64_t sq = in.take<uint8_t>() % 9, sk = in.take<uint8_t>() % 9, d = 1 + in.take<uint8_t>() % 16;
    const int64_t dv = 1 + in.take<uint8_t>() % 16, heads_q = heads_k * group;
    const tandem_dtype types[] = {
        {TANDEM_FLOAT, 32, 1}, {TANDEM_BFLOAT, 16, 1}, {TANDEM_FLOAT, 16, 1}, {TANDEM_FLOAT, 64, 1}};
    const tandem_dtype t = types[in.take<uint8_t>() % 4], f32 = types[0], i32 = {TANDEM_INT, 32, 1};
    const auto rows = [&](int64_t length, int64_t heads, int64_t dim) {
      return packed ? std::vector<int64_t>{batch * length, heads, dim}
                    : std::vector<int64_t>{batch, length, heads, dim};
    };
    const auto q = rows(sq, heads_q, d), k = rows(sk, heads_k, d), v = rows(sk, heads_k, dv),
               out = rows(sq, heads_q, dv);
    const auto lse = packed ? std::vector{heads_q, batch * sq} : std::vector{batch, heads_q, sq};
    const std::vector<int64_t> bias = {flags & 2 ? batch : 1, flags & 4 ? heads_q : 1, flags & 8 ? sq : 1, sk};
    const std::vector<int64_t> per_head = {heads_q};
    set(0, q, t), set(1, k, t), set(2, v, t), set(3, out, t), set(4, lse, f32), set(5, out, t), set(6, lse, f32);
    set(7, q, t), set(8, k, t), set(9, v, t);
    if (flags & 16) set(10, bias, flags & 32 ? tandem_dtype{TANDEM_BOOL, 8, 1} : f32), set(11, bias, f32);
    if (flags & 64) set(12, per_head, f32), set(13, per_head, f32);
    if (flags & 128) set(14, flags & 256 ? std::vector{batch, heads_q} : per_head, f32);
    if (packed) set_index(16, batch + 1, i32, sq), set_index(17, batch + 1, i32, sk);
    if (flags & 512) set_index(18, batch, i32, 0), set_index(19, batch, i32, 0);
    if (flags & 1024) set(20, {batch, 2}, i32);
    if (flags & 16384)
      args_.alignment = TANDEM_EXPLICIT, set_index(21, batch, i32, 5), args_.diagonal_offset = in.number();
    has_mod_ = flags & 32768;
    args_.size = sizeof args_;
    args_.causal = (flags >> 11) & 1;
    if (flags & 4096) args_.window = 3, args_.window_left = in.number(), args_.window_right = in.number();
    if (flags & 8192) args_.dropout_p = in.take<uint8_t>() / 256.0;
    if (args_.dropout_p > 0.5) set(22, {batch, sizeof(tandem_place) / sizeof(int32_t)}, i32);
  }

  // Sets one field to a wrong value.
  void spoil(Bytes& in) {
    const auto which = in.take<uint8_t>();
    if (which < 160) return spoil_tensor(tensors_[which % tensor_fields], in);
    switch (which % 8) {
      case 0: args_.size = in.take<uint16_t>() % 1024; break;
      case 1: tensors_[in.take<uint8_t>() % tensor_fields].reset(); break;
      case 2: copy_tensor(in.take<uint8_t>() % tensor_fields, in.take<uint8_t>() % tensor_fields); break;
      case 3: tail_ = in.take<uint8_t>(); break;
      default: spoil_number(in.take<uint8_t>(), in);
    }
  }

  void run(tandem_pass pass, bool with_data) {
    const tandem_tensor** fields[tensor_fields] = {&args_.q,
                                                   &args_.k,
                                                   &args_.v,
                                                   &args_.out,
                                                   &args_.lse,
                                                   &args_.dout,
                                                   &args_.dlse,
                                                   &args_.dq,
                                                   &args_.dk,
                                                   &args_.dv,
                                                   &args_.bias,
                                                   &args_.dbias,
                                                   &args_.sink,
                                                   &args_.dsink,
                                                   &args_.alibi_slopes,
                                                   nullptr,
                                                   &args_.cu_seqlens_q,
                                                   &args_.cu_seqlens_k,
                                                   &args_.seqused_q,
                                                   &args_.seqused_k,
                                                   &args_.page_table,
                                                   &args_.diagonal_offsets,
                                                   &args_.places};
    for (size_t i = 0; i < tensor_fields; ++i) {
      if (!fields[i]) continue;
      *fields[i] = tensors_[i] ? &tensors_[i]->handle : nullptr;
      if (tensors_[i] && with_data) give_memory(i);
    }
    if (has_mod_) add_mod();
    // The allocation has exactly this size, so that the address sanitizer sees a read beyond it.
    const auto size = static_cast<size_t>(args_.size);
    std::vector<uint64_t> exact((std::max(size, sizeof args_.size) + 7) / 8, tail_);
    std::memcpy(exact.data(), &args_, std::min(exact.size() * 8, sizeof args_));
    Problem problem;
    const Status status = make_problem(pass, reinterpret_cast<const tandem_attention_args*>(exact.data()),
                                       {TANDEM_CPU, 0}, with_data, &problem);
    if (status.ok()) {
      check(problem, with_data);
      use_options(&problem);
      check(problem, with_data);
    } else if (status.message.empty()) {
      std::abort();
    }
  }

 private:
  void set(size_t i, const std::vector<int64_t>& shape, tandem_dtype dtype) {
    tensors_[i] = std::make_unique<Tensor>();
    Tensor& t = *tensors_[i];
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    t.handle = {reinterpret_cast<void*>((i + 1) << 32),
                {TANDEM_CPU, 0},
                static_cast<int32_t>(shape.size()),
                dtype,
                t.shape.data(),
                nullptr,
                0};
  }

  void set_index(size_t i, int64_t n, tandem_dtype dtype, int64_t step) {
    set(i, {n}, dtype);
    for (int64_t b = 0; b < n; ++b) tensors_[i]->memory.push_back(static_cast<int32_t>(b * step));
  }

  // Adds an expression that reads the sink, in any state, with its gradient.
  void add_mod() {
    captured_ = {"sink", args_.sink, args_.dsink};
    mod_ = {sizeof mod_, "score - sink[head] * abs(q - k)", &scalar_, 1, &captured_, 1};
    args_.score_mod = &mod_;
  }

  // Pointers are kept, because the call reads through them.
  void spoil_number(size_t which, Bytes& in) {
    size_t count = 0, index = 0;
#define OPTION(member, type, kind, schema) count += !std::is_pointer_v<type>;
#define MEMBER(member, type) count += !std::is_pointer_v<type>;
#include "problem/options.def"
    which %= count;
#define OPTION(member, type, kind, schema) \
  if (!std::is_pointer_v<type> && index++ == which) spoil_value(args_.member, in);
#define MEMBER(member, type) OPTION(member, type, , )
#include "problem/options.def"
  }

  static void spoil_value(double& member, Bytes& in) { member = in.take<double>(); }
  static void spoil_value(int64_t& member, Bytes& in) { member = in.number(); }
  static void spoil_value(uint64_t& member, Bytes& in) { member = in.take<uint64_t>(); }
  static void spoil_value(int32_t& member, Bytes& in) {
    const auto small = in.take<int8_t>();
    member = small >= -64 ? small : in.take<int32_t>();
  }
  template <class T>
  static void spoil_value(T*&, Bytes&) {}

  static void spoil_tensor(std::unique_ptr<Tensor>& tensor, Bytes& in) {
    const auto what = in.take<uint8_t>();
    if (!tensor) return;
    Tensor& t = *tensor;
    switch (what % 10) {
      case 0:
      case 1: t.shape[in.take<uint8_t>() % 5] = in.number(); break;
      case 2:
        for (auto& stride : t.strides) stride = in.number();
        t.handle.strides = t.strides.data();
        break;
      case 3: t.handle.ndim = in.take<int8_t>() % 9; break;
      case 4: t.handle.dtype = {in.take<uint8_t>(), static_cast<uint8_t>(8 << in.take<uint8_t>() % 4), 1}; break;
      case 5: t.handle.dtype.lanes = in.take<uint16_t>(); break;
      case 6: t.handle.data = reinterpret_cast<void*>(in.take<uint32_t>()); break;
      case 7: t.handle.byte_offset = in.take<uint64_t>(); break;
      case 8: t.handle.device = {in.take<int8_t>(), in.take<int8_t>()}; break;
      default:
        if (!t.memory.empty()) t.memory[in.take<uint8_t>() % t.memory.size()] = in.take<int16_t>();
    }
  }

  void copy_tensor(size_t to, size_t from) {
    if (to == from || !tensors_[from]) return;
    tensors_[to] = std::make_unique<Tensor>(*tensors_[from]);
    tensors_[to]->handle.shape = tensors_[to]->shape.data();
    if (tensors_[to]->handle.strides) tensors_[to]->handle.strides = tensors_[to]->strides.data();
  }

  // Index tensors are read: their memory must be as large as their shape and strides require, or absent.
  void give_memory(size_t i) {
    Tensor& t = *tensors_[i];
    if (i < first_index || !t.handle.data) return;
    t.handle.byte_offset = 0;
    t.handle.data = nullptr;
    int64_t reach = 1, compact = 1;
    for (int dim = std::min(t.handle.ndim, 8) - 1; dim >= 0; --dim) {
      const auto at = static_cast<size_t>(dim);
      const int64_t stride = t.handle.strides ? t.strides[at] : compact;
      if (t.shape[at] < 0 || t.shape[at] > 100 || stride < 0 || stride > 100) return;
      reach += std::max<int64_t>(t.shape[at] - 1, 0) * stride;
      compact *= t.shape[at];
      if (compact > 1000) return;
    }
    t.memory.resize(static_cast<size_t>(reach));
    t.memory.shrink_to_fit();
    t.handle.data = t.memory.data();
  }

  static void require(bool holds) {
    if (!holds) std::abort();
  }

  static void check(const Problem& p, bool with_data) {
    require(p.batch >= 0 && p.seqlen_q >= 0 && p.seqlen_k >= 0 && p.head_dim >= 1 && p.head_dim_v >= 1);
    require(p.heads_k == 0 ? p.heads_q == 0 : p.heads_q % p.heads_k == 0);
    require(p.softmax_scale == p.softmax_scale && p.softcap >= 0 && p.dropout.p >= 0 && p.dropout.p < 1);
    if (p.score_mod) {
      const score_mod::TensorView& sink = p.score_mod->values.tensors[0];
      require(sink.rank == 1 && sink.size[0] >= 1 && p.score_mod->cells <= sink.size[0]);
    }
    if (!with_data && (p.packed_q() || p.packed_k() || p.seqused_q || p.seqused_k || p.diagonal_offsets)) return;
    for (int64_t b = 0; b < std::min<int64_t>(p.batch, 100); ++b) {
      const Sequence s = sequence_of(p, b);
      require(0 <= s.q_len && s.q_len <= s.q_rows && s.q_rows <= p.seqlen_q);
      require(p.bottom_right || (-kFarDiagonal <= s.diagonal && s.diagonal <= kFarDiagonal));
      require(0 <= s.k_len && s.k_len <= s.k_rows && s.k_rows <= p.seqlen_k);
      require(s.q_begin >= 0 && s.q_begin + s.q_rows <= p.total_q);
      if (!p.page_table) require(s.k_begin >= 0 && s.k_begin + s.k_rows <= p.total_k);
      for (int64_t i = 0; i < std::min<int64_t>(s.q_len, 100); ++i) {
        const KeySpan keys = visible_keys(p, s, i);
        require(0 <= keys.begin && keys.begin <= keys.end && keys.end <= s.k_len);
      }
    }
  }

  std::unique_ptr<Tensor> tensors_[tensor_fields];
  tandem_attention_args args_{};
  tandem_mod_scalar scalar_{"scale", TANDEM_FLOAT, 0, 0.5};
  tandem_mod_tensor captured_{};
  tandem_mod mod_{};
  bool has_mod_ = false;
  uint64_t tail_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  const auto mode = in.take<uint8_t>();
  FuzzedCall call(in);
  for (int n = 0; n < 8 && !in.empty(); ++n) call.spoil(in);
  call.run(mode & 1 ? TANDEM_BACKWARD : TANDEM_FORWARD, mode & 2);
  return 0;
}
