// Life of the runtime, versions, devices and contexts.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace sim;

namespace sim {

thread_local int current_device_or_none = -1;
thread_local Context* current_context = nullptr;
thread_local std::string last_error;

State& state() {
  static State* all = new State;  // outlives static destructors, which still free device memory
  return *all;
}
uint64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace sim

namespace {

std::atomic<int> initialised{0};

Context* context_of(int device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& context = state().contexts[device];
  if (!context) context = new Context{device};
  return context;
}

}  // namespace

extern "C" {
const char* aclGetRecentErrMsg() { return last_error.empty() ? nullptr : last_error.c_str(); }
void simcann_set_error(const char* message) { last_error = message; }

aclError aclInit(const char*) {
  if (initialised.exchange(1)) return ACL_ERROR_REPEAT_INITIALIZE;
  return ACL_SUCCESS;
}
aclError aclFinalize() {
  initialised = 0;
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return env_text("SIMCANN_SOC", "Ascend910B2"); }
void aclAppLog(aclLogLevel lv, const char* func, const char* file, uint32_t line, const char* fmt, ...) {
  static int thr = env_int("ASCEND_GLOBAL_LOG_LEVEL", 3);
  static int out = env_int("ASCEND_SLOG_PRINT_TO_STDOUT", 0);
  if (!out || (int)lv < thr) return;
  va_list ap;
  va_start(ap, fmt);
  fprintf(stderr, "[acl %d] %s:%u %s ", (int)lv, file, line, func);
  vfprintf(stderr, fmt, ap);
  fputc('\n', stderr);
  va_end(ap);
}
aclError aclrtGetVersion(int32_t* a, int32_t* b, int32_t* c) {
  *a = 1;
  *b = 16;
  *c = 0;
  return ACL_SUCCESS;
}
static void fill_version(const char* v, aclCANNPackageVersion* o) {
  memset(o, 0, sizeof *o);
  snprintf(o->version, sizeof o->version, "%s", v);
  std::vector<std::string> p;
  std::string cur;
  for (const char* c = v;; c++) {
    if (*c == '.' || *c == 0) {
      p.push_back(cur);
      cur.clear();
      if (!*c) break;
    } else
      cur += *c;
  }
  p.resize(4);
  snprintf(o->majorVersion, 64, "%s", p[0].c_str());
  snprintf(o->minorVersion, 64, "%s", p[1].c_str());
  snprintf(o->releaseVersion, 64, "%s", p[2].c_str());
  snprintf(o->patchVersion, 64, "%s", p[3].c_str());
}
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* v) {
  fill_version(name == ACL_PKG_NAME_DRIVER ? "25.5.0" : env_text("SIMCANN_VERSION", "9.1.0"), v);
  return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char* pkg, char* out) {
  (void)pkg;
  strcpy(out, env_text("SIMCANN_VERSION", "9.1.0"));
  return ACL_SUCCESS;
}
aclError aclGetCannAttributeList(const aclCannAttr** l, size_t* n) {
  static aclCannAttr a[] = {ACL_CANN_ATTR_INF_NAN};
  *l = a;
  *n = 1;
  return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr, int32_t* v) {
  *v = 1;
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo i, int64_t* v) {
  *v = i == ACL_DEVICE_INFO_AI_CORE_NUM ? 24 : i == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : (int64_t)192 << 20;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr a, int64_t* v) {
  switch ((int)a) {
    case 301:
      *v = device_memory();
      break;
    case 302:
      *v = (int64_t)192 << 20;
      break;
    case 101:
    case 102:
      *v = 24;
      break;
    case 201:
      *v = 48;
      break;
    case 601:
      *v = 2201;
      break;
    default:
      *v = 0;
  }
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceCount(uint32_t* c) {
  *c = device_count();
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t d) {
  if (d < 0 || d >= device_count()) {
    last_error = "simcann: invalid device id";
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  current_device_or_none = d;
  current_context = context_of(d);
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* d) {
  if (current_device_or_none < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *d = current_device_or_none;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtResetDeviceForce(int32_t) { return ACL_SUCCESS; }
aclError aclrtCreateContext(aclrtContext* c, int32_t d) {
  *c = new Context{d};
  current_context = (Context*)*c;
  current_device_or_none = d;
  return ACL_SUCCESS;
}
aclError aclrtDestroyContext(aclrtContext c) {
  delete (Context*)c;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* c) {
  if (!current_context) return ACL_ERROR_RT_CONTEXT_NULL;
  *c = current_context;
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext c) {
  current_context = (Context*)c;
  current_device_or_none = current_context->device;
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t d, uint32_t* flags, int32_t* active) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (flags) *flags = 0;
  *active = state().contexts.count(d) ? 1 : 0;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeDevice() {
  if (const int code = lost()) return code;
  if (auto error = forbidden_in_capture("a wait for the device")) return error;
  trace_event("synchronize", "\"what\":\"device\"");
  return error_of_wait(nullptr);
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
int simcann_current_device() { return current_device(); }
aclError aclrtDeviceCanAccessPeer(int32_t* c, int32_t a, int32_t b) {
  *c = a != b;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceDisablePeerAccess(int32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* p) {
  *p = getpid();
  return ACL_SUCCESS;
}
aclError aclrtDeviceGetUuid(int32_t d, aclrtUuid* u) {
  memset(u, 0, sizeof *u);
  u->bytes[0] = 'S';
  u->bytes[15] = (char)d;
  return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t u, int32_t* const l) {
  *l = u;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* u) {
  u->cubeUtilization = u->vectorUtilization = u->aicpuUtilization = u->memoryUtilization = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* m) {
  *m = ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t t, uint64_t* a) {
  if (a) *a = t;
  return ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetRunMode(aclrtRunMode* m) {
  *m = ACL_HOST;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType t, uint32_t* v) {
  *v = (int)t == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
aclError aclrtResetDeviceResLimit(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType t, uint32_t* v) {
  *v = (int)t == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
aclError aclrtResetStreamResLimit(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType t, uint32_t* v) {
  *v = (int)t == 0 ? 24 : 48;
  return ACL_SUCCESS;
}
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtDeviceTaskAbort(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo*, size_t, size_t* n) {
  *n = 0;
  return ACL_SUCCESS;
}
aclError aclrtMemUceRepair(int32_t, aclrtMemUceInfo*, size_t) { return ACL_SUCCESS; }
#ifdef SIM_HAS_ERROR_INFO
aclError aclrtGetErrorVerbose(int32_t, aclrtErrorInfo* e) {
  memset(e, 0, sizeof *e);
  return ACL_SUCCESS;
}
aclError aclrtRepairError(int32_t, const aclrtErrorInfo*) { return ACL_SUCCESS; }
#endif
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* v) {
  *v = 0;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t* v) {
  *v = 0;
  return ACL_SUCCESS;
}
}
