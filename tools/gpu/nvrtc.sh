# To be sourced: TANDEM_NVRTC as it is, else the newest NVRTC of python3's site-packages, CUDA_HOME and /usr/local/cuda.
# shellcheck shell=bash
find_nvrtc() {
  {
    python3 -c 'import site, sys; print(*site.getsitepackages(), site.getusersitepackages(), *sys.path, sep="/nvidia\n")'
    printf '%s\n' "${CUDA_HOME:-/usr/local/cuda}/lib64" /usr/local/cuda/lib64
  } 2>/dev/null | while read -r folder; do
    [ ! -d "$folder" ] || find -L "$folder" -maxdepth 3 -name 'libnvrtc.so.1[0-9]' 2>/dev/null
  done | awk -F. '{ print $NF, NR, $0 }' | sort -k1,1nr -k2,2n | head -n 1 | cut -d' ' -f3-
}
export TANDEM_NVRTC=${TANDEM_NVRTC:-$(find_nvrtc)}
if [ -z "$TANDEM_NVRTC" ]; then
  echo "no NVRTC found: pip install nvidia-cuda-nvrtc, or set TANDEM_NVRTC to libnvrtc.so" >&2
  exit 2
fi
