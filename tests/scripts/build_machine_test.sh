#!/usr/bin/env bash
# build_machine_test.sh WORK TORCH: configures hasten as other machines would, in the folder WORK,
# with the LibTorch in TORCH: without pkg-config and with carried libraries only; and with parts of
# CUDA missing, out of empty files. Nothing is compiled.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$1 torch=$2

fail() {
  echo "failed: $*"
  [[ ! -f $work/log ]] || cat "$work/log"
  exit 1
}

# configure FOLDER option…: leaves CMake's output in the log.
configure() {
  cmake -S "$work/source" -B "$work/$1" -G Ninja -DHASTEN_CCACHE=OFF -DHASTEN_EXAMPLES=OFF \
    -DHASTEN_BENCHMARKS=OFF "${@:2}" >"$work/log" 2>&1
}

expect() { grep -qzE "$1" "$work/log" || fail "CMake printed no $1"; }

rm -rf "$work"
mkdir -p "$work/source" "$work/bin"
ln -s "$root"/{CMakeLists.txt,cmake,docs,include,packaging,src,tests} "$work/source/"

# Carried libraries: every one is found in .deps, and none needs pkg-config.
"$root/scripts/carry_dependencies.sh" "$work/source/.deps"
(($(du -sm "$work/source/.deps" | cut -f1) <= 10)) || fail ".deps has more than 10 MB"
[[ -z $(find "$work/source/.deps" -type l) ]] || fail ".deps has links"
printf '#!/bin/sh\necho "called: $*" >>"%s/pkg-config.log"\nexit 1\n' "$work" >"$work/bin/pkg-config"
chmod +x "$work/bin/pkg-config"
PATH=$work/bin:$PATH configure carried "-DHASTEN_TORCH=$torch" -DHASTEN_TESTS=ON ||
  fail "CMake with carried libraries"
[[ ! -f $work/pkg-config.log ]] || fail "pkg-config was called"
for library in sodium utf8proc onig jemalloc xxhash z gtest; do
  for what in INCLUDE_DIR:PATH LIBRARY:FILEPATH; do
    grep -q "^HastenLibraries_${library}_$what=$work/source/.deps/" "$work/carried/CMakeCache.txt" ||
      fail "$library was not found in .deps"
  done
done
grep -q "^HASTEN_CURL_INCLUDE_DIR:PATH=$work/source/.deps/" "$work/carried/CMakeCache.txt" ||
  fail "libcurl's headers were not found in .deps"
for package in nlohmann_json CLI11; do
  grep -q "^${package}_DIR:PATH=$work/source/.deps/" "$work/carried/CMakeCache.txt" ||
    fail "$package was not found in .deps"
done

# The rest is a project of its own, which sees nothing of the system's folders.
mkdir -p "$work/probe"
cat >"$work/probe/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES CXX)
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
foreach(part "" /include /include/cccl /lib /lib64)
  list(APPEND CMAKE_IGNORE_PATH "/usr/local/cuda\${part}")
endforeach()
list(APPEND CMAKE_MODULE_PATH "$root/cmake")
if(LIBRARIES)
  find_package(HastenLibraries REQUIRED COMPONENTS sodium xxhash)
else()
  find_package(LibTorch 2.11 REQUIRED)
endif()
if(TARGET LibTorch::cuda)
  get_target_property(includes LibTorch::cuda INTERFACE_INCLUDE_DIRECTORIES)
  message(STATUS "includes: \${includes}")
endif()
CMAKE
# probe STATUS PATTERN option…: CMake ends with 0 or 1 and prints the pattern.
probe() {
  local status=0
  env -u CUDA_HOME -u CUDA_PATH -u CUDAToolkit_ROOT cmake -S "$work/probe" -B "$work/probed" \
    -G Ninja "${@:3}" >"$work/log" 2>&1 || status=1
  ((status == $1)) || fail "CMake ended with $status: ${*:3}"
  tr -s ' \n' ' ' <"$work/log" | grep -qE "$2" || fail "CMake printed no $2"
}

probe 1 'missing: sodium xxhash.*scripts/carry_dependencies.sh' -DLIBRARIES=ON

# CUDA: files without contents lie as pip would install them, and become complete step by step.
site=$work/site
cuda() { probe "$1" "$3" -DLIBRARIES=OFF "-DHASTEN_TORCH=$site/torch" "-DHASTEN_CUDA=$2"; }
mkdir -p "$site/torch/lib" "$site/nvidia/cu13"/{lib,include/crt,include/nv} \
  "$site/nvidia/nccl/include"
ln -s "$torch/include" "$site/torch/include"
ln -s "$torch"/lib/lib{torch_cpu,c10}.so "$site/torch/lib/"
cuda 0 AUTO 'No CUDA. Missing: libtorch_cuda.so, libc10_cuda.so in '
cuda 1 ON 'HASTEN_CUDA=ON, and these are missing: libtorch_cuda.so.* scripts/setup.sh --cuda '
touch "$site/torch/lib"/lib{torch,c10}_cuda.so
cuda 0 AUTO 'No CUDA. Missing: the name of libcudart in .*/libc10_cuda.so '
printf 'x\0libcudart.so.13\0' >"$site/torch/lib/libc10_cuda.so"
headers='cuda_runtime_api.h, crt/host_defines.h, nv/target, cusparse.h, nccl.h'
cuda 0 AUTO "No CUDA. Missing: libcudart.so.13, $headers"
cuda 1 ON "these are missing: libcudart.so.13, $headers\\."
touch "$site/nvidia/cu13/lib/libcudart.so.13" "$site/nvidia/nccl/include/nccl.h" \
  "$site/nvidia/cu13/include"/{crt/host_defines.h,nv/target,cusparse.h}
echo '#define CUDART_VERSION 12080' >"$site/nvidia/cu13/include/cuda_runtime_api.h"
cuda 1 ON 'missing: headers of CUDA 13: .*/cu13/include has 12080'
echo '#define CUDART_VERSION 13000' >"$site/nvidia/cu13/include/cuda_runtime_api.h"
cuda 0 AUTO 'CUDA 13: .*/cu13/lib/libcudart.so.13.*includes: .*/cu13/include;.*/nccl/include '
cuda 0 ON 'includes: '
cuda 0 OFF 'Configuring done'
if grep -q 'CUDA\|includes' "$work/log"; then
  fail "HASTEN_CUDA=OFF found CUDA"
fi

# scripts/setup.sh --cuda takes no LibTorch without CUDA.
rm "$site/torch/lib/libtorch_cuda.so"
if HASTEN_TORCH=$site/torch "$root/scripts/setup.sh" --cuda >"$work/log" 2>&1; then
  fail "setup.sh --cuda took a LibTorch without CUDA"
fi
expect 'has no lib/libtorch_cuda.so'
# scripts/test_versions.sh runs every step of each release, and fails where one does. CMake and pip
# are stand-ins here, and the only release is the one that is there.
ln -s "$root/scripts" "$work/source/scripts"
mkdir -p "$work/cache"
ln -s "$torch" "$work/cache/libtorch"
version=$(awk '/define TORCH_VERSION_(MAJOR|MINOR|PATCH) / { v = v sep $3; sep = "." }
               END { print v }' "$torch/include/torch/headeronly/version.h")
cat >"$work/bin/cmake" <<CMAKE
#!/bin/sh
if [ "\$1" = --build ]; then
  mkdir -p "\$2/bin"
  printf '#!/bin/sh\n' >"\$2/bin/hasten"
  cp "\$2/bin/hasten" "\$2/bin/hasten_unit_tests"
  printf '#!/bin/sh\nexit %s\n' "\$PLAIN" >"\$2/bin/hasten_plain_tests"
  chmod +x "\$2"/bin/*
fi
CMAKE
printf '#!/bin/sh\necho "Available versions: 99.1, 99.1+cpu, %s, 1.0"\n' "$version" \
  >"$work/bin/python3"
chmod +x "$work"/bin/*
versions() {
  PLAIN=$1 PATH=$work/bin:$PATH HASTEN_CACHE=$work/cache \
    "$work/source/scripts/test_versions.sh" "$version" >"$work/log" 2>&1
}
versions 0 || fail "test_versions.sh with steps that pass"
expect "\\| $version \\| C.* unit passed .* plain passed .* train passed .*The index also has 99.1\\."
[[ ! -d $work/source/build/torch-$version ]] || fail "test_versions.sh left a build that passed"
if versions 1; then
  fail "test_versions.sh passed with plain tests that failed"
fi
expect "unit passed .* plain failed"

rm -rf "$work"
echo "configured as expected"
