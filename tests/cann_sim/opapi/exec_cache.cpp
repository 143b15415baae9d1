// The executor cache. A caller sets a key that it computed from the arguments, and adds the address of every tensor;
// PTAFindExecCache then gives an executor made earlier under the same key, bound to the new addresses, and phase 1 is
// skipped. Nothing is checked again: a key that leaves out what changed gives an executor of other arguments, as on
// hardware. Off unless SIMCANN_EXEC_CACHE=1.
#include "exec_cache.h"

#include <mutex>
#include <unordered_map>

#include "operator.h"

extern "C" void* simcann_ptr(const void*);

namespace sim {
namespace {

struct Request {
  bool active = false;
  std::string key;
  std::vector<const void*> addresses;  // of the storage of each tensor, in the order of the arguments
};
thread_local Request request;

std::mutex mutex;
std::unordered_map<std::string, std::shared_ptr<Prepared>> cached;
size_t hits = 0;

bool enabled() {
  static const bool on = getenv("SIMCANN_EXEC_CACHE") && atoi(getenv("SIMCANN_EXEC_CACHE"));
  return on;
}

/// Moves the tensors of `prepared` from the storages at `before` to those at `after`, in order.
void rebind(Prepared& prepared, const std::vector<const void*>& before,
            const std::vector<const void*>& after) {
  size_t next = 0;
  for (auto& argument : prepared.arguments()) {
    for (auto* tensor : argument.tensors) {
      if (!tensor || !tensor->i->device || next >= before.size() || next >= after.size()) continue;
      auto moved = std::make_shared<TensorData>(*tensor->i);
      auto by = static_cast<const char*>(after[next]) - static_cast<const char*>(before[next]);
      next++;
      moved->device = static_cast<const char*>(moved->device) + by;
      moved->t =
          at::from_blob(simcann_ptr(moved->device), moved->t.sizes(), moved->t.strides(), moved->t.options());
      tensor->i = moved;
    }
  }
}

aclOpExecutor* find(const std::string& key, uint64_t* workspace_size) {
  request.key = key;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = cached.find(key);
  if (!enabled() || found == cached.end()) return nullptr;
  hits++;
  auto prepared = found->second->clone();
  prepared->workspace = found->second->workspace;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher}));
  at::AutoDispatchBelowADInplaceOrView below;
  rebind(*prepared, found->second->addresses, request.addresses);
  *workspace_size = prepared->workspace;
  auto* executor = new aclOpExecutor{prepared};
  born(executor, Kind::executor);
  request = {};
  return executor;
}

}  // namespace

void remember_executor(Prepared& prepared) {
  if (!enabled() || !request.active || request.key.empty()) return;
  auto kept = prepared.clone();
  kept->workspace = prepared.workspace;
  kept->addresses = request.addresses;
  {
    std::lock_guard<std::mutex> lock(mutex);
    cached[request.key] = kept;
  }
  request = {};
}

}  // namespace sim

using namespace sim;

SIM_EXPORT void InitPTACacheThreadLocal() {
  request = {};
  request.active = true;
}
SIM_EXPORT void UnInitPTACacheThreadLocal() { request = {}; }
SIM_EXPORT bool CanUsePTACache(const char*) { return enabled(); }
SIM_EXPORT void AddTensorAddrToCachedList(void* address) {
  if (request.active) request.addresses.push_back(address);
}
SIM_EXPORT void SetPTAHashKey(uint64_t hash) { request.key = "#" + std::to_string(hash); }
SIM_EXPORT void SetPTACacheHashKey(uint8_t* key, size_t size) {
  request.key.assign(reinterpret_cast<char*>(key), size);
}
SIM_EXPORT aclOpExecutor* PTAGetExecCache(uint64_t hash, uint64_t* workspace_size) {
  return find("#" + std::to_string(hash), workspace_size);
}
SIM_EXPORT aclOpExecutor* PTAFindExecCache(uint8_t* key, size_t size, uint64_t* workspace_size) {
  return find(std::string(reinterpret_cast<char*>(key), size), workspace_size);
}
/// Executors taken from the cache so far.
SIM_EXPORT size_t simcann_cache_hits() {
  std::lock_guard<std::mutex> lock(sim::mutex);
  return hits;
}
