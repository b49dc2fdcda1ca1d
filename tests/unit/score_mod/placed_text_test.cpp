// Names of positions mean the longer sequence in the text for its parts.
#include "score_mod/placed_text.h"

#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

TEST(PlacedText, WithoutPositionsTheTextIsTheSame) {
  for (const char* text : {"score * 2", "1 if true else 0  # q", "score ? q", "\xc3\xa9"}) {
    const PlacedText placed = placed_text(text);
    EXPECT_EQ(placed.text, text);
    EXPECT_EQ(placed.places, "");
  }
}

TEST(PlacedText, NamesHaveTheirValuesInTheDocument) {
  const PlacedText placed = placed_text("d = q - k  # q\n; score + d * head");
  EXPECT_EQ(placed.places, "at_places");
  EXPECT_EQ(placed.text,
            "at_head = head + at_places[batch, 7]; at_q = at_places[batch, 1] + q * at_places[batch, 3]; "
            "at_k = at_places[batch, 2] + k * at_places[batch, 3]; d = at_q - at_k  # q\n; score + d * at_head");
  EXPECT_EQ(placed_text("doc[batch]").text, "at_batch = at_places[batch, 0]; doc[at_batch]");
  EXPECT_EQ(placed_text("seqlen_q - seqlen_k").text,
            "at_seqlen_q = at_places[batch, 4]; at_seqlen_k = at_places[batch, 5]; at_seqlen_q - at_seqlen_k");
}

TEST(PlacedText, NewNamesDifferFromNamesOfTheText) {
  EXPECT_EQ(placed_text("q == at_q").text, "at__q = at__places[batch, 1] + q * at__places[batch, 3]; at__q == at_q");
}

}  // namespace
}  // namespace tandem::score_mod::test
