# cmake -DSOURCE=… -DBUILD=… -DWORK=… -DGENERATOR=… -DTORCH=… -P install_test.cmake
# Installs the build tree into an empty folder, moves it, and builds a user's program
# against it. Then builds a part of hasten in a project that has its sources as a subfolder.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Expects that the command fails with PATTERN in its message.
function(refused pattern)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(code EQUAL 0 OR NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "expected a refusal with \"${pattern}\" (${code}):\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WORK}")
# Nothing that is compiled here is measured, so it is compiled without optimisation.
set(common -G "${GENERATOR}" -DCMAKE_BUILD_TYPE=Debug "-DHASTEN_TORCH=${TORCH}")

# The build tree is not a package: find_package() does not find it through PATH.
refused("provided[ \n]+by[ \n]+\"hasten\"" ${CMAKE_COMMAND} -E env "PATH=${BUILD}/bin:$ENV{PATH}"
  ${CMAKE_COMMAND} ${common} -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF
  -S "${SOURCE}/tests/install/consumer" -B "${WORK}/nothing")

# As after a build of the programs alone.
file(REMOVE "${BUILD}/src/libhasten_text.a")
run("install" ${CMAKE_COMMAND} --install "${BUILD}" --prefix "${WORK}/first")
file(RENAME "${WORK}/first" "${WORK}/prefix")
foreach(file bin/hasten bin/hasten-worker lib/libhasten.so lib/libhasten_text.so)
  file(STRINGS "${WORK}/prefix/${file}" found REGEX "ORIGIN.*hasten/torch/lib" LIMIT_COUNT 1)
  if(NOT found)
    message(FATAL_ERROR "${file} does not look for LibTorch in its own installation")
  endif()
endforeach()
file(GLOB_RECURSE headers RELATIVE "${SOURCE}/include" "${SOURCE}/include/*.h")
foreach(header IN LISTS headers)
  if(NOT EXISTS "${WORK}/prefix/include/${header}")
    message(FATAL_ERROR "include/${header} is not installed")
  endif()
endforeach()
foreach(file LICENSE README.md docs/guides/install.md examples/reviews.csv)
  if(NOT EXISTS "${WORK}/prefix/share/doc/hasten/${file}")
    message(FATAL_ERROR "share/doc/hasten/${file} is not installed")
  endif()
endforeach()
run("run of a program that was moved" "${WORK}/prefix/bin/hasten" env)
run("configure with find_package" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/tests/install/consumer" -B "${WORK}/installed"
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
run("build with find_package" ${CMAKE_COMMAND} --build "${WORK}/installed" -j 2)
run("run" "${WORK}/installed/consumer")
if(NOT output STREQUAL "[consumer::main] size=0. Expected 1 or more.\nsum 2\n")
  message(FATAL_ERROR "the program printed:\n${output}")
endif()

# pkg-config finds the moved prefix, and the file for static libraries names the archive.
run("pkg-config" ${CMAKE_COMMAND} -E env "PKG_CONFIG_PATH=${WORK}/prefix/lib/pkgconfig"
  pkg-config --cflags --libs hasten_text_static)
foreach(part "/prefix/lib/pkgconfig/[.][.]/[.][.]/include"
    "-l:libhasten_text[.]a .*-l:libhasten[.]a " "-lsodium")
  if(NOT output MATCHES "${part}")
    message(FATAL_ERROR "pkg-config printed no ${part}: ${output}")
  endif()
endforeach()

# A LibTorch that is too old is refused: by the sources one before 2.11, by an installation also
# the release before its own, and the one after it.
file(READ "${TORCH}/include/torch/headeronly/version.h" real)
string(REGEX MATCH "TORCH_VERSION_MINOR ([0-9]+)" _ "${real}")
set(minor ${CMAKE_MATCH_1})
file(MAKE_DIRECTORY "${WORK}/other/include/torch")
file(CREATE_LINK "${TORCH}/lib" "${WORK}/other/lib" SYMBOLIC)
file(CREATE_LINK "${TORCH}/include/torch/csrc" "${WORK}/other/include/torch/csrc" SYMBOLIC)
function(refused_release other pattern way)
  string(REPLACE "TORCH_VERSION_MINOR ${minor}" "TORCH_VERSION_MINOR ${other}" version "${real}")
  file(WRITE "${WORK}/other/include/torch/headeronly/version.h" "${version}")
  refused("${pattern}" ${CMAKE_COMMAND} -G "${GENERATOR}" "-DHASTEN_TORCH=${WORK}/other" "${way}"
    -S "${SOURCE}/tests/install/consumer" -B "${WORK}/refused")
  file(REMOVE_RECURSE "${WORK}/refused")
endfunction()
math(EXPR before "${minor} - 1")
math(EXPR after "${minor} + 1")
refused_release(10 "unsuitable[ \n]+version[ \n]+\"2[.]10[.]" "-DHASTEN_SOURCE=${SOURCE}")
refused_release(${before} "unsuitable[ \n]+version[ \n]+\"2[.]${before}[.]"
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
refused_release(${after} "was[ \n]+compiled[ \n]+for[ \n]+LibTorch[ \n]+2[.]${minor}"
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")

run("configure with add_subdirectory" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/tests/install/consumer" -B "${WORK}/subfolder"
  "-DHASTEN_SOURCE=${SOURCE}" -DHASTEN_UNITY=ON)
run("build of one part" ${CMAKE_COMMAND} --build "${WORK}/subfolder" --target hasten_base -j 2)
file(REMOVE_RECURSE "${WORK}")
