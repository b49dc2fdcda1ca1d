"""The overhead of a call from Python over its C call, compared with torch's own attention on the same tensors.

    pip install . torch numpy
    python bench/python_calls.py

One query and one key of 8 numbers, float32, so that the overhead dominates. The calls alternate; each figure is the
minimum of many rounds. The C call is measured in C, with the same library (bench/boundary/c_loop.c).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import torch
import torch.nn.functional as F
from boundary.compare import c_call, least, timed

import tandem
from tandem.flash_attn import flash_attn_func, flash_attn_varlen_func
from tandem.sdpa import scaled_dot_product_attention

SHAPE = (1, 1, 1, 8)
# name, statement, its C call
NUMPY = (
    ("tandem.attention, numpy, out= given", "tandem.attention(q, k, v, out=out)", "forward"),
    ("tandem.attention, numpy", "tandem.attention(q, k, v)", "forward"),
)
TORCH = (
    ("tandem.attention, torch, out= given", "tandem.attention(q, k, v, out=out)", "forward"),
    ("tandem.attention, torch", "tandem.attention(q, k, v)", "forward"),
    ("flash_attn_func", "flash_attn_func(q, k, v)", "forward"),
    ("flash_attn_varlen_func", "flash_attn_varlen_func(*packed, cu, cu, 1, 1)", "forward"),
    ("tandem.sdpa", "sdpa(q, k, v)", "forward"),
    ("torch.ops.tandem.forward", "operator(q, k, v)", "forward"),
    ("torch's scaled_dot_product_attention", "F.scaled_dot_product_attention(q, k, v)", None),
)
GRADIENT = (
    ("tandem.attention, torch, with gradient: forward", "tandem.attention(q, k, v)", "forward"),
    ("flash_attn_func, with gradient: forward", "flash_attn_func(q, k, v)", "forward"),
    ("torch.ops.tandem.forward, with gradient: forward", "operator(q, k, v)", "forward"),
    ("torch's, with gradient: forward", "F.scaled_dot_product_attention(q, k, v)", None),
    ("tandem.attention, torch: forward and backward", "grad(tandem.attention(q, k, v), (q, k, v), dout)", "both"),
    ("torch.ops.tandem.forward: forward and backward",
     "grad(operator(q, k, v)[0], (q, k, v), dout)", "both"),
    ("torch's: forward and backward", "grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), dout)", None),
)  # fmt: skip


def measure() -> list:
    """Returns (name, total ns, ns of the C call or None) of every call."""
    arrays = dict(zip(("q", "k", "v", "out"), (np.random.rand(*SHAPE).astype(np.float32) for _ in range(4))))
    tensors = {name: torch.tensor(x) for name, x in arrays.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    common = {
        "tandem": tandem, "flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func, "F": F,
        "sdpa": scaled_dot_product_attention, "operator": torch.ops.tandem.forward,
        "cu": torch.tensor([0, 1], dtype=torch.int32), "grad": torch.autograd.grad, "dout": torch.ones(SHAPE),
        "packed": [x[0] for x in tensors.values()][:3],
    }  # fmt: skip
    functions = {"forward": c_call(), "both": c_call(backward=True)}
    calls = []
    for rows, own in ((NUMPY, arrays), (TORCH, tensors), (GRADIENT, leaves)):
        for what, statement, c in rows:
            functions[what] = timed(statement, {**common, **own}, calls=300)
            calls.append((what, c))
    best = least(functions)
    return [(what, best[what], c and best[c]) for what, c in calls]


def main() -> None:
    results = measure()
    if "--json" in sys.argv:
        print(json.dumps(results))
        return
    environment = {**os.environ, "TANDEM_PYTHON_BOUNDARY": "ctypes"}
    command = [sys.executable, __file__, "--json"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    over_ctypes = json.loads(output)
    results += [(f"{what}; over ctypes", *times) for what, *times in over_ctypes if what.startswith("tandem.attention")]
    versions = f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}"
    print(f"{tandem.description()}; {versions}\n\n| call | total, us | beyond the C call, us |\n|---|---|---|")
    for what, total, c in results:
        print(f"| {what} | {total / 1e3:.1f} | {'-' if c is None else f'{(total - c) / 1e3:.1f}'} |")


if __name__ == "__main__":
    main()
