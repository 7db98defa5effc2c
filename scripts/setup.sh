#!/usr/bin/env bash
# Makes a machine ready to build hasten: compilers and libraries from the system's
# package manager, LibTorch, clang-format and clang-tidy from pip's index. Looks first, and
# touches nothing that is there; a second run takes a second.
#
#   scripts/setup.sh           LibTorch for the CPU, 0.2 to 0.6 GB to fetch
#   scripts/setup.sh --cuda    LibTorch for GPUs and NVIDIA's libraries, 2 GB to fetch, 4 GB on disk
#
#   HASTEN_TORCH=<folder with include/ and lib/>   use this LibTorch, fetch none
#   HASTEN_CACHE=<folder>                          instead of ~/.cache/hasten
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

torch_version=2.13.0
clang_version=18.1.8

cuda=''
while (($#)); do
  case $1 in
    --cuda) cuda=cuda ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done

# Prints the Debian packages that are missing, judged by what they bring, so that
# things installed in another way count.
missing_packages() {
  local headers='' name header carried=$root/.deps/include
  command -v "${CXX:-c++}" >/dev/null || echo g++
  command -v git >/dev/null || echo git
  command -v ninja >/dev/null || echo ninja-build
  command -v ccache >/dev/null || echo ccache
  command -v pkg-config >/dev/null || echo pkg-config
  command -v flock >/dev/null || echo util-linux
  local cmake_version
  cmake_version=$({ cmake --version 2>/dev/null || true; } | awk 'NR == 1 { print $3 }')
  if [[ $(printf '%s\n' 3.25 "${cmake_version:-0}" | sort -V | head -n1) != 3.25 ]]; then
    echo cmake
  fi
  if ! python3 -c 'import importlib.util as u; u.find_spec("pip") or exit(1)' 2>/dev/null; then
    echo python3-pip
  fi
  local -A brings=(
    [libgtest-dev]=gtest/gtest.h
    [nlohmann-json3-dev]=nlohmann/json.hpp
    [libcli11-dev]=CLI/CLI.hpp
    [libutf8proc-dev]=utf8proc.h
    [libonig-dev]=oniguruma.h
    [libsodium-dev]=sodium.h
    [libjemalloc-dev]=jemalloc/jemalloc.h
    [libxxhash-dev]=xxhash.h
    [zlib1g-dev]=zlib.h
    [libcurl4-openssl-dev]=curl/curl.h
  )
  command -v "${CXX:-c++}" >/dev/null || { echo "${!brings[@]}" | tr ' ' '\n'; return; }
  for name in "${!brings[@]}"; do
    header=${brings[$name]}
    headers+="#if !__has_include(<$header>)"$'\n'"MISSING $name"$'\n#endif\n'
  done
  "${CXX:-c++}" -std=c++20 -isystem "$carried" -E -P -x c++ - <<<"$headers" | awk '$1 == "MISSING" { print $2 }'
}

check_compiler() {
  local compiler=${CXX:-c++} probe='int main() { auto f = []<class T>(T x) { return x; }; return f(0); }'
  "$compiler" -std=c++20 -fsyntax-only -x c++ - <<<"$probe" 2>/dev/null ||
    die "$compiler cannot compile C++20. Install g++ 12 or newer, or set CXX to it."
}

# Versions of clang-format and clang-tidy differ in taste, so those that the tree passes are pinned.
# fetch_clang NAME [PART]: a part of the wheel's data, else all: clang-tidy has its own headers.
fetch_clang() {
  local target=$cache/$1-$clang_version data=${1/-/_}/data work
  [[ -x $target ]] && return
  work=$(mktemp -d "$cache/.tmp-$1-XXXXXX")
  say "fetching $1 $clang_version"
  pip_fetch "$work" "$1==$clang_version"
  unzip_parts "$work"/*.whl "$work" "$data/"
  chmod +x "$work/$data/bin/$1"
  mv "$work/$data${2:+/$2}" "$target"
  rm -rf "$work"
}

# The headers of CUDA's run time, 5 MB, so that a test can compile what CUDA needs on any machine.
fetch_cuda_headers() {
  local target=$cache/cuda-headers-13.0 work
  [[ -d $target ]] && return
  work=$(mktemp -d "$cache/.tmp-cuda-headers-XXXXXX")
  say "fetching the headers of CUDA 13.0"
  fetch_cuda "$work" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
    nvidia-cuda-crt==13.0.88
  mv "$work" "$target"
}

missing=$(missing_packages)
if [[ -n $missing ]]; then
  mapfile -t needed <<<"$missing"
  install_packages "${needed[@]}"
  missing=$(missing_packages)
  [[ -z $missing ]] || die "still missing after the installation: ${missing//$'\n'/ }"
fi
check_compiler
if [[ -n ${HASTEN_TORCH:-} ]]; then
  torch=$HASTEN_TORCH
  needed=(lib/libtorch_cpu.so include/torch ${cuda:+lib/libtorch_cuda.so})
  for part in "${needed[@]}"; do
    [[ -e $torch/$part ]] || die "HASTEN_TORCH=$torch has no $part."
  done
else
  torch=libtorch${cuda:+-cuda}
  with_cache_lock fetch_torch "$torch_version" "$torch" $cuda
  torch=$cache/$torch
fi
with_cache_lock fetch_clang clang-format bin/clang-format
with_cache_lock fetch_clang clang-tidy
[[ -n $cuda ]] || with_cache_lock fetch_cuda_headers
say "ready: LibTorch in $torch"
[[ -z $cuda ]] || say "Give it to CMake: cmake --preset release -DHASTEN_TORCH=$torch"
