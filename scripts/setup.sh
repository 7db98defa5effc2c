#!/usr/bin/env bash
# Makes a machine ready to build hasten: compilers and libraries from the system's
# package manager, LibTorch and clang-format from pip's index. Looks first, and
# touches nothing that is there; a second run takes a second.
#
#   HASTEN_TORCH=<folder with include/ and lib/>   use this LibTorch, fetch none
#   HASTEN_CACHE=<folder>                          instead of ~/.cache/hasten
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

torch_version=2.13.0
clang_format_version=18.1.8
# What the CUDA build of that torch pins; see fetch_torch.
cuda_wheels=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)

# Prints the Debian packages that are missing, judged by what they bring, so that
# things installed in another way count.
missing_packages() {
  local headers='' name header
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
    [libsodium-dev]=sodium.h
    [libjemalloc-dev]=jemalloc/jemalloc.h
    [libxxhash-dev]=xxhash.h
  )
  command -v "${CXX:-c++}" >/dev/null || { echo "${!brings[@]}" | tr ' ' '\n'; return; }
  for name in "${!brings[@]}"; do
    header=${brings[$name]}
    headers+="#if !__has_include(<$header>)"$'\n'"MISSING $name"$'\n#endif\n'
  done
  "${CXX:-c++}" -std=c++20 -E -P -x c++ - <<<"$headers" | awk '$1 == "MISSING" { print $2 }'
}

check_compiler() {
  local compiler=${CXX:-c++} probe='int main() { auto f = []<class T>(T x) { return x; }; return f(0); }'
  "$compiler" -std=c++20 -fsyntax-only -x c++ - <<<"$probe" 2>/dev/null ||
    die "$compiler cannot compile C++20. Install g++ 12 or newer, or set CXX to it."
}

torch_is_at() {
  local header=$1/include/torch/headeronly/version.h
  [[ -f $1/lib/libtorch_cpu.so && -f $header ]] &&
    [[ $(awk '/define TORCH_VERSION_(MAJOR|MINOR|PATCH) / { v = v sep $3; sep = "." }
              END { print v }' "$header") == "$2" ]]
}

# LibTorch is what the pip wheel holds; any local Python can fetch it, and nothing of
# Python is linked or run afterwards. The index may serve a CUDA build, whose
# libtorch_cpu.so needs two CUDA libraries even on a machine without a GPU: they are
# fetched too and lie next to it.
fetch_torch() {
  torch_is_at "$cache/libtorch" "$torch_version" && return
  local machine work wheel key needed requirement minor platforms=()
  machine=$(uname -m)
  for minor in {17..28}; do
    platforms+=(--platform "manylinux_2_${minor}_$machine")
  done
  work=$(mktemp -d "$cache/.tmp-torch-XXXXXX")
  say "fetching LibTorch $torch_version into $cache (200 to 600 MB, once)"
  pip_fetch "$work/wheel" "torch==$torch_version" --implementation cp \
    --python-version 3.11 --abi cp311 --platform "manylinux_2_28_$machine"
  wheel=$(echo "$work"/wheel/torch-*.whl)
  key=libtorch-$(sha256 "$wheel" | cut -c1-16)
  unzip_parts "$wheel" "$work/unpacked" torch/include/ torch/lib/ torch/share/ \
    "$(wheel_licences "$wheel")"
  rm -r "$work/wheel"
  needed=$(readelf -d "$work/unpacked/torch/lib/libtorch_cpu.so" | grep NEEDED || true)
  if grep -qE 'libcudart|libcupti' <<<"$needed"; then
    say "this LibTorch was built for CUDA: fetching the two libraries its CPU part needs"
    for requirement in "${cuda_wheels[@]}"; do
      pip_fetch "$work/cuda" "$requirement" --implementation py --python-version 3 \
        --abi none "${platforms[@]}"
    done
    for wheel in "$work"/cuda/*.whl; do
      unzip_parts "$wheel" "$work/nvidia" nvidia/
    done
    find "$work/nvidia" -name 'lib*.so.*' -path '*/lib/*' \
      -exec mv -t "$work/unpacked/torch/lib" {} +
  fi
  if ldd "$work/unpacked/torch/lib/libtorch_cpu.so" | grep 'not found' >&2; then
    die "LibTorch from pip needs the libraries above. Point HASTEN_TORCH at a LibTorch of your own."
  fi
  torch_is_at "$work/unpacked/torch" "$torch_version" ||
    die "the package index served another torch than $torch_version."
  # Two renames, each atomic: what others see is complete or absent.
  rm -rf "${cache:?}/$key"
  mv "$work/unpacked" "$cache/$key"
  ln -s "$key/torch" "$work/libtorch"
  mv -T "$work/libtorch" "$cache/libtorch"
  rm -rf "$work"
}

# Versions of clang-format differ in taste, so the one that the tree is formatted
# with is pinned.
fetch_clang_format() {
  local target=$cache/clang-format-$clang_format_version work
  [[ -x $target ]] && return
  work=$(mktemp -d "$cache/.tmp-clang-format-XXXXXX")
  say "fetching clang-format $clang_format_version"
  pip_fetch "$work" "clang-format==$clang_format_version"
  unzip_parts "$work"/*.whl "$work" clang_format/data/bin/
  chmod +x "$work/clang_format/data/bin/clang-format"
  mv "$work/clang_format/data/bin/clang-format" "$target"
  rm -rf "$work"
}

packages=$(missing_packages)
if [[ -n $packages ]]; then
  mapfile -t packages <<<"$packages"
  install_packages "${packages[@]}"
  packages=$(missing_packages)
  [[ -z $packages ]] || die "still missing after the installation:" $packages
fi
check_compiler
if [[ -n ${HASTEN_TORCH:-} ]]; then
  [[ -f $HASTEN_TORCH/lib/libtorch_cpu.so && -d $HASTEN_TORCH/include/torch ]] ||
    die "HASTEN_TORCH=$HASTEN_TORCH has no lib/libtorch_cpu.so or include/torch."
else
  with_cache_lock fetch_torch
fi
with_cache_lock fetch_clang_format
say "ready: LibTorch in ${HASTEN_TORCH:-$cache/libtorch}"
