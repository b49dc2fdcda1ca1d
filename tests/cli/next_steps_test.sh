#!/bin/sh
# The steps that run.sh prints: they fit 80 columns, and the commands that CI runs are the printed ones. The progress line
# of a build estimates the rest.
#
#   next_steps_test.sh <root>
set -eu
cd "$1"
failures=0
fail() {
  echo "FAILED: $*" >&2
  failures=$((failures + 1))
}

scripts/next_steps.sh >"${TMPDIR:-/tmp}/steps.$$"
trap 'rm -f "${TMPDIR:-/tmp}/steps.$$"' EXIT
[ "$(awk '{ if (length > 80) print }' "${TMPDIR:-/tmp}/steps.$$" | wc -l)" = 0 ] || fail "a step has more than 80 columns"
scripts/next_steps.sh --commands | while IFS= read -r command; do
  grep -qF -- "  $command" "${TMPDIR:-/tmp}/steps.$$" || echo "$command"
done | grep . && fail "CI runs commands that are not printed"
for word in "cmake --install" "vgpu check" "pip install ." "python -c"; do
  grep -qF -- "$word" "${TMPDIR:-/tmp}/steps.$$" || fail "no step has: $word"
done

left() { bash -c '. scripts/setup.sh; time_left "$1" "$2"' - "$1" "$2"; }
[ "$(left 30 '[10/40] Building')" = "about 90 s left: " ] || [ "$(left 30 '[10/40] Building')" = "about 2 min left: " ] ||
  fail "a third of a build after 30 s: $(left 30 '[10/40] Building')"
[ "$(left 20 '[10/20] Building')" = "about 20 s left: " ] || fail "half of a build after 20 s: $(left 20 '[10/20] Building')"
[ "$(left 1200 '[100/200] x')" = "about 20 min left: " ] || fail "half of a build after 20 min"
[ -z "$(left 20 'no step of ninja')" ] || fail "an estimate without a step"
[ -z "$(left 2 '[1/70] Building')" ] || fail "an estimate after 2 s"

[ "$failures" = 0 ] || exit 1
echo "the next steps are printed as CI runs them"
