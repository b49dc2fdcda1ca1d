"""The virtual GPU of Tandem: the path of its library, and the tandem command."""

from __future__ import annotations

import os
import sys

__all__ = ["library", "main"]

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def library() -> str:
    """The path of libtandem_vgpu.so, as TANDEM_VGPU_LIBRARY takes it."""
    names = [name for name in os.listdir(_FOLDER) if name.startswith("libtandem_vgpu.so.")]
    if not names:
        raise FileNotFoundError(f"{_FOLDER} must have libtandem_vgpu.so: install the package tandem-vgpu again")
    return os.path.join(_FOLDER, names[0])


def main() -> None:
    """Becomes the tandem command with this process's arguments."""
    command = os.path.join(_FOLDER, "tandem")
    os.execv(command, ["tandem", *sys.argv[1:]])
