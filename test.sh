#!/usr/bin/env bash
# The second command: installs what is missing, builds everything and runs every test.
#
#   ./test.sh [arguments of ctest, such as -R decode]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh

install_packages "$BUILD_PACKAGES"
build release || exit 1
progress=()
if [ -t 1 ]; then progress=(--progress); fi
exec ctest --preset release -j "$(nproc)" "${progress[@]}" "$@"
