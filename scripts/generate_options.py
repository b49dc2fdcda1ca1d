#!/usr/bin/env python3
"""Writes python/tandem/_options.py from src/problem/options.def.

scripts/generate_options.py [--check]     --check: only compare, exit code 1 if the file is stale
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "src" / "problem" / "options.def"
MODULE = ROOT / "python" / "tandem" / "_options.py"
COLUMNS = {"TENSOR": 3, "OPTION": 4, "ARGUMENT": 3, "MEMBER": 2}
ROW = re.compile(r"(TENSOR|OPTION|ARGUMENT|MEMBER)\((.*)\)")
CELL = re.compile(r'"[^"]*"|[^,"\s][^,"]*')
PASSES = {"Forward": (0,), "Backward": (1,), "Both": (0, 1)}

HEAD = '''\
"""The arguments of a call. scripts/generate_options.py writes this file from src/problem/options.def."""
'''
LISTS = {
    "MEMBERS": "The members of tandem_attention_args after size, with their C types.",
    "KINDS": "The arguments that options.def names, with their kinds.",
    "TENSORS": "The tensors that a call reads; the first tensors have gradients.",
    "INPUTS": "The arguments that the operators take by position.",
    "OPTIONS": "The arguments that the operators take by name, without score_mod and mask_mod.",
    "SCHEMA": "The declarations of OPTIONS, then the declarations for score_mod and mask_mod.",
    "WRITTEN": "For forward and backward: the tensors that the pass writes.",
    "COMPACTED": "For forward and backward: the tensors whose last dimension must be contiguous.",
}


def read_rows(text: str) -> list[list[str]]:
    """Returns the rows of options.def: the macro's name, then the cells without quotes."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith(("//", "#")):
            continue
        row = ROW.fullmatch(line)
        cells = [cell.strip().strip('"') for cell in CELL.findall(row[2])] if row else []
        if row is None or len(cells) != COLUMNS[row[1]]:
            raise SystemExit(f"options.def:{number} ({line}) must be one row on one line: correct the line")
        rows.append([row[1], *cells])
    return rows


def lists_of(rows: list[list[str]]) -> dict[str, list]:
    tensors = [row[1:] for row in rows if row[0] == "TENSOR"]
    named = [(row[1], row[-2], row[-1]) for row in rows if row[0] in ("OPTION", "ARGUMENT")]
    options = [(name, schema) for name, kind, schema in named if schema and kind not in ("Seed", "Mod")]
    mods = [schema for _, kind, schema in named if kind == "Mod"]
    inputs = [row[1] for row in rows if row[2] == "Input" or (row[0] == "ARGUMENT" and row[2] == "Seed")]

    def of_pass(column: int) -> list[list[str]]:
        return [[row[0] for row in tensors if p in PASSES.get(row[column], ())] for p in (0, 1)]

    return {
        "MEMBERS": [
            (row[1], "const tandem_tensor*" if row[0] == "TENSOR" else row[2]) for row in rows if row[0] != "ARGUMENT"
        ],
        "KINDS": [(row[0], "Tensor") for row in tensors] + [(name, kind) for name, kind, _ in named],
        "TENSORS": [name for name, access, _ in tensors if access == "Input"],
        "INPUTS": inputs,
        "OPTIONS": [name for name, _ in options],
        "SCHEMA": [schema for _, schema in options] + mods,
        "WRITTEN": of_pass(1),
        "COMPACTED": of_pass(2),
    }


def literal(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    items = ", ".join(map(literal, value))
    return f"({items},)" if len(value) == 1 else f"({items})"


def module(lists: dict[str, list]) -> str:
    lines = [HEAD]
    for name, comment in LISTS.items():
        if name == "KINDS":
            body = [f"    {literal(key)}: {literal(kind)}," for key, kind in lists[name]]
            lines += [f"# {comment}", f"{name} = {{", *body, "}", ""]
        else:
            lines += [f"# {comment}", f"{name} = (", *(f"    {literal(x)}," for x in lists[name]), ")  # fmt: skip", ""]
    return "\n".join(lines)


def main() -> int:
    text = module(lists_of(read_rows(LIST.read_text())))
    if "--check" not in sys.argv[1:]:
        MODULE.write_text(text)
        return 0
    if MODULE.exists() and MODULE.read_text() == text:
        return 0
    print("python/tandem/_options.py is stale: run scripts/generate_options.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
