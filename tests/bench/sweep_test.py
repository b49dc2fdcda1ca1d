#!/usr/bin/env python3
"""Tests the random problems of bench/sweep.py and what it concludes of invented rounds. The test needs no torch and no
GPU."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import sweep  # noqa: E402
from rig import figures, random_shapes  # noqa: E402


def result(name="1.0 b1 64 h1/1 d64 full normal", again=None, **rounds):
    """The result of a problem of 1e10 operations, with times in microseconds."""
    r = dict(
        cell=name, title="few", row="few", column=name, flops=1e10, target=1.0, run=0, absent={}, wrong={}, errors={},
        plain=1e-3, us=rounds, mhz={}, watts={}, host_bound=[], sustained=False, microseconds=False, tiles=100, sms=132,
        kind="under 1 wave", head_dim=64,
    )  # fmt: skip
    figures.conclude(r)
    if again:
        r["again"] = again
        r["verdict"] = figures.verdict(again)
    return r


class Problems(unittest.TestCase):
    def test_a_seed_draws_the_same_problems_in_the_stated_bounds(self):
        for distribution in random_shapes.DISTRIBUTIONS:
            cells = random_shapes.problems(distribution, 5, 120)
            self.assertEqual(cells[:40], random_shapes.problems(distribution, 5, 40))
            self.assertNotEqual(cells[0], random_shapes.problems(distribution, 6, 1)[0])
            self.assertEqual(len({c.name for c in cells}), 120)
            for cell in cells:
                self.assertTrue(3e9 <= cell.flops() <= 1.2e12, cell.name)
                self.assertEqual(cell.heads % cell.kv_heads, 0)
                if distribution == "few":
                    self.assertTrue(cell.batch == 1 and cell.heads <= 16 and not cell.lengths, cell.name)
            self.assertTrue(0.4 < sum(c.causal for c in cells) / 120 < 0.8)
            self.assertTrue(any(c.keys != c.seqlen for c in cells))

    def test_the_operations_of_a_causal_problem_with_other_key_lengths_are_its_visible_pairs(self):
        for queries, keys in ((5, 9), (9, 5), (1, 7), (7, 1)):
            cell = random_shapes.Cell("", "", queries, 1, 1, seqlen_k=keys, causal=True)
            pairs = sum(j <= i + keys - queries for i in range(queries) for j in range(keys))
            self.assertEqual(cell.flops(), 4 * pairs)

    def test_final_seeds_are_not_tuning_seeds(self):
        self.assertTrue(all(seed >= 100 for seed in random_shapes.FINAL_SEEDS.values()))


class Conclusions(unittest.TestCase):
    def test_a_loss_counts_only_if_a_second_timing_agrees(self):
        once = result(Tandem=[10, 10], FA3=[9, 9], again=1.0)
        twice = result("1.1 b1", Tandem=[10, 10], FA3=[5, 5], again=0.5)
        text = sweep.summary([once, twice])
        self.assertIn("least 0.500, lost 1 (50%)", text)
        self.assertIn("lost: 1.1 b1  0.500 of FA3", text)
        self.assertNotIn("lost: 1.0", text)

    def test_deterministic_peers_have_a_figure_of_their_own(self):
        r = result(Tandem=[10, 10], FA3=[8, 8], **{"FA3 deterministic": [12, 13]})
        self.assertAlmostEqual(sweep.ratio(r, sweep.DETERMINISTIC), 1.25)
        self.assertIn("deterministic peers    1 problems: geometric mean 1.250", sweep.summary([r]))

    def test_a_wrong_result_and_an_absent_peer_are_listed(self):
        r = dict(result(Tandem=[10], FA3=[9]), wrong={"Tandem": "its error is large"}, absent={"FA4": "no kernel"})
        text = sweep.summary([r])
        self.assertIn("WRONG: 1.0 b1 64", text)
        self.assertIn("FA4 absent in 1", text)

    def test_the_picture_has_a_point_for_each_problem(self):
        run = dict(device="GPU", seed=5, peers=["FA3"], date="2026-01-01")
        picture = sweep.draw([run], [result(Tandem=[10], FA3=[9]), result("1.1 b1", Tandem=[10], FA3=[12])])
        self.assertEqual(picture.count("<circle") - 4, 2)  # 4 in the legend


class Parts(unittest.TestCase):
    def test_parts_share_the_problems(self):
        whole = [c.name for c in sweep.parse(["--seed", "5", "--count", "10"]).cells]
        parts = [sweep.parse(["--seed", "5", "--count", "10", "--part", f"{i}/3"]).cells for i in (1, 2, 3)]
        self.assertEqual(sorted(whole), sorted(c.name for part in parts for c in part))

    def test_parts_of_other_seeds_do_not_merge(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for seed in (5, 6):
                path = pathlib.Path(folder) / f"{seed}.json"
                run = dict(commit="c", seed=seed, distribution="few", device="GPU")
                figures.save(path, [run], [result(f"{seed}.0", Tandem=[10], FA3=[9])])
                self.assertEqual(json.loads(path.read_text())["runs"][0]["seed"], seed)
                paths.append(str(path))
            with self.assertRaisesRegex(SystemExit, "one distribution, seed and GPU"):
                sweep.merge(sweep.parse(["--merge", *paths]))

    def test_bad_arguments_are_refused(self):
        for words in (["--part", "4/3"], ["--part", "x"], ["--count", "0"], ["--peers", "FA9"], ["--fa3", "no/such"]):
            with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
                sweep.parse(words)


if __name__ == "__main__":
    unittest.main()
