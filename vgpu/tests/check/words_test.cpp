// Compares shadow memory of words, runs and crowded granules with a plain list of accesses.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

// The threads that have accessed each byte since the last barrier of all threads.
class PlainModel {
 public:
  // Returns the expected finding for an access of these lanes, lane i at address + i * stride.
  std::string access(int32_t warp, uint32_t lanes, uint64_t address, uint32_t bytes, uint64_t stride, bool writes) {
    bool races = false, unwritten = false;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      const int32_t thread = warp * 32 + static_cast<int32_t>(lane);
      bool any_written = false;
      for (uint64_t at = address + lane * stride, end = at + bytes; at < end; ++at) {
        Byte& byte = bytes_[at];
        any_written |= byte.written;
        for (const auto& [other, wrote] : byte.touched) races |= other != thread && (writes || wrote);
        byte.written |= writes;
      }
      unwritten |= !writes && !any_written;
    }
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      for (uint64_t at = address + lane * stride, end = at + bytes; at < end; ++at)
        bytes_[at].touched.emplace_back(warp * 32 + static_cast<int32_t>(lane), writes);
    }
    return races && unwritten ? "data-race uninitialised" : races ? "data-race" : unwritten ? "uninitialised" : "";
  }
  void barrier() {
    for (Byte& byte : bytes_) byte.touched.clear();
  }

 private:
  struct Byte {
    bool written = false;
    std::vector<std::pair<int32_t, bool>> touched;
  };
  std::vector<Byte> bytes_{kAt + 4096};
};

TEST(Words, RandomAccessesAreJudgedAsByAPlainList) {
  int findings = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](uint32_t n) { return random() % n; };
    const bool begin_written = below(2) != 0, by_words = below(2) != 0;
    Play play({}, {}, 1000);
    PlainModel model;
    const auto barrier = [&] {
      play.barrier({0, 1, 2, 3});
      model.barrier();
    };
    if (begin_written) {
      play.store(play.at(0, kAll, "st.shared.v4"), kAt, 16, 16);
      model.access(0, kAll, kAt, 16, 16, true);
      barrier();
    }
    for (int event = 0; event < 40; ++event) {
      if (below(3) == 0) barrier();
      const auto warp = static_cast<int32_t>(below(4));
      const uint32_t bytes = by_words ? 4 : 1u << below(5), steps[] = {1, 1, 2, 5};
      const bool writes = below(3) == 0;
      const uint32_t stride = !writes && below(4) == 0 ? 0 : bytes * steps[below(4)];
      const uint32_t masks[] = {kAll, kAll, 1u << below(32), static_cast<uint32_t>(random())};
      const uint32_t lanes = masks[below(4)] | 1u << below(32);
      const uint64_t address = kAt + bytes * below(begin_written && stride <= 8 ? 32 / bytes + 1 : 2);
      const std::string expected = model.access(warp, lanes, address, bytes, stride, writes);
      const Actor actor = play.at(warp, lanes, writes ? "st.shared" : "ld.shared");
      if (writes) {
        play.store(actor, address, bytes, stride);
      } else {
        play.load(actor, address, bytes, stride);
      }
      ASSERT_EQ(play.rules(), expected) << "seed " << seed << ", event " << event << "\n" << play.text();
      findings += !expected.empty();
      if (!expected.empty()) break;
    }
  }
  EXPECT_GT(findings, 1000);
}

// The third thread knows the write, but not the read.
TEST(Words, AReadBehindAWriteIsRemembered) {
  Play play({.threads = 96});
  play.store(play.at(0, kAll, "st.shared"), kAt, 4, 20);
  play.barrier({0, 1, 2});
  play.load(play.at(1, kAll, "ld.shared"), kAt, 4, 20);
  play.store(play.at(2, kOne, "st.shared"), kAt);
  ASSERT_EQ(play.rules(), "data-race");
  EXPECT_EQ(play.checker->findings()[0].other.warp, 1);
}

TEST(Words, WhatAllReadMustNotBeWritten) {
  for (const bool together : {false, true}) {
    alignas(4096) static std::array<uint32_t, 1024> data;
    const auto at = reinterpret_cast<uint64_t>(data.data());
    Play play({.blocks = 200, .cluster = 1}, {{"x", data.data(), 4096, true, true}});
    for (int32_t block = 0; block < 200; ++block) {
      for (int32_t warp = 0; warp < 4; ++warp)
        play.load(play.at(block, warp, kAll, "ld.global"), at, 4, together ? 0 : 4, Memory::global);
    }
    EXPECT_EQ(play.text(), "");
    play.store(play.at(199, 3, kOne, "st.global"), at, 4, 4, Memory::global);
    EXPECT_EQ(play.rules(), "data-race") << together;
  }
}

// Many readers of a granule must not hide a write from later accesses.
TEST(Words, ReadersBehindACrowdMeetAWrite) {
  alignas(4096) static std::array<uint32_t, 1024> data;
  const auto at = reinterpret_cast<uint64_t>(data.data());
  Play play({.blocks = 3, .cluster = 1, .threads = 1024}, {{"x", data.data(), 4096, true, true}});
  std::vector<int32_t> all(32);
  std::iota(all.begin(), all.end(), 0);
  for (int round = 0; round < 4; ++round)
    for (const int32_t warp : all) play.load(play.at(0, warp, kAll, "ld.global"), at, 4, 4, Memory::global);
  play.barrier(all);
  play.store(play.at(0, 0, kAll, "st.global"), at, 4, 4, Memory::global);
  EXPECT_EQ(play.text(), "");
  play.load(play.at(1, 0, kAll, "ld.global"), at, 4, 4, Memory::global);
  EXPECT_EQ(play.rules(), "data-race");
}

}  // namespace
}  // namespace tandem::vgpu
