#!/usr/bin/env python3
"""A second reference: the same attention written independently in vectorised numpy, from tandem.h alone.

Usage: numpy_reference.py path/to/reference_dump [count]
"""

import ast
import collections
import json
import operator
import re
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: python3 has no numpy")
    sys.exit(77)

np.seterr(all="ignore")


def philox(counter, key):
    """Philox4x32-7 on arrays: counter is four uint64 arrays of 32-bit words, key two integers."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & mask,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


Place = collections.namedtuple(
    "Place", "document first_query first_key stride seqlen_q seqlen_k diagonal first_head heads_q"
)


def place_of(case, t, b, shape):
    """Returns the place of a sequence in a longer sequence. shape: heads, rows, keys."""
    if "places" in t:
        return Place(*(int(x) for x in t["places"][b]))
    return Place(b, 0, 0, 1, shape[1], shape[2], diagonal(case, t, b, *shape[1:]), 0, shape[0])


def kept(case, place, heads, rows, columns):
    """Returns 1 / (1 - p) where dropout keeps an entry, and 0 where it drops it:

    (heads, rows, columns). p: a multiple of 1/256.
    """
    seed, offset = case["seed"], case["offset"]
    if case["dropout"] == 0:
        return np.ones((heads, rows, columns))
    threshold = min(max(int(case["dropout"] * 256 + 0.5), 1), 255)
    positions = place.first_query + place.stride * np.arange(rows), place.first_key + place.stride * np.arange(columns)
    h, i, j = np.meshgrid(place.first_head + np.arange(heads), *positions, indexing="ij")
    low = np.full(h.shape, offset & 0xFFFFFFFF)
    counter = [x.astype(np.uint64) for x in (j // 16, i, place.document * place.heads_q + h, low)]
    key = (seed & 0xFFFFFFFF, ((seed >> 32) + (offset >> 32)) & 0xFFFFFFFF)
    words = np.take_along_axis(philox(counter, key), (2 * (j % 16 // 8) + j % 2)[None], axis=0)[0]
    byte = words >> (8 * (j // 2 % 4)).astype(np.uint64) & np.uint64(255)
    return np.where(byte < threshold, 0.0, 256 / (256 - threshold))


def diagonal(case, t, b, rows, keys):
    """Returns the key at the first query's position. Sums have 64 bits, for any offset."""
    if case["explicit"]:
        return case["diagonal"] + (int(t["diagonal_offsets"][b]) if "diagonal_offsets" in t else 0)
    return 0 if case["top_left"] else keys - rows


def remainder(a, b):
    return np.where(b == 0, a, np.remainder(a, np.where(b == 0, 1, b)))


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.Mod: remainder,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,  # also for bools
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS = {
    "select": np.where,
    "min": np.minimum,
    "max": np.maximum,
    "clamp": lambda x, least, most: np.minimum(np.maximum(x, least), most),
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "float": lambda x: np.asarray(x, dtype=np.float64),
}
ELEMENTS = {"slope": np.float64, "table": np.float64, "temperature": np.float64, "doc": np.int32, "seen": bool}


def modified(text, names):
    """Evaluates an expression (docs/score_mod.md) for all queries and keys at once, by Python's parser."""
    python = re.sub(r"!(?!=)", "~", text.replace("&&", " and ").replace("||", " or "))

    def join(node):
        result = value(node.values[0])
        for other in node.values[1:]:
            result = (np.logical_and if isinstance(node.op, ast.And) else np.logical_or)(result, value(other))
        return result

    def compare(node):
        places = [value(one) for one in (node.left, *node.comparators)]
        chain = zip(node.ops, places, places[1:])
        return np.logical_and.reduce(np.broadcast_arrays(*(OPERATORS[type(op)](a, b) for op, a, b in chain)))

    def element(node):
        of = value(node.value)
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return of[tuple(np.clip(value(one), 0, size - 1) for one, size in zip(places, of.shape))]

    values = {
        ast.Constant: lambda node: np.int32(node.value) if type(node.value) is int else node.value,
        ast.Name: lambda node: names[node.id],
        ast.UnaryOp: lambda node: OPERATORS[type(node.op)](value(node.operand)),
        ast.BinOp: lambda node: OPERATORS[type(node.op)](value(node.left), value(node.right)),
        ast.BoolOp: join,
        ast.Compare: compare,
        ast.Call: lambda node: FUNCTIONS[node.func.id](*(value(one) for one in node.args)),
        ast.Subscript: element,
    }

    def value(node):
        return values[type(node)](node)

    return value(ast.parse(python, mode="eval").body)


def names_of(case, t, place, scores):
    """The names of a text, each as an array that broadcasts to (heads, rows, keys)."""
    heads, rows, keys = (np.arange(n, dtype=np.int32) for n in scores.shape)
    names = {name: t[name].astype(kind) for name, kind in ELEMENTS.items() if name in t}
    for name, kind in {"c": np.float64, "n": np.int32, "on": np.bool_}.items():
        if name in case["scalars"]:
            names[name] = kind(case["scalars"][name])
    lengths = {"seqlen_q": np.int32(place.seqlen_q), "seqlen_k": np.int32(place.seqlen_k)}
    rows, keys = (np.int32(first) + np.int32(place.stride) * x for first, x in zip(place[1:3], (rows, keys)))
    heads = heads + np.int32(place.first_head)
    places = {"batch": np.int32(place.document), "head": heads[:, None, None], "q": rows[:, None], "k": keys}
    return {**names, **lengths, **places, "score": scores, "true": np.bool_(True), "inf": np.inf}


def block_states(case, t, b, shape):
    """Returns the state that a block mask has for each (head, row, key): 0 hidden, 1 decided by mask_mod, 2 visible."""
    states = np.zeros(shape, dtype=np.int8)
    size_q, size_k = case["block"]
    for state, kind in ((1, "kv"), (2, "full_kv")):
        if f"{kind}_num_blocks" not in t:
            continue
        counts, indices = t[f"{kind}_num_blocks"], t[f"{kind}_indices"]
        for head in range(shape[0]):
            at = tuple(min(place, size - 1) for place, size in zip((b, head), counts.shape))
            for row in range(-(-shape[1] // size_q)):
                count = int(np.clip(counts[at][row], 0, indices.shape[3]))
                for block in indices[at][row][:count]:
                    if 0 <= block < -(-t["k"].shape[1] // size_k):
                        keys = slice(int(block) * size_k, (int(block) + 1) * size_k)
                        states[head, row * size_q : (row + 1) * size_q, keys] = state
    return states


def attend(case, t, b, q, k, v):
    """One sequence: q (heads, rows, dim), k and v (heads, keys, dim), only used rows and keys. Returns out, lse and the
    largest scores."""
    heads, rows, dim = q.shape
    keys = k.shape[1]
    scores = np.einsum("hid,hjd->hij", q, k) * (case["scale"] or dim**-0.5)
    if case["softcap"]:
        scores = case["softcap"] * np.tanh(scores / case["softcap"])
    distance = np.arange(rows)[:, None] + diagonal(case, t, b, rows, keys) - np.arange(keys)[None, :]
    place = place_of(case, t, b, scores.shape)
    if "alibi_slopes" in t:
        rows_and_keys = place.stride * (np.arange(rows)[:, None] - np.arange(keys)[None, :])
        from_key = place.first_query + place.diagonal - place.first_key + rows_and_keys
        slopes = t["alibi_slopes"] if t["alibi_slopes"].ndim == 1 else t["alibi_slopes"][b]
        scores = scores - slopes[:, None, None] * np.abs(from_key)
    visible = np.ones(scores.shape, dtype=bool)
    if case["causal"]:
        visible &= distance >= 0
    if case["left"] is not None:
        visible &= distance <= case["left"]
    if case["right"] is not None:
        visible &= -distance <= case["right"]
    if "bias" in t:
        whole = np.broadcast_to(t["bias"], case["bias_shape"])[b][:, :rows, :keys]
        if case["boolean_bias"]:
            visible &= whole != 0
        else:
            scores = scores + whole
    names = names_of(case, t, place, scores)
    if case["score_mod"]:
        scores = np.broadcast_to(modified(case["score_mod"], names), scores.shape)
    shown = modified(case["mask_mod"], names) if case["mask_mod"] else True
    if "kv_num_blocks" in t:
        states = block_states(case, t, b, scores.shape)
        shown = (states == 2) | ((states == 1) & shown)
    visible &= shown
    scores = np.where(visible, scores, -np.inf)
    logits = (
        scores
        if "sink" not in t
        else np.concatenate([scores, np.broadcast_to(t["sink"][:, None, None], (heads, rows, 1))], -1)
    )
    top = logits.max(-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    lse = np.log(np.exp(logits - safe[..., None]).sum(-1)) + safe
    weights = np.where(scores == -np.inf, 0.0, np.exp(scores - lse[..., None]))
    out = np.einsum("hij,hjd->hid", weights * kept(case, place, heads, rows, keys), v)
    return out, lse, scores.max(-1, initial=-np.inf)


def reference(case, t):
    """Computes out, lse and max_scores of a whole case, in the shapes of the dump."""
    out, lse, largest = np.zeros_like(t["out"]), np.full_like(t["lse"], -np.inf), np.full_like(t["lse"], -np.inf)
    q = t["q"]
    packed = "cu_seqlens_q" in t
    group = q.shape[-2] // max(t["k"].shape[-2], 1)
    sequences = len(t["cu_seqlens_q"]) - 1 if packed else q.shape[0]
    if "bias" in t:
        keys = t["k"].shape[1] if "page_table" not in t else t["page_table"].shape[1] * t["k"].shape[1]
        case["bias_shape"] = (q.shape[0], q.shape[2], q.shape[1], keys)
    for b in range(sequences):
        rows = slice(*t["cu_seqlens_q"][b : b + 2].astype(int)) if packed else slice(0, q.shape[1])
        q_b = (q if packed else q[b])[rows]
        if "page_table" in t:
            used = int(t["seqused_k"][b])
            pages = t["page_table"][b][: -(-used // t["k"].shape[1])].astype(int)
            pages = np.where((pages < 0) | (pages >= len(t["k"])), 0, pages)  # before all visible keys
            k_b, v_b = (np.nan_to_num(t[x][pages]) for x in "kv")  # unused pages are poison
            k_b, v_b = (x.reshape(len(pages) * x.shape[1], *x.shape[2:]) for x in (k_b, v_b))
        elif packed:
            k_b, v_b = (t[x][slice(*t["cu_seqlens_k"][b : b + 2].astype(int))] for x in "kv")
        else:
            k_b, v_b = t["k"][b], t["v"][b]
        used_q = int(t["seqused_q"][b]) if "seqused_q" in t else q_b.shape[0]
        used_k = int(t["seqused_k"][b]) if "seqused_k" in t else k_b.shape[0]
        heads_first = [x.transpose(1, 0, 2) for x in (q_b[:used_q], k_b[:used_k], v_b[:used_k])]
        o, *of_rows = attend(case, t, b, heads_first[0], *(x.repeat(group, axis=0) for x in heads_first[1:]))
        (out if packed else out[b])[rows][:used_q] = o.transpose(1, 0, 2)
        for result, of_row in zip((lse, largest), of_rows):
            (result if packed else result[b])[:, rows][:, :used_q] = of_row
    return out, lse, largest


def differs(got, expected):
    """Compares two float64 arrays, which may differ only in the last digits. NaN fails; infinities must match."""
    close = np.abs(got - expected) <= 1e-11 * (1 + np.abs(expected))
    return not np.all(close | (got == expected))


def main():
    dump, count = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "600"
    stream = subprocess.Popen([dump, count], stdout=subprocess.PIPE)
    cases = failures = 0
    for line in stream.stdout:
        case = json.loads(line)
        t = {}
        for name, shape in case["tensors"]:
            size = int(np.prod(shape))
            t[name] = np.frombuffer(stream.stdout.read(8 * size), dtype=np.float64).reshape(shape)
        cases += 1
        for name, expected in zip(("out", "lse", "max_scores"), reference(case, t)):
            if name in t and differs(t[name], expected):
                failures += 1
                print(f"{name} differs by {np.nanmax(np.abs(t[name] - expected))}: {case['flags']}")
    print(f"{cases} problems, {failures} failures")
    sys.exit(stream.wait() != 0 or cases != int(count) or failures > 0)


if __name__ == "__main__":
    main()
