// Gzip files as tables: the same as the text in them.
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/text/token_cache.h"
#include "support/environment.h"
#include "support/error_of.h"
#include "support/full_disk.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::error_of;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

namespace detail {

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY);
  std::string packed(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string numbered_rows(int rows) {
  std::string text = "text,label\n";
  for (int row = 0; row < rows; ++row) {
    text += "film number " + std::to_string(row * 2654435761LL % 4294967291LL) +
            (row % 2 ? ",pos\n" : ",neg\n");
  }
  return text;
}

std::string content(const TextFile& file) {
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

} // namespace detail

TEST(Gzip, ATableGivesTheIdsOfTheTextInItAndTheirCacheFile) {
  const TemporaryFolder folder;
  const std::string text = detail::numbered_rows(60'000);
  ASSERT_GT(detail::gzip(text).size(), size_t{256} << 10) << "more than one piece";
  const size_t half = text.size() / 2;
  write_file_atomically(folder / "a.csv", text);
  write_file_atomically(folder / "b.csv.gz", detail::gzip(text));
  write_file_atomically(
      folder / "members.csv.gz",
      detail::gzip(text.substr(0, half)) + detail::gzip("") + detail::gzip(text.substr(half)));
  write_file_atomically(folder / "no-ending.csv", detail::gzip(text));
  TokenizedClassificationOptions options;
  options.texts.eval_split = 0.1;
  options.texts.max_train_rows = 2000;
  options.vocab.vocab_size = 200;
  options.cache_dir = folder / "cache";
  const auto plain = tokenize_text_classification(TextFile::open(folder / "a.csv"), {}, options);
  for (const char* name : {"b.csv.gz", "members.csv.gz", "no-ending.csv"}) {
    const auto file = TextFile::open(folder / name);
    EXPECT_EQ(detail::content(*file), text) << name;
    const auto packed = tokenize_text_classification(file, {}, options);
    EXPECT_EQ(packed.train_checksum, plain.train_checksum) << name;
    EXPECT_EQ(packed.cache.path, plain.cache.path) << name;
  }
}

TEST(Gzip, TheEndingBeforeGzChoosesTheFormat) {
  const TemporaryFolder folder;
  const std::string line = "{\"text\": \"a\", \"label\": \"x\"}\n";
  write_file_atomically(folder / "a.jsonl.gz", detail::gzip(line));
  write_file_atomically(folder / "plain.jsonl.gz", line);
  write_file_atomically(folder / "a.tsv.gz", detail::gzip("text\tlabel\na\tx\n"));
  for (const char* name : {"a.jsonl.gz", "plain.jsonl.gz", "a.tsv.gz"}) {
    TextRowReader reader(TextFile::open(folder / name), {});
    ASSERT_TRUE(reader.next()) << name;
    EXPECT_EQ(reader.label(), "x");
    EXPECT_EQ(reader.position().substr(0, reader.position().rfind(':')), (folder / name).string());
  }
}

TEST(Gzip, APipeIsUnpackedAndNoFileIsLeft) {
  const TemporaryFolder folder;
  const ScopedEnvironment environment{{{"TMPDIR", folder.path()}}};
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string packed = detail::gzip("text\na\n");
  ASSERT_EQ(::write(ends[1], packed.data(), packed.size()), std::ssize(packed));
  ::close(ends[1]);
  const auto file = TextFile::open("/dev/fd/" + std::to_string(ends[0]));
  ::close(ends[0]);
  EXPECT_EQ(detail::content(*file), "text\na\n");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Gzip, AFileThatIsCutOffOrDamagedIsRefusedWithPathAndByte) {
  const TemporaryFolder folder;
  const std::string text = detail::numbered_rows(20);
  const std::string packed = detail::gzip(text);
  const auto path = folder / "a.csv.gz";
  const auto error = [&](const std::string& bytes) {
    write_file_atomically(path, bytes);
    return error_of<InputError>([&] { EXPECT_EQ(detail::content(*TextFile::open(path)), text); });
  };
  for (size_t size = 2; size < packed.size(); ++size) {
    const std::string message = error(packed.substr(0, size));
    EXPECT_NE(message.find("file=" + path.string() + " is cut off, at byte " +
                           std::to_string(size) + " of the gzip file"),
              message.npos)
        << message;
  }
  int refused = 0;
  for (size_t at = 2; at < packed.size(); ++at) { // some bytes of the header mean nothing
    std::string damaged = packed;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    const std::string message = error(damaged);
    refused += message.find(path.string() + " is ") != message.npos ? 1 : 0;
  }
  EXPECT_GE(refused, std::ssize(packed) - 10);
  EXPECT_NE(error(packed + "more").find("is damaged (incorrect header check), at byte "),
            std::string::npos);
  EXPECT_NE(error(detail::gzip(packed)).find("is compressed by gzip twice"), std::string::npos);
}

TEST(Gzip, AFolderWithoutSpaceIsNamedWithTheVariableThatChoosesAnother) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "a.csv.gz", detail::gzip(detail::numbered_rows(1000)));
  const auto open = [&] {
    try {
      TextFile::open(folder / "a.csv.gz");
    } catch (const Error& error) {
      return std::pair(std::string(error.what()), error.kind());
    }
    return std::pair(std::string(), ErrorKind::other);
  };
  {
    const ScopedEnvironment environment{{{"TMPDIR", folder.path()}}};
    const testing_support::FullDisk full;
    const auto [message, kind] = open();
    EXPECT_EQ(kind, ErrorKind::full_disk);
    EXPECT_NE(message.find("a.csv.gz cannot be unpacked in the folder " + folder.path().string()),
              message.npos)
        << message;
    EXPECT_NE(message.find("Fix: set TMPDIR to another folder"), message.npos) << message;
  }
  const ScopedEnvironment environment{{{"TMPDIR", folder / "none"}}};
  EXPECT_NE(open().first.find("No such file"), std::string::npos);
}

} // namespace hasten
