#!/usr/bin/env bash
# Checks that a shared library exports only the expected names, under its soname. exports_test.sh <library> <nm>
#   <objdump> <soname> <exported, a regular expression> <one of them>
set -euo pipefail
exported=$("$2" -D --defined-only "$1" | awk '{ print $3 }')
grep -qx "$6" <<<"$exported" || { echo "$6 is not exported" >&2; exit 1; }
if others=$(grep -vxE "$5" <<<"$exported"); then
  echo "exported in addition to the interface: $others" >&2
  exit 1
fi
headers=$("$3" -p "$1")
grep -qE "SONAME +$4\$" <<<"$headers" || { echo "the soname is not $4" >&2; exit 1; }
