#!/usr/bin/env bash
# Writes the documentation site to build/site: the pages of docs/ and a reference of the
# public headers, with a search field. Doxygen makes it, in the style of doxygen-awesome.
# Both are packages of Debian 12, which apt-get installs if they are missing. A warning of
# Doxygen or a link that leads nowhere is an error.
#
#   scripts/site.sh && xdg-open build/site/index.html
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# These two versions fit together.
doxygen_version=1.9.4
style_package=doxygen-awesome-css=2.1.0-2
style=/usr/share/doxygen-awesome-css

missing=()
command -v doxygen >/dev/null || missing+=(doxygen)
[[ -f $style/doxygen-awesome.css ]] || missing+=("$style_package")
((${#missing[@]} == 0)) || install_packages "${missing[@]}"

# Another version's new warnings should stop nobody.
on_warning=NO
[[ $(doxygen --version) != "$doxygen_version"* ]] || on_warning=FAIL_ON_WARNINGS

work=$root/build/site_input
rm -rf "$work" "$root/build/site"
mkdir -p "$work"
"$root/scripts/site_pages.py" "$work"
cp "$style"/doxygen-awesome{,-sidebar-only}.css "$root/docs/site/site.css" "$work"
(cd "$work" && doxygen - <<<"$(cat "$root/docs/site/Doxyfile")
WARN_AS_ERROR = $on_warning")
"$root/scripts/site_pages.py" --finish "$work"
mv "$work/html" "$root/build/site"
say "the site is in build/site: open build/site/index.html"
