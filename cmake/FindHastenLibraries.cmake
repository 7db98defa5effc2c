# Makes HastenLibraries::NAME for each component NAME out of its header and its library, wherever
# CMake looks for such: pkg-config need not be there.
set(_header_gtest gtest/gtest.h)
set(_header_jemalloc jemalloc/jemalloc.h)
set(_header_onig oniguruma.h)
set(_header_sodium sodium.h)
set(_header_utf8proc utf8proc.h)
set(_header_xxhash xxhash.h)
set(_header_z zlib.h)
foreach(_name IN LISTS HastenLibraries_FIND_COMPONENTS)
  set(_include HastenLibraries_${_name}_INCLUDE_DIR)
  set(_library HastenLibraries_${_name}_LIBRARY)
  find_path(${_include} ${_header_${_name}})
  find_library(${_library} ${_name})
  mark_as_advanced(${_include} ${_library})
  set(HastenLibraries_${_name}_FOUND FALSE)
  if(${_include} AND ${_library})
    set(HastenLibraries_${_name}_FOUND TRUE)
    if(NOT TARGET HastenLibraries::${_name})
      add_library(HastenLibraries::${_name} UNKNOWN IMPORTED GLOBAL)
      set_target_properties(HastenLibraries::${_name} PROPERTIES
        IMPORTED_LOCATION "${${_library}}"
        INTERFACE_INCLUDE_DIRECTORIES "${${_include}}")
    endif()
    if(_name STREQUAL "onig") # has a regcomp() of its own, and a program must find libc's first
      set_target_properties(HastenLibraries::onig PROPERTIES
        INTERFACE_LINK_OPTIONS "LINKER:--push-state,--no-as-needed,-lc,--pop-state")
    endif()
  endif()
endforeach()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(HastenLibraries HANDLE_COMPONENTS REASON_FAILURE_MESSAGE
  "Install the header and the library of each, such as Debian's libsodium-dev. Or carry them in \
.deps: scripts/carry_dependencies.sh in hasten's sources fills that folder on another machine.")
