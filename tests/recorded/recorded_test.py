#!/usr/bin/env python3
"""Whether recorded proofs hold, and how far the kernels have moved since: recorded_test.py <proof.json>...

A proof must have steps, all of them ok, and name a commit that was built without changes. That the kernels have changed
since is said, and no failure: who changes a kernel proves it again before a release (docs/results/README.md).
"""

import json
import pathlib
import subprocess
import sys

PROVEN = (":/kernels", ":/src/plan", ":/vgpu/src", ":/vgpu/models")  # what a proof is about, from the top folder


def git(folder, *words):
    """What git answers, or None: there may be no git, no history, or not all of it."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def age(folder, commit):
    """How far what was proven has moved since the commit, in words."""
    changed = git(folder, "diff", "--name-only", commit, "--", *PROVEN)
    if changed is None:
        return "this checkout does not have that commit: how old that is cannot be said"
    if not changed:
        return "kernels, plan and virtual GPU are as they were"
    count = git(folder, "rev-list", "--count", f"{commit}..HEAD", "--", *PROVEN)
    folders = sorted({name.split("/")[0] for name in changed.splitlines()})
    return f"since then {count} commits changed {', '.join(folders)}: to be proved again before a release"


def wrong(proof):
    """What is wrong with a proof."""
    steps = proof.get("steps") or []
    if not steps:
        yield "it has no steps"
    for step in steps:
        if step["verdict"] != "ok":
            yield f"step {step['name']}: {step['verdict']}: {step['summary']}"
    if proof.get("failures") != 0:
        yield f"failures is {proof.get('failures')}"
    for commit in (proof.get("commit"), *(step["commit"] for step in steps if "commit" in step)):
        if not commit or commit.endswith(("-dirty", "unknown")):
            yield f"commit is {commit}: it must be one that others can build"


def main():
    failed = False
    for path in map(pathlib.Path, sys.argv[1:]):
        proof = json.loads(path.read_text())
        print(f"{path.name}: commit {proof.get('commit')}, {proof.get('device')}, {proof.get('date', '')[:10]}")
        for step in proof.get("steps") or []:
            again = f" (of {step['commit']})" if "commit" in step else ""
            print(f"  {step['name']}: {step['verdict']}, {step['summary']}{again}")
        print("  " + age(path.parent, proof.get("commit", "")))
        for text in wrong(proof):
            failed = True
            print(f"  WRONG: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
