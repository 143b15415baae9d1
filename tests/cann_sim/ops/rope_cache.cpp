// Norm, rotary embedding and cache write in one launch.
#include "cache.h"
#include "rope.h"

using namespace sim;

using at::Tensor;

namespace {

Tensor normed(const Tensor& x, T gamma, double eps) { return x * inverse_rms(x, 1, eps) * fp32(*gamma); }

/// Rows [batch, heads, tokens, dim] to a cache. "Norm": cache [batch, heads, places, dim] and index [batch, tokens].
/// "PA", "PA_BNSD" and "PA_NZ": cache [blocks, block size, heads, dim], index [batch * tokens]; in "PA_NZ" each block
/// is in FRACTAL_NZ order, whatever its shape says. -1 skips.
void write(R cache, const Tensor& rows, T index, const std::string& mode) {
  auto batch = rows.size(0), heads = rows.size(1), tokens = rows.size(2), dim = rows.size(3);
  if (mode == "Norm") {
    for (int64_t b = 0; b < batch; b++) {
      auto places = checked_slots((*index)[b], cache->size(2), true);
      auto kept = places.ge(0).nonzero().flatten();
      (*cache)[b].index_copy_(1, places.index_select(0, kept),
                              rows[b].index_select(1, kept).to(cache->scalar_type()));
    }
    return;
  }
  auto slots = checked_slots(*index, cache->size(0) * cache->size(1), true);
  auto flat = rows.transpose(1, 2).reshape({batch * tokens, heads, dim});
  if (mode != "PA_NZ") return scatter_rows(*cache, flat, slots);
  auto width = 32 / static_cast<int64_t>(cache->element_size());
  scatter_rows_nz(cache->view({cache->size(0), heads * dim / width, cache->size(1), width}), flat, slots);
}

}  // namespace

/// The form of multi-head latent attention: kv = [values to be normed, key to be rotated] on the last axis. The keys
/// arrive in pairs and leave in halves, as in InterleaveRope.
OP(aclnnKvRmsNormRopeCache, T, kv, T, gamma, T, cos, T, sin, T, index, R, k_cache, R, ckv_cache, T, k_scale,
   T, ckv_scale, T, k_offset, T, ckv_offset, double, eps, CP, mode, bool, output_kv, O, k_out, O, ckv_out) {
  auto x = fp32(*kv);
  auto values = normed(x.narrow(-1, 0, gamma->size(0)), gamma, eps);
  auto keys = rotated(halves_of_pairs(x.narrow(-1, gamma->size(0), x.size(-1) - gamma->size(0))), *cos, *sin,
                      rotary_half);
  std::string name = mode ? mode : "Norm";
  write(k_cache, keys, index, name);
  write(ckv_cache, values, index, name);
  if (output_kv) {
    put(k_out, keys);
    put(ckv_out, values);
  }
}
