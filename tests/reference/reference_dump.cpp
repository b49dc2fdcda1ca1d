// Prints random float64 problems and the reference's answers, for numpy_reference.py. Each problem is one line of JSON,
// then its tensors as raw float64, in the order of the line.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "reference/reference.h"
#include "support/instance.h"

namespace {

using namespace tandem;
using namespace tandem::test;

struct Named {
  const char* name;
  const Tensor& tensor;
};

std::string bound(int64_t x) { return x == TANDEM_UNBOUNDED ? "null" : std::to_string(x); }

void dump(const Case& c) {
  Instance in(c);
  Outputs o = in.exact_outputs(TANDEM_FORWARD);
  const Problem p = in.exact_problem(TANDEM_FORWARD, &o);
  reference::forward(p);

  const Named all[] = {{"q", in.q},
                       {"k", in.k},
                       {"v", in.v},
                       {"bias", in.bias},
                       {"sink", in.sink},
                       {"alibi_slopes", in.alibi_slopes},
                       {"cu_seqlens_q", in.cu_seqlens_q},
                       {"cu_seqlens_k", in.cu_seqlens_k},
                       {"seqused_q", in.seqused_q},
                       {"seqused_k", in.seqused_k},
                       {"page_table", in.page_table},
                       {"diagonal_offsets", in.diagonal_offsets},
                       {"places", in.places},
                       {"slope", in.slope},
                       {"table", in.table},
                       {"temperature", in.temperature},
                       {"doc", in.doc},
                       {"seen", in.seen},
                       {"kv_num_blocks", in.kv_num_blocks},
                       {"kv_indices", in.kv_indices},
                       {"full_kv_num_blocks", in.full_kv_num_blocks},
                       {"full_kv_indices", in.full_kv_indices},
                       {"out", o.out},
                       {"lse", o.lse},
                       {"max_scores", o.max_scores}};
  std::ostringstream line;
  line.precision(17);
  line << "{\"flags\": \"" << to_flags(c) << "\", \"scale\": " << c.scale << ", \"softcap\": " << c.softcap
       << ", \"causal\": " << c.causal << ", \"top_left\": " << c.top_left << ", \"explicit\": " << c.explicit_diagonal
       << ", \"diagonal\": " << c.diagonal << ", \"left\": " << bound(c.left) << ", \"right\": " << bound(c.right)
       << ", \"boolean_bias\": " << (c.bias == "bool") << ", \"dropout\": " << c.dropout
       << ", \"seed\": " << p.dropout.seed << ", \"offset\": " << p.dropout.offset << ", \"score_mod\": \""
       << c.score_mod << "\", \"mask_mod\": \"" << c.mask_mod << "\", \"block\": [" << c.block_q << ", " << c.block_k
       << "], \"scalars\": {";
  const char* comma = "";
  for (const tandem_mod_scalar& one : in.scalars) {
    line << comma << "\"" << one.name << "\": " << one.value;
    comma = ", ";
  }
  line << "}, \"tensors\": [";
  comma = "";
  for (const Named& one : all) {
    if (!one.tensor) continue;
    line << comma << "[\"" << one.name << "\", [";
    for (size_t n = 0; n < one.tensor.shape().size(); ++n) line << (n ? ", " : "") << one.tensor.shape()[n];
    line << "]]";
    comma = ", ";
  }
  line << "]}\n";
  std::fputs(line.str().c_str(), stdout);
  for (const Named& one : all) {
    if (!one.tensor) continue;
    const std::vector<double> values = one.tensor.values();
    std::fwrite(values.data(), sizeof(double), values.size(), stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 1;
  for (int seed = 1; seed <= count; ++seed) {
    Case c = random_case(static_cast<uint64_t>(seed));
    if (seed % 2) c.dtype = "f64";  // other types round their inputs to 16 or 32 bits
    dump(c);
  }
}
