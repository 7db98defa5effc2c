#include "shm/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torch/torch.h>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>

#include "hasten/base/error.h"
#include "shm/reduce_rows.h"
#include "support/error_of.h"

namespace hasten::detail {

using testing_support::error_of;

TEST(SharedMemory, OthersReadItAndCanNeitherWriteNorResizeIt) {
  SharedMemory own(8192);
  EXPECT_EQ(own.data()[8191], 0);
  std::strcpy(own.data() + 4000, "hello");
  const SharedMemoryAddress address = own.address();
  const SharedMemory seen(address);
  EXPECT_STREQ(seen.data() + 4000, "hello");
  std::strcpy(own.data() + 4000, "again");
  EXPECT_STREQ(seen.data() + 4000, "again");

  const std::string path = "/proc/self/fd/" + std::to_string(address.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(descriptor, 0);
  EXPECT_EQ(::ftruncate(descriptor, 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  ::close(descriptor);
  EXPECT_EQ(::mprotect(seen.data(), 4096, PROT_READ | PROT_WRITE), -1);
}

TEST(SharedMemory, WhatIsHiddenOrOfAnotherProcessIsRefused) {
  SharedMemory own(4096);
  SharedMemoryAddress address = own.address();
  ++address.inode;
  EXPECT_NE(error_of([&] { SharedMemory{address}; }).find("offers other memory"),
            std::string::npos);
  own.hide();
  --address.inode;
  EXPECT_THROW(SharedMemory{address}, Error);
}

TEST(SharedMemory, WhatTheHostDoesNotHaveIsAnErrorThatSaysHowMuchIsMissing) {
  const std::string text = error_of([] { SharedMemory(size_t{1} << 50); });
  EXPECT_NE(text.find("1.0 PiB wanted"), std::string::npos) << text;
  EXPECT_NE(text.find("of it missing"), std::string::npos) << text;
}

// All dtypes and operations as torch computes them one after the other, 16 bits in fp32.
TEST(ReduceRows, EveryReductionIsThatOfTorchInRankOrder) {
  torch::manual_seed(5);
  for (const auto type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                          at::kShort, at::kChar, at::kByte}) {
    for (const ReduceOp op :
         {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PRODUCT}) {
      for (const int world : {2, 3}) {
        if (op == ReduceOp::AVG && !at::isFloatingType(type)) {
          continue;
        }
        SCOPED_TRACE(std::string(c10::toString(type)) + ", " + std::to_string(int(op)));
        std::vector<at::Tensor> rows;
        std::vector<const char*> begins;
        for (int i = 0; i < world; ++i) {
          rows.push_back((torch::rand({2500}) * 12).to(type));
          begins.push_back(static_cast<const char*>(rows.back().const_data_ptr()));
        }
        const bool narrow = type == at::kHalf || type == at::kBFloat16;
        at::Tensor expected = narrow ? rows[0].to(at::kFloat) : rows[0].clone();
        for (int i = 1; i < world; ++i) {
          const at::Tensor& row = rows[static_cast<size_t>(i)];
          expected = op == ReduceOp::MIN   ? at::minimum(expected, row.to(expected.scalar_type()))
                     : op == ReduceOp::MAX ? at::maximum(expected, row.to(expected.scalar_type()))
                     : op == ReduceOp::PRODUCT ? expected * row
                                               : expected + row;
        }
        if (op == ReduceOp::AVG) {
          expected = expected / world;
        }
        at::Tensor output = rows[0]; // in place
        reduce_rows(op, type, begins, type, static_cast<char*>(output.data_ptr()), 2500);
        EXPECT_TRUE(torch::equal(output, expected.to(type)));
      }
    }
  }
}

TEST(ReduceRows, NansArePassedOnAndBoolsAreJoined) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a{1, nan, 3}, b{nan, 2, 2};
  std::vector<float> output(3);
  const std::vector<const char*> rows{reinterpret_cast<const char*>(a.data()),
                                      reinterpret_cast<const char*>(b.data())};
  for (const ReduceOp op : {ReduceOp::MAX, ReduceOp::MIN}) {
    reduce_rows(op, at::kFloat, rows, at::kFloat, reinterpret_cast<char*>(output.data()), 3);
    EXPECT_TRUE(std::isnan(output[0]) && std::isnan(output[1]));
    EXPECT_EQ(output[2], op == ReduceOp::MAX ? 3 : 2);
  }
  const std::string x("\0\1\1", 3), y("\0\0\1", 3);
  std::string joined(3, 'x');
  reduce_rows(ReduceOp::SUM, at::kBool, {x.data(), y.data()}, at::kBool, joined.data(), 3);
  EXPECT_EQ(joined, std::string("\0\1\1", 3));
  reduce_rows(ReduceOp::PRODUCT, at::kBool, {x.data(), y.data()}, at::kBool, joined.data(), 3);
  EXPECT_EQ(joined, std::string("\0\0\1", 3));
}

TEST(ReduceRows, OutputsOfAnotherDtypeAreRoundedOnce) {
  const at::Tensor a = torch::tensor({256.0F, 1.5F}).to(at::kBFloat16);
  const at::Tensor b = torch::tensor({1.0F, 2.0F}).to(at::kBFloat16);
  const std::vector<const char*> rows{static_cast<const char*>(a.const_data_ptr()),
                                      static_cast<const char*>(b.const_data_ptr())};
  at::Tensor wide = torch::empty({2});
  reduce_rows(ReduceOp::SUM, at::kBFloat16, rows, at::kFloat, static_cast<char*>(wide.data_ptr()),
              2);
  EXPECT_TRUE(torch::equal(wide, torch::tensor({257.0F, 3.5F})));
}

} // namespace hasten::detail
