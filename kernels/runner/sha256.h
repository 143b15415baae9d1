// SHA-256, as FIPS 180-4 defines it.
#pragma once

#include <cstddef>
#include <string>

namespace liteboost::runner {

// In hexadecimal digits.
std::string sha256(const void* bytes, size_t count);

}  // namespace liteboost::runner
