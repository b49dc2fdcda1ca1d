"""Launches of FlashAttention-4's launcher (flash-attn-4 4.0.0b36): grids, sizes, parameters in order."""

import math

import numpy as np

LOG2_E = 1.44269502162933349609375  # as float32
L2_BYTES = 50 * 1024 * 1024  # L2 size that FlashAttention-4's scheduler assumes
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
SHARED_OF_ONE_CTA = {64: 150528, 128: 232448}  # shared memory of the backward on sm_100a, by head_dim


def fast_divisor(n):
    """Returns CuTe's 12 bytes for a division by n: n, a multiplier and two shifts."""
    log = max(0, (n - 1).bit_length())
    multiplier = ((1 << 32) * ((1 << log) - n)) // n + 1
    return {
        "hex": (
            n.to_bytes(4, "little") + multiplier.to_bytes(4, "little") + bytes([min(log, 1), max(log - 1, 0), 0, 0])
        ).hex()
    }


def integers(*numbers):
    return [{"i32": n} for n in numbers]


def zeros(count):
    return {"hex": "00" * count}


def scales(shape):
    """Returns the scale of the scores, and the scale for exponents of 2."""
    scale = np.float32(shape.scale)
    return {"f32": float(scale)}, {"f32": float(scale * np.float32(LOG2_E))}


def tensor(buffer, sizes, strides):
    """A tensor in global memory; strides: in elements, of all dimensions but the dimension with stride 1."""
    layout = [{"i32": sizes}] + ([{"i64": strides}] if strides else [])
    return {"struct": [{"pointer": buffer}, *layout]}


def tensor_map(buffer, dims, strides, box, offset=0):
    """strides: in elements, of all dimensions except the first."""
    strides, swizzle = [2 * s for s in strides], f"{2 * box[0]}B"
    fields = {"buffer": buffer, "offset": offset, "dims": dims, "byte_strides": strides, "box": box, "swizzle": swizzle}
    return {"tensor_map": fields}


def map_of(buffer, shape, seqlen, heads, rows, columns=64):
    d = shape.head_dim
    strides = [heads * d, d, seqlen * heads * d]
    return tensor_map(buffer, [d, seqlen, heads, shape.batch], strides, [columns, rows, 1, 1])


def map_of_groups(buffer, shape, rows, arch):
    """Returns the layout of q or out when the queries of a head group share tiles: heads before positions."""
    d, heads, batch = shape.head_dim, shape.heads_q, shape.seqlen_q * shape.heads_q * shape.head_dim
    box = [64, shape.group, rows // shape.group]
    if arch == "sm_90a":
        return tensor_map(buffer, [d, heads, shape.seqlen_q, shape.batch], [d, heads * d, batch], [*box, 1])
    dims = [d, shape.group, shape.seqlen_q, shape.heads_k, shape.batch]
    return tensor_map(buffer, dims, [d, heads * d, shape.group * d, batch], [*box, 1, 1])


def heads_at_a_time(shape):
    """Returns the number of heads whose keys and values fit into L2, a power of two: the scheduler's unit of work."""
    bytes_of_head = shape.seqlen_k * 2 * shape.head_dim * 2
    return 1 << int(math.log2(max(1, L2_BYTES // bytes_of_head)))


def swizzled(swizzle, heads, blocks, batch):
    """Returns the divisors with which a scheduler groups tiles by heads that stay in L2."""
    remainder = max(1, heads * batch % swizzle)
    divisors = (heads, swizzle, swizzle * blocks, remainder)
    parameters = [p for n in divisors for p in (fast_divisor(n), {"i32": n})]
    return [*parameters, {"i32": heads * batch // swizzle}]


def longest_first(shape, heads, blocks, splits):
    """Returns the scheduler's parameters for causal kernels. splits: the number of key splits."""
    swizzle = heads_at_a_time(shape)
    numbers = [blocks * heads * shape.batch, *splits, blocks, heads, shape.batch, swizzle]
    return [*integers(*numbers), *swizzled(swizzle, heads, blocks, shape.batch), fast_divisor(1), {"i32": 1}]


def forward(shape, arch):
    hopper, d, grouped = arch == "sm_90a", shape.head_dim, shape.group > 1
    paired = not hopper and d == 128 and not shape.causal  # two blocks share a product
    heads = shape.heads_k if grouped else shape.heads_q
    rows_of_map = 192 if hopper and d == 64 else 128
    rows_of_block = rows_of_map if hopper else 256
    blocks = -(-shape.seqlen_q * (shape.group if grouped else 1) // rows_of_block)
    if paired:
        blocks = -(-blocks // 2)
    tiles = blocks * heads * shape.batch

    sizes_q, sizes_k = ([s, d, heads, shape.batch] for s in (shape.seqlen_q, shape.seqlen_k))
    sizes_v = sizes_k if hopper else [d, shape.seqlen_k, heads, shape.batch]
    parameters = [{"i32": sizes} for sizes in (sizes_q, sizes_k, sizes_v, sizes_q)]

    def rows(name):
        if grouped:
            return map_of_groups(name, shape, rows_of_map, arch)
        return map_of(name, shape, shape.seqlen_q, shape.heads_q, rows_of_map)

    keys = map_of("k", shape, shape.seqlen_k, shape.heads_k, 64 if paired else 128)
    values = map_of("v", shape, shape.seqlen_k, shape.heads_k, 128)
    parameters += [rows("q"), keys, values, rows("out")]
    scale, scale_log2 = scales(shape)
    parameters += [{"f32": LOG2_E}, scale] if shape.distance else [scale_log2]
    parameters += [zeros(1 if hopper else 64 if paired else 32)] * 2  # the default kind of products

    grid = [tiles]
    if shape.causal:
        parameters += longest_first(shape, heads, blocks, [] if hopper else [1])
        if not hopper:
            parameters.append({"i32": 1})
            parameters += [fast_divisor(shape.group), {"i32": shape.group}] if grouped else []
    elif hopper:
        grid = [blocks, heads, shape.batch]
        parameters += [{"i32": n} for n in grid] + [fast_divisor(1), {"i32": 1}]
    else:  # persistent blocks take one tile after the other
        grid = [min(MULTIPROCESSORS[arch] // 2, tiles) * 2 if paired else min(MULTIPROCESSORS[arch], tiles)]
        for n in (blocks, heads):
            parameters += [fast_divisor(n), {"i32": n}]
        parameters += [{"i32": tiles}, {"i32": 1}]

    launch = {
        "grid": grid,
        "block": [512 if d == 64 or not hopper else 384],
        "dynamic_shared_bytes": 232448 if not hopper else 91136 if d == 64 else 164864,
        "parameters": parameters,
    }
    return launch | ({"cluster": [2]} if paired else {})


def packed(lengths_q, lengths_k, shape, arch):
    """Describes the causal forward of packed sequences. shape: the shape of their concatenation."""
    hopper, d, heads, batch = arch == "sm_90a", shape.head_dim, shape.heads_q, len(lengths_q)
    rows_of_block = 128 if hopper else 256

    def map_of_rows(name, seqlen):
        return tensor_map(name, [d, seqlen, heads], [heads * d, d], [64, 128, 1])

    sizes_q, sizes_k, sizes_v = ([n, d, heads] for n in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k))
    starts = [tensor(name, [batch + 1], []) for name in ("starts_q", "starts_k")]
    maps = [map_of_rows("q", shape.seqlen_q), map_of_rows("k", shape.seqlen_k), map_of_rows("v", shape.seqlen_k)]
    if hopper:
        # Rows are counted such that the last row of a sequence is the last in bounds.
        last, row = 1 << 30, heads * d
        out = tensor_map("out", [d, last, heads, (1 << 31) - 1], [row, d, row], [64, 128, 1, 1], -2 * last * row)
        parameters = [*({"i32": sizes} for sizes in (sizes_q, sizes_k, sizes_v, [d, heads])), *starts, *maps, out]
    else:
        sizes_v = [d, shape.seqlen_k, heads]
        out = tensor("out", sizes_q, [heads * d, d])
        parameters = [*({"i32": sizes} for sizes in (sizes_q, sizes_k, sizes_v)), out, *starts, *maps]
    parameters += [scales(shape)[1]] + [zeros(1 if hopper else 32)] * 2
    parameters += integers(shape.seqlen_q, heads, batch, *([] if hopper else [1]), L2_BYTES // (2 * d * 2 * 128))
    parameters += [starts[0]] + ([] if hopper else [{"i32": 1}])
    return {
        "grid": [(shape.seqlen_q + batch * (rows_of_block - 1)) // rows_of_block * heads],
        "block": [384 if hopper else 512],
        "dynamic_shared_bytes": 164864 if hopper else 232448,
        "parameters": parameters,
    }


def rows_of_backward(shape, arch):
    """Returns the number of queries in a tile."""
    return 128 if arch == "sm_100a" else 64 if shape.causal else 80


def backward(shape, arch, paired, deterministic):
    """The kernels of a backward: "pre" sums dout * out and clears dq_accum, "main", and "post" converts dq_accum to dq.

    paired, deterministic: for sm_100a. A deterministic kernel has a semaphore for each tile of queries."""
    hopper, batch, heads, d = arch == "sm_90a", shape.batch, shape.heads_q, shape.head_dim
    s, sk, rows = shape.seqlen_q, shape.seqlen_k, rows_of_backward(shape, arch)
    blocks_q, blocks_k = -(-s // rows), -(-sk // 128)
    padded, ctas = blocks_q * rows, 2 if paired else 1
    scale, scale_log2 = scales(shape)

    def sizes(seqlen):
        return [seqlen, d, heads, batch]

    def dense(name, seqlen):
        return tensor(name, sizes(seqlen), [heads * d, d, seqlen * heads * d])

    def by_head(name, width):
        return tensor(name, [width, heads, batch], [width, heads * width])

    def tiles(blocks):
        return [*integers(blocks, heads, batch), fast_divisor(1), {"i32": 1}]

    pre = [dense("out", s), dense("dout", s), by_head("dpsum", padded), by_head("lse", s), by_head("lse_log2", padded)]
    pre += [by_head("dq_accum", padded * d), {"f32": LOG2_E}, *tiles(blocks_q)]
    post = [
        tensor("dq_accum", [batch, heads, padded * d], [heads * padded * d, padded * d]),
        tensor("dq", [batch, s, heads, d], [s * heads * d, heads * d, d]),
        scale,
        zeros(1 if hopper else 32),
        *tiles(blocks_q),
    ]

    def maps(*boxes):
        return [map_of(name, shape, s if name in ("q", "dout") else sk, heads, box) for name, box in boxes]

    sums = [by_head("lse_log2", padded), by_head("dpsum", padded)]
    accumulated = by_head("dq_accum", padded * d)
    if hopper:
        main = [{"i32": sizes(seqlen)} for seqlen in (s, sk, sk, s, sk, sk)]
        main += maps(("q", rows), ("k", 128), ("v", 128), ("dout", rows), ("dk", 128), ("dv", 128))
        main += [*sums, accumulated, *[zeros(1)] * 4, scale_log2, scale]
    else:
        turned_q, turned_k = {"i32": [d, s, heads, batch]}, {"i32": [d, sk, heads, batch]}
        of_q, of_k = {"i32": sizes(s)}, {"i32": sizes(sk)}
        results = [dense("dv", sk), dense("dk", sk), accumulated, of_k, of_k]
        if paired:
            main = [of_q, turned_q, of_k, turned_k, of_k, *sums, turned_q, of_q, *results]
        else:
            main = [of_q, of_k, of_k, *sums, turned_q, *results]
        if deterministic:
            of_head = blocks_q * ctas
            main.append(tensor("turns", [blocks_q, heads, batch], [of_head, heads * of_head]))
        if paired:
            main += maps(("q", 64), ("q", 128), ("k", 128), ("k", 256), ("v", 128), ("dout", 128), ("dout", 64))
        else:
            main += maps(("q", 128), ("k", 128), ("v", 128), ("dout", 128))
        main += [map_of(name, shape, sk, heads, 128, min(64, d // 2)) for name in ("dv", "dk")]
        main += [*[zeros(64 if paired else 32)] * 5, scale, scale_log2]
    if deterministic:
        clusters = -(-blocks_k // ctas)
        swizzle = 1 << int(math.log2(max(1, L2_BYTES // (s * d * 8))))  # q, dout and dq_accum of a head
        main += integers(clusters * ctas * heads * batch, clusters, swizzle)
        main += swizzled(swizzle, heads, clusters, batch)
    else:
        main += tiles(blocks_k)

    def launch(blocks, threads, shared, parameters):
        size = {"block": [threads], "dynamic_shared_bytes": shared}
        return {"grid": [blocks, heads, batch], **size, "parameters": parameters}

    kernels = {
        "pre": launch(blocks_q, 256, 0, pre),
        "main": launch(blocks_k, 384, 198656 if shape.causal else 232448, main),
        "post": launch(blocks_q, 256, 512 * rows, post),
    }
    if not hopper:
        shared = 231424 if paired else SHARED_OF_ONE_CTA[d]
        kernels["main"] = launch(-(-blocks_k // ctas) * ctas, 512, shared, main)
        kernels["main"] |= {"cluster": [2]} if paired else {}
        kernels["post"] |= {"block": [128], "dynamic_shared_bytes": 256 * d}
    if deterministic:
        kernels["main"]["grid"] = [math.prod(kernels["main"]["grid"])]
    return kernels
