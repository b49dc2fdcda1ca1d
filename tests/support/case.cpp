#include "support/case.h"

#include <charconv>
#include <map>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "support/random.h"

namespace tandem::test {
namespace {

// Pairs every field with its flag.
template <class C, class F>
void visit(C& c, F&& field) {
  field("dtype", c.dtype);
  field("batch", c.batch);
  field("heads-q", c.heads_q);
  field("heads-k", c.heads_k);
  field("seqlen-q", c.seqlen_q);
  field("seqlen-k", c.seqlen_k);
  field("head-dim", c.head_dim);
  field("head-dim-v", c.head_dim_v);
  field("packed", c.packed);
  field("lengths-q", c.lengths_q);
  field("lengths-k", c.lengths_k);
  field("used-q", c.used_q);
  field("used-k", c.used_k);
  field("page-size", c.page_size);
  field("scale", c.scale);
  field("softcap", c.softcap);
  field("causal", c.causal);
  field("top-left", c.top_left);
  field("explicit", c.explicit_diagonal);
  field("diagonal", c.diagonal);
  field("diagonals", c.diagonals);
  field("left", c.left);
  field("right", c.right);
  field("alibi", c.alibi);
  field("bias", c.bias);
  field("bias-shape", c.bias_shape);
  field("bias-inf", c.bias_inf);
  field("sink", c.sink);
  field("dropout", c.dropout);
  field("dropout-pointers", c.dropout_pointers);
  field("places", c.places);
  field("score-mod", c.score_mod);
  field("mask-mod", c.mask_mod);
  field("blocks", c.blocks);
  field("block-shape", c.block_shape);
  field("block-q", c.block_q);
  field("block-k", c.block_k);
  field("lse", c.lse);
  field("dlse", c.dlse);
  field("max-scores", c.max_scores);
  field("gradients", c.gradients);
  field("float32", c.float32);
  field("accumulate", c.accumulate);
  field("splits", c.splits);
  field("sm-limit", c.sm_limit);
  field("invariant", c.invariant);
  field("members", c.members);
  field("values", c.values);
  field("layout", c.layout);
  field("align", c.align);
  field("max-seqlen", c.max_seqlen);
  field("seed", c.seed);
}

std::string print(const std::string& x) { return x.empty() ? "none" : x; }
std::string print(bool x) { return x ? "1" : "0"; }
std::string print(int64_t x) { return std::to_string(x); }
std::string print(double x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};  // the shortest that reads back the same
}
std::string print(const std::vector<int64_t>& list) {
  std::string text;
  for (int64_t x : list) {
    if (!text.empty()) text += ',';
    text += print(x);
  }
  return text.empty() ? "none" : text;
}

void parse(const std::string& text, std::string& x) { x = text == "none" ? "" : text; }
void parse(const std::string& text, bool& x) { x = text != "0"; }
void parse(const std::string& text, int64_t& x) { x = std::stoll(text); }
void parse(const std::string& text, double& x) { x = std::stod(text); }
void parse(const std::string& text, std::vector<int64_t>& list) {
  list.clear();
  if (text == "none") return;
  std::stringstream in(text);
  for (std::string one; std::getline(in, one, ',');) list.push_back(std::stoll(one));
}

// Mostly small lengths, odd in half of the cases, sometimes longer than a tile.
int64_t random_length(Random& r) {
  switch (r.between(0, 9)) {
    case 0: return r.between(0, 1);
    case 1:
    case 2: return r.between(1, 4);
    case 3: return r.between(60, 140);
    case 4: return r.chance(0.3) ? r.between(140, 400) : r.between(5, 60);
    default: return r.between(2, 40);
  }
}

int64_t random_dim(Random& r) {
  static constexpr int64_t kUsual[] = {16, 32, 64, 96, 128};
  if (r.chance(0.35)) return kUsual[r.between(0, 4)];
  return r.chance(0.06) ? r.between(129, 512) : r.between(1, 48);
}

void random_lengths(Random& r, Case& c) {
  c.batch = r.chance(0.03) ? 0 : r.between(1, 3);
  c.seqlen_q = random_length(r);
  c.seqlen_k = r.chance(0.4) ? c.seqlen_q : random_length(r);
  if (r.chance(0.2)) c.seqlen_q = r.between(1, 8);  // decode
  c.packed = r.chance(0.3);
  if (r.chance(0.05)) {
    c.page_size = r.between(1, 20);
    c.seqlen_k = (c.seqlen_k + c.page_size - 1) / c.page_size * c.page_size;
  }
  if (c.packed) {
    for (int64_t b = r.between(1, 4); b > 0; --b) {
      c.lengths_q.push_back(random_length(r));
      if (!c.page_size) c.lengths_k.push_back(r.chance(0.4) ? c.lengths_q.back() : random_length(r));
    }
    c.batch = 1;
    c.seqlen_q = c.page_size ? 4 : 0;
    if (!c.page_size) c.seqlen_k = 0;
    c.seqlen_q = 0;
  }
  const bool use_q = r.chance(0.15), use_k = c.page_size || r.chance(0.2);
  random_used(r, c, use_q, use_k);
}

void random_mask(Random& r, Case& c) {
  c.causal = r.chance(0.3);
  c.top_left = r.chance(0.25);
  if (r.chance(0.2)) c.left = r.between(-10, 60);
  if (!c.causal && r.chance(0.2)) c.right = r.between(-10, 60);
  const int64_t right = c.causal ? 0 : c.right;
  if (c.left != TANDEM_UNBOUNDED && right != TANDEM_UNBOUNDED && c.left + right < 0) c.left = -right;
}

// Most offsets are near the edges of the scores, and some are beyond all of them. ALiBi keeps its diagonal, because
// large float32 scores absorb their differences.
void random_diagonal(Random& r, Case& c) {
  if (!r.chance(0.15)) return;
  const auto offset = [&] {
    const bool far = r.chance(0.1) && c.alibi.empty();
    return far ? r.between(-1, 1) * INT32_MAX : r.between(-c.length_q(0) - 3, c.length_k(0) + 3);
  };
  c.top_left = false;
  c.explicit_diagonal = true;
  c.diagonal = r.chance(0.7) && c.sequences() > 0 ? offset() : 0;
  if (r.chance(0.5)) {
    for (int64_t b = 0; b < c.sequences(); ++b) c.diagonals.push_back(offset());
  }
}

std::string random_score_text(Random& r, int depth) {
  const auto inner = [&] { return depth == 0 ? std::string("score") : random_score_text(r, depth - 1); };
  static const char* const kPlaces[] = {"slope[head]*abs(q-k)", "table[head,clamp(q-k+4,0,8)]",
                                        "table[head,n]",        "c",
                                        "0.1*float((q*5+k)%7)", "table[q,k%9]",
                                        "temperature*0.1*q"};
  const int64_t kind = r.between(0, 11);
  const std::string a = inner();  // in sequence: + may evaluate its operands in any order
  switch (kind) {
    case 0: return "(" + a + "-" + kPlaces[r.between(0, 6)] + ")";
    case 1: return "(" + a + "+" + kPlaces[r.between(0, 6)] + ")";
    case 2: return "(" + a + "*temperature)";
    case 3: return "(3*tanh(" + a + "/3))";
    case 4: return "(4*sigmoid(" + a + "))";
    case 5: return "select(k<=q+n," + a + ",-inf)";
    case 6: return "select(seen[k]," + a + "," + inner() + "*0.5)";
    case 7: return "max(" + a + ",-1.25)";
    case 8: return "log(1+exp(clamp(" + a + ",-20,20)))";
    case 9: return "(" + a + "*(1+slope[head]))";
    case 10: return "exp2(clamp(" + a + ",-50,3))";
    default: return "(" + a + "*0.5)";
  }
}

std::string random_mask_text(Random& r, int depth) {
  static const char* const kPlain[] = {"k<=q",
                                       "doc[batch,q]==doc[batch,k]",
                                       "q-k<9",
                                       "seen[k]",
                                       "on",
                                       "(q^k)&3!=0",
                                       "(q*7+k*3)%5<3",
                                       "k<n+8",
                                       "true",
                                       "head!=0||k>=q"};
  if (depth == 0 || r.chance(0.3)) return kPlain[r.between(0, 9)];
  const std::string a = random_mask_text(r, depth - 1);
  switch (r.between(0, 2)) {
    case 0: return "(" + a + "&&" + random_mask_text(r, depth - 1) + ")";
    case 1: return "(" + a + "||" + random_mask_text(r, depth - 1) + ")";
    default: return "!(" + a + ")";
  }
}

// Returns an expression that engines have an option for.
std::string random_option_text(Random& r, bool mask) {
  static constexpr const char* kDistances[] = {"(q-k)", "(q-k+n)", "(k-q)", "(q+seqlen_k-seqlen_q-k)"};
  static constexpr const char* kBounds[] = {"<=0", "<9", ">=-n", ">-20&&on", "<=seqlen_q", "==3"};
  const std::string distance = kDistances[r.between(0, 3)];
  if (mask) {
    const std::string first = r.chance(0.3) ? "abs" + distance : distance;
    const std::string second = r.chance(0.5) ? "&&" + distance + kBounds[r.between(0, 5)] : "";
    return first + kBounds[r.between(0, 5)] + second;
  }
  return std::string(r.chance(0.2) ? "score+slope[head]*" : "score-slope[head]*") + (r.chance(0.6) ? "abs" : "") +
         distance;
}

}  // namespace

void random_used(Random& r, Case& c, bool use_q, bool use_k) {
  for (int64_t b = 0; b < c.sequences(); ++b) {
    if (use_q) c.used_q.push_back(r.chance(0.1) ? 0 : r.between(0, c.length_q(b)));
    if (use_k) c.used_k.push_back(r.chance(0.1) ? 0 : r.between(0, c.length_k(b)));
  }
}

void random_bias(Random& r, Case& c) {
  if (c.packed || !r.chance(0.3)) return;
  static const char* const kKinds[] = {"f32", "same", "bool"};
  c.bias = kKinds[r.between(0, 2)];
  for (char& letter : c.bias_shape) {
    if (r.chance(0.35)) letter = '1';
  }
  c.bias_inf = c.bias != "bool" && r.chance(0.2);
}

void random_terms(Random& r, Case& c) {
  if (r.chance(0.2)) c.softcap = static_cast<double>(r.between(1, 30));
  if (r.chance(0.2)) c.alibi = r.chance(0.7) ? "head" : "batch";
  if (r.chance(0.2)) c.sink = r.chance(0.5) ? "f32" : "same";
}

void random_dropout(Random& r, Case& c) {
  c.dropout = static_cast<double>(r.between(1, 15)) / 16;
  c.dropout_pointers = r.chance(0.3);
}

void random_gradients(Random& r, Case& c, const std::string& letters) {
  c.gradients.clear();
  for (const char one : letters) {
    if (r.chance(0.6)) c.gradients += one;
  }
}

void random_mods(Random& r, Case& c) {
  if (r.chance(0.25)) c.score_mod = random_score_text(r, static_cast<int>(r.between(0, 3)));
  if (r.chance(0.25)) c.mask_mod = random_mask_text(r, static_cast<int>(r.between(0, 2)));
  if (r.chance(0.1)) c.score_mod = random_option_text(r, false);
  if (r.chance(0.1)) c.mask_mod = random_option_text(r, true);
}

void random_results(Random& r, Case& c) {
  random_diagonal(r, c);
  for (const char one : std::string("ogd")) {
    if (r.chance(0.15)) c.float32 += one;
  }
  c.accumulate = r.chance(0.15);
  if (r.chance(0.1)) c.sm_limit = r.between(1, 200);
}

void random_blocks(Random& r, Case& c, std::span<const int64_t> sizes) {
  static const char* const kKinds[] = {"random", "partial", "hostile", "late"};
  const auto size = [&] { return sizes[static_cast<size_t>(r.between(0, static_cast<int64_t>(sizes.size()) - 1))]; };
  c.blocks = kKinds[r.between(0, 3)];
  c.block_q = size();
  c.block_k = size();
  for (char& letter : c.block_shape) {
    if (r.chance(0.4)) letter = '1';
  }
}

DType Case::type() const {
  static const std::map<std::string, DType> kTypes = {
      {"f64", DType::f64}, {"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}};
  return kTypes.at(dtype);
}

std::string to_flags(const Case& c) {
  std::map<std::string, std::string> defaults;
  const Case fresh;
  visit(fresh, [&](const char* flag, const auto& value) { defaults[flag] = print(value); });
  std::string text;
  visit(c, [&](const char* flag, const auto& value) {
    const std::string now = print(value);
    if (now != defaults[flag]) text += (text.empty() ? "--" : " --") + (flag + (" " + now));
  });
  return text;
}

Case from_flags(const std::string& flags) {
  Case c;
  std::stringstream in(flags);
  for (std::string flag, value; in >> flag;) {
    bool known = false;
    if (!(in >> value)) throw std::invalid_argument(flag + " needs a value");
    visit(c, [&](const char* name, auto& field) {
      if (flag != std::string("--") + name) return;
      parse(value, field);
      known = true;
    });
    if (!known) throw std::invalid_argument("unknown flag of a case: " + flag);
  }
  return c;
}

Case random_case(uint64_t seed) {
  Random r(seed);
  Case c;
  c.seed = static_cast<int64_t>(seed & 0xffffffff);
  static const char* const kTypes[] = {"f32", "bf16", "f16"};
  c.dtype = kTypes[r.between(0, 2)];
  c.heads_k = r.chance(0.02) ? 0 : r.between(1, 3);
  c.heads_q = c.heads_k * (r.chance(0.6) ? 1 : r.between(2, 4));
  c.head_dim = random_dim(r);
  c.head_dim_v = r.chance(0.75) ? c.head_dim : random_dim(r);
  random_lengths(r, c);
  random_mask(r, c);
  random_bias(r, c);
  if (r.chance(0.15)) c.scale = 0.5 * r.uniform();
  random_terms(r, c);
  if (r.chance(0.15)) random_dropout(r, c);
  c.lse = !r.chance(0.1);
  c.dlse = r.chance(0.2);
  if (r.chance(0.15)) random_gradients(r, c, "qkvbs");
  if (r.chance(0.3)) c.splits = r.between(1, 9);
  c.invariant = r.chance(0.1);
  if (r.chance(0.15)) c.values = "large";
  if (r.chance(0.05)) c.values = "integer";
  if (r.chance(0.4)) c.layout = r.between(0, (1 << 16) - 1);
  random_results(r, c);
  random_mods(r, c);
  c.max_scores = r.chance(0.3);
  static constexpr int64_t kBlockSizes[] = {1, 16, 48, 64, 130, int64_t{1} << 40};
  if (!c.packed && c.page_size == 0 && r.chance(0.2)) random_blocks(r, c, kBlockSizes);
  const bool reads_positions = c.dropout > 0 || !c.alibi.empty() || !c.score_mod.empty() || !c.mask_mod.empty();
  if (reads_positions && r.chance(0.3)) c.places = r.between(1, 3);
  return c;
}

}  // namespace tandem::test
