#!/usr/bin/env bash
# Runs one file of Python tests in build/venv; exit code 77 (skipped) without that folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ ! -x build/venv/bin/python ]; then
  echo "SKIPPED: there is no build/venv; ./test.sh makes it"
  exit 77
fi
code=0
HF_HUB_OFFLINE=1 build/venv/bin/python -X dev -m pytest -q -p no:cacheprovider "tests/python/$1" || code=$?
[ $code != 5 ] || code=77 # pytest collected no test, because a package is missing
exit $code
