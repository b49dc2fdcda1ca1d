#!/usr/bin/env bash
# Runs files of Python tests in build/venv; exit code 77 (skipped) without that folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ ! -x build/venv/bin/python ]; then
  echo "SKIPPED: there is no build/venv; ./test.sh makes it"
  exit 77
fi
# Importing torch only to find that there is no GPU would take seconds.
if [[ $1 == test_cuda* && ! -e /dev/nvidiactl && ! -e /dev/dxg ]]; then
  echo "SKIPPED: there is no GPU"
  exit 77
fi
# ctest runs a test on each core. Threads of OpenMP that spin would delay the other tests.
export OMP_WAIT_POLICY=PASSIVE
code=0
HF_HUB_OFFLINE=1 build/venv/bin/python -X dev -m pytest -q -p no:cacheprovider "${@/#/tests/python/}" || code=$?
[ $code != 5 ] || code=77 # pytest collected no test, because a package is missing
exit $code
