"""Additions to the C interface for calls on GPUs: contexts, a compiler for the kernels, and workspaces."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from typing import Any

from tandem._errors import error_of


def open_gpu(binding: Any, index: int) -> None:
    """Creates the context of GPU number index. Raises with the library's sentence on failure."""
    if not os.environ.get("TANDEM_NVRTC") and (compiler := find_compiler(sys.path)):
        os.environ["TANDEM_NVRTC"] = compiler  # the engine reads the variable once, at the first GPU
    code = binding.open_gpu(index)
    if code:
        raise error_of(code, binding.last_error(), {})


def find_compiler(folders: Sequence[str]) -> str | None:
    """Returns pip's NVRTC: nvidia/*/lib/libnvrtc.so.<major> in one of Python's folders.

    The engine searches an active virtual environment, but does not know this interpreter's other folders. The version
    of torch's CUDA is preferred, because the driver serves it, then the newest.
    """
    found = {}
    for folder in reversed(folders):
        for path in glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib", "libnvrtc.so.*")):
            major = path.rpartition(".so.")[2]
            if major.isdigit():
                found[int(major)] = path
    torch = sys.modules.get("torch")
    wanted = (getattr(getattr(torch, "version", None), "cuda", None) or "").partition(".")[0]
    if wanted.isdigit() and int(wanted) in found:
        return found[int(wanted)]
    return found[max(found)] if found else None


def descriptions(binding: Any, torch: Any) -> list[str]:
    """Returns one line for each GPU in use, or for torch's current GPU if no GPU is in use yet."""
    if not torch.cuda.is_available():
        return []
    gpus = range(torch.cuda.device_count())
    lines = [line for line in map(binding.gpu_description, gpus) if line is not None]
    if lines:
        return lines
    index = torch.cuda.current_device()
    try:
        open_gpu(binding, index)
    except RuntimeError as error:
        return [f"cuda:{index} is not served: {error}"]
    return [binding.gpu_description(index)]


def workspace(like: Any, size: int) -> Any:
    """Allocates size bytes on the device of like, a torch tensor, by torch's allocator, which tracks streams and
    graphs.
    """
    return like.new_empty((size,), dtype=sys.modules["torch"].uint8)
