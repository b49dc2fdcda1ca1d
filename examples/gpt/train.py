#!/usr/bin/env python3
"""Trains a small GPT on the bytes of this repository's own documents, with Tandem's attention or another library's.

    python examples/gpt/train.py                                  # Tandem: on a GPU if there is one
    python examples/gpt/train.py --attention sdpa --seeds 3
    python examples/gpt/train.py --compare tandem,sdpa --json gpt.json --svg gpt.svg
    python examples/gpt/train.py --compare tandem,cudnn,fa2,fa3   # on a Hopper GPU

A seed fixes the initial weights and the order of the data for every library. The first seed is trained again for some
steps, and a hash of the weights shows if both runs are equal in every bit. Compared libraries alternate, seed by seed,
so that a slow minute of the machine affects all. On a GPU each training runs in a separate process.

Exit code 1: two runs with Tandem differ in a bit, or final losses differ by more than the spread over the seeds.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

import attention
import curves
import torch
from model import GPT, Size, cross_entropy

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEFAULTS = {
    "cuda": dict(layers=8, width=1024, heads=16, tokens=4096, batch=4, steps=300, rate=6e-4),
    "cpu": dict(layers=3, width=128, heads=4, tokens=256, batch=6, steps=150, rate=3e-3),
}
TIMED = 10  # with and without attention, to measure its share


@dataclasses.dataclass(frozen=True)
class Training:
    """One run; it is sent to the process that executes it."""

    attention: str
    seed: int
    device: str
    size: Size
    batch: int
    steps: int
    rate: float
    hashed_at: int  # the number of steps before the weights are hashed
    repeated: bool = False  # stops at the hash
    text: tuple = ()


class Clock:
    """Milliseconds of each lap. On a GPU it reads events of the queue, so that no measurement waits."""

    def __init__(self, device):
        self._events, self._laps = device == "cuda", []

    def lap(self, work, *arguments):
        begin = self._now()
        result = work(*arguments)
        self._laps.append((begin, self._now()))
        return result

    def _now(self):
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self):
        if not self._events:
            return [1e3 * (end - begin) for begin, end in self._laps]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in self._laps]


def read(files):
    return torch.frombuffer(bytearray(b"\n".join(pathlib.Path(file).read_bytes() for file in files)), dtype=torch.uint8)


def learning_rate(training, step):
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    warm_up = max(1, training.steps // 10)
    if step < warm_up:
        return training.rate * (step + 1) / warm_up
    done = (step - warm_up) / max(1, training.steps - warm_up)
    return training.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def hash_of(model):
    """SHA-256 over the bits of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def train(training):
    """The record of one run, as written to the JSON."""
    data, size = read(training.text), training.size
    torch.manual_seed(training.seed)
    attend = attention.load(training.attention)
    model = GPT(size, attend).to(training.device)  # weights from the CPU, the same on every device
    on_gpu = training.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    order = torch.Generator().manual_seed(training.seed)

    def step(rate):
        begin = torch.randint(len(data) - size.tokens, (training.batch, 1), generator=order)
        tokens = data[begin + torch.arange(size.tokens + 1)].to(training.device, non_blocking=True).long()
        with torch.autocast(training.device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = cross_entropy(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return loss.detach()

    who = f"{training.attention:6s} seed {training.seed}{' again' if training.repeated else ''}"
    clock, losses, weights = Clock(training.device), [], None
    for n in range(training.hashed_at if training.repeated else training.steps):
        losses.append(clock.lap(step, learning_rate(training, n)))
        if n + 1 == training.hashed_at:
            weights = hash_of(model)
        if not training.repeated and (n == 0 or (n + 1) % max(1, training.steps // 6) == 0):
            print(f"{who}  step {n + 1:5d}  loss {losses[-1].item():.4f}", flush=True)
    record = {"attention": training.attention, "seed": training.seed, "weights": weights}
    if training.repeated:
        return record

    losses, milliseconds = [loss.item() for loss in losses], clock.milliseconds()
    record["losses"] = [round(loss, 6) for loss in losses]
    record["final_loss"] = statistics.fmean(losses[-max(1, len(losses) // 10) :])
    record["step_ms"] = statistics.median(milliseconds[len(milliseconds) // 10 :])
    if on_gpu:
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    record["attention_share"] = share_of_attention(model, attend, lambda: step(0.0), training.device)
    return record


def share_of_attention(model, attend, step, device):
    """The share of attention in a step, forward and backward, from alternating steps with it and with a view in its
    place. The first two of either kind do not count.
    """
    clocks = {attend: Clock(device), attention.nothing: Clock(device)}
    for _ in range(TIMED + 2):
        for function, clock in clocks.items():
            model.set_attention(function)
            clock.lap(step)
    with_it, without = (statistics.median(clock.milliseconds()[2:]) for clock in clocks.values())
    return 1 - without / with_it


def in_process(training):
    """train() in a process that ends with it, so that no memory, plans or clocks remain."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(train, training).result()


def judge(runs, repeats):
    """For each library: means over its seeds, the equality of its two runs, and the agreement of its final losses.

    The table compares the losses with the first library's, within the spread over the seeds; None with one library or
    one seed.
    """
    names = list(dict.fromkeys(run["attention"] for run in runs))
    of = {name: [run for run in runs if run["attention"] == name] for name in names}
    finals = {name: [run["final_loss"] for run in of[name]] for name in names}
    spread = {name: max(finals[name]) - min(finals[name]) for name in names}
    verdicts = {}
    for name in names:
        mean = {key: statistics.fmean(run[key] for run in of[name]) for key in ("final_loss", "step_ms")}
        share = statistics.fmean(run["attention_share"] for run in of[name])
        again = next(repeat for repeat in repeats if repeat["attention"] == name)
        first = next(run for run in of[name] if run["seed"] == again["seed"])
        apart = mean["final_loss"] - statistics.fmean(finals[names[0]])
        allowed = min(spread[name], spread[names[0]])
        judged = name != names[0] and len(finals[name]) > 1
        verdicts[name] = {
            **mean,
            "attention_share": share,
            "equal_runs": first["weights"] == again["weights"],
            "spread": spread[name],
            "apart": apart,
            # `<=` instead of a negated `>`, because a NaN must not pass.
            "agrees": abs(apart) <= allowed if judged else None,
        }
    return verdicts


def report(verdicts, seeds, hashed_at):
    """Prints the table and its meaning; returns the exit code."""
    print(f"\n{'':8s} final loss   spread  ms a step  attention   two runs of {hashed_at} steps")
    for name, of in verdicts.items():
        spread = f"{of['spread']:.4f}" if seeds > 1 else "-"
        equal = "equal in every bit" if of["equal_runs"] else "differ"
        print(
            f"{name:8s}{of['final_loss']:11.4f}{spread:>9s}{of['step_ms']:11.2f}{of['attention_share']:11.1%}   {equal}"
        )
    first, *others = verdicts
    for name in others:
        of = verdicts[name]
        within = "within" if of["agrees"] else "NOT within"
        print(f"{name} and {first}: final losses {abs(of['apart']):.2g} apart, {within} the spread of {seeds} seeds")
    differ = "tandem" in verdicts and not verdicts["tandem"]["equal_runs"]
    return 1 if differ or any(of["agrees"] is False for of in verdicts.values()) else 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")  # one sentence; --help has the rest


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be 1 or more")
    return value


def parse():
    has_gpu = torch.cuda.is_available()
    parser = Parser(description=__doc__.splitlines()[0], prog="train.py")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--attention", choices=attention.TITLES, default="tandem", help="whose (default: tandem)")
    who.add_argument(
        "--compare", metavar="A,B,...", help="train with several, the first of which the others are held to"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--seeds", type=positive, help="trainings of each, seeds 0, 1, ... (default: 1; to compare, 3)")
    parser.add_argument("--json", type=pathlib.Path, help="write the record of all runs there")
    parser.add_argument("--svg", type=pathlib.Path, help="draw the losses there")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", help="what to learn (default: README.md and docs)")
    size = parser.add_argument_group("size", "defaults, on a GPU and on the CPU:")
    for name in DEFAULTS["cpu"]:
        values = " / ".join(str(DEFAULTS[device][name]) for device in ("cuda", "cpu"))
        size.add_argument(f"--{name}", type=float if name == "rate" else positive, help=values)
    size.add_argument(
        "--repeat", type=positive, help="steps that are run twice (default: 50, or all if they are fewer)"
    )
    arguments = parser.parse_args()
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

    arguments.names = arguments.compare.split(",") if arguments.compare else [arguments.attention]
    arguments.seeds = arguments.seeds or (3 if arguments.compare else 1)
    arguments.repeat = arguments.repeat or min(50, arguments.steps)
    documents = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    arguments.text = tuple(map(str, arguments.text or documents))
    problem = next(filter(None, problems(arguments, has_gpu)), None)
    if problem:
        parser.error(problem)
    return arguments


def problems(a, has_gpu):
    """The errors of the arguments, in sentences; None or False without an error."""
    if a.compare:
        yield len(a.names) < 2 and "--compare takes two or more of " + ", ".join(attention.TITLES)
        yield len(set(a.names)) < len(a.names) and f"--compare {a.compare} names one twice; each runs twice as it is"
        yield a.seeds < 2 and f"--compare needs --seeds 2 or more, not {a.seeds}: one seed has no spread"
    for name in a.names:
        if name not in attention.TITLES:
            yield f"--compare knows no {name!r}; it is one of {', '.join(attention.TITLES)}"
            return
    yield a.device == "cuda" and not has_gpu and "--device cuda: torch sees no GPU here"
    yield from (attention.missing(name, a.device) for name in a.names)
    yield a.width % a.heads and f"--width {a.width} must be a multiple of --heads {a.heads}"
    yield a.repeat > a.steps and f"--repeat {a.repeat} must be at most --steps {a.steps}"
    yield not 0 < a.rate < math.inf and f"--rate {a.rate} must be a positive number"
    for option, file in (("--json", a.json), ("--svg", a.svg)):  # checked before the training
        yield file and not file.parent.is_dir() and f"{option} {file}: there is no folder {file.parent}"
    absent = [file for file in a.text if not os.path.isfile(file)]
    yield absent and f"--text {absent[0]} is no file"
    count = 0 if absent else sum(os.path.getsize(file) for file in a.text)
    yield count <= a.tokens + 1 and f"--tokens {a.tokens} must be less than the bytes of the text, {count}"


def main():
    a = parse()
    # Otherwise cuBLAS may choose a workspace, and the order of its sums, by other running work.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    size = Size(a.layers, a.width, a.heads, a.tokens)
    one = Training("", 0, a.device, size, a.batch, a.steps, a.rate, a.repeat, text=a.text)
    where = torch.cuda.get_device_name() if a.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    parameters = sum(x.numel() for x in GPT(size, None).parameters())
    print(
        f"{parameters / 1e6:.1f} million parameters: {a.layers} layers, {a.width} wide, {a.heads} heads; {a.batch} x "
        f"{a.tokens} tokens a step, {a.steps} steps, on {where}"
    )
    # On the CPU a process would only add its start-up time.
    run = in_process if a.device == "cuda" else train
    runs = []
    for seed in range(a.seeds):
        runs += [run(dataclasses.replace(one, attention=name, seed=seed)) for name in a.names]
    repeats = [run(dataclasses.replace(one, attention=name, repeated=True)) for name in a.names]
    verdicts = judge(runs, repeats)
    code = report(verdicts, a.seeds, a.repeat)

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    settings = {name: getattr(a, name) for name in (*DEFAULTS["cpu"], "seeds", "repeat")}
    record = {"device": where, **versions, **settings, "libraries": verdicts, "runs": runs, "repeats": repeats}
    if a.json:
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    if a.svg:
        a.svg.write_text(curves.draw(record, attention.TITLES))
    return code


if __name__ == "__main__":
    sys.exit(main())
