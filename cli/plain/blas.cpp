#include "cli/plain/blas.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace tandem::plain {
namespace {

template <class F>
bool find(void* library, const char* symbol, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, symbol));
  return function != nullptr;
}

}  // namespace

bool Blas::load(const char* library) {
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return false;
  if (!find(handle, "cblas_sgemm", sgemm_)) {
    ::dlclose(handle);
    return false;
  }
  const char* brand = "BLAS";
  if (find(handle, "openblas_set_num_threads", set_threads_int_)) {
    brand = "OpenBLAS";
  } else if (find(handle, "MKL_Set_Num_Threads", set_threads_int_)) {
    brand = "MKL";
  } else if (find(handle, "bli_thread_set_num_threads", set_threads_long_)) {
    brand = "BLIS";
  }
  name_ = std::string(brand) + " (" + library + ")";
  return true;
}

const Blas& Blas::best() {
  static const Blas blas = [] {
    Blas found;
    if (const char* wanted = std::getenv("TANDEM_BLAS")) {
      found.load(wanted);
      return found;
    }
    for (const char* library : {"libopenblas.so.0", "libmkl_rt.so.2", "libblis.so.4"}) {
      if (found.load(library)) break;
    }
    return found;
  }();
  return blas;
}

void Blas::set_threads(int threads) const {
  if (set_threads_int_) set_threads_int_(threads);
  if (set_threads_long_) set_threads_long_(threads);
}

void Blas::sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                 int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) const {
  if (m == 0 || n == 0) return;
  if (sgemm_) {
    constexpr int row_major = 101, no_transpose = 111, transpose = 112;
    sgemm_(row_major, transpose_a ? transpose : no_transpose, transpose_b ? transpose : no_transpose,
           static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(lda), b,
           static_cast<int>(ldb), beta, c, static_cast<int>(ldc));
    return;
  }
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * ldc;
    if (beta == 0) {
      std::memset(row, 0, static_cast<size_t>(n) * sizeof *row);
    } else {
      for (int64_t j = 0; j < n; ++j) row[j] *= beta;
    }
    for (int64_t l = 0; l < k; ++l) {
      const float factor = alpha * (transpose_a ? a[l * lda + i] : a[i * lda + l]);
      const float* from = transpose_b ? b + l : b + l * ldb;
      const int64_t step = transpose_b ? ldb : 1;
      for (int64_t j = 0; j < n; ++j) row[j] += factor * from[j * step];
    }
  }
}

}  // namespace tandem::plain
