#include "runner/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace liteboost::runner {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void penalize(std::vector<float>& scores, const std::vector<int64_t>& seen, double penalty) {
  std::vector<int64_t> each(seen);
  std::sort(each.begin(), each.end());
  each.erase(std::unique(each.begin(), each.end()), each.end());
  const auto factor = static_cast<float>(penalty);
  for (const int64_t id : each) {
    float& score = scores[static_cast<size_t>(id)];
    score = score < 0 ? score * factor : score / factor;
  }
}

// Those that are as likely as the last of so many stay, too.
void keep_top_k(std::vector<float>& scores, int64_t count) {
  if (count <= 0 || count >= static_cast<int64_t>(scores.size())) return;
  std::vector<float> sorted(scores);
  std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<>());
  const float least = sorted[static_cast<size_t>(count - 1)];
  for (float& score : scores) score = score < least ? kNever : score;
}

// Relative to the likeliest.
std::vector<double> weights_of(const std::vector<float>& scores) {
  const float most = *std::max_element(scores.begin(), scores.end());
  std::vector<double> made(scores.size());
  for (size_t at = 0; at < scores.size(); ++at) made[at] = std::exp(double{scores[at]} - most);
  return made;
}

// Those go that are less likely than others which have the probability together; one stays always.
void keep_top_p(std::vector<double>& weights, double probability) {
  if (probability >= 1.0) return;
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] < weights[b]; });
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double below = 0;
  for (size_t at = 0; at + 1 < order.size(); ++at) {
    below += weights[order[at]] / all;
    if (below > 1.0 - probability) break;
    weights[order[at]] = 0;
  }
}

}  // namespace

std::string Sampling::fault() const {
  if (!(temperature > 0) || !std::isfinite(temperature)) return "temperature must be above 0";
  if (top_k < 0) return "top_k must be 0 (from all) or more";
  if (!(top_p >= 0 && top_p <= 1)) return "top_p must be from 0 to 1";
  if (!(repetition_penalty > 0) || !std::isfinite(repetition_penalty))
    return "repetition_penalty must be above 0";
  return "";
}

int64_t Sampler::choose(const std::vector<float>& logits, const std::vector<int64_t>& seen,
                        const Sampling& how) {
  std::vector<float> scores(logits);
  if (how.repetition_penalty != 1.0) penalize(scores, seen, how.repetition_penalty);
  if (!how.sample) return std::max_element(scores.begin(), scores.end()) - scores.begin();
  for (float& score : scores) score /= static_cast<float>(how.temperature);
  keep_top_k(scores, how.top_k);
  std::vector<double> weights = weights_of(scores);
  keep_top_p(weights, how.top_p);
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  // 53 bits: the same numbers with every standard library.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * all;
  size_t last = 0;
  for (size_t at = 0; at < weights.size(); ++at) {
    if (weights[at] == 0) continue;
    last = at;
    left -= weights[at];
    if (left < 0) break;
  }
  return static_cast<int64_t>(last);
}

}  // namespace liteboost::runner
