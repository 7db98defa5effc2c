#!/usr/bin/env bash
# man_test.sh WORK PROGRAMS: makes the man pages of the programs in the folder WORK. Every command
# has a page with all flags of its help. groff renders each page without a warning.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$1 programs=$2

fail() {
  echo "failed: $*"
  exit 1
}

command -v groff >/dev/null || fail "groff is not installed: apt-get install groff"
rm -rf "$work"
mkdir -p "$work"
ln -s "$programs" "$work/bin"
"$root/scripts/man.sh" "$work"

# The page as a reader sees it, 80 columns wide.
shown() { gzip -dc "$work/man/$1.1.gz" | groff -man -Tascii -ww -rLL=80n -P-bcou 2>"$work/warnings"; }

flags() { grep -oE -- '(^|[ ,])--[a-z0-9-]*[a-z0-9]' | tr -d ' ,' | sort -u; }

commands=(train predict eval generate plan estimate-memory compare state tokenizer synth report
  launch env download export merge)
for command in '' "${commands[@]}"; do
  page=hasten${command:+-$command}
  [[ -f $work/man/$page.1.gz ]] || fail "$page has no page"
  shown "$page" >"$work/page"
  [[ ! -s $work/warnings ]] || fail "groff on $page: $(head -n3 "$work/warnings")"
  "$work/bin/hasten" $command --help >"$work/help"
  missing=$(comm -23 <(flags <"$work/help") <(flags <"$work/page"))
  [[ -z $missing ]] || fail "$page lacks" $missing
  for section in NAME SYNOPSIS 'EXIT STATUS' 'SEE ALSO'; do
    grep -qx "$section" "$work/page" || fail "$page has no $section"
  done
done
shown hasten >"$work/page"
grep -qE '^ +hasten-estimate-memory\(1\)' "$work/page" || fail "hasten(1) does not name its commands"
shown hasten-train >"$work/page"
grep -qE '^ +\$ hasten train ' "$work/page" ||
  fail "hasten-train(1) has no example"
(($(ls "$work/man" | wc -l) == ${#commands[@]} + 1)) || fail "other pages than expected: $(ls "$work/man")"

rm -rf "$work"
echo "the pages have every flag"
