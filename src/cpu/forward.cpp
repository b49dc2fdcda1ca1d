// Schedules the forward: cuts the problem into pieces, longest first, and joins split key ranges.
//
// The tiles and splits of a query's keys depend only on its sequence, never on the batch or the number of threads. The
// bits of a result therefore do not depend on other work.
#include <algorithm>

#include "cpu/cpu.h"
#include "cpu/schedule.h"

namespace tandem::cpu {

namespace {

// A range of keys is split if queries are too few for all threads. Streamed keys are split into smaller parts than
// tiles.
constexpr int64_t kStreamPart = 512, kTilePart = 2048, kSplitRows = 64;

struct Item {
  int32_t sequence, head_k;
  int32_t row_tile;  // rows [row_tile * rows per item, ...)
  int32_t part;      // keys [part * part size, ...); -1: all
  int64_t group;     // index of the combined parts; -1: none
  int64_t cost;
};

// The parts of one (sequence, key head). The thread that finishes the last part combines them.
struct Group {
  std::atomic<int32_t> left;
  int32_t first_part, parts;
  float* data;  // per part: the floats of a Partial
};

struct Shape {
  bool stream;   // few queries: keys are streamed, not tiled
  int64_t part;  // keys per part; 0: not split
};

Shape shape_of(const Problem& p, const Sequence& s) {
  const int64_t rows = s.q_len * p.group();
  const bool stream = rows <= kernels().panel / 2;  // the condition of streamed_rows()
  const int64_t part = stream ? kStreamPart : kTilePart;
  return {stream, (stream || rows <= kSplitRows) && s.k_len >= 2 * part ? part : 0};
}

int64_t partial_stride(const Problem& p) { return ceil_div(p.head_dim_v, 16) * 16; }

// Rows per item: enough to pay for packing the keys, and few enough that every thread gets several items. Queries are
// independent of each other, so that the number changes no result.
int64_t rows_per_item(const Problem& p, int threads) {
  const int64_t widest = std::max(p.head_dim, p.head_dim_v), panel = kernels().panel;
  int64_t rows = widest <= 128 ? 256 : widest <= 256 ? 128 : 64;
  const int64_t all = p.total_q * p.heads_q;
  while (rows > panel && all / rows < 6 * threads) rows /= 2;
  return std::max(rows, panel);
}

struct ForwardLayout {
  int64_t rows;  // per item
  Item* items;
  Group* groups;
  float* partials;
  std::byte* scratch;
  size_t scratch_bytes, bytes;

  // Computes bounds from shapes alone, because packed lengths are not known when the workspace size is computed.
  ForwardLayout(const Problem& p, int threads, void* base) {
    rows = rows_per_item(p, threads);
    const int64_t split_rows = std::min<int64_t>(kSplitRows, p.seqlen_q * p.group());
    // A sequence with n >= 2 parts has at most n + 1 <= 1.5 n parts.
    const int64_t keys = p.packed_k() ? p.total_k : p.batch * p.seqlen_k;
    const int64_t parts = split_rows > 0 ? p.heads_k * (keys * 3 / 2 / kStreamPart) : 0;
    const int64_t tiles = p.heads_k * (ceil_div(p.total_q * p.group(), rows) + p.batch);
    Workspace w(base);
    items = w.take<Item>(tiles + parts);
    groups = w.take<Group>(std::min(p.batch * p.heads_k, parts));
    partials = w.take<float>(parts * std::min(split_rows, p.total_q * p.group()) * (partial_stride(p) + kRowFloats));
    scratch_bytes =
        scratch_stride(std::max({kernels().forward_scratch(p, rows), kernels().decode_scratch(p, kernels().panel / 2),
                                 static_cast<size_t>(kernels().panel * partial_stride(p)) * sizeof(float)}));
    scratch = w.take<std::byte>(static_cast<int64_t>(scratch_bytes) * threads);
    bytes = w.bytes();
  }
};

Piece piece_of(const Problem& p, const Item& item, const ForwardLayout& layout) {
  Piece piece = whole_piece(p, sequence_of(p, item.sequence), item.sequence, item.head_k);
  if (item.part >= 0) {
    const int64_t part = shape_of(p, piece.sequence).part;
    piece.key_begin = item.part * part;
    piece.key_end = std::min(piece.key_end, piece.key_begin + part);
  } else if (!shape_of(p, piece.sequence).stream) {
    piece.row_begin = item.row_tile * layout.rows;
    piece.row_end = std::min(piece.row_end, piece.row_begin + layout.rows);
  }
  return piece;
}

struct Plan {
  int64_t items = 0, groups = 0, floats = 0;
};

void add_sequence(const Problem& p, int32_t b, const ForwardLayout& layout, Plan* plan) {
  const Sequence s = sequence_of(p, b);
  const int64_t rows = s.q_len * p.group();
  if (rows == 0) return;
  const Shape shape = shape_of(p, s);
  for (int32_t h = 0; h < p.heads_k; ++h) {
    if (shape.part > 0) {
      const KeySpan keys = keys_of_rows(p, s, p.group(), 0, rows);
      const auto first = static_cast<int32_t>(std::min(keys.begin, keys.end) / shape.part);
      const auto end = static_cast<int32_t>(std::max<int64_t>(ceil_div(keys.end, shape.part), first + 1));
      Group* group =
          new (layout.groups + plan->groups) Group{end - first, first, end - first, layout.partials + plan->floats};
      plan->floats += group->parts * rows * (partial_stride(p) + kRowFloats);
      for (int32_t i = first; i < end; ++i) layout.items[plan->items++] = {b, h, 0, i, plan->groups, rows * shape.part};
      ++plan->groups;
    } else {
      const int64_t step = shape.stream ? rows : layout.rows;
      for (int64_t r = 0; r < rows; r += step) {
        const int64_t end = std::min(rows, r + step);
        const KeySpan keys = keys_of_rows(p, s, p.group(), r, end);
        layout.items[plan->items++] = {b,  h,  static_cast<int32_t>(r / step),
                                       -1, -1, (end - r) * (keys.end - keys.begin + 16)};
      }
    }
  }
}

Partial partial_of(const Group& group, int64_t part, int64_t rows, int64_t stride) {
  float* data = group.data + part * rows * (stride + kRowFloats);
  return {data, data + rows * stride, data + rows * (stride + 1), data + rows * (stride + 2), stride};
}

void run_item(const Problem& p, const Item& item, const ForwardLayout& layout, std::byte* scratch) {
  const Piece piece = piece_of(p, item, layout);
  const bool stream = shape_of(p, piece.sequence).stream;
  const auto kernel = stream ? kernels().decode : kernels().forward;
  if (item.group < 0) return kernel(piece, nullptr, scratch);

  Group& group = layout.groups[item.group];
  const int64_t rows = piece.row_end, stride = partial_stride(p);
  // Processes rows in tiles of the layout, so that the scratch suffices.
  for (int64_t r = 0; r < rows; r += layout.rows) {
    Piece tile = piece;
    tile.row_begin = r;
    tile.row_end = std::min(rows, r + layout.rows);
    Partial partial = partial_of(group, item.part - group.first_part, rows, stride);
    partial.out += r * stride;
    partial.max += r;
    partial.sum += r;
    partial.largest += r;
    kernel(tile, &partial, scratch);
  }
  if (group.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  kernels().combine(piece, group.data, group.parts, stride, scratch);
}

}  // namespace

size_t forward_workspace_size(const Problem& p, int threads) { return ForwardLayout(p, threads, nullptr).bytes; }

void forward(const Problem& p, Threads& threads, void* workspace) {
  const ForwardLayout layout(p, threads.count(), workspace);
  Plan plan;
  for (int64_t b = 0; b < p.batch; ++b) add_sequence(p, static_cast<int32_t>(b), layout, &plan);
  Item *const first = layout.items, *const end = first + plan.items;
  const bool alike = std::all_of(first, end, [&](const Item& i) { return i.cost == first->cost && i.group < 0; });
  if (!alike) {
    std::sort(first, end, [](const Item& a, const Item& b) {
      return a.cost != b.cost           ? a.cost > b.cost
             : a.sequence != b.sequence ? a.sequence < b.sequence
             : a.head_k != b.head_k     ? a.head_k < b.head_k
                                        : a.row_tile + a.part < b.row_tile + b.part;
    });
  }
  double work = 0;
  for (int64_t i = 0; i < plan.items; ++i)
    work += static_cast<double>(layout.items[i].cost) * static_cast<double>(p.head_dim + p.head_dim_v);
  for_each_item(threads, {alike ? Take::kInSections : Take::kInOrder, plan.items, work}, layout.scratch,
                layout.scratch_bytes,
                [&](int64_t i, std::byte* scratch) { run_item(p, layout.items[i], layout, scratch); });
  clear_unused_rows(p, p.out, true, p.heads_q, p.head_dim_v);
  clear_unused_rows(p, p.lse, true, p.heads_q, 1, true);
  clear_unused_rows(p, p.max_scores, true, p.heads_q, 1, true);
}

}  // namespace tandem::cpu
