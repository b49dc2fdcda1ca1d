// Tandem for C++20: a thin layer over tandem.h that owns resources and throws tandem::Error. tandem.h defines the
// meaning, the shape and the rules of every field.
//
//   std::vector<float> x(2 * 128 * 8 * 64), y(x.size());
//   tandem::Tensor q(x, {2, 128, 8, 64});                 // (batch, seqlen, heads, head_dim)
//   tandem::Tensor out(y, {2, 128, 8, 64});
//   tandem::Attention a{.q = q, .k = q, .v = q, .out = out, .causal = true};
//   tandem::forward(a);
//
// On a GPU a tensor names its device, and a Workspace owns the scratch memory:
//
//   tandem::Context gpu({.device = "cuda:0"});
//   tandem::Workspace workspace(allocate, release);       // cudaMalloc and cudaFree, or the functions of a memory pool
//   tandem::Tensor q = tandem::Tensor(tandem::bfloat16, pointer, {2, 128, 8, 64}).on(tandem::cuda(0));
//   tandem::forward({.q = q, .k = q, .v = q, .out = out}, gpu, workspace, stream);
#pragma once

#if __cplusplus <= 201703L
#error "tandem.hpp must be compiled as C++20: pass -std=c++20, or set CMAKE_CXX_STANDARD to 20"
#endif

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tandem/tandem.h"

namespace tandem {

// A refused or failed call: what() is the error message, code() the tandem_status.
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
inline constexpr tandem_dtype int32{TANDEM_INT, 32, 1}, int64{TANDEM_INT, 64, 1}, boolean{TANDEM_BOOL, 8, 1};

constexpr tandem_device host() { return {TANDEM_CPU, 0}; }
constexpr tandem_device cuda(int32_t index = 0) { return {TANDEM_CUDA, index}; }

// The dtype of a C++ type. Specialise this variable for your own 16-bit type:
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
inline constexpr tandem_dtype dtype_of<int64_t> = int64;
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

// A view of memory with a dtype and a shape; it does not own the memory. An empty Tensor is an absent argument. Strides
// count elements; without strides the tensor is compact and row-major.
class Tensor {
 public:
  Tensor() = default;

  // From a pointer: Tensor(float*, shape). A const pointer makes a tensor that can only be an input.
  template <Element T>
  Tensor(T* data, Sizes shape, Sizes strides = {}) : Tensor(dtype_of<std::remove_const_t<T>>, data, shape, strides) {}

  // From a vector, array or span. Throws Error if the compact shape has more elements than the range.
  template <std::ranges::contiguous_range R>
    requires std::ranges::sized_range<R> && std::ranges::borrowed_range<R> &&
             Element<std::remove_reference_t<std::ranges::range_reference_t<R>>>
  Tensor(R&& range, Sizes shape) : Tensor(std::ranges::data(range), shape) {
    // Divides, because a product might overflow. The call itself checks sizes below 1.
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

  // From memory of a type without a C++ name: Tensor(tandem::bfloat16, data, shape).
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

  // Returns the same tensor with another device. The pointer must be valid there.
  Tensor on(tandem_device device) const {
    Tensor there = *this;
    there.tensor_.device = device;
    return there;
  }

  explicit operator bool() const { return present_; }
  bool read_only() const { return read_only_; }

  // The C form, or NULL if empty. The C form points into *this.
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

// Threads and device; see tandem_context. Move only. A default-constructed Context is the process default.
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
    on_host_ = !std::string_view(options.device).starts_with("cuda");
  }
  Context(Context&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)), on_host_(other.on_host_) {}
  Context& operator=(Context&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(on_host_, other.on_host_);
    return *this;
  }
  ~Context() { tandem_context_destroy(handle_); }

  tandem_context* get() const { return handle_; }
  std::string description() const { return tandem_context_description(handle_); }  // "cpu, 2 threads, avx2"
  int32_t threads() const { return tandem_context_threads(handle_); }
  // Returns true if tensors and workspaces are in host memory: on the CPU and on virtual GPUs.
  bool on_host() const { return on_host_; }

 private:
  tandem_context* handle_ = nullptr;
  bool on_host_ = true;
};

// ---- Workspace ------------------------------------------------------------------------------------------------------

// Scratch memory for calls. The memory grows on demand and is kept between calls. Only one call may use it at once, or
// the calls of one stream on a GPU. Move only; a moved-from Workspace is empty.
class Workspace {
 public:
  // Allocates bytes with malloc's alignment. Throws on failure.
  using Allocate = std::function<void*(size_t bytes)>;
  using Release = std::function<void(void* memory)>;

  // Allocates host memory.
  Workspace()
      : Workspace([](size_t bytes) { return ::operator new(bytes); }, [](void* memory) { ::operator delete(memory); }) {
  }
  // Allocates memory of the context's device. release() may run while calls still use the memory: cudaFree and
  // cuMemFree wait for these calls, and a pool must release in stream order.
  Workspace(Allocate allocate, Release release) : allocate_(std::move(allocate)), release_(std::move(release)) {}
  Workspace(Workspace&& other) noexcept
      : allocate_(std::move(other.allocate_)),
        release_(std::move(other.release_)),
        memory_(std::exchange(other.memory_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Workspace& operator=(Workspace&& other) noexcept {
    std::swap(allocate_, other.allocate_);
    std::swap(release_, other.release_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Workspace() { release(); }

  // Returns at least `bytes` bytes. If the memory has to grow, its contents are lost.
  std::span<std::byte> reserve(size_t bytes) {
    if (bytes > bytes_) {
      release();
      memory_ = allocate_(bytes);
      bytes_ = bytes;
    }
    return {static_cast<std::byte*>(memory_), bytes_};
  }
  size_t bytes() const { return bytes_; }

 private:
  void release() {
    if (memory_ != nullptr) release_(std::exchange(memory_, nullptr));
    bytes_ = 0;
  }

  Allocate allocate_;
  Release release_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

// ---- Attention ------------------------------------------------------------------------------------------------------

enum class Alignment : int32_t {
  bottom_right = TANDEM_BOTTOM_RIGHT,
  top_left = TANDEM_TOP_LEFT,
  explicit_offset = TANDEM_EXPLICIT,
};

// A score or mask modification: its expression (docs/score_mod.md), and the scalars and tensors that it names.
//
//   attention.score_mod = {.text = "score - slope[head] * abs(q - k)", .tensors = {{"slope", slope, dslope}}};
//   attention.mask_mod = {.text = "q - k < width", .scalars = {{"width", 128}}};
struct Mod {
  struct Scalar {
    Scalar(std::string scalar_name, double x) : name(std::move(scalar_name)), type(TANDEM_FLOAT), value(x) {}
    Scalar(std::string scalar_name, int32_t x) : name(std::move(scalar_name)), type(TANDEM_INT), value(x) {}
    Scalar(std::string scalar_name, bool x) : name(std::move(scalar_name)), type(TANDEM_BOOL), value(x) {}

    std::string name;
    int32_t type;
    double value;
  };
  struct Captured {
    std::string name;
    Tensor tensor;
    Tensor gradient = {};  // backward: optional
  };

  std::string text = {};  // empty: no modification
  std::vector<Scalar> scalars = {};
  std::vector<Captured> tensors = {};
};

// The arguments of one call: the fields of tandem_attention_args, in its order. A default value is absent.
struct Attention {
  Tensor q = {}, k = {}, v = {};                // (batch, seqlen, heads, head_dim) or (total, heads, head_dim)
  Tensor out = {}, lse = {};                    // lse: (batch, heads, seqlen) or (heads, total)
  Tensor dout = {}, dlse = {};                  // backward: incoming gradients
  Tensor dq = {}, dk = {}, dv = {};             // backward: outputs
  Tensor bias = {}, dbias = {};                 // (batch|1, heads|1, seqlen_q|1, seqlen_k|1)
  Tensor sink = {}, dsink = {};                 // (heads)
  Tensor alibi_slopes = {};                     // (heads) or (batch, heads)
  Tensor cu_seqlens_q = {}, cu_seqlens_k = {};  // (batch + 1)
  Tensor seqused_q = {}, seqused_k = {};        // (batch)
  Tensor page_table = {};                       // (batch, max_pages); forward only
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;

  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  double softcap = 0;        // 0: off
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  std::optional<int64_t> window_left = {}, window_right = {};  // absent: unbounded

  double dropout_p = 0;
  uint64_t dropout_seed = 0, dropout_offset = 0;
  const uint64_t* dropout_seed_ptr = nullptr;
  const uint64_t* dropout_offset_ptr = nullptr;

  int32_t num_splits = 0;
  bool deterministic = false, batch_invariant = false, validate = false;

  int64_t diagonal_offset = 0;   // with Alignment::explicit_offset
  Tensor diagonal_offsets = {};  // (batch)
  bool accumulate = false;       // backward: adds to the gradients
  int32_t sm_limit = 0;          // 0: all SMs of the GPU
  Mod score_mod = {}, mask_mod = {};
  Tensor kv_num_blocks = {}, kv_indices = {};            // (batch|1, heads|1, blocks of queries), (..., any number)
  Tensor full_kv_num_blocks = {}, full_kv_indices = {};  // like kv_*; fully visible blocks
  int64_t mask_block_q = 0, mask_block_k = 0;            // queries and keys of a block
  bool blocks_of_mask_mod = false;                       // lists are the result of make_block_mask()
  Tensor max_scores = {};                                // forward: like lse
  Tensor places = {};                                    // (batch, 9): a tandem_place for each sequence
};

namespace detail {

// The C form of a modification. The C form points into the Mod that it is built from.
class CMod {
 public:
  explicit CMod(Mod& mod) {
    for (const Mod::Scalar& scalar : mod.scalars) {
      scalars_.push_back({scalar.name.c_str(), scalar.type, 0, scalar.value});
    }
    for (Mod::Captured& captured : mod.tensors) {
      tensors_.push_back({captured.name.c_str(), captured.tensor.get(), captured.gradient.get()});
    }
    mod_ = {.size = sizeof mod_,
            .text = mod.text.c_str(),
            .scalars = scalars_.data(),
            .scalar_count = static_cast<int64_t>(scalars_.size()),
            .tensors = tensors_.data(),
            .tensor_count = static_cast<int64_t>(tensors_.size())};
    present_ = !mod.text.empty();
  }
  CMod(const CMod&) = delete;
  CMod& operator=(const CMod&) = delete;

  const tandem_mod* get() const { return present_ ? &mod_ : nullptr; }

 private:
  std::vector<tandem_mod_scalar> scalars_;
  std::vector<tandem_mod_tensor> tensors_;
  tandem_mod mod_{};
  bool present_ = false;
};

// The C form of a call; it points into its own copy of the tensors.
class CArgs {
 public:
  CArgs(const Attention& attention, tandem_pass pass)
      : a_(attention), score_mod_(a_.score_mod), mask_mod_(a_.mask_mod) {
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
    args_.diagonal_offset = a_.diagonal_offset;
    args_.diagonal_offsets = a_.diagonal_offsets.get();
    args_.accumulate = a_.accumulate;
    args_.sm_limit = a_.sm_limit;
    args_.score_mod = score_mod_.get();
    args_.mask_mod = mask_mod_.get();
    args_.kv_num_blocks = a_.kv_num_blocks.get();
    args_.kv_indices = a_.kv_indices.get();
    args_.full_kv_num_blocks = a_.full_kv_num_blocks.get();
    args_.full_kv_indices = a_.full_kv_indices.get();
    args_.mask_block_q = a_.mask_block_q;
    args_.mask_block_k = a_.mask_block_k;
    args_.blocks_of_mask_mod = a_.blocks_of_mask_mod;
    args_.max_scores = a_.max_scores.get();
    args_.places = a_.places.get();
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
      refuse(a_.max_scores, "max_scores");
    } else {
      refuse(a_.dq, "dq");
      refuse(a_.dk, "dk");
      refuse(a_.dv, "dv");
      refuse(a_.dbias, "dbias");
      refuse(a_.dsink, "dsink");
      for (const Mod::Captured& captured : a_.score_mod.tensors) refuse(captured.gradient, captured.name.c_str());
    }
  }

  Attention a_;
  CMod score_mod_, mask_mod_;  // point into a_
  tandem_attention_args args_{};
};

inline size_t workspace_size(const CArgs& args, tandem_pass pass, const Context& context) {
  size_t bytes = 0;
  throw_if_failed(tandem_workspace_size(context.get(), pass, args.get(), &bytes));
  return bytes;
}

using Function = tandem_status (*)(tandem_context*, const tandem_attention_args*, void*, size_t, void*);

inline void run(Function function, tandem_pass pass, const Attention& attention, const Context& context,
                Workspace& workspace, void* stream) {
  const CArgs args(attention, pass);
  const std::span<std::byte> memory = workspace.reserve(workspace_size(args, pass, context));
  throw_if_failed(function(context.get(), args.get(), memory.data(), memory.size(), stream));
}

inline void run(Function function, tandem_pass pass, const Attention& attention, const Context& context,
                std::span<std::byte> workspace, void* stream) {
  if (workspace.empty() && context.on_host()) {
    Workspace own;
    return run(function, pass, attention, context, own, stream);
  }
  const CArgs args(attention, pass);
  throw_if_failed(function(context.get(), args.get(), workspace.data(), workspace.size(), stream));
}

}  // namespace detail

// Writes out, and lse if present. workspace: memory of the context's device. Without a workspace, a call in host memory
// allocates memory, and a GPU refuses a call that needs a workspace. stream: see tandem.h. Throws Error before anything
// is written.
inline void forward(const Attention& attention, const Context& context = {}, std::span<std::byte> workspace = {},
                    void* stream = nullptr) {
  detail::run(tandem_forward, TANDEM_FORWARD, attention, context, workspace, stream);
}
inline void forward(const Attention& attention, const Context& context, Workspace& workspace, void* stream = nullptr) {
  detail::run(tandem_forward, TANDEM_FORWARD, attention, context, workspace, stream);
}

// Writes the gradients that are present. Reads q, k, v, out, lse, dout and dlse. See forward for the arguments.
inline void backward(const Attention& attention, const Context& context = {}, std::span<std::byte> workspace = {},
                     void* stream = nullptr) {
  detail::run(tandem_backward, TANDEM_BACKWARD, attention, context, workspace, stream);
}
inline void backward(const Attention& attention, const Context& context, Workspace& workspace, void* stream = nullptr) {
  detail::run(tandem_backward, TANDEM_BACKWARD, attention, context, workspace, stream);
}

// Attention over a part of the keys.
struct Part {
  Tensor out = {}, lse = {};
};

// Merges parts into out, and lse if present: see tandem_merge. result may be one of the parts. Throws Error.
inline void merge(std::vector<Part> parts, Part result, const Context& context = {}, void* stream = nullptr) {
  std::vector<const tandem_tensor*> outs, lses;
  for (Part& part : parts) {
    outs.push_back(part.out.get());
    lses.push_back(part.lse.get());
  }
  tandem_merge_args args{};
  args.size = sizeof args;
  args.parts = static_cast<int64_t>(parts.size());
  args.part_out = outs.data();
  args.part_lse = lses.data();
  args.out = result.out.get();
  args.lse = result.lse.get();
  for (const Tensor* tensor : {&result.out, &result.lse}) {
    if (*tensor && tensor->read_only()) {
      throw Error(TANDEM_INVALID_ARGUMENT,
                  "result (read only) must be writable: make it from memory that is not const");
    }
  }
  throw_if_failed(tandem_merge(context.get(), &args, stream));
}

// The arguments of make_block_mask: tandem_block_mask_args has their shapes.
struct BlockMask {
  Mod mask_mod = {};
  int64_t batch = 1, heads = 1;  // sizes of the lists
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t mask_block_q = 128, mask_block_k = 128;
  Tensor kv_num_blocks = {}, kv_indices = {}, full_kv_num_blocks = {}, full_kv_indices = {};
  Tensor q_num_blocks = {}, q_indices = {}, full_q_num_blocks = {}, full_q_indices = {};
};

// Fills the lists: see tandem_make_block_mask. See forward for workspace and stream. Throws Error.
inline void make_block_mask(BlockMask blocks, const Context& context = {}, std::span<std::byte> workspace = {},
                            void* stream = nullptr) {
  for (const Tensor* tensor :
       {&blocks.kv_num_blocks, &blocks.kv_indices, &blocks.full_kv_num_blocks, &blocks.full_kv_indices,
        &blocks.q_num_blocks, &blocks.q_indices, &blocks.full_q_num_blocks, &blocks.full_q_indices}) {
    if (*tensor && tensor->read_only()) {
      throw Error(TANDEM_INVALID_ARGUMENT,
                  "lists (read only) must be writable: make them from memory that is not const");
    }
  }
  const detail::CMod mask_mod(blocks.mask_mod);
  const tandem_block_mask_args args{.size = sizeof args,
                                    .mask_mod = mask_mod.get(),
                                    .batch = blocks.batch,
                                    .heads = blocks.heads,
                                    .seqlen_q = blocks.seqlen_q,
                                    .seqlen_k = blocks.seqlen_k,
                                    .mask_block_q = blocks.mask_block_q,
                                    .mask_block_k = blocks.mask_block_k,
                                    .kv_num_blocks = blocks.kv_num_blocks.get(),
                                    .kv_indices = blocks.kv_indices.get(),
                                    .full_kv_num_blocks = blocks.full_kv_num_blocks.get(),
                                    .full_kv_indices = blocks.full_kv_indices.get(),
                                    .q_num_blocks = blocks.q_num_blocks.get(),
                                    .q_indices = blocks.q_indices.get(),
                                    .full_q_num_blocks = blocks.full_q_num_blocks.get(),
                                    .full_q_indices = blocks.full_q_indices.get()};
  Workspace own;
  if (workspace.empty() && context.on_host() && blocks.kv_indices) {
    // One byte for each index that fits into kv_indices.
    size_t bytes = 1;
    for (int i = 0; i < args.kv_indices->ndim; ++i) bytes *= static_cast<size_t>(args.kv_indices->shape[i]);
    workspace = own.reserve(bytes);
  }
  throw_if_failed(tandem_make_block_mask(context.get(), &args, workspace.data(), workspace.size(), stream));
}

// Returns the error of the call, or nothing if it would be served. Ignores data pointers.
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

// The number of bytes of workspace that forward or backward need. Ignores data pointers. Throws Error.
inline size_t workspace_size(const Attention& attention, tandem_pass pass = TANDEM_FORWARD,
                             const Context& context = {}) {
  return detail::workspace_size(detail::CArgs(attention, pass), pass, context);
}

// Compiles the kernels of the call in advance. Does nothing on the CPU. Throws Error.
inline void prepare(const Attention& attention, tandem_pass pass = TANDEM_FORWARD, const Context& context = {}) {
  const detail::CArgs args(attention, pass);
  throw_if_failed(tandem_prepare(context.get(), pass, args.get()));
}

}  // namespace tandem
