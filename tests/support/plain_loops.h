// The innermost loops of standard attention on several numbers at once. The loops give the same bits as one number
// after the other.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::test {

inline constexpr int64_t kLanes = 8;

// Noise is drawn from state = state * kFactor + kAddend.
inline constexpr uint64_t kFactor = 6364136223846793005u, kAddend = 1442695040888963407u;

// A dot product in float64, each sum rounded or not, and the sum of the squares of its products and sums.
struct Dot {
  double sum, squares;
};
enum class Rounding { none, f32 };

// Interleaved rows: element c of kLanes rows follow each other. Missing elements of the last rows are zero.
class Interleaved {
 public:
  void set(const std::vector<std::vector<double>>& rows, int64_t length);

  int64_t count() const { return count_; }
  int64_t length() const { return length_; }
  const double* at(int64_t first) const { return numbers_.data() + first * length_; }  // first: a multiple of kLanes

 private:
  int64_t count_ = 0, length_ = 0;
  std::vector<double> numbers_;
};

// An error of up to half a unit, at least of the smallest number. Zeros and numbers that are too large have none.
struct Disturbance {
  double half_unit, least, largest;
};

struct Loops {
  // Sets dots[j] at least for rows `begin` to `end`; dots has kLanes more elements than rows.
  void (*dots)(const double* a, const Interleaved& rows, int64_t begin, int64_t end, Rounding rounding, Dot* dots);
  // Adds factor * from[c] to to[c] and rounds each sum to float32.
  void (*add_rounded)(double* to, double factor, const double* from, int64_t n);
  // Adds factor * from[c] to to[c] with disturbance, from 0 up to the first exempt number. Returns the number of sums.
  int64_t (*add_scaled)(double* to, double factor, const double* from, int64_t n, const Disturbance& by,
                        uint64_t* state);
};
// Uses the machine's widest instructions.
const std::vector<Loops>& all_loops();
inline const Loops& loops() { return all_loops().front(); }

}  // namespace tandem::test
