"""The step "graphs" of context_parallel.py: forwards by gather as a captured graph, whose replays need little of the host."""

from __future__ import annotations

import kernel_times
import torch
from context_parallel import calls_of, documents_of, heads_of, inputs_of, milliseconds, one_gpu


def graphs(r) -> None:
    """Times forwards with and without a graph. A replay must have the bits of the call."""
    if r.cpu:
        return
    tokens = r.arguments.tokens[0]
    for lens, heads in (([tokens], (heads_of(r),) * 2), (documents_of(tokens * r.ranks // 2), (64, 8))):
        plan = r.tandem.ContextPlan(lens, r.ranks, causal=True)
        inputs, _ = inputs_of(r, plan.rows(r.rank), heads)
        alone, calls = one_gpu(r, lens, heads, None)[0], calls_of(r, tokens)
        with torch.no_grad():
            alike = r.attend(inputs, plan)[0].clone()
            call = milliseconds(r, lambda inputs=inputs, plan=plan: r.attend(inputs, plan), calls)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = r.attend(inputs, plan)[0]
            replay = milliseconds(r, graph.replay, calls)
            same = r.worst(float(not torch.equal(out, alike)))[0] == 0
        efficiency = [alone / (r.ranks * t) for t in (call, replay)]
        r.say(
            f"forward by gather, {len(lens)} documents of {sum(lens)} tokens, {heads[0]}/{heads[1]} heads: {call:.3f} ms "
            f"(efficiency {efficiency[0]:.3f}), captured {replay:.3f} ms ({efficiency[1]:.3f}), "
            f"one GPU {alone:.3f} ms, {'the same' if same else 'OTHER'} bits",
            case=f"graphs {len(lens)} documents", milliseconds=[call, replay], one_gpu=alone, efficiency=efficiency,
            right=same,
        )  # fmt: skip
        kernel_times.say_kernels(r, f"captured, {len(lens)} documents", graph.replay)
        kernel_times.say_host_time(r, "forward", lambda inputs=inputs, plan=plan: r.attend(inputs, plan))
        del graph
