# shellcheck shell=bash disable=SC2034  # the lists are for the scripts that source this
# Functions that install, configure and build, for run.sh, test.sh, lint.sh and .ci/run. Source this file from the top
# folder.

# Each line: package, a program of it ("-": dpkg decides whether it is installed), purpose.
BUILD_PACKAGES='
g++                   g++         compiles the C++20 code
cmake                 cmake       configures the build
ninja-build           ninja       runs the build
libhwy-dev            -           headers of Google Highway: SIMD for the CPU engine
libcli11-dev          -           headers: command line of the tandem command
nlohmann-json3-dev    -           headers: .safetensors files and --json
libopenblas0-pthread  -           matrix products of standard attention, for comparison
libgtest-dev          -           GoogleTest
pkg-config            pkg-config  a test builds the examples against the installed library
python3-numpy         -           a test holds float64 attention to a second source
'
NVRTC_PACKAGES='
python3-venv          -           a virtual environment for NVRTC, which compiles GPU kernels, and for nvdisasm
'
LINT_PACKAGES='
clang-16            clang++-16       second compiler
clang-format-16     clang-format-16  layout of the code
clang-tidy-16       clang-tidy-16    static analysis of C++
shellcheck          shellcheck       static analysis of shell scripts
'
CI_PACKAGES='
abigail-tools          abidiff                compares binary interfaces
ccache                 ccache                 compiles equal files once
libclang-rt-16-dev     -                      sanitizers and libFuzzer
llvm-16                llvm-cov-16            line coverage, readable reports of the sanitizers
g++-aarch64-linux-gnu  aarch64-linux-gnu-g++  compiles for 64-bit ARM
qemu-user              qemu-aarch64           runs what was compiled for 64-bit ARM
dpkg-dev               dpkg-shlibdeps         dependencies of the Debian package
googletest             -                      sources of GoogleTest, to compile for 64-bit ARM
libopenmpi-dev         mpicxx                 headers of MPI: the test of context parallelism on processes of MPI
openmpi-bin            mpirun                 starts these processes
'
BARE_ROOT_PACKAGES='
debootstrap           debootstrap  makes a bare Debian in a folder
'

say() { printf '%s\n' "$@"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# quietly <what> <command...>: shows one moving line on a terminal, and elsewhere one line every 20 seconds. The output
# goes to a log; the end of the log is shown if the command fails.
quietly() {
  local what=$1 log start=$SECONDS
  shift
  mkdir -p build
  log=build/$(tr -cs 'a-z0-9' '-' <<<"${what,,}").log
  log=${log/-.log/.log}
  if ! "$@" 2>&1 </dev/null | show_progress "$what" "$log"; then
    printf 'error: %s failed; the end of %s:\n' "$what" "$log" >&2
    tail -n 40 "$log" >&2
    return 1
  fi
  say "$what: done in $((SECONDS - start)) s"
}

# time_left <seconds so far> <line>: prints the estimated remaining time from a line of ninja, "[12/70] ..."; empty for
# other lines.
time_left() {
  local ready all left
  [[ $2 =~ ^\[([0-9]+)/([0-9]+)\] ]] || return 0
  ready=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
  (($1 >= 5 && ready > 0)) || return 0
  left=$(($1 * (all - ready) / ready))
  if ((left >= 90)); then
    printf 'about %d min left: ' $(((left + 30) / 60))
  else
    printf 'about %d s left: ' "$left"
  fi
}

show_progress() {
  local what=$1 log=$2 line width shown=$SECONDS start=$SECONDS
  : >"$log"
  if [ ! -t 1 ]; then
    say "$what ..."
  else
    width=$(($(stty size 2>/dev/null </dev/tty | cut -d ' ' -f 2 || true) - 1))
    [ "$width" -gt 20 ] || width=79
  fi
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    if [ -t 1 ]; then
      line="$what: $(time_left $((SECONDS - start)) "$line")$line"
      printf '\r\033[K%s' "${line:0:width}"
    elif ((SECONDS - shown >= 20)); then
      say "$what: $(time_left $((SECONDS - start)) "$line")$line"
      shown=$SECONDS
    fi
  done
  [ ! -t 1 ] || printf '\r\033[K'
}

is_installed() { # <package> <program>
  if [ "$2" != - ] && command -v "$2" >/dev/null; then return 0; fi
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# install_packages <list>...: prints which packages are missing, then installs them with apt.
install_packages() {
  local package program reason missing=() lines=()
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "This system has no apt, so install these Debian packages (or their equivalents) yourself:"
    awk 'NF { print "  " $1 }' <<<"$*"
    return 0
  fi
  while read -r package program reason; do
    if [ -z "$package" ] || is_installed "$package" "$program"; then continue; fi
    missing+=("$package")
    lines+=("$(printf '  %-22s %s' "$package" "$reason")")
  done <<<"$*"
  [ ${#missing[@]} -gt 0 ] || return 0

  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null ||
      die "the packages must be installed by root, because sudo is missing:" \
        "run 'apt-get install ${missing[*]}' as root, then this script again"
    as_root=(sudo)
  fi
  say "These packages are missing and will now be installed with apt${as_root:+ (through sudo)}:"
  printf '%s\n' "${lines[@]}"
  if [ ${#as_root[@]} -gt 0 ]; then
    sudo -n true 2>/dev/null || sudo -v ||
      die "sudo must allow $(id -un) to become root: run 'apt-get install ${missing[*]}' as root, then this script again"
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
  quietly "Reading package lists" "${apt[@]}" update || say "The old package lists are used."
  for package in "${missing[@]}"; do
    apt-cache show "$package" >/dev/null 2>&1 ||
      die "apt must have the package '$package': use Debian 12, Ubuntu 24.04 or newer," \
        "and enable 'universe' on Ubuntu (sudo add-apt-repository universe)"
  done
  quietly "Installing packages" "${apt[@]}" install --no-install-recommends "${missing[@]}" ||
    die "apt must install these packages: read its errors above, then install ${missing[*]}"
}

# Number of compilers to run in parallel: one per core, with 1.5 GB of memory each.
jobs_at_once() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
  if [ "$memory" -lt "$cores" ]; then cores=$memory; fi
  if [ "$cores" -lt 1 ]; then cores=1; fi
  echo "$cores"
}

# build <preset> [target...]: configures if necessary, then builds. Warnings are errors if CI is set.
build() {
  local preset=$1 werror=OFF
  local dir=build/$preset
  shift
  if [ "${CI:-}" = true ]; then werror=ON; fi
  if [ ! -f "$dir/build.ninja" ] || ! grep -q "^TANDEM_WERROR:BOOL=$werror$" "$dir/CMakeCache.txt"; then
    if [ ! -f "$dir/build.ninja" ]; then rm -rf "$dir/CMakeCache.txt" "$dir/CMakeFiles"; fi # a failed attempt
    quietly "Configuring $preset" cmake --preset "$preset" "-DTANDEM_WERROR=$werror" || return 1
  fi
  quietly "Building $preset" cmake --build --preset "$preset" -j "$(jobs_at_once)" ${1:+--target "$@"}
}

# ---- NVRTC, which compiles a GPU kernel before its first use ----
NVRTC='nvidia-cuda-nvrtc==13.0.88' NVRTC_CUDA_12='nvidia-cuda-nvrtc-cu12==12.9.86'

has_gpu() { [ -e /dev/nvidiactl ]; }

# Returns true if the engine finds NVRTC without help (src/jit/nvrtc.h).
has_nvrtc() {
  [ -z "${TANDEM_NVRTC:-}" ] || return 0
  compgen -G "${VIRTUAL_ENV:-/nowhere}/lib/python*/site-packages/nvidia/*/lib/libnvrtc.so.1[2-9]" >/dev/null ||
    compgen -G "${CONDA_PREFIX:-/nowhere}/lib/libnvrtc.so.1[2-9]" >/dev/null ||
    compgen -G "${CUDA_HOME:-/usr/local/cuda}/lib64/libnvrtc.so.1[2-9]" >/dev/null
}

# Installs the wheel of NVRTC into build/nvrtc if the machine has no NVRTC, and sets VIRTUAL_ENV. The command searches
# there, too. Returns 1 on failure.
nvrtc_environment() {
  local venv=$PWD/build/nvrtc wheel=$NVRTC
  has_nvrtc && return 0
  if nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12'; then wheel=$NVRTC_CUDA_12; fi
  if [ "$(cat "$venv/wheel" 2>/dev/null)" != "$wheel" ]; then
    rm -rf "$venv"
    (install_packages "$NVRTC_PACKAGES") || return 1
    quietly "Installing NVRTC" bash -c "python3 -m venv '$venv' && '$venv/bin/pip' install '$wheel'" || return 1
    printf '%s\n' "$wheel" >"$venv/wheel"
  fi
  export VIRTUAL_ENV=$venv
}

# ---- nvdisasm, the disassembler of compiled kernels ----
NVDISASM='nvidia-cuda-nvdisasm==13.5.37'

# Installs the wheel of nvdisasm into build/nvdisasm if the machine has none, and sets TANDEM_NVDISASM. Returns 1 on
# failure.
nvdisasm_program() {
  local venv=$PWD/build/nvdisasm
  [ -z "${TANDEM_NVDISASM:-}" ] || return 0
  if command -v nvdisasm >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvdisasm" ] ||
    compgen -G "${VIRTUAL_ENV:-/nowhere}/lib/python*/site-packages/nvidia/*/bin/nvdisasm" >/dev/null ||
    compgen -G "${CONDA_PREFIX:-/nowhere}/lib/python*/site-packages/nvidia/*/bin/nvdisasm" >/dev/null; then
    return 0
  fi
  if [ "$(cat "$venv/wheel" 2>/dev/null)" != "$NVDISASM" ]; then
    rm -rf "$venv"
    (install_packages "$NVRTC_PACKAGES") || return 1
    quietly "Installing nvdisasm" bash -c "python3 -m venv '$venv' && '$venv/bin/pip' install '$NVDISASM'" || return 1
    printf '%s\n' "$NVDISASM" >"$venv/wheel"
  fi
  TANDEM_NVDISASM=$(compgen -G "$venv/lib/python*/site-packages/nvidia/*/bin/nvdisasm") || return 1
  export TANDEM_NVDISASM
}

loudly() { # <sentence>
  local line
  line=$(printf '%*s' $((${#1} + 8)) '' | tr ' ' '*')
  printf '\n%s\n**  %s  **\n%s\n\n' "$line" "$1" "$line"
}
