// The options of a problem that the kernels of every pass have.
#pragma once

// True in device code that is compiled for compute capability 10.3 (B300).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1030
inline constexpr bool kSm103 = true;
#else
inline constexpr bool kSm103 = false;
#endif

enum class Bias { none, boolean, f32, element };  // element: the type of q

constexpr int bytes_of(Bias bias) {
  switch (bias) {
    case Bias::none: return 0;
    case Bias::boolean: return 1;
    case Bias::f32: return 4;
    case Bias::element: return 2;
  }
  return 0;
}

// The last member of each kernel configuration. src/plan/fields.h lists these options once for all of them.
struct ScoreOptions {
  bool dropout = false;                              // dropout of probabilities
  bool block_mask = false;                           // blocks come from a list: device/block_mask.cuh
  bool f16 = false;                                  // elements are float16, else bfloat16
  bool bounded_left = false, bounded_right = false;  // bounded visibility before, after a query
  bool varlen = false;                               // lengths are read on the device
  bool scale_outside_exp2 = false;                   // scale <= 0: the largest product is not the largest score
  bool softcap = false, alibi = false;
  Bias bias = Bias::none;
  bool score_mod = false, mask_mod = false;  // printed functions: device/mod_functions.cuh
  bool placed = false;                       // dropout and ALiBi read ForwardParams::places

  // Scores are more than scaled products, a bias and a mask.
  constexpr bool changes_products() const { return scale_outside_exp2 || softcap || alibi || score_mod; }
};
