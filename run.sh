#!/usr/bin/env bash
# The first command: installs missing packages, builds the tandem command and runs its demo. The demo computes attention
# over the tensors of a real model, compares it with float64 and measures its time. Without a supported GPU the demo also
# runs GPU kernels on a virtual B200 and draws what their warps do.
#
#   ./run.sh [arguments of `tandem demo`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh

readonly kCompileSeconds=300 # on one core

install_packages "$BUILD_PACKAGES"
# In the foreground, because sudo may need a password.
has_nvrtc || (install_packages "$NVRTC_PACKAGES") || true
if [ ! -x build/release/tandem ]; then
  jobs=$(jobs_at_once)
  say "Compiling takes about $(((kCompileSeconds / jobs + 59) / 60)) min on $jobs cores, once. The demo then takes about 1 min."
fi
# NVRTC and nvdisasm are downloaded during the build. If that fails, the calls after the build report it.
mkdir -p build
(nvrtc_environment && nvdisasm_program) >build/downloads.log 2>&1 &
build release tandem_command || exit 1
wait
if ! nvrtc_environment; then
  loudly "$NVRTC could not be installed: the GPU kernels cannot be compiled"
fi
if ! nvdisasm_program; then
  loudly "$NVDISASM could not be installed: the timelines count steps instead of clocks"
fi
status=0
build/release/tandem demo "$@" || status=$?
scripts/next_steps.sh
exit $status
