#!/usr/bin/env python3
"""Trains the GPT of model.py with each sequence divided over several processes, and compares it with one process.

    python examples/gpt/ranks.py                              # 4 processes on the CPU, with gloo
    python examples/gpt/ranks.py --device cuda --ranks 2      # 2 GPUs, with NCCL

Every rank holds a shard of one sequence: its bytes, their positions and their targets. tandem.context_parallel attends
to the whole sequence. Everything else of the model treats tokens separately, so that only gradients of the weights are
summed over the ranks. Exit code 1: a loss differs from the loss of one process by more than rounding.
"""

import argparse
import math
import os
import pathlib
import socket
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from model import GPT, Size

import tandem

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# The allowed difference of losses, in float32 and with bfloat16 autocast.
ALLOWED = {"cpu": 1e-4, "cuda": 2e-2}  # nats


class ShardedGPT(GPT):
    """A GPT whose tokens (1, rows) are rows of a longer sequence, at these positions."""

    def __init__(self, size, plan, rank):
        super().__init__(size, self.attend)
        self.plan = plan
        self.rows = torch.from_numpy(plan.indices(rank))

    def attend(self, q, k, v, causal):
        if self.plan.ranks == 1:
            return tandem.attention(q, k, v, causal=causal)
        return tandem.context_parallel(q[0], k[0], v[0], plan=self.plan)[None]

    def loss(self, tokens):
        """The rank's part of the mean loss of (1, seqlen + 1) tokens, of which this rank reads its rows."""
        rows = self.rows.to(tokens.device)
        x = self.lookup(tokens[:, rows]) + self.positions.weight[rows]
        logits = self.head(self.norm(self.blocks(x)))
        targets = tokens[0, rows + 1]
        losses = torch.nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum")
        return losses / (tokens.shape[1] - 1)


def train(rank, ranks, a):
    """Returns the losses of the steps."""
    size = Size(a.layers, a.width, a.heads, a.tokens)
    plan = tandem.ContextPlan([a.tokens], ranks, causal=True, chunk=a.chunk)
    torch.manual_seed(0)
    model = ShardedGPT(size, plan, rank).to(a.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.9, 0.95), weight_decay=0.1)
    data = torch.frombuffer(bytearray((REPOSITORY / "docs" / "semantics.md").read_bytes()), dtype=torch.uint8)
    order, losses = torch.Generator().manual_seed(0), []
    for _ in range(a.steps):
        begin = torch.randint(len(data) - a.tokens, (1, 1), generator=order)
        tokens = data[begin + torch.arange(a.tokens + 1)].to(a.device).long()
        with torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.device == "cuda"):
            loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if ranks > 1:
            for x in [loss, *(p.grad for p in model.parameters())]:
                dist.all_reduce(x)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(rank, port, a, file):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if a.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if a.device == "cuda" else "gloo", rank=rank, world_size=a.ranks)
    losses = train(rank, a.ranks, a)
    if rank == 0:
        torch.save(losses, file)
    dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk; 0: no chunks")
    for name, value in (("ranks", 4), ("tokens", 1024), ("layers", 2), ("width", 64), ("heads", 4), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--rate", type=float, default=3e-3)
    return parser.parse_args()


def main():
    a = parse()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "losses")
        torch.multiprocessing.spawn(run, (port, a, file), nprocs=a.ranks)
        sharded = torch.load(file)
    alone = train(0, 1, a)
    for step in sorted({0, a.steps // 2, a.steps - 1}):
        print(f"step {step + 1:4d}  loss {sharded[step]:.5f} on {a.ranks} ranks, {alone[step]:.5f} on one")
    difference = max(abs(x - y) for x, y in zip(sharded, alone))
    right = math.isfinite(difference) and difference <= ALLOWED[a.device]
    print(f"largest difference {difference:.2g}, {'within' if right else 'NOT within'} {ALLOWED[a.device]}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
