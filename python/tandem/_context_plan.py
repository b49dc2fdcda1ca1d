"""The plan of one attention over several ranks: the tokens of each rank, and the division of batches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem import _arrays, _ctypes
from tandem._binding import check_mask, window_of
from tandem._errors import error_of
from tandem._score_mod import Blocks

LAYOUTS = {"balanced": 0, "contiguous": 1, "zigzag": 2, "per_document": 3, "striped": 4}
_ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
_int32, _int64 = ctypes.c_int32, ctypes.c_int64
_pointer = ctypes.POINTER(_int64)
UNBOUNDED = 2**63 - 1
# tandem_cp_step
STEP = np.dtype(
    [("document", np.int32), ("stride", np.int32)]
    + [(name, np.int64) for name in ("q_row", "q_count", "k_row", "k_count", "q_begin", "k_begin")]
    + [(name, np.int64) for name in ("diagonal", "window_left", "window_right", "q_order", "k_order", "pairs")]
)


class _PlanArgs(ctypes.Structure):
    _fields_ = [
        ("size", _int64),
        ("ranks", _int32),
        ("layout", _int32),
        ("chunk", _int64),
        ("documents", _int64),
        ("q_lens", _pointer),
        ("k_lens", _pointer),
        ("diagonals", _pointer),
        ("causal", _int32),
        ("alignment", _int32),
        ("window", _int32),
        ("reserved", _int32),
        ("window_left", _int64),
        ("window_right", _int64),
        ("block_q", _int64),
        ("block_k", _int64),
        ("block_rows", _pointer),
        ("key_blocks", ctypes.POINTER(_int32)),
        ("full_blocks", ctypes.POINTER(ctypes.c_uint8)),
    ]


def _prepare(library: ctypes.CDLL) -> ctypes.CDLL:
    plan = ctypes.c_void_p
    library.tandem_cp_plan_create.argtypes = [ctypes.POINTER(_PlanArgs), ctypes.POINTER(plan)]
    library.tandem_cp_plan_destroy.argtypes = [plan]
    library.tandem_cp_plan_destroy.restype = None
    library.tandem_cp_plan_hash.argtypes = [plan]
    library.tandem_cp_plan_hash.restype = ctypes.c_uint64
    library.tandem_cp_plan_rows.argtypes = [plan, _int32, _pointer, _pointer]
    library.tandem_cp_plan_tokens.argtypes = [plan, _int32, _int32, ctypes.POINTER(_int32), _pointer]
    library.tandem_cp_plan_steps.argtypes = [plan, _int32, _int32, ctypes.c_void_p, _pointer]
    return library


_library = _prepare(_ctypes.library())


def _check(status: int) -> None:
    if status != 0:
        raise error_of(status, _ctypes.last_error(), {})


class _BlockLists:
    """The lists of a block mask in the form of tandem_cp_plan_args."""

    def __init__(self, blocks: Blocks, q_lens: np.ndarray, k_lens: np.ndarray) -> None:
        self.sizes = tuple(int(x) for x in blocks.BLOCK_SIZE)
        if min(self.sizes) < 1:
            raise ValueError(f"blocks.BLOCK_SIZE ({self.sizes}) must be at least 1: pass the sizes of a block")
        partial = _block_states(blocks.kv_num_blocks, blocks.kv_indices, "")
        full = _block_states(blocks.full_kv_num_blocks, blocks.full_kv_indices, "full_")
        rows, keys, states = [0], [], []
        for document, (q_len, k_len) in enumerate(zip(q_lens, k_lens)):
            for row in range(-(-int(q_len) // self.sizes[0])):
                found = dict.fromkeys(_listed(partial, document, row), False)
                found.update(dict.fromkeys(_listed(full, document, row), True))
                inside = sorted(block for block in found if 0 <= block * self.sizes[1] < k_len)
                keys += inside
                states += [found[block] for block in inside]
                rows.append(len(keys))
        self.arrays = np.array(rows, np.int64), np.array(keys, np.int32), np.array(states, np.uint8)
        counts = -(-q_lens // self.sizes[0])
        self._first_rows = np.cumsum(counts) - counts

    def of(self, document: int, begins: tuple[int, int], counts: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns the lists of a dense call, whose queries and keys begin at a block or lie in one block."""
        rows, columns = (-(-count // size) for count, size in zip(counts, self.sizes))
        first_row, first_column = (begin // size for begin, size in zip(begins, self.sizes))
        first_row += int(self._first_rows[document])
        offsets, keys, full = self.arrays
        lists = {}
        for name, kind in (("kv", 0), ("full_kv", 1)):
            count, indices = np.zeros((1, 1, rows), np.int32), np.zeros((1, 1, rows, columns), np.int32)
            for row in range(rows):
                of_row = slice(offsets[first_row + row], offsets[first_row + row + 1])
                found = keys[of_row][full[of_row] == kind] - first_column
                found = found[(found >= 0) & (found < columns)]
                count[0, 0, row] = len(found)
                indices[0, 0, row, : len(found)] = found
            lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = count, indices
        return lists

    def add_to(self, args: _PlanArgs) -> None:
        args.block_q, args.block_k = self.sizes
        types = _int64, _int32, ctypes.c_uint8
        pointers = [x.ctypes.data_as(ctypes.POINTER(kind)) for x, kind in zip(self.arrays, types)]
        args.block_rows, args.key_blocks, args.full_blocks = pointers


def _block_states(counts: Any, indices: Any, prefix: str) -> tuple[np.ndarray, np.ndarray] | None:
    if counts is None:
        return None
    found = tuple(np.asarray(x.cpu() if hasattr(x, "cpu") else x) for x in (counts, indices))
    if found[0].ndim != 3 or found[1].ndim != 4 or 1 not in {x.shape[1] for x in found} or found[1].shape[1] != 1:
        raise ValueError(
            f"blocks.{prefix}kv_indices (shape {found[1].shape}) must be (documents or 1, 1, blocks of queries, any "
            "number): pass a block mask that all heads share"
        )
    return found


def _listed(lists: tuple[np.ndarray, np.ndarray] | None, document: int, row: int) -> list[int]:
    """Returns the blocks of a row of a document. A list of one document serves all."""
    if lists is None:
        return []
    counts, indices = (x[min(document, x.shape[0] - 1), 0] for x in lists)
    if row >= min(len(counts), len(indices)):
        raise ValueError(
            f"blocks.kv_indices ({len(indices)} rows) must have a row for each block of the queries of document "
            f"{document}: compute the lists for the longest document"
        )
    return [int(block) for block in indices[row, : max(0, int(counts[row]))]]


def _lengths(lengths: Any, name: str) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} (shape {array.shape}, {array.dtype}) must be a list of integers: pass lengths")
    return np.ascontiguousarray(array, np.int64)


class ContextPlan:
    """The plan of context parallelism. Every rank creates it from equal arguments.

    seqlens : the lengths of the packed documents. A batch of equal sequences is a list of equal lengths.
    ranks : the size of the group.
    seqlens_k : the lengths of the keys of each document; None: seqlens.
    causal, window, alignment : the mask of :func:`tandem.attention`, for each document.
    layout : the ranks of the tokens. "balanced" gives each rank the same number of queries and nearly the same work.
        "contiguous", "zigzag", "per_document" and "striped" are fixed divisions.
    chunk : 0, or the number of tokens of a chunk. With chunks the bits of every result depend neither on the number of
        ranks nor on layout and execution.

    blocks : None, or the block mask of all heads, (documents or 1, 1, blocks of queries, any number). chunk must be a
        multiple of BLOCK_SIZE, and the striped layout needs a chunk. CUDA tensors need multiples of 128 and no chunk.

    Rows are numbered as in the packed batch: all tokens of document 0, then of document 1, and so on.
    """

    def __init__(
        self,
        seqlens: Any,
        ranks: int,
        *,
        seqlens_k: Any = None,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        alignment: str = "bottom_right",
        layout: str = "balanced",
        chunk: int = 0,
        blocks: Blocks | None = None,
    ) -> None:
        check_mask(causal, alignment)
        if layout not in LAYOUTS:
            raise ValueError(f"layout ({layout!r}) must be one of {', '.join(LAYOUTS)}: choose one of them")
        q_lens = _lengths(seqlens, "seqlens")
        k_lens = q_lens if seqlens_k is None else _lengths(seqlens_k, "seqlens_k")
        if k_lens.size != q_lens.size:
            raise ValueError(f"seqlens_k ({k_lens.size} lengths) must have the {q_lens.size} documents of seqlens")
        ranks, chunk = _arrays.integer(ranks, "ranks", 32), _arrays.integer(chunk, "chunk")
        args = _PlanArgs(ctypes.sizeof(_PlanArgs), ranks, LAYOUTS[layout], chunk, q_lens.size)
        args.q_lens, args.k_lens = (x.ctypes.data_as(_pointer) for x in (q_lens, k_lens))
        args.causal, args.alignment = bool(causal), _ALIGNMENTS[alignment]
        bounds = (None, None) if window is None else window_of(window)
        left, right = (x if x is None else _arrays.integer(x, f"window[{n}]") for n, x in enumerate(bounds))
        args.window = (left is not None) + 2 * (right is not None)
        self.window = left, (min(0, right or 0) if causal else right)
        args.window_left, args.window_right = left or 0, right or 0
        self.blocks = blocks
        self.block_lists = None if blocks is None else _BlockLists(blocks, q_lens, k_lens)
        if self.block_lists is not None:
            self.block_lists.add_to(args)
        handle = ctypes.c_void_p()
        _check(_library.tandem_cp_plan_create(args, ctypes.byref(handle)))
        self.handle, self.ranks, self.layout, self.chunk = handle, ranks, layout, chunk
        self._lens = q_lens, k_lens
        self._mask = {"causal": causal, "window": window, "alignment": alignment}
        self.kept: dict[Any, Any] = {}  # results of executions
        self._tokens: dict[tuple[int, bool], tuple[np.ndarray, np.ndarray]] = {}
        weakref.finalize(self, _library.tandem_cp_plan_destroy, handle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles create the plan from its arguments, because each plan owns its handle."""
        lens, others = self._lens, {"layout": self.layout, "chunk": self.chunk, "blocks": self.blocks}
        return _created, ((lens[0], self.ranks), {"seqlens_k": lens[1], **others, **self._mask})

    def __repr__(self) -> str:
        return (
            f"ContextPlan({self._lens[0].size} documents, {self._lens[0].sum()} tokens, {self.ranks} ranks, "
            f"layout={self.layout!r}, chunk={self.chunk})"
        )

    @property
    def hash(self) -> int:
        """Equal on ranks that created the plan from equal arguments."""
        return int(_library.tandem_cp_plan_hash(self.handle))

    def rows(self, rank: int) -> tuple[int, int]:
        """Returns the numbers of rows of the rank's queries and keys."""
        q, k = _int64(), _int64()
        _check(
            _library.tandem_cp_plan_rows(
                self.handle, _arrays.integer(rank, "rank", 32), ctypes.byref(q), ctypes.byref(k)
            )
        )
        return q.value, k.value

    def lengths(self, keys: bool = False) -> np.ndarray:
        """Returns the lengths of the documents' queries or keys."""
        return self._lens[keys]

    def diagonals(self) -> np.ndarray:
        """Returns the position of the first query minus the position of the first key, for each document's mask."""
        q, k = self._lens
        return k - q if self._mask["alignment"] == "bottom_right" else np.zeros_like(k)

    def steps(self, q_rank: int, k_rank: int) -> np.ndarray:
        """Returns the steps that q_rank computes with the keys of k_rank: an array of the struct tandem_cp_step."""
        count = _int64()
        q_rank, k_rank = _arrays.integer(q_rank, "q_rank", 32), _arrays.integer(k_rank, "k_rank", 32)
        _check(_library.tandem_cp_plan_steps(self.handle, q_rank, k_rank, None, ctypes.byref(count)))
        steps = np.empty(count.value, STEP)
        _check(_library.tandem_cp_plan_steps(self.handle, q_rank, k_rank, steps.ctypes.data, ctypes.byref(count)))
        return steps

    def on_one_rank(self) -> ContextPlan:
        """Returns the plan of the same documents, mask and chunks on one rank."""
        found = self.kept.get("one rank")
        if found is None:
            options = {"chunk": self.chunk, "blocks": self.blocks, **self._mask}
            found = self.kept["one rank"] = ContextPlan(self._lens[0], 1, seqlens_k=self._lens[1], **options)
        return found

    def _tokens_of(self, rank: int, keys: bool) -> tuple[np.ndarray, np.ndarray]:
        found = self._tokens.get((rank, keys))
        if found is None:
            count = self.rows(rank)[keys]
            documents, positions = np.empty(count, np.int32), np.empty(count, np.int64)
            pointers = documents.ctypes.data_as(ctypes.POINTER(_int32)), positions.ctypes.data_as(_pointer)
            _check(_library.tandem_cp_plan_tokens(self.handle, rank, keys, *pointers))
            found = self._tokens[rank, keys] = documents, positions
        return found

    def documents(self, rank: int, keys: bool = False) -> np.ndarray:
        """Returns the document of each row of the rank's queries or keys."""
        return self._tokens_of(rank, keys)[0].copy()

    def positions(self, rank: int, keys: bool = False) -> np.ndarray:
        """Returns the position of each row in its document, for example for rotary embeddings."""
        return self._tokens_of(rank, keys)[1].copy()

    def indices(self, rank: int, keys: bool = False) -> np.ndarray:
        """Returns the row in the packed batch of each row of the rank."""
        documents, positions = self._tokens_of(rank, keys)
        lens = self._lens[keys]
        return (np.cumsum(lens) - lens)[documents] + positions

    def _check_total(self, x: Any, total: int, dim: int) -> None:
        if x.shape[dim] != total:
            raise ValueError(
                f"x.shape[{dim}] ({x.shape[dim]}) must be the {total} tokens of the plan: pass the packed batch"
            )

    def shard(self, x: Any, rank: int, *, dim: int = 0, keys: bool = False) -> Any:
        """Returns the rank's rows of a packed batch, a torch tensor or an array. Gradients pass through."""
        self._check_total(x, int(self._lens[keys].sum()), dim)
        return _take(x, self.indices(rank, keys), dim)

    def unshard(self, shards: Sequence[Any], *, dim: int = 0, keys: bool = False) -> Any:
        """Returns the packed batch of the shards of all ranks, in the order of the ranks."""
        if len(shards) != self.ranks:
            raise ValueError(f"shards ({len(shards)}) must be one for each of the {self.ranks} ranks: pass all")
        for rank, x in enumerate(shards):
            rows = self.rows(rank)[keys]
            if x.shape[dim] != rows:
                raise ValueError(
                    f"shards[{rank}].shape[{dim}] ({x.shape[dim]}) must be the {rows} rows of rank {rank}: "
                    "pass the shards of this plan"
                )
        order = np.argsort(np.concatenate([self.indices(rank, keys) for rank in range(self.ranks)]))
        return _take(_join(shards, dim), order, dim)

    def collect(self, x: Any, group: Any = None, *, dim: int = 0, keys: bool = False) -> Any:
        """Returns the packed batch of the torch tensors x of all ranks of a group. The result has no gradient."""
        from tandem import _context_transport

        group = _context_transport.checked_group(group, x.device.type)
        rows = [self.rows(rank)[keys] for rank in range(self.ranks)]
        return self.unshard(_context_transport.collect(x, rows, dim, group), dim=dim, keys=keys)


def _created(arguments: tuple[Any, ...], options: dict[str, Any]) -> ContextPlan:
    return ContextPlan(*arguments, **options)


def _take(x: Any, indices: np.ndarray, dim: int) -> Any:
    if isinstance(x, np.ndarray):
        return np.take(x, indices, axis=dim)
    import torch

    return x.index_select(dim, torch.from_numpy(np.ascontiguousarray(indices)).to(x.device))


def _join(shards: Sequence[Any], dim: int) -> Any:
    if isinstance(shards[0], np.ndarray):
        return np.concatenate(shards, axis=dim)
    import torch

    return torch.cat(list(shards), dim=dim)
