"""Lets programs that import flash_attn find Tandem in its place."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import threading
import types
from importlib.machinery import ModuleSpec

_FA4, _FA3 = "tandem.compat.fa4", "tandem.compat.fa3"
_MODULES = {  # parents precede their children
    "flash_attn": "tandem.compat.flash_attn",
    "flash_attn.flash_attn_interface": "tandem.compat.flash_attn.flash_attn_interface",
    "flash_attn.bert_padding": "tandem.compat.flash_attn.bert_padding",
    "flash_attn.layers": "tandem.compat.flash_attn.layers",
    "flash_attn.layers.rotary": "tandem.compat.flash_attn.layers.rotary",
    "flash_attn.cute": _FA4,
    "flash_attn.cute.interface": _FA4,
    "flash_attn_interface": _FA3,
}
_PACKAGES = ("flash_attn", "flash_attn_interface")
# Distributions for importlib.metadata: name, the module with its __version__, its package.
_DISTRIBUTIONS = (
    ("flash-attn", "tandem.compat.flash_attn", "flash_attn"),
    ("flash-attn-3", _FA3, "flash_attn_interface"),
    ("flash-attn-4", _FA4, "flash_attn"),
)

_lock = threading.RLock()
_active: list[Patch] = []
_before: dict[str, types.ModuleType | None] = {}


def patch() -> Patch:
    """Makes ``import flash_attn`` and its submodules find Tandem, whether or not flash_attn is installed.

    Covers flash_attn, flash_attn.flash_attn_interface, .bert_padding and .layers.rotary (tandem.flash_attn),
    flash_attn.cute (tandem.fa4), and flash_attn_interface (tandem.fa3). importlib.util.find_spec and
    importlib.metadata.version("flash-attn") report Tandem's modules. Call patch() before libraries that use flash_attn
    are imported; their earlier imports do not change.

    Returns an object whose undo() restores the earlier state; as a context manager it does so at the end of the block.
    Patches may be nested: the last undo restores that state.
    """
    return Patch()


class Patch:
    """One call of patch(), before or after its undo."""

    def __init__(self) -> None:
        modules = {name: importlib.import_module(source) for name, source in _MODULES.items()}
        with _lock:
            if not _active:
                _before.update(_take_out())
                sys.modules.update(_aliases(modules))
                sys.meta_path.insert(0, _finder)
            _active.append(self)

    def undo(self) -> None:
        """Ends this patch. Further calls have no effect."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if not _active:
                _take_out()
                sys.modules.update(_before)
                _before.clear()
                sys.meta_path.remove(_finder)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def _take_out() -> dict[str, types.ModuleType | None]:
    """Removes all of the packages' modules from sys.modules, and returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _PACKAGES}


def _aliases(modules: dict[str, types.ModuleType]) -> dict[str, types.ModuleType]:
    """Returns modules of the new names with the contents of ours, which keep their names."""
    aliases = {}
    for name, source in modules.items():
        alias = types.ModuleType(name, source.__doc__)
        alias.__dict__.update((key, value) for key, value in vars(source).items() if not key.startswith("__"))
        if hasattr(source, "__version__"):
            alias.__version__ = source.__version__
        is_package = any(other.startswith(name + ".") for other in modules)
        alias.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
        alias.__file__ = source.__file__
        alias.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            alias.__path__ = []
        aliases[name] = alias
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(aliases[parent], child, alias)
    return aliases


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str, package: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{package}\n",
        }

    def read_text(self, filename):
        return self._texts.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(
            f"{path} must be a file of a distribution, but tandem.patch() replaces it and has no files: install it"
        )


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the distributions for importlib.metadata. The modules are already in sys.modules."""

    def find_spec(self, fullname, path=None, target=None):
        return None

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008
        for name, source, package in _DISTRIBUTIONS:
            if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == name:
                yield _Distribution(name, sys.modules[source].__version__, package)


_finder = _Finder()


class _Callable(types.ModuleType):
    """A module that is also its function: ``import tandem.patch`` keeps ``tandem.patch()`` callable."""

    __call__ = staticmethod(patch)


sys.modules[__name__].__class__ = _Callable
