# Warnings of our own targets: private, and never part of what a precompiled header
# depends on, so switching HASTEN_WERROR rebuilds nothing but what it must.
function(hasten_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic)
  if(HASTEN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
