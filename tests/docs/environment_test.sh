#!/usr/bin/env bash
# docs/environment.md must list every environment variable that a program or script of the project reads, and no other
# variable of the project.
set -euo pipefail
cd "$1"
page=docs/environment.md failed=0

# Patterns of code that reads a variable, in C++, Python and shell.
by_name='(getenv|variable|read_count|read_switch|check_switch|envname|environment|environ\.get|environ\.setdefault|environ\.pop)\("[A-Z][A-Z0-9_]+"|environ\["[A-Z][A-Z0-9_]+"'
constants='Variable = "TANDEM_[A-Z0-9_]+"'
shell='\$\{(TANDEM_[A-Z0-9_]+|CI):-'
folders=(src vgpu sass cli tools python bench examples scripts tests)

read_names() {
  grep -rhoE --include='*.cpp' --include='*.h' --include='*.py' "$by_name|$constants" "${folders[@]}"
  grep -hoE "$shell" ./*.sh .ci/run
  grep -rhoE --include='*.sh' "$shell" "${folders[@]}"
}

names=$(read_names | grep -oE '[A-Z][A-Z0-9_]+[":]' | tr -d '":' | sort -u)
[ "$(wc -l <<<"$names")" -gt 30 ] || { echo "only $(wc -l <<<"$names") variables found: mend the patterns"; exit 1; }
for name in $names; do
  grep -qF "\`$name\`" "$page" || { echo "$page does not have $name"; failed=1; }
done
# shellcheck disable=SC2016  # backquotes are the page's
for name in $(grep -oE '`TANDEM_[A-Z0-9_]+`' "$page" | tr -d '`' | sort -u); do
  grep -rqE "\"?$name\b" --include='*.cpp' --include='*.h' --include='*.py' --include='*.sh' "${folders[@]}" ||
    { echo "$page has $name, which nothing reads"; failed=1; }
done
exit $failed
