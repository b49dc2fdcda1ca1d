"""The import paths of the modules in tandem.compat without "compat": both names give the same module object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = (
    "fa3",
    "fa4",
    "flash_attn",
    "flex",
    "patch",
    "ring_flash_attn",
    "sdpa",
    "sglang",
    "torch_context_parallel",
    "torch_sdpa",
    "transformer_engine",
    "transformers",
    "vllm",
)


def _target(name: str) -> str:
    """Returns the name in tandem.compat of "tandem.fa3", "tandem.flash_attn.layers", ..."""
    return "tandem.compat." + name.partition(".")[2]


class _Loader:
    """Loads an alias: imports its target module and returns the same object."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_target(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # importlib has put the alias's spec into the module. The module keeps its original spec, so that reload()
        # works.
        module.__spec__ = module.__spec__.loader_state


class _Finder:
    """Finds tandem.X and its submodules for every X of MODULES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "tandem" or rest.partition(".")[0] not in MODULES:
            return None
        found = importlib.util.find_spec(_target(name))
        if found is None:
            return None
        spec = ModuleSpec(name, _loader, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


_loader = _Loader()


def install() -> None:
    """Registers this finder first. A second call changes nothing."""
    if not any(
        type(finder).__name__ == _Finder.__name__ and type(finder).__module__ == __name__ for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())
