// Tandem for C++20: a thin layer over tandem.h that owns what can be owned and throws tandem::Error.
//
//   std::vector<float> x(2 * 128 * 8 * 64), y(x.size());
//   tandem::Tensor q(x, {2, 128, 8, 64});                 // (batch, seqlen, heads, head_dim)
//   tandem::Tensor out(y, {2, 128, 8, 64});
//   tandem::Attention a{.q = q, .k = q, .v = q, .out = out, .causal = true};
//   tandem::forward(a);
//
// tandem.h says what every field means, its shape and its rules; here are only the C++ forms of it.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "tandem/tandem.h"

namespace tandem {

// A refused or failed call: what() is the sentence, code() the tandem_status.
class Error : public std::runtime_error {
 public:
  Error(tandem_status code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
  tandem_status code() const noexcept { return code_; }

 private:
  tandem_status code_;
};

inline void throw_if_failed(tandem_status status) {
  if (status != TANDEM_OK) throw Error(status, tandem_last_error());
}

// ---- Tensors --------------------------------------------------------------------------------------------------------

inline constexpr tandem_dtype float64{TANDEM_FLOAT, 64, 1}, float32{TANDEM_FLOAT, 32, 1};
inline constexpr tandem_dtype float16{TANDEM_FLOAT, 16, 1}, bfloat16{TANDEM_BFLOAT, 16, 1};
inline constexpr tandem_dtype int32{TANDEM_INT, 32, 1}, boolean{TANDEM_BOOL, 8, 1};

// The dtype of a C++ type. Specialise it for a 16-bit type of your own:
//   template <> inline constexpr tandem_dtype tandem::dtype_of<my::bf16> = tandem::bfloat16;
template <class T>
inline constexpr tandem_dtype dtype_of{0, 0, 0};
template <>
inline constexpr tandem_dtype dtype_of<double> = float64;
template <>
inline constexpr tandem_dtype dtype_of<float> = float32;
template <>
inline constexpr tandem_dtype dtype_of<int32_t> = int32;
template <>
inline constexpr tandem_dtype dtype_of<bool> = boolean;

template <class T>
concept Element = dtype_of<std::remove_const_t<T>>.bits != 0;

// Up to 8 sizes or strides, of any integer types: {batch, 128, heads, 64}.
class Sizes {
 public:
  Sizes() = default;
  template <std::integral... I>
    requires(sizeof...(I) >= 1 && sizeof...(I) <= 8)
  Sizes(I... sizes) : values_{static_cast<int64_t>(sizes)...}, count_(sizeof...(I)) {}
  // Throws Error when there are more than 8.
  explicit Sizes(std::span<const int64_t> sizes) : count_(static_cast<int32_t>(sizes.size())) {
    if (sizes.size() > 8) {
      throw Error(TANDEM_INVALID_ARGUMENT,
                  "ndim (" + std::to_string(sizes.size()) + ") must be at most 8: no tensor of a call has more than 4");
    }
    for (size_t i = 0; i < sizes.size(); ++i) values_[i] = sizes[i];
  }

  int32_t count() const { return count_; }
  int64_t operator[](int32_t i) const { return values_[i]; }
  int64_t* data() { return values_; }

 private:
  int64_t values_[8] = {};
  int32_t count_ = 0;
};

// A view of memory that somebody else owns: where, of what type, in which shape. An empty one is an absent argument.
// Strides count elements; without them the tensor is compact, row-major.
class Tensor {
 public:
  Tensor() = default;

  // From a pointer: Tensor(float*, shape). A const pointer makes a tensor that can be an input only.
  template <Element T>
  Tensor(T* data, Sizes shape, Sizes strides = {}) : Tensor(dtype_of<std::remove_const_t<T>>, data, shape, strides) {}

  // From a vector, array or span: throws Error when the compact shape has more elements than the range.
  template <std::ranges::contiguous_range R>
    requires std::ranges::sized_range<R> && std::ranges::borrowed_range<R> &&
             Element<std::remove_reference_t<std::ranges::range_reference_t<R>>>
  Tensor(R&& range, Sizes shape) : Tensor(std::ranges::data(range), shape) {
    // Divides, because a product might overflow. Sizes below 1 leave the check to the call.
    uint64_t left = std::ranges::size(range);
    for (int32_t i = 0; i < shape.count(); ++i) {
      if (shape[i] < 1) return;
      left /= static_cast<uint64_t>(shape[i]);
    }
    if (left == 0) {
      throw Error(TANDEM_INVALID_ARGUMENT, "shape has more elements than the range (" +
                                               std::to_string(std::ranges::size(range)) + ") that it is laid over");
    }
  }

  // From memory of a type that C++ has no name for: Tensor(tandem::bfloat16, data, shape).
  Tensor(tandem_dtype dtype, void* data, Sizes shape, Sizes strides = {}) : shape_(shape), strides_(strides) {
    if (strides.count() != 0 && strides.count() != shape.count()) {
      throw Error(TANDEM_INVALID_ARGUMENT, "strides (" + std::to_string(strides.count()) + " of them) must be " +
                                               std::to_string(shape.count()) + ", as many as sizes, or none");
    }
    tensor_ = {data, {TANDEM_CPU, 0}, shape.count(), dtype, nullptr, nullptr, 0};
    present_ = true;
  }
  Tensor(tandem_dtype dtype, const void* data, Sizes shape, Sizes strides = {})
      : Tensor(dtype, const_cast<void*>(data), shape, strides) {
    read_only_ = true;
  }

  // From another library's tensor (DLPack's DLTensor has this layout). Shape and strides are copied, elements are not.
  explicit Tensor(const tandem_tensor& tensor)
      : tensor_(tensor), shape_(entries(tensor.shape, tensor.ndim)), present_(true) {
    if (tensor.strides != nullptr) strides_ = entries(tensor.strides, tensor.ndim);
  }

  explicit operator bool() const { return present_; }
  bool read_only() const { return read_only_; }

  // The C form, or NULL when empty. It points into *this.
  const tandem_tensor* get() {
    if (!present_) return nullptr;
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.count() == 0 ? nullptr : strides_.data();
    return &tensor_;
  }

 private:
  static Sizes entries(const int64_t* values, int32_t count) {
    return Sizes(std::span<const int64_t>(values, count > 0 && values != nullptr ? static_cast<size_t>(count) : 0));
  }

  tandem_tensor tensor_{};
  Sizes shape_, strides_;
  bool present_ = false, read_only_ = false;
};

// ---- Context --------------------------------------------------------------------------------------------------------

// Threads and device; see tandem_context. Move only. A default-constructed one is the process default.
class Context {
 public:
  struct Options {
    std::string device = "cpu";
    int32_t threads = 0;                         // 0: one per available core
    tandem_parallel_for parallel_for = nullptr;  // the caller's threads
    void* parallel_for_data = nullptr;
  };

  Context() = default;
  explicit Context(const Options& options) {
    tandem_context_options o{};
    o.size = sizeof o;
    o.device = options.device.c_str();
    o.threads = options.threads;
    o.parallel_for = options.parallel_for;
    o.parallel_for_data = options.parallel_for_data;
    throw_if_failed(tandem_context_create(&o, &handle_));
  }
  Context(Context&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Context& operator=(Context&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Context() { tandem_context_destroy(handle_); }

  tandem_context* get() const { return handle_; }
  std::string description() const { return tandem_context_description(handle_); }  // "cpu, 2 threads, AVX2"
  int32_t threads() const { return tandem_context_threads(handle_); }

 private:
  tandem_context* handle_ = nullptr;
};

// ---- Attention ------------------------------------------------------------------------------------------------------

enum class Alignment : int32_t { bottom_right = TANDEM_BOTTOM_RIGHT, top_left = TANDEM_TOP_LEFT };

// One call. The fields are those of tandem_attention_args, in its order; what is not set is absent.
struct Attention {
  Tensor q = {}, k = {}, v = {};                // (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim)
  Tensor out = {}, lse = {};                    // lse: (batch, heads, seqlen) or (heads, total), natural logarithm
  Tensor dout = {}, dlse = {};                  // backward: gradients that come in
  Tensor dq = {}, dk = {}, dv = {};             // backward: gradients that are wanted
  Tensor bias = {}, dbias = {};                 // (batch|1, heads|1, seqlen_q|1, seqlen_k|1)
  Tensor sink = {}, dsink = {};                 // (heads)
  Tensor alibi_slopes = {};                     // (heads) or (batch, heads)
  Tensor cu_seqlens_q = {}, cu_seqlens_k = {};  // (batch + 1)
  Tensor seqused_q = {}, seqused_k = {};        // (batch)
  Tensor page_table = {};                       // (batch, max_pages)
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;

  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  double softcap = 0;        // 0: off
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  std::optional<int64_t> window_left = {}, window_right = {};  // nothing: unbounded

  double dropout_p = 0;
  uint64_t dropout_seed = 0, dropout_offset = 0;
  const uint64_t* dropout_seed_ptr = nullptr;
  const uint64_t* dropout_offset_ptr = nullptr;

  int32_t num_splits = 0;
  bool deterministic = false, batch_invariant = false, validate = false;
};

namespace detail {

// The C form of a call; it points into its own copy of the tensors.
class CArgs {
 public:
  CArgs(const Attention& attention, tandem_pass pass) : a_(attention) {
    refuse_read_only(pass);
    args_.size = sizeof args_;
    args_.q = a_.q.get();
    args_.k = a_.k.get();
    args_.v = a_.v.get();
    args_.out = a_.out.get();
    args_.lse = a_.lse.get();
    args_.dout = a_.dout.get();
    args_.dlse = a_.dlse.get();
    args_.dq = a_.dq.get();
    args_.dk = a_.dk.get();
    args_.dv = a_.dv.get();
    args_.bias = a_.bias.get();
    args_.dbias = a_.dbias.get();
    args_.sink = a_.sink.get();
    args_.dsink = a_.dsink.get();
    args_.alibi_slopes = a_.alibi_slopes.get();
    args_.cu_seqlens_q = a_.cu_seqlens_q.get();
    args_.cu_seqlens_k = a_.cu_seqlens_k.get();
    args_.seqused_q = a_.seqused_q.get();
    args_.seqused_k = a_.seqused_k.get();
    args_.page_table = a_.page_table.get();
    args_.max_seqlen_q = a_.max_seqlen_q;
    args_.max_seqlen_k = a_.max_seqlen_k;
    args_.softmax_scale = a_.softmax_scale;
    args_.softcap = a_.softcap;
    args_.causal = a_.causal;
    args_.alignment = static_cast<int32_t>(a_.alignment);
    args_.window = (a_.window_left ? TANDEM_WINDOW_LEFT : 0) | (a_.window_right ? TANDEM_WINDOW_RIGHT : 0);
    args_.window_left = a_.window_left.value_or(0);
    args_.window_right = a_.window_right.value_or(0);
    args_.dropout_p = a_.dropout_p;
    args_.dropout_seed = a_.dropout_seed;
    args_.dropout_offset = a_.dropout_offset;
    args_.dropout_seed_ptr = a_.dropout_seed_ptr;
    args_.dropout_offset_ptr = a_.dropout_offset_ptr;
    args_.num_splits = a_.num_splits;
    args_.deterministic = a_.deterministic;
    args_.batch_invariant = a_.batch_invariant;
    args_.validate = a_.validate;
  }
  CArgs(const CArgs&) = delete;
  CArgs& operator=(const CArgs&) = delete;

  const tandem_attention_args* get() const { return &args_; }

 private:
  void refuse_read_only(tandem_pass pass) const {
    const auto refuse = [](const Tensor& tensor, const char* name) {
      if (tensor && tensor.read_only()) {
        throw Error(
            TANDEM_INVALID_ARGUMENT,
            std::string(name) + " (read only) must be writable: it is written; make it from memory that is not const");
      }
    };
    if (pass == TANDEM_FORWARD) {
      refuse(a_.out, "out");
      refuse(a_.lse, "lse");
    } else {
      refuse(a_.dq, "dq");
      refuse(a_.dk, "dk");
      refuse(a_.dv, "dv");
      refuse(a_.dbias, "dbias");
      refuse(a_.dsink, "dsink");
    }
  }

  Attention a_;
  tandem_attention_args args_{};
};

inline size_t workspace_size(const CArgs& args, tandem_pass pass, const Context& context) {
  size_t bytes = 0;
  throw_if_failed(tandem_workspace_size(context.get(), pass, args.get(), &bytes));
  return bytes;
}

using Function = tandem_status (*)(tandem_context*, const tandem_attention_args*, void*, size_t, void*);

inline void run(Function function, tandem_pass pass, const Attention& attention, const Context& context,
                std::span<std::byte> workspace, void* stream) {
  const CArgs args(attention, pass);
  std::unique_ptr<std::byte[]> own;
  if (workspace.empty()) {
    const size_t bytes = workspace_size(args, pass, context);
    own.reset(new std::byte[bytes]);
    workspace = {own.get(), bytes};
  }
  throw_if_failed(function(context.get(), args.get(), workspace.data(), workspace.size(), stream));
}

}  // namespace detail

// out, and lse where given. Without a workspace one is allocated for the call. Throws Error; then nothing was written.
inline void forward(const Attention& attention, const Context& context = {}, std::span<std::byte> workspace = {},
                    void* stream = nullptr) {
  detail::run(tandem_forward, TANDEM_FORWARD, attention, context, workspace, stream);
}

// The gradients that are given, from q, k, v, out, lse, dout and dlse. Otherwise as forward.
inline void backward(const Attention& attention, const Context& context = {}, std::span<std::byte> workspace = {},
                     void* stream = nullptr) {
  detail::run(tandem_backward, TANDEM_BACKWARD, attention, context, workspace, stream);
}

// Why the call would be refused, or nothing when it would be served. Ignores data pointers.
inline std::optional<Error> check(const Attention& attention, tandem_pass pass = TANDEM_FORWARD,
                                  const Context& context = {}) {
  try {
    const detail::CArgs args(attention, pass);
    throw_if_failed(tandem_check(context.get(), pass, args.get()));
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// Bytes that forward or backward need as their workspace. Ignores data pointers. Throws Error.
inline size_t workspace_size(const Attention& attention, tandem_pass pass = TANDEM_FORWARD,
                             const Context& context = {}) {
  return detail::workspace_size(detail::CArgs(attention, pass), pass, context);
}

// Compiles ahead what the call needs; nothing on the CPU. Throws Error.
inline void prepare(const Attention& attention, tandem_pass pass = TANDEM_FORWARD, const Context& context = {}) {
  const detail::CArgs args(attention, pass);
  throw_if_failed(tandem_prepare(context.get(), pass, args.get()));
}

}  // namespace tandem
