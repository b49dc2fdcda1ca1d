// Output of the command: colours on a terminal only, progress of long work, numbers with units.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tandem::tool {

// Text for standard output; without colour when that is no terminal or NO_COLOR is set.
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

// A name and its text, wrapped.
std::string entry(const std::string& name, std::string text, size_t indent, size_t columns = 98);

void print(const std::vector<std::string>& remarks, size_t columns = 98);  // each on its own line, wrapped

// Aligned columns: the first to the left, all other columns to the right. Cells may contain colour codes.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { add(std::move(header)); }
  void add(std::vector<std::string> row);
  std::string text() const;

  // For rows that are printed one by one: columns are at least this wide, and line() formats the last row.
  void at_least(size_t columns);
  std::string line() const;

 private:
  std::string line_of(const std::vector<std::string>& row) const;

  std::vector<std::vector<std::string>> rows_;
  std::vector<size_t> widths_;
};

// The text of a progress line; share is the part that is done, 0 while it is unknown.
std::string progress_text(const std::string& what, double share, double elapsed_seconds);

// One line on standard error, on a terminal only. It appears after two seconds, shows the time that has passed or the
// estimate of the rest, and disappears at the end.
class Progress {
 public:
  Progress(std::string what, double total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(double done);      // by this much of the total
  void become(std::string what);  // another stage of the same work
  void clear();                   // before something else is printed; the line comes back

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
  std::thread refresh_;  // none where there is no terminal
};

}  // namespace tandem::tool
