#!/usr/bin/env python3
"""Checks that every relative link of the pages leads to a file, and that a named heading exists: scripts/links.py
<page>...
"""

import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page):
    """Returns the names by which links address a page's headings."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """Returns the broken links of a page."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{page}: {link} is not there"
        elif anchor and anchor not in anchors(target):
            yield f"{page}: {link}: {target.name} has no such heading"


def main():
    pages = [pathlib.Path(name) for name in sys.argv[1:]]
    found = [line for page in pages for line in broken(page)]
    print("\n".join(found) if found else f"Every relative link of {len(pages)} pages leads somewhere.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
