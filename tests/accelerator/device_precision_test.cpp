// Precision on a device that is not the CPU: the device is asked what it has, and torch's autocast of
// the device decides which operators run in 16 bits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/precision_probe.h"
#include "hasten/models/auto_model.h"
#include "support/captured_stderr.h"
#include "support/error_of.h"
#include "support/test_device.h"

namespace hasten::device_precision_test {

using testing_support::device_counters;
using testing_support::error_of;
using testing_support::set_device_bf16;
using testing_support::test_device;

AcceleratorOptions options(Precision precision) {
  AcceleratorOptions options;
  options.device = "test_device";
  options.mixed_precision = precision;
  return options;
}

TEST(DevicePrecision, AutomaticIsBf16WhereTheDeviceHasIt) {
  testing_support::CapturedStderr log;
  EXPECT_EQ(Accelerator(options(Precision::automatic)).mixed_precision(), Precision::bf16);
  EXPECT_NE(log.take().find("precision: bf16, selected automatically: the device computes bf16"),
            std::string::npos);
  set_device_bf16(false);
  EXPECT_EQ(Accelerator(options(Precision::automatic)).mixed_precision(), Precision::no);
  const std::string why = log.take();
  EXPECT_NE(why.find("precision: fp32, selected automatically: test_device:0 has no bf16"),
            std::string::npos)
      << why;
}

TEST(DevicePrecision, Bf16NeedsADeviceThatHasItAndFp16DoesNot) {
  set_device_bf16(false);
  const std::string error = error_of<InputError>([] { Accelerator{options(Precision::bf16)}; });
  EXPECT_NE(error.find("mixed_precision=bf16"), std::string::npos) << error;
  EXPECT_NE(error.find("test_device:0 has no bf16 in hardware"), std::string::npos) << error;
  EXPECT_NE(error.find("--precision fp16"), std::string::npos) << error;
  EXPECT_EQ(Accelerator(options(Precision::fp16)).mixed_precision(), Precision::fp16);
  EXPECT_EQ(why_no_precision(Precision::bf16), "") << "the CPU is another device";
}

TEST(DevicePrecision, Tf32IsForNvidiaGpus) {
  for (const char* device : {"cpu", "test_device"}) {
    AcceleratorOptions asked = options(Precision::no);
    asked.device = device;
    asked.tf32 = true;
    const std::string error = error_of<InputError>([&] { Accelerator{asked}; });
    EXPECT_NE(error.find(std::string("tf32=true on ") + device), std::string::npos) << error;
  }
  EXPECT_FALSE(at::globalContext().allowTF32CuBLAS());
}

TEST(DevicePrecision, FullDeterminismIsTorchsSettingForADevice) {
  for (const std::string device : {"cpu", "test_device"}) {
    AcceleratorOptions asked = options(Precision::no);
    asked.device = device;
    asked.full_determinism = true;
    const Accelerator accelerator(asked);
    EXPECT_EQ(at::globalContext().deterministicAlgorithms(), device != "cpu") << device;
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
  at::globalContext().setDeterministicCuDNN(false);
}

TEST(DevicePrecision, OperatorsRunInTheDtypesOfTorchsListForTheDevice) {
  const at::Tensor x = at::rand({4, 8}, test_device());
  const at::Tensor weight = at::rand({8, 8}, test_device());
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const Autocast autocast({.device = test_device().type(), .dtype = dtype});
    const at::Tensor product = at::linear(x, weight);
    EXPECT_EQ(product.scalar_type(), dtype);
    EXPECT_EQ(at::gelu(product).scalar_type(), dtype);
    for (const at::Tensor& wide :
         {at::softmax(product, -1), at::layer_norm(product, {8}), product.exp(), product.sum()}) {
      EXPECT_EQ(wide.scalar_type(), at::kFloat);
    }
    EXPECT_EQ(at::cat({product, x}).scalar_type(), at::kFloat) << "the widest of its inputs";
    // What hasten registers for the CPU is not the device's: torch leaves this one as it is there.
    EXPECT_EQ(product.tanh().scalar_type(), dtype);
  }
}

TEST(DevicePrecision, ABatchWithoutPaddingNeedsNoMask) {
  torch::manual_seed(3);
  PreTrainedModel bert =
      AutoModelForSequenceClassification::from_config(AutoConfig::from_shape("bert-tiny", 50));
  bert->to(test_device());
  bert->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor ids = at::randint(1, 50, {3, 7}, at::kLong).to(test_device());
  const at::Tensor mask = at::ones({3, 7}, ids.options());
  for (const bool bf16 : {false, true}) {
    const Autocast autocast({.device = test_device().type(),
                             .dtype = at::kBFloat16,
                             .enabled = bf16,
                             .cache_enabled = false});
    const auto run = [&](const at::Tensor& attention_mask) {
      const auto before = device_counters();
      const at::Tensor logits = bert->forward({ids, attention_mask}).logits.cpu();
      return std::pair(logits, (device_counters() - before).operators);
    };
    const auto [masked, with] = run(mask);
    const auto [plain, without] = run({});
    EXPECT_TRUE(at::equal(masked, plain));
    // The mask is made once in the dtype of the products, and each layer adds it.
    EXPECT_EQ(with - without, (bf16 ? 3 : 2) + bert->config().num_hidden_layers);
  }
}

} // namespace hasten::device_precision_test
