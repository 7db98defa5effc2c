# cmake -DSOURCE=… -DBUILD=… -DWORK=… -DGENERATOR=… -DTORCH=… -P install_test.cmake
# Installs the build tree into an empty folder and builds a stranger's program against
# it; then configures the same program with the sources as a subfolder.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
# What is compiled here is not measured: quickly, then.
set(common -G "${GENERATOR}" -DCMAKE_BUILD_TYPE=Debug "-DHASTEN_TORCH=${TORCH}")

run("install" ${CMAKE_COMMAND} --install "${BUILD}" --prefix "${WORK}/prefix")
run("configure with find_package" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/tests/install/consumer" -B "${WORK}/installed"
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
run("build with find_package" ${CMAKE_COMMAND} --build "${WORK}/installed" -j 2)
run("run" "${WORK}/installed/consumer")
if(NOT output STREQUAL "[consumer::main] size=0. Expected 1 or more.\nsum 2\n")
  message(FATAL_ERROR "the program printed:\n${output}")
endif()

run("configure with add_subdirectory" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/tests/install/consumer" -B "${WORK}/subfolder"
  "-DHASTEN_SOURCE=${SOURCE}")
run("build of one part" ${CMAKE_COMMAND} --build "${WORK}/subfolder" --target hasten_base -j 2)

# The project of the adopted program, as somebody finds it in our sources.
run("configure examples/adopt" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/examples/adopt" -B "${WORK}/adopt")
run("compile the adopted program" ${CMAKE_COMMAND} --build "${WORK}/adopt" -j 2
  --target CMakeFiles/discs_adopted.dir/discs_adopted.cpp.o hasten_base)
file(REMOVE_RECURSE "${WORK}")
