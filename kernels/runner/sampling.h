// Which token comes next: what transformers' processors do to the logits, in their order, and a draw.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace liteboost::runner {

struct Sampling {
  bool sample = false;
  double temperature = 1.0;
  int64_t top_k = 0;
  double top_p = 1.0;
  double repetition_penalty = 1.0;

  // Which of them is not allowed, or an empty string.
  std::string fault() const;
};

class Sampler {
 public:
  // Draws begin anew.
  void seed(uint64_t with) { random_.seed(with); }
  // A token of `logits`; `seen`: those of the sequence so far.
  int64_t choose(const std::vector<float>& logits, const std::vector<int64_t>& seen, const Sampling& how);

 private:
  std::mt19937_64 random_;
};

}  // namespace liteboost::runner
