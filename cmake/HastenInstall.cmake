# The rules of `cmake --install`. An installation may be moved: programs and libraries look for
# libraries in their own prefix first, at
#   lib/                  libhasten and libhasten_text
#   lib/hasten/           the other libraries that HASTEN_PACKAGE brings along
#   lib/hasten/torch/     LibTorch, with include/ and lib/ (HASTEN_PACKAGE=bundle)
# then where LibTorch was at build time, or in the folder torch next to a wheel's prefix.
if(NOT HASTEN_PACKAGE MATCHES "^(|bundle|wheel)$")
  message(FATAL_ERROR "HASTEN_PACKAGE=${HASTEN_PACKAGE}. Expected bundle, wheel or nothing.")
endif()
set(HASTEN_PRIVATE_DIR "${CMAKE_INSTALL_LIBDIR}/hasten")
set(_torch "${LibTorch_LIB_DIR}")
if(HASTEN_PACKAGE STREQUAL "bundle")
  set(_torch "")
elseif(HASTEN_PACKAGE STREQUAL "wheel")
  set(_torch "$ORIGIN/../../torch/lib")
endif()
set(HASTEN_LIBRARY_RPATH "$ORIGIN" "$ORIGIN/hasten" "$ORIGIN/hasten/torch/lib" ${_torch})
set(HASTEN_PROGRAM_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}"
  "$ORIGIN/../${HASTEN_PRIVATE_DIR}" "$ORIGIN/../${HASTEN_PRIVATE_DIR}/torch/lib" ${_torch})
# One package has what programs need, another what compiling against hasten needs.
set(HASTEN_RUNTIME COMPONENT runtime)
set(HASTEN_DEVELOPMENT COMPONENT development)

# The libraries that programs need besides LibTorch, into lib/hasten/. Their versions differ
# between releases of a distribution.
function(hasten_bring_libraries)
  foreach(module sodium utf8proc onig xxhash z jemalloc)
    file(REAL_PATH "${HastenLibraries_${module}_LIBRARY}" library)
    execute_process(COMMAND "${CMAKE_READELF}" -d "${library}" OUTPUT_VARIABLE dynamic
      COMMAND_ERROR_IS_FATAL ANY)
    if(NOT dynamic MATCHES "SONAME[^\n]*\\[([^]]+)\\]")
      message(FATAL_ERROR "${library} is no shared library with a name of its own.")
    endif()
    install(FILES "${library}" DESTINATION "${HASTEN_PRIVATE_DIR}" RENAME "${CMAKE_MATCH_1}"
      ${HASTEN_RUNTIME})
  endforeach()
  if(NOT EXISTS "${HASTEN_LICENCES}")
    message(FATAL_ERROR "HASTEN_PACKAGE needs HASTEN_LICENCES, a folder with the licences of "
      "the libraries that come along. scripts/package.sh makes one.")
  endif()
  install(DIRECTORY "${HASTEN_LICENCES}/" DESTINATION "${CMAKE_INSTALL_DOCDIR}/licences"
    ${HASTEN_RUNTIME})
endfunction()

# The first step of an installation: a build of the programs alone (scripts/demo.sh) lacks libraries.
function(hasten_build_for_install)
  if(HASTEN_INSTALL)
    set(targets libhasten libhasten_static libhasten_text libhasten_text_static hasten hasten-worker)
    list(TRANSFORM targets REPLACE "(.+)" "\"$<TARGET_FILE:\\1>\"" OUTPUT_VARIABLE files)
    list(JOIN files " " files)
    list(JOIN targets " " targets)
    install(CODE "foreach(file ${files})
  if(NOT EXISTS \"\${file}\")
    execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${CMAKE_BINARY_DIR}\"
      --target ${targets} COMMAND_ERROR_IS_FATAL ANY)
  endif()
endforeach()" ALL_COMPONENTS)
  endif()
endfunction()

# What hasten uses of LibTorch, and its headers.
function(hasten_bring_torch)
  foreach(name torch_cpu c10 gomp)
    if(LibTorch_${name}_LIBRARY)
      install(FILES "${LibTorch_${name}_LIBRARY}"
        DESTINATION "${HASTEN_PRIVATE_DIR}/torch/lib" ${HASTEN_RUNTIME})
    endif()
  endforeach()
  install(DIRECTORY "${LibTorch_INCLUDE_DIR}"
    DESTINATION "${HASTEN_PRIVATE_DIR}/torch" ${HASTEN_DEVELOPMENT})
endfunction()

# hasten.pc and hasten_text.pc for the shared libraries, …_static.pc for the static ones.
# They compute the prefix from where they are.
function(hasten_install_pkg_config)
  set(HASTEN_PC_TORCH "${HASTEN_BUILT_WITH}")
  if(HASTEN_PACKAGE STREQUAL "bundle")
    set(HASTEN_PC_TORCH "\${libdir}/hasten/torch")
  elseif(HASTEN_PACKAGE STREQUAL "wheel")
    set(HASTEN_PC_TORCH "\${prefix}/../torch")
  endif()
  string(REGEX REPLACE "[^/]+" ".." HASTEN_PC_TO_PREFIX "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  get_target_property(definitions LibTorch::cpu INTERFACE_COMPILE_DEFINITIONS)
  list(TRANSFORM definitions PREPEND "-D")
  list(JOIN definitions " " HASTEN_PC_DEFINITIONS)
  set(torch_libraries "-ltorch_cpu -lc10")
  if(LibTorch_gomp_LIBRARY)
    string(APPEND torch_libraries " -l:libgomp.so.1")
  endif()
  set(HASTEN_PC_TORCH_LIBRARIES "${torch_libraries}")
  foreach(name hasten hasten_text)
    set(needs sodium xxhash)
    set(base "nlohmann_json")
    set(HASTEN_PC_DESCRIPTION "${PROJECT_DESCRIPTION}")
    if(name STREQUAL "hasten_text")
      set(needs utf8proc onig xxhash z)
      set(base "hasten")
      set(HASTEN_PC_DESCRIPTION "Text data and models of hasten")
    endif()
    foreach(suffix "" _static)
      set(HASTEN_PC_NAME "${name}${suffix}")
      set(HASTEN_PC_REQUIRES "${base}")
      list(TRANSFORM needs PREPEND "-l" OUTPUT_VARIABLE libraries)
      list(JOIN libraries " " HASTEN_PC_LIBRARIES_PRIVATE)
      string(REPLACE "-lonig" "-Wl,--push-state,--no-as-needed,-lc,--pop-state -lonig" # as in CMake
        HASTEN_PC_LIBRARIES_PRIVATE "${HASTEN_PC_LIBRARIES_PRIVATE}")
      set(HASTEN_PC_LIBRARY "-L\${libdir} -l${name}")
      if(suffix)
        string(REPLACE "hasten" "hasten_static" HASTEN_PC_REQUIRES "${base}")
        set(HASTEN_PC_LIBRARY "-L\${libdir} -l:lib${name}.a ${HASTEN_PC_LIBRARIES_PRIVATE}")
        set(HASTEN_PC_LIBRARIES_PRIVATE "")
      endif()
      configure_file("${PROJECT_SOURCE_DIR}/cmake/hasten.pc.in"
        "${HASTEN_PACKAGE_FILES}/${HASTEN_PC_NAME}.pc" @ONLY)
      install(FILES "${HASTEN_PACKAGE_FILES}/${HASTEN_PC_NAME}.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" ${HASTEN_DEVELOPMENT})
    endforeach()
  endforeach()
endfunction()

# Called when all targets exist.
function(hasten_install)
  if(NOT HASTEN_INSTALL)
    return()
  endif()
  include(CMakePackageConfigHelpers)
  set(folder "${CMAKE_INSTALL_LIBDIR}/cmake/hasten")
  # Not in the build folder itself: with its bin/ on PATH find_package() looks there, and
  # the file of the targets exists in an installation alone.
  set(HASTEN_PACKAGE_FILES "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/package")
  file(REMOVE "${CMAKE_CURRENT_BINARY_DIR}/hastenConfig.cmake") # where it once was
  string(REGEX MATCH "^[0-9]+[.][0-9]+" HASTEN_TORCH_RELEASE "${LibTorch_VERSION}")
  set(HASTEN_BUILT_WITH "")
  if(NOT HASTEN_PACKAGE)
    get_filename_component(HASTEN_BUILT_WITH "${LibTorch_LIB_DIR}" DIRECTORY)
  endif()
  configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/cmake/hastenConfig.cmake.in"
    "${HASTEN_PACKAGE_FILES}/hastenConfig.cmake"
    INSTALL_DESTINATION "${folder}")
  write_basic_package_version_file(
    "${HASTEN_PACKAGE_FILES}/hastenConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
  install(FILES
    "${HASTEN_PACKAGE_FILES}/hastenConfig.cmake"
    "${HASTEN_PACKAGE_FILES}/hastenConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FindHastenLibraries.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake"
    DESTINATION "${folder}" ${HASTEN_DEVELOPMENT})
  install(EXPORT hastenTargets NAMESPACE hasten:: DESTINATION "${folder}"
    ${HASTEN_DEVELOPMENT})
  hasten_install_pkg_config()
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/hasten"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" ${HASTEN_DEVELOPMENT})
  foreach(program hasten hasten-worker)
    if(TARGET ${program})
      set_target_properties(${program} PROPERTIES INSTALL_RPATH "${HASTEN_PROGRAM_RPATH}")
      install(TARGETS ${program} ${HASTEN_RUNTIME})
    endif()
  endforeach()
  set(completion "${PROJECT_SOURCE_DIR}/packaging/completion")
  install(FILES "${completion}/hasten.bash" RENAME hasten
    DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions" ${HASTEN_RUNTIME})
  install(FILES "${completion}/hasten.zsh" RENAME _hasten
    DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/site-functions" ${HASTEN_RUNTIME})
  install(FILES "${completion}/hasten.fish"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d" ${HASTEN_RUNTIME})
  # scripts/man.sh makes the pages.
  install(DIRECTORY "${PROJECT_BINARY_DIR}/man/" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1"
    ${HASTEN_RUNTIME} OPTIONAL)
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/CHANGELOG.md"
    DESTINATION "${CMAKE_INSTALL_DOCDIR}" ${HASTEN_RUNTIME})
  install(FILES "${PROJECT_SOURCE_DIR}/README.md" "${PROJECT_SOURCE_DIR}/SECURITY.md"
    DESTINATION "${CMAKE_INSTALL_DOCDIR}" ${HASTEN_DEVELOPMENT})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs" "${PROJECT_SOURCE_DIR}/examples"
    DESTINATION "${CMAKE_INSTALL_DOCDIR}" ${HASTEN_DEVELOPMENT})
  if(HASTEN_PACKAGE)
    hasten_bring_libraries()
  endif()
  if(HASTEN_PACKAGE STREQUAL "bundle")
    hasten_bring_torch()
    include(HastenPackages)
  endif()
endfunction()
