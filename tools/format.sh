#!/usr/bin/env bash
# Formats the C++ files of the tree with the pinned clang-format; with --check only
# says which differ. Names may be given: tools/format.sh [--check] [FILE…]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"

mode=-i
if [[ ${1:-} == --check ]]; then
  mode=check
  shift
fi
formatter=$(find "$cache" -maxdepth 1 -name 'clang-format-[0-9]*' | sort -V | tail -n1)
[[ -x $formatter ]] || die "no clang-format in $cache. Run scripts/setup.sh."
files=("$@")
if ((!$#)); then
  mapfile -t files < <(cd "$root" && git ls-files -co --exclude-standard -- '*.h' '*.cpp')
fi
cd "$root"
if [[ $mode == -i ]]; then
  exec "$formatter" -i "${files[@]}"
fi
if ! "$formatter" --dry-run --Werror "${files[@]}" 2>/dev/null; then
  for file in "${files[@]}"; do
    "$formatter" --dry-run --Werror "$file" 2>/dev/null || say "$file: differs from tools/format.sh"
  done
  exit 1
fi
