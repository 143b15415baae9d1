#include "runner/weights.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "runner/fault.h"
#include "runner/json.h"

namespace liteboost::runner {
namespace {

constexpr size_t kLength = 8;
constexpr int64_t kMost = int64_t{1} << 62;

}  // namespace

at::ScalarType dtype_named(const std::string& name, const std::string& where) {
  static const std::map<std::string, at::ScalarType> known{
      {"BOOL", at::kBool},          {"U8", at::kByte},          {"I8", at::kChar},
      {"I16", at::kShort},          {"I32", at::kInt},          {"I64", at::kLong},
      {"F16", at::kHalf},           {"BF16", at::kBFloat16},    {"F32", at::kFloat},
      {"F64", at::kDouble},         {"C64", at::kComplexFloat}, {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2}};
  const auto found = known.find(name);
  require(found != known.end(), LITEBOOST_BAD_FOLDER, where, " has the dtype '", name,
          "', which is not known; export the model again");
  return found->second;
}

size_t bytes_of(const std::vector<int64_t>& sizes, at::ScalarType dtype, const std::string& where) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    require(size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes), LITEBOOST_BAD_FOLDER, where,
            " is larger than memory can be; export the model again");
  }
  return static_cast<size_t>(bytes);
}

std::map<std::string, at::Tensor> tensors_in(const std::shared_ptr<const MappedFile>& file,
                                             const std::string& name) {
  const auto check = [&](bool condition, const std::string& words) {
    require(condition, LITEBOOST_BAD_FOLDER, name, " ", words, "; copy it again");
  };
  uint64_t length = 0;
  check(file->size() >= kLength, "is cut short");
  std::memcpy(&length, file->data(), kLength);
  check(length <= file->size() - kLength, "is cut short");
  const Json head = Json::parse(file->text().substr(kLength, length), name);
  char* const data = file->data() + kLength + length;
  const size_t size = file->size() - kLength - length;
  std::map<std::string, at::Tensor> found;
  for (const auto& [key, about] : head.items()) {
    if (key == "__metadata__") continue;
    const std::string where = name + ": " + key;
    const at::ScalarType dtype = dtype_named(about["dtype"].text(), where);
    const std::vector<int64_t> sizes = about["shape"].integers(0, kMost);
    const std::vector<int64_t> offsets = about["data_offsets"].integers(0, kMost);
    check(offsets.size() == 2 && offsets[0] <= offsets[1] && static_cast<size_t>(offsets[1]) <= size &&
              static_cast<size_t>(offsets[1] - offsets[0]) == bytes_of(sizes, dtype, where),
          "is cut short, or says of " + key + " what cannot be");
    check(offsets[0] % static_cast<int64_t>(c10::elementSize(dtype)) == 0, "has " + key + " at an odd place");
    found.emplace(key, at::from_blob(data + offsets[0], sizes, [file](void*) {}, dtype));
  }
  return found;
}

}  // namespace liteboost::runner
