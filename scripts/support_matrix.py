#!/usr/bin/env python3
"""Writes docs/support.md: the calls that each device serves, according to tandem_check.

build/venv/bin/python scripts/support_matrix.py [--check]     --check: only compare, exit code 1 if it differs
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np

os.environ["TANDEM_PYTHON_BOUNDARY"] = "ctypes"  # with ctypes the context of a call can be chosen
# The wheel has no virtual GPU; the build has one.
ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("TANDEM_VGPU_LIBRARY", str(ROOT / "build/release/src/libtandem_vgpu.so.0"))

import tandem  # noqa: E402
from tandem import _ctypes  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
ON_GPU = {name: TYPES[name] for name in ("bfloat16", "float16", "float32")}
INT = np.int32
CU_Q, CU_K = np.array([0, 4, 12], INT), np.array([0, 10, 16], INT)

ONE_BLOCK = tandem.Blocks(np.ones((1, 1, 1), INT), np.zeros((1, 1, 1, 1), INT))

OF_Q = object()  # a bias of q's type

# The options of a call in addition to plain q, k and v: its name, its shapes if they matter, its options.
FEATURES = [
    ("dense", {}, {}),
    ("grouped and multi-query heads", {"heads_k": 1}, {}),
    ("head_dim 1", {"dim": 1}, {}),
    ("head_dim 80", {"dim": 80}, {}),
    ("head_dim 128", {"dim": 128}, {}),
    ("head_dim 192, head_dim_v 128", {"dim": 192, "dim_v": 128}, {}),
    ("head_dim 256", {"dim": 256}, {}),
    ("head_dim 512", {"dim": 512}, {}),
    ("head_dim over 512", {"dim": 520}, {}),
    ("packed, cu_seqlens", {"packed": True}, {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}),
    ("seqused_q, seqused_k", {}, {"seqused_q": np.array([3, 8], INT), "seqused_k": np.array([8, 1], INT)}),
    ("page_table", {"page_size": 16}, {"page_table": np.zeros((2, 2), INT), "seqused_k": np.array([8, 1], INT)}),
    ("page_table, page_size 8", {"page_size": 8}, {"page_table": np.zeros((2, 2), INT)}),
    ("causal, bottom-right", {}, {"causal": True}),
    ("causal, top-left", {}, {"causal": True, "alignment": "top_left"}),
    ("causal, explicit diagonal", {}, {"causal": True, "diagonal_offset": 3}),
    ("causal, a diagonal for each sequence", {}, {"causal": True, "diagonal_offset": np.array([3, -1], INT)}),
    ("window", {}, {"window": (3, 1)}),
    ("softcap", {}, {"softcap": 2.0}),
    ("alibi_slopes", {}, {"alibi_slopes": np.ones(2, np.float32)}),
    ("bias, float32", {}, {"bias": np.zeros((1, 2, 8, 8), np.float32)}),
    ("bias, type of q", {}, {"bias": OF_Q}),
    ("bias, boolean", {}, {"bias": np.ones((2, 1, 1, 8), bool)}),
    ("bias of a packed call", {"packed": True}, {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "bias": OF_Q}),
    ("sink", {}, {"sink": np.zeros(2, np.float32)}),
    ("score_mod", {}, {"score_mod": tandem.Mod("score - slope[head] * abs(q - k)", slope=np.ones(2, np.float32))}),
    ("mask_mod", {}, {"mask_mod": "k <= q"}),
    ("mask_mod, packed", {"packed": True}, {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "mask_mod": "k <= q"}),
    ("block mask, 128 x 128", {}, {"block_mask": ONE_BLOCK, "mask_mod": "k <= q"}),
    ("block mask with seqused_k", {}, {"block_mask": ONE_BLOCK, "seqused_k": np.array([8, 1], INT)}),
    ("block mask, packed", {"packed": True}, {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "block_mask": ONE_BLOCK}),
    ("dropout", {}, {"dropout_p": 0.1, "seed": 1}),
    ("result of float32", {}, {"out_dtype": np.float32}),
    ("num_splits", {}, {"num_splits": 2}),
    ("deterministic", {}, {"deterministic": True}),
    ("batch_invariant", {}, {"batch_invariant": True}),
]  # fmt: skip


def answer(what: str, dtype: object, shape: dict, options: dict) -> str:
    """Returns "yes", or the library's sentence."""
    dim, heads_k = shape.get("dim", 64), shape.get("heads_k", 2)
    dim_v = shape.get("dim_v", dim)
    lead_q, lead_k = ((12,), (16,)) if shape.get("packed") else ((2, 8), (2, shape.get("page_size", 8)))
    q = np.zeros((*lead_q, 2, dim), dtype)
    k, v = np.zeros((*lead_k, heads_k, dim), dtype), np.zeros((*lead_k, heads_k, dim_v), dtype)
    options = {n: np.zeros((1, 1, 8, 8), dtype) if x is OF_Q else x for n, x in options.items()}
    try:
        tandem.check(what, q, k, v, **options)
    except (tandem.Unsupported, ValueError) as refusal:
        return str(refusal)
    return "yes"


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Runs calls on that device."""
    context = ctypes.c_void_p()
    options = _ctypes._ContextOptions(size=ctypes.sizeof(_ctypes._ContextOptions), device=device.encode())
    if _ctypes._library.tandem_context_create(options, ctypes.byref(context)) != 0:
        raise RuntimeError(_ctypes.last_error())
    before, _ctypes._context = _ctypes._context, lambda: context
    yield
    _ctypes._context = before
    _ctypes._library.tandem_context_destroy(context)


def table(types: dict[str, object], reasons: list[str]) -> list[str]:
    """Returns the device's table without the header's first cell. Adds new sentences to the reasons."""
    lines = [" | ".join(f"{t} fwd | bwd" for t in types) + " |", "|---|" + "---|" * (2 * len(types))]
    for name, shape, options in FEATURES:
        cells = []
        for dtype in types.values():
            for what in ("forward", "backward"):
                said = answer(what, dtype, shape, options)
                if said != "yes":
                    if said not in reasons:
                        reasons.append(said)
                    said = f"no ({reasons.index(said) + 1})"
                cells.append(said)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def page() -> str:
    reasons: list[str] = []
    answers = {"`cpu`": table(TYPES, reasons)}
    for device in ("vgpu:h200", "vgpu:b200"):
        with on(device):
            answers[f"`{device}` (virtual GPU)"] = table(ON_GPU, reasons)
    lines = [HEAD]
    while answers:  # devices with equal results share a table
        first, *rest = answers[next(iter(answers))]
        same = [device for device, said in answers.items() if said == [first, *rest]]
        lines += [f"| on {', '.join(same)} | {first}", *rest]
        answers = {device: said for device, said in answers.items() if device not in same}
    lines += ["Refusals:", ""]
    lines += [f"{n}. {reason}" for n, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", TAIL])


HEAD = """\
# Calls that each device serves

These are the library's answers (`tandem_check`, with which every call begins). `scripts/support_matrix.py` writes
this page, and a test compares it with the library.
The tests run every "yes" on every commit, on the instruction sets of the machine. fwd and bwd mean forward and
backward.

The forward on GPUs reads `num_splits`. No engine reads `deterministic`: a "yes" means that the value is accepted and
has no effect.
"""

TAIL = """\
Context parallelism serves packed documents, causal masks, windows, softcap, alibi_slopes, sinks and grouped heads.
Context parallelism serves dropout, score_mod and mask_mod on CPUs and GPUs in every layout and execution
(`tandem.context_parallel`, `tandem_cp_forward`). The same holds for bias and for gradients of bias and of score_mod's
tensors. A block mask belongs to the plan and is the same for all heads; in Python on GPUs the plan then has no chunk.
Types are float32, bfloat16 and float16 on CPUs, and bfloat16 and float16 on GPUs. In Python, gradients on GPUs need
Hopper. The execution of Python for GPUs has run on two H200s. The one of C has not run on real GPUs. seqused and
max_scores are refused.
A [virtual GPU](../vgpu/docs/virtual-gpu.md) runs the kernels of the GPU that it is named after, on the CPU and on
tensors in host memory. The virtual GPU serves what that GPU serves: `vgpu:h100` as `vgpu:h200`, `vgpu:b300` as
`vgpu:b200`.
On hardware (`cuda:N`), the Hopper kernels (compute capability 9.0) have passed `tests/kernels` on an H200. The
Blackwell kernels (10.0, 10.3) have not run on hardware.
`tandem explain` answers for any call, also without a GPU: the kernel and its plan, or the refusal. If the backward is
refused, Python uses torch's own backward where it can.
"""


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print("docs/support.md must match the library: run scripts/support_matrix.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
