// The stores of a backward's launches (stores.h).
#include <algorithm>

#include "problem/bound_expression.h"
#include "unit/plan/stores.h"

namespace tandem::test {
namespace {

constexpr int64_t kFloat = 4, kInt = 4;

// The kernels' own names: a configuration T, parameters p, a sequence s.
template <class Config>
class BackwardStores {
 public:
  BackwardStores(const Config& config, BackwardParams* params, StoreRanges* ranges)
      : t(&config), p(*params), ranges_(*ranges), counter_(p.counter) {
    p.counter = counters_;  // read by the address functions
  }
  ~BackwardStores() { p.counter = counter_; }
  BackwardStores(const BackwardStores&) = delete;

  void preprocess() {
    ranges_.store("workspace.counter", counter_, 0, kBackwardCounters * kInt);
    if (splits_q_heads(t)) ranges_.store("workspace.dkv_semaphore", p.dkv_semaphore, 0, p.dkv_semaphore_count * kInt);
    if (uses_ds_gmem(t) && p.ds_semaphore_count > 0)
      ranges_.store("workspace.ds_semaphore", p.ds_semaphore, 0, p.ds_semaphore_count * kInt);
    for_extremes(int64_t{p.heads_q} * p.m_blocks, [&](int64_t block) {
      for_extremes(dq_splits(t, p), [&](int64_t split) {
        const int64_t at = dq_block_at(t, p, block, static_cast<int>(split));
        ranges_.store("workspace.dq_semaphore", p.dq_semaphore, dq_semaphore_at(t, at, 0) * kInt,
                      t->dq_semaphores() * kInt);
      });
      ranges_.store("workspace.lse_delta", p.lse_delta, lse_delta_at(t, block) * kFloat, 2 * t->tile_m * kFloat);
      const int64_t parts = t->preprocess_ctas();
      if (p.dsink) ranges_.store("workspace.dsink", p.dsink_parts, block * parts * kFloat, parts * kFloat);
      if (!p.dout_rounded) return;
      const int of_head = static_cast<int>(block % p.m_blocks), head = static_cast<int>(block / p.m_blocks);
      const SequenceCoords s = sequence_coords(t, p, sequence_at(t, p, of_head));
      const int first = (of_head - s.first_m_block) * t->tile_m;
      for (const int query : {first, std::min(first + t->tile_m, s.q_rows) - 1}) {
        if (query < first || query >= s.q_rows) continue;
        ranges_.store("workspace.dout", p.dout_rounded,
                      16 * rounded_dout_at(p, s, s.q_begin + query, head, p.head_dim_v / 8 - 1), 16);
      }
    });
  }

  // All tiles of all launches, of which each has a chunk of dS.
  void main(int64_t chunks) {
    for_extremes(chunks, [&](int64_t chunk) {
      counters_[1] = static_cast<int>(chunk);
      for_extremes(launch_tiles(t, p), [&](int64_t n) { main_tile(n_block_work_at(t, p, static_cast<int>(n))); });
    });
  }

  // The kernel that computes dq of a chunk.
  void dq(int64_t chunks) {
    for_extremes(chunks, [&](int64_t number) {
      counters_[1] = static_cast<int>(number);
      const DsChunk chunk(p);
      if constexpr (requires { t->chunks_span_batch(); }) {
        dq_of_batch(chunk);
        return;
      }
      for_extremes(chunk.heads, [&](int64_t n) {
        const int of_all = chunk.first_head + static_cast<int>(n), head = of_all % p.heads_q;
        const SequenceCoords s = sequence_coords(t, p, of_all / p.heads_q);
        for_extremes(p.sequence_m_blocks, [&](int64_t i) {
          const int m_block = static_cast<int>(i);
          const int64_t at = m_block_at(p, s, head, m_block);
          if constexpr (requires { t->max_dq_sum_n_blocks(); }) {
            if (count_n_blocks(t, p, s, m_block) > p.dq_sum_n_blocks) {
              ranges_.store("workspace.dq_accum", p.dq_accum, dq_sums_at(t, at) * kFloat, t->dq_floats() * kFloat);
              ranges_.store("workspace.dq_semaphore", p.dq_semaphore, dq_semaphore_at(t, at, 0) * kInt, kInt);
            }
          }
          dq_rows(s, head, m_block);
        });
      });
    });
  }

  void postprocess() {
    if (p.dq && !has_single_n_block(t) && !uses_ds_gmem(t)) {
      for_extremes(int64_t{p.heads_q} * p.m_blocks, [&](int64_t block) {
        const int of_head = static_cast<int>(block % p.m_blocks), head = static_cast<int>(block / p.m_blocks);
        const SequenceCoords s = sequence_coords(t, p, sequence_at(t, p, of_head));
        dq_rows(s, head, of_head - s.first_m_block);
      });
    }
    if (!t->m_split) return;
    for_extremes(p.batch, [&](int64_t sequence) {
      for_extremes(p.heads_k, [&](int64_t head) {
        for_extremes(p.n_blocks * t->ctas(), [&](int64_t n_block) {
          const SequenceCoords s = sequence_coords(t, p, static_cast<int>(sequence));
          dkv_rows(s, static_cast<int>(head), static_cast<int>(n_block));
        });
      });
    });
  }

  void dsink() {
    for_extremes(p.heads_q, [&](int64_t head) {
      const int64_t bytes = p.dsink_is_f32 ? 4 : 2;
      ranges_.store("dsink", p.dsink, head * p.dsink_head * bytes, bytes);
    });
  }

  void dbias() {
    const int64_t bytes = p.dbias_is_f32 ? 4 : 2;
    for (const int batch : {0, p.dbias_batches - 1})
      for (const int head : {0, p.dbias_heads - 1})
        for (const int query : {0, p.dbias_rows - 1})
          for (const int key : {0, p.dbias_columns - 1})
            ranges_.store("dbias", p.dbias, dbias_at(p, batch, head, query, key) * bytes, bytes);
  }

  void list_n_blocks() {
    const auto& masked = static_cast<const BlockMaskedBackwardParams&>(p);
    const int64_t rows = int64_t{masked.blocks.batch} * masked.blocks.heads * p.sequence_m_blocks;
    for_extremes(rows, [&](int64_t row) {
      ranges_.store("workspace.table", masked.table, table_row_at(p, row) * kInt, p.n_blocks * kInt);
    });
  }

  // A list has its length, every m_block of a group's heads, and a last 0.
  void list_m_blocks() {
    const auto& masked = static_cast<const BlockMaskedBackwardParams&>(p);
    const int64_t most = 2 + int64_t{p.heads_q} / p.heads_k * p.sequence_m_blocks;
    for_extremes(int64_t{p.batch} * p.heads_k * p.n_blocks, [&](int64_t n) {
      ranges_.store("workspace.steps", masked.blocks.steps, m_block_list_at(masked.blocks, n) * kInt, most * kInt);
    });
  }

  void captured() {
    const CapturedParams& captured = static_cast<const ModifiedBackwardParams&>(p).captured;
    for (const int word : {0, kDigits}) {
      for_extremes(captured.cells, [&](int64_t cell) {
        ranges_.store("workspace.captured", captured.words, captured_word_at(captured, word, cell) * 8, 8);
      });
    }
  }

  void postprocess_captured() {
    const auto& modified = static_cast<const ModifiedBackwardParams&>(p);
    for (int n = 0; n < kModTensors; ++n) {
      const CapturedTensor& to = modified.captured.tensors[n];
      if (to.first < 0 || to.count == 0) continue;
      const int64_t bytes = to.element == ModElement::f64 ? 8 : to.element == ModElement::f32 ? 4 : 2;
      for_extremes(to.count, [&](int64_t rest) {
        const int64_t at = captured_element_at(modified.mods.score.tensors[n], to, rest);
        ranges_.store("gradient", to.gradient, at * bytes, bytes);
      });
    }
  }

 private:
  // The kernel of dq whose chunks have heads of all sequences.
  void dq_of_batch(const DsChunk& chunk) {
    for_extremes(chunk.heads, [&](int64_t n) {
      const int head = chunk.first_head + static_cast<int>(n);
      for_extremes(p.m_blocks, [&](int64_t block) {
        const SequenceCoords s = sequence_coords(t, p, sequence_at(t, p, static_cast<int>(block)));
        const int m_block = static_cast<int>(block) - s.first_m_block;
        const DqChunkSum sum(t, p, s, chunk, m_block);
        if (!sum.exists) return;
        if (sum.is_last) {
          dq_rows(s, head, m_block);
        } else {
          ranges_.store("workspace.dq_accum", p.dq_accum, dq_sums_at(t, m_block_at(p, s, head, m_block)) * kFloat,
                        t->dq_floats() * kFloat);
        }
      });
    });
  }

  void main_tile(const NBlockWork& tile) {
    const SequenceCoords s = sequence_coords(t, p, tile.sequence);
    if (t->options.varlen && tile.n_block * t->tile_n() >= s.k_rows) return;  // skip_empty_tiles()
    const int begin = t->options.block_mask ? 0 : tile.m_begin;
    const int count = (t->options.block_mask ? p.sequence_m_blocks : tile.m_end) - begin;
    int first = 0, heads = 0;
    set_query_heads(t, p, tile, &first, &heads);
    for_extremes(heads, [&](int64_t n) {
      if (uses_ds_gmem(t) && p.ds_semaphore_count > 0) {
        const int64_t at = ds_semaphore_at(p, s, first + static_cast<int>(n), tile.n_block);
        ranges_.store("workspace.ds_semaphore", p.ds_semaphore, at * kInt, kInt);
      }
      for_extremes(count,
                   [&](int64_t i) { iteration(tile, s, first + static_cast<int>(n), begin + static_cast<int>(i)); });
    });
    for (int cta = 0; cta < t->ctas(); ++cta) {
      if constexpr (requires { t->dkv_floats(); }) {
        if (t->m_split && (t->split_q_heads || tile.split_block >= 0)) {
          sums(tile, cta);
          continue;
        }
      }
      dkv_rows(s, tile.head_k, tile.n_block * t->ctas() + cta);
    }
  }

  void iteration(const NBlockWork& tile, const SequenceCoords& s, int head, int m_block) {
    if (t->options.block_mask && !is_listed(tile, s, m_block)) return;
    int64_t at = m_block_at(p, s, head, m_block);
    if constexpr (requires { t->ds_gmem(); }) {
      const int64_t bytes = int64_t{2} * cta_keys() * t->tile_m;
      if (t->ds_gmem() && p.ds)
        ranges_.store("workspace.ds", p.ds, 2 * ds_at(t, p, s, DsChunk(p), {head, m_block, tile.n_block}), bytes);
      if (t->ds_gmem()) return;
    }
    if (has_single_n_block(t)) {
      if (p.dq) dq_rows(s, head, m_block);
      return;
    }
    if constexpr (requires { t->dq_parts(); }) {
      const int split = dq_split_of(t, p, tile, WrappedPlace(t, p, head, m_block));
      at = dq_block_at(t, p, at, split);
      for (int part = 0; part < t->dq_semaphores(); ++part) {
        ranges_.store("workspace.dq_semaphore", p.dq_semaphore, dq_semaphore_at(t, at, part) * kInt, kInt);
        ranges_.store("workspace.dq_accum", p.dq_accum, (dq_sums_at(t, at) + dq_part_at(t, part)) * kFloat,
                      t->dq_part_floats() * kFloat);
      }
    } else {
      for (int cta = 0; cta < t->ctas(); ++cta) {
        ranges_.store("workspace.dq_semaphore", p.dq_semaphore, dq_semaphore_at(t, at, cta) * kInt, kInt);
        for (const int column : {0, t->dq_columns() - t->dq_part_columns()})
          ranges_.store("workspace.dq_accum", dq_of_cta(t, p, at, cta), dq_column_at(t, column) * kFloat,
                        t->dq_part_floats() * kFloat);
      }
    }
  }

  // Returns true if a block mask's table may have the pair: the queries exist, and a window does not hide all keys.
  bool is_listed(const NBlockWork& tile, const SequenceCoords& s, int m_block) const {
    if (m_block * t->tile_m >= s.q_len) return false;
    const int first = first_n_block(t, p, s, m_block);
    return tile.n_block >= first && tile.n_block < first + count_n_blocks(t, p, s, m_block);
  }

  // dk and dv of a split of one CTA's n_block, in the order of the threads' fragments.
  void sums(const NBlockWork& tile, int cta) {
    if constexpr (requires { t->dkv_floats(); }) {
      const int64_t block = dkv_block_at(t, p, tile, static_cast<unsigned>(cta));
      for (const bool of_k : {true, false}) {
        if (!(of_k ? p.has_dk : p.has_dv)) continue;
        const int floats = (of_k ? t->dk_columns() : t->dv_columns()) / 2;  // per thread, of 64 keys
        const int64_t first = dkv_sums_at(t, p, block, tile.m_split_idx) + dkv_part_at(t, of_k);
        for (const int part : {0, t->dkv_parts() - 1}) {
          ranges_.store("workspace.dkv_accum", p.dkv_accum,
                        (first + 4 * int64_t{fragment_at(floats, 128, part, 0)}) * kFloat, 128 * floats * kFloat);
          if (!t->split_q_heads) continue;
          ranges_.store("workspace.dkv_semaphore", p.dkv_semaphore,
                        (dkv_semaphores_at(t, block) + dkv_semaphore_at(part, of_k)) * kInt, kInt);
        }
      }
    }
  }

  // An m_block's rows of dq in the caller's tensor.
  void dq_rows(const SequenceCoords& s, int head, int m_block) {
    const int first = m_block * t->tile_m, rows = p.accumulate ? s.q_len : s.q_rows;
    const int64_t bytes = p.dq_is_f32 ? 4 : 2;
    for (const int query : {first, std::min(first + t->tile_m, rows) - 1}) {
      if (query < first || query >= rows) continue;
      ranges_.store("dq", p.dq, dq_row_at(p, s.batch, s.q_begin + query, head) * bytes, p.head_dim * bytes);
    }
  }

  // A CTA's rows of dk and dv in the caller's tensors.
  void dkv_rows(const SequenceCoords& s, int head, int n_block) {
    const int first = n_block * cta_keys(), rows = p.accumulate ? s.k_len : s.k_rows;
    for (const bool of_k : {true, false}) {
      if (!(of_k ? p.has_dk : p.has_dv)) continue;
      const int64_t bytes = (of_k ? p.dk_is_f32 : p.dv_is_f32) ? 4 : 2;
      for (const int key : {first, std::min(first + cta_keys(), rows) - 1}) {
        if (key < first || key >= rows) continue;
        ranges_.store(of_k ? "dk" : "dv", of_k ? p.dk_data : p.dv_data,
                      dkv_row_at(p, of_k, s.batch, s.k_begin + key, head) * bytes,
                      (of_k ? p.head_dim : p.head_dim_v) * bytes);
      }
    }
  }

  int cta_keys() const { return t->tile_n() / t->ctas(); }

  const Config* const t;
  BackwardParams& p;
  StoreRanges& ranges_;
  int* const counter_;
  int counters_[kBackwardCounters] = {};
};

template <class Config>
void walk(const Problem& p, const Config& config, const plan::Plan& plan, const plan::Arguments& arguments,
          StoreRanges* ranges) {
  for (size_t n = 0; n < plan.launches.size(); ++n) {
    const plan::PlannedLaunch& launch = plan.launches[n];
    auto* const params = static_cast<BackwardParams*>(arguments.of_kernel(launch.kernel));
    ranges->set_tensors(plan.pass->tensors_of(p, plan, n));
    BackwardStores<Config> stores(config, params, ranges);
    switch (launch.entry) {
      case plan::EntryId::preprocess: stores.preprocess(); break;
      case plan::EntryId::main: stores.main(plan.backward.ds_chunks); break;
      case plan::EntryId::dq: stores.dq(plan.backward.ds_chunks); break;
      case plan::EntryId::postprocess: stores.postprocess(); break;
      case plan::EntryId::dsink: stores.dsink(); break;
      case plan::EntryId::dbias: stores.dbias(); break;
      case plan::EntryId::captured: stores.captured(); break;
      case plan::EntryId::postprocess_captured: stores.postprocess_captured(); break;
      case plan::EntryId::mark_n_blocks: stores.list_n_blocks(); break;
      case plan::EntryId::list_m_blocks: stores.list_m_blocks(); break;
      default: FAIL() << "a launch without a walk";
    }
    if (!ranges->ok()) return;
  }
}

}  // namespace

void walk_backward(const Problem& p, const plan::Plan& plan, const plan::Arguments& arguments, StoreRanges* ranges) {
  const plan::Configuration& kernel = plan.backward.tile.kernel;
  if (const auto* config = std::get_if<Sm90BackwardConfig>(&kernel)) walk(p, *config, plan, arguments, ranges);
  if (const auto* config = std::get_if<Sm100BackwardConfig>(&kernel)) walk(p, *config, plan, arguments, ranges);
}

}  // namespace tandem::test
