#!/usr/bin/env python3
"""Tests the benchmark's shapes and figures: the results of rounds, and the merging of parts."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from rig import figures, shapes  # noqa: E402

import gpu  # noqa: E402


def result(**rounds):
    """Returns the result of a shape of 1e9 operations, with times in microseconds."""
    return dict(
        cell="d64 full 4k", title="d64 full", row="d64 full", column="4k", dtype="bf16", data="normal", sustained=False,
        microseconds=False, flops=1e9, target=1.0, run=0, absent={}, wrong={}, errors={"Tandem": 1e-3}, plain=2e-3,
        us=rounds, mhz={}, watts={}, host_bound=[], ceiling="d64",
    )  # fmt: skip


def refused(*words):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            gpu.parse(list(words))
        except SystemExit as why:
            return f"{said.getvalue()} {why}"
    return "accepted"


class Figures(unittest.TestCase):
    def test_the_best_peer_is_that_of_each_round(self):
        r = figures.conclude(result(Tandem=[10, 10, 10], FA3=[11, 13, 12], cuDNN=[14, 10.5, 13]))
        self.assertEqual(r["ratio"], 1.1)  # median of 1.1, 1.05 and 1.2
        self.assertEqual(r["best"], "FA3")
        self.assertEqual(r["ratio_quartiles"], [1.075, 1.15])
        self.assertEqual(r["tflops"], {"Tandem": 100.0, "FA3": 83.3, "cuDNN": 76.9})

    def test_within_1_5_percent_is_par(self):
        said = {x: figures.verdict(x) for x in (0.98, 0.986, 1, 1.015, 1.016)}
        self.assertEqual(list(said.values()), ["lost", "par", "par", "par", "won"])

    def test_an_older_build_is_no_peer(self):
        r = figures.conclude(result(Tandem=[10, 10], before=[9, 9], FA3=[20, 20]))
        self.assertEqual((r["ratio"], r["before"], r["best"]), (2, 0.9, "FA3"))
        alone = figures.conclude(result(Tandem=[10], before=[9]))
        self.assertNotIn("verdict", alone)
        self.assertIn("before 0.900", figures.line(alone))

    def test_a_wrong_result_wins_nothing(self):
        wrong = dict(result(Tandem=[10], FA3=[20]), wrong={"Tandem": "its error is large", "FA2": "so is this"})
        r = figures.conclude(wrong)
        self.assertEqual(r["verdict"], "wrong")
        self.assertIn("WRONG", figures.line(r))
        self.assertIn("1 wrong", figures.claim([r]))
        self.assertIn("FA2 WRONG in 1 (d64 full 4k): so is this", figures.summary([r]))

    def test_the_share_of_the_ceiling_is_that_of_the_window(self):
        limits = {"mma": {"d64": {"burst": 200, "sustained": 125}}}
        self.assertEqual(figures.conclude(result(Tandem=[10]), limits)["of_ceiling"], 0.5)
        long = dict(result(Tandem=[10]), sustained=True)
        self.assertEqual(figures.conclude(long, limits)["of_ceiling"], 0.8)

    def test_the_claim_says_against_whom(self):
        whole = figures.conclude(result(Tandem=[10], FA3=[20], FA4=[20], cuDNN=[20]))
        some = figures.conclude(result(Tandem=[10], FA3=[10.1]))
        self.assertEqual(
            figures.claim([whole, some]),
            "2 cells: 1 won, 1 par, 0 lost (par: within 1.5%); 1 against all three of FA3, FA4, cuDNN",
        )

    def test_a_result_without_ours_is_a_line(self):
        r = figures.conclude(dict(result(FA3=[20]), absent={"Tandem": "no such problem"}, errors={}))
        self.assertIn("-", figures.line(r))
        self.assertIn("Tandem absent in 1 (d64 full 4k): no such problem", figures.summary([r]))


class Merging(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def part(self, name, commit, *columns):
        path = self.folder / name
        made = [dict(figures.conclude(result(Tandem=[10], FA3=[11])), cell=f"d64 {c}", column=c) for c in columns]
        figures.save(path, [dict(commit=commit, device=name)], made)
        return path

    def test_parts_are_one_table(self):
        runs, merged = figures.merge([self.part("a", "c0ffee", "1k", "4k"), self.part("b", "c0ffee", "8k")])
        self.assertEqual([run["device"] for run in runs], ["a", "b"])
        self.assertEqual([(r["column"], r["run"]) for r in merged], [("1k", 0), ("4k", 0), ("8k", 1)])
        self.assertIn("3 won", figures.table(merged) + figures.summary(merged))

    def test_parts_are_of_one_commit(self):
        with self.assertRaisesRegex(ValueError, "one commit, not of c0ffee, decaf"):
            figures.merge([self.part("a", "c0ffee", "1k"), self.part("b", "decaf", "4k")])

    def test_no_cell_is_there_twice(self):
        with self.assertRaisesRegex(ValueError, "twice: d64 1k"):
            figures.merge([self.part("a", "c0ffee", "1k"), self.part("b", "c0ffee", "1k")])


class Cells(unittest.TestCase):
    def test_names_are_unique(self):
        names = [c.name for c in shapes.grid()]
        self.assertEqual(len(names), len(set(names)))

    def test_parts_make_the_whole(self):
        whole = shapes.grid()
        for count in (1, 2, 3, 7):
            parts = [shapes.part(whole, n, count) for n in range(1, count + 1)]
            self.assertEqual(sum(parts, []), whole)
            weights = [sum(shapes.SUSTAINED if c.sustained else 1 for c in p) for p in parts]
            self.assertLessEqual(max(weights) - min(weights), 2 * shapes.SUSTAINED)

    def test_untuned_shapes_divide_nothing(self):
        for c in shapes.grid():
            if c.row.startswith("untuned"):
                self.assertEqual(c.heads * c.batch % 2, 1)
                self.assertIn(c.seqlen, (768, 1536, 3000))

    def test_operations(self):
        self.assertEqual(shapes.Cell("", "", 4, 1, 8).flops(), 2 * 16 * 16)
        self.assertEqual(shapes.Cell("", "", 4, 1, 8, causal=True).flops(), 2 * 8 * 16)
        self.assertEqual(shapes.Cell("", "", 4, 1, 8, causal=True, window=2).flops(), 2 * (1 + 2 + 2 + 2) * 16)

    def test_words(self):
        self.assertEqual([c.column for c in gpu.parse(["--cells", "f16,d64,causal"]).cells], ["1k", "4k", "16k"])
        both = gpu.parse(["--cells", "d128,causal,4k,burst,bf16", "--data", "normal,sink20"]).cells
        self.assertEqual({c.data for c in both}, {"normal", "sink20"})
        self.assertEqual(len({c.name for c in both}), len(both))

    def test_what_is_refused(self):
        for words, said in (
            (["--part", "4/3"], "must be I/N"),
            (["--data", "sunk"], "--data ('sunk') must be of normal"),
            (["--data", "model"], "--activations must be given"),
            (["--peers", "FA5"], "--peers ('FA5') must be of FA3"),
            (["--rounds", "0"], "must be at least 1"),
            (["--before", "no/such.so"], "--before (no/such.so) must exist"),
            (["--merge", "no.json"], "--merge (no.json) must exist"),
            (["--cells", "d65"], "--cells ('d65') must be words of cells"),
        ):
            self.assertIn(said, refused(*words), words)


if __name__ == "__main__":
    unittest.main()
