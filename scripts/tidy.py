#!/usr/bin/env python3
"""clang-tidy over files of a compilation database, a few at a time.

    scripts/tidy.py <build folder> <jobs> <file>...

Most of its time is spent in the standard library's headers. Files of one folder with equal flags are therefore checked
as one translation unit. If that does not compile (two files have a local name in common) or has findings, each file is
checked alone, and those results count.
"""

import concurrent.futures
import itertools
import json
import pathlib
import shlex
import subprocess
import sys

TOGETHER = 4  # a larger group would seldom compile


def flags_of(entry):
    """Returns the flags of a file, without its name and its object's."""
    words = shlex.split(entry["command"])
    del words[words.index("-o") : words.index("-o") + 2]
    return words[: words.index("-c")]


def alike(entry):
    """Returns a key that is equal for files that are checked together."""
    return str(pathlib.Path(entry["file"]).parent), flags_of(entry)


def together(entries, folder):
    """Returns a translation unit that includes the files, and its entry in a database."""
    first = pathlib.Path(entries[0]["file"])
    unit = folder / f"{first.parent.name}_{first.stem}.cpp"
    unit.write_text("".join(f'#include "{e["file"]}"  // NOLINT(bugprone-suspicious-include)\n' for e in entries))
    command = shlex.join([*flags_of(entries[0]), "-c", str(unit)])
    return {"directory": entries[0]["directory"], "command": command, "file": str(unit)}


def tidy(database, file):
    """Returns (True if there are no findings, the findings)."""
    done = subprocess.run(["clang-tidy-16", "--quiet", "-p", database, file], capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.endswith(" generated.")]
    return done.returncode == 0, "\n".join(said)


def main():
    build, jobs, *files = sys.argv[1:]
    build = pathlib.Path(build)
    database = {entry["file"]: entry for entry in json.loads((build / "compile_commands.json").read_text())}
    absolute = [str(pathlib.Path(file).absolute()) for file in files]
    if strange := [file for file in absolute if file not in database]:
        sys.exit(f"{build}/compile_commands.json must have these files: configure it again for {' '.join(strange)}")
    wanted = [database[file] for file in absolute]
    folder = build / "tidy"
    folder.mkdir(exist_ok=True)

    batches = []
    for _, group in itertools.groupby(sorted(wanted, key=alike), alike):
        group = list(group)
        batches += [group[n : n + TOGETHER] for n in range(0, len(group), TOGETHER)]
    units = [together(batch, folder) for batch in batches]
    (folder / "compile_commands.json").write_text(json.dumps(units, indent=1))

    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        good = pool.map(lambda unit: tidy(folder, unit["file"])[0], units)
        again = [entry["file"] for batch, fine in zip(batches, good) if not fine for entry in batch]
        found = [text for fine, text in pool.map(lambda file: tidy(build, file), again) if not fine]
    for text in found:
        print(text)
    print(f"clang-tidy: {len(wanted)} files, {len(again)} of them alone, {len(found)} with findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
