# shellcheck shell=sh disable=SC2154
# Sourced by the tests of the command, which set $tandem. The tests then run in $work, a new folder.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
failures=0

fail() {
  echo "FAILED: $*" >&2
  failures=$((failures + 1))
}

# expect <exit code> <text in standard output or error> <arguments...>
expect() {
  code=$1 text=$2
  shift 2
  got=0
  "$tandem" "$@" >output 2>errors || got=$?
  cat errors >>output
  [ "$got" = "$code" ] || { fail "tandem $*: exit code $got, not $code"; cat output >&2; }
  grep -qF -- "$text" output || { fail "tandem $*: does not say: $text"; cat output >&2; }
  if [ "$code" = 2 ] && [ "$(wc -l <errors)" != 1 ]; then
    fail "tandem $*: says more than one sentence"
    cat output >&2
  fi
}
