# The rules of `cmake --install`, but those of the libraries.
if(HASTEN_INSTALL)
  include(CMakePackageConfigHelpers)
  set(_folder "${CMAKE_INSTALL_LIBDIR}/cmake/hasten")
  # Not in the build folder itself: with its bin/ on PATH find_package() looks there, and
  # the file of the targets exists in an installation alone.
  set(_package "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/package")
  file(REMOVE "${CMAKE_CURRENT_BINARY_DIR}/hastenConfig.cmake") # where it once was
  get_filename_component(HASTEN_BUILT_WITH "${LibTorch_LIB_DIR}" DIRECTORY)
  configure_package_config_file(
    "${CMAKE_CURRENT_LIST_DIR}/hastenConfig.cmake.in"
    "${_package}/hastenConfig.cmake"
    INSTALL_DESTINATION "${_folder}")
  write_basic_package_version_file(
    "${_package}/hastenConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
  install(FILES
    "${_package}/hastenConfig.cmake"
    "${_package}/hastenConfigVersion.cmake"
    "${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake"
    DESTINATION "${_folder}")
  install(EXPORT hastenTargets NAMESPACE hasten:: DESTINATION "${_folder}")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/hasten"
    DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  foreach(_program hasten hasten-worker)
    if(TARGET ${_program})
      install(TARGETS ${_program})
    endif()
  endforeach()
endif()
