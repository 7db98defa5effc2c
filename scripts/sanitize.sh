#!/usr/bin/env bash
# Builds the lower layers (`lower` below) with sanitizers and runs their tests. asan finds wrong
# addresses and undefined behaviour. tsan finds data races in the threads of comm and of the
# data. Ends with 0 if nothing was found.
#
#   scripts/sanitize.sh                      both, if these parts changed since the commit
#                                            that .sanitized names; nothing otherwise. Then
#                                            it writes .sanitized
#   scripts/sanitize.sh --changed            says which files did; ends with 1 if none did
#   scripts/sanitize.sh asan|tsan            one of them, whatever changed
#   scripts/sanitize.sh --all [asan|tsan]    all parts but the command line; not in CI, it
#                                            takes long
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

lower=(base config launch core comm io data text)
# What --all builds: the lower layers and those above them.
parts=$(IFS=';' && echo "${lower[*]}")
parts+=';tracking;report;flat;metrics;state;optim;exported;models;loader;parallel;amp'
parts+=';activation_checkpoint;accumulation;accelerator;local_sgd;trainer'
# The tests that kill ranks hold them to seconds, which ranks do not keep here.
threads='TransferQueue.*:Liveness.*:Handshake.*:*Loader*:*Prefetch*:*Workers*:*Cache*'

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
  export TSAN_OPTIONS=suppressions=$1/races.txt:halt_on_error=1:allocator_may_return_null=1
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
    run_tests "$tree" plain --gtest_filter=-*MegabytesASecond
    run_tests "$tree" unit --gtest_filter=-*MegabytesASecond
  else
    # libgomp's barriers are not seen: no cases that run kernels on several threads. Nor
    # one that takes minutes in a single thread.
    [[ -z $all ]] || threads='*:-*MegabytesASecond:*Threads*:Autocast.Backward*:Jsonl.LinesAre*'
    run_tests "$tree" unit "--gtest_filter=$threads"
  fi
  run_tests "$tree" dist --world 2
}

# Prints the files that the runs without --all depend on and that differ from the commit in
# .sanitized, committed or not. "everything" where that commit is not known here.
changed_files() {
  local commit files part watched=(tests/support cmake/Sanitizers.cmake scripts/sanitize.sh)
  for part in "${lower[@]}"; do
    watched+=("include/hasten/$part" "src/$part" "tests/$part")
  done
  commit=$(cat .sanitized 2>/dev/null) &&
    files=$(git diff --name-only "$commit" -- "${watched[@]}" 2>/dev/null &&
      git ls-files --others --exclude-standard -- "${watched[@]}") || files=everything
  [[ -z $files ]] || printf '%s\n' "$files"
}

# What was run is what a commit holds, or no commit is named.
remember() {
  if [[ -n $(git status --porcelain --untracked-files=normal -- . :!.headers :!.whole) ]]; then
    say "--- .sanitized stays as it is: there are changes without a commit"
  else
    git rev-parse HEAD >.sanitized
    say "--- .sanitized names $(cat .sanitized): commit it"
  fi
}

cd "$root"
all='' kinds='asan tsan'
case ${1:-} in
  --changed)
    changed_files | grep .
    exit
    ;;
  --all) all=all && shift ;;
  '')
    if ! changed_files | grep . >/dev/null; then
      say "--- no part that sanitizers look at has changed since $(cat .sanitized)"
      exit
    fi
    ;;
esac
[[ -z ${1:-} ]] || kinds=$1
for kind in $kinds; do
  [[ $kind == asan || $kind == tsan ]] ||
    die "usage: scripts/sanitize.sh [--changed] [--all] [asan|tsan]"
  sanitize "$kind" "$all"
done
if [[ $kinds == 'asan tsan' ]]; then
  remember
fi
