// The state of an MMA warpgroup of the Hopper backward: the current tile's keys and visible queries, its iteration, and
// its rings.
//
// These structs hold only numbers and references. Arrays that products write are locals of the functions with the loops
// (mainloop_*.cuh). The order of these computations affects the machine code of the loop.
#pragma once
#include "device/dropout.cuh"
#include "device/fragment_softmax.cuh"
#include "device/mod_functions.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/operands.cuh"
#include "sm90/backward/smem.cuh"

// True if a warpgroup needs the head and sequence of an iteration.
template <Sm90BackwardConfig T>
constexpr bool kKnowsHead = T.has_score_mod() || T.options.dropout;

// True if the visible keys depend on the query. If not, the loop of an MMA warpgroup need not know its m_block.
template <Sm90BackwardConfig T>
constexpr bool kHasBand = T.options.bounded_left || T.options.bounded_right;

// Constants of all tiles: the indices of the warpgroup and of the thread.
template <Sm90BackwardConfig T>
struct WarpgroupThread {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int group;        // query heads per key head
  const int index, rank;  // warpgroup in the CTA, CTA in the pair
  // The warpgroup's keys, or its columns of dk and dv if all warpgroups share the keys. Row bytes count 64 columns.
  const u32 own_keys;
  Dropout dropout;

  TANDEM_DEVICE WarpgroupThread(const BackwardParams& p, int warpgroup)
      : group(p.heads_q / p.heads_k),
        index(warpgroup),
        rank(cta_rank<T>()),
        own_keys(T.shared_p() ? 0 : index * 64 * 128) {
    if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
  }
  TANDEM_DEVICE u32 own_columns(int columns) const {
    const int first = T.shared_p() ? index * columns : 0;
    return first / 64 * kQueryBlockBytes<T> + first % 64 * 2;
  }
};

// State that continues over tiles.
template <Sm90BackwardConfig T>
struct WarpgroupRings {
  PipelineState<T.q_stages> q_next, q;  // queries of the next scores, of the next dk
  PipelineState<T.dout_stages> dout;
  u32 steps = 0;                   // completed iterations
  int ds_slot = 1, ds_before = 0;  // dS slots of this and the previous iteration
};

// The iterations of a tile in the order of MBlockIterator, with numbers in uniform registers. Only needed values are
// computed: heads count from 0 if an iteration does not need the real one.
template <Sm90BackwardConfig T>
struct WarpgroupSteps {
  int m_block, head, count;

  TANDEM_DEVICE WarpgroupSteps(const BackwardParams& p, const NBlockWork& tile, int group, int m_begin, int m_end)
      : m_begin_(m_begin),
        m_end_(m_end),
        heads_(group),
        first_head_(kKnowsHead<T> ? warp_uniform(tile.head_k) * group : 0),
        listed_(p, tile) {
    m_block = m_end_ - 1;
    if (spt<T>() && warp_uniform(tile.diagonal)) m_block = m_begin_, next_ = 1;
    head = first_head_;
    count = heads_ * (m_end_ - m_begin_);
    if constexpr (T.options.block_mask) {
      count = warp_uniform(listed_.left), m_block = warp_uniform(listed_.m_block), head = warp_uniform(listed_.head);
    } else if constexpr (T.m_split || T.wraps) {
      const MBlockIterator<T> part(p, tile);
      m_block = warp_uniform(part.m_block), count = warp_uniform(part.left), heads_ = warp_uniform(part.heads());
      first_head_ = kKnowsHead<T> ? warp_uniform(part.first_head()) : 0;
      const int from = first_head_ - part.first_head();
      head = warp_uniform(part.head + from);
      if (T.wraps) {
        const Wrap& wrap = part.wrap();
        wrap_ = {warp_uniform(wrap.index), count, warp_uniform(wrap.head + from), warp_uniform(wrap.m_block)};
      }
    }
  }
  TANDEM_DEVICE void advance() {
    if constexpr (T.options.block_mask) {
      listed_.advance();
      m_block = warp_uniform(listed_.m_block), head = warp_uniform(listed_.head);
    } else if constexpr (T.diagonal_parts()) {
      if (++head == first_head_ + heads_) head = first_head_, ++m_block;
    } else if constexpr (spt<T>()) {  // a key head has one query head
      m_block += next_;
    } else if constexpr (T.options.bounded_left) {
      if (--m_block < m_begin_) m_block = m_end_ - 1, ++head;
    } else {
      if (++head == first_head_ + heads_) head = first_head_, --m_block;
      if (T.wraps) wrap_.advance(head, m_block);
    }
  }

 private:
  int m_begin_, m_end_, heads_, first_head_;
  [[maybe_unused]] int next_ = -1;  // m_block
  [[maybe_unused]] Wrap wrap_;
  [[maybe_unused]] SparseOrNone<T> listed_;
};

// The tile from the view of one warpgroup and thread.
template <Sm90BackwardConfig T>
struct WarpgroupTile {
  const BackwardParams& p;
  SharedStorage<T>& s;
  const WarpgroupThread<T>& thread;
  const int cta_pair_n_block, n_block;  // tile of the CTA or pair; tile of the CTA alone
  const SequenceCoords sequence;
  const decltype(band_of<T>(p, sequence)) band;
  int first_query;                   // first query of this or the next iteration's scores
  int key0;                          // first of the thread's two keys
  int unmasked_begin, unmasked_end;  // m_blocks whose queries all see all of the CTA's keys

  TANDEM_DEVICE WarpgroupTile(const BackwardParams& params, SharedStorage<T>& shared, const WarpgroupThread<T>& of,
                              int tile_idx)
      : p(params),
        s(shared),
        thread(of),
        cta_pair_n_block(tile_idx),
        n_block(tile_idx * T.ctas() + of.rank),
        sequence(
            sequence_coords<T>(params, T.options.varlen || kKnowsHead<T> ? warp_uniform(shared.tile.sequence) : 0)),
        band(band_of<T>(params, sequence)),
        first_query(T.shared_p() ? of.index * T.score_queries() : 0) {
    const int last_key = (n_block + 1) * T.cta_keys() - 1;
    const QueryRange unmasked = band.unmasked_queries(n_block * T.cta_keys(), last_key);
    unmasked_begin = T.options.bounded_right ? (max(0, unmasked.begin) + T.tile_m - 1) / T.tile_m : 0;
    if (last_key >= sequence.k_len) unmasked_begin = 1 << 30;
    unmasked_end = T.options.bounded_left ? unmasked.end / T.tile_m : 1 << 30;
    key0 = n_block * T.cta_keys() + (T.shared_p() ? 0 : of.index * 64) + of.warp * 16 + of.lane / 4;
  }

  // The second subtile of an iteration.
  TANDEM_DEVICE WarpgroupTile second_subtile() const {
    WarpgroupTile subtile = *this;
    subtile.first_query = T.score_queries();
    return subtile;
  }

  TANDEM_DEVICE int key(int i) const { return key0 + 8 * i; }
  TANDEM_DEVICE int query_of(int m_block, int r) const {
    return m_block * T.tile_m + first_query + 2 * (thread.lane & 3) + column_of(r);
  }

  TANDEM_DEVICE ModPlace place(int head, int query, int key) const {
    return {sequence.sequence, head, query, key, sequence.q_len, sequence.k_len};
  }

  // The queries that see the thread's i-th key.
  TANDEM_DEVICE QueryRange seen_by(int i) const {
    QueryRange range = band.visible_queries(key(i), key(i));
    if (key(i) >= sequence.k_len) range.begin = range.end = 1 << 29;
    return range;
  }
  TANDEM_DEVICE bool is_masked(int m_block) const {
    if (!kHasBand<T>) return warp_any(unmasked_begin > 0);
    return warp_any(m_block < unmasked_begin || (T.options.bounded_left && m_block >= unmasked_end));
  }

  // All MMA warpgroups must call it together.
  TANDEM_DEVICE void clear(u16* block, int rows, int columns, int used) const {
    zero_tail<T>(block, rows, columns, used, kBarAllMma, 128 * T.warpgroups);
  }
  TANDEM_DEVICE void clear_keys() const {
    clear(s.k, T.cta_keys(), T.head_dim, sequence.k_len - n_block * T.cta_keys());
    clear(s.v, T.cta_keys(), T.head_dim_v, sequence.k_len - n_block * T.cta_keys());
    if constexpr (T.cluster2())
      clear(s.cluster2.k, T.cta_keys(), T.cluster2_columns(), sequence.k_len - (n_block ^ 1) * T.cta_keys());
  }
};
