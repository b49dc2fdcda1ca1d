#!/usr/bin/env bash
# The first command: installs what is missing, builds Tandem and runs its main job: attention over the tensors of a real
# model, checked against float64 and timed, on the GPU where there is one that is served. Where there is none, one head
# also runs through the kernels of a B200, on a virtual one, and timelines of its forward and of a pair's backward are
# drawn.
#
#   ./run.sh [arguments of `tandem demo`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh

install_packages "$BUILD_PACKAGES"
build release tandem_command || exit 1
if ! nvrtc_environment; then
  loudly "$NVRTC could not be installed: there is nothing to compile GPU kernels with"
fi
build/release/tandem demo "$@"
say "" "From Python it is a change of one import (docs/python.md has every way in):" "" \
  "  pip install .                                 # one wheel for every CPython from 3.9" \
  "  python -c 'import tandem; help(tandem)'" \
  "  from tandem.flash_attn import flash_attn_func # instead of: from flash_attn import flash_attn_func"
say "" "(Here tandem is build/release/tandem; 'cmake --install build/release --prefix ~/.local' installs it.)"
