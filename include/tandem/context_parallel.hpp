// Context parallelism for C++20: a thin layer over context_parallel.h, which defines the meaning of every field.
//
//   class Ring : public tandem::CpTransport { ... };             // the program's connection between the ranks
//   tandem::CpPlan plan({.ranks = 4, .q_lens = {1000, 24}, .causal = true});
//   auto [q_rows, k_rows] = plan.rows(ring.rank());              // the rows of this rank's tensors
//   tandem::forward({.q = q, .k = k, .v = v, .out = out, .lse = lse}, plan, ring);
#pragma once

#include <exception>
#include <utility>

#include "tandem/context_parallel.h"
#include "tandem/tandem.hpp"

namespace tandem {

enum class CpLayout : int32_t {
  balanced = TANDEM_CP_BALANCED,
  contiguous = TANDEM_CP_CONTIGUOUS,
  zigzag = TANDEM_CP_ZIGZAG,
  per_document = TANDEM_CP_PER_DOCUMENT,
  striped = TANDEM_CP_STRIPED,
};

enum class CpExecution : int32_t { gather = TANDEM_CP_GATHER, ring = TANDEM_CP_RING, heads = TANDEM_CP_HEADS };

// The document of a row and the position in it.
struct CpToken {
  int32_t document = 0;
  int64_t position = 0;
};

// Owns a plan. Move only; a moved-from plan is empty.
class CpPlan {
 public:
  struct Options {
    int32_t ranks = 1;
    CpLayout layout = CpLayout::balanced;
    int64_t chunk = 0;
    std::vector<int64_t> q_lens = {}, k_lens = {};  // k_lens empty: q_lens
    std::vector<int64_t> diagonals = {};            // with Alignment::explicit_offset
    bool causal = false;
    Alignment alignment = Alignment::bottom_right;
    std::optional<int64_t> window_left = {}, window_right = {};  // absent: unbounded
    // A block mask: block_rows empty for none, and full_blocks empty if mask_mod is evaluated in all key_blocks.
    int64_t block_q = 0, block_k = 0;
    std::vector<int64_t> block_rows = {};
    std::vector<int32_t> key_blocks = {};
    std::vector<uint8_t> full_blocks = {};
  };

  // Throws Error.
  explicit CpPlan(const Options& o) {
    if (!o.k_lens.empty() && o.k_lens.size() != o.q_lens.size()) {
      throw Error(TANDEM_INVALID_ARGUMENT, "k_lens (" + std::to_string(o.k_lens.size()) + ") must have the " +
                                               std::to_string(o.q_lens.size()) + " documents of q_lens, or be empty");
    }
    if (!o.diagonals.empty() && o.diagonals.size() != o.q_lens.size()) {
      throw Error(TANDEM_INVALID_ARGUMENT, "diagonals (" + std::to_string(o.diagonals.size()) + ") must have the " +
                                               std::to_string(o.q_lens.size()) + " documents of q_lens, or be empty");
    }
    tandem_cp_plan_args args{};
    args.size = sizeof args;
    args.ranks = o.ranks;
    args.layout = static_cast<int32_t>(o.layout);
    args.chunk = o.chunk;
    args.documents = static_cast<int64_t>(o.q_lens.size());
    args.q_lens = o.q_lens.data();
    args.k_lens = o.k_lens.empty() ? nullptr : o.k_lens.data();
    args.diagonals = o.diagonals.empty() ? nullptr : o.diagonals.data();
    args.causal = o.causal;
    args.alignment = static_cast<int32_t>(o.alignment);
    args.window = (o.window_left ? TANDEM_WINDOW_LEFT : 0) | (o.window_right ? TANDEM_WINDOW_RIGHT : 0);
    args.window_left = o.window_left.value_or(0);
    args.window_right = o.window_right.value_or(0);
    add_block_mask(o, &args);
    throw_if_failed(tandem_cp_plan_create(&args, &handle_));
  }
  CpPlan(CpPlan&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CpPlan& operator=(CpPlan&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CpPlan() { tandem_cp_plan_destroy(handle_); }

  tandem_cp_plan* get() const { return handle_; }
  uint64_t hash() const { return tandem_cp_plan_hash(handle_); }

  // The rows of a rank's queries and of its keys. Throws Error.
  std::pair<int64_t, int64_t> rows(int32_t rank) const {
    std::pair<int64_t, int64_t> rows;
    throw_if_failed(tandem_cp_plan_rows(handle_, rank, &rows.first, &rows.second));
    return rows;
  }
  // The tokens of a rank's queries or keys, in the order of the rows. Throws Error.
  std::vector<CpToken> queries(int32_t rank) const { return tokens(rank, 0); }
  std::vector<CpToken> keys(int32_t rank) const { return tokens(rank, 1); }

 private:
  static void add_block_mask(const Options& o, tandem_cp_plan_args* args) {
    args->block_q = o.block_q;
    args->block_k = o.block_k;
    if (o.block_q < 1 || o.block_rows.empty()) return;
    size_t rows = 1;
    for (const int64_t length : o.q_lens) rows += static_cast<size_t>((length + o.block_q - 1) / o.block_q);
    const auto blocks = static_cast<size_t>(o.block_rows.back());
    if (o.block_rows.size() != rows || o.key_blocks.size() != blocks ||
        (!o.full_blocks.empty() && o.full_blocks.size() != blocks)) {
      throw Error(TANDEM_INVALID_ARGUMENT, "block_rows (" + std::to_string(o.block_rows.size()) + ") must have " +
                                               std::to_string(rows) +
                                               " offsets, and end at the number of key_blocks and of full_blocks");
    }
    args->block_rows = o.block_rows.data();
    args->key_blocks = o.key_blocks.data();
    args->full_blocks = o.full_blocks.empty() ? nullptr : o.full_blocks.data();
  }

  std::vector<CpToken> tokens(int32_t rank, int32_t keys) const {
    const auto [q_rows, k_rows] = rows(rank);
    const auto count = static_cast<size_t>(keys != 0 ? k_rows : q_rows);
    std::vector<int32_t> documents(count);
    std::vector<int64_t> positions(count);
    throw_if_failed(tandem_cp_plan_tokens(handle_, rank, keys, documents.data(), positions.data()));
    std::vector<CpToken> result(count);
    for (size_t n = 0; n < count; ++n) result[n] = {documents[n], positions[n]};
    return result;
  }

  tandem_cp_plan* handle_ = nullptr;
};

// The program's connection between the ranks: see tandem_cp_transport. A function may throw. The call then throws the
// same exception.
class CpTransport {
 public:
  CpTransport(int32_t rank, int32_t ranks) {
    transport_ = {sizeof transport_, rank, ranks, this, start_exchange, finish_exchange, gather, nullptr, nullptr};
  }
  CpTransport(const CpTransport&) = delete;
  CpTransport& operator=(const CpTransport&) = delete;
  virtual ~CpTransport() = default;

  int32_t rank() const { return transport_.rank; }
  int32_t ranks() const { return transport_.ranks; }
  const tandem_cp_transport* get() const { return &transport_; }

  // Starts to send and to receive, and returns a handle for wait().
  virtual void* exchange(std::span<const tandem_cp_message> sends, std::span<const tandem_cp_message> receives) = 0;
  virtual void wait(void* request) = 0;
  // received: as many parts of send.size() bytes as ranks.
  virtual void all_gather(std::span<const std::byte> send, std::span<std::byte> received) = 0;

  // Throws the exception of a function, else the library's Error.
  void throw_if_call_failed(tandem_status status) {
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    if (status != TANDEM_OK && failure) std::rethrow_exception(failure);
    throw_if_failed(status);
  }

 private:
  template <class Function>
  static int32_t guarded(void* self, Function&& function) noexcept {
    auto& transport = *static_cast<CpTransport*>(self);
    try {
      function(transport);
      return 0;
    } catch (...) {
      transport.failure_ = std::current_exception();
      return 1;
    }
  }
  static int32_t start_exchange(void* self, const tandem_cp_message* sends, int64_t send_count,
                                const tandem_cp_message* receives, int64_t receive_count, void** request) {
    return guarded(self, [&](CpTransport& t) {
      *request = t.exchange({sends, static_cast<size_t>(send_count)}, {receives, static_cast<size_t>(receive_count)});
    });
  }
  static int32_t finish_exchange(void* self, void* request) {
    return guarded(self, [&](CpTransport& t) { t.wait(request); });
  }
  static int32_t gather(void* self, const void* send, void* received, int64_t bytes) {
    return guarded(self, [&](CpTransport& t) {
      const auto size = static_cast<size_t>(bytes);
      t.all_gather({static_cast<const std::byte*>(send), size},
                   {static_cast<std::byte*>(received), size * static_cast<size_t>(t.ranks())});
    });
  }

  tandem_cp_transport transport_{};
  std::exception_ptr failure_;
};

// The transport over NCCL for a context of a GPU. comm: the program's ncclComm_t. Attention runs on `stream`. Throws
// Error. The communicator and the context must outlive the transport.
class CpNccl {
 public:
  CpNccl(const Context& context, void* comm, void* stream) {
    throw_if_failed(tandem_cp_nccl_open(context.get(), comm, stream, &transport_));
  }
  CpNccl(const CpNccl&) = delete;
  CpNccl& operator=(const CpNccl&) = delete;
  ~CpNccl() { (void)tandem_cp_nccl_close(&transport_); }

  const tandem_cp_transport* get() const { return &transport_; }
  void throw_if_call_failed(tandem_status status) { throw_if_failed(status); }

 private:
  tandem_cp_transport transport_{};
};

namespace detail {

using CpFunction = tandem_status (*)(tandem_context*, const tandem_cp_args*);

template <class Transport>
void run_cp(CpFunction function, tandem_pass pass, const Attention& attention, CpPlan& plan, Transport& transport,
            CpExecution execution, const Context& context) {
  const CArgs tensors(attention, pass);
  const tandem_cp_args args{sizeof args, plan.get(),   transport.get(), static_cast<int32_t>(execution),
                            0,           tensors.get()};
  transport.throw_if_call_failed(function(context.get(), &args));
}

}  // namespace detail

// Writes this rank's rows of out, and of lse if present. All ranks call at the same time. Throws Error, or the
// transport's exception. Transport: CpTransport or CpNccl.
template <class Transport>
void forward(const Attention& attention, CpPlan& plan, Transport& transport,
             CpExecution execution = CpExecution::gather, const Context& context = {}) {
  detail::run_cp(tandem_cp_forward, TANDEM_FORWARD, attention, plan, transport, execution, context);
}

// Writes this rank's rows of the gradients that are present, and the whole gradients of the sink and of score_mod's
// tensors. See forward for the arguments.
template <class Transport>
void backward(const Attention& attention, CpPlan& plan, Transport& transport,
              CpExecution execution = CpExecution::gather, const Context& context = {}) {
  detail::run_cp(tandem_cp_backward, TANDEM_BACKWARD, attention, plan, transport, execution, context);
}

}  // namespace tandem
