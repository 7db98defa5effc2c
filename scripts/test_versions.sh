#!/usr/bin/env bash
# Builds hasten and its tests with several releases of LibTorch, each in a folder of its own, and
# runs the tests of one process and two ranks of a training run with each. It prints a table and
# ends with 0 if all is well. Each release costs a whole build: half an hour on two cores.
#
#   scripts/test_versions.sh              the releases of `releases` below
#   scripts/test_versions.sh VERSION…     these, such as 2.12.1
#
# LibTorch comes from pip's index, as scripts/setup.sh fetches it: the CUDA build, where the index
# serves that. Nothing of CUDA runs. A build that passes is removed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The newest patch of each release from the oldest that CMakeLists.txt accepts.
releases=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)

case ${1:-} in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  -*) die "unknown argument $1; see --help" ;;
esac
(($#)) && releases=("$@")

# What the index has beyond the newest of `releases`.
newer_releases() {
  local newest
  newest=$(printf '%s\n' "${releases[@]}" | sort -V | tail -n1)
  { python3 -m pip index versions torch --disable-pip-version-check 2>/dev/null || true; } |
    sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep -v + | sort -V |
    awk -v newest="$newest" 'found { print } $0 == newest { found = 1 }'
}

# step NAME COMMAND…: runs it with its output in a log, and adds to `outcome`.
step() {
  local name=$1 start=$SECONDS
  shift
  say "--- LibTorch $version: $name"
  if ("$@") >"$tree/$name.log" 2>&1; then
    outcome+=" $name passed ($((SECONDS - start)) s) |"
  else
    tail -n 40 "$tree/$name.log" >&2
    outcome+=" $name failed |"
    return 1
  fi
}

try_release() {
  local name=torch-$version torch
  tree=$root/build/$name
  mkdir -p "$tree"
  torch_is_at "$cache/libtorch" "$version" && name=libtorch
  step fetch with_cache_lock fetch_torch "$version" "$name" || return
  torch=$cache/$name
  [[ -f $torch/lib/libtorch_cuda.so ]] && kind=CUDA || kind=CPU
  step configure cmake -S "$root" -B "$tree" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    "-DHASTEN_TORCH=$torch" -DHASTEN_EXAMPLES=OFF -DHASTEN_BENCHMARKS=OFF -DHASTEN_INSTALL=OFF ||
    return
  step build cmake --build "$tree" -j "$(compile_jobs)" || return
  step unit "$tree/bin/hasten_unit_tests" || return
  step plain "$tree/bin/hasten_plain_tests" || return
  step train "$tree/bin/hasten" train --model bert-tiny --nproc 2 --max-steps 4 \
    --output-dir "$tree/run" || return
}

failed=0
rows=()
for version in "${releases[@]}"; do
  outcome='' kind=''
  if try_release; then
    rm -rf "$tree"
  else
    failed=1
  fi
  rows+=("| $version | $kind |$outcome")
done
printf '%s\n' "${rows[@]}"
newer=$(newer_releases | paste -sd ' ')
[[ -z $newer ]] || say "The index also has $newer."
exit $failed
