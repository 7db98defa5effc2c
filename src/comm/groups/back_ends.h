// The groups and back ends that hasten has.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "core/cuda_library.h"
#include "hasten/comm/backend.h"

namespace hasten::detail {

/// Creates the group of a world of one.
std::shared_ptr<Communicator> make_local_group(const CommunicatorOptions& options);
/// The back end "nccl", which the library hasten_nccl has. Throws InputError that says what is
/// missing on this host.
c10::intrusive_ptr<c10d::Backend> make_nccl(const DeviceBackendContext& context);
/// What NCCL's text about connections that it cannot make means. Empty: as it says.
Advice connection_advice(const std::string& text);
/// A group whose operations on a device go through `factory`, and all others through Gloo.
std::shared_ptr<Communicator> make_device_group(const BackendContext& context,
                                                DeviceBackendFactory factory);
/// What is to move the host's memory in groups of that back end: "gloo", "shm" or "auto".
std::string wanted_backend(const std::string& name);
/// By name: what in options and environment decides how ranks communicate.
std::map<std::string, std::string> transport_options(const CommunicatorOptions& options);
/// The back ends "gloo", "shm" and, where no device has one, "auto".
std::shared_ptr<Communicator> make_host_group(const BackendContext& context);

} // namespace hasten::detail
