"""Generates with continuous batching: requests of different lengths join and leave one batch over a paged cache.

The model is the GPT of examples/gpt, trained for a minute first. All requests begin with one system prompt, whose pages
they share. Every step computes the same number of rows, so that a row's linear layers do not depend on the batch. At
the end each request runs alone, and its tokens must be the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time

os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")  # read by tandem.vllm

import torch

import tandem.vllm as engine

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import GPT, Size, cross_entropy  # noqa: E402

SYSTEM = "Answer in one short sentence. Use plain words, and say so if you do not know. "
QUESTIONS = (
    "What is a page table? ", "Who reads the cache? ", "Why is it exact? ", "When do kernels compile, and for whom? ",
    "Where are the docs? ", "How long is a sequence? ",
)  # fmt: skip


@dataclasses.dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to generate
    arrives: int  # step
    tokens: list[int] = dataclasses.field(default_factory=list)  # prompt, then generated tokens
    computed: int = 0  # tokens in the cache
    pages: list[int] = dataclasses.field(default_factory=list)
    drawn: str = ""  # one letter for each step

    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def done(self) -> bool:
        return len(self.generated()) >= self.wanted


class Cache:
    """Pages of keys and values for all layers, and the pages that are free."""

    def __init__(self, size: Size, pages: int, page_size: int):
        head_dim = size.width // size.heads
        self.pages, self.page_size = pages, page_size
        # (blocks, heads, page, 2 * head_dim) in each layer, as vLLM has it. Unused slots are NaN and never read.
        self.layers = torch.full((size.layers, pages, size.heads, page_size, 2 * head_dim), torch.nan)
        self.free = list(range(pages))
        self.peak = 0

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        self.peak = max(self.peak, self.pages - len(self.free))
        return taken

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class Server:
    """Runs requests in steps of `rows` rows: one row for each decode, the rest for chunks of prompts."""

    def __init__(self, model: GPT, size: Size, options: argparse.Namespace, prefix: list[int]):
        self.model, self.rows, self.most = model, options.rows, options.batch
        self.cache = Cache(size, options.pages, options.page_size)
        self.running: list[Request] = []
        self.steps = self.computed = 0
        self.prefix = prefix[: len(prefix) // options.page_size * options.page_size]  # whole pages are shared
        self.shared = self.cache.take(self.cache.pages_for(len(self.prefix)))
        if self.prefix:
            first = Request(self.prefix, 1, 0, list(self.prefix), pages=self.shared)
            while not first.done():
                self._compute(self._schedule([first]))

    def serve(self, requests: list[Request]) -> None:
        """Runs all requests to their ends."""
        waiting = sorted(requests, key=lambda x: x.arrives)
        start = self.steps
        while waiting or self.running:
            step = self.steps - start
            while waiting and waiting[0].arrives <= step and self._admit(waiting[0]):
                self.running.append(waiting.pop(0))
            work = self._schedule(self.running)
            for x in requests:
                count = next((count for y, count in work if y is x), 0)
                letter = " " if x.done() or x.arrives > step else "." if not count else "d" if count == 1 else "P"
                x.drawn += letter
            if work:
                self._compute(work)
            else:
                self.steps += 1
            for x in [x for x in self.running if x.done()]:
                self.running.remove(x)
                self.cache.free += x.pages[len(self.shared) :]

    def _admit(self, request: Request) -> bool:
        """Reserves the pages of a request, if there are enough."""
        own = self.cache.pages_for(len(request.prompt) + request.wanted) - len(self.shared)
        if own > len(self.cache.free) or len(self.running) >= self.most:
            if not self.running:
                raise SystemExit(f"--pages ({self.cache.pages}) must hold a request: pass {own + len(self.shared)}")
            return False
        request.tokens = list(request.prompt)
        request.computed, request.pages = len(self.prefix), self.shared + self.cache.take(own)
        return True

    def _schedule(self, requests: list[Request]) -> list[tuple[Request, int]]:
        """Returns requests with their numbers of new rows: decodes first."""
        left, work = self.rows, []
        for x in sorted(requests, key=lambda x: len(x.tokens) - x.computed > 1):
            count = min(left, len(x.tokens) - x.computed)
            if count > 0:
                work.append((x, count))
                left -= count
        return work

    @torch.no_grad()
    def _compute(self, work: list[tuple[Request, int]]) -> None:
        """Computes one step, and appends a token to each request whose last token was a row."""
        size, rows = self.cache.page_size, self.rows
        tokens, places, slots = ([0] * rows, [0] * rows, [-1] * rows)
        starts, used, row = [0], [], 0
        table = torch.zeros(len(work), max(len(x.pages) for x, _ in work), dtype=torch.int32)
        for b, (x, count) in enumerate(work):
            table[b, : len(x.pages)] = torch.tensor(x.pages)
            for place in range(x.computed, x.computed + count):
                tokens[row], places[row] = x.tokens[place], place
                slots[row] = x.pages[place // size] * size + place % size
                row += 1
            x.computed += count
            starts.append(row)
            used.append(x.computed)
        logits = self._forward(torch.tensor(tokens), torch.tensor(places), torch.tensor(slots), starts, used, table)
        for (x, _), end in zip(work, starts[1:]):
            if x.computed == len(x.tokens):
                x.tokens.append(int(logits[end - 1].argmax()))
        self.computed += row
        self.steps += 1

    def _forward(self, tokens, places, slots, starts, used, table):
        """Returns the logits of all rows. Keys and values go to the cache before attention reads it."""
        model, scale = self.model, torch.ones(1)
        starts, used = torch.tensor(starts, dtype=torch.int32), torch.tensor(used, dtype=torch.int32)
        x = model.embedding.weight[tokens] + model.positions.weight[places]
        for layer, block in zip(self.cache.layers, model.blocks):
            q, k, v = block.qkv(block.norm_1(x)).unflatten(-1, (3, block.heads, -1)).unbind(1)
            k_cache, v_cache = layer.transpose(1, 2).split(q.shape[-1], dim=-1)
            engine.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", scale, scale)
            out = torch.zeros(q.shape)  # rows of padding stay 0
            engine.flash_attn_varlen_func(
                q, k_cache, v_cache, int(starts.diff().max()), starts, int(used.max()), seqused_k=used,
                block_table=table, causal=True, out=out,
            )  # fmt: skip
            x = x + block.out(out.flatten(1))
            x = x + block.down(block.gelu(block.up(block.norm_2(x))))
        return model.head(model.norm(x))


def trained(size: Size, steps: int) -> GPT:
    """Returns a GPT after some steps on the bytes of this repository's pages. 0 steps: its random first weights."""
    import tandem.fa3

    torch.manual_seed(0)
    model = GPT(size, tandem.fa3.flash_attn_func)
    text = b"".join(x.read_bytes() for x in sorted((ROOT / "docs").glob("*.md"))) or SYSTEM.encode() * 99
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    length = min(size.tokens, len(data) - 2)
    for _ in range(steps):
        offsets = torch.randint(len(data) - length - 1, (6,))
        loss = cross_entropy(model, torch.stack([data[i : i + length + 1] for i in offsets]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if steps:
        print(f"trained for {steps} steps: loss {loss:.2f}")
    return model.eval()


def made_requests(count: int, longest: int, prefix: list[int]) -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    wanted = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    arrives = torch.randint(0, 2 * count, (count,), generator=draw).sort().values.tolist()
    prompts = [prefix + list((QUESTIONS[n % len(QUESTIONS)] * (1 + n % 3)).encode()) for n in range(count)]
    return [Request(*x) for x in zip(prompts, wanted, arrives)]


def draw_batch(requests: list[Request], columns: int = 100) -> None:
    """Prints a line for each request: P a chunk of its prompt, d a decode, . a wait."""
    length = max(len(x.drawn) for x in requests)
    every = -(-length // columns)
    print(f"\nthe batch over {length} steps (P prompt, d decode, . waits; one column is {every} steps):")
    for n, x in enumerate(requests):
        print(f"{n:3d} |{x.drawn[::every]}|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default, text in (
        ("requests", 12, "number of requests"), ("longest", 60, "most tokens that a request generates"),
        ("rows", 32, "rows of a step"), ("batch", 6, "most requests of a step"), ("pages", 96, "pages of the cache"),
        ("page-size", 16, "keys of a page"), ("train-steps", 150, "steps of training; 0: random weights"),
        ("layers", 3, "of the model"), ("width", 128, "of the model"), ("heads", 4, "of the model"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    options = parser.parse_args()
    if options.rows < options.batch:
        parser.error(f"--rows ({options.rows}) must be at least --batch ({options.batch})")
    size = Size(options.layers, options.width, options.heads, tokens=256 + options.longest)
    model, prefix = trained(size, options.train_steps), list(SYSTEM.encode())

    requests = made_requests(options.requests, options.longest, prefix)
    server = Server(model, size, options, prefix)
    start, before = time.perf_counter(), server.computed
    server.serve(requests)
    seconds = time.perf_counter() - start
    generated = sum(len(x.generated()) for x in requests)
    draw_batch(requests)
    print(f"\nrequest 0: {bytes(requests[0].tokens)!r}")
    print(f"{generated} tokens generated, {server.computed - before} computed: {generated / seconds:.0f} tokens/s")
    own = sum(server.cache.pages_for(len(x.tokens)) for x in requests)
    print(
        f"cache: {server.cache.peak} of {options.pages} pages at most; {len(server.shared)} pages of the system prompt "
        f"are shared by {len(requests)} requests, which alone would have {own} pages in all"
    )
    leaked = options.pages - len(server.cache.free) - len(server.shared)

    different = 0
    for n, x in enumerate(requests):
        alone = Request(x.prompt, x.wanted, 0)
        Server(model, size, options, []).serve([alone])
        if alone.tokens != x.tokens:
            different += 1
            print(f"request {n} has other tokens alone")
    print(f"{len(requests) - different} of {len(requests)} requests have the same tokens alone, without shared pages")
    return 1 if different or leaked else 0


if __name__ == "__main__":
    sys.exit(main())
