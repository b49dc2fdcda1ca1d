// Counts the instructions of threads, as a GPU's profiler does.
#pragma once

#include <array>
#include <atomic>
#include <bit>

#include "vgpu/src/observer/observer.h"

namespace tandem::tool {

class Counter final : public vgpu::Observer {
 public:
  bool wants_instructions() const override { return true; }
  void executes(const vgpu::Actor& actor) override {
    Cell& cell = cells_[static_cast<size_t>(actor.cta) % cells_.size()];
    cell.threads.fetch_add(static_cast<uint64_t>(std::popcount(actor.lanes)), std::memory_order_relaxed);
    cell.warps.fetch_add(1, std::memory_order_relaxed);
  }

  uint64_t of_threads() const { return sum(&Cell::threads); }
  uint64_t of_warps() const { return sum(&Cell::warps); }

 private:
  struct alignas(64) Cell {  // blocks run concurrently
    std::atomic<uint64_t> threads{0}, warps{0};
  };
  uint64_t sum(std::atomic<uint64_t> Cell::*count) const {
    uint64_t total = 0;
    for (const Cell& cell : cells_) total += cell.*count;
    return total;
  }

  std::array<Cell, 64> cells_;
};

}  // namespace tandem::tool
