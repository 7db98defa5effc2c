// The operators of the test device. A few are its own: memory, copies and views. All others run the
// kernel of the CPU on tensors that share the device's memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <string_view>
#include <utility>

#include "hasten/core/op_scope.h"
#include "support/device_graph.h"
#include "support/device_memory.h"

namespace hasten::testing_support::machine {

using Stack = torch::jit::Stack;

static bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

static at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

static at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static const Clock& clock_of_current_stream(int device) {
  return machine().streams[static_cast<size_t>(current_stream_index(device))];
}

static void count_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Lock lock(machine().mutex);
  DeviceCounters& counters = machine().counters;
  const at::Tensor& here = from.is_cpu() ? from : to;
  const at::Tensor& there = from.is_cpu() ? to : from;
  (to.is_cpu() ? counters.copies_to_host : counters.copies_to_device) += 1;
  (to.is_cpu() ? counters.bytes_to_host : counters.bytes_to_device) +=
      static_cast<int64_t>(to.nbytes());
  const bool pinned = find_block(here.storage().data()) != nullptr;
  counters.pageable_copies += non_blocking && !pinned;
  if (!non_blocking || !pinned) {
    host_waits(clock_of_current_stream(there.device().index()));
  }
}

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Machine& m = machine();
  const bool both = on_device(from) && on_device(to);
  const c10::DeviceIndex device = (on_device(from) ? from : to).device().index();
  {
    Kernel kernel("aten::copy_", device);
    ++m.counters.operators;
    // A copy between devices runs on the source's stream. It is ordered with the other's.
    const auto source = static_cast<size_t>(current_stream_index(device));
    const auto target =
        static_cast<size_t>(current_stream_index(to.is_cpu() ? 0 : to.get_device()));
    if (both && source != target) {
      join(m.streams[source], m.streams[target]);
    }
    TORCH_CHECK(both || capture_of(static_cast<int>(source)) == nullptr,
                "operation not permitted when the stream is capturing: a copy to or from the host");
    kernel.touch(from, false);
    kernel.touch(to, true);
    const auto copy = [to = host_view(to), from = host_view(from)] { to.copy_(from); };
    copy();
    kernel.record(copy);
    if (both && source != target) {
      join(m.streams[target], m.streams[source]);
    }
  }
  if (!both && to.numel() > 0) {
    count_copy(from, to, non_blocking);
  }
  return to;
}

static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static at::Scalar local_scalar(const at::Tensor& self) {
  const at::Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_from(self, host, false);
  return host.item();
}

static const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                                 std::optional<at::MemoryFormat>) {
  const auto elements = c10::multiply_integers(size) + self.storage_offset();
  const size_t needed = static_cast<size_t>(elements) * self.element_size();
  if (self.storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                               at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

static void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

static bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

/// Kernels of the CPU that take no generator draw from the device's.
class DrawsOfDevice {
 public:
  DrawsOfDevice(bool draws, c10::DeviceIndex device) {
    if (draws) {
      at::Generator generator = default_generator(device);
      device_ = host_generator(generator);
      host_ = at::globalContext().defaultGenerator(at::kCPU);
      before_ = host_.get_state();
      host_.set_state(device_.get_state());
    }
  }
  ~DrawsOfDevice() {
    if (before_.defined()) {
      device_.set_state(host_.get_state());
      host_.set_state(before_);
    }
  }

 private:
  at::Generator device_;
  at::Generator host_;
  at::Tensor before_;
};

/// One call of an operator without a kernel here.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        arguments_(op.schema().arguments()),
        stack_(stack),
        given_(stack.end() - static_cast<int64_t>(arguments_.size()), stack.end()),
        device_(find_device()),
        kernel_(name(), device_) {}

  void run() {
    ++machine().counters.operators;
    const size_t first = stack_.size() - given_.size();
    const auto& returns = op_.schema().returns();
    bool has_generator = false;
    for (size_t i = 0; i < given_.size(); ++i) {
      has_generator = has_generator || arguments_[i].name() == "generator";
      stack_[first + i] = on_host(i);
    }
    const bool draws = !has_generator && op_.hasTag(at::Tag::nondeterministic_seeded);
    const auto call = [kernel = kernel_of_cpu(), draws, device = device_](Stack& stack) {
      const DrawsOfDevice scope(draws, device);
      kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    };
    const Stack inputs(stack_.begin() + static_cast<int64_t>(first), stack_.end());
    call(stack_);
    std::vector<std::pair<at::Tensor, at::Tensor>> stores; // of values that the kernel makes
    for (const auto& [output, made] : outputs_) {
      if (output.sizes() != made.sizes()) {
        output.resize_(made.sizes());
      }
      kernel_.touch(output, true);
      host_view(output).copy_(made);
      stores.emplace_back(host_view(output), made);
    }
    const size_t result = stack_.size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      stack_[result + i] = on_device_again(returns[i], stack_[result + i]);
    }
    kernel_.record(
        [call, inputs, stores = std::move(stores), results = std::move(results_), &returns] {
          Stack stack = inputs;
          call(stack);
          for (const auto& [output, made] : stores) {
            output.copy_(made);
          }
          size_t next = 0;
          for (size_t i = 0; i < returns.size(); ++i) {
            if (returns[i].alias_info() == nullptr) {
              detail::visit_tensors(stack[i],
                                    [&](const at::Tensor& made) { results[next++].copy_(made); });
            }
          }
        });
    if (needs_host()) {
      host_waits(clock_of_current_stream(device_));
    }
  }

 private:
  std::string name() const { return c10::toString(op_.schema().operator_name()); }

  c10::DeviceIndex find_device() const {
    c10::DeviceIndex device = -1;
    for (const c10::IValue& value : given_) {
      detail::visit_tensors(value, [&](const at::Tensor& tensor) {
        if (device < 0 && on_device(tensor)) {
          device = static_cast<c10::DeviceIndex>(tensor.get_device());
        }
      });
      if (device < 0 && value.isDevice() && value.toDevice().type() == kType) {
        device = value.toDevice().index();
      }
    }
    return device < 0 ? current_device() : device;
  }

  /// Operators of a GPU take tensors of the CPU only as single values and as indices.
  void check_device(const at::Tensor& tensor) const {
    const bool fine = on_device(tensor) ? tensor.get_device() == device_
                                        : !tensor.is_cpu() || tensor.dim() == 0 ||
                                              name().find("index") != std::string::npos;
    TORCH_CHECK(fine, "Expected all tensors to be on the same device, but ", name(), " got one on ",
                tensor.device(), " and works on ", test_device(device_));
  }

  c10::IValue on_host(size_t i) {
    const c10::IValue& value = given_[i];
    if (value.isDevice()) {
      return value.toDevice().type() == kType ? c10::IValue(c10::Device(at::kCPU)) : value;
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      at::Generator generator = value.toGenerator();
      return host_generator(generator);
    }
    if (value.isNone() && arguments_[i].name() == "generator") {
      at::Generator generator = default_generator(device_);
      return host_generator(generator);
    }
    const auto* alias = arguments_[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    return detail::map_tensors(value, [&](const at::Tensor& tensor) {
      check_device(tensor);
      if (arguments_[i].is_out() && on_device(tensor)) { // the kernel may resize it
        outputs_.emplace_back(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                                        tensor.options().device(at::kCPU)));
        return outputs_.back().second;
      }
      kernel_.touch(tensor, write);
      return host_view(tensor);
    });
  }

  /// The operator, or the one that it stands for on devices that torch does not know.
  c10::OperatorHandle kernel_of_cpu() {
    const std::string& called = op_.schema().name();
    if (called == "aten::convolution_overrideable") {
      return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    }
    if (called == "aten::convolution_backward_overrideable") {
      const auto first = stack_.end() - static_cast<int64_t>(given_.size());
      const bool transposed = (first + 6)->toBool();
      const at::Tensor& weight = (first + 2)->toTensor();
      const int64_t channels = transposed ? weight.size(1) * (first + 8)->toInt() : weight.size(0);
      stack_.insert(first + 3, std::vector<int64_t>{channels}); // the sizes of the bias
      return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    }
    return op_;
  }

  c10::IValue on_device_again(const c10::Argument& result, const c10::IValue& value) {
    const auto* alias = result.alias_info();
    if (alias == nullptr) {
      return detail::map_tensors(value, [this](const at::Tensor& made) { return moved(made); });
    }
    TORCH_CHECK(alias->isWrite(), "the test device has no kernel for the view ", name());
    for (size_t i = 0; i < given_.size(); ++i) {
      const auto* from = arguments_[i].alias_info();
      if (from != nullptr && *from == *alias) {
        return given_[i];
      }
    }
    return value;
  }

  at::Tensor moved(const at::Tensor& made) {
    const at::Tensor dense = made.is_non_overlapping_and_dense() ? made : made.contiguous();
    at::Tensor moved = empty_strided(dense.sizes(), dense.strides(), dense.scalar_type(), {},
                                     test_device(device_), {});
    kernel_.touch(moved, true);
    host_view(moved).copy_(dense);
    results_.push_back(host_view(moved));
    return moved;
  }

  /// Whether a GPU waits here, because a value or a shape depends on data. An index by a mask has
  /// called nonzero before; index_put calls it in its kernel.
  bool needs_host() const {
    bool indexed = false;
    bool masked = false;
    for (const c10::IValue& value : given_) {
      indexed = indexed || value.isOptionalTensorList();
      if (value.isOptionalTensorList() && name().find("index_put") != std::string::npos) {
        detail::visit_tensors(value, [&](const at::Tensor& index) {
          masked = masked || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
        });
      }
    }
    return masked || op_.hasTag(at::Tag::data_dependent_output) ||
           (!indexed && op_.hasTag(at::Tag::dynamic_output_shape));
  }

  const c10::OperatorHandle& op_;
  const std::vector<c10::Argument>& arguments_;
  Stack& stack_;
  const std::vector<c10::IValue> given_;
  const c10::DeviceIndex device_;
  Kernel kernel_;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs_; // and what the kernel makes
  std::vector<at::Tensor> results_; // the memory of results, as tensors of the CPU
};

static void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  OperatorCall(op, *stack).run();
}

void install_operators() {
  static auto aten = MAKE_TORCH_LIBRARY_IMPL(aten, PrivateUse1);
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("as_strided", at::native::as_strided_tensorimpl);
  aten.impl("view", at::native::view);
  aten.impl("_reshape_alias", at::native::_reshape_alias);
  aten.impl("unfold", at::native::unfold);
  aten.impl("resize_", resize_);
  aten.impl("_copy_from", copy_from);
  aten.impl("_copy_from_and_resize", copy_from_and_resize);
  aten.impl("_local_scalar_dense", local_scalar);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("record_stream", record_stream);
  aten.impl("_has_compatible_shallow_copy_type", has_compatible_type); // Module::to() uses it
  for (const char* op : {"convolution_overrideable", "convolution_backward_overrideable"}) {
    // torch's own kernels of these throw
    aten.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  // GPUs have kernels for these. Elsewhere torch makes them of several operators: those of lists of
  // one for each tensor.
  const auto composed = [](const c10::OperatorName& op) {
    return op.name.starts_with("aten::_foreach_") || op.name == "aten::native_layer_norm" ||
           op.name == "aten::_chunk_cat" || op.name == "aten::split_with_sizes_copy";
  };
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (composed(op)) {
      aten.impl(c10::toString(op).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
  }
  static auto autograd = MAKE_TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1);
  autograd.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  static auto others = MAKE_TORCH_LIBRARY_IMPL(_, PrivateUse1);
  others.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

} // namespace hasten::testing_support::machine
