// Checks expressions printed as CUDA, and their properties that kernels depend on.
#include "score_mod/print.h"

#include "base/text.h"
#include "score_mod/program.h"
#include "unit/score_mod/texts.h"

namespace tandem::score_mod::test {
namespace {

TEST(Print, is_one_line_for_each_operation) {
  const Mod mod = parsed("score - slope[head] * abs(q - k)");
  EXPECT_EQ(print(mod, mod.result),
            "  const float v0 = score;\n"
            "  const int v1 = at.head;\n"
            "  const float v2 = mod_gather<ModElement::f32>(names.tensors[0], v1);\n"
            "  const int v3 = at.q;\n"
            "  const int v4 = at.k;\n"
            "  const int v5 = mod_subtract(v3, v4);\n"
            "  const int v6 = mod_abs(v5);\n"
            "  const float v7 = mod_to_real(v6);\n"
            "  const float v8 = mod_multiply(v2, v7);\n"
            "  const float v9 = mod_subtract(v0, v8);\n"
            "  return v9;\n");
}

TEST(Print, constants_are_bits_and_scalars_are_parameters) {
  const Mod mod = parsed("score * c + (-1.5 if on or seen[k] else temperature * n)");
  const std::string text = print(mod, mod.result);
  for (const char* part : {"mod_float(names.scalars[0])", "= names.scalars[1];", "= names.scalars[2];",
                           "mod_float(0xbfc00000)", "mod_gather<ModElement::f32>(names.tensors[4]);"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  EXPECT_NE(print(parsed("float(k - 0x80000001)"), parsed("float(k - 0x80000001)").result).find("0x80000001"),
            std::string::npos);
}

TEST(Print, of_a_bool_is_not) {
  const Mod mod = parsed("not on", Signature::Result::mask);
  EXPECT_NE(print(mod, mod.result).find("mod_not(v"), std::string::npos);
}

// A divisor that is equal for all scores of a head is recognised.
TEST(Print, quotients_by_one_divisor) {
  const auto has = [](const char* text, const char* call) {
    const Mod mod = parsed(text);
    return print(mod, mod.result).find(call) != std::string::npos;
  };
  for (const char* text : {"score / 30", "score / c", "score / slope[head]", "q / n"}) {
    EXPECT_TRUE(has(text, "mod_divide_by(")) << text;
  }
  for (const char* text : {"30 / score", "score / slope[k]", "score / float(q)"}) {
    EXPECT_TRUE(has(text, "mod_divide(")) << text;
    EXPECT_FALSE(has(text, "mod_divide_by(")) << text;
  }
}

// Programs of different expressions, element types or results have different functions; equal programs share one.
TEST(Print, tells_programs_apart) {
  std::shared_ptr<const Program> a, again, other, other_type, mask;
  Signature names = signature();
  ASSERT_TRUE(read_program("score + slope[head]", names, &a).ok());
  ASSERT_TRUE(read_program("score + slope[head]", names, &again).ok());
  ASSERT_TRUE(read_program("score + slope[q]", names, &other).ok());
  names.tensors[0].element = Element::bf16;
  ASSERT_TRUE(read_program("score + slope[head]", names, &other_type).ok());
  ASSERT_TRUE(read_program("k <= q", signature(Signature::Result::mask), &mask).ok());
  EXPECT_EQ(a, again);
  EXPECT_NE(a->cuda_hash, other->cuda_hash);
  EXPECT_NE(a->cuda_hash, other_type->cuda_hash);
  EXPECT_NE(a->cuda.find("float score_mod("), std::string::npos);
  EXPECT_NE(a->cuda.find("float score_slope("), std::string::npos);
  EXPECT_NE(mask->cuda.find("bool mask_mod("), std::string::npos);
  EXPECT_TRUE(a->passes());
}

// A costly value that is the same for a row or for a key is preloaded. `operations` counts the rest of a mask.
TEST(Print, what_rows_and_keys_hold) {
  const auto of_mask = [](const char* text) {
    const Mod mod = parsed(text, Signature::Result::mask);
    const Held held{.rows = held_by_rows(mod, mod.result, 2), .keys = held_by_keys(mod, mod.result, 2)};
    return str_cat(held.rows.size(), " ", held.keys.size(), " ", operations_of_mask(mod, held));
  };
  EXPECT_EQ(of_mask("k <= q"), "0 0 1");
  EXPECT_EQ(of_mask("k <= q and doc[batch, q] == doc[batch, k]"), "1 1 3");
  EXPECT_EQ(of_mask("doc[batch, k] == 3"), "0 1 0");        // the result itself
  EXPECT_EQ(of_mask("doc[batch, 0] == 3"), "1 0 0");        // the same for all scores: a row's value
  EXPECT_EQ(of_mask("q // 7 == k // 7"), "1 1 1");          // divisions
  EXPECT_EQ(of_mask("doc[batch, q - k] == 3"), "0 0 102");  // neither's
  EXPECT_EQ(of_mask("k <= q and (k < 4 or q - k < 9)"), "0 0 6");
  // at most two values are preloaded
  EXPECT_EQ(of_mask("doc[0, k] < q and doc[1, k] < q and doc[2, k] < q"), "0 2 105");
  std::shared_ptr<const Program> program;
  for (const auto& [text, alike] : {std::pair{"score * slope[head]", true}, std::pair{"score + slope[q]", false},
                                    std::pair{"score + 1", true}, std::pair{"score + slope[head] * slope[q]", false}}) {
    ASSERT_TRUE(read_program(text, signature(), &program).ok());
    EXPECT_NE(program->cuda.find(str_cat("rows_are_alike() { return ", alike ? "true" : "false")), std::string::npos)
        << text;
  }
}

// Expressions whose captured gradients the main kernel sums score by score.
TEST(Print, sums_of_scores) {
  const auto captured_per_score = [](const char* text) {
    std::shared_ptr<const Program> program;
    EXPECT_TRUE(read_program(text, signature(), &program).ok()) << text;
    return program->captured_per_score;
  };
  for (const char* text : {"score * temperature", "score * (1 + slope[head])", "score * slope[head] + temperature"})
    EXPECT_TRUE(captured_per_score(text)) << text;
  for (const char* text : {"score + 1", "score * slope[k]", "score * score * temperature", "score / temperature",
                           "score * temperature * slope[head]", "score * float(q) + temperature * float(k)",
                           "score * slope[0] + slope[1] + slope[2]", "score + inf * temperature"})
    EXPECT_FALSE(captured_per_score(text)) << text;
}

// Lines of a tile along which all scores read the same element.
TEST(Print, what_a_score_reads_by_lines) {
  const auto line_of = [](const std::string& text) {
    std::shared_ptr<const Program> program;
    EXPECT_TRUE(read_program(text, signature(), &program).ok());
    EXPECT_EQ(program->captures.size(), 1u) << text;
    return program->captures.at(0).line;
  };
  EXPECT_EQ(line_of("score + slope[head]"), Line::tile);
  EXPECT_EQ(line_of("score * slope[doc[batch, 3]]"), Line::tile);
  EXPECT_EQ(line_of("score + slope[select(score > 0, 1, 0)]"), Line::row);
  EXPECT_EQ(line_of("score + slope[doc[batch, q]]"), Line::row);
  EXPECT_EQ(line_of("score + slope[doc[batch, k]]"), Line::column);
  EXPECT_EQ(line_of("score + slope[k // 3]"), Line::column);
  EXPECT_EQ(line_of("score + slope[clamp(q - k + 32, 0, 64)]"), Line::diagonal);
  EXPECT_EQ(line_of("score + table[head, abs(k - q) // 2]"), Line::diagonal);
  EXPECT_EQ(line_of("score + table[q, q - k]"), Line::row);
  std::shared_ptr<const Program> program;
  ASSERT_TRUE(read_program("score * temperature + table[head, q - k]", signature(), &program).ok());
  for (const char* part :
       {"if (line == CaptureLine::tile) return 1;", "if (line == CaptureLine::diagonal) return 1;",
        "captures.template add<0, 4>(v0, mod_cell(names.tensors[4]));", ", mod_cell(names.tensors[1], v"}) {
    EXPECT_NE(program->cuda.find(part), std::string::npos) << part << " in\n" << program->cuda;
  }
}

// Prints which tiles read one element of each tensor, if positions alone decide it and only a sum is needed.
TEST(Print, what_tiles_read) {
  std::shared_ptr<const Program> program;
  for (const char* text :
       {"score + slope[doc[batch, q]]", "score + slope[select(score > 0, 1, 0)]", "score * slope[head]",
        "score + slope[head] * table[head, q]", "score + q", "score + slope[head] * (q - k)"}) {
    ASSERT_TRUE(read_program(text, signature(), &program).ok()) << text;
    EXPECT_FALSE(program->captured_per_tile) << text;
    EXPECT_EQ(program->cuda_ranges, "") << text;
  }
  ASSERT_TRUE(read_program("score - 2 * table[head, clamp(q - k, 0, 8)] + temperature", signature(), &program).ok());
  EXPECT_TRUE(program->captured_per_tile);
  for (const char* part : {"TANDEM_DEVICE bool tile_captures(", "range_subtract(", ")) return false;\n", ".low));\n"}) {
    EXPECT_NE(program->cuda_ranges.find(part), std::string::npos) << part << " in\n" << program->cuda_ranges;
  }
}

// Every line of this expression doubles the paths from its result to its inputs.
TEST(Print, long_texts_take_no_time) {
  std::string text = "x = q";
  for (int n = 0; n < 60; ++n) text += "; x = x + x * n";
  std::shared_ptr<const Program> program;
  ASSERT_TRUE(read_program(text + "; score + slope[x]", signature(), &program).ok());
  EXPECT_EQ(program->captures.at(0).line, Line::row);
}

}  // namespace
}  // namespace tandem::score_mod::test
