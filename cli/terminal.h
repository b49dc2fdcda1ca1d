// Output of the command: colours only on a terminal, progress of long work, numbers with units.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tandem::tool {

// Text for standard output, without colour if it is no terminal or NO_COLOR is set.
std::string bold(const std::string& text);
std::string dim(const std::string& text);
std::string good(const std::string& text);
std::string bad(const std::string& text);

std::string number(double value, int digits = 3);  // "0.00123", "1.23e-07", "1230"
std::string fixed(double value, int decimals);
std::string si_text(double value, const char* unit);  // "68.7 GFLOP"
std::string seconds_text(double seconds);             // "85 ns", "5.6 us", "4.56 ms", "12.3 s", "3 min 20 s"
std::string bytes_text(double bytes);                 // "512 B", "1.5 MiB"
std::string rate_text(double flops, double seconds);  // "98.7 GF/s", "651 TF/s"

// Returns a name and its text, wrapped.
std::string entry(const std::string& name, std::string text, size_t indent, size_t columns = 98);

void print(const std::vector<std::string>& remarks, size_t columns = 98);  // one line per remark, wrapped

// Aligned columns: the first column is left-aligned, the rest is right-aligned. Cells may contain colour codes.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { add(std::move(header)); }
  void add(std::vector<std::string> row);
  std::string text() const;

  // For rows that are printed one by one: columns have at least this width, and line() formats the last row.
  void at_least(size_t columns);
  std::string line() const;

 private:
  std::string line_of(const std::vector<std::string>& row) const;

  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> widths_;
};

// Returns the text of a progress line. share: the completed part, 0 while it is unknown.
std::string progress_text(const std::string& what, double share, double elapsed_seconds);

// One line on standard error, only on a terminal. The line appears after two seconds, shows the elapsed time or the
// estimated remaining time, and disappears at the end.
class Progress {
 public:
  Progress(std::string what, double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(double done);      // done: a part of the total
  void become(std::string what);  // begins another stage of the same work
  // Shows a sentence about long work in place of the stage. Without a terminal, prints it as a line.
  void report(const std::string& sentence);
  void clear();  // before other output; the line appears again later

 private:
  using Clock = std::chrono::steady_clock;
  void show();
  void erase();

  std::mutex mutex_;
  std::condition_variable ended_;
  std::string what_;
  double total_, done_ = 0;
  Clock::time_point start_ = Clock::now();
  bool shown_ = false, over_ = false;
  std::thread refresh_;  // absent without a terminal
};

}  // namespace tandem::tool
