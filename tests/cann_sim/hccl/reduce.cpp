// Reductions on the host, by dtype.
#include "communicator.h"

namespace sim {

size_t element_size(HcclDataType t) {
  switch (t) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 1;
  }
}
struct bf16 {
  uint16_t b;
  operator float() const {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  bf16& operator=(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    u += 0x7fff + ((u >> 16) & 1);
    b = u >> 16;
    return *this;
  }
};
template <class T, class A>
void reduce_as(T* d, const T* s, size_t n, HcclReduceOp op) {
  for (size_t i = 0; i < n; i++) {
    A a = (A)d[i], b = (A)s[i];
    d[i] = op == HCCL_REDUCE_SUM    ? a + b
           : op == HCCL_REDUCE_PROD ? a * b
           : op == HCCL_REDUCE_MAX  ? (a > b ? a : b)
                                    : (a < b ? a : b);
  }
}
bool reduce(void* d, const void* s, size_t n, HcclDataType t, HcclReduceOp op) {
  switch (t) {
    case HCCL_DATA_TYPE_INT8:
      reduce_as<int8_t, int8_t>((int8_t*)d, (const int8_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_UINT8:
      reduce_as<uint8_t, uint8_t>((uint8_t*)d, (const uint8_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_INT16:
      reduce_as<int16_t, int16_t>((int16_t*)d, (const int16_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_INT32:
      reduce_as<int32_t, int32_t>((int32_t*)d, (const int32_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_INT64:
      reduce_as<int64_t, int64_t>((int64_t*)d, (const int64_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_UINT64:
      reduce_as<uint64_t, uint64_t>((uint64_t*)d, (const uint64_t*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_FP32:
      reduce_as<float, float>((float*)d, (const float*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_FP64:
      reduce_as<double, double>((double*)d, (const double*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_FP16:
      reduce_as<_Float16, float>((_Float16*)d, (const _Float16*)s, n, op);
      return true;
    case HCCL_DATA_TYPE_BFP16:
      reduce_as<bf16, float>((bf16*)d, (const bf16*)s, n, op);
      return true;
    default:
      simcann_set_error("simcann hccl: reduce dtype not supported");
      return false;
  }
}

}  // namespace sim
