"""examples/gpt: the loss falls, and runs are equal in every bit.

Libraries agree within the spread over the seeds, and the program reports where they do not.
"""

import json
import math
import os
import pathlib
import random
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

import tandem

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "gpt"
TINY = "--device cpu --layers 2 --width 32 --heads 2 --tokens 64 --batch 8 --steps 60 --rate 0.003 --repeat 30".split()


def run(*arguments, program="train.py"):
    """Runs a program with the tested tandem."""
    package = str(pathlib.Path(tandem.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLE / program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("chunk", [32])
def test_sequences_on_several_ranks_have_the_losses_of_one(chunk):
    if not torch.distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    sizes = {"ranks": 2, "tokens": 100, "layers": 1, "width": 32, "heads": 2, "steps": 3, "chunk": chunk}
    done = run(*(x for name, value in sizes.items() for x in (f"--{name}", value)), program="ranks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", within 0.0001" in done.stdout


def made_up_text():
    """Writes the same bytes for any pages that the program learns from otherwise.

    The pages are easy, so that rounding stays small.
    """
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 7))) for _ in range(60)]
    return " ".join(draw.choices(words, k=8000))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Returns the output of a comparison of two seeds, its record and its picture."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text").write_text(made_up_text())
    files = folder / "gpt.json", folder / "gpt.svg"
    paths = "--text", folder / "text", "--json", files[0], "--svg", files[1]
    done = run("--compare", "tandem,sdpa", "--seeds", 2, *TINY, *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(files[0].read_text()), files[1].read_text()


@pytest.fixture
def program(monkeypatch):
    """Imports train.py as a module, without leaving its neighbours to other tests."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    ours = ("train", "attention", "curves", "model")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train

    yield train
    for name in ours:
        sys.modules.pop(name, None)


def test_the_loss_falls(compared):
    for of in compared[1]["runs"]:
        assert len(of["losses"]) == 60
        assert abs(of["losses"][0] - math.log(256)) < 0.2  # at first all bytes are about equally likely
        assert of["final_loss"] < of["losses"][0] - 1.5
        assert of["step_ms"] > 0 and of["attention_share"] < 1


def test_two_runs_are_equal_in_every_bit(compared):
    printed, record, _ = compared
    assert record["libraries"]["tandem"]["equal_runs"]
    assert "equal in every bit" in printed
    weights = {(of["attention"], of["seed"]): of["weights"] for of in record["runs"]}
    assert len(set(weights.values())) == len(weights)  # the hash sees seeds and rounding


def test_libraries_agree_within_the_spread(compared):
    printed, record, _ = compared
    losses = {(of["attention"], of["seed"]): of["losses"] for of in record["runs"]}
    for seed in range(2):
        # Weights and bytes are equal, so that first losses differ only by float32's rounding, far less than between
        # seeds.
        assert abs(losses["tandem", seed][0] - losses["sdpa", seed][0]) < 1e-5
    assert abs(losses["tandem", 0][0] - losses["tandem", 1][0]) > 1e-3
    finals = {
        name: [of["final_loss"] for of in record["runs"] if of["attention"] == name] for name in ("tandem", "sdpa")
    }
    spread = min(max(x) - min(x) for x in finals.values())
    assert abs(sum(finals["tandem"]) - sum(finals["sdpa"])) / 2 <= spread
    assert record["libraries"]["sdpa"]["agrees"] and "within the spread of 2 seeds" in printed


def test_the_picture_is_well_formed(compared):
    picture = compared[2]
    svg = "{http://www.w3.org/2000/svg}"
    root = xml.fromstring(picture)
    assert root.tag == f"{svg}svg" and root.get("width")
    curves = [line for line in root.iter(f"{svg}polyline") if len(line.get("points").split()) == 60]
    assert len(curves) == 2 and len(list(root.iter(f"{svg}polygon"))) == 2
    written = [text.text for text in root.iter(f"{svg}text")]
    assert {"Tandem", "torch SDPA", "ms a step", "equal in every bit"} <= set(written)
    assert "nan" not in picture


def made_up(attention, finals, weights="same"):
    runs = [dict(attention=attention, seed=seed, weights="same", final_loss=x) for seed, x in enumerate(finals)]
    runs = [{**of, "losses": [5.5, of["final_loss"]], "step_ms": 1.0, "attention_share": 0.5} for of in runs]
    return runs, [dict(attention=attention, seed=0, weights=weights)]


@pytest.mark.parametrize(
    ("finals", "weights", "code", "said"),
    [
        ((1.01, 1.11, 1.21), "same", 0, "within"),
        ((1.31, 1.41, 1.51), "same", 1, "NOT within"),  # the losses differ by more than the spread
        ((0.5, 1.1, 9.0), "same", 1, "NOT within"),  # the separate spread is too small
        ((1.0, float("nan"), 1.2), "same", 1, "NOT within"),
        ((1.0, 1.1, 1.2), "other", 0, "differ"),  # another library's runs may differ
    ],
)
def test_what_disagrees_is_said(program, capsys, finals, weights, code, said):
    ours, theirs = made_up("tandem", (1.0, 1.1, 1.2)), made_up("sdpa", finals, weights)
    verdicts = program.judge(ours[0] + theirs[0], ours[1] + theirs[1])
    assert program.report(verdicts, 3, 50) == code
    assert said in capsys.readouterr().out


def test_tandem_must_repeat_itself(program, capsys):
    runs, repeats = made_up("tandem", (1.0, 1.1), weights="other")
    assert program.report(program.judge(runs, repeats), 2, 50) == 1
    assert "differ" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_drawn_at_the_top(program):
    runs, repeats = made_up("tandem", (1.0, float("nan")))
    record = dict(device="<&>", steps=2, layers=1, width=8, batch=1, tokens=8, seeds=2, runs=runs)
    record["libraries"] = program.judge(runs, repeats)
    picture = program.curves.draw(record, program.attention.TITLES)
    xml.fromstring(picture)
    assert "nan," not in picture and ",nan" not in picture


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--attention", "nobody"), "invalid choice: 'nobody'"),
        (("--attention", "fa2"), "fa2 needs a GPU; on the CPU there are tandem and sdpa"),
        (("--compare", "tandem,nobody"), "--compare knows no 'nobody'"),
        (("--compare", "tandem"), "--compare takes two or more"),
        (("--compare", "tandem,tandem"), "names one twice"),
        (("--compare", "tandem,sdpa", "--seeds", "1"), "one seed has no spread"),
        (("--width", "30", "--heads", "4"), "--width 30 must be a multiple of --heads 4"),
        (("--steps", "10", "--repeat", "20"), "--repeat 20 must be at most --steps 10"),
        (("--steps", "0"), "0 must be 1 or more"),
        (("--steps", "some"), "invalid positive value: 'some'"),
        (("--rate", "nan"), "--rate nan must be a positive number"),
        (("--text", "absent.txt"), "--text absent.txt is no file"),
        (("--tokens", "100000000"), "--tokens 100000000 must be less than the bytes of the text"),
        (("--json", "absent/gpt.json"), "--json absent/gpt.json: there is no folder absent"),
    ],
)
def test_bad_arguments_get_one_sentence(program, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as left:
        program.main()
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert said in printed.err and printed.err.count("\n") == 1


def test_fa3_that_is_not_installed(program, monkeypatch):
    monkeypatch.setattr(program.attention.importlib.util, "find_spec", lambda name: None)
    assert "fa3 is not installed" in program.attention.missing("fa3", "cuda")
    assert "tandem is not installed" in program.attention.missing("tandem", "cpu")


def test_without_a_gpu(program, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cuda"])
    with pytest.raises(SystemExit):
        program.main()
    assert "torch sees no GPU here" in capsys.readouterr().err
