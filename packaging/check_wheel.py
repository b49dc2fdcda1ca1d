#!/usr/bin/env python3
"""Checks a wheel without installing it, and prints every violation. The exit code is 1 if there is one.

  packaging/check_wheel.py <wheel>... [--forbid <text that no file may contain, such as the build folder>]
  packaging/check_wheel.py --self-test    shows that each kind of violation is found, in a wheel that it writes

The name, the tag, the version (include/tandem/tandem.h), the size and RECORD are checked. Each library is checked for
its processor, needed libraries, run path, stack and exported symbols. Undefined symbols are compared with the versions
of glibc and with Python's stable ABI of 3.9.

The script needs readelf, and the package abi3info of packaging/requirements.txt.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import pathlib
import platform
import random
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
NEEDED = re.compile(
    r"(lib(c|m|dl|pthread|rt)\.so\.[0-9]+|ld-linux-(x86-64|aarch64)\.so\.[0-9]|libtandem\.so\.0|libcuda\.so\.1)"
)
EXPORTS = {
    r"libtandem\.so\.\d+": r"tandem_\w+",
    r"libtandem_vgpu\.so\.\d+": r"tandem_vgpu_open",
    r"_native\.abi3\.so": r"PyInit__native|tandem_python_\w+",  # the ctypes binding calls these
}
CONTENTS = {
    "tandem_attention": {"tandem/__init__.py", "tandem/py.typed", "tandem/_native.abi3.so", "tandem/libtandem.so.0"},
    "tandem_vgpu": {
        *("tandem_vgpu/__init__.py", "tandem_vgpu/tandem", "tandem_vgpu/libtandem_vgpu.so.0"),
        *("tandem_vgpu/virtual_cuda/libcuda.so.1", "tandem_vgpu/virtual_cuda/libcudart.so.13"),
    },
}
# CPython 3.9 exports these functions with the signatures that became stable later, and the binding declares them.
EXPORTED_EARLIER = {
    "PyUnicode_AsUTF8AndSize": (3, 10),
    "PyBuffer_Release": (3, 11),
    "PyObject_GetBuffer": (3, 11),
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
    since = {s.name: (item.added.major, item.added.minor) for s, item in known.items()}
    return {s for s, version in since.items() if version <= EXPORTED_EARLIER.get(s, OLDEST_PYTHON)}


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
        if name not in archive.namelist():
            problems.append(f"{name} is in RECORD only")
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


BROKEN = """
#include <pthread.h>
void PyUnicode_AsUTF8(void);
void exported(void) { PyUnicode_AsUTF8(); }
pthread_barrier_t b;
int tandem_f(void) { return pthread_barrier_init(&b, 0, 2); }
"""
EXPECTED = [
    "exceed",
    "tandem/py.typed is missing",
    "left.c does not belong into a wheel",
    "tandem/_native.abi3.so differs from RECORD",
    "left.c is not in RECORD",
    "WHEEL does not have the tag",
    "METADATA has another version",
    "the files have different times",
    "left.c contains /secret",
    "_native.abi3.so has the RUNPATH /somewhere instead of $ORIGIN",
    "_native.abi3.so needs libgcc_s.so.1, which an old system may lack",
    "_native.abi3.so needs pthread_barrier_init@GLIBC_2.34",
    "_native.abi3.so exports exported",
    "_native.abi3.so exports tandem_f",
    "_native.abi3.so calls PyUnicode_AsUTF8, outside the stable ABI of 3.9",
]


def write_broken_wheel(folder: pathlib.Path) -> pathlib.Path:
    """A wheel with one violation of each kind, compiled for this machine, whose glibc must be 2.34 or newer."""
    source, library = folder / "broken.c", folder / "broken.so"
    source.write_text(BROKEN)
    link = ["-shared", "-fPIC", "-Wl,-rpath,/somewhere", "-Wl,--no-as-needed", "-lgcc_s"]
    subprocess.run(["cc", source, "-o", library, *link], check=True)
    path = folder / f"tandem_attention-{header_version()}-py3-none-manylinux_2_28_{platform.machine()}.whl"
    info = f"tandem_attention-{header_version()}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("left.c", f"/secret {random.Random(1).randbytes(4_100_000)}")
        archive.writestr("tandem/_native.abi3.so", library.read_bytes())
        archive.writestr(f"{info}/WHEEL", "Tag: py3-none-any\n")
        archive.writestr(f"{info}/METADATA", "Name: tandem-attention\nVersion: 0.0.0\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "tandem/_native.abi3.so,sha256=0,1\n")
    return path


def self_test() -> int:
    with tempfile.TemporaryDirectory() as folder:
        problems = check(write_broken_wheel(pathlib.Path(folder)), ["/secret"])
    missed = [text for text in EXPECTED if not any(text in problem for problem in problems)]
    print(
        "".join(f"not found: {text}\n" for text in missed) or f"{len(EXPECTED)} violations of a broken wheel are found."
    )
    return bool(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="*", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true", help="check a wheel with a violation of each kind")
    parser.add_argument("--forbid", action="append", default=[], help="a text that no file may contain")
    flags = parser.parse_args()
    if flags.self_test or not flags.wheels:
        return self_test() if flags.self_test else parser.error("a wheel must be given: name one or more wheels")
    failed = False
    for wheel in flags.wheels:
        problems = check(wheel, flags.forbid)
        failed |= bool(problems)
        print(f"{wheel.name}: {len(problems) or 'no'} violation{'' if len(problems) == 1 else 's'}")
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
