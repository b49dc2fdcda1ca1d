"""scripts/compare_abi.py accepts compatible changes of tandem.h and notices each incompatible one."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include" / "tandem" / "tandem.h").read_text()
SCRIPT = ROOT / "scripts" / "compare_abi.py"
VERSION = "TANDEM_API const char* tandem_version(void);"


def changed_struct(change) -> str:
    """The header after change(lines, numbers of lines with a field) of tandem_attention_args."""
    struct = re.search(r"typedef struct tandem_attention_args \{.*?\} tandem_attention_args;", HEADER, re.S)[0]
    lines = struct.split("\n")
    change(lines, [n for n, line in enumerate(lines) if re.match(r"  \w.*;", line)])
    return HEADER.replace(struct, "\n".join(lines))


def swap(lines: list[str], fields: list[int]) -> None:
    lines[fields[3]], lines[fields[10]] = lines[fields[10]], lines[fields[3]]


COMPATIBLE = {
    "a new function": HEADER.replace(VERSION, f"{VERSION}\nTANDEM_API int tandem_new(void);"),
    "a new status": HEADER.replace("  TANDEM_UNSUPPORTED = 2,", "  TANDEM_UNSUPPORTED = 2,\n  TANDEM_NEW = 77,"),
    "a field at the end": changed_struct(lambda lines, fields: lines.insert(fields[-1] + 1, "  int64_t extra;")),
}
INCOMPATIBLE = {
    "a removed function": HEADER.replace(VERSION, ""),
    "another result": HEADER.replace("const char* tandem_version", "int tandem_version"),
    "swapped fields": changed_struct(swap),
    "a field in the middle": changed_struct(lambda lines, fields: lines.insert(fields[5], "  int64_t extra;")),
    "a removed field": changed_struct(lambda lines, fields: lines.pop(fields[6])),
    "a removed last field": changed_struct(lambda lines, fields: lines.pop(fields[-1])),
    "another type": HEADER.replace("double softcap", "int64_t softcap"),
    "another value": HEADER.replace("TANDEM_UNSUPPORTED = 2", "TANDEM_UNSUPPORTED = 12"),
    "a longer tensor": HEADER.replace("uint64_t byte_offset;", "uint64_t byte_offset; int64_t more;"),
}


def is_compatible(header: str, folder: str) -> bool:
    path = pathlib.Path(folder, "tandem.h")
    path.write_text(header)
    command = [sys.executable, SCRIPT, "--headers", ROOT / "include", "--header", path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout, result.stderr
    return result.returncode == 0


def main() -> int:
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for expected, cases in ((True, COMPATIBLE), (False, INCOMPATIBLE)):
            for what, header in cases.items():
                assert header != HEADER, f"{what}: the header has other words; mend the case"
                if is_compatible(header, folder) != expected:
                    wrong.append(f"{what} counts as {'in' if expected else ''}compatible")
    count = len(COMPATIBLE) + len(INCOMPATIBLE)
    print("\n".join(wrong) or f"{count} changes of the header are judged as docs/abi.md has it.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
