#!/usr/bin/env bash
# Builds the wheel of this machine's processor, checks it, installs it in a bare Debian 12 and runs the README's snippets.
# If debootstrap cannot run, a new virtual environment replaces the bare root.
#
#   packaging/test_wheel.sh [--venv]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
. scripts/python.sh

root=$PWD/build/wheel-root out=$PWD/build/wheel-test

make_root() {
  (install_packages "$BARE_ROOT_PACKAGES") || return 1
  rm -rf --one-file-system "$root"
  quietly "Making a bare Debian 12 with Python" \
    debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$root" || return 1
  cp /etc/resolv.conf "$root/etc/"
  cp -rL /etc/ssl/certs "$root/etc/ssl/" 2>/dev/null || true
  chroot "$root" true
}

# in_root <command...>: with an empty environment, except for the variables that package servers need.
in_root() {
  local variables
  mapfile -t variables < <(env | grep -iE '^(http|https|no)_proxy=|^PIP_|^(SSL|CURL|REQUESTS)_[A-Z_]*=' || true)
  env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin "${variables[@]}" chroot "$root" "$@"
}
here() { env -u PYTHONPATH "$@"; }

# try <runner> <folder that both sides see> <the folder's name for the runner>
try() {
  local run=$1 folder=$2 inside=$3 start
  cp "$out"/tandem_attention-*.whl packaging/readme_snippets.py README.md "$folder/"
  "$run" python3 -m venv "$inside/venv"
  start=$(date +%s%N)
  "$run" bash -c "$inside/venv/bin/pip install -q --disable-pip-version-check $inside/*.whl"
  say "pip install took $((($(date +%s%N) - start) / 1000000)) ms, with the download of numpy"
  "$run" "$inside/venv/bin/python" "$inside/readme_snippets.py" "$inside/README.md"
  "$run" env TANDEM_PYTHON_BOUNDARY=ctypes "$inside/venv/bin/python" "$inside/readme_snippets.py" "$inside/README.md"
}

(install_packages "$BUILD_PACKAGES" "$PYTHON_PACKAGES")
rm -rf "$out"
quietly "Building the wheel" python3 packaging/build_wheels.py --arch "$(uname -m)" --package attention --out "$out"
build/wheels/venv/bin/python packaging/check_wheel.py --self-test
build/wheels/venv/bin/python packaging/check_wheel.py --forbid "$PWD" "$out"/*.whl
if [ "${1:-}" != --venv ] && [ "$(id -u)" = 0 ] && make_root; then
  say "In a bare root:"
  mkdir "$root/new"
  try in_root "$root/new" /new
  rm -rf --one-file-system "$root"
else
  say "In a new virtual environment:"
  folder=$(mktemp -d)
  try here "$folder" "$folder"
  rm -rf "$folder"
fi
