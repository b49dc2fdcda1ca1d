// The keys that queries see and the queries that see keys, by causal masks, windows and their alignment. Host and
// device use these functions; no other code computes the ranges.
#pragma once

// [begin, end): empty if end <= begin. Either bound may lie beyond the sequence.
struct KeyRange {
  int begin, end;
};
struct QueryRange {
  int begin, end;
};

// Query i sees key j if i + diagonal - left <= j <= i + diagonal + right and j < k_len. A side without its template
// argument is unbounded. Sums fit an int: bounds are within +-2^30, the diagonal within +-2^29, lengths within 2^28.
template <bool bounded_left, bool bounded_right>
struct Band {
  int diagonal, left, right, q_len, k_len;

  // The keys that some query of [first, last] sees, and the keys that all these queries see.
  constexpr KeyRange visible_keys(int first, int last) const {
    return {bounded_left ? first + diagonal - left : 0,
            bounded_right ? smaller(k_len, last + diagonal + right + 1) : k_len};
  }
  constexpr KeyRange unmasked_keys(int first, int last) const { return visible_keys(last, first); }

  // The queries that see some key of [first, last], and the queries that see all of them.
  constexpr QueryRange visible_queries(int first, int last) const {
    return {bounded_right ? first - diagonal - right : 0,
            bounded_left ? smaller(q_len, last - diagonal + left + 1) : q_len};
  }
  constexpr QueryRange unmasked_queries(int first, int last) const { return visible_queries(last, first); }

 private:
  static constexpr int smaller(int a, int b) { return b < a ? b : a; }
};
