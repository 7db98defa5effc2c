#include "hasten/optim/gradient_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "hasten/base/error.h"
#include "support/on_device.h"

namespace hasten {

TEST(GradientNorm, EqualsTheNormInFp64OfAllTogether) {
  torch::manual_seed(5);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const std::vector<at::Tensor> tensors = {
        on_device::randn({300, 1500}).to(dtype), on_device::randn({33}).to(dtype),
        on_device::randn({0}).to(dtype), on_device::randn({7, 8}).to(dtype).t(),
        on_device::randn({7, 8}).to(dtype).narrow(1, 2, 3)};
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : tensors) {
      flat.push_back(tensor.to(at::kDouble).flatten());
    }
    const auto all = torch::cat(flat);
    for (const double p : {1.0, 2.0, 3.0, kInf}) {
      const double expected = torch::linalg_vector_norm(all, p).item<double>();
      EXPECT_NEAR(gradient_norm(tensors, p), expected, 1e-7 * expected) << dtype << " " << p;
      const auto each = tensor_norms(tensors, p);
      ASSERT_EQ(each.size(), tensors.size());
      EXPECT_NEAR(each[1], torch::linalg_vector_norm(flat[1], p).item<double>(), 1e-6 * each[1]);
      EXPECT_EQ(each[2], 0);
    }
  }
  EXPECT_EQ(gradient_norm({}, 2), 0);
  EXPECT_THROW(gradient_norm({}, -1), InputError);
  EXPECT_THROW(gradient_norm({}, std::nan("")), InputError);
}

TEST(GradientNorm, RowsOfOneIndexOfASparseGradientAreOneRow) {
  const auto values = torch::tensor({{1.0F, -2.0F}, {3.0F, 1.0F}, {0.5F, 0.5F}});
  const auto sparse =
      torch::sparse_coo_tensor(torch::tensor({{4, 1, 4}}), values, {6, 2}); // row 4 twice
  ASSERT_FALSE(sparse.is_coalesced());
  for (const double p : {1.0, 2.0, double(INFINITY)}) {
    const double expected = torch::linalg_vector_norm(sparse.to_dense(), p).item<double>();
    EXPECT_NEAR(gradient_norm({sparse}, p), expected, 1e-6 * expected) << p;
  }
}

TEST(GradientNorm, WhatIsNotFiniteShowsInItsTensor) {
  for (const double p : {1.0, 2.0, double(INFINITY)}) {
    for (const int64_t at : {0, 1500, 4998, 4999}) {
      for (const float value : {NAN, INFINITY, -INFINITY}) {
        auto bad = on_device::ones({5000});
        bad[at] = value;
        const auto norms = tensor_norms({on_device::ones({5000}), bad}, p);
        EXPECT_TRUE(std::isfinite(norms[0]));
        EXPECT_EQ(std::isnan(norms[1]), std::isnan(value)) << p << " " << at;
        EXPECT_FALSE(std::isfinite(norms[1]));
        EXPECT_FALSE(std::isfinite(gradient_norm({bad, on_device::ones(3)}, p)));
      }
    }
  }
}

TEST(GradientNorm, ClipByValue) {
  auto tensor = on_device::tensor({-3.F, 0.5F, 2.F, NAN});
  clip_by_value_({tensor}, 1.5);
  EXPECT_TRUE(torch::equal(tensor.slice(0, 0, 3), on_device::tensor({-1.5F, 0.5F, 1.5F})));
  EXPECT_TRUE(std::isnan(tensor[3].item<float>()));
  EXPECT_THROW(clip_by_value_({tensor}, 0), InputError);
}

} // namespace hasten
