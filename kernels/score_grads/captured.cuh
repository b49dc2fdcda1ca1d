// Gradients of the tensors that a score_mod reads. An element's gradient sums P (dP - delta) times the score's
// derivative by this element, over all scores that read the element. A separate kernel (score_grads/score_tile.cuh)
// computes scores in shared memory, for a block of keys and 64 queries at a time. A block's threads traverse these
// scores along lines.
//
// The element that a score reads is known only on the device, so that a sum has several writers. Sums are exact
// (config/mods.h), so that their order does not matter. While neighbours on a line read the same element, a thread adds
// at most 128 numbers in float32, then a warp does. If all scores of a tile read the same element, the threads that
// compute them sum it directly. postprocess_captured() rounds the sums and stores them.
//
// Most tiles read one element of each tensor, because positions are clamped or a head has one element. The main kernel,
// which has their dS, adds these sums (T.captured_per_tile): captured_sums.cuh.
#pragma once
#include "device/pack.cuh"
#include "ptx/global.cuh"
#include "score_grads/captured_sums.cuh"
#include "score_grads/score_tile.cuh"

// The number of queries in shared memory at once.
constexpr int kCapturedRows = 64;

// One more column than keys, so that threads on lines of any direction use different banks.
template <int keys>
struct CapturedScores {
  float mod_input[kCapturedRows][keys + 1], ds[kCapturedRows][keys + 1];  // ScoreGradient's members

  TANDEM_DEVICE void put(int row, int key, const ScoreGradient& score) {
    mod_input[row][key] = score.mod_input;
    ds[row][key] = score.ds;
  }
};

// ---- Exact sums ----

// The sum of a cell. The digits of a negative sum are negated, so that all have one sign. The float64 sum of the digits
// is then wrong only in its last bits.
TANDEM_DEVICE double exact_sum(const CapturedParams& p, i64 cell) {
  const u64 flags = p.words[kDigits * p.cells + cell];
  if (flags == kSumPlus || flags == kSumMinus) return flags == kSumPlus ? kInfinity : -kInfinity;
  if (flags != 0) return __uint_as_float(0x7fffffff);
  i64 over = 0;  // the highest digit
#pragma unroll 1
  for (int n = 0; n < kDigits; ++n) over = (over + static_cast<i64>(p.words[n * p.cells + cell])) >> kDigitBits;
  const bool negative = over < 0;
  double sum = 0, unit = __longlong_as_double(static_cast<i64>(1023 - 149) << 52);
  over = 0;
#pragma unroll 1
  for (int n = 0; n < kDigits; ++n) {
    const auto word = static_cast<i64>(p.words[n * p.cells + cell]);
    over += negative ? -word : word;
    sum += static_cast<double>(over & ((1 << kDigitBits) - 1)) * unit;
    over >>= kDigitBits;
    unit *= 1 << kDigitBits;
  }
  sum += static_cast<double>(over) * unit;
  return negative ? -sum : sum;
}

// Adds numbers to one cell after another.
struct CellSum {
  i64 cell = -1;  // no cell
  float sum = 0;

  TANDEM_DEVICE void add(const CapturedParams& p, i64 to, float x) {
    if (to != cell) {
      store(p);
      cell = to;
      sum = 0;
    }
    sum += x;
  }
  TANDEM_DEVICE void store(const CapturedParams& p) const {
    if (cell >= 0) add_exactly(p, cell, sum);
  }
  // Adds the numbers of a warp: one addition if all lanes have the same cell. All lanes must call this function.
  TANDEM_DEVICE void store_together(const CapturedParams& p) const {
    const u32 some = __ballot_sync(~0u, cell >= 0);
    if (some == 0) return;
    const i64 first = __shfl_sync(~0u, cell, __ffs(some) - 1);
    if (!__all_sync(~0u, cell < 0 || cell == first)) return store(p);
    const float all = sum_over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) add_exactly(p, first, all);
  }
};

// ---- Lines ----

// Receives the derivatives that score_captures() passes for one score.
template <int count>
struct Captures {
  const CapturedParams& p;
  CellSum (&sums)[count];
  float ds;

  template <int n, int tensor>
  TANDEM_DEVICE void add(float derivative, i64 element) const {
    const i64 first = p.tensors[tensor].first;
    const float x = ds * derivative;
    if (first >= 0 && x != 0) sums[n].add(p, first + element, x);
  }
};

// Traverses the scores in shared memory with all threads, each along a part of a line. at: the first query and key.
template <auto T, CaptureLine line, int keys>
TANDEM_DEVICE void walk(const ModifiedBackwardParams& p, const CapturedScores<keys>& scores, ModPlace at) {
  constexpr int kCount = captures_along<T>(line);
  if constexpr (kCount > 0) {
    constexpr int kLines = line == CaptureLine::row ? kCapturedRows : keys;
    const int piece = kCapturedRows * keys / blockDim.x;
    const int index = threadIdx.x % kLines, begin = threadIdx.x / kLines * piece;
    const int first_query = at.q, first_key = at.k;
    CellSum sums[kCount];
#pragma unroll 1
    for (int i = begin; i < begin + piece; ++i) {
      const int row = line == CaptureLine::row ? index : i;
      const int key = line == CaptureLine::row ? i : line == CaptureLine::column ? index : (index + i) % keys;
      const float ds = scores.ds[row][key];
      if (ds == 0) continue;  // the derivative may be inf or NaN
      at.q = first_query + row;
      at.k = first_key + key;
      score_captures<T, line>(scores.mod_input[row][key], at, p.mods.score, Captures<kCount>{p.captured, sums, ds});
    }
    __syncwarp();
#pragma unroll
    for (const CellSum& sum : sums) sum.store_together(p.captured);
  }
}
template <auto T>
constexpr bool walks() {
  return captures_along<T>(CaptureLine::row) + captures_along<T>(CaptureLine::column) +
             captures_along<T>(CaptureLine::diagonal) >
         0;
}
template <auto T, int keys>
TANDEM_DEVICE void walk_all(const ModifiedBackwardParams& p, const CapturedScores<keys>& scores, const ModPlace& at) {
  if constexpr (!walks<T>()) return;
  __syncthreads();  // all scores are in shared memory
  walk<T, CaptureLine::row>(p, scores, at);
  walk<T, CaptureLine::column>(p, scores, at);
  walk<T, CaptureLine::diagonal>(p, scores, at);
}

// ---- Tiles ----

// Returns true if the tile is visible and the main kernel has not added it.
template <auto T, int keys>
TANDEM_DEVICE bool is_walked(const BackwardParams& p, const ScoreTileAt& at) {
  if (!sees_some<T, keys>(p, at)) return false;
  if constexpr (T.captured_per_tile) {
    const auto& modified = static_cast<const ModifiedBackwardParams&>(p);
    return !tile_captures<T>(range_place_of<T, keys>(at.sequence, at.head, at.m_block, at.key_block),
                             modified.mods.score, NoCaptures{});
  }
  return true;
}

// The tiles of a CTA, which has one block of keys of a head. Each lane of a warp examines one m_block.
template <auto T, int keys>
struct CapturedTiles {
  const BackwardParams& p;
  ScoreTileAt at;
  bool any = true;  // a current tile exists

  TANDEM_DEVICE explicit CapturedTiles(const BackwardParams& params) : p(params) {
    const int key_blocks = p.n_blocks * (T.tile_n() / keys), head = blockIdx.x / key_blocks;
    at = {sequence_coords<T>(p, head / p.heads_q), head % p.heads_q, 0, static_cast<int>(blockIdx.x) % key_blocks};
    advance();
  }
  TANDEM_DEVICE void advance() {
#pragma unroll 1
    while (warp_any(left_ == 0)) {
      if (warp_any(next_ >= p.sequence_m_blocks)) {
        any = false;
        return;
      }
      at.m_block = next_ + static_cast<int>(threadIdx.x % 32);
      left_ = __ballot_sync(~0u, at.m_block < p.sequence_m_blocks && is_walked<T, keys>(p, at));
      next_ += 32;
    }
    at.m_block = warp_uniform(next_ - 32 + __ffs(left_) - 1);
    left_ &= left_ - 1;
  }

 private:
  u32 left_ = 0;  // bits of the 32 m_blocks before next_
  int next_ = 0;
};

// ---- Gradients ----

// Rounds to odd: truncates to float32 and sets the last bit if the result is inexact. The later rounding to 16 bits
// then rounds correctly, because no tie appears.
TANDEM_DEVICE float odd_float(double x) {
  const float cut = __double2float_rz(x);
  return cut == x || x != x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
}

template <ModElement element>
TANDEM_DEVICE void store_captured(void* to, i64 at, double x, bool accumulate) {
  if constexpr (element == ModElement::f64) {
    auto* const place = static_cast<double*>(to) + at;
    *place = accumulate ? *place + x : x;
  } else if constexpr (element == ModElement::f32) {
    auto* const place = static_cast<float*>(to) + at;
    *place = static_cast<float>(accumulate ? *place + x : x);
  } else {
    constexpr bool f16 = element == ModElement::f16;
    auto* const place = static_cast<u16*>(to) + at;
    *place = static_cast<u16>(pack_as<f16>(odd_float(accumulate ? to_float<f16>(*place) + x : x), 0));
  }
}

// Each thread stores one cell.
template <auto T>
TANDEM_DEVICE void postprocess_captured(const ModifiedBackwardParams& p) {
  grid_dependency_wait();
  const i64 cell = static_cast<i64>(blockIdx.x) * kPostprocessCapturedThreads + threadIdx.x;
#pragma unroll 1
  for (int n = 0; n < kModTensors; ++n) {
    const CapturedTensor& to = p.captured.tensors[n];
    const i64 rest = cell - to.first;
    if (to.first < 0 || rest < 0 || rest >= to.count) continue;
    const i64 at = captured_element_at(p.mods.score.tensors[n], to, rest);
    const double x = exact_sum(p.captured, cell);
    switch (to.element) {
      case ModElement::f64: return store_captured<ModElement::f64>(to.gradient, at, x, p.accumulate);
      case ModElement::f32: return store_captured<ModElement::f32>(to.gradient, at, x, p.accumulate);
      case ModElement::bf16: return store_captured<ModElement::bf16>(to.gradient, at, x, p.accumulate);
      default: return store_captured<ModElement::f16>(to.gradient, at, x, p.accumulate);
    }
  }
}
