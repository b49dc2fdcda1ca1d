#!/usr/bin/env python3
"""Checks a wheel without installing it, and prints every violation. The exit code is 1 if there is one.

  packaging/check_wheel.py <wheel>... [--forbid <text that no file may contain, such as the build folder>]

Checked are the names, the tag and the version (include/tandem/tandem.h), the size, RECORD, and of each library: processor,
versions of glibc's symbols, needed libraries, run path, stack, exported symbols, and Python functions outside the stable
ABI of 3.9. Needs readelf, and the package abi3info of packaging/requirements.txt.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_BYTES = {"tandem_attention": 4_000_000}
NEWEST_GLIBC = (2, 28)
OLDEST_PYTHON = (3, 9)
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
NEEDED = re.compile(r"(lib(c|m|dl|pthread|rt)\.so\.[0-9]+|ld-linux-(x86-64|aarch64)\.so\.[0-9]|libtandem\.so\.0|libcuda\.so\.1)")
EXPORTS = {
    r"libtandem\.so\.\d+": r"tandem_\w+",
    r"libtandem_vgpu\.so\.\d+": r"tandem_vgpu_open",
    r"_native\.abi3\.so": r"PyInit__native",
}
CONTENTS = {
    "tandem_attention": {"tandem/__init__.py", "tandem/py.typed", "tandem/_native.abi3.so", "tandem/libtandem.so.0"},
    "tandem_vgpu": {
        *("tandem_vgpu/__init__.py", "tandem_vgpu/tandem", "tandem_vgpu/libtandem_vgpu.so.0"),
        *("tandem_vgpu/virtual_cuda/libcuda.so.1", "tandem_vgpu/virtual_cuda/libcudart.so.13"),
    },
}
ALLOWED_FILES = re.compile(r".*(\.pyi?|/py\.typed|\.so(\.\d+)?|/tandem)|[^/]+\.dist-info/.*")


def read_elf(*arguments: str) -> str:
    return subprocess.run(["readelf", "-W", *arguments], check=True, capture_output=True, text=True).stdout


def header_version() -> str:
    text = (ROOT / "include" / "tandem" / "tandem.h").read_text()
    return ".".join(re.findall(r"#define TANDEM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def symbols(path: str) -> tuple[set[str], set[str]]:
    """The defined and the undefined dynamic symbols, with their versions: "memcpy@GLIBC_2.14"."""
    defined, undefined = set(), set()
    for line in read_elf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit() or fields[4] not in ("GLOBAL", "WEAK", "UNIQUE"):
            continue
        (undefined if fields[6] == "UND" else defined).add(fields[7])
    return defined, undefined


def stable_functions() -> set[str]:
    """Names that every CPython from OLDEST_PYTHON on exports to extensions of the stable ABI."""
    from abi3info import DATAS, FUNCTIONS

    known = {**FUNCTIONS, **DATAS}
    return {s.name for s, item in known.items() if (item.added.major, item.added.minor) <= OLDEST_PYTHON}


def check_library(path: str, name: str, arch: str) -> list[str]:
    problems = []
    if MACHINES[arch] not in read_elf("-h", path):
        problems.append(f"is not for {arch}")
    dynamic = read_elf("-d", path)
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not NEEDED.fullmatch(needed):
            problems.append(f"needs {needed}, which an old system may lack")
    for kind, folders in re.findall(r"\((RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        if folders.split(":") != ["$ORIGIN"]:
            problems.append(f"has the {kind} {folders} instead of $ORIGIN")
    if re.search(r"GNU_STACK.*\bRWE\b", read_elf("-l", path)):
        problems.append("makes the stack executable")
    defined, undefined = symbols(path)
    for symbol in sorted(undefined):
        base, _, version = symbol.partition("@")
        glibc = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version.lstrip("@"))
        if glibc and (int(glibc[1]), int(glibc[2])) > NEWEST_GLIBC:
            problems.append(f"needs {symbol}, newer than glibc {NEWEST_GLIBC[0]}.{NEWEST_GLIBC[1]}")
        elif version and not glibc:
            problems.append(f"needs {symbol}: only glibc's symbols may be needed")
    for pattern, exported in EXPORTS.items():
        if re.fullmatch(pattern, name):
            others = {s for s in defined if not re.fullmatch(exported, s.partition("@")[0])}
            problems += [f"exports {symbol}" for symbol in sorted(others)]
            problems += [] if defined else ["exports nothing"]
    used = {s for s in undefined if re.match(r"_?Py", s)}
    problems += [f"calls {s}, outside the stable ABI of 3.9" for s in sorted(used - stable_functions())]
    if name.endswith(".abi3.so") and not used:
        problems.append("calls no function of Python")
    return problems


def check_record(archive: zipfile.ZipFile, info: str) -> list[str]:
    rows = {row[0]: row[1:] for row in csv.reader(archive.read(f"{info}/RECORD").decode().splitlines())}
    problems = [f"{name} is not in RECORD" for name in archive.namelist() if name not in rows]
    for name, (digest, size) in rows.items():
        if name == f"{info}/RECORD":
            continue
        data = archive.read(name)
        actual = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if digest != f"sha256={actual}" or int(size) != len(data):
            problems.append(f"{name} differs from RECORD")
    return problems


def check(path: pathlib.Path, forbidden: list[str]) -> list[str]:
    parts = re.fullmatch(r"(\w+)-([\w.]+)-(py3-none-manylinux_2_28_(x86_64|aarch64))\.whl", path.name)
    if not parts or parts[1] not in CONTENTS:
        return ["the name must be tandem_attention or tandem_vgpu-<version>-py3-none-manylinux_2_28_<processor>.whl"]
    name, version, tag, arch = parts.groups()
    info = f"{name}-{version}.dist-info"
    problems = []
    if version != header_version():
        problems.append(f"the version must be the header's, {header_version()}")
    if (size := path.stat().st_size) > MOST_BYTES.get(name, size):
        problems.append(f"{size} bytes exceed {MOST_BYTES[name]}")
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        problems += [f"{file} is missing" for file in sorted(CONTENTS[name] - set(names))]
        problems += [f"{file} does not belong into a wheel" for file in names if not ALLOWED_FILES.fullmatch(file)]
        problems += check_record(archive, info)
        if f"Tag: {tag}\n" not in archive.read(f"{info}/WHEEL").decode():
            problems.append(f"WHEEL does not have the tag {tag}")
        metadata = archive.read(f"{info}/METADATA").decode()
        if f"\nVersion: {version}\n" not in metadata or "\nRequires-Python: >=3.9\n" not in metadata:
            problems.append("METADATA has another version of the package or of Python")
        if len({entry.date_time for entry in archive.infolist()}) != 1:
            problems.append("the files have different times")
        for file in names:
            data = archive.read(file)
            problems += [f"{file} contains {text}" for text in forbidden if text.encode() in data]
            if data.startswith(b"\x7fELF"):
                library = archive.extract(file, folder)
                problems += [f"{file} {problem}" for problem in check_library(library, file.rpartition("/")[2], arch)]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=pathlib.Path)
    parser.add_argument("--forbid", action="append", default=[], help="a text that no file may contain")
    flags = parser.parse_args()
    failed = False
    for wheel in flags.wheels:
        problems = check(wheel, flags.forbid)
        failed |= bool(problems)
        print(f"{wheel.name}: {len(problems) or 'no'} violation{'' if len(problems) == 1 else 's'}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
