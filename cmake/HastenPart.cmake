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
  cmake_parse_arguments(PROGRAM "NO_TORCH;EXCLUDE_FROM_ALL" "PCH" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${PROGRAM_SOURCES})
  target_link_libraries(${name} PRIVATE hasten_flags ${PROGRAM_DEPENDS})
  hasten_warnings(${name})
  if(NOT PROGRAM_NO_TORCH)
    target_link_libraries(${name} PRIVATE LibTorch::cpu)
    hasten_use_pch(${name} ${PROGRAM_PCH})
  endif()
  if(PROGRAM_EXCLUDE_FROM_ALL)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
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
