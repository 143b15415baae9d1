// Element types as the torch-free loops see them. Included by objects of every instruction set: no
// functions here.
#pragma once

#include <stdint.h>

namespace liteboost {

enum class DType : int32_t { f32, bf16, f16 };

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

}  // namespace liteboost

// Runs the statement with T bound to the element type that `dtype` names.
#define LB_DISPATCH_DTYPE(dtype, T, ...) \
  switch (dtype) {                       \
    case ::liteboost::DType::f32: {      \
      using T = float;                   \
      __VA_ARGS__;                       \
      break;                             \
    }                                    \
    case ::liteboost::DType::bf16: {     \
      using T = ::liteboost::bf16;       \
      __VA_ARGS__;                       \
      break;                             \
    }                                    \
    case ::liteboost::DType::f16: {      \
      using T = ::liteboost::f16;        \
      __VA_ARGS__;                       \
      break;                             \
    }                                    \
  }
