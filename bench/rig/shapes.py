"""The problems of the GPU benchmark: their shapes, the operations that they count, and their inputs."""

from __future__ import annotations

import dataclasses
import math
import random

DEVICE = "cuda"
# The distributions of a problem's tensors. The numbers are nats.
DATA = {
    "normal": "logits of sigma 1",
    "sigma10": "logits of sigma 10",
    "sink20": "the first key 20 above the others, for every row",
    "sink50": "the first key 50 above the others, for every row",
    "needle": "a key in the middle 50 above the others, for every row",
    "copy": "the key before a row's own about 30 above the others",
    "model": "a model's own queries, keys and values, from --activations",
}
SUSTAINED = 5  # factor of a burst's duration for long windows


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem. A causal mask is aligned to the last query and the last key."""

    row: str  # row and column of the shape's table
    column: str
    seqlen: int  # queries; packed: in the longest sequence
    heads: int
    head_dim: int
    head_dim_v: int = 0  # 0: equal to head_dim
    heads_k: int = 0  # 0: equal to heads
    batch: int = 1
    seqlen_k: int = 0  # 0: equal to seqlen, as for packed sequences
    causal: bool = False
    window: int = 0  # visible keys with the query's own; 0: unbounded
    sink: bool = False
    softcap: float = 0.0
    lengths: tuple[int, ...] = ()  # packed sequences
    sustained: bool = False  # long windows: the GPU reaches its power limit
    target: float = 1.0  # the project's minimum ratio to the best peer
    microseconds: bool = False  # too small for a rate: the table shows the time
    between: bool = False  # another kernel runs between calls; its time is subtracted
    dtype: str = "bf16"  # "bf16" or "f16"
    data: str = "normal"  # a key of DATA
    backward: bool = False  # gradients of q, k and v, with all kernels

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def keys(self) -> int:
        """The keys of a sequence; packed: of the longest."""
        return self.seqlen_k or self.seqlen

    @property
    def title(self) -> str:
        """Returns the title of its part of the table."""
        what = ("backward " if self.backward else "") + self.row + (" sustained" if self.sustained else "")
        return what + ("" if self.data == "normal" else f", {self.data}")

    @property
    def name(self) -> str:
        return f"{self.title} {self.column}"

    def words(self) -> set[str]:
        """Returns the words that --cells matches."""
        dims = f"d{self.head_dim}" if self.dim_v == self.head_dim else f"d{self.head_dim}/{self.dim_v}"
        words = {dims, "causal" if self.causal else "full", "sustained" if self.sustained else "burst"}
        return words | set(self.row.lower().split()) | {self.column, self.dtype}

    def sequences(self) -> list[int]:
        return list(self.lengths) or [self.seqlen] * self.batch

    def key_lengths(self) -> list[int]:
        return list(self.lengths) or [self.keys] * self.batch

    def flops(self) -> float:
        """The operations of the two products, or of the five of a backward. Causal counts half of the square where
        lengths are equal. A window and unequal lengths count exactly the visible pairs.
        """
        return (
            (5.0 if self.backward else 2.0)
            * sum(map(self._pairs, self.sequences(), self.key_lengths()))
            * self.heads
            * (self.head_dim + self.dim_v)
        )

    def _pairs(self, n: int, keys: int) -> float:
        if self.window:
            w = min(self.window, n)
            return w * (w + 1) / 2 + (n - w) * w
        if not self.causal or keys == n:
            return n * keys / (1 + self.causal)
        seen = min(n, keys)  # queries that see a key
        return seen * (keys - seen) + seen * (seen + 1) / 2


def short(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def documents(count: int = 54, tokens: int = 65536) -> tuple[int, ...]:
    """Returns lengths of documents packed into a batch: log-normal, the longest 12.7k, the same in every run."""
    draw = random.Random(149)
    sizes = [draw.lognormvariate(0, 1.1) for _ in range(count)]
    lengths = [int(tokens * size / sum(sizes)) for size in sizes]
    lengths[0] += tokens - sum(lengths)
    return tuple(lengths)


def row(head_dim, head_dim_v, causal) -> str:
    dims = f"d{head_dim}" if head_dim_v == head_dim else f"d{head_dim}/{head_dim_v}"
    return f"{dims} {'causal' if causal else 'full'}"


def dense(head_dim, head_dim_v, causal, seqlen, sustained=False) -> Cell:
    """Returns a shape of the main table: heads * head_dim is 2048, batch * seqlen 16384, for long windows 32768."""
    return Cell(
        row=row(head_dim, head_dim_v, causal),
        column=short(seqlen),
        seqlen=seqlen,
        heads=2048 // head_dim_v,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=max(1, (32768 if sustained else 16384) // seqlen),
        causal=causal,
        sustained=sustained,
        target=1.05 if head_dim == 64 and seqlen >= 4096 else 1.0,
    )


def presets() -> list[Cell]:
    """Returns layers of models by name, in their training and prefill shapes."""
    cells = []
    for seqlen in (2048, 8192, 32768):
        cells.append(Cell("Llama 3.1", short(seqlen), seqlen, 64, 128, heads_k=8, causal=True))
    gpt = Cell("GPT-OSS", "", 8192, 64, 64, heads_k=8, batch=2, causal=True, sink=True)
    for window in (128, 1024, 0):
        column = f"window-{window}" if window else "unbounded"
        cells.append(dataclasses.replace(gpt, column=column, window=window))
    for seqlen in (4096, 16384):
        cells.append(Cell("Qwen 3.5", short(seqlen), seqlen, 32, 256, heads_k=2, causal=True))
    cells.append(Cell("DeepSeek V3", "4k", 4096, 128, 192, 128, causal=True))
    cells.append(Cell("Gemma 2", "8k", 8192, 32, 128, heads_k=16, causal=True, window=4096, softcap=50.0))
    cells.append(Cell("Video", "32760", 32760, 40, 128))
    return cells


def untuned(head_dim, head_dim_v, causal, seqlen) -> Cell:
    """Returns a shape that was not used for tuning: tiles do not divide the tokens, and the number of heads is odd."""
    heads, batch = 2048 // head_dim_v - 3, {768: 21, 1536: 11, 3000: 5}[seqlen]
    name = f"untuned {row(head_dim, head_dim_v, causal)}"
    return Cell(name, short(seqlen), seqlen, heads, head_dim, head_dim_v, batch=batch, causal=causal)


def grid() -> list[Cell]:
    """Returns all problems; a row's problems are adjacent, because they may share a peer's compiled kernel."""
    dims, both = ((64, 64), (128, 128), (256, 256), (192, 128)), (False, True)
    sizes = (512, 1024, 4096, 16384, 32768)
    cells = [dense(*d, causal, n) for d in dims for causal in both for n in sizes]
    packed = documents()
    for d in (128, 64):
        cells.append(
            Cell(f"packed d{d}", "causal", max(packed), 2048 // d, d, causal=True, lengths=packed, target=1.05)
        )
    cells += presets()
    for between in (False, True):
        column = "128 apart" if between else "128"
        cells.append(Cell("smallest", column, 128, 8, 128, microseconds=True, between=between))
    cells += [untuned(*d, causal, n) for d in dims for causal in both for n in (768, 1536, 3000)]
    for d in (64, 128, 256):
        for causal in both:
            half = [dense(d, d, causal, n) for n in (1024, 4096, 16384)]
            cells += [dataclasses.replace(c, row=f"f16 {c.row}", dtype="f16") for c in half]
    return cells + [dense(*d, causal, n, sustained=True) for d in dims for causal in both for n in (8192, 32768)]


def quick() -> list[Cell]:
    """Returns the main table in short form."""
    return [dense(d, d, causal, n) for d in (64, 128, 256) for causal in (False, True) for n in (1024, 4096, 16384)]


def chosen(cells: list[Cell], filters: list[str]) -> list[Cell]:
    """Returns the problems that match all comma-separated words of one of the filters; without filters all problems."""
    asked = [set(f.lower().split(",")) for f in filters]
    known = set().union(*(c.words() for c in cells))
    for word in sorted(set().union(*asked) - known):
        raise SystemExit(f"--cells ('{word}') must be words of cells: choose from {', '.join(sorted(known))}")
    return [c for c in cells if not asked or any(words <= c.words() for words in asked)]


def numbers_of_part(error, text: str) -> tuple[int, int]:
    """Returns I and N of the value "I/N" of --part. error ends the program with a sentence."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        error(f"--part ({text}) must be I/N with 1 <= I <= N: pass a part such as 1/3")
    return int(number), int(count)


def part(cells: list[Cell], number: int, count: int) -> list[Cell]:
    """Returns the number-th (from 1) of count parts with about equal durations."""
    weights = [SUSTAINED if c.sustained else 1 for c in cells]
    total, before, taken = sum(weights), 0, []
    for cell, weight in zip(cells, weights):
        if (number - 1) * total <= before * count < number * total:
            taken.append(cell)
        before += weight
    return taken


class Inputs:
    """Returns tensors of a problem, the same in every run: (batch, seqlen, heads, head_dim), packed (total, ...)."""

    def __init__(self, cell: Cell, activations: str | None = None):
        import torch

        from rig import data

        self.cell = cell
        self.scale = 1 / math.sqrt(cell.head_dim)
        self.cu_seqlens = None
        if cell.lengths:
            ends = torch.tensor((0, *cell.lengths), dtype=torch.int32, device=DEVICE)
            self.cu_seqlens = ends.cumsum(0, dtype=torch.int32)
        make = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, device=DEVICE, dtype=data.DTYPES[cell.dtype], generator=make)

        rows = (sum(cell.lengths),) if cell.lengths else (cell.batch, cell.seqlen)
        keys = rows if cell.lengths else (cell.batch, cell.keys)
        self.q = normal(*rows, cell.heads, cell.head_dim)
        self.k = normal(*keys, cell.kv_heads, cell.head_dim)
        self.v = normal(*keys, cell.kv_heads, cell.dim_v)
        self.sink = normal(cell.heads) if cell.sink else None
        self.dout = normal(*rows, cell.heads, cell.dim_v) if cell.backward else None
        data.shape(self, activations)

    def sequence(self, x, n):
        """Returns the n-th sequence of a tensor with the layout of q, k, v or out."""
        if self.cu_seqlens is None:
            return x[n]
        begin = sum(self.cell.lengths[:n])
        return x[begin : begin + self.cell.lengths[n]]

    def rows_of_lse(self, lse, n, head):
        """Returns the n-th sequence of a tensor of (batch, heads, seqlen) or packed (heads, total)."""
        if self.cu_seqlens is None:
            return lse[n, head]
        begin = sum(self.cell.lengths[:n])
        return lse[head, begin : begin + self.cell.lengths[n]]

    def kv_head(self, head: int) -> int:
        return head * self.cell.kv_heads // self.cell.heads
