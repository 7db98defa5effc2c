#!/usr/bin/env bash
# Builds the lower layers with sanitizers and runs their tests: base, launch, core, comm,
# io and data with those of addresses and undefined behaviour, the threads of comm and of
# the loader with that of data races. Ends with 0 if nothing was found.
#
#   scripts/sanitize.sh [asan|tsan]          one of them; without, both
#   scripts/sanitize.sh --all [asan|tsan]    all parts but the command line; not in CI, it takes long
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# What --all builds: the lower layers and those above them.
parts='base;launch;core;comm;io;data;flat;metrics;optim;models;parallel;amp'
parts+=';activation_checkpoint;accumulation;accelerator;trainer'
# The tests that kill ranks hold them to seconds, which ranks do not keep here.
threads='Liveness.*:Handshake.*:*Loader*:*Prefetch*:*Workers*:*Cache*'

# LibTorch is not built with sanitizers: what it keeps to its end is no leak of ours, and
# atomics that order its own threads are not seen. Nor is the call by which this compiler's
# timed_mutex waits; the tests alone have one.
options() {
  local suppressions=$1/suppressions.txt
  printf 'leak:%s\n' libtorch_cpu.so libc10.so libgomp.so >"$suppressions"
  printf '%s\n' race:{libtorch_cpu,libc10,libgomp}.so mutex:std::timed_mutex \
    >"$1/races.txt"
  export ASAN_OPTIONS=detect_container_overflow=0:detect_odr_violation=0:allocator_may_return_null=1
  export LSAN_OPTIONS=suppressions=$suppressions:print_suppressions=0
  export UBSAN_OPTIONS=print_stacktrace=1
  export TSAN_OPTIONS=suppressions=$1/races.txt:halt_on_error=1
  export OMP_NUM_THREADS=1
}

# run_tests TREE PROGRAM [FLAGS…]: says what failed.
run_tests() {
  local tree=$1 program=$2
  shift 2
  say "--- $(basename "$tree"): $program $*"
  # The thread sanitizer does not know every layout of addresses.
  setarch -R "$tree/bin/hasten_${program}_tests" "$@" >"$tree/$program.log" 2>&1 || {
    cat "$tree/$program.log" >&2
    die "hasten_${program}_tests failed in $tree"
  }
  tail -n 1 "$tree/$program.log" >&2
}

sanitize() {
  local kind=$1 all=$2 tree=$root/build/$1
  local targets=(hasten_unit_tests hasten_dist_tests)
  [[ $kind == tsan ]] || targets+=(hasten_plain_tests)
  (cd "$root" && cmake --preset "$kind" ${all:+"-DHASTEN_ONLY_PARTS=$parts"} >/dev/null)
  cmake --build "$tree" -j "$(compile_jobs)" --target "${targets[@]}"
  options "$tree"
  if [[ $kind == asan ]]; then
    run_tests "$tree" plain
    run_tests "$tree" unit --gtest_filter=-*MegabytesASecond
  else
    [[ -z $all ]] || threads='*'
    run_tests "$tree" unit "--gtest_filter=$threads"
  fi
  run_tests "$tree" dist --world 2
}

cd "$root"
all=''
[[ ${1:-} != --all ]] || { all=all && shift; }
for kind in ${1:-asan tsan}; do
  [[ $kind == asan || $kind == tsan ]] || die "usage: scripts/sanitize.sh [--all] [asan|tsan]"
  sanitize "$kind" "$all"
done
