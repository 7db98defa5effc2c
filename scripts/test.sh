#!/usr/bin/env bash
# Sets the machine up, checks the sources, builds everything with warnings as errors
# and runs every test. Ends on ctest's closing lines; exits with 0 if all is well.
#
#   scripts/test.sh [ctest options…]     e.g. -R trainer, -L unit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tree=$root/build/release
report=$tree/ctest.xml
phases=()

# phase NAME COMMAND…: runs it and remembers the seconds it took.
phase() {
  local name=$1 start=$SECONDS
  shift
  say "--- $name"
  "$@" || die "$name failed"
  phases+=("$name $((SECONDS - start)) s")
}

check_sources() {
  local failed=0 check
  "$root/tools/format.sh" --check || failed=1
  for check in layers sizes tests words snippets places mapping; do
    "$root/tools/check_$check.py" || failed=1
  done
  "$root/tools/check_headers.py" --jobs "$(compile_jobs)" || failed=1
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

closing_lines() {
  awk '/tests passed,|tests failed out of/ { found = 1 } found' "$tree/ctest.log"
}

cd "$root"
phase set-up "$root/scripts/setup.sh"
phase checks check_sources
phase build build_release all
phase tests run_ctest "$@"
phase report "$root/tools/test_report.py" "$report"
(($#)) || phase sanitizers "$root/scripts/sanitize.sh"
say "--- seconds: $(printf '%s, ' "${phases[@]}" | sed 's/, $//')"
if command -v ccache >/dev/null; then
  say "--- $(ccache --show-stats 2>/dev/null | awk '/Hits:/ { print "ccache hits " $2 " of " $4; exit }')"
fi
closing_lines
