// The expressions of the gallery in docs/score_mod.md.
#include <fstream>

#include "score_mod/program.h"
#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

Signature names(bool mask) {
  return {.result = mask ? Signature::Result::mask : Signature::Result::score,
          .scalars = {{"width", Type::integer}, {"prefix", Type::integer}},
          .tensors = {{"doc", Type::integer, 2, Element::i32},
                      {"ancestor", Type::boolean, 2, Element::boolean},
                      {"slope", Type::real, 1},
                      {"table", Type::real, 2},
                      {"temperature", Type::real, 1}}};
}

TEST(Gallery, is_read_as_it_stands) {
  std::ifstream page(TANDEM_MODS_PAGE);
  ASSERT_TRUE(page.is_open());
  int masks = 0, scores = 0;
  bool inside = false, mask = true;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) inside = line == "## Gallery";
    if (line == "Scores:") mask = false;
    if (!inside || !line.starts_with("    ")) continue;
    std::shared_ptr<const Program> program;
    const Status status = read_program(line, names(mask), &program);
    EXPECT_TRUE(status.ok()) << line << "\n" << status.message;
    ++(mask ? masks : scores);
  }
  EXPECT_EQ(masks, 8);
  EXPECT_EQ(scores, 5);
}

}  // namespace
}  // namespace tandem::score_mod::test
