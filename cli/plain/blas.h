// The machine's BLAS, found at run time so that no build needs it: OpenBLAS, MKL or BLIS, else a simple loop.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::plain {

class Blas {
 public:
  // Returns the first of the three that can be loaded. TANDEM_BLAS, if set, names a shared library and is the only
  // candidate.
  static const Blas& best();

  const std::string& name() const { return name_; }  // "OpenBLAS (libopenblas.so.0)" or "none: a simple loop"
  bool found() const { return sgemm_ != nullptr; }

  // Row-major c (m x n) = alpha op(a) op(b) + beta c, where op(a) is m x k; lda, ldb, ldc are row lengths in memory.
  void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
             int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) const;

  // Sets the number of threads that one product may use.
  void set_threads(int threads) const;

 private:
  using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
                         int lda, const float* b, int ldb, float beta, float* c, int ldc);
  bool load(const char* library);

  std::string name_ = "none: a simple loop";
  Sgemm sgemm_ = nullptr;
  void (*set_threads_int_)(int) = nullptr;
  void (*set_threads_long_)(int64_t) = nullptr;  // BLIS
};

}  // namespace tandem::plain
