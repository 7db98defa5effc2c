// Keys of JSON files that other programs write. A generated table (tables/known_keys.inc) says of each
// key that the reference libraries know whether hasten uses it.
// Threading: any thread may call every function.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace hasten::detail {

/// Looks at the members of `object`, a part of a file. `file` and `part` choose the table's rows:
/// ("config.json", "bert"). The rows of part "*" count, too, and for "bert:MaskedLM" those of "bert". A key that hasten does not have must have
/// a value that changes nothing: else throws InputError "[where] source: key=value". An unknown key is
/// logged once in a process: "[where] file: unknown key xyz=3 is ignored", at most five of a file.
/// Does nothing if the table has no row of `part`, as for a family that a program registers.
void check_known_keys(std::string_view where, const std::string& source, std::string_view file,
                      std::string_view part, const nlohmann::json& object,
                      std::string_view fix = {});

/// The members of `object` whose keys the table has for that file.
nlohmann::json known_members(std::string_view file, const nlohmann::json& object);

} // namespace hasten::detail
