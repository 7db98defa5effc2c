#include "event.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <numeric>

#include "hasten/base/json.h"

namespace hasten::detail {

/// Appends the bytes of a number, the lowest first.
template <typename Number>
static void append_fixed(std::string& bytes, Number value) {
  static_assert(std::endian::native == std::endian::little);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// A protobuf message in the making (https://protobuf.dev/programming-guides/encoding). Fields have
/// their numbers in the .proto files and the order of the calls.
class Message {
 public:
  Message& varint(int field, uint64_t value) {
    append_varint(static_cast<uint64_t>(field << 3));
    append_varint(value);
    return *this;
  }
  /// A double or a float.
  template <typename Number>
  Message& fixed(int field, Number value) {
    append_varint(static_cast<uint64_t>(field << 3 | (sizeof value == 8 ? 1 : 5)));
    append_fixed(bytes_, value);
    return *this;
  }
  /// Leaves out a 0, as proto3 does for fields outside a oneof.
  Message& fixed_or_default(int field, double value) {
    return std::bit_cast<uint64_t>(value) == 0 ? *this : fixed(field, value);
  }
  Message& text(int field, std::string_view value) {
    append_varint(static_cast<uint64_t>(field << 3 | 2));
    append_varint(value.size());
    bytes_ += value;
    return *this;
  }
  Message& message(int field, const Message& value) { return text(field, value.bytes_); }
  Message& packed(int field, const std::vector<double>& values) {
    return text(field, {reinterpret_cast<const char*>(values.data()), 8 * values.size()});
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void append_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_ += static_cast<char>(value | 0x80);
    }
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_{};
};

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      table[i] = i;
      for (int bit = 0; bit < 8; ++bit) {
        table[i] = table[i] >> 1 ^ ((table[i] & 1) != 0 ? 0x82f63b78u : 0);
      }
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  }
  return ~crc;
}

std::string event_record(std::string_view data) {
  const auto masked = [](std::string_view bytes) {
    const uint32_t crc = crc32c(bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
  };
  std::string record;
  append_fixed(record, uint64_t{data.size()});
  append_fixed(record, masked(record));
  record += data;
  append_fixed(record, masked(data));
  return record;
}

/// Event.wall_time and Event.step.
static Message event(double wall_time, int64_t step = 0) {
  Message event = Message().fixed_or_default(1, wall_time);
  return step == 0 ? event : event.varint(2, static_cast<uint64_t>(step));
}

/// An Event with a Summary of one value.
static std::string summary_record(double wall_time, int64_t step, const Message& value) {
  return event_record(event(wall_time, step).message(5, Message().message(1, value)).bytes());
}

/// SummaryMetadata of a plugin.
static Message plugin(const char* name, const Message& content) {
  Message data = Message().text(1, name);
  if (!content.bytes().empty()) {
    data.message(2, content);
  }
  return Message().message(1, data);
}

std::string version_record(double wall_time) {
  return event_record(event(wall_time).text(3, "brain.Event:2").bytes());
}

std::string restart_record(double wall_time, int64_t step) {
  constexpr int kStart = 1;
  return event_record(event(wall_time, step).message(7, Message().varint(1, kStart)).bytes());
}

std::string scalar_record(double wall_time, int64_t step, std::string_view tag, double value) {
  return summary_record(wall_time, step,
                        Message().text(1, tag).fixed(2, static_cast<float>(value)));
}

std::string text_record(double wall_time, int64_t step, std::string_view tag,
                        std::string_view text) {
  constexpr int kString = 7; // DataType
  const Message shape = Message().message(2, Message().varint(1, 1)); // one dimension of size 1
  const Message tensor = Message().varint(1, kString).message(2, shape).text(8, text);
  return summary_record(wall_time, step,
                        Message()
                            .text(1, std::string(tag) + "/text_summary")
                            .message(8, tensor)
                            .message(9, plugin("text", Message())));
}

/// The limits of torch.utils.tensorboard's bins: 0, ±1e-12, and so on in steps of 10 % to 1e20.
static const std::vector<double>& bin_limits() {
  static const std::vector<double> limits = [] {
    std::vector<double> all{0};
    for (double limit = 1e-12; limit < 1e20; limit *= 1.1) {
      all.insert(all.end(), {limit, -limit});
    }
    std::ranges::sort(all);
    return all;
  }();
  return limits;
}

std::string histogram_record(double wall_time, int64_t step, std::string_view tag,
                             const std::vector<double>& values) {
  std::vector<double> finite;
  std::ranges::copy_if(values, std::back_inserter(finite),
                       [](double v) { return std::isfinite(v); });
  if (finite.empty()) {
    return {};
  }
  const std::vector<double>& limits = bin_limits();
  const auto upper = [&](double value) { // of its bin
    return std::upper_bound(limits.begin() + 1, limits.end() - 1, value);
  };
  const auto [least, most] = std::ranges::minmax(finite);
  // A bucket has only its upper limit, so an empty one comes first.
  const std::vector<double> bucket_limits(upper(least) - 1, upper(most) + 1);
  std::vector<double> buckets(bucket_limits.size());
  for (const double value : finite) {
    ++buckets[static_cast<size_t>(upper(value) - upper(least)) + 1];
  }
  const Message histogram =
      Message()
          .fixed_or_default(1, least)
          .fixed_or_default(2, most)
          .fixed_or_default(3, static_cast<double>(finite.size()))
          .fixed_or_default(4, std::accumulate(finite.begin(), finite.end(), 0.0))
          .fixed_or_default(5,
                            std::inner_product(finite.begin(), finite.end(), finite.begin(), 0.0))
          .packed(6, bucket_limits)
          .packed(7, buckets);
  return summary_record(wall_time, step, Message().text(1, tag).message(5, histogram));
}

/// A summary of the hparams plugin; `field` of HParamsPluginData. Its version is 0, so it is absent.
static std::string session_record(double wall_time, const char* tag, int field,
                                  const Message& info) {
  const Message content = Message().message(field, info);
  return summary_record(wall_time, 0,
                        Message().text(1, tag).message(9, plugin("hparams", content)));
}

std::string hparams_record(double wall_time, const nlohmann::json& values) {
  Message info;
  for (const auto& [name, value] : values.items()) {
    Message json; // a google.protobuf.Value
    if (value.is_null()) {
      continue;
    }
    if (value.is_number()) {
      json.fixed(2, value.get<double>());
    } else if (value.is_boolean()) {
      json.varint(4, value.get<bool>() ? 1 : 0);
    } else {
      json.text(3, json_text(value));
    }
    info.message(1, Message().text(1, name).message(2, json)); // an entry of a map
  }
  return session_record(wall_time, "_hparams_/session_start_info", 3, info);
}

std::string hparams_end_record(double wall_time) {
  constexpr int kSuccess = 1;
  return session_record(wall_time, "_hparams_/session_end_info", 4, Message().varint(1, kSuccess));
}

} // namespace hasten::detail
