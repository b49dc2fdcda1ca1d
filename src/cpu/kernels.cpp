// One target's table of kernels. src/CMakeLists.txt compiles it once per instruction set. TANDEM_TARGET is the set's
// name.
#include "cpu/kernels.h"

#include "cpu/backward.h"
#include "cpu/decode.h"
#include "cpu/row_terms.h"

#define TANDEM_TEXT_(x) #x
#define TANDEM_TEXT(x) TANDEM_TEXT_(x)

namespace tandem::cpu {
namespace TANDEM_TARGET {

namespace {

#if TANDEM_HAS_BF16_DOT
using MmaOfBF16 = MmaBF16;
#else
using MmaOfBF16 = MmaF32;
#endif

// Calls f with the kernels of a dtype. The degree of exp2's polynomial keeps its error below the rounding of P in that
// type (docs/numerics.md).
template <class Type, class Product, int Degree>
struct TargetKernels {
  using T = Type;
  using Mma = Product;
  static constexpr int kDegree = Degree;
  using Tiles = Forward<Mma, T, Degree>;
  using Stream = Decode<T, Degree>;
  using Gradients = Backward<Mma, T, Degree>;
  using GradientRows = BackwardRows<Mma, T, Degree>;
};

template <class F>
auto by_dtype(DType dtype, F&& f) {
  if (dtype == DType::bf16) return f(TargetKernels<BF16, MmaOfBF16, 3>());
  if (dtype == DType::f16) return f(TargetKernels<F16, MmaF32, 4>());
  return f(TargetKernels<float, MmaF32, 6>());
}

size_t forward_scratch(const Problem& p, int64_t rows) {
  return by_dtype(p.dtype, [&](auto e) { return decltype(e)::Tiles::scratch(p, rows); });
}
void forward(const Piece& piece, const Partial* partial, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::Tiles::run(piece, partial, s); });
}
size_t decode_scratch(const Problem& p, int64_t rows) {
  return by_dtype(p.dtype, [&](auto e) { return decltype(e)::Stream::scratch(p, rows); });
}
void decode(const Piece& piece, const Partial* partial, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::Stream::run(piece, partial, s); });
}
void combine_parts(const Piece& piece, const float* parts, int64_t count, int64_t stride, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) {
    combine<typename decltype(e)::Mma, typename decltype(e)::T>(piece, parts, count, stride, s);
  });
}
void row_terms(const Piece& piece, RowTermsView terms, BlockFilter blocks, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::GradientRows::run(piece, terms, blocks, s); });
}
size_t backward_scratch(const Problem& p) {
  return by_dtype(p.dtype, [&](auto e) { return decltype(e)::Gradients::scratch(p); });
}
void backward_keys(const Piece& piece, bool want_dkv, bool want_dq, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::Gradients::keys(piece, want_dkv, want_dq, s); });
}
bool backward_tile(const Piece& piece, RowTermsView terms, bool want_dkv, bool want_dq, double* captured, void* s) {
  return by_dtype(piece.problem->dtype,
                  [&](auto e) { return decltype(e)::Gradients::tile(piece, terms, want_dkv, want_dq, captured, s); });
}
void backward_add_dq(const Piece& piece, RowAccumulator dq, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::Gradients::add_dq(piece, dq, s); });
}
void backward_store_dkv(const Piece& piece, void* s) {
  by_dtype(piece.problem->dtype, [&](auto e) { decltype(e)::Gradients::store_dkv(piece, s); });
}
void backward_add_dbias(const Piece& piece, double* sum, int64_t query_stride, int64_t key_stride, void* s) {
  by_dtype(piece.problem->dtype,
           [&](auto e) { decltype(e)::Gradients::add_dbias(piece, sum, query_stride, key_stride, s); });
}
void exp2_as(DType dtype, const float* src, int64_t n, float* dst) {
  by_dtype(dtype, [&](auto e) {
    float block[kLanes] = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const auto bytes = static_cast<size_t>(minimum(kLanes, n - i)) * sizeof(float);
      std::memcpy(block, src + i, bytes);
      store(exp2<decltype(e)::kDegree>(load(block)), block);
      std::memcpy(dst + i, block, bytes);
    }
  });
}
void load_row_as(DType dtype, const void* src, int64_t n, float* dst) {
  by_dtype(dtype, [&](auto e) {
    const auto* from = static_cast<const typename decltype(e)::T*>(src);
    const int64_t whole = n / kLanes * kLanes;
    float tail[kLanes];
    load_row(from, whole, whole, dst);
    load_row(from + whole, n - whole, kLanes, tail);
    std::memcpy(dst + whole, tail, static_cast<size_t>(n - whole) * sizeof(float));
  });
}
// Calls put(from, n, to) for a row whose source need not be padded. Whole vectors are read in place, the rest through a
// buffer.
template <class Put>
void put_row_as(DType dtype, const float* src, int64_t n, void* dst, Put&& put) {
  const int64_t whole = n / kLanes * kLanes;
  float tail[kLanes] = {};
  std::memcpy(tail, src + whole, static_cast<size_t>(n - whole) * sizeof(float));
  by_dtype(dtype, [&](auto e) {
    auto* to = static_cast<typename decltype(e)::T*>(dst);
    put(src, whole, to);
    put(tail, n - whole, to + whole);
  });
}
void store_row_as(DType dtype, const float* src, int64_t n, void* dst) {
  put_row_as(dtype, src, n, dst, [](const float* from, int64_t m, auto* to) { store_row(from, m, 1.0f, to); });
}
void add_row_as(DType dtype, const float* src, int64_t n, void* dst) {
  put_row_as(dtype, src, n, dst, [](const float* from, int64_t m, auto* to) { add_row(from, m, 1.0f, to); });
}

}  // namespace
}  // namespace TANDEM_TARGET

#define TANDEM_TABLE_(target) kernels_##target
#define TANDEM_TABLE(target) TANDEM_TABLE_(target)

extern const Kernels TANDEM_TABLE(TANDEM_TARGET);
const Kernels TANDEM_TABLE(TANDEM_TARGET) = {
    .name = TANDEM_TEXT(TANDEM_TARGET),
    .bf16_dot = TANDEM_HAS_BF16_DOT != 0,
    .panel = TANDEM_TARGET::kPanel,
    .key_tile = TANDEM_TARGET::kForwardKeys,
    .forward_scratch = TANDEM_TARGET::forward_scratch,
    .forward = TANDEM_TARGET::forward,
    .decode_scratch = TANDEM_TARGET::decode_scratch,
    .decode = TANDEM_TARGET::decode,
    .combine = TANDEM_TARGET::combine_parts,
    .row_terms = TANDEM_TARGET::row_terms,
    .backward_scratch = TANDEM_TARGET::backward_scratch,
    .backward_keys = TANDEM_TARGET::backward_keys,
    .backward_tile = TANDEM_TARGET::backward_tile,
    .backward_add_dq = TANDEM_TARGET::backward_add_dq,
    .backward_store_dkv = TANDEM_TARGET::backward_store_dkv,
    .backward_add_dbias = TANDEM_TARGET::backward_add_dbias,
    .exp2 = TANDEM_TARGET::exp2_as,
    .load_row = TANDEM_TARGET::load_row_as,
    .store_row = TANDEM_TARGET::store_row_as,
    .add_row = TANDEM_TARGET::add_row_as,
};

}  // namespace tandem::cpu
