#!/usr/bin/env python3
"""Builds the wheels of tandem-attention and tandem-vgpu for glibc 2.28 and newer, on x86-64 or 64-bit ARM.

  packaging/build_wheels.py [--arch x86_64 aarch64] [--package attention vgpu] [--out dist]

Zig compiles for both processors on any machine. Needed programs: python3 with venv and headers, cmake, ninja, and the
headers of libhwy-dev (for vgpu also of libcli11-dev and nlohmann-json3-dev). The tools of packaging/requirements.txt
are installed into build/wheels/venv. Equal sources give equal bytes: times come from SOURCE_DATE_EPOCH, else from the
commit.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
GLIBC = "2.28"
DOCUMENTS = pathlib.Path("/usr/share/doc")
PROJECTS = {"attention": ROOT, "vgpu": ROOT / "packaging" / "vgpu"}  # folders of pyproject.toml
COMPONENTS = {"attention": "python", "vgpu": "vgpu"}  # in python/CMakeLists.txt
TARGETS = {
    "attention": ["tandem", "tandem_python"],
    "vgpu": ["tandem_vgpu", "tandem_virtual_cuda", "tandem_virtual_cudart", "tandem_command"],
}
# Libraries of headers that are compiled into the wheels: the folder in /usr/include, the CMake package and target.
HEADERS = {"hwy": None, "CLI": ("CLI11", "CLI11::CLI11"), "nlohmann": ("nlohmann_json", "nlohmann_json::nlohmann_json")}


def enter_environment() -> None:
    """Runs this script again in an environment with the packages of requirements.txt."""
    requirements = ROOT / "packaging" / "requirements.txt"
    venv, stamp = WORK / "venv", WORK / "venv" / "requirements.txt"
    if pathlib.Path(sys.prefix) == venv:
        return
    if not stamp.is_file() or stamp.read_bytes() != requirements.read_bytes():
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", "-r", requirements], check=True)
        shutil.copy(requirements, stamp)
    python = str(venv / "bin" / "python")
    os.execv(python, [python, *sys.argv])


def write_tools() -> dict[str, str]:
    """Writes links to Zig's tools and returns the environment in which they compile."""
    import ziglang

    tools, script = WORK / "tools", ROOT / "packaging" / "zig_tool.sh"
    tools.mkdir(parents=True, exist_ok=True)
    for name in ("cc", "c++", "ar", "ranlib"):
        link = tools / name
        link.unlink(missing_ok=True)
        link.symlink_to(script)
    zig = pathlib.Path(ziglang.__file__).parent / "zig"
    version = subprocess.run([zig, "version"], check=True, capture_output=True, text=True).stdout.strip()
    return {
        **os.environ,
        "TANDEM_ZIG": str(zig),
        "CCACHE_COMPILERTYPE": "clang",
        "CCACHE_COMPILERCHECK": f"string:zig {version} {hashlib.sha256(script.read_bytes()).hexdigest()}",
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }


def write_headers(arch: str) -> pathlib.Path:
    """Collects headers in one folder, because a search of /usr/include would find another C library's headers too."""
    folder = WORK / f"{arch}-headers"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "python").mkdir(parents=True)
    for name, package in HEADERS.items():
        if not pathlib.Path("/usr/include", name).is_dir():
            continue
        (folder / name).symlink_to(pathlib.Path("/usr/include", name))
        if package:
            (folder / f"{package[0]}Config.cmake").write_text(
                f"add_library({package[1]} INTERFACE IMPORTED)\n"
                f"target_include_directories({package[1]} INTERFACE ${{CMAKE_CURRENT_LIST_DIR}})\n"
            )
    source = pathlib.Path(sysconfig.get_path("include"))
    for header in source.iterdir():
        (folder / "python" / header.name).symlink_to(header)
    # Debian's pyconfig.h includes the header of the machine's processor. Both processors have the same sizes of types.
    config = source / "pyconfig.h"
    if target := re.search(r"include <(x86_64-linux-gnu/.*/pyconfig\.h)>", config.read_text()):
        (folder / "python" / "pyconfig.h").unlink()
        (folder / "python" / "pyconfig.h").symlink_to(pathlib.Path("/usr/include", target[1]))
    return folder


def compile_libraries(arch: str, packages: list[str], environment: dict[str, str], commit: str) -> pathlib.Path:
    build, headers = WORK / arch, write_headers(arch)
    (build / "CMakeCache.txt").unlink(missing_ok=True)  # it may have the flags of an older zig.cmake
    with_tools = "ON" if "vgpu" in packages else "OFF"
    configure = [
        *("cmake", "-G", "Ninja", "-S", ROOT, "-B", build),
        f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/packaging/zig.cmake",
        f"-DTANDEM_ZIG_TARGET={arch}-linux-gnu.{GLIBC}",
        f"-DTANDEM_ZIG_TOOLS={WORK}/tools",
        f"-DTANDEM_HIGHWAY_DIR={headers}",
        f"-DPython_INCLUDE_DIR={headers}/python",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCLI11_DIR={headers}",
        f"-Dnlohmann_json_DIR={headers}",
        f"-DTANDEM_COMMIT={commit}",
        *("-DCMAKE_BUILD_TYPE=Release", "-DTANDEM_BUILD_PYTHON=ON", f"-DTANDEM_BUILD_TOOLS={with_tools}"),
        *("-DTANDEM_BUILD_TESTS=OFF", "-DTANDEM_BUILD_BENCH=OFF"),
    ]
    log = WORK / f"{arch}.log"
    with log.open("w") as output:
        for command in (configure, ["ninja", "-C", build, *(t for p in packages for t in TARGETS[p])]):
            if subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
                sys.exit(f"{log.read_text()[-4000:]}\nerror: the compilation for {arch} must pass: read {log}")
    return build


def read_commit() -> tuple[str, int]:
    """The commit, as the command prints it, and its time: the time of every file in a wheel."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown"
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or 315532800)
    return commit, max(epoch, 315532800)  # a ZIP file has no time before 1980


def license_texts(package: str) -> dict[str, bytes]:
    """The licenses of libraries that are compiled into the wheel."""
    import ziglang

    library = pathlib.Path(ziglang.__file__).parent / "lib"
    texts = {
        "libc++": library / "libcxx" / "LICENSE.TXT",
        "libc++abi": library / "libcxxabi" / "LICENSE.TXT",
        "libunwind": library / "libunwind" / "LICENSE.TXT",
        "dlpack": ROOT / "third_party" / "dlpack" / "LICENSE",
        "highway": DOCUMENTS / "libhwy-dev" / "copyright",
    }
    if package == "vgpu":
        texts["CLI11"] = DOCUMENTS / "libcli11-dev" / "copyright"
        texts["nlohmann-json"] = DOCUMENTS / "nlohmann-json3-dev" / "copyright"
    return {f"{name}.txt": path.read_bytes() for name, path in texts.items()}


def read_metadata(project: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """The name of the .dist-info folder and its files, as pip would compute them from pyproject.toml."""
    from scikit_build_core.build import prepare_metadata_for_build_wheel

    here = os.getcwd()
    os.chdir(project)
    try:
        with tempfile.TemporaryDirectory() as folder:
            name = prepare_metadata_for_build_wheel(folder)
            top = pathlib.Path(folder, name)
            files = {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}
    finally:
        os.chdir(here)
    return name, files


def write_wheel(
    out: pathlib.Path, arch: str, info: str, files: dict[str, tuple[bytes, int]], epoch: int
) -> pathlib.Path:
    """Writes files (contents and mode by name) and their RECORD, sorted, so that equal contents give equal bytes."""
    name, version = info.removesuffix(".dist-info").split("-")
    path = out / f"{name}-{version}-py3-none-manylinux_{GLIBC.replace('.', '_')}_{arch}.whl"
    tag = path.stem.split("-", 2)[2]
    generator = "Wheel-Version: 1.0\nGenerator: tandem packaging/build_wheels.py\nRoot-Is-Purelib: false\nTag: "
    files[f"{info}/WHEEL"] = (f"{generator}{tag}\n".encode(), 0o644)
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, (data, _) in sorted(files.items())
    )
    files[f"{info}/RECORD"] = (f"{record}{info}/RECORD,,\n".encode(), 0o644)
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (data, mode) in sorted(files.items(), key=lambda item: (item[0].startswith(info), item[0])):
            entry = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=9)
    return path


def pack(package: str, arch: str, build: pathlib.Path, out: pathlib.Path, epoch: int) -> pathlib.Path:
    project = PROJECTS[package]
    info, metadata = read_metadata(project)
    files = {f"{info}/{name}": (data, 0o644) for name, data in metadata.items() if name not in ("WHEEL", "RECORD")}
    files[f"{info}/licenses/LICENSE"] = ((ROOT / "LICENSE").read_bytes(), 0o644)
    files.update((f"{info}/licenses/{name}", (text, 0o644)) for name, text in license_texts(package).items())
    source = project / ("python" if package == "attention" else "")
    for path in sorted((source / ("tandem" if package == "attention" else "tandem_vgpu")).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and ".so" not in path.suffixes:
            files[str(path.relative_to(source))] = (path.read_bytes(), 0o644)
    with tempfile.TemporaryDirectory() as stage:
        install = ["cmake", "--install", build, "--component", COMPONENTS[package], "--prefix", stage]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        for path in sorted(pathlib.Path(stage).rglob("*")):
            if path.is_file() and not path.is_symlink():
                files[str(path.relative_to(stage))] = (path.read_bytes(), 0o755)
    return write_wheel(out, arch, info, files, epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=["x86_64", "aarch64"], default=["x86_64", "aarch64"])
    parser.add_argument("--package", nargs="+", choices=list(PROJECTS), default=list(PROJECTS))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", help="folder of the wheels")
    flags = parser.parse_args()
    enter_environment()
    commit, epoch = read_commit()
    environment = write_tools()
    for arch in flags.arch:
        build = compile_libraries(arch, flags.package, environment, commit)
        for package in flags.package:
            wheel = pack(package, arch, build, flags.out.resolve(), epoch)
            print(hashlib.sha256(wheel.read_bytes()).hexdigest(), f"{wheel.stat().st_size / 1e6:.2f} MB", wheel)


if __name__ == "__main__":
    main()
