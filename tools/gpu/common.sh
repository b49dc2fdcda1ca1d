# Common code of the scripts in this folder, which source it: refusals, folders, the commit, the compiler. The caller
# sets `here`, the folder of the project.
# shellcheck shell=bash
die() {
  printf '%s\n' "$*" >&2
  exit 2
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Prints the commit, or COMMIT if this is no checkout.
commit_of_build() {
  echo "${COMMIT:-$(git -C "$here" describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)}"
}

find_nvrtc() {
  {
    python3 -c 'import site, sys; print(*site.getsitepackages(), site.getusersitepackages(), *sys.path, sep="/nvidia\n")'
    printf '%s\n' "${CUDA_HOME:-/usr/local/cuda}/lib64" /usr/local/cuda/lib64
  } 2>/dev/null | while read -r folder; do
    [ ! -d "$folder" ] || find -L "$folder" -maxdepth 3 -name 'libnvrtc.so.1[0-9]' 2>/dev/null
  done | awk -F. '{ print $NF, NR, $0 }' | sort -k1,1nr -k2,2n | head -n 1 | cut -d' ' -f3-
}
# Keeps TANDEM_NVRTC if set, else uses the newest NVRTC of python3's site-packages, CUDA_HOME and /usr/local/cuda.
use_nvrtc() {
  export TANDEM_NVRTC=${TANDEM_NVRTC:-$(find_nvrtc)}
  [ -n "$TANDEM_NVRTC" ] || die "NVRTC must be installed: pip install nvidia-cuda-nvrtc, or set TANDEM_NVRTC to libnvrtc.so"
}
