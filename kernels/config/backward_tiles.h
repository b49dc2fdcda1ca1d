// The sequences, chunks and tiles of a backward, as functions of a kernel's configuration and its parameters. Host and
// device use these functions.
#pragma once
#include "config/backward.h"
#include "config/coords.h"

// The forward's tile coordinates of a sequence, and its keys.
struct SequenceCoords : TileCoords {
  int k_rows;         // in memory; keys from k_len on are unused
  int first_m_block;  // among all m_blocks of a head in workspace
};

template <class Config>
TANDEM_HOST_DEVICE SequenceCoords sequence_coords(Config t, const BackwardParams& p, int sequence) {
  const int first_m_block = sequence * p.sequence_m_blocks;
  if (!t->options.varlen)
    return {{0, 0, sequence, sequence, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k}, p.seqlen_k, first_m_block};
  SequenceCoords s{varlen_coords(p, sequence), p.seqlen_k, first_m_block};
  if (p.cu_seqlens_k)
    s.k_rows = clamp(index_at(p.cu_seqlens_k, p.cu_seqlens_k_stride, sequence + 1), s.k_begin, p.total_k) - s.k_begin;
  if (p.cu_seqlens_q)
    s.first_m_block = s.q_begin / t->tile_m + sequence;  // the last m_block of a sequence may be partial
  return s;
}

// The sequence of a head's block of `rows` queries, among blocks of packed sequences that are numbered as m_blocks are.
TANDEM_HOST_DEVICE int packed_sequence_at(const BackwardParams& p, int block, int rows) {
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const int begin = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, middle), 0, p.total_q);
    if (begin / rows + middle <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}
// The sequence of a head's m_block in workspace.
template <class Config>
TANDEM_HOST_DEVICE int sequence_at(Config t, const BackwardParams& p, int m_block) {
  if (!t->options.varlen || !p.cu_seqlens_q) return m_block / p.sequence_m_blocks;
  return packed_sequence_at(p, m_block, t->tile_m);
}

// ---- Properties that not every architecture's configuration has ----

template <class Config>
TANDEM_HOST_DEVICE bool uses_ds_gmem(Config t) {
  if constexpr (requires { t->ds_gmem(); }) return t->ds_gmem();
  return false;
}
// True if a chunk of dS has its heads of all sequences.
template <class Config>
TANDEM_HOST_DEVICE bool chunks_span_batch(Config t) {
  if constexpr (requires { t->chunks_span_batch(); }) return t->chunks_span_batch();
  return false;
}
template <class Config>
TANDEM_HOST_DEVICE bool splits_q_heads(Config t) {
  if constexpr (requires { t->split_q_heads; }) return t->split_q_heads;
  return false;
}
template <class Config>
TANDEM_HOST_DEVICE bool splits_dq(Config t) {
  if constexpr (requires { t->dq_split; }) return t->dq_split;
  return false;
}
template <class Config>
TANDEM_HOST_DEVICE bool wraps(Config t) {
  if constexpr (requires { t->wraps; }) return t->wraps;
  return false;
}
template <class Config>
TANDEM_HOST_DEVICE bool has_diagonal_parts(Config t) {
  if constexpr (requires { t->diagonal_parts(); }) return t->diagonal_parts();
  return false;
}
template <class Config>
TANDEM_HOST_DEVICE bool has_single_n_block(Config t) {
  if constexpr (requires { t->single_n_block; }) return t->single_n_block;
  return false;
}

// ---- Chunks of dS ----

// Query heads count over the batch, or with chunks_span_batch() within a sequence. n_blocks: the number of n_blocks of
// a head.
struct DsChunk {
  int first_head, heads, first_n_block, n_blocks;

  TANDEM_HOST_DEVICE explicit DsChunk(const BackwardParams& p) : DsChunk(p, p.counter[1]) {}
  TANDEM_HOST_DEVICE DsChunk(const BackwardParams& p, int number) {
    const int of_head = larger((p.n_blocks + p.chunk_n_blocks - 1) / p.chunk_n_blocks, 1);
    first_head = number / of_head * p.chunk_heads;
    heads = smaller(p.chunk_heads, p.ds_heads - first_head);
    first_n_block = number % of_head * p.chunk_n_blocks;
    n_blocks = smaller(p.chunk_n_blocks, p.n_blocks - first_n_block);
  }
};

// The first n_block that an m_block sees.
template <class Config>
TANDEM_HOST_DEVICE int first_n_block(Config t, const BackwardParams& p, const SequenceCoords& s, int m_block) {
  if (!t->options.bounded_left) return 0;
  const int first = m_block * t->tile_m, last = smaller(first + t->tile_m, s.q_len) - 1;
  return larger(0, visible_keys(t, p, s, first, last).begin) / t->tile_n();
}
// The number of n_blocks that add to an m_block's dq.
template <class Config>
TANDEM_HOST_DEVICE int count_n_blocks(Config t, const BackwardParams& p, const SequenceCoords& s, int m_block) {
  const int first = m_block * t->tile_m, last = smaller(first + t->tile_m, s.q_len) - 1;
  const KeyRange keys = visible_keys(t, p, s, first, last);
  const int end = smaller(keys.end, s.k_len);
  if (last < first || larger(0, keys.begin) >= end) return 0;
  return (end - 1) / t->tile_n() - first_n_block(t, p, s, m_block) + 1;
}

// Without a mask, the n_blocks of a head begin at evenly spaced iterations and wrap around. Every stride-th n_block
// adds to the same two sums of dq: one before the wrap and one after it. n_blocks add from the last one to the first,
// which is the order of tiles, so that a tile waits only for earlier tiles.
struct WrappedIterations {
  int n_blocks, iterations, stride;  // iterations: of a tile

  TANDEM_HOST_DEVICE WrappedIterations(const BackwardParams& p, int of_tile)
      : n_blocks(p.n_blocks), iterations(of_tile), stride(p.dq_splits / 2) {}
  TANDEM_HOST_DEVICE int first(int n_block) const {
    return static_cast<int>(static_cast<unsigned>(n_block) * iterations / n_blocks);
  }
  TANDEM_HOST_DEVICE int sum(int n_block, int iteration) const {
    return 2 * (n_block % stride) + (n_block < begun(iteration) ? 0 : 1);
  }
  // The number of n_blocks that add before this one to the same sum.
  TANDEM_HOST_DEVICE int before(int n_block, int iteration) const {
    const int all = begun(iteration);
    return count_strided(n_block < all ? all : n_blocks, n_block % stride) - 1 - n_block / stride;
  }
  // The number of n_blocks that add to a sum in an iteration.
  TANDEM_HOST_DEVICE int count(int iteration, int sum) const {
    const int before_wrap = count_strided(begun(iteration), sum / 2);
    return sum % 2 == 0 ? before_wrap : count_strided(n_blocks, sum / 2) - before_wrap;
  }

 private:
  // The number of n_blocks that begin at this iteration or before.
  TANDEM_HOST_DEVICE int begun(int iteration) const {
    return static_cast<int>((static_cast<unsigned>(iteration + 1) * n_blocks + iterations - 1) / iterations);
  }
  // The number of n_blocks first, first + stride, ... below `end`.
  TANDEM_HOST_DEVICE int count_strided(int end, int first_of_all) const {
    return first_of_all < end ? (end - first_of_all + stride - 1) / stride : 0;
  }
};
// The index of an iteration among the iterations of its tile, and their number, with wraps().
struct WrappedPlace {
  int index, iterations;

  template <class Config>
  TANDEM_HOST_DEVICE WrappedPlace(Config t, const BackwardParams& p, int head, int m_block) {
    const int parts = t->m_split ? p.m_splits : 1, after = p.sequence_m_blocks - 1 - m_block;
    int heads = p.heads_q / p.heads_k;
    if (heads % parts == 0) {
      heads /= parts;
      index = after * heads + head % heads, iterations = p.sequence_m_blocks * heads;
      return;
    }
    const int of_all = after * heads + head % heads, all = p.sequence_m_blocks * heads;
    const int part = ((of_all + 1) * parts - 1) / all, first = all * part / parts;
    index = of_all - first, iterations = all * (part + 1) / parts - first;
  }
};

// The number of separate sums of dq. Every dq_splits-th n_block adds to the same sum, or each index of DiagonalParts
// has one, or WrappedIterations have two for each stride.
template <class Config>
TANDEM_HOST_DEVICE int dq_splits(Config t, const BackwardParams& p) {
  return splits_dq(t) ? p.dq_splits : 1;
}
// The number of n_blocks that add to one of the sums of an m_block's dq.
template <class Config>
TANDEM_HOST_DEVICE int count_split_n_blocks(Config t, const BackwardParams& p, const SequenceCoords& s, int head,
                                            int m_block, int dq_split) {
  if (wraps(t)) {
    const WrappedPlace place(t, p, head, m_block);
    return WrappedIterations(p, place.iterations).count(place.index, dq_split);
  }
  const int count = count_n_blocks(t, p, s, m_block);
  if (!splits_dq(t) || count == 0) return count;
  if (has_diagonal_parts(t)) return clamp(count - dq_split * p.part_n_blocks, 0, p.part_n_blocks);
  const int before = first_n_block(t, p, s, m_block) - 1, offset = p.dq_splits - dq_split;
  return (before + count + offset) / p.dq_splits - (before + offset) / p.dq_splits;
}

// The n_blocks of a chunk, [begin, end), that add to an m_block's dq, with chunks_span_batch(). The sum continues the
// sum of earlier chunks. An m_block without visible keys exists in the first chunk.
struct DqChunkSum {
  int begin = 0, end = 0;
  bool exists = false, continues = false, is_last = false;

  DqChunkSum() = default;
  template <class Config>
  TANDEM_HOST_DEVICE DqChunkSum(Config t, const BackwardParams& p, const SequenceCoords& s, const DsChunk& chunk,
                                int m_block) {
    if (m_block * t->tile_m >= s.q_rows) return;
    const int count = count_n_blocks(t, p, s, m_block), chunk_end = chunk.first_n_block + chunk.n_blocks;
    const int first = count > 0 ? first_n_block(t, p, s, m_block) : 0, last = smaller(first + count, p.n_blocks);
    begin = larger(first, chunk.first_n_block);
    end = larger(begin, smaller(last, chunk_end));
    exists = begin < end || (count == 0 && chunk.first_n_block == 0);
    continues = begin < end && first < begin;
    is_last = last <= chunk_end;
  }
  TANDEM_HOST_DEVICE bool has(int n_block) const { return n_block >= begin && n_block < end; }
};

// The m_blocks of a CTA of the dq kernel, with chunks_span_batch(): the query head and the first m_block. With a causal
// mask the last m_blocks of dense sequences, whose sums are the longest, come first.
struct DqPlace {
  int head, sequence, first_m_block;

  template <class Config>
  TANDEM_HOST_DEVICE DqPlace(Config t, const BackwardParams& p, const DsChunk& chunk, int n) {
    const int of_chunk = n % p.chunk_heads, block = n / p.chunk_heads;
    head = of_chunk < chunk.heads ? chunk.first_head + of_chunk : -1;
    if (t->options.varlen && p.cu_seqlens_q) {
      sequence = packed_sequence_at(p, block, t->kDqRows);
      const int begin = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, sequence), 0, p.total_q);
      first_m_block = (block - begin / t->kDqRows - sequence) * t->kDqMBlocks;
    } else {
      const int blocks = (p.sequence_m_blocks + t->kDqMBlocks - 1) / t->kDqMBlocks;
      sequence = block % p.batch;
      first_m_block = (blocks - 1 - block / p.batch) * t->kDqMBlocks;
    }
  }
};

// ---- Tiles ----

// Keys [n_block * T.tile_n(), ...) of a key head, and the m_blocks that see some of them.
struct NBlockWork {
  int n_block, head_k = 0, sequence = 0;
  int m_begin = 0, m_end = 0;
  int m_split_idx = 0;   // index of the part of the iterations
  int diagonal = 0;      // the iterations begin here
  int split_block = -1;  // index among the split n_blocks; -1: not split
};

// spt: under a causal mask the n_blocks of a head go from last to first, and their iterations from the diagonal on.
// n_blocks then reach an m_block in consecutive iterations, in the order in which they add dq, so that none stalls. The
// longest tiles come last; therefore some heads run together at the end, from the first n_block on.
template <class Config>
TANDEM_HOST_DEVICE bool uses_spt(Config t) {
  if constexpr (requires { t->spt; }) return t->spt;
  return false;
}

// Under a causal mask, parts of an n_block's m_blocks. Part i begins where the n_block i * length later has its
// diagonal. Parts of one index have their own sum of dq, and reach an m_block in consecutive iterations, in the order
// in which they add. Tiles go from the last beginning to the first, so all may begin at once.
struct DiagonalParts {
  int n_blocks, length;

  TANDEM_HOST_DEVICE int parts(int n_block) const { return (n_blocks - 1 - n_block) / length + 1; }
  TANDEM_HOST_DEVICE int tiles() const {
    const int whole = n_blocks / length, rest = n_blocks % length;
    return length * (whole * (whole + 1) / 2) + rest * (whole + 1);
  }
  struct Tile {
    int n_block, index, diagonal;  // diagonal: an n_block whose diagonal begins the part
  };
  TANDEM_HOST_DEVICE Tile at(int tile) const {
    int before = tiles() - 1 - tile, same = 1;  // same: the parts with one beginning
    for (; before >= length * same; ++same) before -= length * same;
    const int diagonal = (same - 1) * length + before / same, index = before % same;
    return {diagonal - index * length, index, diagonal};
  }
};
TANDEM_HOST_DEVICE DiagonalParts diagonal_parts_of(const BackwardParams& p) { return {p.n_blocks, p.part_n_blocks}; }
// The number of n_blocks of a head that have several parts: the first ones.
TANDEM_HOST_DEVICE int count_parted_n_blocks(const BackwardParams& p) {
  return p.head_parts > 1 ? p.n_blocks : larger(p.n_blocks - p.part_n_blocks, 0);
}
// The sum of dq that a tile adds to in an iteration. place: only read with wraps().
template <class Config, class Place>
TANDEM_HOST_DEVICE int dq_split_of(Config t, const BackwardParams& p, const NBlockWork& tile, const Place& place) {
  if (wraps(t)) return WrappedIterations(p, place.iterations).sum(tile.n_block, place.index);
  if (has_diagonal_parts(t)) return tile.m_split_idx % p.dq_splits;
  return splits_dq(t) ? tile.n_block % p.dq_splits : 0;
}

// The number of query heads that a tile of a dS chunk iterates over, out of the heads that share its keys.
template <class Config>
TANDEM_HOST_DEVICE int tile_query_heads(Config t, const BackwardParams& p) {
  return p.heads_q / (splits_q_heads(t) ? p.heads_k * p.m_splits : p.heads_k);
}
// The number of heads of a sequence that a launch's tiles are counted for.
template <class Config>
TANDEM_HOST_DEVICE int tile_heads(Config t, const BackwardParams& p) {
  if (chunks_span_batch(t)) return DsChunk(p).heads / tile_query_heads(t, p);
  return p.heads_k * (splits_q_heads(t) ? p.m_splits : 1);
}
// The number of n_blocks of a head in a launch.
template <class Config>
TANDEM_HOST_DEVICE int launch_n_blocks(Config t, const BackwardParams& p) {
  return uses_ds_gmem(t) ? DsChunk(p).n_blocks : p.n_blocks;
}
// True if a head of all sequences comes before the next head, because they share a bias. The result is false if a chunk
// of dS has consecutive heads of a sequence.
template <class Config>
TANDEM_HOST_DEVICE bool sequences_follow(Config t, const BackwardParams& p) {
  return t->options.bias != Bias::none && p.bias_batch == 0 && (!uses_ds_gmem(t) || chunks_span_batch(t));
}
// The number of consecutive tiles that share an n_block and a head, from p.unsplit_tiles on.
template <class Config>
TANDEM_HOST_DEVICE int tile_parts(Config t, const BackwardParams& p) {
  return t->m_split && !splits_q_heads(t) ? p.m_splits : 1;
}
// The number of tiles that share a tile's iterations.
template <class Config>
TANDEM_HOST_DEVICE int parts_of_tile(Config t, const BackwardParams& p, const NBlockWork& tile) {
  return t->m_split && (splits_q_heads(t) || tile.split_block >= 0) ? p.m_splits : 1;
}
template <class Config>
TANDEM_HOST_DEVICE int chunk_tiles(Config t, const BackwardParams& p, const DsChunk& chunk) {
  const int sequences = chunks_span_batch(t) ? p.batch : 1;
  return sequences * chunk.heads * chunk.n_blocks / tile_query_heads(t, p) * tile_parts(t, p);
}
template <class Config>
TANDEM_HOST_DEVICE int launch_tiles(Config t, const BackwardParams& p) {
  if (uses_ds_gmem(t)) return chunk_tiles(t, p, DsChunk(p));
  return p.tiles;
}

// The query heads that a tile iterates over: `heads` from `head` on. Tiles of one key head divide them if possible.
// Otherwise they divide the iterations, and the result is false.
template <class Config>
TANDEM_HOST_DEVICE bool set_query_heads(Config t, const BackwardParams& p, const NBlockWork& tile, int* head,
                                        int* heads) {
  *heads = p.heads_q / p.heads_k;
  *head = tile.head_k * *heads;
  if (has_diagonal_parts(t)) {
    *heads /= p.head_parts, *head += tile.m_split_idx / p.dq_splits * *heads;
    return true;
  }
  const int parts = parts_of_tile(t, p, tile);
  const bool divided = t->m_split && *heads % parts == 0;
  if (divided) *heads /= parts, *head += tile.m_split_idx * *heads;
  return divided;
}

// Heads whose tiles are interleaved: numbers from `first` on, one n_block of each head after the other.
struct NBlockGroup {
  int first, first_head, heads;
  bool falls;  // from the last n_block to the first
  int first_n_block = 0;
};
template <class Config>
TANDEM_HOST_DEVICE NBlockGroup n_block_group_at(Config t, const BackwardParams& p, int n, int heads) {
  if (uses_ds_gmem(t)) {
    const DsChunk chunk(p);
    const int of_tile = tile_query_heads(t, p), first = n / (p.l2_heads * chunk.n_blocks) * p.l2_heads;
    if (chunks_span_batch(t))
      return {first * chunk.n_blocks, first, smaller(heads - first, p.l2_heads), false, chunk.first_n_block};
    return {first * chunk.n_blocks, chunk.first_head / of_tile + first,
            smaller(chunk.heads / of_tile - first, p.l2_heads), false, chunk.first_n_block};
  }
  if (uses_spt(t)) {
    const int head = n / p.n_blocks;
    if (head < p.spt_heads) return {head * p.n_blocks, head, 1, true};
    return {p.spt_heads * p.n_blocks, p.spt_heads, heads - p.spt_heads, false};
  }
  const int per_group = p.l2_heads * p.n_blocks, group = n / per_group, first_head = group * p.l2_heads;
  return {group * per_group, first_head, smaller(heads - first_head, p.l2_heads), t->options.block_mask || wraps(t)};
}

// The m_blocks whose queries see some keys of an n_block: from the first that sees it to the end.
template <class Config>
TANDEM_HOST_DEVICE void set_m_blocks(Config t, const BackwardParams& p, const SequenceCoords& s, NBlockWork* tile) {
  const int first = tile->n_block * t->tile_n(), last = smaller(first + t->tile_n(), s.k_len) - 1;
  if (first > last) return;
  const QueryRange visible = visible_queries(t, p, s, first, last);
  const int begin = larger(0, visible.begin), end = smaller(visible.end, s.q_len);
  tile->m_begin = begin / t->tile_m;
  // The tile has no m_block if the first query that sees the keys is beyond the last query. Such a tile is not counted.
  tile->m_end = begin < end ? (end + t->tile_m - 1) / t->tile_m : tile->m_begin;
}

// The n-th tile of DiagonalParts. All heads run together.
template <class Config>
TANDEM_HOST_DEVICE NBlockWork diagonal_part_at(Config t, const BackwardParams& p, int n) {
  const DiagonalParts parts = diagonal_parts_of(p);
  const int heads = p.batch * p.heads_k * p.head_parts, of_all = n % heads / p.head_parts;
  const DiagonalParts::Tile part = parts.at(n / heads);
  const int sequence = of_all / p.heads_k, split_idx = n % p.head_parts * p.dq_splits + part.index;
  NBlockWork tile{part.n_block, of_all - sequence * p.heads_k, sequence, 0, 0, split_idx, 1};
  const int parted = count_parted_n_blocks(p);
  if (tile.n_block < parted) tile.split_block = of_all * parted + tile.n_block;
  const SequenceCoords s = sequence_coords(t, p, sequence);
  set_m_blocks(t, p, s, &tile);
  NBlockWork begin{part.diagonal}, end{part.diagonal + parts.length};
  if (part.index > 0) {
    set_m_blocks(t, p, s, &begin);
    tile.m_begin = smaller(begin.m_begin, tile.m_end);
  }
  if (end.n_block < p.n_blocks) {
    set_m_blocks(t, p, s, &end);
    tile.m_end = larger(tile.m_begin, smaller(end.m_begin, tile.m_end));
  }
  return tile;
}

// The n-th tile, longest first (except with spt and block masks: device/m_block_lists.cuh); under a causal mask the
// most queries see the first keys. Interleaved heads share the L2 cache. The splits of an n_block and the sequences
// that share a bias follow each other.
template <class Config>
TANDEM_HOST_DEVICE NBlockWork n_block_work_at(Config t, const BackwardParams& p, int n) {
  if (has_diagonal_parts(t)) return diagonal_part_at(t, p, n);
  int m_split_idx = 0, split_block = -1;
  if (tile_parts(t, p) > 1 && n >= p.unsplit_tiles) {
    n -= p.unsplit_tiles;
    m_split_idx = n % p.m_splits, split_block = n / p.m_splits;
    n = p.unsplit_tiles + split_block;
  }
  const NBlockGroup group = n_block_group_at(t, p, n, p.batch * tile_heads(t, p));
  const int rest = n - group.first, from_begin = rest / group.heads;
  const int n_block = group.falls ? p.n_blocks - 1 - from_begin : group.first_n_block + from_begin;
  int of_all = group.first_head + rest % group.heads;  // head index over the batch
  if (splits_q_heads(t)) m_split_idx = of_all % p.m_splits, of_all /= p.m_splits;
  const int of_sequence = chunks_span_batch(t) ? tile_heads(t, p) : p.heads_k;
  int sequence = of_all / of_sequence, head_k = of_all - sequence * of_sequence;
  if (sequences_follow(t, p)) head_k = of_all / p.batch, sequence = of_all - head_k * p.batch;
  if (chunks_span_batch(t)) head_k += DsChunk(p).first_head / tile_query_heads(t, p);
  NBlockWork tile{n_block, head_k, sequence, 0, 0, m_split_idx, uses_spt(t) && group.falls, split_block};
  set_m_blocks(t, p, sequence_coords(t, p, tile.sequence), &tile);
  return tile;
}
