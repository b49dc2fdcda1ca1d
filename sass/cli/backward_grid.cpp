#include "sass/cli/backward_grid.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "plan/forward.h"

namespace tandem::tool {
namespace {

// Properties of a kernel that determine how far a block computes ahead while the dq of an iteration waits for its turn.
struct Adder {
  // True if tensor memory is free before the turn, because registers hold all of dq. Otherwise it is free after the
  // turn.
  bool taken_before_turn = false;
  // True if the next iteration needs the slot only for its dq. Otherwise the iteration starts when the slot is free.
  bool next_goes_on = false;
  // True if a block waits for the thread that adds the previous dq.
  bool waits_for_adder = false;
};

Adder adder_of(const plan::BackwardKernel& tile) {
  if (const auto* const blackwell = std::get_if<Sm100BackwardConfig>(&tile.kernel))
    return {.taken_before_turn = blackwell->dq_columns() <= blackwell->dq_loaded_columns(),
            .next_goes_on = blackwell->dq_has_place(),
            .waits_for_adder = true};
  return {.next_goes_on = tile.for_hopper().staged()};
}

struct Tile {
  int n_block, head;
  bool from_first_m_block;
};

// Lists the tiles in the order of device/n_block_work.cuh.
std::vector<Tile> tiles_of(const plan::BackwardSchedule& t, int heads) {
  std::vector<Tile> tiles;
  const auto group = [&](int first_head, int count, bool falls) {
    for (int from_begin = 0; from_begin < t.n_blocks; ++from_begin)
      for (int head = first_head; head < first_head + count; ++head)
        tiles.push_back({falls ? t.n_blocks - 1 - from_begin : from_begin, head, falls});
  };
  int head = 0;
  if (t.tile.spt) {
    for (; head < t.spt_heads; ++head) group(head, 1, true);
    if (head < heads) group(head, heads - head, false);
  } else {
    for (; head < heads; head += t.l2_heads) group(head, std::min(t.l2_heads, heads - head), false);
  }
  return tiles;
}

// The iterations of a tile in sequence, in one block or one pair of blocks.
class Play {
 public:
  Play(const Adder& adder, double step, const HandOver& hand_over, bool turns)
      : adder_(adder), step_(step), hand_over_(hand_over), turns_(turns) {}

  void begin(double at) { computed_ = at, place_free_ = added_ = 0; }
  // visible: the time at which this n_block sees that the previous n_block has added to the same dq. Returns that time
  // for the next n_block.
  double take(double visible) {
    computed_ =
        adder_.next_goes_on ? std::max(computed_ + step_, place_free_) : std::max(computed_, place_free_) + step_;
    const double free = adder_.waits_for_adder ? std::max(computed_, added_) : computed_;
    const double turn = turns_ ? std::max(free, visible) : free;
    place_free_ = adder_.taken_before_turn ? free : turn;
    added_ = turn + hand_over_.busy;
    return turn + hand_over_.adds + hand_over_.visible;
  }
  double end() const { return computed_; }

 private:
  const Adder adder_;
  const double step_;
  const HandOver hand_over_;
  const bool turns_;
  double computed_ = 0, place_free_ = 0, added_ = 0;
};

}  // namespace

double adding_clocks(const plan::BackwardKernel& tile) {
  // Bytes of dq per additional clock of an iteration (sass/docs/clocks.md).
  constexpr double from_registers = 36, by_copies = 78;
  if (std::holds_alternative<Sm100BackwardConfig>(tile.kernel) || tile.for_hopper().ds_gmem()) return 0;
  const double bytes = 4.0 * tile.tile_m * tile.head_dim / tile.ctas;
  return bytes / (tile.for_hopper().staged() ? by_copies : from_registers);
}

std::optional<Waiting> waiting_of(const Problem& p, const plan::BackwardSchedule& t, double step,
                                  const HandOver& hand_over) {
  const bool split_q_heads = t.tile.dkv_semaphores > 0;
  if (plan::varlen(p) || t.tile.block_mask || t.tile.two_pass || t.tile.single_n_block || t.tiles == 0)
    return std::nullopt;
  if (t.m_splits > 1 && !split_q_heads) return std::nullopt;
  const int parts = split_q_heads ? t.m_splits : 1, m_blocks = t.sequence_m_blocks;
  const int heads = static_cast<int>(p.batch * p.heads_k * parts), group = static_cast<int>(p.group() / parts);

  // The first and the last n_block that each m_block sees.
  std::vector<std::pair<int, int>> seen(static_cast<size_t>(m_blocks));
  const Sequence sequence = sequence_of(p, 0);
  for (int m = 0; m < m_blocks; ++m) {
    const int64_t first = int64_t{m} * t.tile.tile_m, last = std::min(first + t.tile.tile_m, p.seqlen_q) - 1;
    seen[m] = {visible_keys(p, sequence, first).begin / t.tile.tile_n,
               (visible_keys(p, sequence, last).end - 1) / t.tile.tile_n};
  }
  const auto play = [&](bool turns) {
    Waiting all;
    std::vector<double> visible(static_cast<size_t>(heads) * group * m_blocks);
    // the time at which each block takes its next tile
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int n = 0; n < t.grid / t.tile.ctas; ++n) free.push(0);
    Play block(adder_of(t.tile), step, hand_over, turns);
    // A tile waits only for earlier tiles, and the end of each earlier tile is known.
    for (const Tile& tile : tiles_of(t, heads)) {
      std::vector<std::pair<int, int>> steps;  // m_block, head of the group
      for (int i = 0; i < m_blocks; ++i) {
        const int m = tile.from_first_m_block ? i : m_blocks - 1 - i;
        if (seen[m].first > tile.n_block || seen[m].second < tile.n_block) continue;
        for (int head = 0; head < group; ++head) steps.emplace_back(m, head);
      }
      if (plan::needs_left_mask(p)) std::ranges::stable_sort(steps, {}, &std::pair<int, int>::second);
      block.begin(free.top() + hand_over.tile);
      free.pop();
      for (const auto& [m, head] : steps) {
        double& of_m_block = visible[(static_cast<size_t>(tile.head) * group + head) * m_blocks + m];
        of_m_block = block.take(of_m_block);
      }
      all.steps += static_cast<int64_t>(steps.size());
      all.clocks = std::max(all.clocks, block.end());
      free.push(block.end());
    }
    return all;
  };
  Waiting waiting = play(true);
  waiting.without_turns = play(false).clocks;
  return waiting;
}

}  // namespace tandem::tool
