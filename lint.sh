#!/usr/bin/env bash
# Checks the layout of the code, C++ defects that clang-tidy sees, and the shell scripts.
#
#   ./lint.sh [--fix] [--no-tidy]     --fix: put the layout right in place; --no-tidy: leave out the slow part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
. scripts/python.sh

fix=false tidy=true
for argument in "$@"; do
  case $argument in
    --fix) fix=true ;;
    --no-tidy) tidy=false ;;
    *) die "unknown argument '$argument'; usage: ./lint.sh [--fix] [--no-tidy]" ;;
  esac
done
install_packages "$BUILD_PACKAGES" "$PYTHON_PACKAGES" "$LINT_PACKAGES"

files() { # <pattern of names>: all of them outside of build folders
  find . \( -path './build*' -o -path ./out -o -path './.[!c]*' \) -prune -o -type f -regextype egrep -regex "$1" -print | sort
}
# ruff is no package of Debian's: that of the Python tests' environment, or one of its own.
lint_python() {
  local ruff=build/venv/bin/ruff folders=(bench examples python scripts tests tools)
  if [ ! -x $ruff ]; then
    ruff=build/ruff/bin/ruff
    [ -x $ruff ] || quietly "Installing ruff" bash -c "python3 -m venv build/ruff && build/ruff/bin/pip install ruff"
  fi
  if $fix; then
    $ruff check --quiet --fix "${folders[@]}" && $ruff format --quiet "${folders[@]}"
  else
    $ruff check --quiet "${folders[@]}"
    $ruff format --quiet --check "${folders[@]}" || die "the layout of Python files is not the agreed one: ./lint.sh --fix"
  fi
}

mapfile -t sources < <(files '.*\.(c|h|cpp|hpp)')
mapfile -t scripts < <(files '.*\.sh|./\.ci/run')
if $fix; then
  clang-format-16 -i "${sources[@]}"
else
  clang-format-16 --dry-run --Werror "${sources[@]}" || die "the layout of these files is not the agreed one: ./lint.sh --fix"
fi
shellcheck -x "${scripts[@]}"
lint_python

if $tidy; then
  quietly "Configuring clang" cmake --preset clang
  files '\./(src|tools)/.*\.cpp' |
    xargs -P "$(jobs_at_once)" -n 1 clang-tidy-16 --quiet -p build/clang 2>&1 | { grep -v "warnings\? generated" || true; }
fi
say "Nothing to complain about in ${#sources[@]} files."
