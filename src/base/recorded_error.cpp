#include "hasten/base/recorded_error.h"

#include <atomic>
#include <cstdlib>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"

namespace hasten {

static std::atomic<bool> peer_says_it{false};

void set_said_by_peer(bool said) noexcept { peer_says_it = said; }
bool said_by_peer() noexcept { return peer_says_it; }

bool launcher_says_errors() noexcept {
  return std::getenv("HASTEN_LAUNCHER") != nullptr &&
         detail::environment_value("TORCHELASTIC_ERROR_FILE").has_value();
}

std::string message_of(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find("\nException raised from "));
}

std::string detail::message_of_rank(const std::exception& error) {
  return (dynamic_cast<const Error*>(&error) == nullptr ? error_rank_text() : "") +
         message_of(error);
}

bool record_error(const std::exception& error, bool shown) noexcept {
  try {
    const auto path = detail::environment_value("TORCHELASTIC_ERROR_FILE");
    if (!path || std::filesystem::exists(*path)) {
      return false;
    }
    const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
    const bool of_a_peer = dynamic_cast<const CommunicationError*>(&error) != nullptr ||
                           dynamic_cast<const PeerInputError*>(&error) != nullptr;
    // torchrun reads whole seconds as a string and takes the smallest as the first cause. An error
    // that follows from a peer's is therefore rounded up.
    const nlohmann::ordered_json json = {
        {"message",
         {{"message", detail::message_of_rank(error)},
          {"extraInfo",
           {{"timestamp", std::to_string(now / 1'000'000 + of_a_peer)},
            {"microseconds", now},
            {"of_a_peer", of_a_peer},
            {"shown", shown}}}}}};
    write_file_atomically(*path,
                          json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    return true;
  } catch (...) {
    return false;
  }
}

std::optional<RecordedError> read_recorded_error(const std::filesystem::path& path) noexcept {
  try {
    if (!std::filesystem::exists(path)) {
      return std::nullopt;
    }
    const auto json = read_json_file("base::read_recorded_error", path);
    const auto& message = json.at("message");
    const auto& extra = message.at("extraInfo");
    RecordedError error;
    error.message = message.at("message").get<std::string>();
    error.of_a_peer = extra.value("of_a_peer", false);
    error.shown = extra.value("shown", false);
    error.time = std::chrono::system_clock::time_point(
        extra.contains("microseconds")
            ? std::chrono::microseconds(extra.at("microseconds").get<int64_t>())
            : std::chrono::seconds(std::stoll(extra.at("timestamp").get<std::string>())));
    return error;
  } catch (...) {
    return std::nullopt;
  }
}

} // namespace hasten
