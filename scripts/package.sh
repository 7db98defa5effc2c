#!/usr/bin/env bash
# Builds what people can install, and installs each where nothing else is and trains there.
# The packages are in build/packages. Uploads nothing.
#
#   scripts/package.sh               all of these
#   scripts/package.sh bundle        the .tar.gz and the Debian packages, tried in bare roots
#                                    of Debian (debootstrap, as root)
#   scripts/package.sh wheel         the wheel, tried in a new virtual environment
#   scripts/package.sh conan         conan create with the recipe; compiles everything
#   --build-only, --try-only         one half of it (bundle and wheel)
#   --suites "bookworm trixie"       the roots; these are the default
#   --mirror URL                     where debootstrap finds Debian
#   --roots FOLDER                   copies FOLDER/SUITE instead of calling debootstrap
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

suites='bookworm trixie' mirror=http://deb.debian.org/debian build_only='' try_only='' roots='' kinds=()
while (($#)); do
  case $1 in
    bundle | wheel | conan) kinds+=("$1") ;;
    --build-only) build_only=1 ;;
    --try-only) try_only=1 ;;
    --suites) suites=${2?--suites needs names} && shift ;;
    --mirror) mirror=${2:?--mirror needs an address} && shift ;;
    --roots) roots=$(realpath "${2:?--roots needs a folder}") && shift ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done
((${#kinds[@]})) || kinds=(bundle wheel conan)

packages=$root/build/packages
work=$root/build/package-work
licences=$root/build/licences
torch=${HASTEN_TORCH:-$cache/libtorch}
torch_version=$(sed -n 's/^torch_version=//p' "$root/scripts/setup.sh")
version=$(sed -n 's/^project(hasten VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")

# A model of 400 samples on two processes, then a prediction. No Python, no network.
train_there='
set -eu
cd "$(mktemp -d)"
hasten --version
hasten synth reviews --rows 400 --output reviews.csv
hasten train --model bert-tiny --train-file reviews.csv --text-column text \
  --label-column label --eval-split 0.2 --num-train-epochs 1 --nproc 2 --output-dir out
hasten predict --model out "The zip is anything but flimsy."
test -s out/model.safetensors
'

configure_and_build() { # FOLDER option…
  local folder=$1 target=${target:-all}
  shift
  cmake -S "$root" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHASTEN_TESTS=OFF \
    -DHASTEN_EXAMPLES=OFF -DHASTEN_BENCHMARKS=OFF "-DHASTEN_LICENCES=$licences" \
    "-DHASTEN_WERROR=$(werror)" "$@" \
    >"$work/configure.log" 2>&1 || { cat "$work/configure.log" >&2; die "cmake could not configure."; }
  cmake --build "$folder" -j "$(compile_jobs)" --target $target
}

# What a GPU needs is built against LibTorch's CUDA build. hasten loads it where torch is one.
build_cuda_modules() { # KIND
  "$root/scripts/setup.sh" --cuda
  target='hasten_nccl hasten_cuda_graph' configure_and_build "$root/build/package-cuda" \
    "-DHASTEN_PACKAGE=$1" "-DHASTEN_TORCH=$cache/libtorch-cuda" -DHASTEN_CUDA=ON \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
  cuda_modules=$root/build/package-cuda/src
}

# The licences of what comes along or is compiled in: Debian's files, those of torch's wheel,
# and Intel's for the MKL in LibTorch, which torch's wheel leaves out.
collect_licences() {
  local package file found
  rm -rf "$licences"
  mkdir -p "$licences"
  for package in libsodium libutf8proc libonig libxxhash libjemalloc zlib1g nlohmann-json3 libcli11; do
    file=/usr/share/doc/$package-dev/copyright
    [[ -f $file ]] || die "there is no $file. The packages need the licences of what they hold."
    cp "$file" "$licences/${package#lib}.txt"
  done
  cp -L /usr/share/doc/libgomp1/copyright "$licences/gomp.txt"
  found=$(find "$(realpath "$torch")/.." -maxdepth 2 -type d -path '*/torch-*.dist-info/licenses' | head -n1)
  if [[ -z $found ]]; then # LibTorch was fetched without them
    pip_fetch "$work/torch" "torch==$torch_version" --implementation cp --python-version 3.11 \
      --abi cp311 --platform "manylinux_2_28_$(uname -m)"
    file=$(echo "$work"/torch/torch-*.whl)
    unzip_parts "$file" "$work/torch" "$(wheel_licences "$file")"
    found=$work/torch/$(wheel_licences "$file")
  fi
  cp -r "$found" "$licences/torch"
  if [[ $(uname -m) == x86_64 ]]; then
    pip_fetch "$work/mkl" onemkl-license
    unzip_parts "$work"/mkl/*.whl "$work/mkl" onemkl
    cp "$work"/mkl/*.dist-info/LICENSE.txt "$licences/oneMKL.txt"
    cp "$work"/mkl/*/data/share/doc/mkl/licensing/third-party-programs.txt \
      "$licences/oneMKL-third-party.txt"
  fi
}

build_bundle() {
  build_cuda_modules bundle
  configure_and_build "$root/build/package" -DHASTEN_PACKAGE=bundle \
    "-DHASTEN_CUDA_MODULES=$cuda_modules"
  command -v help2man >/dev/null || install_packages help2man
  "$root/scripts/man.sh" "$root/build/package"
  rm -f "$packages"/hasten*.tar.gz* "$packages"/hasten*.deb*
  cpack --config "$root/build/package/CPackConfig.cmake" -B "$packages" >"$work/cpack.log" 2>&1 ||
    { cat "$work/cpack.log" >&2; die "cpack failed."; }
  rm -rf "$packages/_CPack_Packages"
}

# in_root ROOT COMMAND…: in a process tree and with mounts of its own, which end with it.
in_root() {
  local place=$1
  shift
  unshare --mount --pid --fork --kill-child bash -c '
    mount -t proc proc "$0/proc"
    exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C "$@"
  ' "$place" "$@"
}

# Each suite has one root. The archive is tried before the packages are installed.
try_bundle() {
  local suite place package
  [[ -n $roots ]] || command -v debootstrap >/dev/null ||
    die "there is no debootstrap: apt-get install debootstrap"
  for suite in $suites; do
    place=$work/$suite
    rm -rf "$place"
    say "--- a bare root of $suite"
    if [[ -n $roots ]]; then
      cp -a "$roots/$suite" "$place"
    else
      debootstrap --variant=minbase "$suite" "$place" "$mirror" >"$work/debootstrap.log" 2>&1 ||
        { tail -n 20 "$work/debootstrap.log" >&2; die "debootstrap $suite failed."; }
    fi
    say "--- $suite: the .tar.gz"
    mkdir "$place/opt/first"
    tar -C "$place/opt/first" -xf "$packages"/hasten-*.tar.gz
    mv "$place"/opt/first/hasten-* "$place/opt/moved"
    in_root "$place" bash -c "PATH=/opt/moved/bin:\$PATH; $train_there"
    [[ -s $place/opt/moved/share/man/man1/hasten-train.1.gz ]] || die "the .tar.gz has no man pages"
    rm -r "$place/opt/moved"
    say "--- $suite: the Debian package"
    cp "$packages"/hasten*.deb "$place/tmp"
    in_root "$place" bash -c 'apt-get update -qq
      apt-get install -y -qq --no-install-recommends /tmp/hasten_*.deb' >"$work/apt.log" 2>&1 ||
      { tail -n 20 "$work/apt.log" >&2; die "apt-get could not install hasten in $suite."; }
    in_root "$place" bash -c "$train_there"
    in_root "$place" bash -c 'hasten download org/name 2>&1 | grep "install libcurl4"' ||
      die "without libcurl, hasten download does not say what to install"
    [[ -s $place/usr/share/man/man1/hasten-train.1.gz ]] || die "the Debian package has no man pages"
    say "--- $suite: hasten-dev, and a program compiled with it"
    cp -r "$root/tests/install/consumer" "$place/opt/consumer"
    in_root "$place" bash -c 'apt-get install -y -qq --no-install-recommends \
      /tmp/hasten-dev_*.deb g++ cmake make pkg-config' >"$work/apt.log" 2>&1 ||
      { tail -n 20 "$work/apt.log" >&2; die "apt-get could not install hasten-dev in $suite."; }
    in_root "$place" bash -c 'set -eu
      cd /opt/consumer
      cmake -S . -B build
      cmake --build build
      hasten launch --nproc 2 build/consumer
      g++ -std=c++20 main.cpp -o with-pkg-config $(pkg-config --cflags --libs hasten)
      ./with-pkg-config'
    in_root "$place" bash -c 'set -eu
      apt-get purge -y -qq hasten hasten-dev >/dev/null 2>&1
      test ! -e /usr/lib/hasten && test ! -e /usr/bin/hasten'
    rm -rf "$place"
  done
}

# The wheel's name says which glibc it needs. The libstdc++ of GCC 12 is that of manylinux_2_35.
build_wheel() {
  local glibc wheel
  build_cuda_modules wheel
  # scikit-build-core would take g++, whose objects are others for ccache.
  CXX=${CXX:-c++} HASTEN_TORCH=$torch CMAKE_BUILD_PARALLEL_LEVEL=$(compile_jobs) python3 -m pip wheel -q \
    --disable-pip-version-check --no-deps --wheel-dir "$work/wheel" \
    --config-settings "cmake.define.HASTEN_LICENCES=$licences" \
    --config-settings "cmake.define.HASTEN_CUDA_MODULES=$cuda_modules" \
    --config-settings "cmake.define.HASTEN_WERROR=$(werror)" "$root"
  python3 -m venv "$work/tags"
  "$work/tags/bin/pip" install -q --disable-pip-version-check wheel
  mkdir "$work/unpacked"
  unzip_parts "$work"/wheel/hasten-*.whl "$work/unpacked" hasten/
  glibc=$(find "$work/unpacked/hasten" -type f \( -name '*.so*' -o -path '*/bin/*' \) \
    -exec objdump -T {} + | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 |
    sort -Vu - <(echo 2.35) | tail -n1)
  wheel=$("$work/tags/bin/wheel" tags --remove \
    --platform-tag "manylinux_${glibc/./_}_$(uname -m)" "$work"/wheel/hasten-*.whl)
  rm -f "$packages"/hasten-*.whl
  mv "$work/wheel/$wheel" "$packages"
}

try_wheel() {
  local place=$work/venv installed text
  say "--- the wheel in a new virtual environment"
  python3 -m venv "$place"
  "$place/bin/pip" install -q --disable-pip-version-check "torch==$torch_version"
  "$place/bin/pip" install -q --disable-pip-version-check "$packages"/hasten-*.whl
  env -i HOME="$HOME" PATH="$place/bin:/usr/bin:/bin" bash -c "$train_there"
  say "--- the wheel beside a torch with CUDA, without a GPU"
  mkdir "$work/beside"
  ln -s "$cache/libtorch-cuda" "$(realpath "$cache/libtorch-cuda")/../nvidia" "$work/beside"
  mv "$work/beside/libtorch-cuda" "$work/beside/torch"
  cp -r "$place"/lib/python3*/site-packages/hasten "$work/beside"
  python3 - "$work/beside" <<'EOF'
import ctypes, sys
for path in "torch/lib/libtorch_cuda.so", "hasten/lib/libhasten_nccl.so":
    ctypes.CDLL(f"{sys.argv[1]}/{path}", ctypes.RTLD_GLOBAL)  # every symbol is found
EOF
  env -i HOME="$HOME" PATH="$work/beside/hasten/bin:/usr/bin:/bin" bash -c "$train_there"
  "$work/beside/hasten/bin/hasten" synth reviews --rows 20 --output "$work/reviews.csv"
  for installed in "$place"/lib/python3*/site-packages/hasten "$work/beside/hasten"; do
    "$installed/bin/hasten" env | grep '^CUDA'
    command -v nvidia-smi >/dev/null && continue
    text=$("$installed/bin/hasten" train --model bert-tiny --train-file "$work/reviews.csv" --device cuda \
      --output-dir "$work/out" 2>&1) && die "it trained on a GPU that is not there"
    [[ $text == *'no NVIDIA driver'* ]] || die "another error: $text"
  done
  say "--- the wheel with another torch"
  mv "$place"/lib/python3*/site-packages/torch-*.dist-info "$work/dist-info"
  sed -i "s/^Version: .*/Version: 2.12.1/" "$work/dist-info/METADATA"
  mv "$work/dist-info" "$(echo "$place"/lib/python3*/site-packages)/torch-2.12.1.dist-info"
  if text=$("$place/bin/hasten" --version 2>&1); then
    die "the wheel runs with another torch"
  fi
  say "$text"
  [[ $text == *"compiled for torch ${torch_version%.*}, and torch 2.12.1 is installed"* ]] ||
    die "that error does not name both versions"
  rm -rf "$place"
}

try_conan() {
  local place=$work/conan
  say "--- conan create"
  python3 -m venv "$place"
  "$place/bin/pip" install -q --disable-pip-version-check 'conan>=2.4,<3'
  export CONAN_HOME=$work/conan-home
  "$place/bin/conan" profile detect
  HASTEN_TORCH=$torch "$place/bin/conan" create "$root" --build=missing --no-remote \
    -c tools.build:jobs="$(compile_jobs)" -s compiler.cppstd=20 \
    -c "tools.cmake.cmaketoolchain:extra_variables={'HASTEN_WERROR': '$(werror)'}" \
    -c 'tools.cmake.cmake_layout:test_folder=$TMP'
  rm -rf "$place" "$CONAN_HOME"
}

"$root/scripts/setup.sh"
rm -rf "$work"
mkdir -p "$work" "$packages"
trap 'rm -rf "$work"' EXIT
for kind in "${kinds[@]}"; do
  if [[ $kind == conan ]]; then
    try_conan
    continue
  fi
  if [[ -z $try_only ]]; then
    [[ -d $licences/torch ]] || collect_licences
    say "--- building: $kind"
    "build_$kind"
  fi
  [[ -n $build_only ]] || "try_$kind"
done
(cd "$packages" && ls -l --block-size=KB hasten* | awk '{ print $5, $9 }') >&2
say "version $version: what was asked for is built and runs"
