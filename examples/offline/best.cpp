// What a model would say next, and how likely it is, from C++: best FOLDER TOKEN...
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "liteboost_run.h"

namespace {

void check(int status) {
  if (status != LITEBOOST_OK) throw std::runtime_error(liteboost_error());
}

using Model = std::unique_ptr<liteboost_model, decltype(&liteboost_close)>;

Model open(const char* folder) {
  liteboost_model* model = nullptr;
  check(liteboost_open(folder, nullptr, &model));
  return {model, &liteboost_close};
}

}  // namespace

int main(int count, char** words) try {
  if (count < 3) throw std::runtime_error("usage: best FOLDER TOKEN...");
  const Model model = open(words[1]);
  std::vector<int64_t> ids;
  for (int at = 2; at < count; ++at) ids.push_back(std::atoll(words[at]));
  check(liteboost_prefill(model.get(), ids.data(), ids.size()));

  const float* logits = nullptr;
  size_t vocabulary = 0;
  check(liteboost_logits(model.get(), &logits, &vocabulary));
  std::vector<size_t> order(vocabulary);
  std::iota(order.begin(), order.end(), size_t{0});
  const size_t shown = std::min<size_t>(5, vocabulary);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(shown), order.end(),
                    [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  double all = 0;
  for (size_t at = 0; at < vocabulary; ++at) all += std::exp(double{logits[at]} - logits[order[0]]);
  for (size_t at = 0; at < shown; ++at) {
    std::cout << order[at] << " " << std::exp(double{logits[order[at]]} - logits[order[0]]) / all << "\n";
  }
  return 0;
} catch (const std::exception& fault) {
  std::cerr << "error: " << fault.what() << "\n";
  return 1;
}
