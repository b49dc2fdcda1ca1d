// A Case describes one attention problem completely: shapes, options, layouts and the seed of its values. A case prints
// as one line of flags and is read back from it, so that every failure can be repeated.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "problem/problem.h"

namespace tandem::test {

struct Random;

struct Case {
  std::string dtype = "f32";  // f64, f32, bf16, f16
  int64_t batch = 1, heads_q = 1, heads_k = 1, seqlen_q = 4, seqlen_k = 4, head_dim = 8, head_dim_v = 8;

  // Packed: the lengths of the sequences; the batch is their number. With page_size only queries are packed.
  bool packed = false;
  std::vector<int64_t> lengths_q, lengths_k;
  std::vector<int64_t> used_q, used_k;  // seqused, one per sequence; empty: absent
  int64_t page_size = 0;                // > 0: rows of a page; pages are shuffled and shared

  double scale = 0, softcap = 0;
  bool causal = false, top_left = false;
  bool explicit_diagonal = false;  // at diagonal + diagonals[sequence]; diagonals empty: absent
  int64_t diagonal = 0;
  std::vector<int64_t> diagonals;
  int64_t left = TANDEM_UNBOUNDED, right = TANDEM_UNBOUNDED;
  std::string alibi;                // "", "head" or "batch"
  std::string bias;                 // "", "f32", "same" (as q), or "bool"
  std::string bias_shape = "bhij";  // "1" in place of a letter: broadcast there
  bool bias_inf = false;            // some entries are -inf
  std::string sink;                 // "", "f32" or "same"
  double dropout = 0;
  bool dropout_pointers = false;
  int64_t places = 0;  // > 0: parts of longer sequences; the longest stride
  // Expressions without spaces, over the names of Instance::bind_mods().
  std::string score_mod, mask_mod;
  // A block mask of block_q x block_k. "random": all kinds, in any order. "partial": no list of full blocks. `hostile`:
  // arbitrary counts and indices. "late": only keys in the second half. block_shape: letters of bias_shape.
  std::string blocks, block_shape = "bh";
  int64_t block_q = 128, block_k = 128;

  bool lse = true, dlse = false;     // forward writes lse; backward reads dlse
  bool max_scores = false;           // forward writes max_scores
  std::string gradients = "qkvbsm";  // m: score_mod's tensors; t: only its table
  std::string float32;               // float32 results of 16-bit cases: out, gradients; d: dout
  bool accumulate = false;           // gradients are added to normal numbers
  int64_t splits = 0, sm_limit = 0;
  bool invariant = false;
  std::string members;  // other members of the arguments: "deterministic=1,validate=1"
  // "large": scores times 30. "integer": q = 0 and v of small integers. Sharp rows, compared without noise: "sink20"
  // and "needle20" raise the first or a middle key by 20. "copy" raises the key before the row's own by 30.
  std::string values = "normal";
  int64_t layout = 0;       // two bits per tensor, see Layout
  int64_t align = 1;        // > 1: gaps and margins are multiples; GPUs need 16 bytes
  int64_t max_seqlen = -1;  // packed or pages, >= 0: more than the longest
  int64_t seed = 1;

  bool operator==(const Case&) const = default;

  bool sharp() const { return !values.empty() && values != "normal" && values != "large" && values != "integer"; }
  int64_t sequences() const { return packed ? static_cast<int64_t>(lengths_q.size()) : batch; }
  int64_t length_q(int64_t b) const { return packed ? lengths_q[static_cast<size_t>(b)] : seqlen_q; }
  int64_t length_k(int64_t b) const { return packed && !page_size ? lengths_k[static_cast<size_t>(b)] : seqlen_k; }
  DType type() const;
};

// "--dtype bf16 --seqlen-q 5 --causal ...": the fields that differ from their defaults.
std::string to_flags(const Case& c);

// Reads flags. Throws std::invalid_argument with a sentence about the first unknown flag.
Case from_flags(const std::string& flags);

// A random valid case of any options and their combinations, mostly small.
Case random_case(uint64_t seed);

// Both kinds of random case draw by these functions. A dense case may get a bias, and random_terms() draws softcap,
// ALiBi and sink. sizes: of the blocks of a block mask.
void random_used(Random& r, Case& c, bool use_q, bool use_k);
void random_bias(Random& r, Case& c);
void random_terms(Random& r, Case& c);
void random_dropout(Random& r, Case& c);
void random_gradients(Random& r, Case& c, const std::string& letters);
void random_blocks(Random& r, Case& c, std::span<const int64_t> sizes);

// Adds options of both kinds of random case: the diagonal, result types, and accumulation. Call this last, so that a
// seed keeps its case.
void random_results(Random& r, Case& c);

// Adds a score_mod, a mask_mod, both or neither. Expressions are smooth in the score, so that rounding changes results
// little.
void random_mods(Random& r, Case& c);

// A random case for GPUs: forward only, 16-bit types, head dims up to 256 in multiples of 8, mostly aligned. Lengths
// are near the edges of tiles and up to 2000. draw: the number of a further draw of lengths, 0 for the first.
Case random_gpu_case(uint64_t seed, uint64_t draw = 0);

// A smaller random case for GPUs with gradients and dropout.
Case random_gpu_backward_case(uint64_t seed, uint64_t draw = 0);

}  // namespace tandem::test
