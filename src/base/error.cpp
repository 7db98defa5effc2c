#include "hasten/base/error.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

#include "hasten/base/text.h"

namespace hasten {

namespace detail {

std::atomic<int> error_rank{0};
std::atomic<int> error_world_size{1};

/// Texts may come from peers and files. Characters that control a terminal become '?'.
std::string without_control_bytes(std::string text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 =
        byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f || c1) {
      text[i] = '?';
      text[c1 ? i + 1 : i] = '?';
    }
  }
  return text;
}

std::string error_rank_text() {
  const int world_size = error_world_size;
  return world_size > 1
             ? "rank " + std::to_string(error_rank) + "/" + std::to_string(world_size) + " "
             : "";
}

std::string error_text(std::string_view where, std::string_view what, std::string_view expected,
                       std::string_view fix) {
  std::string text = error_rank_text();
  text.append("[").append(where).append("] ").append(shortened(what));
  if (text.back() != '.') {
    text += '.';
  }
  if (!expected.empty()) {
    text.append(" Expected ").append(shortened(expected)).append(".");
  }
  if (!fix.empty()) {
    text.append(" Fix: ").append(shortened(fix)).append(".");
  }
  return without_control_bytes(std::move(text));
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

} // namespace detail

Error::Error(std::string_view where, std::string_view what, std::string_view expected,
             std::string_view fix, ErrorKind kind)
    : std::runtime_error(detail::error_text(where, what, expected, fix)), kind_(kind) {}

std::string_view Error::text() const {
  const std::string_view whole = what();
  return whole.substr(whole.find("] ") + 2);
}

ErrorKind kind_of(const std::exception& error) {
  if (const auto* own = dynamic_cast<const Error*>(&error)) {
    return own->kind();
  }
  if (const auto* failed_call = dynamic_cast<const std::system_error*>(&error)) {
    return kind_of_errno(failed_call->code().value());
  }
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? ErrorKind::out_of_memory
                                                                : ErrorKind::other;
}

ErrorKind kind_of_errno(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? ErrorKind::full_disk
                                                              : ErrorKind::other;
}

Interrupted::Interrupted(int signal)
    : Error("base::interrupt", "stopped by signal " + std::to_string(signal)), signal_(signal) {}

void set_error_rank(int rank, int world_size) {
  detail::error_rank = rank;
  detail::error_world_size = world_size;
}

std::string nearest_name(std::string_view word, std::span<const std::string> names) {
  std::string best;
  constexpr size_t kLongest = 256; // the time is the product of both lengths
  if (word.size() > kLongest) {
    return best;
  }
  size_t best_distance = (word.size() < 4 ? 1 : std::max<size_t>(2, word.size() / 3)) + 1;
  for (const std::string& name : names) {
    if (name.size() > 2 * kLongest) {
      continue;
    }
    const size_t distance = detail::edit_distance(word, name);
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  return best;
}

} // namespace hasten
