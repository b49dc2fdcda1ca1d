// Cases of the block mask builder: an expression with its tensors, results with guards and poison, and brute force.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "score_mod/program.h"
#include "support/tensor.h"

namespace tandem::test {

// An expression may read doc[batch, q or k] (sorted documents), page[i] (any ints), seen[q or k], slope[head], n and x.
struct BlocksCase {
  std::string text = "k <= q";
  int64_t batch = 1, heads = 1, seqlen_q = 300, seqlen_k = 300, block_q = 128, block_k = 128;
  bool full = true, by_keys = true;
  int64_t layout = kCompact;
  int64_t seed = 1;
};
std::ostream& operator<<(std::ostream& stream, const BlocksCase& c);

class BlocksInstance {
 public:
  explicit BlocksInstance(const BlocksCase& c);
  BlocksInstance(const BlocksInstance&) = delete;

  // Arguments that point into *this.
  tandem_block_mask_args args();
  std::vector<Tensor*> tensors();  // each tensor once, the results last
  int64_t blocks() const;          // bytes of workspace

  const BlocksCase c;
  Tensor doc, page, seen, slope;
  Tensor counts[4], indices[4];  // partial, full, by queries and then by keys

 private:
  friend std::string check_blocks_accuracy(const BlocksCase& c, const std::function<void(BlocksInstance&)>& make);
  tandem_mod_tensor named_[4];
  tandem_mod_scalar scalars_[2];
  tandem_mod mod_;
};

// Calls make() to build an instance's lists. The lists must equal an evaluation of every query and key, with intact
// guards. Returns the first error as a sentence, or "".
std::string check_blocks_accuracy(const BlocksCase& c, const std::function<void(BlocksInstance&)>& make);

// Expressions and shapes that every engine supports: the gallery, tails, empty sequences, lists per head, any block
// size, random expressions.
std::vector<BlocksCase> blocks_cases();

}  // namespace tandem::test
