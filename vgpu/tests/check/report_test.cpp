// Tests of the text of a finding.
#include <gtest/gtest.h>

#include <set>

#include "vgpu/tests/check/play.h"

namespace tandem::vgpu {
namespace {

TEST(Report, ReportsThreadPlaceAndRemedy) {
  Play play;
  const BarrierId id = play.mbarrier();
  play.load_box(play.at(0, kOne, "cp.async.bulk.tensor.2d"), id, 0, kAt, 4096);
  play.load(play.at(1, kAll, "ld.shared.u32"), kAt + 0x80);
  EXPECT_EQ(play.text(),
            "missing-wait in kernel: smem + 0x80 (shared 0x880)\n"
            "  the bulk load issued by warp 0 lane 0 may still be writing there: no wait covers the operation\n"
            "  by  block 0, warp 1, lane 0: reads\n"
            "      ld.shared.u32\n"
            "      kernel.cu:5\n"
            "  and block 0, warp 0, lane 0: bulk load writes\n"
            "      cp.async.bulk.tensor.2d\n"
            "      kernel.cu:4\n"
            "  32 times at this line, at 32 addresses\n"
            "  " +
                std::string(advice_of(Rule::missing_wait)) + "\n");
}

TEST(Report, InTheOrderOfTheSource) {
  Play play;
  const Actor first = play.at(0, kOne, "ld.shared"), second = play.at(0, kOne, "ld.shared");
  play.load(second, kAt);
  play.load(first, kAt + 64);
  const std::vector<Finding> findings = play.checker->findings();
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].party.instruction, first.instruction);
}

TEST(Report, FindingsOfTheMachineAreAmongThem) {
  Play play;
  const int32_t place = play.at(0, kOne, "bar.sync").instruction;
  for (int i = 0; i < 2; ++i)
    play.checker->finds({Rule::barrier_count, {0, 1, -1, place, "arrives"}, {}, "barrier 3", "counts differ"});
  EXPECT_EQ(play.rules(), "barrier-count");
  EXPECT_NE(play.text().find("barrier-count in kernel: barrier 3\n  counts differ\n"), std::string::npos);
}

// A repeated mistake is one finding, for any number of addresses.
TEST(Report, CountsWhatIsAlike) {
  Play play;
  const Actor reads = play.at(2, kAll, "ld.shared.u32"), also = play.at(3, kAll, reads.instruction);
  play.load(reads, kAt);
  play.load(also, kAt);
  const std::vector<Finding> findings = play.checker->findings();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].times, 64u);
  EXPECT_EQ(findings[0].places, 32u);
  EXPECT_EQ(findings[0].warps, 2u);
  EXPECT_NE(play.text().find("64 times at this line, by 2 warps, at 32 addresses"), std::string::npos) << play.text();
}

TEST(Report, NamesTheOtherLines) {
  Play play;
  play.store(play.at(0, kOne, "st.shared.u32"), kAt);
  play.store(play.at(0, kOne, "st.shared.u32"), kAt + 64);
  const Actor reads = play.at(1, kOne, "ld.shared.u32");
  play.load(reads, kAt);
  play.load(reads, kAt + 64);
  ASSERT_EQ(play.rules(), "data-race");
  EXPECT_NE(play.text().find("with others too, at kernel.cu:2"), std::string::npos) << play.text();
}

TEST(Report, WithoutTheLetter) {
  Play play({}, {}, 20, false);
  for (const Rule rule : {Rule::pending_load, Rule::trap})
    play.checker->finds({rule, {0, 1, -1, play.at(0, kOne, "add.u32").instruction, "reads"}, {}, "", "a sentence"});
  EXPECT_EQ(play.rules(), "trap");
}

TEST(Report, TheLetterLeavesRoomForErrors) {
  Play play({}, {}, 2);
  for (const Rule rule : {Rule::pending_load, Rule::trap}) {
    for (int i = 0; i < 3; ++i) {
      const int32_t place = play.at(0, kOne, "add.u32").instruction;
      play.checker->finds({rule, {0, 1, -1, place, "reads"}, {}, "", "a sentence"});
    }
  }
  EXPECT_EQ(play.rules(), "pending-load pending-load trap trap");
}

TEST(Report, EachRuleHasANameAndAdvice) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < static_cast<size_t>(Rule::count); ++i) {
    const auto rule = static_cast<Rule>(i);
    EXPECT_FALSE(name_of(rule).empty()) << i;
    EXPECT_EQ(advice_of(rule).back(), '.') << i;
    names.insert(name_of(rule));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(Rule::count));
}

}  // namespace
}  // namespace tandem::vgpu
