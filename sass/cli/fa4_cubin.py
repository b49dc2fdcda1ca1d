#!/usr/bin/env python3
"""Compiles FlashAttention-4's forward or backward to a cubin, for `tandem explain --beside`.

Needs no GPU, because tensors have no memory and nothing is launched.

  python3 -m venv fa4 && . fa4/bin/activate
  pip install torch   # the CPU build suffices
  pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 \\
    nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 \\
    apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 einops==0.8.2 triton==3.9.0
  pip install numpy protobuf 'cuda-bindings>=13,<14'
  python sass/cli/fa4_cubin.py fa4.cubin --head-dim 128 --causal

FlashAttention-4 is experimental software. This program supports the versions above.
"""

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", type=Path, help="file to write")
    parser.add_argument("--arch", choices=sorted(MULTIPROCESSORS), default="sm_100a")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--head-dim-v", type=int, help="[as --head-dim]")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-k", type=int, help="[as --heads]")
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), default=(None, None))
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--backward", action="store_true", help="the kernel of the gradients")
    parser.add_argument("--deterministic", action="store_true", help="with --backward: dq summed in one order")
    parser.add_argument("--one-cta", action="store_true", help="with --backward: no pairs of CTAs")
    parser.add_argument("--part", choices=("dq", "dkdv"), help="with --backward: one of the kernels of head_dim 256")
    return parser.parse_args()


def compile_kernel(args: argparse.Namespace, dump: str) -> None:
    """Writes the compiler's files into the folder `dump`."""
    os.environ |= {
        "FLASH_ATTENTION_ARCH": args.arch.rstrip("a"),
        "CUTE_DSL_ARCH": args.arch,
        "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS[args.arch]),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": dump,
        "FA_DISABLE_2CTA": str(int(args.one_cta)),
    }
    # These modules read the environment when they are imported.
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Hardware:
        """Replaces queries of the driver, which is not installed."""

        def __init__(self, *_, **__) -> None: ...

        def get_device_multiprocessor_count(self) -> int:
            return MULTIPROCESSORS[args.arch]

        def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
            return MULTIPROCESSORS[args.arch] // cluster_size

    torch.cuda.current_device = lambda: 0  # the device check of semaphores
    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = Hardware
    from flash_attn.cute import interface, sm100_hd256_2cta_fmha_backward

    class Nothing:
        """Replaces the other kernel."""

        def __init__(self, *_, **__) -> None: ...

        def __call__(self, *_) -> None: ...

    if args.part:
        other = {"dq": "DKDV", "dkdv": "DQ"}[args.part]
        name = f"BlackwellFusedMultiHeadAttentionBackward{other}Kernel"
        setattr(sm100_hd256_2cta_fmha_backward, name, Nothing)

    def tensor(heads: int, head_dim: int) -> torch.Tensor:
        return torch.empty(2, args.seqlen, heads, head_dim, dtype=torch.bfloat16, device="cuda")

    with FakeTensorMode():
        heads_k, head_dim_v = args.heads_k or args.heads, args.head_dim_v or args.head_dim
        q, k, v = tensor(args.heads, args.head_dim), tensor(heads_k, args.head_dim), tensor(heads_k, head_dim_v)
        if args.backward:
            out, lse = tensor(args.heads, head_dim_v), torch.empty(2, args.heads, args.seqlen, device="cuda")
            left, right = args.window
            interface._flash_attn_bwd(
                *(q, k, v, out, out, lse),
                causal=args.causal,
                softcap=args.softcap,
                window_size_left=left,
                window_size_right=right,
                deterministic=args.deterministic,
            )
            return
        interface.flash_attn_func(q, k, v, causal=args.causal, window_size=tuple(args.window), softcap=args.softcap)


def main() -> None:
    args = arguments()
    warnings.simplefilter("ignore")  # tensors without memory cause these warnings
    with tempfile.TemporaryDirectory() as dump:
        compile_kernel(args, dump)
        cubins = sorted(Path(dump).rglob("*.cubin"), key=lambda path: path.stat().st_size)
        if not cubins:
            sys.exit("FlashAttention-4 compiled but wrote no cubin: install the versions that --help lists")
        shutil.copyfile(cubins[-1], args.cubin)  # smaller files are preprocessing or combine kernels


if __name__ == "__main__":
    main()
