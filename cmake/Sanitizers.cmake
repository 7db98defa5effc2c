# HASTEN_SANITIZE=address,undefined or thread. A sanitizer needs its own build folder.
function(hasten_sanitizers target)
  if(HASTEN_SANITIZE STREQUAL "")
    return()
  endif()
  if(HASTEN_SANITIZE MATCHES "thread" AND HASTEN_SANITIZE MATCHES "address")
    message(FATAL_ERROR
      "HASTEN_SANITIZE=${HASTEN_SANITIZE}: thread and address exclude each other.")
  endif()
  target_compile_options(${target} INTERFACE
    -fsanitize=${HASTEN_SANITIZE} -fno-omit-frame-pointer -g1)
  if(HASTEN_SANITIZE MATCHES "undefined")
    target_compile_options(${target} INTERFACE -fno-sanitize-recover=undefined)
  endif()
  target_link_options(${target} INTERFACE -fsanitize=${HASTEN_SANITIZE})
endfunction()
