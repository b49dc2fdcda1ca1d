#!/usr/bin/env bash
# Prints the steps after run.sh. --commands prints only the commands, which CI runs in a bare root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

as_root=
[ "$(id -u)" = 0 ] || as_root='sudo '
install=(
  'cmake --build build/release --target installed'
  'cmake --install build/release --prefix ~/.local'
  "\$HOME/.local/bin/tandem verify --causal"
)
check=('build/release/tandem vgpu check --seqlen 70 --heads 1 --causal')
python=(
  "${as_root}apt-get install -y python3-venv python3-dev"
  'python3 -m venv build/python-env'
  'build/python-env/bin/pip install .'
  "build/python-env/bin/python -c 'import tandem; print(tandem.__doc__)'"
)

if [ "${1:-}" = --commands ]; then
  printf '%s\n' "${install[@]}" "${check[@]}" "${python[@]}"
  exit
fi
steps() { # <heading> <command>...
  printf '\n%s\n\n' "$1"
  shift
  printf '  %s\n' "$@"
}
steps 'Install the command and the C and C++ library:' "${install[@]}"
steps 'Check a GPU kernel on a virtual GPU:' "${check[@]}"
steps 'Install the Python package (docs/python.md lists its interfaces):' "${python[@]}"
