// Keys and values of 8 bits: aclnnFusedInferAttentionScoreV3.md of ops-transformer, "kv antiquant parameters apart", A2
// and A3. Simulated are the modes with a scale for each token, without a paged cache.
#include "attention.h"

namespace sim {
namespace {

constexpr int64_t kPerToken = 1, kPerTokenAndHead = 3;

void check_scale(const Inference& a, const T& scale, const char* name) {
  require_dtype(scale, name, {at::kFloat});
  auto batch = a.batch(), length = a.kv_len();
  if (a.key_mode == kPerTokenAndHead) return require_shape(scale, name, {batch, a.kv_head_count(), length});
  if (a.one_row()) return require_shape(scale, name, {1, batch, length});
  require_shape(scale, name, {batch, length});
}

}  // namespace

void check_integers(const Inference& a) {
  if (!a.has_integers()) return;
  require(a.key_scale && a.value_scale, "keyAntiquantScale and valueAntiquantScale go together");
  require(a.key_mode == a.value_mode, "keyAntiquantMode is ", a.key_mode, ", valueAntiquantMode ",
          a.value_mode, ": they must be equal");
  require(!a.packed() && !a.q_rope && !a.sinks,
          "integers do not go with packed layouts, queryRope or learnableSink");
  require(!a.table, "integers in a paged cache are not simulated");
  require(a.key.size() == 1, "integers do not go with lists of keys");
  auto d = a.head_size();
  require(d % 32 == 0, "D is ", d, ", with integers it must be a multiple of 32");
  if (a.one_row()) {
    require(a.key_mode == kPerToken || a.key_mode == kPerTokenAndHead, "keyAntiquantMode ", a.key_mode,
            " is not simulated: 1 (a scale for each token), 3 (for each token and head)");
  } else {
    require(a.key_mode == kPerToken, "several query rows take keyAntiquantMode 0 and 1, it is ", a.key_mode,
            " (0 is not simulated)");
    require(a.q_len() <= 16, "query has ", a.q_len(), " rows, with integers at most 16");
    require_dtype(a.query, "query (several rows, with integers)", {at::kBFloat16});
    require(!a.q_padding && !a.kv_padding, "several query rows with integers do not go with left padding");
  }
  check_scale(a, a.key_scale, "keyAntiquantScale");
  check_scale(a, a.value_scale, "valueAntiquantScale");
}

}  // namespace sim
