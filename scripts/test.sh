#!/usr/bin/env bash
# Sets the machine up, checks the sources, builds everything with warnings as errors
# and runs the tests. Prints the CPU minutes of each part, and fails above a limit (tools/cpu_minutes.py).
# Ends on ctest's closing lines; exits with 0 if all is well.
#
#   scripts/test.sh                      what a change must pass; adds its CPU minutes to
#                                        benchmarks/results/check.csv. As --whole, if benchmarks,
#                                        examples or the scripts of the demo differ from .whole
#   scripts/test.sh --quick              minutes after a change of one file: builds all, and runs the
#                                        tests of one process and of two ranks
#   scripts/test.sh --whole              also what a release needs: each benchmark, the demo with a
#                                        model, an example as a project
#   scripts/test.sh [ctest options…]     e.g. -R trainer, -L unit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tree=$root/build/release
report=$tree/ctest.xml
minutes=$tree/cpu_seconds
phases=()

# Sets children to the CPU seconds of the processes that this one has waited for.
count_children() {
  times >"$tree/times" # not in a subshell, which has no children
  children=$(awk -F'[ms ]+' 'END { print $1 * 60 + $2 + $3 * 60 + $4 }' "$tree/times")
}

# phase NAME COMMAND…: runs it and remembers the seconds it took.
phase() {
  local name=$1 start=$SECONDS before children
  shift
  count_children
  before=$children
  say "--- $name"
  "$@" || die "$name failed"
  phases+=("$name $((SECONDS - start)) s")
  count_children
  awk -v name="$name" -v seconds="$children" -v before="$before" \
    'BEGIN { printf "%s %.1f\n", name, seconds - before }' >>"$minutes"
}

check_sources() {
  local failed=0 check
  "$root/tools/format.sh" --check || failed=1
  "$root/tools/check_sizes.py" --chains || failed=1
  for check in layers tests words snippets places mapping; do
    "$root/tools/check_$check.py" || failed=1
  done
  "$root/tools/check_headers.py" --remember --jobs "$(compile_jobs)" || failed=1
  "$root/tools/check_tidy.py" --remember --jobs "$(compile_jobs)" || failed=1
  return $failed
}

run_ctest() {
  # World sizes above the cores are the rule here: two at a time, whatever nproc says.
  ctest --test-dir "$tree" -j2 --output-on-failure --no-tests=error \
    --test-output-size-passed 4194304 --output-junit "$report" "$@" 2>&1 |
    tee "$tree/ctest.log" && return
  say "--- what failed" # again, because a log that is cut in the middle keeps its end
  awk '/: Failure$|error: |^\[rank [0-9,\/]+\] [A-Z]/ { lines = 8 } lines-- > 0 || /^\[  FAILED  \]|\*\*\*/' "$tree/ctest.log" |
    cut -c1-300 | tail -n 120
  return 1
}

# What cpu_minutes.py measures the machine by.
compile_sample() {
  echo '#include <ATen/ATen.h>' | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - \
    -isystem "${HASTEN_TORCH:-$cache/libtorch}/include"
}

# Whether what only --whole runs differs from the commit in .whole, which has passed it.
scripts_have_changed() {
  ! git diff --quiet "$(cat .whole)" -- benchmarks examples scripts/{bench,demo,packages}'*' \
    tests/install cmake 2>/dev/null
}

closing_lines() {
  awk '/tests passed,|tests failed out of/ { found = 1 } found' "$tree/ctest.log"
}

cd "$root"
record=()
case ${1:-} in
  '')
    record=(--append benchmarks/results/check.csv)
    if scripts_have_changed; then
      set -- -C whole
    fi
    ;;
  --quick) shift && set -- -L quick "$@" ;;
  --whole) shift && set -- -C whole "$@" ;;
esac
mkdir -p "$tree"
: >"$minutes"
phase set-up "$root/scripts/setup.sh"
phase sample compile_sample
phase checks check_sources
phase "build of the programs" build_release hasten hasten-worker
phase "build of the tests" build_release all
phase tests run_ctest "$@"
phase report "$root/tools/test_report.py" "$report"
if [[ $* == "-C whole" && -z $(git status --porcelain --untracked-files=normal -- . :!.headers :!.tidy) ]]; then
  git rev-parse HEAD >.whole
  say "--- .whole names $(cat .whole): commit it"
fi
((${#record[@]})) && phase sanitizers "$root/scripts/sanitize.sh"
"$root/tools/cpu_minutes.py" report "$minutes" "${record[@]}" >&2 || die "too many CPU minutes"
say "--- seconds: $(printf '%s, ' "${phases[@]}" | sed 's/, $//')"
if command -v ccache >/dev/null; then
  say "--- $(ccache --show-stats 2>/dev/null | awk '/Hits:/ { print "ccache hits " $2 " of " $4; exit }')"
fi
closing_lines
