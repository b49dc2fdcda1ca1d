#!/usr/bin/env python3
"""Runs clang-tidy over units of a unity build, because most of its time is spent in the standard library's headers.

    scripts/tidy.py <build folder> <jobs> <file>...

Each unit of the compilation database is checked once. Files that several targets compile are checked in one of them.
"""

import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys


def sources_of(unit):
    """Returns the files that a unit compiles: the includes of a file that CMake generated, or the file."""
    if "/Unity/unity_" not in unit:
        return [unit]
    return re.findall(r'^#include "(.*)"$', pathlib.Path(unit).read_text(), re.MULTILINE)


def tidy(database, unit):
    """Returns the findings in a unit, or "" if the unit has no finding."""
    # A unit of CMake includes sources.
    command = ["clang-tidy-16", "--quiet", "--checks=-bugprone-suspicious-include", "-p", database, unit]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.endswith(" generated.")]
    return "\n".join(said) if done.returncode else ""


def main():
    build, jobs, *files = sys.argv[1:]
    database = json.loads((pathlib.Path(build) / "compile_commands.json").read_text())
    left = {str(pathlib.Path(file).absolute()) for file in files}
    units = []
    for unit in sorted({entry["file"] for entry in database}, key=lambda unit: (-len(sources_of(unit)), unit)):
        if left.isdisjoint(sources_of(unit)):
            continue
        left.difference_update(sources_of(unit))
        units.append(unit)
    if left:
        missing = " ".join(sorted(left))
        sys.exit(f"{build}/compile_commands.json must have these files: configure it again for {missing}")
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        found = [text for text in pool.map(lambda unit: tidy(build, unit), units) if text]
    for text in found:
        print(text)
    print(f"clang-tidy: {len(files)} files in {len(units)} units, {len(found)} with findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
