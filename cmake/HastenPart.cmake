# The folders of src/ are object libraries. They make three products: libhasten, libhasten_text
# and the programs. One test binary per group of layers.

# hasten_part(NAME SOURCES a.cpp… [KERNELS kernel.cpp… KERNEL_OPTIONS flags…]
#             [LIBRARIES third-party libraries…] [NO_TORCH] [LOOPS] [PRODUCT hasten_text|program])
# KERNELS: loops over elements, written for vectors, which have flags of their own and therefore no
# precompiled header. at::parallel_for needs -fopenmp.
# LOOPS: other loops of the part take time, too, over bytes or numbers. Without it the part waits for
# LibTorch, files or peers: a release build compiles it with -O1, in three quarters of the time.
# NO_TORCH parts do not see LibTorch. PRODUCT: what the part belongs to; default hasten.
function(hasten_part name)
  cmake_parse_arguments(PART "NO_TORCH;LOOPS" "PRODUCT" "SOURCES;KERNELS;KERNEL_OPTIONS;LIBRARIES" ${ARGN})
  set(product hasten)
  if(PART_PRODUCT)
    set(product ${PART_PRODUCT})
  endif()
  set(part hasten_${name})
  add_library(${part} OBJECT ${PART_SOURCES})
  set(targets ${part})
  if(PART_KERNELS)
    add_library(${part}_kernels OBJECT ${PART_KERNELS})
    target_compile_options(${part}_kernels PRIVATE ${PART_KERNEL_OPTIONS})
    list(APPEND targets ${part}_kernels)
  endif()
  foreach(target ${targets})
    target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}/include")
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
    target_link_libraries(${target} PRIVATE hasten_flags)
    target_compile_features(${target} PUBLIC cxx_std_20)
    hasten_warnings(${target})
    if(NOT PART_NO_TORCH)
      target_link_libraries(${target} PUBLIC LibTorch::cpu)
    endif()
    target_link_libraries(${target} PUBLIC nlohmann_json::nlohmann_json ${PART_LIBRARIES})
    set_property(GLOBAL APPEND PROPERTY HASTEN_PARTS_${product} ${target})
  endforeach()
  if(NOT PART_NO_TORCH)
    hasten_use_pch(${part} hasten_src_pch)
  endif()
  if(NOT PART_LOOPS AND PROJECT_IS_TOP_LEVEL)
    target_compile_options(${part} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  set_property(GLOBAL APPEND PROPERTY HASTEN_LIBRARIES_${product} ${PART_LIBRARIES})
  if(PART_NO_TORCH)
    set_property(GLOBAL APPEND PROPERTY HASTEN_PLAIN_PARTS ${targets})
  endif()
endfunction()

# hasten_library(NAME [public libraries…]): libNAME.so and libNAME.a out of the parts of this
# product, both from the same object files; hasten::NAME and hasten::NAME_static.
function(hasten_library name)
  get_property(parts GLOBAL PROPERTY HASTEN_PARTS_${name})
  get_property(libraries GLOBAL PROPERTY HASTEN_LIBRARIES_${name})
  list(REMOVE_DUPLICATES libraries)
  set(objects "")
  foreach(part ${parts})
    list(APPEND objects $<TARGET_OBJECTS:${part}>)
  endforeach()
  foreach(kind SHARED STATIC)
    set(suffix "")
    if(kind STREQUAL "STATIC")
      set(suffix _static)
    endif()
    set(target lib${name}${suffix})
    add_library(${target} ${kind} ${objects})
    add_library(hasten::${name}${suffix} ALIAS ${target})
    set_target_properties(${target} PROPERTIES
      OUTPUT_NAME ${name} EXPORT_NAME ${name}${suffix} LINKER_LANGUAGE CXX
      INSTALL_RPATH "${HASTEN_LIBRARY_RPATH}")
    if(NOT HASTEN_PACKAGE STREQUAL "wheel") # a wheel has no links, only copies
      set_target_properties(${target} PROPERTIES VERSION ${PROJECT_VERSION}
        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
    endif()
    target_include_directories(${target} PUBLIC
      $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    target_compile_features(${target} PUBLIC cxx_std_20)
    target_link_libraries(${target}
      PUBLIC nlohmann_json::nlohmann_json PRIVATE $<BUILD_INTERFACE:hasten_flags> ${libraries})
    foreach(library ${ARGN})
      if(TARGET ${library}${suffix})
        set(library ${library}${suffix})
      endif()
      target_link_libraries(${target} PUBLIC ${library})
    endforeach()
    if(HASTEN_INSTALL)
      install(TARGETS ${target} EXPORT hastenTargets
        LIBRARY ${HASTEN_RUNTIME} NAMELINK_COMPONENT development
        ARCHIVE ${HASTEN_DEVELOPMENT})
    endif()
  endforeach()
  if(NOT HASTEN_INSTALL)
    set_target_properties(lib${name}_static PROPERTIES EXCLUDE_FROM_ALL ON)
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
  add_library(${name} OBJECT EXCLUDE_FROM_ALL "${carrier}")
  target_link_libraries(${name} PRIVATE
    hasten_flags LibTorch::cpu nlohmann_json::nlohmann_json)
  hasten_warnings(${name}) # -Wpedantic changes the predefined macros
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()

function(hasten_use_pch target name)
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
    if(PROGRAM_PCH)
      hasten_use_pch(${name} ${PROGRAM_PCH})
    endif()
  endif()
endfunction()

# hasten_program_group(NAME SOURCES a.cpp… DEPENDS…): programs of one source each, compiled
# as one unit, since most of a small program's time goes into its headers. Each source keeps
# its own main(), which must return a value: it is in a namespace here. The executable
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

# hasten_quick_build(TARGET [NO_TORCH]): tests and examples, compiled in half the time. What they
# spend theirs in is the libraries. They share a precompiled header that is compiled likewise.
function(hasten_quick_build target)
  target_compile_options(${target} PRIVATE -O0)
  if(NOT NO_TORCH IN_LIST ARGN)
    hasten_use_pch(${target} hasten_test_pch)
  endif()
endfunction()

# hasten_add_test([WHOLE] NAME command…): a test of ctest, whose CPU time scripts/test.sh prints.
# WHOLE: runs only with `ctest -C whole`, as scripts/test.sh --whole does: before a release, and
# after a change of what it tests.
function(hasten_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 TEST "WHOLE" "" "")
  list(POP_FRONT TEST_UNPARSED_ARGUMENTS name program)
  set(whole "")
  if(TEST_WHOLE)
    set(whole CONFIGURATIONS whole)
  endif()
  set(clock "")
  if(Python3_FOUND)
    set(clock ${Python3_EXECUTABLE} "${PROJECT_SOURCE_DIR}/tools/cpu_minutes.py" run
      "${CMAKE_BINARY_DIR}/cpu_seconds" ${name})
  endif()
  if(TARGET ${program})
    set(program $<TARGET_FILE:${program}>)
  endif()
  add_test(NAME ${name} COMMAND ${clock} ${program} ${TEST_UNPARSED_ARGUMENTS} ${whole})
endfunction()

# hasten_tests(GROUP file_test.cpp…): adds files to the test binary of that group.
function(hasten_tests group)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  target_sources(hasten_${group}_tests PRIVATE ${ARGN})
endfunction()
