// One line of JSON for a launch.
#include "trace.h"

#include <cstring>
#include <sstream>

#include "cost.h"
#include "operator.h"

extern "C" {
bool simcann_tracing();
void simcann_trace_line(const char* json);
int simcann_replayed_graph();
int simcann_current_device();
}

namespace sim {
namespace {

template <class List>
std::string list(const List& values) {
  std::ostringstream o;
  o << "[";
  bool first = true;
  for (auto v : values) {
    o << (first ? "" : ",") << +v;
    first = false;
  }
  o << "]";
  return o.str();
}

std::string quoted(const std::string& text) {
  std::string all = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') all += '\\';
    all += c < 0x20 ? ' ' : c;
  }
  return all + "\"";
}

std::string tensor_json(const aclTensor* tensor) {
  if (!tensor) return "null";
  const auto& data = *tensor->i;
  std::ostringstream o;
  int64_t extent = data.t.numel() ? 1 : 0;
  for (int64_t d = 0; extent && d < data.t.dim(); d++) extent += (data.t.size(d) - 1) * data.t.stride(d);
  o << "{\"shape\":" << list(data.view) << ",\"dtype\":\"" << dtype_name(data.dtype)
    << "\",\"strides\":" << list(data.t.strides())
    << ",\"contiguous\":" << (data.t.is_contiguous() ? "true" : "false")
    << ",\"format\":" << static_cast<int>(data.format) << ",\"storage_shape\":" << list(data.storage_shape)
    << ",\"address\":" << reinterpret_cast<uintptr_t>(data.device)
    << ",\"bytes\":" << extent * static_cast<int64_t>(data.t.element_size()) << "}";
  return o.str();
}

std::string argument_json(const Argument& a, const std::string& name, uint64_t read, uint64_t written) {
  std::ostringstream o;
  o << "{\"name\":" << quoted(name) << ",\"kind\":\"" << a.kind << "\",\"direction\":\"" << a.direction
    << "\"";
  std::string kind = a.kind;
  if (!a.given) {
    o << ",\"value\":null";
  } else if (kind == "tensor" || kind == "tensor_list") {
    o << ",\"read\":" << read << ",\"written\":" << written << ",\"tensors\":[";
    for (size_t k = 0; k < a.tensors.size(); k++) o << (k ? "," : "") << tensor_json(a.tensors[k]);
    o << "]";
  } else if (kind == "string") {
    o << ",\"value\":" << quoted(a.text);
  } else if (kind == "int_array" || kind == "bool_array") {
    o << ",\"value\":" << list(a.integers);
  } else if (kind == "dtype") {
    o << ",\"value\":\"" << dtype_name(static_cast<aclDataType>(a.integers.at(0))) << "\"";
  } else if (kind == "double" || kind == "float" || kind == "scalar") {
    std::ostringstream number;
    number.precision(17);
    number << a.number;
    bool finite = std::isfinite(a.number);
    o << ",\"value\":" << (finite ? number.str() : quoted(number.str()));
  } else if (!a.integers.empty()) {
    o << ",\"value\":" << a.integers[0];
  } else {
    o << ",\"value\":null";
  }
  o << "}";
  return o.str();
}

}  // namespace

LaunchTrace::LaunchTrace(const std::string& name, int stream, const std::vector<Argument>& arguments)
    : name_(name), stream_(stream), arguments_(arguments), on_(simcann_tracing()) {
  if (!on_) return;
  // Before the operator runs: it may change the indices by which it reads.
  auto touches = touches_of(name, arguments);
  std::vector<at::Tensor> read, written;
  for (const auto& touch : touches) {
    read.insert(read.end(), touch.read.begin(), touch.read.end());
    written.insert(written.end(), touch.written.begin(), touch.written.end());
    read_ += touch.more_read;
    written_ += touch.more_written;
    argument_read_.push_back(bytes_of(touch.read) + touch.more_read);
    argument_written_.push_back(bytes_of(touch.written) + touch.more_written);
  }
  read_ += bytes_of(read);
  written_ += bytes_of(written);
  flops_ = flops_of(name, arguments);
}

void LaunchTrace::finish() {
  if (!on_) return;
  std::ostringstream o;
  auto names = argument_names(name_);
  std::string all;
  for (size_t k = 0; k < arguments_.size(); k++) {
    for (auto* tensor : arguments_[k].tensors) {
      // An output whose size depends on data is allocated for the largest; only the front of it is written.
      if (!tensor || strcmp(arguments_[k].direction, "out") || !tensor->i->t.numel()) continue;
      int64_t used = 1;
      for (int64_t size : tensor->i->view) used *= size;
      int64_t unused = (tensor->i->t.numel() - used) * static_cast<int64_t>(tensor->i->t.element_size());
      if (unused > 0) {
        written_ -= unused;
        argument_written_[k] -= unused;
      }
    }
    all += (k ? "," : "") + argument_json(arguments_[k], k < names.size() ? names[k] : "", argument_read_[k],
                                          argument_written_[k]);
  }
  o << "{\"event\":\"launch\",\"op\":\"" << name_ << "\",\"stream\":" << stream_
    << ",\"device\":" << simcann_current_device() << ",\"graph\":" << simcann_replayed_graph()
    << ",\"read\":" << read_ << ",\"written\":" << written_ << ",\"flops\":" << flops_ << ",\"arguments\":["
    << all << "]}";
  simcann_trace_line(o.str().c_str());
}

}  // namespace sim
