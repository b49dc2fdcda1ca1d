#!/usr/bin/env bash
# Checks the layout of the code, C++ defects that clang-tidy sees, and the shell scripts.
#
#   ./lint.sh [--fix] [--no-tidy]     --fix: put the layout right in place; --no-tidy: leave out the slow part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh

fix=false tidy=true
for argument in "$@"; do
  case $argument in
    --fix) fix=true ;;
    --no-tidy) tidy=false ;;
    *) die "unknown argument '$argument'; usage: ./lint.sh [--fix] [--no-tidy]" ;;
  esac
done
install_packages "$BUILD_PACKAGES" "$LINT_PACKAGES"

mapfile -t sources < <(find include src tools tests bench examples -name '*.[ch]' -o -name '*.[ch]pp' | sort)
if $fix; then
  clang-format-16 -i "${sources[@]}"
else
  clang-format-16 --dry-run --Werror "${sources[@]}" || die "the layout of these files is not the agreed one: ./lint.sh --fix"
fi
mapfile -t scripts < <(find . -path ./build -prune -o -name '*.sh' -print)
shellcheck -x "${scripts[@]}" .ci/run

if $tidy; then
  [ -f build/clang/compile_commands.json ] || quietly "Configuring clang" cmake --preset clang
  find src tools -name '*.cpp' | sort |
    xargs -P "$(jobs_at_once)" -n 1 clang-tidy-16 --quiet -p build/clang 2> >(grep -v 'warnings generated' >&2 || true)
fi
say "Nothing to complain about in ${#sources[@]} files."
