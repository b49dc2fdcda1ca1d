#!/bin/sh
# Usage: symbols_test.sh NAMESPACE NM OBJECT A kernel object is compiled with instructions that the machine may lack.
# The linker may merge a weak function of this object with another object's function of the same name, and the result
# then runs everywhere. Such a function must be in the target's namespace.
set -eu
if ! "$2" -C "$3" | grep "kernels_$1" >/dev/null; then
  echo "$3 has no table kernels_$1: is this the right object?"
  exit 1
fi
strays=$("$2" -C "$3" | grep -E '^[0-9a-f]+ [WVu] ' | grep -v "tandem::cpu::$1::" || true)
if [ -n "$strays" ]; then
  echo "weak symbols of $1 outside of tandem::cpu::$1:"
  echo "$strays"
  exit 1
fi
