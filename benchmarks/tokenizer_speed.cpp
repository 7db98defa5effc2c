// Encodes the lines of a file with each tokenizer of a folder, on one thread:
//   tokenizer_speed TEXTS FOLDER KIND…
// Prints {"case", "seconds", "tokens"} for each kind, and for each kind with offsets.
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

void measure(const std::vector<std::string>& lines, const std::filesystem::path& folder,
             bool offsets) {
  const auto tokenizer = AutoTokenizer::from_pretrained(folder);
  const EncodeOptions options{.return_offsets_mapping = offsets};
  for (size_t i = 0; i < lines.size() && i < 1000; ++i) {
    tokenizer.encode(lines[i], options);
  }
  const auto start = std::chrono::steady_clock::now();
  size_t tokens = 0;
  for (const std::string& line : lines) {
    tokens += tokenizer.encode(line, options).ids.size();
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  std::cout << nlohmann::json{{"case", folder.filename().string() + (offsets ? "_offsets" : "")},
                              {"seconds", taken.count()},
                              {"tokens", tokens}}
                   .dump()
            << std::endl;
}

} // namespace hasten

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: tokenizer_speed TEXTS FOLDER KIND..." << std::endl;
    return 2;
  }
  return hasten::record([&] {
    auto lines = hasten::split(hasten::read_file(argv[1]), "\n");
    if (lines.back().empty()) { // after the last line's end
      lines.pop_back();
    }
    for (int kind = 3; kind < argc; ++kind) {
      for (const bool offsets : {false, true}) {
        hasten::measure(lines, std::filesystem::path(argv[2]) / argv[kind], offsets);
      }
    }
    return 0;
  });
}
