#!/usr/bin/env python3
"""Checks validation records, and prints the changes of kernels since: recorded_test.py <record.json>...

A record must have steps, all of them ok, and name a commit without local changes. Later changes of kernels are no
failure, but a release needs a new record (docs/results/README.md).
"""

import json
import pathlib
import subprocess
import sys

VALIDATED = (":/kernels", ":/src/plan", ":/vgpu/src", ":/vgpu/models")  # the validated folders, from the top


def git(folder, *words):
    """Returns git's output, or None without git or without the history."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def age(folder, commit):
    """Describes the changes of the validated folders since the commit."""
    changed = git(folder, "diff", "--name-only", commit, "--", *VALIDATED)
    if changed is None:
        return "this checkout lacks that commit, so the age of the record is unknown"
    if not changed:
        return "kernels, plan and virtual GPU have not changed"
    count = git(folder, "rev-list", "--count", f"{commit}..HEAD", "--", *VALIDATED)
    folders = sorted({name.split("/")[0] for name in changed.splitlines()})
    return f"since then {count} commits changed {', '.join(folders)}: a release needs a new record"


def wrong(record):
    """Yields the errors of a record."""
    steps = record.get("steps") or []
    if not steps:
        yield "the record has no steps"
    for step in steps:
        if step["verdict"] != "ok":
            yield f"step {step['name']}: {step['verdict']}: {step['summary']}"
    if record.get("failures") != 0:
        yield f"failures is {record.get('failures')}"
    for commit in (record.get("commit"), *(step["commit"] for step in steps if "commit" in step)):
        if not commit or commit.endswith(("-dirty", "unknown")):
            yield f"commit is {commit}: it must be a commit without local changes"


def main():
    failed = False
    for path in map(pathlib.Path, sys.argv[1:]):
        record = json.loads(path.read_text())
        print(f"{path.name}: commit {record.get('commit')}, {record.get('device')}, {record.get('date', '')[:10]}")
        for step in record.get("steps") or []:
            again = f" (of {step['commit']})" if "commit" in step else ""
            print(f"  {step['name']}: {step['verdict']}, {step['summary']}{again}")
        print("  " + age(path.parent, record.get("commit", "")))
        for text in wrong(record):
            failed = True
            print(f"  WRONG: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
