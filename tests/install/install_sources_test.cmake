# cmake -DSOURCE=… -DWORK=… -DGENERATOR=… -DTORCH=… -P install_sources_test.cmake
# Compiles the project of an example, which has hasten's sources as a subfolder.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
# Nothing that is compiled here is measured.
set(common -G "${GENERATOR}" -DCMAKE_BUILD_TYPE=Debug "-DHASTEN_TORCH=${TORCH}")

run("configure examples/adopt" ${CMAKE_COMMAND} ${common}
  -S "${SOURCE}/examples/adopt" -B "${WORK}/adopt")
run("compile the adopted program" ${CMAKE_COMMAND} --build "${WORK}/adopt" -j 2
  --target CMakeFiles/discs_adopted.dir/discs_adopted.cpp.o hasten_base)
file(REMOVE_RECURSE "${WORK}")
