// Communicators: shared memory of the ranks, barriers and messages.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "communicator.h"

namespace sim {

void trace(const char* op, Communicator* c, uint64_t count, HcclDataType type) {
  if (!simcann_tracing()) return;
  char line[256];
  snprintf(line, sizeof line,
           "{\"event\":\"collective\",\"op\":\"%s\",\"rank\":%u,\"ranks\":%u,\"bytes\":%zu,\"group\":\"%s\","
           "\"graph\":%d}",
           op, c->rank, c->ranks, static_cast<size_t>(count) * element_size(type), c->name.c_str(),
           simcann_replayed_graph());
  simcann_trace_line(line);
}

HcclResult on_stream(const char* op, aclrtStream stream, const std::function<HcclResult()>& body) {
  if (simcann_is_in_task_group(stream)) {
    simcann_set_error("simcann hccl: a collective in a task group");
    return HCCL_E_NOT_SUPPORT;
  }
  std::function<int()> task = body;
  return simcann_capture(stream, op, &task) ? HCCL_SUCCESS : body();
}
bool may_run(const char* op, aclrtStream stream) {
  if (!simcann_is_capturing(stream)) return true;
  simcann_set_error((std::string("simcann hccl: ") + op + " in a capture is not simulated").c_str());
  return false;
}

static double limit() {
  static double t = [] {
    const char* v = getenv("SIMCANN_HCCL_TIMEOUT");
    return v ? atof(v) : 120.0;
  }();
  return t;
}
bool wait_until(const std::function<bool()>& f) {
  auto t0 = std::chrono::steady_clock::now();
  int k = 0;
  while (!f()) {
    if (++k < 200)
      sched_yield();
    else
      usleep(k < 2000 ? 20 : 500);
    if ((k & 255) == 0 &&
        std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count() > limit()) {
      simcann_set_error("simcann hccl: timeout waiting for peers");
      return false;
    }
  }
  return true;
}
bool barrier(Communicator* c) {
  auto g = c->head->generation.load();
  if (c->head->arrived.fetch_add(1) + 1 == c->ranks) {
    c->head->arrived = 0;
    c->head->generation.fetch_add(1);
    return true;
  }
  return wait_until([&] { return c->head->generation.load() != g; });
}
static std::mutex open_mutex;
static std::map<std::string, Communicator*>& open_communicators() {
  static auto* all = new std::map<std::string, Communicator*>;
  return *all;
}
Communicator* find_communicator(const std::string& name) {
  std::lock_guard<std::mutex> lock(open_mutex);
  auto found = open_communicators().find(name);
  return found == open_communicators().end() ? nullptr : found->second;
}
void forget_communicator(Communicator* c) {
  std::lock_guard<std::mutex> lock(open_mutex);
  open_communicators().erase(c->name);
}
HcclResult open_communicator(const std::string& id, uint32_t n, uint32_t rank, const char* name,
                             HcclComm* out) {
  auto* c = new Communicator;
  c->id = id;
  c->ranks = n;
  c->rank = rank;
  c->name = name && *name ? name : id;
  c->bytes = 4096 + (size_t)n * kSlot;
  int fd = shm_open(("/" + id).c_str(), O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, c->bytes)) return HCCL_E_SYSCALL;
  void* p = mmap(nullptr, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (p == MAP_FAILED) return HCCL_E_MEMORY;
  c->head = (Head*)p;
  c->data = (char*)p + 4096;
  c->head->joined.fetch_add(1);
  if (!wait_until([&] { return c->head->joined.load() >= n; }) || !barrier(c)) return HCCL_E_TIMEOUT;
  if (rank == 0) shm_unlink(("/" + id).c_str());  // everyone has it mapped
  {
    std::lock_guard<std::mutex> lock(open_mutex);
    open_communicators()[c->name] = c;
  }
  *out = c;
  return HCCL_SUCCESS;
}
HcclResult send_message(Communicator* c, const void* buf, size_t n,
                        uint32_t dst) {  // buffered: returns at once
  buf = readable(buf);
  std::lock_guard<std::mutex> lock(c->mutex);
  auto s = c->sequence[{c->rank, dst}]++;
  char nm[256];
  snprintf(nm, sizeof nm, "/dev/shm/%s_m_%u_%u_%lu", c->id.c_str(), c->rank, dst, (unsigned long)s);
  std::string tmp = std::string(nm) + ".tmp";
  int fd = open(tmp.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (fd < 0) return HCCL_E_SYSCALL;
  size_t o = 0;
  while (o < n) {
    ssize_t k = write(fd, (const char*)buf + o, n - o);
    if (k <= 0) {
      close(fd);
      return HCCL_E_SYSCALL;
    }
    o += k;
  }
  close(fd);
  return rename(tmp.c_str(), nm) ? HCCL_E_SYSCALL : HCCL_SUCCESS;
}
HcclResult receive_message(Communicator* c, void* buf, size_t n, uint32_t src) {
  buf = readable(buf);
  uint64_t s;
  {
    std::lock_guard<std::mutex> lock(c->mutex);
    s = c->sequence[{src, c->rank}]++;
  }
  char nm[256];
  snprintf(nm, sizeof nm, "/dev/shm/%s_m_%u_%u_%lu", c->id.c_str(), src, c->rank, (unsigned long)s);
  if (!wait_until([&] { return access(nm, R_OK) == 0; })) return HCCL_E_TIMEOUT;
  int fd = open(nm, O_RDONLY);
  size_t o = 0;
  while (o < n) {
    ssize_t k = read(fd, (char*)buf + o, n - o);
    if (k <= 0) break;
    o += k;
  }
  close(fd);
  unlink(nm);
  return o == n ? HCCL_SUCCESS : HCCL_E_PARA;
}

}  // namespace sim
