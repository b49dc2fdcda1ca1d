#!/usr/bin/env bash
# Builds the Debian package and unpacks it. 77: dpkg-shlibdeps is missing.
#   debian_test.sh <build folder> <version>
set -euo pipefail
build=$1 version=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

command -v dpkg-shlibdeps >/dev/null || { echo "skipped: cpack needs dpkg-shlibdeps, of the package dpkg-dev" && exit 77; }
cpack -G DEB --config "$build/CPackConfig.cmake" -B "$work/cpack" >"$work/log" 2>&1 || fail "cpack: $(cat "$work/log")"
package=$(find "$work/cpack" -maxdepth 1 -name "tandem_${version}_*.deb")
[ -n "$package" ] || fail "cpack wrote no tandem_${version}_*.deb: $(ls "$work/cpack")"
fields=$(dpkg-deb --field "$package")
grep -E '^Depends: .*libc6 \(>= [0-9.]+\).*libstdc\+\+6' <<<"$fields" >/dev/null || fail "dependencies: $fields"
grep -E "^Version: ${version//./\\.}$" <<<"$fields" >/dev/null || fail "version: $fields"
dpkg-deb --ctrl-tarfile "$package" | tar -xO ./triggers | grep -x 'activate-noawait ldconfig' >/dev/null || fail "no trigger of ldconfig"
dpkg-deb --extract "$package" "$work/root"
for file in bin/tandem lib/libtandem.so.0 lib/libtandem_vgpu.so.0 lib/tandem/virtual_cuda/libcuda.so.1 include/tandem/tandem.hpp \
  lib/cmake/tandem/tandemConfig.cmake lib/pkgconfig/tandem.pc share/doc/tandem/LICENSE; do
  [ -n "$(find "$work/root/usr/${file%%/*}" -path "*/${file##*/}")" ] || fail "$file is not in the package"
done
[ ! -e "$work/root/usr/local" ] || fail "files in /usr/local"
(cd / && "$work/root/usr/bin/tandem" vgpu --help >/dev/null) || fail "running the command of the package"
(cd / && "$work/root/usr/bin/tandem" --version | grep -F "tandem $version" >/dev/null) || fail "tandem --version"
echo "The Debian package is complete: $(basename "$package")"
