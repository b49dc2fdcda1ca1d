#!/usr/bin/env bash
# Runs run.sh and then every command that it prints on a bare Debian 12, which debootstrap installs into a new root folder.
# If debootstrap cannot run, the commands run here, with an empty environment, a new home and no pip.
#
#   scripts/bare_root.sh [--here]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

# CC and CXX have CMake's names of the compilers, so that ccache finds the wheel's objects.
readonly kCommands='./run.sh && scripts/next_steps.sh --commands >build/next_steps && bash -eux build/next_steps'
here=$PWD root=$PWD/build/bare-root

# Prints variables that every root needs: proxies and certificates of package servers, the rules of ccache, and the
# language, which ccache hashes.
kept_variables() { env | grep -iE '^(http|https|no)_proxy=|^PIP_|^(SSL|CURL|REQUESTS)_[A-Z_]*=|^CCACHE_|^LANG=|^LC_' || true; }

make_root() {
  (install_packages "$BARE_ROOT_PACKAGES") || return 1
  rm -rf --one-file-system "$root"
  quietly "Making a bare Debian 12" debootstrap --variant=minbase bookworm "$root" || return 1
  mkdir -p "$root$here"
  tar -c --exclude=./build --exclude=./.git . | tar -x -C "$root$here"
  cp /etc/resolv.conf "$root/etc/"
  mkdir -p "$root/etc/ssl" "$root/ccache"
  if [ -d /etc/ssl/certs ]; then cp -rL /etc/ssl/certs "$root/etc/ssl/" 2>/dev/null || true; fi
  # The package ca-certificates, which apt installs later, builds its list from these files.
  mkdir -p "$root/usr/local/share/ca-certificates"
  cp -L /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
  trap 'umount -l "$root/ccache" "$root/proc" 2>/dev/null || true' EXIT
  mount -t proc proc "$root/proc" || return 1
}

# Objects that this checkout's build has compiled come from its ccache, which the root sees under the same paths.
share_ccache() {
  command -v ccache >/dev/null && mount --bind "$(ccache -k cache_dir)" "$root/ccache" 2>/dev/null || return 1
  quietly "Installing ccache in the bare root" chroot "$root" sh -c 'apt-get update && apt-get install -y ccache'
}

in_root() {
  local variables
  mapfile -t variables < <(kept_variables)
  if share_ccache; then variables+=(CCACHE_DIR=/ccache); fi
  env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin CC=cc CXX=c++ "${variables[@]}" chroot "$root" bash -c "cd '$here' && $kCommands"
}

# Hides every program of the system except pip and python; python3 stays, because Debian's packages depend on it.
in_this_root() {
  local home variables
  home=$(mktemp -d)
  mkdir "$home/bin"
  find /usr/sbin /usr/bin /sbin /bin -maxdepth 1 \( -type f -o -type l \) ! -name 'pip*' ! -name python \
    -exec ln -sf -t "$home/bin" {} +
  mapfile -t variables < <(kept_variables)
  if command -v ccache >/dev/null; then variables+=(CCACHE_DIR="$(ccache -k cache_dir)"); fi
  env -i HOME="$home" PATH="$home/bin" CC=cc CXX=c++ "${variables[@]}" bash -c "$kCommands"
  rm -rf "$home"
}

if [ "${1:-}" != --here ] && [ "$(id -u)" = 0 ] && make_root; then
  say "In a bare root:"
  in_root
  umount -l "$root/ccache" "$root/proc" 2>/dev/null || true
  rm -rf --one-file-system "$root"
else
  say "In this root, with an empty environment:"
  in_this_root
fi
