"""Cases of tandem.flex_attention's tests: functions of the gallery, a reference, tensors of a small problem."""

import math

import pytest

import tandem

torch = pytest.importorskip("torch")

from tandem import flex  # noqa: E402

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 36, 36, 16


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def plain(q, k, v, score_mod=None, mask_mod=None, scale=None):
    """Computes out and lse by the formula, whose functions get whole tensors."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = [x.expand(s.shape) for x in torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")]
    if score_mod is not None:
        s = score_mod(s, *places)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(*places), -torch.inf)
    empty = (s == -torch.inf).all(-1)
    s = s.masked_fill(empty[..., None], 0.0)
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    return p @ v, s.logsumexp(-1).masked_fill(empty, -torch.inf)


WINDOW, DOCUMENTS = 7, (torch.arange(BATCH * KEYS) % KEYS // 5).view(BATCH, KEYS)
LENGTHS, PREFIX, SIDE = torch.tensor([20, 36]), torch.tensor([3, 11]), 6


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def prefix_lm(b, h, q_idx, kv_idx):
    return torch.logical_or(kv_idx < PREFIX[b], q_idx >= kv_idx)


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def neighbourhood(b, h, q_idx, kv_idx):
    def place(idx):
        return idx // SIDE, idx % SIDE

    (q_y, q_x), (kv_y, kv_x) = place(q_idx), place(kv_idx)
    y, x = q_y.clamp(1, SIDE - 2), torch.clamp(q_x, min=1, max=SIDE - 2)
    return ((y - kv_y).abs() <= 1) & (torch.abs(x - kv_x) <= 1)


def jagged(b, h, q_idx, kv_idx):
    return (q_idx < LENGTHS[b]) & (kv_idx < LENGTHS[b])


def dilated(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0) & ~(h == 1)


def alibi(slopes):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * slopes[h]

    return score_mod


def computed_alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score / 2.0)


def relative(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, torch.clamp(q_idx - kv_idx + 8, 0, 16)]


def t5_bias(table):
    def bucket(distance):
        exact = 4
        far = exact + (torch.log((distance + 1).to(torch.float64) / exact) / math.log(8) * 4).to(torch.int64)
        return torch.where(distance < exact, distance, torch.minimum(far, torch.full_like(far, 7)))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[bucket(torch.maximum(q_idx - kv_idx, torch.zeros_like(q_idx))), h]

    return score_mod


def temperature(scale, bias):
    return lambda score, b, h, q_idx, kv_idx: score * scale[h] + torch.where(q_idx > kv_idx, bias, -0.5 * bias)


def hidden_by_score(score, b, h, q_idx, kv_idx):
    return torch.where((q_idx >= kv_idx) | (h == 0), score, -float("inf"))


GALLERY = {
    "causal": ((), lambda: None, causal),
    "sliding window": ((), lambda: None, sliding_window),
    "prefix-LM": ((), lambda: None, prefix_lm),
    "documents": ((), lambda: None, flex.and_masks(documents, causal)),
    "either": ((), lambda: None, flex.or_masks(documents, sliding_window)),
    "neighbourhood": ((), lambda: None, neighbourhood),
    "jagged": ((), lambda: None, jagged),
    "dilated": ((), lambda: None, dilated),
    "ALiBi": (((HEADS,),), alibi, causal),
    "computed ALiBi": ((), lambda: computed_alibi, causal),
    "softcap": ((), lambda: softcap, None),
    "relative": (((HEADS, 17),), relative, None),
    "T5": (((8, HEADS),), t5_bias, causal),
    "temperature": (((HEADS,), ()), temperature, documents),
    "hidden by score": ((), lambda: hidden_by_score, None),
    "nothing": ((), lambda: None, flex.noop_mask),
}

Q, K, V = tensors((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
MASK = tandem.create_block_mask(causal, None, None, 5, 6, device="cpu")
TABLE = torch.zeros(HEADS, 9)
