#include "cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tandem::tool {
namespace {

bool no_color() {
  const char* value = std::getenv("NO_COLOR");  // https://no-color.org: set and not empty
  const char* terminal = std::getenv("TERM");
  return (value && *value) || (terminal && std::strcmp(terminal, "dumb") == 0);
}

std::string coloured(const char* code, const std::string& text) {
  static const bool colours = ::isatty(STDOUT_FILENO) && !no_color();
  return colours ? std::string("\x1b[") + code + "m" + text + "\x1b[0m" : text;
}

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

// Returns the width of a cell on a terminal. Colour codes and continuation bytes of UTF-8 occupy no column.
size_t width_of(const std::string& cell) {
  size_t width = 0;
  for (size_t i = 0; i < cell.size(); ++i) {
    if (cell[i] == '\x1b') {
      i = std::min(cell.find('m', i), cell.size());
    } else if ((cell[i] & 0xc0) != 0x80) {
      ++width;
    }
  }
  return width;
}

}  // namespace

std::string bold(const std::string& text) { return coloured("1", text); }
std::string dim(const std::string& text) { return coloured("2", text); }
std::string good(const std::string& text) { return coloured("32", text); }
std::string bad(const std::string& text) { return coloured("31", text); }

std::string number(double value, int digits) { return format("%.*g", digits, value); }

std::string fixed(double value, int decimals) { return format("%.*f", decimals, value); }

std::string si_text(double value, const char* unit) {
  const char* prefixes[] = {"", "k", "M", "G", "T", "P"};
  int at = 0;
  for (; value >= 999.5 && at < 5; ++at) value /= 1000;
  return format("%.3g %s%s", value, prefixes[at], unit);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-6) return format("%.0f ns", seconds * 1e9);
  if (seconds < 1e-5) return format("%.1f us", seconds * 1e6);
  if (seconds < 1e-3) return format("%.0f us", seconds * 1e6);
  if (seconds < 1) return format("%.*f ms", seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0, seconds * 1e3);
  if (seconds < 90) return format("%.1f s", seconds);
  return format("%d min %d s", static_cast<int>(seconds) / 60, static_cast<int>(seconds) % 60);
}

std::string bytes_text(double bytes) {
  if (bytes < 1024) return format("%.0f B", bytes);
  const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
  int unit = -1;
  do {
    bytes /= 1024;
    ++unit;
  } while (bytes >= 1024 && unit < 3);
  return format(bytes < 10 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

std::string rate_text(double flops, double seconds) {
  const double rate = seconds > 0 ? flops / seconds : 0;
  return rate < 1e13 ? format("%.1f GF/s", rate / 1e9) : format("%.0f TF/s", rate / 1e12);
}

std::string entry(const std::string& name, std::string text, size_t indent, size_t columns) {
  std::string lines = bold(name) + std::string(indent - std::min(indent, name.size()), ' ');
  const size_t width = columns - indent;
  while (text.size() > width) {
    const size_t space = text.find_last_of(' ', width);
    if (space == std::string::npos || space == 0) break;
    lines += text.substr(0, space) + "\n" + std::string(indent, ' ');
    text.erase(0, space + 1);
  }
  return lines + text + "\n";
}

void print(const std::vector<std::string>& remarks, size_t columns) {
  for (const std::string& remark : remarks) std::printf("%s", entry("", remark, 0, columns).c_str());
}

void Table::at_least(size_t columns) {
  for (size_t& width : widths_) width = std::max(width, columns);
}

void Table::add(std::vector<std::string> row) {
  widths_.resize(std::max(widths_.size(), row.size()));
  for (size_t c = 0; c < row.size(); ++c) widths_[c] = std::max(widths_[c], width_of(row[c]));
  rows_.push_back(std::move(row));
}

std::string Table::line_of(const std::vector<std::string>& row) const {
  std::string line;
  for (size_t c = 0; c < row.size(); ++c) {
    const std::string space(widths_[c] - width_of(row[c]), ' ');
    if (c > 0) line += "  ";
    line += c == 0 ? row[c] + space : space + row[c];
  }
  return line.erase(line.find_last_not_of(' ') + 1);
}

std::string Table::line() const { return (rows_.size() == 1 ? dim(line_of(rows_[0])) : line_of(rows_.back())) + "\n"; }

std::string Table::text() const {
  std::string text = dim(line_of(rows_[0])) + "\n";
  for (size_t r = 1; r < rows_.size(); ++r) text += line_of(rows_[r]) + "\n";
  return text;
}

std::string progress_text(const std::string& what, double share, double elapsed_seconds) {
  if (share <= 0) return what + ": " + seconds_text(std::max(elapsed_seconds, 1.0));
  const double done = std::min(share, 1.0), rest = elapsed_seconds * (1 - done) / done;
  return what + format(": %.0f %%, about ", 100 * done) + seconds_text(std::max(rest, 1.0)) + " left";
}

Progress::Progress(std::string what, double total) : what_(std::move(what)), total_(total) {
  if (!::isatty(STDERR_FILENO)) return;
  refresh_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::milliseconds(500), [this] { return over_; })) show();
  });
}

void Progress::advance(double done) {
  const std::lock_guard lock(mutex_);
  done_ += done;
}

void Progress::become(std::string what) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
}

void Progress::report(const std::string& sentence) {
  if (refresh_.joinable()) return become(sentence);
  std::fprintf(stderr, "%s\n", sentence.c_str());
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  erase();
}

void Progress::show() {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  if (elapsed < 2) return;
  const std::string text = progress_text(what_, total_ > 0 ? done_ / total_ : 0, elapsed);
  std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::erase() {
  if (shown_) std::fprintf(stderr, "\r\x1b[K");
  shown_ = false;
}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    erase();
  }
  ended_.notify_all();
  if (refresh_.joinable()) refresh_.join();
}

}  // namespace tandem::tool
