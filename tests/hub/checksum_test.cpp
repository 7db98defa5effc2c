#include "hub/checksum.h"

#include <gtest/gtest.h>

#include "hasten/base/files.h"
#include "support/temporary_folder.h"

namespace hasten {

TEST(HubChecksum, GitsNameOfAFileIsComputedForEachLengthOfItsLastBlock) {
  const testing_support::TemporaryFolder folder;
  // `git hash-object` of so many letters a.
  const std::pair<size_t, const char*> names[] = {
      {0, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"},
      {55, "d1985ddc2983785702b9a90effd5aff2f7cfdca4"},
      {56, "1f973e890f52da1f22fa7e5620a628bc4ee74cb3"},
      {64, "71b7a71962774fa5c721e1163f935cb61a0e09e6"},
      {119, "1325c3d76ea6a66e75dce490a0b8cb8b12233ee0"},
      {120, "253af86ee859905852357aee8bd83b08601364ae"},
      {1000, "a50be72b20f0e3f078d252e8e56b11b4bec67509"}};
  for (const auto& [count, name] : names) {
    write_file_atomically(folder / "file", std::string(count, 'a'));
    EXPECT_TRUE(detail::has_checksum(folder / "file", name)) << count;
    write_file_atomically(folder / "file", std::string(count, 'a') + "b");
    EXPECT_FALSE(detail::has_checksum(folder / "file", name)) << count;
  }
}

TEST(HubChecksum, SixtyFourDigitsAreSha256AndOtherTextsAreNoChecksum) {
  const testing_support::TemporaryFolder folder;
  write_file_atomically(folder / "file", "abc");
  const std::string abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  EXPECT_TRUE(detail::has_checksum(folder / "file", abc));
  EXPECT_FALSE(detail::has_checksum(folder / "file", std::string(64, '0')));
  EXPECT_TRUE(detail::has_checksum(folder / "file", "5d41402a-1"));
  EXPECT_TRUE(detail::has_checksum(folder / "file", std::string(32, '0')));
}

} // namespace hasten
