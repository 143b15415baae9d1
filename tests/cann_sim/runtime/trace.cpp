// The trace: lines of JSON from launches (libopapi.so), collectives (libhccl.so) and the host (here).
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace {

std::mutex mutex;
FILE* file = nullptr;
std::atomic<bool> on{false};

void open_trace(const char* path) {
  if (!strcmp(path, "-") || !strcmp(path, "stderr")) {
    file = stderr;
  } else {
    std::string name = path;
    auto at = name.find("%p");
    if (at != std::string::npos) name.replace(at, 2, std::to_string(getpid()));
    file = fopen(name.c_str(), "a");
    if (file) setvbuf(file, nullptr, _IOLBF, 0);
  }
  on = file != nullptr;
}

}  // namespace

namespace sim {

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace sim

extern "C" {

bool simcann_tracing() {
  static const bool read = [] {
    std::lock_guard<std::mutex> lock(mutex);
    const char* path = getenv("SIMCANN_TRACE");
    if (path && *path && !file) open_trace(path);
    return true;
  }();
  (void)read;
  return on;
}

void simcann_trace_line(const char* json) {
  if (!simcann_tracing()) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (file) fprintf(file, "%s\n", json);
}

void simcann_trace_stop() {
  std::lock_guard<std::mutex> lock(mutex);
  if (file && file != stderr) fclose(file);
  file = nullptr;
  on = false;
}

/// Writes the trace to `path` from now on, in place of where it went; false when it cannot be opened.
bool simcann_trace_start(const char* path) {
  simcann_tracing();
  simcann_trace_stop();
  std::lock_guard<std::mutex> lock(mutex);
  open_trace(path);
  return on;
}

/// Puts a label into the trace, by which its reader divides it.
void simcann_mark(const char* label) {
  std::string safe = label;
  for (char& c : safe) {
    if (c == '"' || c == '\\' || c < 0x20) c = ' ';
  }
  sim::trace_event("mark", "\"label\":\"" + safe + "\"");
}
}

namespace sim {

void trace_event(const char* name, const std::string& fields) {
  if (!simcann_tracing()) return;
  simcann_trace_line(("{\"event\":\"" + std::string(name) + "\"," + fields + "}").c_str());
}

}  // namespace sim
