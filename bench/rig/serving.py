"""The problems of bench/serving.py: requests, their cache, exact results, and the calls of Tandem and of peers."""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tandem

DEVICE = "cuda"


def starts_of(counts) -> torch.Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Requests:
    """Requests with numbers of queries and keys. The queries of a request are the last of its keys.

    The keys of all sequences are packed. keys_of(request) returns the request's slices.
    """

    def __init__(self, queries, lengths, heads: int, heads_k: int, dim: int):
        generator = torch.Generator(DEVICE).manual_seed(1)
        draw = dict(device=DEVICE, dtype=torch.bfloat16, generator=generator)
        self.queries, self.lengths = list(queries), list(lengths)
        self.heads, self.heads_k, self.dim = heads, heads_k, dim
        self.q = torch.randn(sum(self.queries), heads, dim, **draw)
        self.cache = [torch.randn(sum(self.lengths), heads_k, dim, **draw) for _ in range(2)]
        self.used, self.starts_q, self.starts_k = int32(self.lengths), starts_of(self.queries), starts_of(self.lengths)
        self.bytes = sum(x.numel() * x.element_size() for x in self.cache)

    def keys_of(self, request: int) -> list[slice]:
        begin, end = self.starts_k[request : request + 2].tolist()
        return [slice(begin, end)]

    def exact(self) -> torch.Tensor:
        """Computes the result in float64."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=DEVICE)
        group = self.heads // self.heads_k
        for n, (begin, end) in enumerate(zip(self.starts_q.tolist(), self.starts_q.tolist()[1:])):
            k, v = (torch.cat([x[s] for s in self.keys_of(n)]) for x in self.cache)
            rows = torch.arange(len(k) - (end - begin), len(k), device=DEVICE)[:, None]
            hidden = torch.arange(len(k), device=DEVICE) > rows
            for h in range(self.heads):
                scores = self.q[begin:end, h].double() @ k[:, h // group].double().T / math.sqrt(self.dim)
                probabilities = scores.masked_fill_(hidden, -math.inf).softmax(-1)
                out[begin:end, h] = probabilities @ v[:, h // group].double()
        return out

    def pages(self, size: int):
        """Returns (k, v, table): the cache in pages of random order. k and v are views of one tensor."""
        counts = [-(-n // size) for n in self.lengths]
        order = torch.randperm(sum(counts), device=DEVICE)
        fused = torch.zeros(len(order), 2, size, self.heads_k, self.dim, device=DEVICE, dtype=torch.bfloat16)
        table = torch.zeros(len(counts), max(counts), device=DEVICE, dtype=torch.int32)
        for n, (count, pages) in enumerate(zip(counts, order.split(counts))):
            table[n, :count] = pages
            begin, end = self.starts_k[n : n + 2].tolist()
            for part, x in enumerate(self.cache):
                whole = torch.nn.functional.pad(x[begin:end], (0, 0, 0, 0, 0, count * size - (end - begin)))
                fused[pages, part] = whole.reshape(count, size, self.heads_k, self.dim)
        return fused[:, 0], fused[:, 1], table


class Decode(Requests):
    """Requests of one query and of equal lengths. The last key of each is new."""

    def __init__(self, batch: int, keys: int, heads: int, heads_k: int, dim: int):
        super().__init__([1] * batch, [keys] * batch, heads, heads_k, dim)
        self.dense = [x.unflatten(0, (batch, keys)) for x in self.cache]
        self.new = [x[:, -1:].clone() for x in self.dense]
        self.q4, self.before = self.q[:, None], self.used - 1
        self.cos, self.sin = (f(keys, dim // 2, device=DEVICE) for f in (torch.ones, torch.zeros))

    def tandem(self, size: int | None, appends: bool = False, **options):
        k, v, table = (*self.dense, None) if size is None else self.pages(size)
        rotation = dict(q=self.q4, q_out=torch.empty_like(self.q4), rotary_cos=self.cos, rotary_sin=self.sin)

        def call():
            q = self.q4
            if appends:
                q = tandem.append_kv(*self.new, k, v, page_table=table, cache_seqlens=self.before, **rotation)
            return tandem.attention(q, k, v, page_table=table, seqused_k=self.used, **options)[:, 0]

        return call

    def sdpa(self, backend: SDPBackend):
        q, k, v = (x.transpose(1, 2) for x in (self.q4, *self.dense))

        def call():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

        return call

    def fa3(self, size: int | None, appends: bool = False):
        from flash_attn_interface import flash_attn_with_kvcache

        k, v, table = (*self.dense, None) if size is None else self.pages(size)
        new, more = (), dict(cache_seqlens=self.used, page_table=table)
        if appends:
            new = self.new
            more.update(cache_seqlens=self.before, rotary_interleaved=False)
            more.update(rotary_cos=self.cos.bfloat16(), rotary_sin=self.sin.bfloat16())
        return lambda: flash_attn_with_kvcache(self.q4, k, v, *new, **more)[:, 0]

    def calls(self) -> dict:
        return {
            "contiguous": lambda: self.tandem(None),
            "pages 64": lambda: self.tandem(64),
            "pages 16": lambda: self.tandem(16),
            "contiguous, append": lambda: self.tandem(None, True),
            "pages 64, append": lambda: self.tandem(64, True),
            "pages 16, append": lambda: self.tandem(16, True),
            "contiguous, invariant": lambda: self.tandem(None, batch_invariant=True),
            "pages 64, invariant": lambda: self.tandem(64, batch_invariant=True),
            "pages 64, append, invariant": lambda: self.tandem(64, True, batch_invariant=True),
        }

    def peers(self) -> dict:
        return {
            "SDPA cuDNN": lambda: self.sdpa(SDPBackend.CUDNN_ATTENTION),
            "SDPA FlashAttention-2": lambda: self.sdpa(SDPBackend.FLASH_ATTENTION),
            "FA3 contiguous": lambda: self.fa3(None),
            "FA3 pages 64": lambda: self.fa3(64),
            "FA3 pages 16": lambda: self.fa3(16),
            "FA3 pages 64, append": lambda: self.fa3(64, True),
            "FlashInfer pages 64": lambda: flashinfer_decode(self, 64),
            "FlashInfer pages 16": lambda: flashinfer_decode(self, 16),
        }


class Mixed(Requests):
    """Chunks of prefills and decodes in one call, from bench/serving_trace.json."""

    def __init__(self, trace: dict):
        queries, lengths = zip(*trace["requests"])
        super().__init__(queries, lengths, trace["heads"], trace["heads_k"], trace["head_dim"])

    def tandem(self, size: int):
        k, v, table = self.pages(size)
        more = dict(cu_seqlens_q=self.starts_q, page_table=table, seqused_k=self.used, max_seqlen_q=max(self.queries))
        return lambda: tandem.attention(self.q, k, v, causal=True, **more)

    def fa3(self, size: int):
        from flash_attn_interface import flash_attn_with_kvcache

        k, v, table = self.pages(size)
        more = dict(cu_seqlens_q=self.starts_q, page_table=table, cache_seqlens=self.used, causal=True)
        return lambda: flash_attn_with_kvcache(self.q, k, v, max_seqlen_q=max(self.queries), **more)

    def fa2(self):
        """FlashAttention-2 of torch, with packed keys instead of pages."""
        sizes = (self.starts_q, self.starts_k, max(self.queries), max(self.lengths))
        forward = torch.ops.aten._flash_attention_forward
        return lambda: forward(self.q, *self.cache, *sizes, 0.0, True, False)[0]

    def calls(self) -> dict:
        return {"mixed, pages 64": lambda: self.tandem(64), "mixed, pages 16": lambda: self.tandem(16)}

    def peers(self) -> dict:
        return {
            "FA3 pages 64": lambda: self.fa3(64),
            "FA3 pages 16": lambda: self.fa3(16),
            "FlashInfer pages 64": lambda: flashinfer_prefill(self, 64),
            "FlashInfer pages 16": lambda: flashinfer_prefill(self, 16),
            "FlashAttention-2 of torch, packed": self.fa2,
        }


class Shared(Requests):
    """Requests of one query that share a prefix. The first sequence is the prefix, without queries."""

    def __init__(self, batch: int, prefix: int, own: int, heads: int, heads_k: int, dim: int):
        super().__init__([1] * batch, [prefix, *[own] * batch], heads, heads_k, dim)
        self.batch = batch

    def keys_of(self, request: int) -> list[slice]:
        return [*super().keys_of(0), *super().keys_of(request + 1)]

    def tables(self, size: int):
        """Returns k, v, the prefix's table, the own tables, and whole tables."""
        k, v, table = self.pages(size)
        own = table[1:, : -(-self.lengths[1] // size)].contiguous()
        return k, v, table[:1], own, torch.cat((table[:1].expand(self.batch, -1), own), 1).contiguous()

    def cascade(self, size: int):
        k, v, prefix, own, _ = self.tables(size)
        more = dict(cu_seqlens_q=self.starts_q, page_table=own, seqused_k=self.used[1:], max_seqlen_q=1)
        more.update(cu_seqlens_group=int32([0, self.batch]), group_page_table=prefix, group_seqused_k=self.used[:1])
        return lambda: tandem.cascade_attention(self.q, k, v, **more)

    def whole(self, size: int):
        k, v, _, _, table = self.tables(size)
        used = self.used[1:] + self.used[0]
        return lambda: tandem.attention(self.q[:, None], k, v, page_table=table, seqused_k=used)[:, 0]

    def fa3(self, size: int):
        from flash_attn_interface import flash_attn_with_kvcache

        k, v, _, _, table = self.tables(size)
        used = self.used[1:] + self.used[0]
        return lambda: flash_attn_with_kvcache(self.q[:, None], k, v, cache_seqlens=used, page_table=table)[:, 0]

    def calls(self) -> dict:
        return {
            "shared, pages 64": lambda: self.cascade(64),
            "shared, pages 16": lambda: self.cascade(16),
            "without sharing, pages 64": lambda: self.whole(64),
            "without sharing, pages 16": lambda: self.whole(16),
        }

    def peers(self) -> dict:
        return {
            "FA3 without sharing, pages 64": lambda: self.fa3(64),
            "FlashInfer cascade, pages 64": lambda: flashinfer_cascade(self, 64),
        }


def _lists(table: torch.Tensor, lengths: torch.Tensor, size: int):
    """Returns FlashInfer's form of a page table: the starts, the pages, and the rows of each last page."""
    counts = (lengths + size - 1) // size
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist())])
    return starts_of(counts.tolist()), pages, lengths - (counts - 1) * size


def _memory() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)


def flashinfer_decode(x: Decode, size: int):
    import flashinfer

    k, v, table = x.pages(size)
    lists = _lists(table, x.used, size)
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    buffers = dict(zip(names, (t.clone() for t in lists)))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _memory(), "NHD", use_cuda_graph=True, use_tensor_cores=True, **buffers
    )
    wrapper.plan(*lists, x.heads, x.heads_k, x.dim, size, q_data_type=x.q.dtype)
    return lambda: wrapper.run(x.q, (k, v))


def flashinfer_prefill(x: Mixed, size: int):
    import flashinfer

    k, v, table = x.pages(size)
    lists = (x.starts_q, *_lists(table, x.used, size))
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = dict(zip(names, (t.clone() for t in lists)))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_memory(), "NHD", use_cuda_graph=True, **buffers)
    wrapper.plan(*lists, x.heads, x.heads_k, x.dim, size, causal=True, q_data_type=x.q.dtype)
    return lambda: wrapper.run(x.q, (k, v))


def flashinfer_cascade(x: Shared, size: int):
    import flashinfer

    k, v, prefix, own, _ = x.tables(size)
    levels = zip(_lists(prefix, x.used[:1], size), _lists(own, x.used[1:], size))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _memory(), "NHD")
    first = [int32([0, x.batch]), x.starts_q]
    wrapper.plan(first, *map(list, levels), x.heads, x.heads_k, x.dim, size, q_data_type=x.q.dtype)
    return lambda: wrapper.run(x.q, (k, v))
