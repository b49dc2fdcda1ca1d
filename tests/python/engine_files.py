"""The Python files of serving engines: their recorded signatures, and the files themselves where a machine has them.

The files belong to an installed engine, or lie in a folder that TANDEM_ENGINE_FILES names. The folder holds the Python
files of wheels, each below its package's name.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

RECORDED = json.loads(Path(__file__).with_name("engine_signatures.json").read_text())


def find(path: str) -> Path | None:
    """Returns the file of an engine, such as "vllm/v1/attention/backend.py"."""
    package, _, rest = path.partition("/")
    folders = [Path(x) / package for x in os.environ.get("TANDEM_ENGINE_FILES", "").split(os.pathsep) if x]
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    folders += [Path(x) for x in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((folder / rest for folder in folders if (folder / rest).is_file()), None)


def signatures(source: str) -> dict[str, list[list[str]]]:
    """Returns the parameters of a file's functions and methods, each with its default ("" for none), in order."""
    found = {}
    for node in ast.parse(source).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = node.name + "." if isinstance(node, ast.ClassDef) else ""
        for x in inner:
            if isinstance(x, ast.FunctionDef):
                found[prefix + x.name] = _parameters(x.args)
    return found


def _parameters(arguments: ast.arguments) -> list[list[str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, missing + arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return [[x.arg, "" if default is None else _text(default)] for x, default in pairs]


def _text(default: ast.expr) -> str:
    text = ast.unparse(default)
    return {"AttentionType.DECODER": "'decoder'", "DEFAULT_FA_VERSION": "2"}.get(text, text)


def ours(function) -> list[list[str]]:
    """Returns the parameters of a function in the form of signatures()."""
    parameters = inspect.signature(function).parameters.values()
    return [[x.name, "" if x.default is x.empty else _value(x.default)] for x in parameters]


def _value(default) -> str:
    return repr(getattr(default, "value", default)) if not str(default).startswith("torch.") else str(default)
