// Progress lines, and tables that are printed row by row.
#include "cli/terminal.h"

#include <gtest/gtest.h>

namespace tandem::tool {
namespace {

TEST(Progress, ShowsTimeUntilAShareIsKnown) {
  EXPECT_EQ(progress_text("checking", 0, 12.3), "checking: 12.3 s");
  EXPECT_EQ(progress_text("checking", 0, 0.2), "checking: 1.0 s");
}

TEST(Progress, EstimatesTheRestFromTheShare) {
  EXPECT_EQ(progress_text("checking", 0.25, 30), "checking: 25 %, about 1 min 30 s left");
  EXPECT_EQ(progress_text("checking", 0.25, 40), "checking: 25 %, about 2 min 0 s left");
  EXPECT_EQ(progress_text("checking", 2, 40), "checking: 100 %, about 1.0 s left");
}

TEST(Table, RowsThatArePrintedOneByOneAlign) {
  Table table({"dtype", "seqlen", ""});
  table.at_least(6);
  EXPECT_EQ(table.line(), "dtype   seqlen\n");
  table.add({"f32", "64", "x"});
  EXPECT_EQ(table.line(), "f32         64       x\n");
  table.add({"bf16", "100000", "y"});
  EXPECT_EQ(table.line(), "bf16    100000       y\n");
  EXPECT_EQ(table.text(), "dtype   seqlen\nf32         64       x\nbf16    100000       y\n");
}

}  // namespace
}  // namespace tandem::tool
