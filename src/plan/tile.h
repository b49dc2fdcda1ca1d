// The kernel of a plan: one of Hopper's or one of Blackwell's, and what the rest of the program asks of either.
#pragma once

#include <variant>

#include "shared/forward.h"

namespace tandem::plan {

struct Tile {
  Tile() : Tile(ForwardTile{}) {}
  Tile(const ForwardTile& t)  // NOLINT(google-explicit-constructor): it is one
      : Tile(t, t.keys, t.rows(), t.rows(), t.keys, 64) {}
  Tile(const BlackwellTile& t)  // NOLINT(google-explicit-constructor): it is one
      : Tile(t, BlackwellTile::keys, t.rows(), BlackwellTile::kTileRows, t.keys_of_values(), BlackwellTile::kTileRows) {
  }

  bool blackwell() const { return std::holds_alternative<BlackwellTile>(kernel); }
  const ForwardTile& for_hopper() const { return std::get<ForwardTile>(kernel); }
  const BlackwellTile& for_blackwell() const { return std::get<BlackwellTile>(kernel); }

  int ctas() const { return 1; }  // of a cluster
  int rows() const { return rows_; }
  int threads() const {
    return std::visit([](const auto& t) { return t.threads(); }, kernel);
  }
  int shared_bytes() const {
    return std::visit([](const auto& t) { return t.shared_bytes(); }, kernel);
  }

  std::variant<ForwardTile, BlackwellTile> kernel;
  int head_dim, head_dim_v, keys;
  bool left, right, ragged;
  int box_q, box_v, box_out;  // rows of the boxes that are copied: of queries, values and the result

 private:
  template <class T>
  Tile(const T& t, int step, int all_rows, int q, int v, int out)
      : kernel(t),
        head_dim(t.head_dim),
        head_dim_v(t.head_dim_v),
        keys(step),
        left(t.left),
        right(t.right),
        ragged(t.ragged),
        box_q(q),
        box_v(v),
        box_out(out),
        rows_(all_rows) {}

  int rows_;
};

}  // namespace tandem::plan
