#include "plan/forward.h"

#include <algorithm>
#include <cmath>

#include "plan/blackwell_tiles.h"
#include "plan/tiles.h"
#include "problem/text.h"

namespace tandem::plan {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int rounded(int64_t head_dim) { return static_cast<int>(ceil_div(head_dim, 16) * 16); }

// The most query heads of a key head that can be neighbours: a power of two, at most 64, so that each warpgroup's 64
// rows are whole queries.
int most_together(const Problem& p) {
  const int64_t group = p.group();
  int together = 1;
  while (together < 64 && group % (2 * together) == 0) together *= 2;
  return together;
}

Bias bias_of(const Problem& p) {
  if (!p.bias) return Bias::none;
  if (p.bias.boolean()) return Bias::boolean;
  return p.bias.dtype == DType::f32 ? Bias::f32 : Bias::element;
}

// What the problem asks of a kernel, however it is cut.
template <class Kernel>
Kernel options_of(const Problem& p) {
  Kernel t;
  t.head_dim = rounded(p.head_dim);
  t.head_dim_v = rounded(p.head_dim_v);
  t.f16 = p.dtype == DType::f16;
  t.left = binds_left(p);
  t.right = binds_right(p);
  t.ragged = ragged(p);
  t.unscaled = static_cast<float>(p.softmax_scale) <= 0;
  t.softcap = p.softcap > 0;
  t.alibi = p.alibi_slopes.present;
  t.bias = bias_of(p);
  return t;
}

// The choice depends on lengths for speed only. A batch-invariant call does without: in a packed or padded batch they
// are those of other sequences.
Tile cut_for_hopper(const Problem& p, int64_t rows) {
  auto t = options_of<ForwardTile>(p);
  if (p.batch_invariant) rows = INT64_MAX;
  const int64_t keys = p.batch_invariant ? 0 : p.seqlen_k;
  for (const TileChoice& c : kHopperTiles) {
    if (!c.serves(t.head_dim, t.head_dim_v, rows, keys, t.left, t.right, !t.changed())) continue;
    t.warpgroups = c.warpgroups;
    t.keys = c.step;
    t.stages = c.stages;
    t.turns = c.turns;
    break;
  }
  return t;
}

// Where rows fill the tiles of two CTAs as well as those of one.
bool fills_pairs(const BlackwellTile& t, int64_t rows) {
  BlackwellTile alone = t;
  alone.pair = false;
  return 2 * ceil_div(rows, 2 * alone.rows()) <= ceil_div(rows, alone.rows());
}

Tile cut_for_blackwell(const Problem& p, const gpu::Properties& device, int64_t rows) {
  auto t = options_of<BlackwellTile>(p);
  for (const BlackwellChoice& c : kBlackwellTiles) {
    if (t.head_dim > c.head_dim || t.head_dim_v > c.head_dim_v) continue;
    const bool full = !t.left && !t.right && !t.ragged && !t.changed();
    t.pair = c.cluster == Cluster::pair ||
             (c.cluster == Cluster::pair_if_full && full && !p.batch_invariant && fills_pairs(t, rows));
    t.takes_over = t.pair && (t.left || t.right || t.ragged);
    const bool fast_exponentials = device.compute_minor > 0;  // twice as many a clock from B300 on
    if (t.changed() || fast_exponentials) {
      t.fma_pairs = 0;
    } else {
      t.fma_pairs = t.unchecked() ? c.fma_pairs_unchecked : c.fma_pairs_checked;
    }
    break;
  }
  return t;
}

// rows: of one sequence, of the query heads that are taken together.
Tile cut(const Problem& p, const gpu::Properties& device, int64_t rows) {
  return device.compute_major == 10 ? cut_for_blackwell(p, device, rows) : cut_for_hopper(p, rows);
}

// Tiles of a unit; where only the device knows the lengths, a bound on those of all sequences together.
int64_t count_tiles_m(const Problem& p, int rows, int together) {
  const int64_t longest = ceil_div(p.seqlen_q * together, rows);
  if (!ragged(p)) return longest;
  if (!p.packed_q()) return p.batch * longest;
  // Of each sequence that has rows, the last tile may be filled in part.
  const int64_t partly = std::min(p.batch, p.total_q);
  return std::min((p.total_q * together + partly * (rows - 1)) / rows, p.batch * longest);
}

// Without a mask one head after the other: its tiles read the same keys at the same time.
int choose_group(const Problem& p, const ForwardPlan& plan, int sm_count) {
  double wanted, units = plan.units;
  if (plan.tile.ragged) {
    wanted = kWavesTogether * sm_count / std::max(plan.tiles_m, 1);
  } else {
    if (!plan.tile.left && !plan.tile.right) return 1;
    units *= static_cast<double>(p.batch);
    wanted = kHeadsTogether * (plan.tile.head_dim <= 64 ? 2 : 1) *
             std::sqrt(16384.0 / (static_cast<double>(std::max<int64_t>(p.seqlen_k, 1)) * plan.together));
  }
  const double groups = std::clamp(std::round(units / std::max(wanted, 1.0)), 1.0, std::max(units, 1.0));
  return static_cast<int>(std::ceil(units / groups));
}

int clamped(int64_t bound) { return static_cast<int>(std::clamp<int64_t>(bound, -kFarWindow, kFarWindow)); }

}  // namespace

// The first query's last visible key is the last one, or not: for all lengths up to the problem's.
bool binds_right(const Problem& p) {
  return p.window_right != TANDEM_UNBOUNDED && p.window_right < (p.bottom_right ? p.seqlen_q : p.seqlen_k) - 1;
}
bool binds_left(const Problem& p) {
  return p.window_left != TANDEM_UNBOUNDED && p.window_left < (p.bottom_right ? p.seqlen_k : p.seqlen_q) - 1;
}

ForwardPlan plan_forward(const Problem& p, const gpu::Properties& device) {
  ForwardPlan plan;
  plan.together = most_together(p);
  plan.tile = cut(p, device, p.seqlen_q * plan.together);
  // Under a mask few queries of many heads see fewer keys than many queries of one.
  if (plan.together > 1 && !plan.tile.ragged && !plan.tile.left && !plan.tile.right && !p.batch_invariant) {
    const int64_t rows = plan.tile.rows();
    const int64_t apart = ceil_div(p.seqlen_q, rows) * plan.together,
                  joined = ceil_div(p.seqlen_q * plan.together, rows);
    if (joined >= apart) {
      plan.together = 1;
      plan.tile = cut(p, device, p.seqlen_q);
    }
  }
  const bool is_ragged = plan.tile.ragged;
  const int64_t units = p.heads_q / plan.together, tiles_m = count_tiles_m(p, plan.tile.rows(), plan.together);
  const int64_t tiles = tiles_m * units * (is_ragged ? 1 : p.batch);
  plan.units = static_cast<int>(units);
  plan.tiles_m = static_cast<int>(tiles_m);
  plan.tiles = static_cast<int>(tiles);
  plan.group = choose_group(p, plan, device.sm_count);
  const int ctas = plan.tile.ctas();
  plan.grid =
      ctas * static_cast<int>(plan.tile.takes_over() ? tiles : std::min<int64_t>(device.sm_count / ctas, tiles));
  plan.counted =
      is_ragged || (!plan.tile.takes_over() && tiles > device.sm_count && (plan.tile.left || plan.tile.right));
  plan.keyless = p.total_k == 0 || p.seqlen_k == 0;
  plan.window_left = clamped(p.window_left);
  plan.window_right = clamped(p.window_right);
  if (plan.counted || plan.keyless) {
    plan.workspace_bytes = kWorkspaceAlignment - 1 + kWorkOffset + (is_ragged ? plan.tiles_m * sizeof(ForwardWork) : 0);
  }
  return plan;
}

namespace {

// Text or bits of what both kinds of tiles have.
template <class Kernel>
void add_options(const Kernel& t, uint64_t* id) {
  const auto add = [id](int value, int bits) { *id = *id << bits | static_cast<uint64_t>(value); };
  add(t.head_dim / 16, 5);
  add(t.head_dim_v / 16, 5);
  for (const bool option : {t.f16, t.left, t.right, t.ragged, t.unscaled, t.softcap, t.alibi}) add(option, 1);
  add(static_cast<int>(t.bias), 2);
}

template <class Kernel>
std::string name_of(const Kernel& t, const std::string& cut) {
  std::string name = say("forward_", t.f16 ? "f16" : "bf16", "_d", t.head_dim);
  if (t.head_dim_v != t.head_dim) name += say("v", t.head_dim_v);
  name += cut;
  const struct {
    bool on;
    const char* name;
  } options[] = {{t.left, "_left"},
                 {t.right, "_right"},
                 {t.ragged, "_ragged"},
                 {t.unscaled, "_unscaled"},
                 {t.softcap, "_softcap"},
                 {t.alibi, "_alibi"},
                 {t.bias == Bias::boolean, "_mask"},
                 {t.bias == Bias::f32, "_bias32"},
                 {t.bias == Bias::element, "_bias"}};
  for (const auto& option : options) {
    if (option.on) name += option.name;
  }
  return name;
}

const char* flag(bool on) { return on ? "true" : "false"; }

template <class Kernel>
std::string translation_unit(const Kernel& t, const char* header, const char* type, const std::string& cut, int ctas) {
  const char* biases[] = {"none", "boolean", "f32", "element"};
  std::string text = say("#include \"", header, "\"\n\nconstexpr ", type, " kTile{\n", "    .head_dim = ", t.head_dim,
                         ", .head_dim_v = ", t.head_dim_v, cut, ",\n    .f16 = ", flag(t.f16),
                         ", .left = ", flag(t.left), ", .right = ", flag(t.right), ", .ragged = ", flag(t.ragged),
                         ", .unscaled = ", flag(t.unscaled), ",\n    .softcap = ", flag(t.softcap),
                         ", .alibi = ", flag(t.alibi), ", .bias = Bias::", biases[static_cast<int>(t.bias)], "};\n\n");
  text += say("extern \"C\" __global__ void ", ctas > 1 ? say("__cluster_dims__(", ctas, ", 1, 1) ") : "",
              "__launch_bounds__(kTile.threads(), 1) forward(const __grid_constant__ ForwardParams p) {\n"
              "  forward<kTile>(p);\n}\n");
  if (t.ragged) {
    text += say("extern \"C\" __global__ void __launch_bounds__(", kScheduleThreads,
                ", 1) schedule(const __grid_constant__ ForwardParams p) {\n  schedule<kTile>(p);\n}\n");
  }
  return text;
}

}  // namespace

uint64_t id_of(const Tile& tile) {
  uint64_t id = 0;
  const auto add = [&id](int value, int bits) { id = id << bits | static_cast<uint64_t>(value); };
  add(tile.blackwell(), 1);
  if (tile.blackwell()) {
    add_options(tile.for_blackwell(), &id);
    add(tile.for_blackwell().fma_pairs, 5);
    add(tile.for_blackwell().pair, 1);
    add(tile.for_blackwell().takes_over, 1);
    return id;
  }
  const ForwardTile& t = tile.for_hopper();
  add_options(t, &id);
  add(t.warpgroups, 3);
  add(t.keys / 16, 5);
  add(t.stages, 4);
  add(t.turns, 1);
  return id;
}

std::string name_of(const Tile& tile) {
  if (tile.blackwell()) {
    const BlackwellTile& t = tile.for_blackwell();
    return name_of(t, say("_", t.tiles(), "x", t.rows_together(), "x", BlackwellTile::keys, "_fma", t.fma_pairs,
                          t.takes_over ? "_takeover" : ""));
  }
  const ForwardTile& t = tile.for_hopper();
  return name_of(t, say("_", t.rows(), "x", t.keys, "x", t.stages, t.turns ? "_turns" : ""));
}

std::string translation_unit(const Tile& tile) {
  if (tile.blackwell()) {
    const BlackwellTile& t = tile.for_blackwell();
    return translation_unit(
        t, "sm100/forward.cuh", "BlackwellTile",
        say(", .fma_pairs = ", t.fma_pairs, ", .pair = ", flag(t.pair), ", .takes_over = ", flag(t.takes_over)),
        t.ctas());
  }
  const ForwardTile& t = tile.for_hopper();
  const std::string needed = say("#define TANDEM_KEYS ", t.keys, "\n#define TANDEM_COLUMNS ", t.head_dim_v, "\n");
  return needed + translation_unit(t, "sm90/forward.cuh", "ForwardTile",
                                   say(", .warpgroups = ", t.warpgroups, ", .keys = ", t.keys, ", .stages = ", t.stages,
                                       ", .turns = ", flag(t.turns)),
                                   1);
}

}  // namespace tandem::plan
