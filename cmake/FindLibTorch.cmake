# Makes LibTorch::cpu from a pip wheel, a LibTorch zip or an installed torch, without
# the package file of torch itself: that of a CUDA wheel demands a CUDA toolkit.
#
# In:  HASTEN_TORCH (cache or environment): a folder with include/ and lib/, the only one that
#      is looked at. Without it the first of these folders that has both and is not too old:
#      Torch_DIR's, those of CMAKE_PREFIX_PATH, HASTEN_TORCH_FOLDERS, what scripts/setup.sh put
#      into the cache folder, the torch of the python3 on PATH.
#      HASTEN_CUDA: AUTO (CUDA where all of it is found), ON (an error where it is not), or OFF.
# Out: LibTorch::cpu (torch_cpu, c10 and the OpenMP run time torch itself uses),
#      LibTorch::cuda (also torch_cuda, c10_cuda, the CUDA run time and the headers that a C++
#      file with NCCL needs; no CUDA compiler), LibTorch_VERSION, LibTorch_LIB_DIR,
#      LibTorch_HAS_GRAPHS (graphs of any device, which older releases lack).

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

# Makes LibTorch::cuda. Sets `missing` to what of CUDA was not found. The wheels of pip have
# nvidia/<library>/ next to the folder of torch; they come first, because torch_cuda loads the CUDA
# run time from there.
function(_libtorch_cuda torch_lib missing)
  set(lacks "")
  foreach(name torch_cuda c10_cuda)
    find_library(LibTorch_${name}_LIBRARY ${name} HINTS "${torch_lib}" NO_DEFAULT_PATH)
    mark_as_advanced(LibTorch_${name}_LIBRARY)
    if(NOT LibTorch_${name}_LIBRARY)
      list(APPEND lacks "lib${name}.so")
    endif()
  endforeach()
  if(lacks)
    list(JOIN lacks ", " lacks)
    set(${missing} "${lacks} in ${torch_lib}" PARENT_SCOPE)
    return()
  endif()
  # A zip of LibTorch adds a hash to the name.
  file(STRINGS "${LibTorch_c10_cuda_LIBRARY}" runtime
    REGEX "^libcudart[-0-9a-f]*[.]so[.][0-9.]+$" LIMIT_COUNT 1)
  if(NOT runtime)
    set(${missing} "the name of libcudart in ${LibTorch_c10_cuda_LIBRARY}" PARENT_SCOPE)
    return()
  endif()
  string(REGEX REPLACE ".*[.]so[.]([0-9]+).*" "\\1" release "${runtime}")
  file(REAL_PATH "${torch_lib}" torch_lib)
  file(GLOB wheels "${torch_lib}/../../nvidia/*")
  set(toolkits ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH}
    /usr/local/cuda)
  find_file(LibTorch_cudart_LIBRARY "${runtime}" HINTS "${torch_lib}" ${wheels} ${toolkits}
    PATH_SUFFIXES lib lib64)
  mark_as_advanced(LibTorch_cudart_LIBRARY)
  if(NOT LibTorch_cudart_LIBRARY)
    list(APPEND lacks "${runtime}")
  endif()
  set(includes "")
  foreach(header cuda_runtime_api.h crt/host_defines.h nv/target cusparse.h nccl.h)
    string(MAKE_C_IDENTIFIER "LibTorch_${header}_INCLUDE_DIR" variable)
    find_path(${variable} "${header}" HINTS ${wheels} ${toolkits}
      PATH_SUFFIXES include include/cccl)
    mark_as_advanced(${variable})
    if(${variable})
      list(APPEND includes "${${variable}}")
    else()
      list(APPEND lacks "${header}")
    endif()
  endforeach()
  if(LibTorch_cuda_runtime_api_h_INCLUDE_DIR)
    file(STRINGS "${LibTorch_cuda_runtime_api_h_INCLUDE_DIR}/cuda_runtime_api.h" version
      REGEX "define CUDART_VERSION " LIMIT_COUNT 1)
    string(REGEX REPLACE "[^0-9]" "" version "${version}")
    if(NOT version MATCHES "^${release}0")
      list(APPEND lacks "headers of CUDA ${release}: \
${LibTorch_cuda_runtime_api_h_INCLUDE_DIR} has ${version}")
    endif()
  endif()
  list(JOIN lacks ", " text)
  set(${missing} "${text}" PARENT_SCOPE)
  if(lacks OR TARGET LibTorch::cuda)
    return()
  endif()
  list(REMOVE_DUPLICATES includes)
  foreach(name torch_cuda c10_cuda cudart)
    add_library(LibTorch::_${name} SHARED IMPORTED GLOBAL)
    set_target_properties(LibTorch::_${name} PROPERTIES
      IMPORTED_LOCATION "${LibTorch_${name}_LIBRARY}")
  endforeach()
  add_library(LibTorch::cuda INTERFACE IMPORTED GLOBAL)
  set_target_properties(LibTorch::cuda PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${includes}"
    INTERFACE_COMPILE_DEFINITIONS USE_C10D_NCCL
    INTERFACE_LINK_LIBRARIES
      "LibTorch::_torch_cuda;LibTorch::_c10_cuda;LibTorch::_cudart;LibTorch::cpu")
  list(JOIN includes ", " includes)
  message(STATUS "CUDA ${release}: ${LibTorch_cudart_LIBRARY}, headers in ${includes}")
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
  set(LibTorch_HAS_GRAPHS FALSE)
  if(EXISTS "${LibTorch_INCLUDE_DIR}/ATen/core/GraphImplInterface.h")
    set(LibTorch_HAS_GRAPHS TRUE)
  endif()
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

if(LibTorch_FOUND)
  get_filename_component(LibTorch_LIB_DIR "${LibTorch_c10_LIBRARY}" DIRECTORY)
endif()
if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
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
if(LibTorch_FOUND AND HASTEN_CUDA)
  _libtorch_cuda("${LibTorch_LIB_DIR}" _missing)
  if(_missing AND NOT HASTEN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HASTEN_CUDA=${HASTEN_CUDA}, and these are missing: ${_missing}. \
scripts/setup.sh --cuda fetches a LibTorch with all of them. CMake also looks in CUDAToolkit_ROOT, \
CUDA_HOME and CMAKE_PREFIX_PATH.")
  elseif(_missing)
    message(STATUS "No CUDA. Missing: ${_missing}")
  endif()
endif()
mark_as_advanced(LibTorch_INCLUDE_DIR LibTorch_torch_cpu_LIBRARY
  LibTorch_c10_LIBRARY LibTorch_gomp_LIBRARY)
