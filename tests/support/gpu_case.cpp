// Random cases for GPUs.
#include <algorithm>

#include "support/case.h"
#include "support/random.h"

namespace tandem::test {
namespace {

// Half of the lengths are near the edges of tiles.
int64_t random_length(Random& r) {
  static constexpr int64_t kEdges[] = {64, 80, 96, 112, 128, 160, 176, 192, 256, 320, 384};
  switch (r.between(0, 19)) {
    case 0: return r.between(0, 1);
    case 1:
    case 2: return r.between(1, 16);
    case 3:
    case 4:
    case 5: return r.between(100, 700);
    case 6: return r.between(500, 2000);
    case 7:
    case 8:
    case 9:
    case 10:
    case 11: return r.between(1, 200);
    default: {
      const int64_t edge = kEdges[r.between(0, 10)];  // + may evaluate its operands in any order
      return edge + r.between(-1, 1);
    }
  }
}

int64_t random_dim(Random& r) {
  static constexpr int64_t kUsual[] = {64, 64, 128, 128, 80, 96, 192, 256};
  return r.chance(0.75) ? kUsual[r.between(0, 7)] : 8 * r.between(1, 32);
}

void random_heads(Random& r, Case& c) {
  static constexpr int64_t kGroups[] = {1, 1, 1, 2, 2, 3, 4, 4, 5, 8, 16};
  c.heads_k = r.chance(0.02) ? 0 : r.between(1, 3);
  c.heads_q = c.heads_k * kGroups[r.between(0, 10)];
  c.head_dim = c.head_dim_v = random_dim(r);
  if (!r.chance(0.35)) return;
  static constexpr int64_t kPairs[][2] = {{192, 128}, {64, 128}, {128, 64}};
  const int64_t pair = r.between(0, 5);
  c.head_dim = pair < 3 ? kPairs[pair][0] : random_dim(r);
  c.head_dim_v = pair < 3 ? kPairs[pair][1] : random_dim(r);
}

// The reference takes about 14 ns per unit.
int64_t work(const Case& c) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < c.sequences(); ++b) pairs += c.length_q(b) * c.length_k(b);
  return pairs * c.heads_q * (c.head_dim + c.head_dim_v);
}

void random_lengths(Random& r, Case& c) {
  c.batch = r.chance(0.02) ? 0 : r.between(1, 3);
  c.seqlen_q = r.chance(0.1) ? r.between(1, 8) : random_length(r);
  c.seqlen_k = r.chance(0.5) ? c.seqlen_q : random_length(r);
  if (!c.packed) return;
  for (int64_t b = r.between(1, 6); b > 0; --b) {
    c.lengths_q.push_back(r.chance(0.1) ? r.between(1, 8) : random_length(r));
    c.lengths_k.push_back(r.chance(0.5) ? c.lengths_q.back() : random_length(r));
  }
  c.batch = 1;
  c.seqlen_q = c.seqlen_k = 0;
  c.max_seqlen = r.chance(0.5) ? 0 : r.between(1, 300);
}

// Removes sequences, heads or keys until the reference takes about a second.
void limit_work(Random& r, Case& c) {
  const int64_t limit = r.chance(0.05) ? 500'000'000 : 150'000'000;
  while (work(c) > limit) {
    if (c.sequences() > 1 && c.packed) {
      c.lengths_q.pop_back();
      c.lengths_k.pop_back();
    } else if (c.sequences() > 1) {
      --c.batch;
    } else if (c.heads_k > 1) {
      c.heads_q -= c.heads_q / c.heads_k;
      --c.heads_k;
    } else if (c.packed) {
      (r.chance(0.5) ? c.lengths_q : c.lengths_k)[0] /= 2;
    } else {
      (r.chance(0.5) ? c.seqlen_q : c.seqlen_k) /= 2;
    }
  }
}

// Draws other lengths. Cases that differ only in lengths share most kernels.
void redraw_lengths(Random& r, Case& c) {
  const bool use_q = !c.used_q.empty(), use_k = !c.used_k.empty();
  for (std::vector<int64_t>* list : {&c.lengths_q, &c.lengths_k, &c.used_q, &c.used_k}) list->clear();
  random_lengths(r, c);
  limit_work(r, c);
  random_used(r, c, use_q, use_k);
  if (!c.diagonals.empty()) c.diagonals.resize(static_cast<size_t>(c.sequences()), r.between(-100, 100));
}

int64_t random_bound(Random& r) {
  return r.chance(0.5) ? r.between(-10, 60) : r.chance(0.8) ? r.between(0, 300) : r.between(-200, 0);
}

void random_mask(Random& r, Case& c) {
  c.causal = r.chance(0.4);
  c.top_left = r.chance(0.25);
  if (r.chance(0.25)) c.left = random_bound(r);
  if (r.chance(c.causal ? 0.05 : 0.25)) c.right = random_bound(r);
  const int64_t right = c.causal ? std::min<int64_t>(c.right, 0) : c.right;
  if (c.left != TANDEM_UNBOUNDED && right != TANDEM_UNBOUNDED && c.left + right < 0) c.left = -right;
}

Case forward_case(uint64_t seed, uint64_t draw) {
  Random r(seed);
  Case c;
  c.seed = static_cast<int64_t>(seed & 0xffffffff);
  c.dtype = r.chance(0.6) ? "bf16" : "f16";
  c.gradients.clear();
  c.align = r.chance(0.97) ? 8 : 1;
  random_heads(r, c);
  c.packed = r.chance(0.35);
  random_lengths(r, c);
  limit_work(r, c);
  const bool use_q = r.chance(0.15), use_k = r.chance(0.2);
  random_used(r, c, use_q, use_k);
  random_mask(r, c);
  random_bias(r, c);
  if (r.chance(0.15)) c.scale = 0.5 * r.uniform();
  if (r.chance(0.03)) c.scale = -0.3 * r.uniform();
  random_terms(r, c);
  c.lse = !r.chance(0.1);
  c.invariant = r.chance(0.1);
  if (r.chance(0.15)) c.values = "large";
  if (r.chance(0.05)) c.values = "integer";
  if (r.chance(0.4)) c.layout = r.between(0, (1 << 22) - 1);
  random_results(r, c);
  // Half as many cases as for other engines have expressions, because each one is a kernel that takes seconds to
  // compile.
  if (r.chance(0.5)) random_mods(r, c);
  static constexpr int64_t kBlockSizes[] = {128, 128, 256, 384, int64_t{1} << 40};
  if (r.chance(0.15) && !c.packed) random_blocks(r, c, kBlockSizes);
  c.max_scores = r.chance(0.15);
  if (r.chance(0.15) && c.blocks.empty() && !c.invariant) c.splits = r.between(2, 6);
  if (draw > 0) {
    Random other(seed + (draw << 42));
    c.seed = other.between(0, 0xffffffff);
    redraw_lengths(other, c);
  }
  return c;
}

// Puts the keys of some cases into pages. The lengths remain; sharp values are not available in pages.
void random_pages(Random& r, Case& c) {
  static constexpr int64_t kSizes[] = {16, 16, 32, 48, 64, 80, 128, 256};
  if (!r.chance(0.2) || c.sharp() || c.sequences() == 0) return;
  int64_t longest = 1;
  for (int64_t b = 0; b < c.sequences(); ++b) {
    if (static_cast<int64_t>(c.used_k.size()) <= b) c.used_k.push_back(c.length_k(b));
    longest = std::max(longest, c.used_k[static_cast<size_t>(b)]);
  }
  c.page_size = kSizes[r.between(0, 7)];
  c.seqlen_k = (longest + c.page_size - 1) / c.page_size * c.page_size;
  c.lengths_k.clear();
}

}  // namespace

Case random_gpu_case(uint64_t seed, uint64_t draw) {
  Case c = forward_case(seed, draw);
  Random r(seed + (uint64_t{1} << 41));
  random_pages(r, c);
  return c;
}

// A forward case with gradients and their options. Standard attention runs several times per check, so the problems are
// smaller.
Case random_gpu_backward_case(uint64_t seed, uint64_t draw) {
  Case c = forward_case(seed, draw);
  Random r(seed + (uint64_t{1} << 40));
  while (work(c) > 12'000'000 && c.sequences() > 0) {
    if (c.packed) {
      for (std::vector<int64_t>* lengths : {&c.lengths_q, &c.lengths_k})
        for (int64_t& length : *lengths) length = (length + 1) / 2;
    } else {
      c.seqlen_q = (c.seqlen_q + 1) / 2;
      c.seqlen_k = (c.seqlen_k + 1) / 2;
    }
  }
  for (size_t b = 0; b < c.used_q.size(); ++b) c.used_q[b] = std::min(c.used_q[b], c.length_q(static_cast<int64_t>(b)));
  for (size_t b = 0; b < c.used_k.size(); ++b) c.used_k[b] = std::min(c.used_k[b], c.length_k(static_cast<int64_t>(b)));
  c.lse = true;
  c.gradients = "qkvbsm";
  if (r.chance(0.3)) random_gradients(r, c, "qkvbsm");
  c.dlse = r.chance(0.2);
  if (r.chance(0.25)) random_dropout(r, c);
  return c;
}

}  // namespace tandem::test
