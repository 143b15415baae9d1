// libacl_op_compiler.so: compile options, and of the graph engine's operators Identity, by which torch_npu converts
// between ND and FRACTAL_NZ where CANN has no aclnnNpuFormatCast for it. All others are refused.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "descriptions.h"
static std::map<int, std::string> g_opt{{(int)ACL_OP_JIT_COMPILE, "disable"}};
extern "C" {
void simcann_set_error(const char*);
void* simcann_ptr(const void*);
bool simcann_capture(aclrtStream, const char*, std::function<int()>*);
bool simcann_tracing();
void simcann_trace_line(const char*);
int simcann_stream_id(aclrtStream);
int simcann_current_device();
int simcann_replayed_graph();
}

namespace {

constexpr int64_t kCube = 16;

int64_t bytes_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
    case ACL_INT32:
      return 4;
    case ACL_FLOAT16:
    case ACL_BF16:
      return 2;
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    default:
      return 0;
  }
}

int64_t product(const std::vector<int64_t>& sizes) {
  int64_t all = 1;
  for (auto size : sizes) all *= size;
  return all;
}

bool is_base(aclFormat format) {
  return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NCL ||
         format == ACL_FORMAT_NCDHW;
}

/// Where element (row, column) of the last matrix of a tensor lies, in elements from its beginning.
struct Places {
  int64_t rows, columns, width, block_rows, matrix;
  explicit Places(const aclTensorDesc& x) {
    bool nz = x.storage_format == ACL_FORMAT_FRACTAL_NZ;
    columns = x.d.back();
    rows = x.d.size() > 1 ? x.d[x.d.size() - 2] : 1;
    width = nz ? x.storage_shape.back() : columns;
    block_rows = nz ? (rows + kCube - 1) / kCube * kCube : rows;
    matrix = (columns + width - 1) / width * width * block_rows;
  }
  int64_t of(int64_t row, int64_t column) const {
    return (column / width * block_rows + row) * width + column % width;
  }
};

/// Why the tensor is none that `Identity` is simulated for, or null.
const char* refusal(const aclTensorDesc& x) {
  if (!bytes_of(x.t)) return "dtype";
  if (x.d.empty() || product(x.d) == 0) return "shape";
  if (is_base(x.storage_format)) return nullptr;
  if (x.storage_format != ACL_FORMAT_FRACTAL_NZ) return "format";
  auto axes = x.d.size();
  auto& s = x.storage_shape;
  if (axes < 2 || s.size() != axes + 2 || s[axes] != kCube || s[axes + 1] < 1) return "storage shape";
  Places places(x);
  bool fits = product(s) == places.matrix * product(x.d) / (places.rows * places.columns);
  return fits ? nullptr : "storage shape";
}

/// Copies every element of `from` to its place in `to`; padding becomes zero.
void copy(const aclTensorDesc& from, const char* source, const aclTensorDesc& to, char* target) {
  Places here(from), there(to);
  auto item = static_cast<size_t>(bytes_of(from.t));
  auto matrices = product(from.d) / (here.rows * here.columns);
  memset(target, 0, static_cast<size_t>(matrices * there.matrix) * item);
  for (int64_t m = 0; m < matrices; m++) {
    for (int64_t r = 0; r < here.rows; r++) {
      for (int64_t c = 0; c < here.columns; c++) {
        memcpy(target + static_cast<size_t>(m * there.matrix + there.of(r, c)) * item,
               source + static_cast<size_t>(m * here.matrix + here.of(r, c)) * item, item);
      }
    }
  }
}

void trace(aclrtStream stream, uint64_t read, uint64_t written) {
  if (!simcann_tracing()) return;
  char line[256];
  snprintf(line, sizeof line,
           "{\"event\":\"launch\",\"op\":\"Identity\",\"stream\":%d,\"device\":%d,\"graph\":%d,\"read\":%llu,"
           "\"written\":%llu,\"flops\":0,\"arguments\":[]}",
           simcann_stream_id(stream), simcann_current_device(), simcann_replayed_graph(),
           static_cast<unsigned long long>(read), static_cast<unsigned long long>(written));
  simcann_trace_line(line);
}

}  // namespace

extern "C" {
static aclError refused(const char* op, const char* what) {
  char b[256];
  snprintf(b, sizeof b, "simcann: aclop '%s' (GE operator): this %s is not simulated", op, what);
  simcann_set_error(b);
  fprintf(stderr, "[simcann] %s\n", b);
  return 500002;
}

static aclError identity(const aclTensorDesc& from, const aclDataBuffer& source, const aclTensorDesc& to,
                         const aclDataBuffer& target, aclrtStream stream) {
  for (auto* each : {&from, &to}) {
    if (const char* what = refusal(*each)) return refused("Identity", what);
  }
  if (from.d != to.d || from.t != to.t) return refused("Identity", "change of shape or dtype");
  auto bytes = [](const aclTensorDesc& x) {
    return static_cast<uint64_t>(product(x.storage_shape) * bytes_of(x.t));
  };
  if (source.n < bytes(from) || target.n < bytes(to)) return refused("Identity", "size of a buffer");
  std::function<int()> task = [from, to, in = source.p, out = target.p, stream, bytes] {
    copy(from, static_cast<char*>(simcann_ptr(in)), to, static_cast<char*>(simcann_ptr(out)));
    trace(stream, bytes(from), bytes(to));
    return 0;
  };
  if (!simcann_capture(stream, "Identity", &task)) task();
  return ACL_SUCCESS;
}

static aclError unsupported(const char* op) {
  char b[256];
  snprintf(b, sizeof b, "simcann: aclop '%s' (GE operator) is not simulated", op ? op : "?");
  simcann_set_error(b);
  fprintf(stderr, "[simcann] %s\n", b);
  return 500002;
}
aclError aclopCompileAndExecute(const char* t, int inputs, const aclTensorDesc* const in[],
                                const aclDataBuffer* const from[], int outputs,
                                const aclTensorDesc* const out[], aclDataBuffer* const to[], const aclopAttr*,
                                aclopEngineType, aclopCompileType, const char*, aclrtStream stream) {
  if (t && !strcmp(t, "Identity") && inputs == 1 && outputs == 1)
    return identity(*in[0], *from[0], *out[0], *to[0], stream);
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
