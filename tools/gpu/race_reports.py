#!/usr/bin/env python3
"""Compares racecheck's reports on the kernels with the known ones. Exit code 1: a report is not explained.

    python tools/gpu/race_reports.py racecheck.log

The log comes from compute-sanitizer --tool racecheck --racecheck-report analysis, with TANDEM_LINE_INFO=1. racecheck
orders a write after the reads of the threads that arrived at the mbarrier. The tool ignores the threads that these had
waited for. tools/gpu/race_minimal.cu shows this for every release below.
"""

import collections
import re
import sys

# The writing function, and its file: what it overwrites, and how the readers release that.
EXPLAINED = {
    ("load", "load.cuh"): "s.tile of the backward: one thread arrives after a named barrier (barrier)",
    ("dq_accumulate_warp", "dq_accumulate.cuh"): "s.dq_to of the backward: one lane of each warp arrives (warp)",
    ("bulk_load", "tma.cuh"): "s.lse_delta of the backward: one lane of each warp arrives (bulk)",
    ("take", "load.cuh"): "s.work_tiles of the forward: one lane of each warp arrives (warp)",
    ("signal_end", "load.cuh"): "s.work_tiles of the forward: one lane of each warp arrives (warp)",
}
ACCESS = re.compile(r"(Race reported between|and) (Write|Read) access at (.*?)(?:\+0x[0-9a-f]+)?(?: in (\S+):(\d+))?(?: \[|$)")


def function_of(text: str) -> str:
    """Returns the name of a demangled function, without its class, template arguments and parameters, or the text if it
    has no name.
    """
    text = re.sub(r"\boperator\(\)", "operator", text)
    plain, depth = "", 0
    for character in text:
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            plain += character
    words = plain.split("(")[0].split()
    return words[-1].split("::")[-1] if words else text.strip()


def reports(lines):
    """Yields the two accesses of each report: kind, function, file and line."""
    first = None
    for line in lines:
        found = ACCESS.search(line)
        if not found:
            continue
        start, kind, where, file, number = found.groups()
        access = (kind, function_of(where), file or "", number or "")
        if start == "and":
            yield first, access
        else:
            first = access


def main() -> int:
    known, unknown = collections.Counter(), collections.Counter()
    for path in sys.argv[1:]:
        with open(path, errors="replace") as log:
            for pair in reports(log):
                keys = [access[1:3] for access in pair if access[0] == "Write" and access[1:3] in EXPLAINED]
                text = " and ".join(f"{kind} in {name}, {file}:{line}" for kind, name, file, line in pair)
                if keys and [access[0] for access in pair].count("Read") == 1:
                    known[EXPLAINED[keys[0]]] += 1
                else:
                    unknown[text] += 1
    for title, counter in (("explained", known), ("NOT explained", unknown)):
        for text, count in counter.items():
            print(f"{title}: {count} x {text}")
    print(f"{known.total()} reports explained, {unknown.total()} not")
    return unknown.total() > 0


if __name__ == "__main__":
    sys.exit(main())
