"""The step "options" of context_parallel.py: options of a call that have their own gradients, masks or random numbers."""

from __future__ import annotations

import itertools

import torch
from context_parallel import EXECUTIONS, HEAD_DIM, error_of, judge


class Option:
    """A call's option on this rank's device, or on CPUs for the float64 results, and its tensors with gradients."""

    def __init__(self, r, name: str, tokens: int, heads: int, on_cpu: bool) -> None:
        def tensor(*shape: int, seed: int) -> torch.Tensor:
            x = r.random(*shape, seed=seed, dtype=torch.float32)
            return (x.cpu() if on_cpu else x).requires_grad_()

        self.name, self.learned, self.mask, self.given = name, [], {"causal": True}, {}
        if name == "bias":
            self.learned = [tensor(heads, tokens, tokens, seed=11)]
        elif name == "captured":
            self.learned = [tensor(heads, tokens, seed=12), tensor(4, seed=13)]
            table, t = self.learned
            self.given = {"score_mod": r.tandem.Mod("score + table[head, q] * t[k % 4]", table=table, t=t)}
        elif name == "dropout":
            self.given = {"dropout_p": 0.25, "seed": (5, 2)}
        else:
            text = "(q // 128 + k // 128) % 2 == 0 and (q + k) % 5 > 0"
            self.mask = {"blocks": r.tandem.Blocks.of(text, tokens, tokens)}
            self.given = {"mask_mod": text}


def exact_option(r, option: Option, batch: list) -> list:
    """Returns out, dq, dk, dv and the gradients of the option's tensors in float64."""
    q, k, v, dout = (x.detach().cpu().double()[None].requires_grad_() for x in batch)
    given = {**option.given, **({"bias": option.learned[0].double()[None]} if option.name == "bias" else {})}
    out = r.tandem.attention(q, k, v, causal="causal" in option.mask, **given)
    gradients = torch.autograd.grad(out, (q, k, v, *option.learned), dout.detach())
    return [x.to(r.device) for x in (out.detach()[0], *(x[0] for x in gradients[:3]), *gradients[3:])]


def options(r) -> None:
    size = 8 if r.cpu else 128
    tokens, heads, dim = 6 * size, (4, 2), 16 if r.cpu else HEAD_DIM
    shapes = [(tokens, n, dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    batch = [r.random(*shape, seed=i, dtype=torch.float32 if r.cpu else torch.bfloat16) for i, shape in enumerate(shapes)]

    def both(option: Option, plan, rank: int, execution: str, group) -> list:
        q, k, v, dout = (plan.shard(x, rank, keys=keys) for x, keys in zip(batch, (False, True, True, False)))
        inputs, learned, given = [x.requires_grad_() for x in (q, k, v)], option.learned, option.given
        if option.name == "bias":
            learned = [plan.shard(option.learned[0].detach(), rank, dim=1).requires_grad_()]
            given = {"bias": learned[0]}
        out = r.tandem.context_parallel(*inputs, plan=plan, execution=execution, group=group, **given)
        return [out.detach(), *torch.autograd.grad(out, [*inputs, *learned], dout)]

    for name in ("bias", "captured", "dropout", "blocks"):
        option, on_cpu = (Option(r, name, tokens, heads[0], on_cpu) for on_cpu in (False, True))
        truth, chunks, alone = exact_option(r, on_cpu, batch), (0,) if name == "blocks" else (0, 2 * size), {}
        for chunk in chunks:
            one = r.tandem.ContextPlan([tokens], 1, chunk=chunk, **option.mask)
            alone[chunk] = both(option, one, 0, "gather", r.alone)
        allowed = [max(error_of(x, z) for x in results) for *results, z in zip(*alone.values(), truth)]
        for n, (execution, chunk) in enumerate(itertools.product(EXECUTIONS, chunks)):
            if r.late(0.5):
                r.say(f"options: no time left at {name}")
                return
            layout = "contiguous" if name == "blocks" else ("balanced", "zigzag", "striped")[n % 3 if chunk else n % 2]
            plan = r.tandem.ContextPlan([tokens], r.ranks, layout=layout, chunk=chunk, **option.mask)
            ours, errors, same = both(option, plan, r.rank, execution, None), [], True
            for i, (x, y, z) in enumerate(zip(ours, alone[chunk], truth)):
                own = [y, z]
                if i < 4:
                    own = [plan.shard(part, r.rank, keys=i in (2, 3)) for part in own]
                elif name == "bias":
                    own = [plan.shard(part, r.rank, dim=1) for part in own]
                errors.append(error_of(x, own[1]))
                same = same and torch.equal(x, own[0])
            judge(r, f"options {name}, {execution}, {layout}, chunk {chunk}", errors, allowed, same, chunk)
