// Which operators take tensors in FRACTAL_NZ.
#include <cstring>

#include "operator.h"

namespace sim {

void require_known_formats(const char* op, const std::vector<Argument>& arguments) {
  // Parts of names: NpuFormatCast, TransMatmulWeight, MatmulWeightNz and the families with quantized weights.
  static const char* takers[] = {"FormatCast",  "TransMatmulWeight", "WeightNz",  "QuantMatmul",
                                 "WeightQuant", "GroupedMatmul",     "AllReduce", "ConvertWeight"};
  for (auto* part : takers) {
    if (strstr(op, part)) return;
  }
  // Of the plain products the limits say which operand (limits/matmul.cpp).
  if (!strcmp(op, "aclnnMm") || !strcmp(op, "aclnnBatchMatMul")) return;
  for (const auto& argument : arguments) {
    if (strcmp(argument.kind, "tensor")) continue;
    for (auto* x : argument.tensors) {
      require(!x || x->i->format != ACL_FORMAT_FRACTAL_NZ, "takes ND tensors, an argument of shape ",
              x ? x->i->t.sizes() : at::IntArrayRef(), " is in FRACTAL_NZ");
    }
  }
}

}  // namespace sim
