#!/usr/bin/env bash
# The shared library exports tandem_* and nothing else, under its soname.
#   exports_test.sh <libtandem.so> <nm> <objdump> <soname>
set -euo pipefail
exported=$("$2" -D --defined-only "$1" | awk '{ print $3 }')
grep -q '^tandem_forward$' <<<"$exported" || { echo "tandem_forward is not exported" >&2; exit 1; }
if others=$(grep -v '^tandem_[a-z_]*$' <<<"$exported"); then
  echo "exported beside the C interface: $others" >&2
  exit 1
fi
headers=$("$3" -p "$1")
grep -qE "SONAME +$4\$" <<<"$headers" || { echo "the soname is not $4" >&2; exit 1; }
