"""examples/serve: requests have the same tokens in a batch as alone, and wait if the cache is full."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "serve" / "serve.py"
TINY = "--layers 2 --width 32 --heads 2 --train-steps 3 --longest 12".split()


def run(*arguments):
    """Runs the program with the tested tandem."""
    package = str(pathlib.Path(tandem.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLE, *TINY, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_request_has_the_same_tokens_as_alone():
    done = run("--requests", 8, "--rows", 24)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 requests have the same tokens alone" in done.stdout
    assert int(re.search(r"(\d+) tokens generated", done.stdout)[1]) >= 8
    assert "4 pages of the system prompt are shared by 8 requests" in done.stdout
    assert len(re.findall(r"^ *\d+ \|[ .Pd]*\|$", done.stdout, re.M)) == 8


def test_requests_wait_for_pages():
    done = run("--requests", 6, "--pages", 19, "--page-size", 13)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 requests have the same tokens alone" in done.stdout
    assert any("." in line for line in re.findall(r"\|(.*)\|", done.stdout))


def test_a_cache_that_is_too_small_is_refused():
    done = run("--requests", 3, "--pages", 8)
    assert done.returncode == 1 and re.search(r"--pages \(8\) must hold a request: pass \d+", done.stderr)
    done = run("--rows", 2)
    assert done.returncode == 2 and "--rows (2) must be at least --batch (6)" in done.stderr
