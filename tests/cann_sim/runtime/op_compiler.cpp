// libacl_op_compiler.so: compile options; operators of the graph engine are refused.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
static std::map<int, std::string> g_opt{{(int)ACL_OP_JIT_COMPILE, "disable"}};
extern "C" {
void simcann_set_error(const char*);
static aclError unsupported(const char* op) {
  char b[256];
  snprintf(b, sizeof b, "simcann: aclop '%s' (GE operator) is not simulated", op ? op : "?");
  simcann_set_error(b);
  fprintf(stderr, "[simcann] %s\n", b);
  return 500002;
}
aclError aclopCompileAndExecute(const char* t, int, const aclTensorDesc* const[],
                                const aclDataBuffer* const[], int, const aclTensorDesc* const[],
                                aclDataBuffer* const[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream) {
  return unsupported(t);
}
aclError aclopCompileAndExecuteV2(const char* t, int, aclTensorDesc*[], aclDataBuffer*[], int,
                                  aclTensorDesc*[], aclDataBuffer*[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream) {
  return unsupported(t);
}
aclError aclSetCompileopt(aclCompileOpt o, const char* v) {
  g_opt[(int)o] = v;
  return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt o) {
  auto it = g_opt.find((int)o);
  return it == g_opt.end() ? 1 : it->second.size() + 1;
}
aclError aclGetCompileopt(aclCompileOpt o, char* v, size_t n) {
  auto it = g_opt.find((int)o);
  std::string s = it == g_opt.end() ? "" : it->second;
  if (n <= s.size()) return 100000;
  memcpy(v, s.c_str(), s.size() + 1);
  return ACL_SUCCESS;
}
aclGraphDumpOption* aclCreateGraphDumpOpt() { return nullptr; }
aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption*) { return ACL_SUCCESS; }
}
