#include "vgpu/src/ptx/words.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace tandem::vgpu::ptx {
namespace {

// All tables are sorted.
constexpr std::string_view kOpcodes[] = {
    "abs",          "activemask",    "add",       "addc",       "alloca",
    "and",          "applypriority", "atom",      "bar",        "barrier",
    "bfe",          "bfi",           "bfind",     "bmsk",       "bra",
    "brev",         "brkpt",         "brx",       "call",       "clusterlaunchcontrol",
    "clz",          "cnot",          "copysign",  "cos",        "cp",
    "createpolicy", "cvt",           "cvta",      "discard",    "div",
    "dp2a",         "dp4a",          "elect",     "ex2",        "exit",
    "fence",        "fma",           "fns",       "getctarank", "griddepcontrol",
    "isspacep",     "istypep",       "ld",        "ldmatrix",   "ldu",
    "lg2",          "lop3",          "mad",       "mad24",      "madc",
    "mapa",         "match",         "max",       "mbarrier",   "membar",
    "min",          "mma",           "mov",       "movmatrix",  "mul",
    "mul24",        "multimem",      "nanosleep", "neg",        "not",
    "or",           "pmevent",       "popc",      "prefetch",   "prefetchu",
    "prmt",         "rcp",           "red",       "redux",      "rem",
    "ret",          "rsqrt",         "sad",       "selp",       "set",
    "setmaxnreg",   "setp",          "shf",       "shfl",       "shl",
    "shr",          "sin",           "slct",      "sqrt",       "st",
    "stackrestore", "stacksave",     "stmatrix",  "sub",        "subc",
    "suld",         "suq",           "sured",     "sust",       "szext",
    "tanh",         "tcgen05",       "tensormap", "testp",      "tex",
    "tld4",         "trap",          "txq",       "vabsdiff",   "vabsdiff2",
    "vabsdiff4",    "vadd",          "vadd2",     "vadd4",      "vavrg2",
    "vavrg4",       "vmad",          "vmax",      "vmax2",      "vmax4",
    "vmin",         "vmin2",         "vmin4",     "vote",       "vset",
    "vset2",        "vset4",         "vshl",      "vshr",       "vsub",
    "vsub2",        "vsub4",         "wgmma",     "wmma",       "xor"};

constexpr std::string_view kVectors[] = {"%cluster_ctaid", "%cluster_nctaid", "%clusterid", "%ctaid",
                                         "%nclusterid",    "%nctaid",         "%ntid",      "%tid"};

constexpr std::string_view kScalars[] = {"%aggr_smem_size",
                                         "%clock",
                                         "%clock64",
                                         "%clock_hi",
                                         "%cluster_ctarank",
                                         "%cluster_nctarank",
                                         "%current_graph_exec",
                                         "%dynamic_smem_size",
                                         "%globaltimer",
                                         "%globaltimer_hi",
                                         "%globaltimer_lo",
                                         "%gridid",
                                         "%is_explicit_cluster",
                                         "%laneid",
                                         "%lanemask_eq",
                                         "%lanemask_ge",
                                         "%lanemask_gt",
                                         "%lanemask_le",
                                         "%lanemask_lt",
                                         "%nsmid",
                                         "%nwarpid",
                                         "%reserved_smem_offset_begin",
                                         "%reserved_smem_offset_cap",
                                         "%reserved_smem_offset_end",
                                         "%smid",
                                         "%total_smem_size",
                                         "%warpid"};

static_assert(std::ranges::is_sorted(kOpcodes) && std::ranges::is_sorted(kVectors) && std::ranges::is_sorted(kScalars));

// Returns true for %envreg7 and similar: a name and a number below `count`, then the required suffix.
bool is_numbered(std::string_view word, std::string_view name, int count, std::string_view tail = {}) {
  if (!word.starts_with(name) || !word.ends_with(tail)) return false;
  word.remove_prefix(name.size());
  if (word.size() <= tail.size()) return false;
  word.remove_suffix(tail.size());
  int number = 0;
  const auto [stopped, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  const bool canonical = word.size() == 1 || word[0] != '0';
  return error == std::errc() && stopped == word.data() + word.size() && canonical && number >= 0 && number < count;
}

}  // namespace

bool is_opcode(std::string_view word) {
  // This runs for every instruction, so that it compares only words with the same first character.
  if (word.empty()) return false;
  const auto same_letter = std::ranges::equal_range(kOpcodes, word[0], {}, [](std::string_view o) { return o[0]; });
  return std::ranges::find(same_letter, word) != same_letter.end();
}

bool has_components(std::string_view special_register) {
  return std::ranges::binary_search(kVectors, special_register);
}

bool is_special_register(std::string_view word) {
  return has_components(word) || std::ranges::binary_search(kScalars, word) || is_numbered(word, "%envreg", 32) ||
         is_numbered(word, "%pm", 8) || is_numbered(word, "%pm", 8, "_64") ||
         is_numbered(word, "%reserved_smem_offset_", 2);
}

}  // namespace tandem::vgpu::ptx
