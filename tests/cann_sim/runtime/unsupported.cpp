// What is linked by torch_npu but not simulated: old GE operators, loading of kernels, dumps and profiling.
#include <acl/acl_op_compiler.h>
#include <acl/acl_prof.h>

#include <cstdio>

#include "descriptions.h"
#include "state.h"

using namespace sim;

// Operators of the graph engine: descriptions are kept; of the operators one is executed (op_compiler.cpp).
extern "C" {
struct aclopAttr {
  int dummy;
};
aclDataBuffer* aclCreateDataBuffer(void* p, size_t n) { return new aclDataBuffer{p, n}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* b) {
  delete b;
  return ACL_SUCCESS;
}
aclTensorDesc* aclCreateTensorDesc(aclDataType t, int n, const int64_t* d, aclFormat f) {
  std::vector<int64_t> shape(d, d + n);
  return new aclTensorDesc{t, shape, f, "", f, shape};
}
void aclDestroyTensorDesc(const aclTensorDesc* d) { delete d; }
aclError aclGetTensorDescDimV2(const aclTensorDesc* d, size_t i, int64_t* v) {
  *v = d->d[i];
  return ACL_SUCCESS;
}
aclFormat aclGetTensorDescFormat(const aclTensorDesc* d) { return d->f; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* d) { return d->d.size(); }
aclDataType aclGetTensorDescType(const aclTensorDesc* d) { return d->t; }
void aclSetTensorDescName(aclTensorDesc* d, const char* n) { d->name = n; }
aclError aclSetTensorFormat(aclTensorDesc* d, aclFormat f) {
  d->storage_format = f;
  return ACL_SUCCESS;
}
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc* d, int n, const int64_t* shape) {
  d->storage_shape.assign(shape, shape + n);
  return ACL_SUCCESS;
}
aclError aclSetTensorConst(aclTensorDesc*, void*, size_t) { return ACL_SUCCESS; }
aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* a) { delete a; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) {
  return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}
aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) {
  return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) { return ACL_ERROR_RT_FEATURE_NOT_SUPPORT; }
int rtDevBinaryRegister(const void*, void**) { return 207000; }
int rtFunctionRegister(void*, const void*, const char*, const void*, unsigned) { return 207000; }
int rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return 207000; }
int rtKernelLaunch(const void*, unsigned, void*, unsigned, void*, void*) { return 207000; }

// profiling stubs
uint64_t MsprofGetHashId(const char* s, size_t n) {
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 1099511628211ull;
  return h;
}
int32_t MsprofRegisterCallback(uint32_t, int32_t (*)(uint32_t, void*, uint32_t)) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime(void) { return now_ns(); }
aclError aclprofInit(const char*, size_t) { return ACL_SUCCESS; }
aclError aclprofStart(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofStop(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofFinalize() { return ACL_SUCCESS; }
aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, aclprofAicoreMetrics, const aclprofAicoreEvents*,
                                   uint64_t) {
  return (aclprofConfig*)malloc(8);
}
aclError aclprofDestroyConfig(const aclprofConfig* c) {
  free((void*)c);
  return ACL_SUCCESS;
}
}
