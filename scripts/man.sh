#!/usr/bin/env bash
# Makes man pages of the programs' own help: hasten.1.gz, and hasten-train.1.gz and so on, one for
# each command. An installation has them if they are in the folder man of its build folder.
# Needs help2man.
#
#   scripts/man.sh build/release            makes build/release/man with build/release/bin/hasten
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

build=$(realpath "${1:?give a build folder; see scripts/man.sh}")
hasten=$build/bin/hasten
command -v help2man >/dev/null || die "help2man is not installed: apt-get install help2man"
[[ -x $hasten ]] || die "there is no $hasten"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The help in the form that help2man knows: headings of sections are between stars, the options are
# one section, commands of examples start with $ and have one line. The title is left out, because
# a page has it as its name.
for_help2man() {
  awk '
    NR == 1 { next }
    held != "" { sub(/^ +/, ""); $0 = held $0; held = "" }
    sub(/ \\$/, " ") { held = $0; next }
    /^  [a-z-]+$/ { held = $0 "  "; next }
    /^Commands:$/ { print "*Commands*\n"; commands = 1; next }
    /^Examples?:$/ { print "Examples:\n"; examples = 1; next }
    /^Results go to / { print "*Output*\n" }
    sub(/^Exit codes: /, "") { print "\n*Exit status*\n" }
    /^[A-Z].*:$/ && !options {
      print "Options:\n"
      options = 1
      commands = 0
      if ($0 == "Flags:") { next }
    }
    commands && sub(/^  [a-z-]+/, "&(1)") { sub(/^  /, "  hasten-") }
    examples && sub(/^  /, "  $ ") { }
    { print }
  '
}

# page NAME NAMES [COMMAND]: the help of hasten, or of one command. NAMES are those of the pages
# to see also. Words are not divided, so that what is copied is right.
page() {
  local title
  "$hasten" "${@:3}" --help >"$work/help"
  title=$(sed -n '1s/^[^:]*: *//p' "$work/help")
  for_help2man <"$work/help" >"$work/$1.txt"
  printf '#!/bin/sh\ncat "$0.txt"\n' >"$work/$1"
  chmod +x "$work/$1"
  printf '[see also]\n.BR %s (1)\n' "$2" >"$work/see"
  help2man --no-info --name="$title" --version-string="$version" --source="hasten $version" \
    --manual=hasten --include="$work/see" "$work/$1" |
    sed -e 's/^\.SH NAME$/.nh\n.ad l\n&/' -e '/^\\f(CW/s/-/\\-/g' | gzip -9n >"$work/man/$1.1.gz"
}

mkdir "$work/man"
version=$("$hasten" --version | sed 's/^hasten //')
mapfile -t commands < <("$hasten" --help | sed -n '/^Commands:$/,/^$/s/^  \([a-z-]\{1,\}\).*/\1/p')
((${#commands[@]})) || die "$hasten --help lists no commands"
page hasten hasten-train
for command in "${commands[@]}"; do
  page "hasten-$command" hasten "$command"
done
rm -rf "$build/man"
mv "$work/man" "$build/man"
chmod 755 "$build/man"
