#!/usr/bin/env bash
# Writes page.txt and page.html from the outcomes of tools/gpu/day_one.sh: page.sh <folder> <headline>
set -uo pipefail
out=$1 headline=$2
failed=() words=()
rows=()
while IFS='|' read -r name _ title remedy; do
  if [ -e "$out/$name.outcome" ]; then
    mapfile -t outcome < "$out/$name.outcome"
  else
    outcome=('not run' 0 '')
  fi
  [ "${outcome[0]}" = FAILED ] || remedy=''
  if [ -n "$remedy" ]; then
    failed+=("$name")
    [[ $remedy =~ TANDEM_SM100=([a-z0-9_,]+) ]] && IFS=, read -ra more <<< "${BASH_REMATCH[1]}" && words+=("${more[@]}")
  fi
  rows+=("${outcome[0]}" "$title" "${outcome[2]:-}" "$remedy" "${outcome[1]}")
done < "$out/experiments"

switches=$(printf '%s\n' "${words[@]+"${words[@]}"}" | sort -u | grep . | paste -sd,)
summary="${#failed[@]} experiments failed${failed[*]:+: ${failed[*]}}."
[ -z "$switches" ] || summary+=" All their switches together: export TANDEM_SM100=$switches"
[ ! -e "$out/stopped" ] || summary+=" Stopped: $(< "$out/stopped")."

escape() { sed -e 's/&/\&amp;/g' -e 's/</\&lt;/g' -e 's/>/\&gt;/g' <<< "$1"; }
{
  printf 'Tandem, day one: %s\n%s\n\n' "$headline" "$summary"
  for ((n = 0; n < ${#rows[@]}; n += 5)); do
    printf '%-9s %s (%s s)\n' "${rows[n]}" "${rows[n + 1]}" "${rows[n + 4]}"
    [ -z "${rows[n + 2]}" ] || printf '          %s\n' "${rows[n + 2]}"
    [ -z "${rows[n + 3]}" ] || printf '          avoid it: %s\n' "${rows[n + 3]}"
  done
} > "$out/page.txt"
{
  cat << 'HEAD'
<!doctype html><meta charset="utf-8"><title>Tandem, day one</title>
<style>body{font:15px sans-serif;margin:2em auto;max-width:72em}td,th{padding:.3em .7em;text-align:left;vertical-align:top}
tr:nth-child(even){background:#f4f4f4}.FAILED{color:#b00;font-weight:bold}.ok{color:#070}</style>
HEAD
  printf '<h1>Tandem, day one</h1><p>%s</p><p><b>%s</b></p>\n' "$(escape "$headline")" "$(escape "$summary")"
  echo '<table><tr><th>verdict<th>experiment<th>what was seen<th>what avoids it<th>seconds'
  for ((n = 0; n < ${#rows[@]}; n += 5)); do
    printf '<tr><td class="%s">%s<td>%s<td>%s<td><code>%s</code><td>%s\n' "${rows[n]}" "${rows[n]}" \
      "$(escape "${rows[n + 1]}")" "$(escape "${rows[n + 2]}")" "$(escape "${rows[n + 3]}")" "${rows[n + 4]}"
  done
  echo '</table>'
} > "$out/page.html"
