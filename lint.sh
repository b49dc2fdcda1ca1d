#!/usr/bin/env bash
# Checks the layout of the code, C++ defects that clang-tidy sees, the shell scripts, the links of the pages, the prose
# and the size limits.
#
#   ./lint.sh [--fix] [--no-tidy | --tidy]     --fix: put the layout right in place; --no-tidy: leave out the slow part,
#                                              --tidy: nothing but that
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
. scripts/python.sh

fix=false tidy=true layout=true
for argument in "$@"; do
  case $argument in
    --fix) fix=true ;;
    --no-tidy) tidy=false ;;
    --tidy) layout=false ;;
    *) die "the argument ('$argument') must be a known one: ./lint.sh [--fix] [--no-tidy | --tidy]" ;;
  esac
done
install_packages "$BUILD_PACKAGES" "$PYTHON_PACKAGES" "$LINT_PACKAGES"

files() { # <pattern of names>: all of them outside of build folders
  find . \( -path './build*' -o -path ./out -o -path './.[!c]*' \) -prune -o -type f -regextype egrep -regex "$1" -print | sort
}
# Debian has no package of ruff. The program comes from the Python tests' environment, or from build/ruff.
lint_python() {
  local ruff=build/venv/bin/ruff folders=(bench examples packaging python sass scripts tests vgpu)
  if [ ! -x $ruff ]; then
    ruff=build/ruff/bin/ruff
    [ -x $ruff ] || quietly "Installing ruff" bash -c "python3 -m venv build/ruff && build/ruff/bin/pip install ruff"
  fi
  if $fix; then
    $ruff check --quiet --fix "${folders[@]}" && $ruff format --quiet "${folders[@]}"
  else
    $ruff check --quiet "${folders[@]}"
    $ruff format --quiet --check "${folders[@]}" || die "the layout of Python files must be ruff's: run ./lint.sh --fix"
  fi
}

if $layout; then
  mapfile -t sources < <(files '.*\.(c|h|cpp|hpp|cuh)')
  mapfile -t scripts < <(files '.*\.sh|./\.ci/run')
  mapfile -t pages < <(files '.*\.md')
  if $fix; then
    clang-format-16 -i "${sources[@]}"
  else
    clang-format-16 --dry-run --Werror "${sources[@]}" || die "the layout of these files must be clang-format's: run ./lint.sh --fix"
  fi
  shellcheck -x "${scripts[@]}"
  lint_python
  scripts/links.py "${pages[@]}"
  scripts/prose_lint.py --budget scripts/prose_budget.txt
  say "${#sources[@]} C++ files and ${#scripts[@]} shell scripts have no findings."
fi

if $tidy; then
  quietly "Configuring clang-tidy" cmake --preset clang -B build/tidy -DTANDEM_UNITY=ON
  mapfile -t sources < <(files '\./(cli|sass/cli|sass/src|src|vgpu/src)/.*\.cpp')
  scripts/tidy.py build/tidy "$(jobs_at_once)" "${sources[@]}"
fi
