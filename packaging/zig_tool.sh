#!/usr/bin/env bash
# Runs a tool of Zig under the name of a link to this file: cc, c++, ar or ranlib. CMake and ccache need one-word compilers.
# TANDEM_ZIG is the path of zig. Options that name a processor as GCC and Clang do are translated to Zig's names.
set -euo pipefail
arguments=()
for argument in "$@"; do
  case $argument in
    -march=x86-64-v[2-4]) argument=-march=x86_64_${argument#-march=x86-64-} ;;
    -march=armv8-a*) argument=-mcpu=generic${argument#-march=armv8-a} ;;
  esac
  arguments+=("$argument")
done
exec "$TANDEM_ZIG" "${0##*/}" "${arguments[@]}"
