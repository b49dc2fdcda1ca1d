// Embedded texts equal the files, and #includes find them.
#include "jit/sources.h"

#include <gtest/gtest.h>

#include <string>

namespace tandem::jit {
Sources fake_kernels();
}

namespace tandem::test {
namespace {

using jit::Text;

std::vector<std::string> names_of(const std::vector<Text>& texts) {
  std::vector<std::string> names;
  for (const Text& text : texts) names.emplace_back(text.name);
  return names;
}

TEST(Sources, AreTheFilesOfTheFolder) {
  const jit::Sources sources = jit::fake_kernels();
  EXPECT_EQ(names_of({sources.begin(), sources.end()}),
            (std::vector<std::string>{"add.cu", "tile/add.h", "tile/types.h", "tile/unused.h"}));
  EXPECT_EQ(sources[3].text,
            "// \"Quotes\", back\\slashes, ${variables}, @AT@, ; semicolons, [brackets] and )\" survive embedding.\n");
}

TEST(Sources, IncludedTransitivelyAndOnce) {
  const jit::Sources sources = jit::fake_kernels();
  const std::vector<std::string> all{"tile/add.h", "tile/types.h"};
  EXPECT_EQ(names_of(jit::included_by(sources[0].text, sources)), all);
  EXPECT_EQ(names_of(jit::included_by("\t# include\"tile/types.h\"", sources)),
            (std::vector<std::string>{"tile/types.h", "tile/add.h"}));
}

TEST(Sources, OtherLinesIncludeNothing) {
  for (const char* text : {"", "#", "#include", "#include <tile/add.h>", "// #include \"tile/add.h\"", "#include \"",
                           "#include \"tile/add.h", "#include \"absent.h\"", "include \"tile/add.h\"",
                           "#define X \"tile/add.h\"", "#include tile/add.h", "\n\n"}) {
    EXPECT_TRUE(jit::included_by(text, jit::fake_kernels()).empty()) << text;
  }
}

TEST(Sources, LibraryHasItsOwn) {
  EXPECT_FALSE(jit::source("no such kernel"));
  for (const Text& text : jit::kernels()) EXPECT_EQ(jit::source(text.name), text.text);
}

}  // namespace
}  // namespace tandem::test
