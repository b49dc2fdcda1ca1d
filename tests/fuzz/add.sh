#!/bin/sh
# Adds inputs to a fuzzer's kept corpus. Each input gets its SHA-1 as its name, and the archive's bytes depend only on
# the inputs.
#
#   tests/fuzz/add.sh NAME FILE...         tests/fuzz/add.sh ptx build/asan/ptx-crash-0123
set -eu
[ $# -ge 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
name=$1 archive=$(cd "$(dirname "$0")" && pwd)/corpus/$1.tar.gz
shift
[ -f "$archive" ] || { echo "NAME ($name) must be mods, npy, problem, ptx or safetensors: each has an archive in tests/fuzz/corpus" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "$archive" -C "$work"
for file; do cp "$file" "$work/$name/$(sha1sum <"$file" | cut -d ' ' -f 1)"; done
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$work" -cf "$work/all.tar" "$name"
gzip -9n <"$work/all.tar" >"$archive"
echo "$name: $(find "$work/$name" -type f | wc -l) inputs"
