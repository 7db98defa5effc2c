// Serves files of this folder as the repository org/tiny of a hub on this machine, until its input
// ends:
//   hub_server FILE=ETAG…
// Prints the URL.
#include <iostream>

#include "hasten/base/exit_code.h"
#include "hasten/base/text.h"
#include "hub/hub_server.h"

int main(int argc, char** argv) {
  return hasten::record([&] {
    hasten::testing_support::HubServer hub;
    for (int i = 1; i < argc; ++i) {
      const auto parts = hasten::split(argv[i], "=");
      hub.files[parts.at(0)] = {hasten::read_file(parts[0]), parts.at(1)};
    }
    std::cout << hub.url() << std::endl;
    std::cin.get();
    return 0;
  });
}
