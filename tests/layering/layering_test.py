#!/usr/bin/env python3
"""Checks the includes of the sources against the table of docs/architecture.md.

- layering_test.py <root> prints each include that the table does not allow. The exit code is 1 if there is one.
- layering_test.py --self-test checks that it finds each violation in a small tree of violations.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile

TABLE = "docs/architecture.md"
SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
# The folders that the compiler searches for includes of each top folder. The including file's folder comes first.
SEARCH = {
    "include": ["include"],
    "src": ["src", "include", "kernels"],
    "vgpu": ["", "src", "include"],
    "kernels": ["kernels"],
    "sass": ["", "src", "include", "kernels"],
    "cli": ["", "src", "include", "kernels"],
}
DIVIDED = ("src/", "vgpu/src/", "kernels/", "sass/")  # each folder in these has its own row
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')
ROW = re.compile(r"^\| `([^|]*)/` \|.*\| ([^|]*) \|$")


def read_table(root: pathlib.Path) -> tuple[dict[str, set[str]], list[str]]:
    """Returns the layers that each layer may use, directly or not, and the errors of the table."""
    named: dict[str, str] = {}
    problems = []
    for number, line in enumerate((root / TABLE).read_text().splitlines(), 1):
        row = ROW.match(line)
        for layer in row[1].replace("`", "").split("/, ") if row else []:
            named[layer] = row[2].replace("`", "")
            if not (root / layer).is_dir():
                problems.append(f"{TABLE}:{number}: {layer}/ is no folder")
    by_name = {layer.removeprefix("src/"): layer for layer in named}
    uses: dict[str, set[str]] = {}
    for layer, names in named.items():
        words = [word.removesuffix("/") for word in names.split(", ") if word != "-"]
        uses[layer] = set(named) if words == ["all"] else {by_name[word] for word in words if word in by_name}
        unknown = [word for word in words if word not in by_name and word != "all"]
        problems += [f"{TABLE}: {layer}/ may use {word}, which is no layer" for word in unknown]
    for layer in uses:
        reached, found = set(), {layer}
        while found:
            reached |= found
            found = set().union(*(uses[one] for one in found)) - reached
        uses[layer] = reached
    return uses, problems


def layer_of(path: str, layers: dict[str, set[str]]) -> str | None:
    """Returns the innermost layer that contains a file."""
    inside = [layer for layer in layers if path.startswith(layer + "/")]
    return max(inside, key=len, default=None)


def find(root: pathlib.Path, source: pathlib.Path, name: str) -> str | None:
    """Returns the file of this project that an #include names, or None."""
    top = source.relative_to(root).parts[0]
    for folder in [source.parent, *(root / each for each in SEARCH[top])]:
        if (folder / name).is_file():
            return (folder / name).resolve().relative_to(root).as_posix()
    return None


def problems_of(root: pathlib.Path) -> list[str]:
    layers, problems = read_table(root)
    rowless = set()
    sources = (path for top in SEARCH for path in (root / top).rglob("*") if path.suffix in SOURCES)
    for source in sorted(sources):
        path = source.relative_to(root).as_posix()
        layer = layer_of(path, layers)
        depth = next((top.count("/") + 1 for top in DIVIDED if path.startswith(top)), 0)
        folder = "/".join(path.split("/")[:depth]) if 0 < depth <= path.count("/") else layer
        if folder not in layers:
            rowless.add(folder or path.partition("/")[0])
            continue
        for number, line in enumerate(source.read_text().splitlines(), 1):
            included = INCLUDE.match(line)
            target = find(root, source, included[1]) if included else None
            other = layer_of(target, layers) if target else None
            if other is not None and other not in layers[layer]:
                problems.append(f"{path}:{number}: {layer}/ may not use {other}/: {included[1]}")
    return problems + [f"{TABLE}: no row for {folder}/" for folder in sorted(rowless)]


WRONG = {
    TABLE: """\
| folder | what lives there | may use |
|---|---|---|
| `src/low/` | a | - |
| `src/middle/`, `src/gone/` | b | low |
| `vgpu/src/` | c | middle, vgpu/src/part, lost |
| `vgpu/src/part/` | d | low |
""",
    "src/low/a.h": '#include <vector>\n#include "low/b.h"\n#include "middle/a.h"\n',
    "src/low/b.h": '// #include "middle/a.h"\n#include "hwy/highway.h"\n',
    "src/middle/a.h": '#include "low/a.h"\n',
    "src/middle/inner/b.h": '  #  include <new/a.h>\n#include "c.h"\n',
    "src/middle/inner/c.h": "",
    "src/new/a.h": "",
    "vgpu/src/device.h": '#include "low/a.h"\n#include "vgpu/src/part/a.h"\n',
    "vgpu/src/part/a.h": '#include "vgpu/src/device.h"\n#include "middle/a.h"\n',
    "vgpu/src/other/a.h": "",
}
NOTICED = """\
docs/architecture.md:4: src/gone/ is no folder
docs/architecture.md: vgpu/src/ may use lost, which is no layer
src/low/a.h:3: src/low/ may not use src/middle/: middle/a.h
vgpu/src/part/a.h:1: vgpu/src/part/ may not use vgpu/src/: vgpu/src/device.h
vgpu/src/part/a.h:2: vgpu/src/part/ may not use src/middle/: middle/a.h
docs/architecture.md: no row for src/new/
docs/architecture.md: no row for vgpu/src/other/
"""


def self_test() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        for name, text in WRONG.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        noticed = "".join(line + "\n" for line in problems_of(root))
    if noticed != NOTICED:
        print("noticed:", noticed, "to be noticed:", NOTICED, sep="\n")
    return int(noticed != NOTICED)


def main(arguments: list[str]) -> int:
    if arguments == ["--self-test"]:
        return self_test()
    problems = problems_of(pathlib.Path(arguments[0]).resolve())
    print("".join(line + "\n" for line in problems), end="")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
