// The records of TensorBoard's event files. A record is
//   length of the data (8 bytes), masked CRC-32C of these 8 bytes (4),
//   the data: a tensorboard.Event, masked CRC-32C of the data (4),
// all little-endian. The messages are those of tensorboard/compat/proto/{event,summary,tensor}.proto
// and tensorboard/plugins/hparams/plugin_data.proto.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// CRC-32C (Castagnoli), as in iSCSI.
uint32_t crc32c(std::string_view bytes);
/// The data in its frame.
std::string event_record(std::string_view data);

/// An Event, in its frame. `wall_time`: seconds since 1970.
std::string version_record(double wall_time);
/// TensorBoard forgets this run's earlier values of `step` and later steps.
std::string restart_record(double wall_time, int64_t step);
std::string scalar_record(double wall_time, int64_t step, std::string_view tag, double value);
std::string text_record(double wall_time, int64_t step, std::string_view tag,
                        std::string_view text);
/// Empty if no value is finite.
std::string histogram_record(double wall_time, int64_t step, std::string_view tag,
                             const std::vector<double>& values);
/// Hyper-parameters; null is left out, arrays and objects are JSON text.
std::string hparams_record(double wall_time, const nlohmann::json& values);
/// The run of the hyper-parameters has ended well.
std::string hparams_end_record(double wall_time);

} // namespace hasten::detail
