# Makes LibTorch::cpu from a pip wheel, a LibTorch zip or an installed torch, without
# the package file of torch itself: that of a CUDA wheel demands a CUDA toolkit.
#
# In:  HASTEN_TORCH (cache or environment): a folder with include/ and lib/, the only one that
#      is looked at. Without it the first of these folders that has both and is not too old:
#      Torch_DIR's, those of CMAKE_PREFIX_PATH, HASTEN_TORCH_FOLDERS, what scripts/setup.sh put
#      into the cache folder, the torch of the python3 on PATH.
# Out: LibTorch::cpu (torch_cpu, c10 and the OpenMP run time torch itself uses),
#      LibTorch_VERSION, LibTorch_LIB_DIR.

# Sets `result` to the version of the LibTorch in `folder`, to nothing if there is none.
function(_libtorch_version folder result)
  set(version "")
  set(header "${folder}/include/torch/headeronly/version.h")
  if(EXISTS "${folder}/include/torch/csrc/api/include/torch/torch.h" AND EXISTS "${header}"
      AND EXISTS "${folder}/lib/libtorch_cpu.so")
    file(STRINGS "${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
    string(REPLACE ";" "." version "${lines}")
  endif()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# Sets `result` to the first of the folders whose LibTorch is new enough, or else to the first
# with a LibTorch.
function(_libtorch_choose result)
  set(chosen "")
  foreach(folder IN LISTS ARGN)
    _libtorch_version("${folder}" version)
    if(version AND NOT chosen)
      set(chosen "${folder}")
    endif()
    if(version AND version VERSION_GREATER_EQUAL "${LibTorch_FIND_VERSION}")
      set(chosen "${folder}")
      break()
    endif()
  endforeach()
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

set(_torch_folders)
if(HASTEN_TORCH)
  set(_torch_folders "${HASTEN_TORCH}")
elseif(NOT "$ENV{HASTEN_TORCH}" STREQUAL "")
  set(_torch_folders "$ENV{HASTEN_TORCH}")
endif()
if(_torch_folders)
  set(_torch_root "${_torch_folders}")
else()
  foreach(_folder "${Torch_DIR}" "$ENV{Torch_DIR}")
    if(_folder)
      get_filename_component(_folder "${_folder}/../../.." ABSOLUTE)
      list(APPEND _torch_folders "${_folder}")
    endif()
  endforeach()
  # torch.utils.cmake_prefix_path is share/cmake in the folder of torch.
  string(REPLACE ":" ";" _prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_folder IN LISTS CMAKE_PREFIX_PATH _prefixes)
    get_filename_component(_above "${_folder}/../.." ABSOLUTE)
    list(APPEND _torch_folders "${_folder}" "${_above}")
  endforeach()
  list(APPEND _torch_folders ${HASTEN_TORCH_FOLDERS})
  if(NOT "$ENV{HASTEN_CACHE}" STREQUAL "")
    list(APPEND _torch_folders "$ENV{HASTEN_CACHE}/libtorch")
  elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    list(APPEND _torch_folders "$ENV{XDG_CACHE_HOME}/hasten/libtorch")
  else()
    list(APPEND _torch_folders "$ENV{HOME}/.cache/hasten/libtorch")
  endif()
  _libtorch_choose(_torch_root ${_torch_folders})
  _libtorch_version("${_torch_root}" _version)
  if(NOT _version OR _version VERSION_LESS "${LibTorch_FIND_VERSION}")
    # find_spec() does not import torch.
    execute_process(COMMAND python3 -c
        "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
      OUTPUT_VARIABLE _folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND _torch_folders ${_folder})
    _libtorch_choose(_torch_root ${_torch_folders})
  endif()
endif()

list(TRANSFORM _torch_root APPEND "/include" OUTPUT_VARIABLE _torch_include)
list(TRANSFORM _torch_root APPEND "/lib" OUTPUT_VARIABLE _torch_lib)
find_path(LibTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h
  HINTS ${_torch_include} NO_DEFAULT_PATH)
foreach(_name torch_cpu c10)
  find_library(LibTorch_${_name}_LIBRARY ${_name} HINTS ${_torch_lib} NO_DEFAULT_PATH)
endforeach()
find_file(LibTorch_gomp_LIBRARY
  NAMES libgomp.so.1 HINTS ${_torch_lib} NO_DEFAULT_PATH)

if(LibTorch_INCLUDE_DIR)
  get_filename_component(_torch_root "${LibTorch_INCLUDE_DIR}" DIRECTORY)
  _libtorch_version("${_torch_root}" LibTorch_VERSION)
endif()

list(REMOVE_DUPLICATES _torch_folders)
list(JOIN _torch_folders ", " _looked_at)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_torch_cpu_LIBRARY LibTorch_c10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "Set HASTEN_TORCH to a LibTorch ${LibTorch_FIND_VERSION}: a folder with include/ and lib/, \
such as the folder torch of a pip installation. scripts/setup.sh in hasten's sources fetches one. \
There was none in ${_looked_at}.")

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
