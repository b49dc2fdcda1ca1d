#include "cpu/mods.h"

#include <algorithm>
#include <cstring>

#include "problem/bound_expression.h"
#include "score_mod/tile.h"

namespace tandem::cpu {
namespace {

using score_mod::kTile;

score_mod::Position sequence_of(const ModTile& tile) {
  const Sequence& s = tile.piece.sequence;
  return {.batch = static_cast<int32_t>(tile.piece.sequence_number),
          .seqlen_q = static_cast<int32_t>(s.q_len),
          .seqlen_k = static_cast<int32_t>(s.k_len)};
}

// Runs a program over a tile, with as many keys per run as fit.
class Run {
 public:
  Run(const ModTile& tile, const BoundExpression& mod, const score_mod::TileProgram& program)
      : tile_(tile), keys_(kTile / tile.lanes), run_(program, mod.values, tile.scratch) {
    for (int64_t i = 0; i < tile.lanes; ++i) {
      query_[i] = static_cast<int32_t>(tile.query[i]);
      head_[i] = static_cast<int32_t>(tile.head[i]);
    }
    const auto bytes = static_cast<size_t>(tile.lanes) * sizeof(int32_t);
    for (int64_t at = tile.lanes; at < kTile; at += tile.lanes) {
      std::memcpy(query_ + at, query_, bytes);
      std::memcpy(head_ + at, head_, bytes);
    }
    run_.begin(sequence_of(tile));
  }

  // Calls use(first key, keys) after each run. scores: null if the text does not contain score.
  template <class Use>
  void each(const float* scores, Use&& use) {
    for (int64_t first = 0; first < tile_.count; first += keys_) {
      const int64_t keys = std::min(keys_, tile_.count - first);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = j * tile_.lanes;
        std::fill_n(key_ + at, tile_.lanes, static_cast<int32_t>(tile_.key + first + j));
        if (scores == nullptr) continue;
        std::memcpy(score_ + at, scores + (first + j) * tile_.stride, static_cast<size_t>(tile_.lanes) * sizeof(float));
      }
      run_.run({.count = static_cast<int>(keys * tile_.lanes),
                .score = score_,
                .head = head_,
                .q = query_,
                .k = key_,
                .same_queries = first > 0});
      use(first, keys);
    }
  }

  const float* reals(size_t output) const { return run_.reals(output).data(); }
  const int32_t* integers(size_t output) const { return run_.integers(output).data(); }

 private:
  const ModTile& tile_;
  const int64_t keys_;
  score_mod::TileRun run_;
  float score_[kTile];
  int32_t query_[kTile], head_[kTile], key_[kTile];
};

// Adds the derivative of lane `at` of a run, times ds, to the gradient of every captured tensor.
void capture(const BoundExpression& mod, const Run& run, int64_t at, float ds, double* table) {
  size_t output = 0;
  for (const score_mod::Capture& capture : mod.program->captures) {
    const size_t derivative = output++;
    int32_t indices[score_mod::kMaxRank];
    for (int i = 0; i < capture.rank; ++i) indices[i] = run.integers(output++)[at];
    const CapturedGradient& gradient = mod.gradients[static_cast<size_t>(capture.tensor)];
    if (gradient.to) table[gradient.cell(indices, capture.rank)] += static_cast<double>(ds) * run.reals(derivative)[at];
  }
}

void capture_tile(const ModTile& tile, int64_t rows, const float* unmodified, const float* dscores, double* table) {
  const BoundExpression& mod = *tile.piece.problem->score_mod.read;
  Run run(tile, mod, mod.program->capture_tiles);
  run.each(unmodified, [&](int64_t first, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t i = 0; i < rows; ++i) {
        const float ds = dscores[(first + j) * tile.stride + i];
        if (ds != 0) capture(mod, run, j * tile.lanes + i, ds, table);
      }
    }
  });
}

}  // namespace

size_t mod_floats(const Problem& p) {
  size_t floats = 0;
  for (const ModView* mod : {&p.score_mod, &p.mask_mod}) {
    if (!*mod) continue;
    const score_mod::Program& program = *(*mod)->program;
    floats = std::max({floats, program.result_tiles.floats(), program.slope_tiles.floats(),
                       (*mod)->cells > 0 ? program.capture_tiles.floats() : 0});
  }
  return floats;
}

namespace {

bool show_by_mod(const ModTile& tile, int32_t* visible) {
  const BoundExpression& mod = *tile.piece.problem->mask_mod.read;
  Run run(tile, mod, mod.program->result_tiles);
  int32_t any = 0;
  run.each(nullptr, [&](int64_t first, int64_t keys) {
    const int32_t* from = run.integers(0);
    int32_t* to = visible + first * tile.lanes;
    for (int64_t i = 0; i < keys * tile.lanes; ++i) any |= to[i] = from[i];
  });
  return any != 0;
}

// Calls use(key of the tile, keys in the same block) for each block of keys.
template <class Use>
void each_block(const ModTile& tile, Use&& use) {
  const int64_t size = tile.piece.problem->block_mask.block_k;
  for (int64_t key = 0; key < tile.count;) {
    const int64_t keys = std::min(size - (tile.key + key) % size, tile.count - key);
    use(key, keys);
    key += keys;
  }
}

BlockState block_state(const ModTile& tile, int64_t lane, int64_t key) {
  const BlockMaskView& mask = tile.piece.problem->block_mask;
  return mask.at(tile.piece.sequence.batch_index, tile.head[lane], tile.query[lane], tile.key + key);
}

// The lanes of a tile that begin a new row of blocks. Every other lane has the states of the lane before it.
struct RowsOfBlocks {
  int64_t count = 0;
  int64_t lane[256];

  explicit RowsOfBlocks(const ModTile& tile) {
    const int64_t size = tile.piece.problem->block_mask.block_q;
    for (int64_t i = 0, begin = 0; i < tile.lanes; ++i) {
      const int64_t query = tile.query[i];
      if (i > 0 && tile.head[i] == tile.head[i - 1] && query >= begin && query - begin < size) continue;
      begin = query / size * size;
      lane[count++] = i;
    }
  }
};

// A full block is visible for any mask_mod, and a partial block is visible without a mask_mod.
ShownKeys show_by_blocks(const ModTile& tile, int32_t* visible) {
  const bool by_mod = tile.piece.problem->mask_mod.present;
  const RowsOfBlocks rows(tile);
  ShownKeys shown{tile.count, 0, true};
  bool any_full = false, any_partial = false, hidden_before = false;
  each_block(tile, [&](int64_t key, int64_t keys) {
    bool any = false, hides = false;
    for (int64_t i = 0; i < rows.count; ++i) {
      const BlockState state = block_state(tile, rows.lane[i], key);
      const bool partial = state == BlockState::partial && by_mod;
      any |= state != BlockState::hidden;
      hides |= state == BlockState::hidden;
      any_partial |= partial;
      any_full |= state != BlockState::hidden && !partial;
    }
    if (!any) {
      hidden_before |= shown.begin < shown.end;
      return;
    }
    shown.all &= !hides && !hidden_before;
    shown.begin = std::min(shown.begin, key);
    shown.end = key + keys;
  });
  const bool any_by_mod = any_partial && show_by_mod(tile, visible);
  if (!any_full && !any_by_mod) return {};
  shown.all &= !any_partial && shown.begin % 2 == 0;
  shown.begin -= shown.begin % 2;
  if (shown.all && shown.begin == 0 && shown.end == tile.count) return shown;
  each_block(tile, [&](int64_t key, int64_t keys) {
    for (int64_t lane = 0; lane < tile.lanes; ++lane) {
      const BlockState state = block_state(tile, lane, key);
      if (state == BlockState::partial && by_mod) continue;
      for (int64_t j = key; j < key + keys; ++j) visible[j * tile.lanes + lane] = state == BlockState::hidden ? 0 : 1;
    }
  });
  return shown;
}

}  // namespace

ShownKeys show_visible(const ModTile& tile, int32_t* visible) {
  if (tile.piece.problem->block_mask) return show_by_blocks(tile, visible);
  return show_by_mod(tile, visible) ? ShownKeys{0, tile.count, false} : ShownKeys{};
}

void modify_scores(const ModTile& tile, float* scores) {
  const BoundExpression& mod = *tile.piece.problem->score_mod.read;
  Run run(tile, mod, mod.program->result_tiles);
  run.each(scores, [&](int64_t first, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      std::memcpy(scores + (first + j) * tile.stride, run.reals(0) + j * tile.lanes,
                  static_cast<size_t>(tile.lanes) * sizeof(float));
    }
  });
}

void modify_gradients(const ModTile& tile, int64_t rows, const float* unmodified, float* dscores, double* captured) {
  if (captured != nullptr) capture_tile(tile, rows, unmodified, dscores, captured);
  const BoundExpression& mod = *tile.piece.problem->score_mod.read;
  if (mod.program->passes()) return;
  Run run(tile, mod, mod.program->slope_tiles);
  run.each(unmodified, [&](int64_t first, int64_t keys) {
    for (int64_t j = 0; j < keys; ++j) {
      const float* slope = run.reals(0) + j * tile.lanes;
      float* ds = dscores + (first + j) * tile.stride;
      for (int64_t i = 0; i < tile.lanes; ++i) ds[i] = ds[i] == 0 ? ds[i] : ds[i] * slope[i];
    }
  });
}

}  // namespace tandem::cpu
