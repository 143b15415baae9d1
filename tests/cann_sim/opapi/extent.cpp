// Which elements of its arguments a launch touches, for operators that do not touch all of them.
#include <functional>
#include <map>
#include <set>

#include "cost.h"

namespace sim {
namespace {

using Arguments = std::vector<Argument>;
using Touches = std::vector<Touch>;

const at::Tensor& tensor(const Arguments& a, size_t k) { return a.at(k).tensors.at(0)->i->t; }
bool given(const Arguments& a, size_t k) { return k < a.size() && a[k].given && !a[k].tensors.empty(); }
uint64_t bytes(const at::Tensor& t) { return t.numel() * t.element_size(); }

/// The slices of `t` along `axis` that are named in `indices`, each once.
std::vector<at::Tensor> slices(const at::Tensor& t, int64_t axis, const at::Tensor& indices) {
  auto wanted = indices.to(at::kLong).contiguous();
  auto* index = wanted.const_data_ptr<int64_t>();
  std::set<int64_t> distinct(index, index + wanted.numel());
  std::vector<at::Tensor> all;
  for (int64_t k : distinct) {
    if (k < 0) k += t.size(axis);
    if (k >= 0 && k < t.size(axis)) all.push_back(t.select(axis, k));
  }
  return all;
}

/// A gather of single elements: at most as many as there are, and as are written.
void read_elements(Touches& touches, const Arguments& a, size_t from, const at::Tensor& like) {
  const auto& t = tensor(a, from);
  touches[from].read.clear();
  touches[from].more_read = std::min(bytes_of({t}), static_cast<uint64_t>(like.numel() * t.element_size()));
}

/// A scatter into `into`: as many elements as the source has are written, none is read.
void write_elements(Touches& touches, const Arguments& a, size_t into, const at::Tensor& like) {
  const auto& t = tensor(a, into);
  touches[into].read.clear();
  touches[into].written.clear();
  touches[into].more_written = like.numel() * t.element_size();
}

int64_t indexed_elements(const at::Tensor& t, const Argument& indices) {
  int64_t dims = 0, picked = 1;
  std::vector<int64_t> shape;
  for (auto* index : indices.tensors) {
    if (!index) {
      picked *= t.size(dims++);
      continue;
    }
    const auto& i = index->i->t;
    bool absent = i.dim() == 1 && i.size(0) == 0 && t.numel() != 0;
    if (i.scalar_type() == at::kBool || i.scalar_type() == at::kByte) {
      shape = at::infer_size(shape, {i.count_nonzero().item<int64_t>()});
      dims += i.dim();
    } else if (absent) {
      picked *= t.size(dims++);
    } else {
      shape = at::infer_size(shape, i.sizes());
      dims++;
    }
  }
  for (int64_t size : shape) picked *= size;
  for (; dims < t.dim(); dims++) picked *= t.size(dims);
  return picked;
}

void attention(const std::string& name, Touches& touches, const Arguments& a) {
  auto shape = attention_shape(name, a);
  for (size_t which : {1, 2}) touches[which] = {attention_rows(name, a, which), {}};
  if (name.rfind("aclnnFusedInferAttentionScoreV", 0) == 0) {
    // Scales [B, N, S], [B, S] or [1, B, S]: of the positions that count.
    for (size_t which : {17, 19}) {
      if (!given(a, which)) continue;
      auto scales = tensor(a, which);
      if (scales.size(0) == 1 && shape.sequences.size() > 1) scales = scales[0];
      touches[which].read.clear();
      for (size_t b = 0; b < shape.sequences.size(); b++) {
        const auto& s = shape.sequences[b];
        touches[which].read.push_back(scales[static_cast<int64_t>(b)].slice(-1, s.first_key, s.keys));
      }
    }
  }
  bool training = name.rfind("aclnnFlashAttentionScore", 0) == 0;
  size_t mask_at = !training ? 4 : name.find("Grad") == std::string::npos ? 6 : 7;
  if (!given(a, mask_at)) return;
  int64_t queries = 0, keys = 0;
  for (const auto& s : shape.sequences) {
    queries = std::max(queries, s.queries);
    keys = std::max(keys, s.keys);
  }
  // Modes 2, 3 and 4 come with a triangular mask of fixed size, of which a corner is used.
  at::Tensor mask = tensor(a, mask_at);
  if (mask.dim() >= 2) {
    mask = mask.slice(-2, 0, std::min(queries, mask.size(-2))).slice(-1, 0, std::min(keys, mask.size(-1)));
  }
  touches[mask_at].read = {mask};
}

/// Only experts that have tokens are read. `totals`: the list has running totals of tokens, else counts.
void busy_experts(Touches& touches, const Arguments& a, size_t weight, size_t list, bool totals) {
  auto counts = tensor(a, list).to(at::kLong);
  if (totals) counts = at::diff(counts, 1, -1, at::zeros({1}, at::kLong));
  auto busy = at::nonzero(counts).flatten();
  auto& touch = touches[weight];
  if (touch.more_read) {  // a private format: experts are equal parts of it
    touch.more_read = touch.more_read / counts.numel() * busy.numel();
    return;
  }
  const auto& weights = a[weight].tensors;
  touch.read.clear();
  for (int64_t k = 0; k < busy.numel(); k++) {
    auto expert = busy[k].item<int64_t>();
    touch.read.push_back(weights.size() == 1 ? weights[0]->i->t.select(0, expert) : weights.at(expert)->i->t);
  }
}

void grouped_matmul(Touches& touches, const Arguments& a) {
  constexpr size_t kWeight = 1, kScales = 5, kOffsets = 6, kGroups = 8, kGroupType = 13, kListType = 14;
  bool by_expert = given(a, kGroups) && a[kGroupType].integers.at(0) == 0 && a[kListType].integers.at(0) <= 1;
  if (!by_expert) return;
  for (size_t which : {kWeight, kScales, kOffsets}) {
    if (given(a, which)) busy_experts(touches, a, which, kGroups, a[kListType].integers[0] == 0);
  }
}

/// Only the states named are read and written.
void recurrent_gated_delta_rule(Touches& touches, const Arguments& a) {
  constexpr size_t kState = 4, kIndices = 6;
  touches[kState].written = slices(tensor(a, kState), 0, tensor(a, kIndices));
  touches[kState].read = touches[kState].written;
}

using Rule = std::function<void(Touches&, const Arguments&)>;

const std::map<std::string, Rule>& rules() {
  static const std::map<std::string, Rule> all = {
      {"aclnnEmbedding",
       [](Touches& t, const Arguments& a) { t[0].read = slices(tensor(a, 0), 0, tensor(a, 1)); }},
      {"aclnnIndexSelect",
       [](Touches& t, const Arguments& a) {
         t[0].read = slices(tensor(a, 0), a[1].integers[0], tensor(a, 2));
       }},
      {"aclnnGatherV3",
       [](Touches& t, const Arguments& a) {
         t[0].read = slices(tensor(a, 0), a[1].integers[0], tensor(a, 2));
       }},
      {"aclnnGather", [](Touches& t, const Arguments& a) { read_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnTake", [](Touches& t, const Arguments& a) { read_elements(t, a, 0, tensor(a, 1)); }},
      {"aclnnIndex", [](Touches& t, const Arguments& a) { read_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnStridedSlice", [](Touches& t, const Arguments& a) { read_elements(t, a, 0, tensor(a, 9)); }},
      {"aclnnIndexPutImpl",
       [](Touches& t, const Arguments& a) {
         const auto& x = tensor(a, 0);
         uint64_t touched = indexed_elements(x, a[1]) * x.element_size();
         bool accumulate = a[3].integers[0] != 0;
         t[0] = {{}, {}, accumulate ? touched : 0, touched};
       }},
      {"aclnnInplaceScatter", [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnInplaceScatterValue",
       [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnInplaceIndexCopy",
       [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 3)); }},
      {"aclnnInplacePut", [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnInplaceScatterUpdate",
       [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnScatterNdUpdate", [](Touches& t, const Arguments& a) { write_elements(t, a, 0, tensor(a, 2)); }},
      {"aclnnScatterPaKvCache",
       [](Touches& t, const Arguments& a) {
         write_elements(t, a, 1, tensor(a, 0));
         write_elements(t, a, 4, tensor(a, 3));
       }},
      {"aclnnGroupedMatmulV4", grouped_matmul},
      {"aclnnRecurrentGatedDeltaRule", recurrent_gated_delta_rule},
  };
  return all;
}

/// A private format (FRACTAL_NZ...) is read with its padding.
bool is_private(const TensorData& data) {
  switch (data.format) {
    case ACL_FORMAT_NC1HWC0:
    case ACL_FORMAT_FRACTAL_Z:
    case ACL_FORMAT_FRACTAL_NZ:
    case ACL_FORMAT_NDC1HWC0:
    case ACL_FRACTAL_Z_3D:
    case ACL_FORMAT_FRACTAL_NZ_C0_16:
    case ACL_FORMAT_FRACTAL_NZ_C0_32:
      return !data.storage_shape.empty();
    default:
      return false;
  }
}

Touch whole(const Argument& argument) {
  Touch touch;
  std::string direction = argument.direction;
  for (auto* one : argument.tensors) {
    if (!one || !one->i->t.defined()) continue;
    const auto& t = one->i->t;
    uint64_t padded = 0;
    if (is_private(*one->i)) {
      padded = t.element_size();
      for (int64_t size : one->i->storage_shape) padded *= size;
    }
    if (direction != "out") padded ? void(touch.more_read += padded) : touch.read.push_back(t);
    if (direction != "in") padded ? void(touch.more_written += padded) : touch.written.push_back(t);
  }
  return touch;
}

}  // namespace

std::vector<Touch> touches_of(const std::string& name, const std::vector<Argument>& arguments) {
  Touches touches;
  for (const auto& argument : arguments) touches.push_back(whole(argument));
  auto rule = rules().find(name);
  if (rule != rules().end()) rule->second(touches, arguments);
  if (attention_shape(name, arguments).heads) attention(name, touches, arguments);
  return touches;
}

}  // namespace sim
