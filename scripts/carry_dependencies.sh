#!/usr/bin/env bash
# Copies the headers and libraries that hasten is built with, LibTorch excepted, from this machine
# to .deps/ (7 MB), for a machine that has neither them nor a package index. CMake looks in .deps
# of hasten's sources first. Both machines must be alike: the same processor, no older glibc there.
#
#   scripts/carry_dependencies.sh                   into .deps
#   scripts/carry_dependencies.sh FOLDER            into FOLDER
#   scripts/carry_dependencies.sh --cuda 13.0.2     also the headers of that CUDA toolkit that
#                                                   pip does not install with torch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cuda='' target=$root/.deps
while (($#)); do
  case $1 in
    --cuda) cuda=${2:?--cuda needs the version of a CUDA toolkit} && shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    -*) die "unknown argument $1; see --help" ;;
    *) target=$1 ;;
  esac
  shift
done
compiler=${CXX:-c++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/deps/include" "$work/deps/lib" "$work/deps/share/cmake"

# folder_of HEADER: the include folder in which the compiler finds it.
folder_of() {
  local found
  found=$("$compiler" -std=c++20 -x c++ -M - <<<"#include <$1>" 2>/dev/null |
    tr -s ' \134' '\n' | awk -v end="/$1" 'substr($0, length - length(end) + 1) == end' | sort -u) || true
  [[ $found == /* && $found != *$'\n'* ]] || die "$compiler finds no $1. Run scripts/setup.sh."
  echo "${found%/"$1"}"
}

# carry_library NAME: the static one if it can become a part of libhasten.so, or else the shared
# one. Under two names, not with a link, which not every way to copy a folder keeps.
carry_library() {
  local file soname
  file=$("$compiler" -print-file-name="lib$1.a")
  if [[ $file == /* ]] && "$compiler" -shared -o "$work/probe.so" \
    -Wl,--whole-archive "$file" -Wl,--no-whole-archive 2>/dev/null; then
    cp -L "$file" "$work/deps/lib/"
    return
  fi
  file=$("$compiler" -print-file-name="lib$1.so")
  [[ $file == /* ]] || die "$compiler finds no lib$1. Run scripts/setup.sh."
  soname=$(readelf -d "$file" | sed -n 's/.*SONAME.*\[\(.*\)\].*/\1/p')
  cp -L "$file" "$work/deps/lib/lib$1.so"
  cp -L "$file" "$work/deps/lib/$soname"
}

# carry_package NAME HEADER: the CMake package of a library that is headers alone.
carry_package() {
  local prefix folder
  prefix=$(dirname "$(folder_of "$2")")
  for folder in "$prefix"/{share,lib,lib64}/cmake/"$1"; do
    [[ ! -d $folder ]] || { cp -rL "$folder" "$work/deps/share/cmake/" && return; }
  done
  die "$prefix has no CMake package $1."
}

for header in nlohmann/json.hpp CLI/CLI.hpp gtest/gtest.h sodium.h utf8proc.h xxhash.h \
  oniguruma.h jemalloc/jemalloc.h zlib.h zconf.h curl/curl.h; do # libcurl is loaded if it is there
  from=$(folder_of "$header")
  parts=("$from/$header")
  [[ $header != */* ]] || parts=("$from/${header%%/*}")
  [[ $header != sodium.h ]] || parts+=("$from/sodium")
  cp -rL "${parts[@]}" "$work/deps/include/"
done
carry_package nlohmann_json nlohmann/json.hpp
carry_package CLI11 CLI/CLI.hpp
for library in sodium jemalloc utf8proc onig xxhash z gtest; do
  carry_library "$library"
done
if [[ -n $cuda ]]; then
  fetch_cuda "$work/cuda" "cuda-toolkit[crt,cccl]==$cuda"
  for part in crt nv; do
    from=$(find "$work/cuda/nvidia" -type d -path "*/include/*" -name "$part" | head -n1)
    cp -r "$from" "$work/deps/include/"
  done
fi
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/deps" "$target"
say "$(du -sm "$target" | cut -f1) MB in $target"
