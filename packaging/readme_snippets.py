#!/usr/bin/env python3
"""Runs the Python snippets of pages, one after another, with the installed package.

  packaging/readme_snippets.py README.md...

The script needs a page with a snippet that computes `out`, and fails otherwise.
"""

from __future__ import annotations

import pathlib
import re
import sys


def main() -> int:
    count = 0
    for page in sys.argv[1:]:
        for snippet in re.findall(r"^```python\n(.*?)^```", pathlib.Path(page).read_text(), re.M | re.S):
            names: dict[str, object] = {}
            exec(compile(snippet, page, "exec"), names)
            out = names["out"]
            assert out.shape == names["q"].shape and abs(out).max() < float("inf"), out  # type: ignore[attr-defined]
            count += 1
            print(f"{page}: a snippet of {snippet.count(chr(10))} lines ran: out {out.shape} {out.dtype}")
    import tandem

    print(f"tandem {tandem.__version__ if hasattr(tandem, '__version__') else ''} {tandem.description()}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
