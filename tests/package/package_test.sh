#!/usr/bin/env bash
# Installs a build into a temporary folder, then uses it from outside the build tree as a user would.
#   package_test.sh <source folder> <build folder> <C compiler> <C++ compiler> <version>
set -euo pipefail
source=$1 build=$2 cc=$3 cxx=$4 version=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

cmake --install "$build" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/prefix" # an installed folder may be moved
prefix=$work/prefix
for file in lib/libtandem.so lib/libtandem.so.0 "lib/libtandem.so.$version" lib/libtandem_vgpu.so.0 \
  "lib/libtandem_vgpu.so.$version" lib/tandem/virtual_cuda/libcuda.so.1 lib/tandem/virtual_cuda/libcudart.so.13 \
  share/doc/tandem/LICENSE share/tandem/minilm/passage.safetensors lib/pkgconfig/tandem.pc lib/cmake/tandem/tandemConfig.cmake include/tandem/tandem.h include/tandem/tandem.hpp include/tandem/context_parallel.h include/tandem/context_parallel.hpp include/tandem/context_parallel_mpi.h bin/tandem; do
  found=$(find "$prefix" -path "$prefix/${file%%/*}*/${file##*/}" | head -n 1)
  [ -n "$found" ] || fail "$file was not installed"
done
library=$(find "$prefix" -name "libtandem.so.$version")
export PKG_CONFIG_PATH="${library%/*}/pkgconfig"

others=$(nm -D --defined-only "$library" | awk '{ print $3 }' | grep -v '^tandem_' || true)
[ -z "$others" ] || fail "the library exports more than tandem_*: $others"
declared=$(grep -ohE '^TANDEM_API [^;(]*\(' "$source"/include/tandem/*.h | grep -oE 'tandem_[a-z_]+\($' | tr -d '(' | sort)
exported=$(nm -D --defined-only "$library" | awk '{ print $3 }' | sort)
[ "$declared" = "$exported" ] || fail "declared and exported differ: $(diff <(echo "$declared") <(echo "$exported"))"
objdump -p "$library" | grep 'SONAME *libtandem.so.0$' >/dev/null || fail "the soname is not libtandem.so.0"

# Each C header compiles alone in C11 and C++, without warnings.
strict=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I "$prefix/include")
for header in tandem context_parallel; do
  echo "#include \"tandem/$header.h\"" >"$work/alone.c"
  "$cc" -std=c11 "${strict[@]}" "$work/alone.c"
  "$cxx" -std=c++11 "${strict[@]}" -x c++ "$work/alone.c"
done

for language in c cpp; do
  cp -r "$source/examples/$language" "$work/$language"
  cmake -G Ninja -S "$work/$language" -B "$work/$language/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_CXX_COMPILER="$cxx" >"$work/$language.log" || fail "configuring the $language example: $(cat "$work/$language.log")"
  cmake --build "$work/$language/build" >"$work/$language.log" 2>&1 || fail "building it: $(cat "$work/$language.log")"
  "$work/$language/build/tandem_example_$language" || fail "running the $language example built with find_package"
done

# Runs the programs for GPUs on virtual ones; 77: NVRTC is missing.
cp -r "$source/examples/cuda" "$work/cuda"
cmake -G Ninja -S "$work/cuda" -B "$work/cuda/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$cxx" >"$work/cuda.log" || fail "configuring the CUDA examples: $(cat "$work/cuda.log")"
cmake --build "$work/cuda/build" >"$work/cuda.log" 2>&1 || fail "building them: $(cat "$work/cuda.log")"
for device in vgpu:h200 vgpu:b200; do
  for language in c cpp; do
    result=0
    "$work/cuda/build/tandem_example_cuda_$language" "$device" || result=$?
    [ "$result" != 77 ] || echo "skipped: $device compiles its kernels with NVRTC, which is missing"
    [ "$result" = 0 ] || [ "$result" = 77 ] || fail "running the $language example for CUDA on $device"
  done
done

# A program with the run path of pkg-config needs no variable.
read -ra flags < <(pkg-config --cflags --libs tandem)
read -ra rpath < <(pkg-config --variable=rpath tandem)
"$cc" -std=c11 -D_GNU_SOURCE "$work"/c/*.c "${flags[@]}" "${rpath[@]}" -lm -o "$work/with_rpath"
(cd / && env -u LD_LIBRARY_PATH "$work/with_rpath" >/dev/null) || fail "running the C example with pkg-config's run path"
export LD_LIBRARY_PATH="${library%/*}"
"$cc" -std=c11 -D_GNU_SOURCE "$work"/c/*.c "${flags[@]}" -lm -o "$work/with_pkg_config_c"
"$cxx" -std=c++20 "$work"/cpp/*.cpp "${flags[@]}" -o "$work/with_pkg_config_cpp"
[ "$(pkg-config --modversion tandem)" = "$version" ] || fail "pkg-config tells another version"
"$work/with_pkg_config_c" >"$work/c.out" || fail "running the C example built with pkg-config"
"$work/with_pkg_config_cpp" >"$work/cpp.out" || fail "running the C++ example built with pkg-config"
shown=$(cd / && env -u LD_LIBRARY_PATH "$prefix/bin/tandem" --version)
grep -E "^tandem $version \(commit ([0-9a-f]{7,}(-dirty)?|unknown)\)$" <<<"$shown" >/dev/null || fail "tandem --version: $shown"
if [ -e "$source/.git" ] && git -C "$source" rev-parse HEAD >/dev/null 2>&1; then
  commit=$(grep -oE '[0-9a-f]{7,}' <<<"${shown#*commit}") || fail "tandem --version prints no commit: $shown"
  git -C "$source" cat-file -e "$commit^{commit}" || fail "tandem --version prints $commit, which is no commit"
fi

# A virtual GPU's library is loaded from the folder of libtandem. Without the library a sentence states that it is
# missing.
cat >"$work/virtual.c" <<'EOC'
#include <stdio.h>
#include <tandem/tandem.h>
int main(void) {
  tandem_context_options options = {.size = sizeof options, .device = "vgpu:b200"};
  tandem_context* context;
  if (tandem_context_create(&options, &context) != TANDEM_OK) return puts(tandem_last_error()), 1;
  puts(tandem_context_description(context));
  tandem_context_destroy(context);
}
EOC
"$cc" -std=c11 "$work/virtual.c" "${flags[@]}" -Wl,-rpath,"${library%/*}" -o "$work/virtual"
virtual() { (cd / && env -u LD_LIBRARY_PATH "$work/virtual" 2>&1); }
virtual | grep -F 'vgpu:b200, NVIDIA B200' >/dev/null || fail "a virtual GPU: $(virtual)"
(cd / && env -u LD_LIBRARY_PATH "$prefix/bin/tandem" info) | tr -d '\n ' |
  grep -F "load${library%/*}/libtandem_vgpu.so.0" >/dev/null || fail "tandem info does not say where the virtual GPU is"
rm "${library%/*}"/libtandem_vgpu.so*
if sentence=$(virtual); then fail "a virtual GPU without its library"; fi
grep -F "neither ${library%/*}/libtandem_vgpu.so.0 nor" <<<"$sentence" >/dev/null || fail "without its library: $sentence"
echo "The package installs, moves, and serves CMake and pkg-config."
