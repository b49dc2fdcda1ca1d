#!/usr/bin/env bash
# Tests tools/gpu/day_one.sh on vgpu:b200: the page without faults, and the page of each planted fault.
#   day_one_test.sh <build folder> [all]    all: also the experiments whose kernels take long to compile
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
fail() {
  printf 'FAILED: %s\n' "$*"
  cat "$out"/*/page.txt 2>/dev/null
  exit 1
}
day_one() { # <folder> <exit code> <flags...>
  local folder=$out/$1 wanted=$2 code=0
  shift 2
  "$here/tools/gpu/day_one.sh" "$build" --device vgpu:b200 --out "$folder" "$@" > "$folder.log" 2>&1 || code=$?
  [ "$code" = "$wanted" ] || fail "day_one.sh $* ends with $code, not $wanted: $(tail -n 5 "$folder.log")"
}
says() { # <folder> <pattern...>
  local folder=$1 pattern
  shift
  for pattern; do
    grep -qE -- "$pattern" "$out/$folder/page.txt" || fail "the page of $folder must say: $pattern"
    [ -s "$out/$folder/page.html" ] || fail "$folder must have page.html"
  done
}
if ! "$build/tools/gpu/day_one/day_one" tiny --device vgpu:b200 > "$out/tiny.log"; then
  ! grep -q 'pip install nvidia-cuda-nvrtc' "$out/tiny.log" || { echo "NOT RUN: $(< "$out/tiny.log")" && exit 77; }
fi
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$out/cache}

quick=tiny,e0,e1-one-cta,e1-two-ctas,e2-one-cta,e2-two-ctas,e14,e3-products,e4,e6,e6-mps,e7,e9,e11,e12,sweep
if [ "${2:-}" = all ]; then quick=''; fi
day_one right 0 ${quick:+--only "$quick"}
says right '^0 experiments failed\.' '^ok +E1 products of two CTAs' '^skipped +20 shapes' '^ok +E7' '^ok +E0' 'only with --mps' \
  '^skipped +E12 clock and power under load'
day_one full 0 --only tiny,full-proof,full-sweep-backward --full
says full '^0 experiments failed\.' '^skipped +The whole proof' '^skipped +The backward beside them' 'only a GPU runs'
# A second run continues: it runs nothing again.
day_one right 0 ${quick:+--only "$quick"}
! grep -q '^ok ' <(head -n 1 "$out/right.log") || fail "a finished experiment ran again"

products=tiny,e1-one-cta,e1-two-ctas,e14,e3-products
for fault in descriptor n barrier; do day_one "$fault" 1 --only "$products" --plant "$fault"; done
for fault in swizzle order; do day_one "$fault" 1 --only "$products" --plant "$fault"; done
says descriptor '^FAILED +E1 products of one CTA' 'descriptor of b is 40004042' 'descriptor of b is 80004022' 'avoid it: TANDEM_SM100=no_two_cta' \
  'export TANDEM_SM100=no_two_cta'
says n 'instruction descriptor 08240490 must be 08200490 \(N is 144, must be 128\)'
says barrier 'barrier, which expects 2 arrival'
says swizzle '^ok +E1 products of two CTAs' '^FAILED +E14' 'sums are wrong' \
  'avoid it: TANDEM_SM100=no_two_cta \(only gradients of head_dim 129 to 192'
grep -q 'dK += dS Q, 32 columns in each CTA: CTA 1 lane 127: ' "$out/swizzle/e14.log" || fail 'a wrong result must be in the log'
says order '^FAILED +E3' '^ok +E1' 'scores overwrote P' 'avoid it: TANDEM_SM100=wait_products'

# Neither a stall nor a fault keeps the page from being written, nor later experiments from running.
day_one stall 1 --only stall,fault --plant stall
says stall '^FAILED +A planted stall' 'stopped after' '^skipped +A planted fault'
day_one fault 1 --only stall,fault --plant fault
says fault '^skipped +A planted stall' '^FAILED +A planted fault'
echo "ok"
