# ruff: noqa: B023, the closures are called before the loop goes on
"""Tandem's CPU engine and torch's CPU scaled_dot_product_attention: same inputs, one run, all cores.

    pip install torch numpy
    python bench/versus_torch.py                      # every table, about ten minutes
    python bench/versus_torch.py --only grid --dtype bf16
    python bench/versus_torch.py --markdown tables.md --json figures.json

Rates count 4 * batch * heads * seqlen_q * seqlen_k * head_dim operations for a forward and 2.5 times that for a
backward, half of both when causal. Each figure is the fastest call of several rounds in which the two alternate; for
decode it is the median call.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import tandem_c
import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def take_turns(functions, seconds, pick=min, turn=0.05):
    """Returns the minimum (or another statistic) of each function's times, in turns of at least `turn` seconds each.

    A turn has many calls if calls are short. The preceding function's threads spin for some milliseconds after
    their last call, and would occupy a core during the first calls of the next.
    """
    times = [[] for _ in functions]
    for f in functions:
        f()
    end, rounds = time.perf_counter() + seconds * len(functions), 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for f, mine in zip(functions, times):
            turn_end = time.perf_counter() + turn
            while (start := time.perf_counter()) < turn_end:
                f()
                mine.append(time.perf_counter() - start)
    return [pick(mine) for mine in times]


class Report:
    def __init__(self):
        self.lines, self.figures = [], {}

    def say(self, line=""):
        print(line, flush=True)
        self.lines.append(line)

    def table(self, title, header):
        self.say(f"\n### {title}\n")
        self.say("| " + " | ".join(header) + " |")
        self.say("|" + "---|" * len(header))

    def row(self, *cells):
        self.say("| " + " | ".join(str(x) for x in cells) + " |")


def gflops(operations, seconds):
    return operations / seconds / 1e9


def machine(report, seconds):
    a = torch.randn(4096, 4096)
    product = gflops(2 * 4096**3, take_turns([lambda: a @ a], 2 * seconds)[0])
    names = ["torch's BLAS"]
    try:
        import numpy  # noqa: F401, torch's numpy() needs it

        b = a.numpy()
        other = gflops(2 * 4096**3, take_turns([lambda: b @ b], 2 * seconds)[0])
        names.append("numpy's BLAS")
        if other > product:
            product, names = other, names[::-1]
    except ImportError:
        pass
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    report.say(
        f"{cpu}, {len(os.sched_getaffinity(0))} cores; torch {torch.__version__} "
        f"({torch.backends.cpu.get_cpu_capability()}); Tandem: {tandem_c.description()}."
    )
    report.say(f"float32 product of 4096 x 4096 matrices: {product:.0f} GF/s ({names[0]}).")
    report.figures["machine"] = {"product_gflops": product}
    return product


def grid(report, dtypes, seconds, product):
    for name in dtypes:
        dtype, ratios = DTYPES[name], {"forward": [], "backward": []}
        report.table(
            f"{name}, batch 1 (GF/s; ratio: torch's time / ours)",
            ["head_dim", "seqlen", "heads", "causal", "forward", "torch", "ratio", "backward", "torch", "ratio"],
        )
        for head_dim in (64, 128):
            for seqlen in (512, 2048, 8192):
                heads = 4 if seqlen == 8192 else 8
                for causal in (False, True):
                    row = cell(dtype, head_dim, seqlen, heads, causal, seconds)
                    ratios["forward"].append(row[2])
                    ratios["backward"].append(row[5])
                    report.row(
                        head_dim,
                        seqlen,
                        heads,
                        "yes" if causal else "no",
                        f"{row[0]:.0f}",
                        f"{row[1]:.0f}",
                        f"{row[2]:.2f}",
                        f"{row[3]:.0f}",
                        f"{row[4]:.0f}",
                        f"{row[5]:.2f}",
                    )
                    report.figures[f"{name}/d{head_dim}/s{seqlen}/{'causal' if causal else 'full'}"] = row
                    if name == "f32" and product and (head_dim, seqlen, causal) == (128, 8192, False):
                        report.figures["f32 forward / product"] = row[0] / product
        report.say()
        for direction, r in ratios.items():
            report.say(f"{name} {direction}: geometric mean {statistics.geometric_mean(r):.2f}, least {min(r):.2f}.  ")
            report.figures[f"{name} {direction}"] = {"geometric_mean": statistics.geometric_mean(r), "least": min(r)}
    share = report.figures.get("f32 forward / product")
    if share:
        report.say(
            f"float32 forward at head_dim 128, seqlen 8192: {100 * share:.0f} % of the rate of the product above."
        )


def cell(dtype, head_dim, seqlen, heads, causal, seconds):
    q, k, v, dout = (torch.randn(1, heads, seqlen, head_dim).to(dtype) for _ in range(4))
    ours, out, lse = tandem_c.forward(q, k, v, causal=int(causal))
    with torch.no_grad():
        a, b = take_turns([ours, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)], seconds)
    ours, *_ = tandem_c.backward(q, k, v, out, lse, dout, causal=int(causal))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    c, d = take_turns([ours, lambda: torch.autograd.grad(theirs, inputs, dout, retain_graph=True)], seconds)
    n = 4 * heads * seqlen**2 * head_dim * (0.5 if causal else 1)
    return gflops(n, a), gflops(n, b), b / a, gflops(2.5 * n, c), gflops(2.5 * n, d), d / c


def decode(report, dtypes, seconds):
    report.table(
        "Decode: 1 query, 8192 keys, 8 heads, head_dim 128 (GB/s of keys and values)",
        ["dtype", "Tandem", "torch", "ratio", "their sum", "share of that"],
    )
    for name in dtypes:
        q = torch.randn(1, 8, 1, 128).to(DTYPES[name])
        # The keys and values have several sets, so that no set stays in the cache.
        sets = [[torch.randn(1, 8, 8192, 128).to(DTYPES[name]) for _ in range(2)] for _ in range(4)]
        calls = [tandem_c.forward(q, k, v)[0] for k, v in sets]

        def ours():
            for call in calls:
                call()

        def theirs():
            for k, v in sets:
                F.scaled_dot_product_attention(q, k, v)

        # Measures the memory's read rate in the same turns. Medians count, because other programs share the memory, and
        # the fastest call is not representative.
        words = [tensor.view(torch.float32) for pair in sets for tensor in pair]

        def read():
            for tensor in words:
                tensor.sum()

        with torch.no_grad():
            a, b, c = take_turns([ours, theirs, read], 2 * seconds, statistics.median)
        size = len(sets) * 2 * sets[0][0].numel() * sets[0][0].element_size() / 1e9
        report.row(
            name, f"{size / a:.1f}", f"{size / b:.1f}", f"{b / a:.2f}", f"{size / c:.1f}", f"{100 * c / a:.0f} %"
        )
        report.figures[f"{name} decode"] = {"gbytes": size / a, "torch": size / b, "ratio": b / a, "read": size / c}


def peak_kilobytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))


def memory_child(name, seqlen):
    """Prints the bytes that forward and backward add to the peak of this process, beyond inputs and outputs."""
    q, k, v, dout = (torch.randn(1, 1, seqlen, 128).to(DTYPES[name]) for _ in range(4))
    extra = []
    call, out, lse = tandem_c.forward(q, k, v)
    out.zero_(), lse.zero_()
    for backward in (False, True):
        if backward:
            call, *gradients = tandem_c.backward(q, k, v, out, lse, dout)
            for g in gradients:
                g.zero_()
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the peak
        before = peak_kilobytes()
        call()
        extra.append(1024 * (peak_kilobytes() - before))
    print(json.dumps(extra))


def memory(report, dtypes, seqlen=65536):
    report.table(
        f"Peak extra memory, seqlen {seqlen}, head_dim 128, one head (MB beyond inputs and outputs)",
        ["dtype", "forward", "backward", "S x S in float32 would be"],
    )
    for name in dtypes:
        output = subprocess.run(
            [sys.executable, __file__, "--memory-child", name, str(seqlen)], check=True, capture_output=True, text=True
        ).stdout
        forward, backward = (x / 1e6 for x in json.loads(output))
        report.row(name, f"{forward:.1f}", f"{backward:.1f}", f"{4 * seqlen**2 / 1e6:.0f}")
        report.figures[f"{name} memory"] = {"forward_mb": forward, "backward_mb": backward}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["grid", "decode", "memory"], help="one table")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="default: all three")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure (default 1)")
    parser.add_argument("--markdown", metavar="FILE", help="write what is printed")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        return memory_child(options.memory_child[0], int(options.memory_child[1]))
    torch.manual_seed(0)
    report, dtypes = Report(), options.dtype or list(DTYPES)
    product = machine(report, options.seconds)
    if options.only in (None, "grid"):
        grid(report, dtypes, options.seconds, product)
    if options.only in (None, "decode"):
        decode(report, dtypes, options.seconds)
    if options.only in (None, "memory"):
        memory(report, dtypes)
    if options.markdown:
        with open(options.markdown, "w") as f:
            f.write("\n".join(report.lines) + "\n")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(report.figures, f, indent=1)


if __name__ == "__main__":
    main()
