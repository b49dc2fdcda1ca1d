"""Standard attention in torch, in the precision of its inputs, so that autograd computes its gradients."""

from __future__ import annotations

import torch

import reference


def attend(q, k, v, *, scale=None, causal=False, window=(None, None), softcap=0.0, slopes=None, sink=None, kept=None,
           bias=None, top_left=False):  # fmt: skip
    """One sequence, (seqlen, heads, head_dim): out and lse (heads, seqlen_q). Diagonals are bottom-right or top_left.

    kept (heads, seqlen_q, seqlen_k): what dropout multiplies the probabilities by. bias: (heads|1, seqlen_q, seqlen_k),
    boolean (True: visible) or added.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    offset = 0 if top_left else k.shape[0] - q.shape[0]
    i = torch.arange(q.shape[0], device=q.device)[:, None] + offset
    j = torch.arange(k.shape[0], device=q.device)[None]
    if bias is not None:
        s = s.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else s + bias.to(s.dtype)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[:, None, None] * (i - j).abs()
    left, right = window
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    if causal:
        hidden |= j > i
    s = s.masked_fill(hidden, float("-inf"))
    logits = s if sink is None else torch.cat((s, sink.to(s.dtype)[:, None, None].expand(-1, q.shape[0], 1)), 2)
    empty = (logits == float("-inf")).all(-1)  # rows whose softmax and gradients would be NaN
    logits = logits.masked_fill(empty[..., None], 0.0)
    p = logits.softmax(-1).masked_fill(empty[..., None], 0.0)[..., : k.shape[0]]
    lse = logits.logsumexp(-1).masked_fill(empty, float("-inf"))
    if kept is not None:
        p = p * kept.to(p.dtype)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def dense(q, k, v, *, slopes=None, kept=None, bias=None, **options):
    """Returns the batch's out (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q)."""
    results = [
        attend(
            q[b],
            k[b],
            v[b],
            slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
            kept=None if kept is None else kept[b],
            bias=None if bias is None else bias[b if bias.shape[0] > 1 else 0],
            **options,
        )
        for b in range(q.shape[0])
    ]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *, slopes=None, kept=None, **options):
    """Returns the packed sequences' out (total_q, heads, head_dim_v) and lse (heads, total_q)."""
    results = []
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        multiplier = None if kept is None else kept[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        results.append(attend(q[rows], k[keys], v[keys], slopes=own, kept=multiplier, **options))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], 1)


def run(function, inputs, weights, dtype=None):
    """Returns function(*inputs)'s results, and the inputs' gradients of a weighted sum of them. dtype: the type of the
    computation.
    """
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((torch.where(y.isfinite(), y, 0) * w.to(y.dtype)).sum() for y, w in zip(results, weights))
    gradients = torch.autograd.grad(loss, inputs)
    return [x.detach() for x in (*results, *gradients)]


def hold(ours, plain, inputs, outputs=1, seed=0):
    """Compares results and gradients of ours(*inputs) with plain's in float64, by the 2x rule (reference.hold).

    outputs: the number of results in the loss: 1 for the output, 2 for the output and the LSE.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [y.shape for y in _tuple(plain(*inputs))][:outputs]
    weights = [torch.randn(shape, generator=generator).double().to(inputs[0].device) for shape in shapes]
    results = (
        run(function, inputs, weights, dtype)
        for function, dtype in ((ours, None), (_first(plain, outputs), torch.float64), (_first(plain, outputs), None))
    )
    names = [f"result {n}" for n in range(outputs)] + [f"gradient {n}" for n in range(len(inputs))]
    for name, *values in zip(names, *results):
        reference.hold(*(x.double().cpu().numpy() for x in values), name)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def _first(function, outputs):
    return lambda *inputs: _tuple(function(*inputs))[:outputs]
