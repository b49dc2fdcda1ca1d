#!/usr/bin/env python3
"""Compares the binary interface of this checkout with an older one, by libabigail's abidiff (package abigail-tools).

  scripts/compare_abi.py --headers <folder or commit>... [--libraries <older libtandem.so> <newer libtandem.so>]

--headers compiles include/tandem/tandem.h and the older header into libraries of empty functions with debug data, and
compares functions, structs and enumerations. A folder contains tandem/tandem.h, as tests/unit/engine/frozen_0_1 does.
New functions, enumerators and last fields of structs are left out first, because they are compatible (docs/abi.md).
--libraries compares the exported symbols of two builds. The exit code is 1 for any other difference.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADER = "include/tandem/tandem.h"
# A caller states the size of these structs, so fields may follow the last field. DLPack's tensor may not grow.
GROWABLE = r"tandem_(?:attention_args|mod|merge_args|append_kv_args|cascade_args|block_mask_args|context_options)"


def declared_functions(header: str) -> list[str]:
    return re.findall(r"^TANDEM_API ([^;{]*);", without_comments(header), re.M)


def without_comments(header: str) -> str:
    return re.sub(r"/\*.*?\*/", "", header, flags=re.S)


def without_additions(newer: str, older: str) -> str:
    """The newer header without the enumerators and the last fields of structs that the older one lacks."""
    newer, older = without_comments(newer), without_comments(older)
    enumerators = set(re.findall(r"^ *(TANDEM_\w+) = ", older, re.M))
    newer = re.sub(r"^ *(TANDEM_\w+) = [^,\n]*,?", lambda m: m[0] if m[1] in enumerators else "", newer, flags=re.M)
    for name, fields in re.findall(rf"typedef struct ({GROWABLE}) {{(.*?)\n}}", older, re.S):
        last = re.escape(fields.rstrip().rpartition("\n")[2].strip())
        newer = re.sub(rf"(typedef struct {name} {{.*?{last})[^}}]*\n}}", r"\1\n}", newer, flags=re.S)
    return newer


def compile_stub(header: str, folder: pathlib.Path) -> pathlib.Path:
    """A library that defines each declared function, so that its debug information describes the interface."""
    (folder / "tandem").mkdir(parents=True)
    (folder / "tandem" / "tandem.h").write_text(header)
    functions = declared_functions(header)
    if len(functions) < 10:
        sys.exit(f"error: a header must have 10 functions or more, not {len(functions)}: correct the pattern")
    bodies = "".join(f"{declaration} {{ __builtin_trap(); }}\n" for declaration in functions)
    source, library = folder / "stub.c", folder / "libtandem.so.0"
    source.write_text(f'#include "tandem/tandem.h"\n{bodies}')
    options = ["-std=c11", "-g", "-shared", "-fPIC", "-w", "-Wl,-soname,libtandem.so.0", f"-I{folder}"]
    subprocess.run(["cc", *options, source, "-o", library], check=True)
    return library


def older_header(place: str) -> str:
    path = pathlib.Path(place, "tandem", "tandem.h")
    if path.is_file():
        return path.read_text()
    show = subprocess.run(["git", "-C", ROOT, "show", f"{place}:{HEADER}"], capture_output=True, text=True)
    return (
        show.stdout
        if show.returncode == 0
        else sys.exit(f"error: {place} must be a folder of headers or a commit: correct it")
    )


def differ(older: pathlib.Path, newer: pathlib.Path) -> bool:
    options = ["--no-added-syms", "--no-show-locs", "--harmless"]
    result = subprocess.run(["abidiff", *options, older, newer], capture_output=True, text=True)
    if result.returncode:
        print(result.stdout + result.stderr)
    return result.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headers", nargs="+", default=[], metavar="PLACE", help="folders of headers, or commits")
    parser.add_argument("--header", type=pathlib.Path, default=ROOT / HEADER, help="the newer header")
    parser.add_argument("--libraries", nargs=2, type=pathlib.Path, metavar=("OLDER", "NEWER"))
    flags = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        pairs = [("libraries", *flags.libraries)] if flags.libraries else []
        for number, place in enumerate(flags.headers):
            older = older_header(place)
            newer = without_additions(flags.header.read_text(), older)
            stubs = (compile_stub(text, folder / f"{number}" / name) for name, text in (("a", older), ("b", newer)))
            pairs.append((place, *stubs))
        for name, *both in pairs:
            different = differ(*both)
            failed |= different
            print(f"{name}: {'not compatible' if different else 'compatible'}")
    return int(failed or not pairs)


if __name__ == "__main__":
    sys.exit(main())
