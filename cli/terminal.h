// What the command says and how: colours on a terminal only, progress on long work, numbers with units.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::tool {

// Text for standard output; plain when that is no terminal or NO_COLOR is set.
std::string bold(const std::string& text);
std::string dim(const std::string& text);
std::string good(const std::string& text);
std::string bad(const std::string& text);

std::string number(double value, int digits = 3);  // "0.00123", "1.23e-07", "1230"
std::string fixed(double value, int decimals);
std::string si_text(double value, const char* unit);  // "68.7 GFLOP"
std::string seconds_text(double seconds);             // "85 ns", "5.6 us", "123 us", "4.56 ms", "12.3 s", "3 min 20 s"
std::string bytes_text(double bytes);                 // "512 B", "1.5 MiB"
std::string rate_text(double flops, double seconds);  // "98.7 GF/s", "651 TF/s"

// A name and what it stands for, over several lines where it is long.
std::string entry(const std::string& name, std::string text, size_t indent);

void print(const std::vector<std::string>& remarks);  // each on a line of its own, or several

// Columns that line up: the first to the left, the others to the right. Cells may carry colours.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// One line on standard error that appears when work takes more than two seconds, says how much is done and about how
// long the rest takes, and goes away at the end. Shown on a terminal only.
class Progress {
 public:
  Progress(std::string what, double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(double done);  // by this much; from one thread at a time

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  double total_, done_ = 0;
  Clock::time_point start_ = Clock::now(), shown_at_ = start_;
  bool terminal_, shown_ = false;
};

}  // namespace tandem::tool
