// Which operators take tensors in FRACTAL_NZ.
#include <cstring>

#include "operator.h"

namespace sim {

void require_known_format(const char* op, const TensorHandle& x) {
  if (!x || x.format() != ACL_FORMAT_FRACTAL_NZ) return;
  // Parts of names: NpuFormatCast, TransMatmulWeight, MatmulWeightNz and the families with quantised weights.
  static const char* takers[] = {"FormatCast",  "TransMatmulWeight", "WeightNz",  "QuantMatmul",
                                 "WeightQuant", "GroupedMatmul",     "AllReduce", "ConvertWeight"};
  for (auto* part : takers) {
    if (strstr(op, part)) return;
  }
  require(false, "takes ND tensors, an argument of shape ", x->sizes(), " is in FRACTAL_NZ");
}

}  // namespace sim
