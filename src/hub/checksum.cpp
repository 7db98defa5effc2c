#include "checksum.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sodium.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "hasten/base/files.h"

namespace hasten::detail {

// FIPS 180-4. libsodium has none, because SHA-1 proves nothing against an attacker; git names files
// by it.
std::string sha1_of(std::string text) {
  const uint64_t bits = uint64_t{text.size()} * 8;
  text.push_back('\x80');
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8);
  for (int shift = 56; shift >= 0; shift -= 8) {
    text.push_back(static_cast<char>(bits >> shift));
  }
  std::array<uint32_t, 5> state{0x67452301u, 0xEFCDAB89u, 0x98BADCFEu, 0x10325476u, 0xC3D2E1F0u};
  std::array<uint32_t, 80> words{};
  for (size_t block = 0; block < text.size(); block += 64) {
    for (size_t i = 0; i < 64; ++i) {
      words[i / 4] = words[i / 4] << 8 | static_cast<unsigned char>(text[block + i]);
    }
    for (size_t i = 16; i < 80; ++i) {
      words[i] = std::rotl(words[i - 3] ^ words[i - 8] ^ words[i - 14] ^ words[i - 16], 1);
    }
    auto [a, b, c, d, e] = state;
    for (size_t i = 0; i < 80; ++i) {
      const uint32_t mixed = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999u
                             : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1u
                             : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDCu
                                      : (b ^ c ^ d) + 0xCA62C1D6u;
      const uint32_t next = std::rotl(a, 5) + mixed + e + words[i];
      e = d, d = c, c = std::rotl(b, 30), b = a, a = next;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
  }
  char hex[41];
  for (size_t i = 0; i < state.size(); ++i) {
    std::snprintf(hex + 8 * i, 9, "%08x", state[i]);
  }
  return hex;
}

std::string sha256_of(const std::filesystem::path& path, bool by_openssl) {
  static void* const openssl = ::dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
  const auto find = [](auto& function, const char* name) {
    void* const found = openssl == nullptr ? nullptr : ::dlsym(openssl, name);
    function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    return found != nullptr;
  };
  int (*init)(void* state) = nullptr;
  int (*update)(void* state, const void* bytes, size_t count) = nullptr;
  int (*final)(unsigned char* hash, void* state) = nullptr;
  const bool fast = by_openssl && find(init, "SHA256_Init") && find(update, "SHA256_Update") &&
                    find(final, "SHA256_Final");
  union {
    crypto_hash_sha256_state sodium;
    uint64_t openssl[32]; // OpenSSL needs 112 bytes
  } state;
  fast ? init(&state) : crypto_hash_sha256_init(&state.sodium);
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<unsigned char> buffer(size_t{1} << 20);
  ssize_t count = 1;
  for (size_t at = 0; count > 0; at += static_cast<size_t>(count)) {
    count = read_at(file.get(), buffer.data(), buffer.size(), at);
    if (count < 0) {
      throw_file_error("hub::download", path, errno);
    }
    const auto bytes = static_cast<size_t>(count);
    fast ? update(&state, buffer.data(), bytes)
         : crypto_hash_sha256_update(&state.sodium, buffer.data(), bytes);
  }
  unsigned char hash[crypto_hash_sha256_BYTES];
  fast ? final(hash, &state) : crypto_hash_sha256_final(&state.sodium, hash);
  char hex[2 * sizeof hash + 1];
  return sodium_bin2hex(hex, sizeof hex, hash, sizeof hash);
}

bool has_checksum(const std::filesystem::path& file, const std::string& etag) {
  if (etag.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return true;
  }
  if (etag.size() == 40) { // git's files are small: the hub keeps large ones elsewhere
    std::string bytes = read_file(file);
    bytes.insert(0, "blob " + std::to_string(bytes.size()) + std::string(1, '\0'));
    return sha1_of(std::move(bytes)) == etag;
  }
  return etag.size() != 64 || sha256_of(file) == etag;
}

} // namespace hasten::detail
