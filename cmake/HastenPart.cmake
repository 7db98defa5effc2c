# One static library per folder of src/, one test binary per group of layers.

# hasten_part(NAME SOURCES a.cpp… [OMP kernel.cpp…] [DEPENDS lower parts and libraries…]
#             [NO_TORCH])
# OMP files use at::parallel_for: they need -fopenmp, hence no precompiled header.
# NO_TORCH parts neither see nor link LibTorch.
function(hasten_part name)
  cmake_parse_arguments(PART "NO_TORCH" "" "SOURCES;OMP;DEPENDS" ${ARGN})
  set(target hasten_${name})
  add_library(${target} STATIC ${PART_SOURCES} ${PART_OMP})
  add_library(hasten::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:hasten_flags>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  hasten_warnings(${target})
  if(NOT PART_NO_TORCH)
    target_link_libraries(${target} PUBLIC LibTorch::cpu)
    hasten_use_pch(${target} hasten_src_pch)
  endif()
  target_link_libraries(${target} PUBLIC ${PART_DEPENDS})
  if(PART_OMP)
    set_source_files_properties(${PART_OMP} PROPERTIES
      COMPILE_OPTIONS "-fopenmp"
      SKIP_PRECOMPILE_HEADERS ON
      SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
  if(HASTEN_INSTALL)
    install(TARGETS ${target} EXPORT hastenTargets)
  endif()
  set_property(GLOBAL APPEND PROPERTY HASTEN_PARTS ${target})
  if(PART_NO_TORCH)
    set_property(GLOBAL APPEND PROPERTY HASTEN_PLAIN_PARTS ${target})
  endif()
endfunction()

# The folders out of ARGN that have a CMakeLists.txt, of HASTEN_ONLY_PARTS where set.
function(hasten_add_folders)
  foreach(folder ${ARGN})
    if(HASTEN_ONLY_PARTS AND NOT folder IN_LIST HASTEN_ONLY_PARTS)
      continue()
    endif()
    if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${folder}/CMakeLists.txt")
      add_subdirectory(${folder})
    endif()
  endforeach()
endfunction()

# hasten_add_pch(NAME headers…): a precompiled header that several targets share.
function(hasten_add_pch name)
  set(carrier "${CMAKE_BINARY_DIR}/${name}.cpp")
  file(CONFIGURE OUTPUT "${carrier}" CONTENT "// Carrier of the precompiled header.\n")
  add_library(${name} OBJECT "${carrier}")
  target_link_libraries(${name} PRIVATE
    hasten_flags LibTorch::cpu nlohmann_json::nlohmann_json)
  hasten_warnings(${name}) # -Wpedantic changes the predefined macros
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()

# hasten_use_pch(TARGET [NAME]): without a name that of tests, examples and benchmarks.
function(hasten_use_pch target)
  set(name ${ARGN} hasten_torch_pch)
  list(GET name 0 name)
  if(TARGET ${name})
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()

# hasten_program(NAME SOURCES… DEPENDS… [NO_TORCH] [PCH name]): an executable in
# build/<preset>/bin.
function(hasten_program name)
  cmake_parse_arguments(PROGRAM "NO_TORCH" "PCH" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${PROGRAM_SOURCES})
  target_link_libraries(${name} PRIVATE hasten_flags ${PROGRAM_DEPENDS})
  hasten_warnings(${name})
  if(NOT PROGRAM_NO_TORCH)
    target_link_libraries(${name} PRIVATE LibTorch::cpu)
    hasten_use_pch(${name} ${PROGRAM_PCH})
  endif()
endfunction()

# hasten_program_group(NAME SOURCES a.cpp… DEPENDS…): programs of one source each, compiled
# as one unit, since most of a small program's time goes into its headers. Each source keeps
# a main() of its own, which must return a value: it is in a namespace here. The executable
# runs the program that it is called by; build/<preset>/bin has a link of each one's name.
function(hasten_program_group name)
  cmake_parse_arguments(GROUP "" "" "SOURCES;DEPENDS" ${ARGN})
  set(includes "")
  set(opened "")
  set(bodies "")
  set(table "")
  set(folders "")
  set(links "")
  set(made "")
  set(bin "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
  if(NOT bin)
    set(bin "${CMAKE_CURRENT_BINARY_DIR}")
  endif()
  foreach(source ${GROUP_SOURCES})
    get_filename_component(path "${source}" ABSOLUTE)
    get_filename_component(folder "${path}" DIRECTORY)
    get_filename_component(program "${path}" NAME_WE)
    list(APPEND folders "${folder}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
    # All headers come first. Where a source includes them again they are empty.
    file(STRINGS "${path}" lines REGEX "^#include [<\"]")
    foreach(line ${lines})
      string(REGEX MATCH "^#include [<\"][^>\"]+[>\"]" line "${line}")
      list(APPEND includes "${line}")
    endforeach()
    # A namespace that the source opens is one within its own; it sees the one outside.
    string(APPEND bodies "\nnamespace program_${program} {\n")
    file(STRINGS "${path}" lines REGEX "^namespace [a-z_:]+ {")
    foreach(line ${lines})
      string(REGEX REPLACE "^namespace ([a-z_:]+) {.*" "\\1" space "${line}")
      list(APPEND opened "namespace ${space} {}")
      string(APPEND bodies "namespace ${space} { using namespace ::${space}; }\n")
    endforeach()
    string(APPEND bodies "#include \"${path}\"\n}\n")
    string(APPEND table "      {\"${program}\", program(program_${program}::main)},\n")
    list(APPEND links COMMAND ${CMAKE_COMMAND} -E create_symlink
      $<TARGET_FILE_NAME:${name}> ${program})
    list(APPEND made "${bin}/${program}")
  endforeach()
  foreach(list includes opened folders)
    list(REMOVE_DUPLICATES ${list})
  endforeach()
  list(JOIN includes "\n" includes)
  list(JOIN opened "\n" opened)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/program_group.cpp.in"
    "${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp" @ONLY)
  hasten_program(${name}
    SOURCES "${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp" DEPENDS ${GROUP_DEPENDS})
  target_include_directories(${name} PRIVATE ${folders})
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)
  add_custom_command(TARGET ${name} POST_BUILD ${links}
    BYPRODUCTS ${made}
    WORKING_DIRECTORY "${bin}" VERBATIM)
endfunction()

# Compiled in two thirds of the time; what they spend theirs in is the libraries.
function(hasten_quick_build target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# hasten_tests(GROUP file_test.cpp…): adds files to the test binary of that group.
function(hasten_tests group)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  target_sources(hasten_${group}_tests PRIVATE ${ARGN})
endfunction()
