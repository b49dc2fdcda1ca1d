// The kernel of a plan: one of Hopper's or one of Blackwell's, and what the rest of the program asks of either.
#pragma once

#include <variant>

#include "shared/forward.h"

namespace tandem::plan {

struct Tile {
  // Rows of what is copied at once: queries, keys, values, results.
  struct Boxes {
    int q, k, v, out;
  };

  Tile() : Tile(ForwardTile{}) {}
  Tile(const ForwardTile& t)  // NOLINT(google-explicit-constructor): it is one
      : Tile(t, t.keys, t.rows(), {.q = 64, .k = t.keys, .v = t.keys, .out = 64}) {}
  Tile(const BlackwellTile& t)  // NOLINT(google-explicit-constructor): it is one
      : Tile(t, BlackwellTile::keys, t.rows(),
             {.q = BlackwellTile::kTileRows,
              .k = t.keys_of_block(),
              .v = t.keys_of_values(),
              .out = BlackwellTile::kTileRows}) {}

  bool blackwell() const { return std::holds_alternative<BlackwellTile>(kernel); }
  const ForwardTile& for_hopper() const { return std::get<ForwardTile>(kernel); }
  const BlackwellTile& for_blackwell() const { return std::get<BlackwellTile>(kernel); }

  int rows() const { return rows_; }
  // CTAs of a cluster.
  int ctas() const { return blackwell() ? for_blackwell().ctas() : 1; }
  bool takes_over() const { return blackwell() && for_blackwell().takes_over; }
  int threads() const {
    return std::visit([](const auto& t) { return t.threads(); }, kernel);
  }
  int shared_bytes() const {
    return std::visit([](const auto& t) { return t.shared_bytes(); }, kernel);
  }

  std::variant<ForwardTile, BlackwellTile> kernel;
  int head_dim, head_dim_v, keys;
  bool left, right, ragged;
  Boxes boxes;

 private:
  template <class T>
  Tile(const T& t, int step, int all_rows, const Boxes& all_boxes)
      : kernel(t),
        head_dim(t.head_dim),
        head_dim_v(t.head_dim_v),
        keys(step),
        left(t.left),
        right(t.right),
        ragged(t.ragged),
        boxes(all_boxes),
        rows_(all_rows) {}

  int rows_;
};

}  // namespace tandem::plan
