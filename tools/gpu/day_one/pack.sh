#!/usr/bin/env bash
# Packs the files that tools/gpu/day_one.sh needs on a machine without compiler, network and Python.
#
#   tools/gpu/day_one/pack.sh <build folder> [<archive.tar.gz>]
#
# On that machine run: tar xzf day_one.tar.gz && day_one/tools/gpu/day_one.sh
# TANDEM_NVRTC names the compiler (as in tools/gpu/prove.sh). NVRTC 13.0 and newer serve sm_100a and sm_103a.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=tools/gpu/common.sh
. "$here/tools/gpu/common.sh"
build=${1:?usage: tools/gpu/day_one/pack.sh <build folder> [<archive.tar.gz>]} archive=${2:-day_one.tar.gz}
use_nvrtc
programs=(tools/gpu/day_one/day_one tests/support/tandem_fuzz tests/kernels/kernels_test tests/kernels/kernels_worker
  tests/kernels/libcounting_nvrtc.so)
to=$scratch/day_one
mkdir -p "$to/nvrtc"
for file in "${programs[@]}"; do
  [ -e "$build/$file" ] || die "$build/$file must exist: build its target"
  mkdir -p "$to/${file%/*}"
  strip -o "$to/$file" "$build/$file"
done
for file in tools/gpu/{common.sh,proof.sh,prove.sh,day_one.sh} tools/gpu/day_one/{page.sh,shapes.txt}; do
  mkdir -p "$to/${file%/*}"
  cp "$here/$file" "$to/$file"
done
cp -L "$TANDEM_NVRTC" "${TANDEM_NVRTC%/*}"/libnvrtc-builtins.so.1* "$to/nvrtc/"
commit_of_build > "$to/commit"
tar -C "$scratch" -czf "$archive" day_one
printf '%s, %s bytes, commit %s\n' "$archive" "$(stat -c %s "$archive")" "$(< "$to/commit")"
