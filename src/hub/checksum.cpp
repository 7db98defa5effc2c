#include "checksum.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <vector>

#include "hasten/base/files.h"
#include "library.h"

namespace hasten::detail {

// libcurl brings OpenSSL, whose code uses the processor's instructions: libsodium's takes three times
// as long, and it has no SHA-1, by which git names files.
struct OpenSsl {
  Library library{::dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL)};
  void* (*make)() = library.find("EVP_MD_CTX_new");
  void (*free)(void* context) = library.find("EVP_MD_CTX_free");
  const void* (*digest)(const char* name) = library.find("EVP_get_digestbyname");
  int (*init)(void* context, const void* digest, void* engine) = library.find("EVP_DigestInit_ex");
  int (*update)(void* context, const void* bytes, size_t) = library.find("EVP_DigestUpdate");
  int (*final)(void* context, unsigned char* hash, unsigned*) = library.find("EVP_DigestFinal_ex");
};

const OpenSsl& openssl() {
  static const OpenSsl loaded;
  return loaded;
}

bool checksum_available() { return openssl().library.handle != nullptr; }

bool has_checksum(const std::filesystem::path& file, const std::string& etag) {
  const bool git = etag.size() == 40;
  if (etag.find_first_not_of("0123456789abcdef") != std::string::npos ||
      (!git && etag.size() != 64)) {
    return true;
  }
  const std::unique_ptr<void, decltype(openssl().free)> context(openssl().make(), openssl().free);
  openssl().init(context.get(), openssl().digest(git ? "SHA1" : "SHA256"), nullptr);
  if (git) {
    std::error_code ignored; // open() has it, too
    const std::string blob = "blob " + std::to_string(std::filesystem::file_size(file, ignored));
    openssl().update(context.get(), blob.c_str(), blob.size() + 1);
  }
  const FileDescriptor descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<unsigned char> buffer(size_t{1} << 20);
  ssize_t count = 1;
  for (size_t at = 0; count > 0; at += static_cast<size_t>(count)) {
    count = read_at(descriptor.get(), buffer.data(), buffer.size(), at);
    if (count < 0) {
      throw_file_error("hub::download", file, errno);
    }
    openssl().update(context.get(), buffer.data(), static_cast<size_t>(count));
  }
  unsigned char hash[64];
  unsigned size = 0;
  openssl().final(context.get(), hash, &size);
  char hex[2 * sizeof hash + 1] = "";
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(hex + 2 * i, 3, "%02x", hash[i]);
  }
  return hex == etag;
}

} // namespace hasten::detail
