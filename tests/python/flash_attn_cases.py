"""Cases of the FlashAttention interfaces' tests: options, caches, and a reference rotation."""

import torch

INF = float("inf")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
# Arguments of flash_attn, and the equivalent arguments of standard attention.
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "window left": ({"window_size": (4, -1)}, {"window": (4, None)}),
    "window right": ({"window_size": (-1, 0)}, {"window": (None, 0)}),
    "causal window": ({"window_size": (3, 2), "causal": True}, {"window": (3, 2), "causal": True}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "no softcap": ({"softcap": -1.0}, {}),
    "scale": ({"softmax_scale": 0.4}, {"scale": 0.4}),
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    "alibi of batches": ({"alibi_slopes": SLOPES * int32(1, 3)[:, None]}, {"slopes": SLOPES * int32(1, 3)[:, None]}),
}
CU_Q, CU_K = int32(0, 9, 14), int32(0, 6, 19)
VARLEN = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 9, "max_seqlen_k": 13}

ROWS, PLACES, HEADS, HEADS_K, DIM, DIM_V = 5, 16, 4, 2, 16, 12


def caches(random, layout, dim_v=DIM):
    """Returns keys and values, (ROWS, PLACES, HEADS_K, dim), in one of their memory layouts."""
    if layout == "places first":
        return random(ROWS, PLACES, HEADS_K, DIM), random(ROWS, PLACES, HEADS_K, dim_v)
    if layout == "heads first":
        return random(ROWS, HEADS_K, PLACES, DIM).transpose(1, 2), random(ROWS, HEADS_K, PLACES, dim_v).transpose(1, 2)
    if layout == "keys beside values":
        both = random(ROWS, PLACES, 2, HEADS_K, DIM)
        return both[:, :, 0], both[:, :, 1]
    if layout == "places before rows":
        return random(PLACES, ROWS, HEADS_K, DIM).transpose(0, 1), random(PLACES, ROWS, HEADS_K, dim_v).transpose(0, 1)
    if layout == "keys and values unlike":
        return random(ROWS, PLACES, HEADS_K, DIM), random(ROWS, HEADS_K, PLACES, dim_v).transpose(1, 2)
    assert layout == "odd gaps"
    gaps = (random(ROWS, PLACES * HEADS_K * dim + 8)[:, 8:] for dim in (DIM, dim_v))
    return [x.unflatten(1, (PLACES, HEADS_K, dim)) for x, dim in zip(gaps, (DIM, dim_v))]


def turned(x, cos, sin, places, interleaved):
    """Rotates x (seqlen, heads, head_dim) as complex numbers, in float64."""
    x = x.double()
    half = cos.shape[1]
    order = torch.arange(2 * half)
    order = order.reshape(half, 2) if interleaved else order.reshape(2, half).T
    z = torch.complex(x[..., order[:, 0]], x[..., order[:, 1]])
    z = z * torch.complex(cos.double(), sin.double())[places][:, None]
    result = x.clone()
    result[..., order[:, 0]], result[..., order[:, 1]] = z.real, z.imag
    return result
