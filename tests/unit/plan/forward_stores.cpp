// The stores of a forward's launches (stores.h), and the tensors that TMA stores.
#include <algorithm>

#include "unit/plan/stores.h"

namespace tandem::test {
namespace {

constexpr int64_t kFloat = 4, kInt = 4;

template <class Config>
class ForwardStores {
 public:
  ForwardStores(const Problem& problem, const Config& config, const ForwardParams& params, StoreRanges* ranges)
      : problem_(problem), t(&config), p(params), ranges_(*ranges) {}

  void main() {
    if (p.counter) ranges_.store("workspace.counter", p.counter, 0, kInt);
    for_each_tile([&](const TileCoords& tile, int row) {
      const int query = row / p.pack_gqa, head = tile.head * p.pack_gqa + row % p.pack_gqa;
      const int64_t bytes = t->split_keys ? kFloat : size_of(problem_.out.dtype);
      for (const int split : {0, t->split_keys ? p.split.count - 1 : 0}) {
        const TileCoords to = split_coords(t, p, tile, split);
        ranges_.store(t->split_keys ? "workspace.split_out" : "out", p.out_data, out_row_at(p, to, query, head) * bytes,
                      p.head_dim_v * bytes);
        if (p.lse)
          ranges_.store(t->split_keys ? "workspace.split_lse" : "lse", p.lse, lse_at(p, to, query, head) * kFloat,
                        kFloat);
      }
    });
    const SplitParams& split = p.split;
    if (split.row_out == nullptr) return;
    for_extremes(p.batch, [&](int64_t n) {
      const TileCoords sequence = varlen_coords(p, static_cast<int>(n));
      const int64_t splits = splits_of(sequence);
      if (splits == 1) return;
      const int64_t first = split_result_at(p, first_split_row(split, sequence.sequence), 0, 0);
      const int64_t results = splits * sequence.q_len * p.heads_q;
      ranges_.store("workspace.split_out", split.row_out, first * p.head_dim_v * kFloat,
                    results * p.head_dim_v * kFloat);
      ranges_.store("workspace.split_lse", split.row_lse, first * kFloat, results * kFloat);
    });
  }

  void combine_splits() {
    const SplitParams& split = p.split;
    if (t->device_splits) return combine_device_splits();
    const int64_t bytes = size_of(problem_.out.dtype), rows = problem_.packed_q() ? problem_.total_q : p.seqlen_q;
    for_extremes(split.batches * rows * p.heads_q, [&](int64_t n) {
      const ResultRow row{n, rows, p.heads_q};
      ranges_.store("out", split.out, combined_out_at(split, row) * bytes, p.head_dim_v * bytes);
      if (split.lse) ranges_.store("lse", split.lse, combined_lse_at(split, row) * kFloat, kFloat);
    });
  }

  void max_scores() {
    const MaxScoresParams& m = p.max_scores;
    for_each_tile([&](const TileCoords& tile, int row) {
      const int query = row / p.pack_gqa, head = tile.head * p.pack_gqa + row % p.pack_gqa;
      ranges_.store("max_scores", m.data, max_scores_at(m, tile, query, head) * kFloat, kFloat);
    });
  }

  void schedule() {
    ranges_.store("workspace.counter", p.counter, 0, kForwardCounters * kInt);
    ranges_.store("workspace.tile_list", p.tile_list, 0, listed_tiles() * int64_t{sizeof(ListedTile)});
  }

  // A list has its header, at most all n_blocks or one that hides all, and a last 0.
  void list_n_blocks() {
    const BlockMaskParams& blocks = static_cast<const BlockMaskedForwardParams&>(p).blocks;
    if (t->overlaps_launches() && !t->options.varlen && p.counter)
      ranges_.store("workspace.counter", p.counter, 0, kInt);
    const int n_blocks = std::max(1, (p.seqlen_k + t->tile_n - 1) / t->tile_n);
    for (const int batch : {0, blocks.batch - 1})
      for (const int head : {0, blocks.heads - 1})
        for_extremes(blocks.m_blocks, [&](int64_t m_block) {
          ranges_.store("workspace.steps", blocks.steps,
                        tile_list_at(blocks, batch, head, static_cast<int>(m_block)) * kInt,
                        (kListHeader + n_blocks + 1) * kInt);
        });
  }

  void order_tiles() {
    const BlockMaskParams& blocks = static_cast<const BlockMaskedForwardParams&>(p).blocks;
    for_extremes(int64_t{blocks.batch} * blocks.heads, [&](int64_t list) {
      for (const int place : {0, blocks.m_blocks - 1})
        ranges_.store("workspace.order", blocks.order, tile_order_at(blocks, static_cast<int>(list), place) * kInt,
                      kInt);
    });
  }

 private:
  // The splits that schedule() makes of a sequence.
  int64_t splits_of(const TileCoords& sequence) const {
    if (p.split.count <= 1 || sequence.q_len == 0 || sequence.q_len > p.split.max_queries) return 1;
    const int64_t keys = int64_t{split_n_blocks(t, p.split, sequence.k_len)} * t->tile_n;
    const KeyRange seen = visible_keys(t, p, sequence, 0, sequence.q_len - 1);
    const int64_t end = std::max(1, seen.end), begin = std::clamp<int64_t>(seen.begin, 0, end - 1);
    const int64_t splits = (end - 1) / keys - begin / keys + 1;
    EXPECT_LE(splits, p.split.count);
    return splits;
  }
  // The entries of the list, for the lengths of the problem.
  int64_t listed_tiles() const {
    if (!t->device_splits) return p.m_blocks;
    int64_t tiles = 0;
    for (int sequence = 0; sequence < p.batch; ++sequence) {
      const TileCoords coords = varlen_coords(p, sequence);
      tiles += (int64_t{coords.q_rows} * p.pack_gqa + t->tile_m() - 1) / t->tile_m() + splits_of(coords) - 1;
    }
    EXPECT_LE(tiles, p.m_blocks);
    return tiles;
  }
  void combine_device_splits() {
    const int64_t bytes = size_of(problem_.out.dtype);
    for_extremes(int64_t{p.batch} * p.split.queries * p.heads_q, [&](int64_t n) {
      const ResultRow row{n, p.split.queries, p.heads_q};
      const TileCoords sequence = varlen_coords(p, static_cast<int>(row.batch));
      if (row.row >= sequence.q_rows) return;
      const auto query = static_cast<int>(row.row);
      ranges_.store("out", p.out_data, out_row_at(p, sequence, query, row.head) * bytes, p.head_dim_v * bytes);
      if (p.lse) ranges_.store("lse", p.lse, lse_at(p, sequence, query, row.head) * kFloat, kFloat);
    });
  }
  // Calls visit(tile, row) for the first and last row of a tile.
  template <class Visit>
  void visit_rows(const TileCoords& tile, const Visit& visit) const {
    const int first = tile.m_block * t->tile_m(), end = std::min(first + t->tile_m(), tile.q_rows * p.pack_gqa);
    if (first >= end) return;
    visit(tile, first);
    visit(tile, end - 1);
  }
  // And of some tiles.
  template <class Visit>
  void for_each_tile(const Visit& visit) const {
    const int heads = p.heads_q / p.pack_gqa;
    if (t->options.varlen) return for_each_listed(heads, visit);
    if (!t->options.block_mask) {
      for_extremes(p.tiles, [&](int64_t n) {
        visit_rows(dense_coords(t, p, heads, tile_of_work(t, p, static_cast<int>(n))), visit);
      });
      return;
    }
    // Block masks: in any order.
    for_extremes(int64_t{p.batch} * heads * p.m_blocks, [&](int64_t n) {
      TileCoords tile{};
      tile.m_block = static_cast<int>(n % p.m_blocks);
      tile.head = static_cast<int>(n / p.m_blocks % heads);
      tile.sequence = tile.batch = static_cast<int>(n / p.m_blocks / heads);
      tile.q_rows = tile.q_len = p.seqlen_q;
      visit_rows(tile, visit);
    });
  }
  template <class Visit>
  void for_each_listed(int heads, const Visit& visit) const {
    for_extremes(p.batch, [&](int64_t sequence) {
      TileCoords tile = varlen_coords(p, static_cast<int>(sequence));
      const int tiles = (tile.q_rows * p.pack_gqa + t->tile_m() - 1) / t->tile_m();
      for (const int head : {0, heads - 1}) {
        tile.head = head;
        for_extremes(tiles, [&](int64_t m_block) {
          tile.m_block = static_cast<int>(m_block);
          visit_rows(tile, visit);
        });
      }
    });
  }

  const Problem& problem_;
  const Config* const t;
  const ForwardParams& p;
  StoreRanges& ranges_;
};

template <class Config>
void walk(const Problem& p, const Config& config, const plan::Plan& plan, const plan::Arguments& arguments,
          StoreRanges* ranges) {
  for (size_t n = 0; n < plan.launches.size(); ++n) {
    const plan::PlannedLaunch& launch = plan.launches[n];
    const auto& params = *static_cast<const ForwardParams*>(arguments.of_kernel(launch.kernel));
    ranges->set_tensors(plan.pass->tensors_of(p, plan, n));
    ForwardStores<Config> stores(p, config, params, ranges);
    switch (launch.entry) {
      case plan::EntryId::main: stores.main(); break;
      case plan::EntryId::combine_splits: stores.combine_splits(); break;
      case plan::EntryId::max_scores: stores.max_scores(); break;
      case plan::EntryId::schedule: stores.schedule(); break;
      case plan::EntryId::list_n_blocks: stores.list_n_blocks(); break;
      case plan::EntryId::order_tiles: stores.order_tiles(); break;
      default: FAIL() << "a launch without a walk";
    }
    if (!ranges->ok()) return;
  }
}

}  // namespace

void walk_forward(const Problem& p, const plan::Plan& plan, const plan::Arguments& arguments, StoreRanges* ranges) {
  const plan::Configuration& kernel = plan.forward.tile.kernel;
  if (const auto* config = std::get_if<Sm90ForwardConfig>(&kernel)) walk(p, *config, plan, arguments, ranges);
  if (const auto* config = std::get_if<Sm100ForwardConfig>(&kernel)) walk(p, *config, plan, arguments, ranges);
}

void walk_maps(const plan::Arguments& arguments, const std::vector<gpu::NamedBuffer>& tensors, StoreRanges* ranges) {
  ranges->set_tensors(tensors);
  for (const plan::Arguments::Map& map : arguments.maps()) {
    const gpu::TensorMapSpec& spec = map.spec;
    const auto named = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const gpu::NamedBuffer& t) { return t.address == spec.address; });
    if (named == tensors.end() || !named->writable) continue;
    const int64_t element = spec.type == gpu::TensorType::f32 ? 4 : 2;
    int64_t last = 0;
    for (int i = 0; i < spec.rank; ++i) {
      const int64_t stride = i == 0 ? element : static_cast<int64_t>(spec.byte_strides[i]);
      if (spec.dims[i] == 0) return;
      last += static_cast<int64_t>(spec.dims[i] - 1) * (spec.dims[i] == 1 ? 0 : stride);
    }
    ranges->store(named->name, spec.address, 0, last + element);
  }
}

}  // namespace tandem::test
