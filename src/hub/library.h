// A shared library that is loaded if it is installed. Private to src/hub.
#pragma once

#include <dlfcn.h>

namespace hasten::detail {

struct Library {
  void* handle = nullptr; // null also after a function was missing

  /// A function of the type that it is assigned to.
  struct Symbol {
    void* found;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(found);
    }
  };
  Symbol find(const char* name) {
    void* const found = handle == nullptr ? nullptr : ::dlsym(handle, name);
    handle = found == nullptr ? nullptr : handle;
    return {found};
  }
};

} // namespace hasten::detail
