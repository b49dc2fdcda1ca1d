"""A step of a serving engine: a batch of requests, its paged cache and metadata, and the reference in float64."""

from __future__ import annotations

import torch
import torch_reference

HEADS, HEADS_K, DIM, BLOCK = 4, 2, 16, 16
CONTEXT = (21, 40, 3, 0, 0)  # cached tokens of each request, before the step
# New tokens: a prefill chunk, two decodes, a whole prompt, and a padded request.
NEW = (7, 1, 1, 9, 0)
PADDED_TOKENS = 6  # rows after the last request


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """The tensors of a step. keys[b], values[b]: all tokens of request b, (tokens, HEADS_K, DIM)."""

    def __init__(self, random, dtype=torch.float32, block=BLOCK, layout="NHD"):
        total = [c + n for c, n in zip(CONTEXT, NEW)]
        self.keys = [random(t, HEADS_K, DIM).to(dtype) for t in total]
        self.values = [random(t, HEADS_K, DIM).to(dtype) for t in total]
        rows = sum(NEW) + PADDED_TOKENS
        self.q = random(rows, HEADS, DIM).to(dtype)
        self.q[sum(NEW) :] = torch.nan
        columns = max(-(-t // block) for t in total)
        blocks = columns * len(NEW) + 3
        shape = (blocks, HEADS_K, block, 2 * DIM)
        if layout == "HND":
            self.kv_cache = torch.full(shape, torch.nan, dtype=dtype)
        else:
            self.kv_cache = torch.full((blocks, block, HEADS_K, 2 * DIM), torch.nan, dtype=dtype).transpose(1, 2)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()
        self.block_table = order[: columns * len(NEW)].reshape(len(NEW), columns).clone()
        self.slots = [
            [int(self.block_table[b, t // block]) * block + t % block for t in range(n)] for b, n in enumerate(total)
        ]
        for b, t in enumerate(total):  # entries without keys have any value
            self.block_table[b, -(-t // block) :] = -(2**31) if b % 2 else 2**31 - 1
        self.seq_lens = int32(total)
        self.query_start_loc = torch.nn.functional.pad(int32(NEW).cumsum(0), (1, 0)).int()
        self.max_query_len, self.max_seq_len = max(NEW), max(total)
        self.tokens = sum(NEW)

    def caches(self):
        """Returns keys and values, (blocks, block, heads_k, head_dim)."""
        return self.kv_cache.transpose(1, 2).split(DIM, dim=-1)

    def written(self, new):
        """Returns the keys, values and slots of the cached or of the new tokens, padded with skipped tokens."""
        parts = [slice(c, None) if new else slice(0, c) for c in CONTEXT]
        keys = torch.cat([x[part] for x, part in zip(self.keys, parts)])
        values = torch.cat([x[part] for x, part in zip(self.values, parts)])
        slots = torch.tensor([slot for x, part in zip(self.slots, parts) for slot in x[part]], dtype=torch.int64)
        skipped = torch.full((PADDED_TOKENS, HEADS_K, DIM), torch.nan, dtype=keys.dtype)
        padded = torch.nn.functional.pad(slots, (0, PADDED_TOKENS), value=-1)
        return torch.cat([keys, skipped]), torch.cat([values, skipped]), padded

    def expected(self, each=lambda b: {}):
        """Returns out (tokens, HEADS, DIM) and lse (HEADS, tokens). each(b): the reference's options of request b."""
        outs, lses, row = [], [], 0
        for b, n in enumerate(NEW):
            q = self.q[row : row + n].double()
            if n:
                out, lse = torch_reference.attend(q, self.keys[b].double(), self.values[b].double(), **each(b))
                outs.append(out)
                lses.append(lse)
            row += n
        return torch.cat(outs), torch.cat(lses, 1)

    def check_cache(self):
        """The cache holds exactly the requests' tokens; all other slots keep their NaN."""
        k, v = (x.flatten(0, 1) for x in self.caches())
        used = torch.zeros(k.shape[0], dtype=torch.bool)
        for slots, keys, values in zip(self.slots, self.keys, self.values):
            assert torch.equal(k[slots], keys) and torch.equal(v[slots], values)
            used[slots] = True
        assert k[~used].isnan().all() and v[~used].isnan().all()
