"""The versions of the peers on this machine."""

from __future__ import annotations

import importlib.metadata

PACKAGES = {"FA4": "flash-attn-4", "cuDNN frontend": "nvidia-cudnn-frontend"}


def of_peers() -> dict[str, str]:
    import torch

    found = {"torch": torch.__version__, "cuDNN of torch": str(torch.backends.cudnn.version())}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        import cudnn

        found["cuDNN of the frontend"] = str(cudnn.backend_version())
    except (ImportError, OSError):
        pass
    return found
