#!/usr/bin/env bash
# Builds and runs programs that use hasten in each of the ways that there are: installed, with
# find_package() and with pkg-config, each with shared and with static libraries; and from
# sources, with add_subdirectory() and with FetchContent, which compile hasten twice.
#
#   scripts/consumers.sh               all of them
#   scripts/consumers.sh installed     find_package() and pkg-config only
#   scripts/consumers.sh sources       add_subdirectory() and FetchContent only
#   --from FOLDER                      install this build tree; default build/release
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

from='' ways=()
while (($#)); do
  case $1 in
    installed | sources) ways+=("$1") ;;
    --from) from=$(realpath "${2:?--from needs a folder}") && shift ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done
((${#ways[@]})) || ways=(installed sources)

work=$root/build/consumers
prefix=$work/moved
consumer=$root/tests/install/consumer
expected=$'[consumer::main] size=0. Expected 1 or more.\nsum 2'
libraries='' # LD_LIBRARY_PATH of the program

# check PROGRAM: what it prints, on one process and on two.
check() {
  local printed
  printed=$(LD_LIBRARY_PATH=$libraries "$1") || die "$1 ended with $?"
  [[ $printed == "$expected" ]] || die "$1 printed: $printed"
}

# configure SOURCE FOLDER option…
configure() {
  local source=$1 folder=$2
  shift 2
  cmake -S "$source" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; die "cmake could not configure $folder."; }
}

build() { cmake --build "$1" -j "$(compile_jobs)" --target "${@:2}"; }

installed() {
  local flags kind
  if [[ -z $from ]]; then
    build_release all
    from=$root/build/release
  fi
  rm -rf "$prefix" "$work/first"
  cmake --install "$from" --prefix "$work/first" >/dev/null
  mv "$work/first" "$prefix"

  say "--- find_package: shared and static"
  configure "$consumer" "$work/find_package" "-DCMAKE_PREFIX_PATH=$prefix" -DHASTEN_STATIC=ON
  build "$work/find_package" consumer consumer_static
  check "$work/find_package/consumer"
  check "$work/find_package/consumer_static"

  say "--- find_package with PATH alone, which has the programs of the installation"
  (PATH=$prefix/bin:$PATH configure "$consumer" "$work/path")

  say "--- find_package: the installed examples"
  configure "$prefix/share/doc/hasten/examples" "$work/examples" "-DCMAKE_PREFIX_PATH=$prefix"
  build "$work/examples" 03_accelerator
  "$prefix/bin/hasten" launch --nproc 2 "$work/examples/03_accelerator" \
    "$prefix/share/doc/hasten/examples/reviews.csv"

  say "--- pkg-config: shared and static"
  export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
  libraries=$prefix/lib
  for kind in '' _static; do
    read -ra flags < <(pkg-config --cflags --libs "hasten$kind")
    "${CXX:-c++}" -std=c++20 "$consumer/main.cpp" -o "$work/pkg_config$kind" "${flags[@]}"
    check "$work/pkg_config$kind"
  done
  if ldd "$work/pkg_config_static" | grep libhasten; then
    die "the static program needs libhasten.so"
  fi
  read -ra flags < <(pkg-config --cflags hasten_text)
  "${CXX:-c++}" -std=c++20 -O1 -c "$root/examples/03_accelerator.cpp" -o "$work/example.o" "${flags[@]}"
  for kind in '' _static; do
    read -ra flags < <(pkg-config --libs "hasten_text$kind")
    "${CXX:-c++}" "$work/example.o" -o "$work/example$kind" "${flags[@]}"
    LD_LIBRARY_PATH=$libraries "$prefix/bin/hasten" launch --nproc 2 "$work/example$kind" \
      "$root/examples/reviews.csv"
  done
  libraries=''
}

# Everything of hasten that the program needs is compiled, in few large units to save time.
sources() {
  local quick=(-DHASTEN_UNITY=ON -DHASTEN_PCH=ON -DHASTEN_CCACHE=ON)
  say "--- add_subdirectory"
  configure "$consumer" "$work/subfolder" "-DHASTEN_SOURCE=$root" "${quick[@]}"
  build "$work/subfolder" consumer
  check "$work/subfolder/consumer"
  say "--- FetchContent: the last commit of this repository"
  configure "$consumer" "$work/fetched" "-DHASTEN_GIT=file://$root" \
    "-DHASTEN_TAG=$(git -C "$root" rev-parse HEAD)" "${quick[@]}"
  build "$work/fetched" consumer
  check "$work/fetched/consumer"
}

rm -rf "$work"
mkdir -p "$work"
for way in "${ways[@]}"; do
  "$way"
done
rm -rf "$work"
say "every program was built and runs: ${ways[*]}"
