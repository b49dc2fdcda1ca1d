#!/usr/bin/env python3
"""scripts/prose_lint.py on good and bad samples of every rule."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import prose_lint  # noqa: E402
import size_lint  # noqa: E402


def rules(path, text):
    """The sorted names of the rules that a file breaks."""
    return sorted({finding.rule for finding in prose_lint.check_file(path, text)})


class Comments(unittest.TestCase):
    def test_good(self):
        text = """// Loads keys and values with TMA. One thread issues every copy.
//
//   k_full  | mma waits
//   k_empty | load waits
#pragma once

// The mask applies to `what` is visible, so that hidden keys contribute nothing.
constexpr int kStages = 2;  // power of two
auto text = "// Of no comment";
constexpr int kBytes = 1'000'000;  // bytes
}  // namespace tandem
"""
        self.assertEqual(rules("src/a.h", text), [])

    def test_openers(self):
        for word in set(prose_lint.OPENERS) - {"Behind", "Beside"}:
            self.assertEqual(rules("kernels/a.cuh", f"int a;\n// {word} the tile is stored.\n"), ["opener"], word)
            self.assertEqual(rules("a.py", f"a = 1\n# Store it. {word} the tile is stored.\n"), ["opener"], word)
        self.assertEqual(rules("a.sh", "# Whether tests run.\n"), ["opener"])
        self.assertEqual(rules("CMakeLists.txt", "# Whether tests run.\n"), ["opener"])
        self.assertEqual(rules("src/a.cpp", "int a;\n// The row\n// of a tile is stored.\n"), [])
        self.assertEqual(rules("src/a.cpp", "int a;\n// what() is the message.\n"), [])
        self.assertEqual(rules("docs/a.md", "Which kernel runs?\n"), [])

    def test_words(self):
        for text, rule in (
            ("The warp tells the next one.", "verb"),
            ("The copy is under way.", "verb"),
            ("The store comes behind the load.", "phrase"),
            ("The load is started anew.", "phrase"),
            ("The rows are those of the tile.", "noun"),
            ("The tile is no longer padded.", "history"),
        ):
            self.assertEqual(rules("src/a.h", f"int a;\n// {text}\n"), [rule], text)
        self.assertEqual(
            rules("src/a.h", "int a;\n// Reads `behind` and left_behind, so that of two tiles one stays.\n"), []
        )

    def test_pronouns(self):
        for word in ("It", "They", "Its row", "Their rows"):
            self.assertEqual(rules("src/a.h", f"int a;\n// Loads rows. {word} may be empty.\n"), ["pronoun"], word)
        self.assertEqual(rules("docs/a.md", "The tile is stored. It is then empty.\n"), ["pronoun"])
        self.assertEqual(rules("src/a.h", "int a;\n// It is unknown whether rows are empty.\n"), [])
        self.assertEqual(rules("src/a.h", 'auto a = "Give rows. It has none.";\n'), [])

    def test_length(self):
        words = " ".join(["word"] * 25)
        self.assertEqual(rules("src/a.h", f"int a;\n// The {words[:-5]}.\n"), [])
        self.assertEqual(rules("src/a.h", f"int a;\n// The {words}.\n"), ["long"])

    def test_trailing(self):
        self.assertEqual(rules("src/a.h", "int a;  // of a tile\n"), ["trailing"])
        self.assertEqual(rules("src/a.h", f"int a;  // {'x' * 61}\n"), ["trailing"])
        self.assertEqual(rules("src/a.h", f"int a;  // {'x' * 40}\n        // {'y' * 40}\n"), ["trailing"])

    def test_lines(self):
        self.assertEqual(rules("src/a.h", "// Line.\n" * 12 + "int a;\n"), [])
        self.assertEqual(rules("src/a.h", "// Line.\n" * 13 + "int a;\n"), ["comment-lines"])
        self.assertEqual(rules("src/a.h", "int a;\n" + "// Line.\n" * 4 + "int b;\n"), ["comment-lines"])

    def test_docstrings(self):
        self.assertEqual(rules("python/a.py", '"""Attention."""\n'), [])
        self.assertEqual(rules("python/a.py", 'def f():\n    """What is left of it."""\n'), ["opener"])


class Messages(unittest.TestCase):
    def test_messages(self):
        self.assertEqual(rules("src/a.cpp", 'fail("head_dim (7) must be even: pad q and k");\n'), [])
        self.assertEqual(rules("src/a.cpp", 'fail("the call asks for " "too much memory");\n'), ["verb"])
        self.assertEqual(rules("python/a.py", 'raise ValueError(f"{name} is made of too many parts")\n'), ["verb"])
        self.assertEqual(rules("tests/a.cpp", 'fail("the call asks for too much memory");\n'), [])


class Pages(unittest.TestCase):
    def test_pages(self):
        good = "# What it is\n\nTandem computes attention.\n\n```\nOf no prose\n```\n\n| Of | a table |\n"
        self.assertEqual(rules("docs/a.md", good), [])
        self.assertEqual(rules("docs/a.md", "- Of two tiles one is stored.\n"), ["opener"])
        self.assertEqual(rules("docs/a.md", "x\n" * 201), ["long", "page"])
        self.assertEqual(rules("README.md", "x\n\n" * 66), ["page"])
        self.assertEqual(rules("docs/a.md", f"The {'word ' * 20}end.\n\n" * 10), ["page-average"])

    def test_changelog(self):
        self.assertEqual(rules("CHANGELOG.md", f"- Forward: {'word ' * 18}end.\n"), [])
        self.assertEqual(rules("CHANGELOG.md", f"- Forward: {'word ' * 20}end.\n"), ["long"])

    def test_subjects(self):
        for good in ("Add a linter", "Bring keys by TMA", "Pass the mask", "Focus the demo", "Test dq"):
            self.assertIsNone(prose_lint.check_subject(good), good)
        for bad in ("Added a linter", "Adds a linter", "Adding it", "The linter", "2,000 runs", "Add " + "x" * 70):
            self.assertIsNotNone(prose_lint.check_subject(bad), bad)


class Sizes(unittest.TestCase):
    def test_functions(self):
        body = "  f();\n" * 78
        self.assertEqual(rules("src/a.cpp", f"void f() {{\n{body}}}\n"), [])
        self.assertEqual(rules("src/a.cpp", f"namespace a {{\nvoid f() {{\n{body}\n}}\n}}\n"), ["function"])
        self.assertEqual(rules("src/a.cpp", f"A::A() : b(1), c{{2}} {{\n{body}\n}}\n"), ["function"])
        self.assertEqual(rules("kernels/a.cuh", f"template <Config T>\nvoid mainloop_rs() {{\n{body}\n}}\n"), [])
        self.assertEqual(rules("a.py", "def f():\n" + "    g()\n" * 80), ["function"])

    def test_parameters(self):
        self.assertEqual(
            rules("src/a.cpp", "void f(int a, int b, int c, int d, int e, std::map<int, int> g) {\n}\n"), []
        )
        text = "void f(int a, int b, int c, int d, int e, int g, int h) {\n}\n"
        self.assertEqual(rules("src/a.cpp", text), ["parameters"])
        self.assertEqual(rules("tests/a.cpp", text), [])
        self.assertEqual(rules("vgpu/examples/a.cpp", text), [])  # callbacks of other libraries

    def test_files(self):
        self.assertEqual(rules("src/a.cpp", "\n" * 501), ["file"])
        self.assertEqual(rules("tests/a.cpp", "\n" * 600), [])
        self.assertEqual(rules("kernels/a.cuh", "void f() {\n  if constexpr (a) b();\n}\n" * 9), ["if-constexpr"])

    def test_class_names(self):
        texts = {"src/a.h": "struct Tile {\n};\n", "vgpu/a.h": "class Tile {\n};\n", "src/c.cpp": "struct Tile {};\n"}
        self.assertEqual(list(size_lint.check_class_names(texts)), [])
        texts["src/b.h"] = "struct Tile;\nenum class Tile { a };\nstruct Tile {\n};\n"
        self.assertEqual([finding[0] for finding in size_lint.check_class_names(texts)], ["src/b.h"])


class Paths(unittest.TestCase):
    def test_pages_exist(self):
        self.assertEqual(list(prose_lint.check_paths({"src/a.h": "// See docs/semantics.md.\n"})), [])
        found = list(prose_lint.check_paths({"src/a.h": "int a;\n// See docs/gone.md.\n"}))
        self.assertEqual([(f.line, f.rule) for f in found], [(2, "path")])


class Budgets(unittest.TestCase):
    def test_only_rules_over_budget_fail(self):
        findings = prose_lint.check_file("src/a.h", "int a;  // of a tile\nint b;\n// Of a tile.\n")
        self.assertEqual([f.rule for f in prose_lint.over_budget(findings, "trailing 1 src=1\n")], ["opener"])


if __name__ == "__main__":
    unittest.main()
