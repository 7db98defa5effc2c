# Makes LibTorch::cpu from a pip wheel, a LibTorch zip or an installed torch, without
# the package file of torch itself: that of a CUDA wheel demands a CUDA toolkit.
#
# In:  HASTEN_TORCH (cache or environment): a folder with include/ and lib/. Without it
#      Torch_DIR is tried, then what scripts/setup.sh put in the cache folder.
# Out: LibTorch::cpu (torch_cpu, c10 and the OpenMP run time torch itself uses),
#      LibTorch_VERSION, LibTorch_LIB_DIR.
set(_hints)
if(HASTEN_TORCH)
  list(APPEND _hints "${HASTEN_TORCH}")
elseif(DEFINED ENV{HASTEN_TORCH} AND NOT "$ENV{HASTEN_TORCH}" STREQUAL "")
  list(APPEND _hints "$ENV{HASTEN_TORCH}")
else()
  if(Torch_DIR)
    get_filename_component(_from_package "${Torch_DIR}/../../.." ABSOLUTE)
    list(APPEND _hints "${_from_package}")
  endif()
  if(DEFINED ENV{HASTEN_CACHE} AND NOT "$ENV{HASTEN_CACHE}" STREQUAL "")
    list(APPEND _hints "$ENV{HASTEN_CACHE}/libtorch")
  elseif(DEFINED ENV{XDG_CACHE_HOME} AND NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    list(APPEND _hints "$ENV{XDG_CACHE_HOME}/hasten/libtorch")
  else()
    list(APPEND _hints "$ENV{HOME}/.cache/hasten/libtorch")
  endif()
endif()
list(TRANSFORM _hints APPEND "/include" OUTPUT_VARIABLE _include_hints)
list(TRANSFORM _hints APPEND "/lib" OUTPUT_VARIABLE _lib_hints)

find_path(LibTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h
  HINTS ${_include_hints} NO_DEFAULT_PATH)
foreach(_name torch_cpu c10)
  find_library(LibTorch_${_name}_LIBRARY ${_name} HINTS ${_lib_hints} NO_DEFAULT_PATH)
endforeach()
find_file(LibTorch_gomp_LIBRARY
  NAMES libgomp.so.1 HINTS ${_lib_hints} NO_DEFAULT_PATH)

if(LibTorch_INCLUDE_DIR)
  file(STRINGS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h" _lines
    REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _lines "${_lines}")
  string(REPLACE ";" "." LibTorch_VERSION "${_lines}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_torch_cpu_LIBRARY LibTorch_c10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "Run scripts/setup.sh, or set HASTEN_TORCH to a folder with include/ and lib/.")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  get_filename_component(LibTorch_LIB_DIR "${LibTorch_c10_LIBRARY}" DIRECTORY)
  foreach(_name torch_cpu c10)
    add_library(LibTorch::_${_name} SHARED IMPORTED GLOBAL)
    set_target_properties(LibTorch::_${_name} PROPERTIES
      IMPORTED_LOCATION "${LibTorch_${_name}_LIBRARY}")
  endforeach()
  add_library(LibTorch::cpu INTERFACE IMPORTED GLOBAL)
  set_target_properties(LibTorch::cpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_INCLUDE_DIR};${LibTorch_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS
      "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE;FMT_HEADER_ONLY=1"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "LibTorch::_torch_cpu;LibTorch::_c10")
  # Our files with at::parallel_for are compiled with -fopenmp and must use the very
  # run time that torch brings; a LibTorch without its own takes the compiler's.
  if(LibTorch_gomp_LIBRARY)
    set_property(TARGET LibTorch::cpu APPEND PROPERTY
      INTERFACE_LINK_LIBRARIES "${LibTorch_gomp_LIBRARY}")
  endif()
  # libcudart and libcupti of a CUDA wheel lie next to its libraries.
  set_property(TARGET LibTorch::cpu APPEND PROPERTY
    INTERFACE_LINK_OPTIONS "-Wl,-rpath-link,${LibTorch_LIB_DIR}")
endif()
mark_as_advanced(LibTorch_INCLUDE_DIR LibTorch_torch_cpu_LIBRARY
  LibTorch_c10_LIBRARY LibTorch_gomp_LIBRARY)
