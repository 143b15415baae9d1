#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/batch_invariant.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "experts/experts.h"
#include "experts/experts_checks.h"
#include "experts/experts_cpu.h"
#include "linear/linear.h"
#include "linear/linear_cpu.h"
#include "linear/linear_gemm_shares.h"

namespace liteboost {
namespace {

// Bytes of weight below which a thread is not worth waking.
constexpr int64_t kGrainBytes = 64 << 10;

// Outputs of one expert that a thread computes at a time, where K is contiguous.
constexpr int64_t kPanel = 64;

// Rows of x are converted for the loops in portions of about this size.
constexpr int64_t kPortionBytes = 16 << 20;

// The most rows of one expert served where N is contiguous; at::linear's time over ours, six weights
// [2880, 1440], one thread of a Zen 5, torch 2.13:
//
//               rows   1     4     8    16    24    32
//     bf16            2.6   1.7   1.4   0.9   0.8   0.6    (with AVX-512 BF16, which `columns` has no use for)
//     f32             1.3   1.6   1.7   1.6   1.6   1.5
//     f16             7.5    22    27    31    33    34
int64_t columns_max_rows(at::ScalarType dtype) {
  const int64_t most = linear_max_rows(dtype);
  const bool has_instruction = dtype != at::kFloat && most <= kLinearRows;
  return has_instruction ? std::min<int64_t>(most, 12) : most;
}

// The most rows of one expert served where K is contiguous and linear_cpu would multiply them as floats: they are gathered for
// that.
constexpr int64_t kWidenedRows = 64;

// Rows of x for one expert, among those of one portion.
struct Part {
  int64_t expert;
  const int64_t* slots;  // of the result, and of x where it has one row a slot
  int64_t rows;
  int64_t x_begin;  // bytes into the converted rows
};

enum class Layout { rows, columns, other };

class ExpertsLinear {
 public:
  ExpertsLinear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                int64_t slots, at::Tensor& out)
      : x_(x),
        weight_(weight),
        bias_(bias.has_value() ? bias->contiguous() : at::Tensor()),
        out_(static_cast<char*>(out.mutable_data_ptr())),
        // One row of x a token serves all of its slots.
        slots_a_row_(x.dim() == 2 ? slots : 1),
        n_(weight.size(1)),
        k_(weight.size(2)),
        size_(weight.element_size()),
        dtype_(dtype_of(x)),
        order_(order_of(x.size(0))) {
    if (weight.stride(2) == 1 || k_ <= 1) {
      layout_ = Layout::rows;
    } else if (weight.stride(1) == 1 || n_ <= 1) {
      layout_ = Layout::columns;
    } else {
      layout_ = Layout::other;
    }
  }

  void run(const Groups& groups) {
    const int64_t most = max_rows();
    std::vector<Part> parts, large;
    int64_t bytes = 0;
    const auto finish = [&] {
      run_parts(parts, bytes);
      parts.clear();
      bytes = 0;
    };
    for (int64_t e = 0; e < weight_.size(0); ++e) {
      const int64_t* slots = groups.order.data() + groups.first[e];
      const int64_t rows = groups.first[e + 1] - groups.first[e];
      if (rows > most &&
          (layout_ != Layout::rows || !linear_widens(x_.scalar_type()) || gemm_fills_threads(n_, rows))) {
        large.push_back({e, slots, rows, 0});
        continue;
      }
      for (int64_t row = 0; row < rows;) {
        // As many whole chunks as the portion has room for, and at least one.
        const int64_t room = (kPortionBytes - bytes) / std::max<int64_t>(1, chunk_bytes(kLinearRows));
        const int64_t count = std::min(rows - row, std::max<int64_t>(1, room) * kLinearRows);
        parts.push_back({e, slots + row, count, bytes});
        bytes += count / kLinearRows * chunk_bytes(kLinearRows) + chunk_bytes(count % kLinearRows);
        row += count;
        if (bytes >= kPortionBytes) finish();
      }
    }
    finish();
    run_large(large);
    // Slots without an expert.
    for (size_t i = groups.first[weight_.size(0)]; i < groups.order.size(); ++i) {
      std::memset(out_ + groups.order[i] * n_ * size_, 0, n_ * size_);
    }
  }

 private:
  // The most rows of one expert served by our loops.
  int64_t max_rows() const {
    if (order_ == Order::of_one_row && layout_ != Layout::other) return std::numeric_limits<int64_t>::max();
    switch (layout_) {
      case Layout::rows:
        return linear_widens(x_.scalar_type()) ? kWidenedRows : linear_max_rows(x_.scalar_type());
      case Layout::columns:
        return columns_max_rows(x_.scalar_type());
      default:
        return 0;
    }
  }
  const char* x_row(int64_t slot) const {
    return static_cast<const char*>(x_.const_data_ptr()) + slot / slots_a_row_ * k_ * size_;
  }
  const char* weight_at(int64_t expert, int64_t n) const {
    return static_cast<const char*>(weight_.const_data_ptr()) +
           (expert * weight_.stride(0) + n * weight_.stride(1)) * size_;
  }
  const char* bias_at(int64_t expert, int64_t n) const {
    return bias_.defined() ? static_cast<const char*>(bias_.const_data_ptr()) + (expert * n_ + n) * size_
                           : nullptr;
  }
  char* out_at(int64_t slot, int64_t n) const { return out_ + (slot * n_ + n) * size_; }

  // Of up to kLinearRows rows of x as the loops want them; a multiple of 64.
  int64_t chunk_bytes(int64_t rows) const {
    const int64_t bytes =
        layout_ == Layout::rows ? linear_.packed_bytes(dtype_, rows, k_, order_) : rows * k_ * 4;
    return (bytes + 63) / 64 * 64;
  }

  void gather(const int64_t* slots, int64_t rows, char* to) const {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * k_ * size_, x_row(slots[i]), k_ * size_);
  }

  // One chunk's rows of x, converted.
  void convert(const int64_t* slots, int64_t rows, char* to) const {
    if (layout_ == Layout::columns) {
      for (int64_t i = 0; i < rows; ++i) {
        experts_.to_float(dtype_, x_row(slots[i]), k_, reinterpret_cast<float*>(to) + i * k_);
      }
    } else if (rows == 1) {
      linear_.pack(dtype_, x_row(slots[0]), 1, k_, order_, to);
    } else {
      std::vector<char> gathered(rows * k_ * size_);
      gather(slots, rows, gathered.data());
      linear_.pack(dtype_, gathered.data(), rows, k_, order_, to);
    }
  }

  void run_parts(const std::vector<Part>& parts, int64_t bytes) const {
    if (parts.empty()) return;
    const c10::DataPtr converted = c10::GetCPUAllocator()->allocate(std::max<int64_t>(bytes, 64));
    char* const x = static_cast<char*>(converted.get());
    const int64_t width = layout_ == Layout::rows ? kPanel : kColumns;
    const int64_t panels = (n_ + width - 1) / width;
    int64_t rows = 0;
    for (const Part& part : parts) rows += part.rows;
    parallel_rows(parts.size(), rows * k_ / static_cast<int64_t>(parts.size()),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      for_chunks(parts[i], [&](const int64_t* slots, int64_t count, int64_t at) {
                        convert(slots, count, x + at);
                      });
                    }
                  });
    // A few rows are worth the reading of their weight; beyond that, each costs as much again.
    const int64_t work = (static_cast<int64_t>(parts.size()) + rows / 4) * n_ * k_ * size_;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), 1 + work / kGrainBytes);
    parallel_queue(parts.size() * panels, threads, [&](int64_t i) {
      const int64_t n = i % panels * width;
      run_panel(parts[i / panels], x, n, std::min(width, n_ - n));
    });
  }

  // f(slots, rows, bytes into the converted rows) for each chunk of a part.
  template <typename F>
  void for_chunks(const Part& part, const F& f) const {
    int64_t at = part.x_begin;
    for (int64_t row = 0; row < part.rows; row += kLinearRows, at += chunk_bytes(kLinearRows)) {
      f(part.slots + row, std::min(part.rows - row, kLinearRows), at);
    }
  }

  // Outputs [n, n + count) of all rows of a part.
  void run_panel(const Part& part, char* x, int64_t n, int64_t count) const {
    // The loops write rows one behind the other; these are then spread over the slots.
    alignas(64) char panel[kLinearRows * kColumns * sizeof(float)];
    static_assert(kLinearRows == kColumnsRows && kPanel <= kColumns);
    for_chunks(part, [&](const int64_t* slots, int64_t rows, int64_t at) {
      void* const out = rows == 1 ? static_cast<void*>(out_at(slots[0], n)) : panel;
      if (layout_ == Layout::rows) {
        LinearArgs args;
        args.packed_x = x + at;
        args.weight = weight_at(part.expert, n);
        args.bias = bias_at(part.expert, n);
        args.out = out;
        args.rows = rows;
        args.n = count;
        args.k = k_;
        args.weight_stride = weight_.stride(1);
        args.order = order_;
        linear_.run(dtype_, args, 0, count);
      } else {
        ColumnsArgs args;
        args.x = reinterpret_cast<const float*>(x + at);
        args.weight = weight_at(part.expert, n);
        args.bias = bias_at(part.expert, n);
        args.out = out;
        args.rows = rows;
        args.count = count;
        args.k = k_;
        args.weight_stride = weight_.stride(2);
        experts_.columns(dtype_, args);
      }
      if (rows == 1) return;
      for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(out_at(slots[i], n), panel + i * count * size_, count * size_);
      }
    });
  }

  // Experts with many rows, or a weight that no loop here reads as it lies: one after the other, each by all
  // threads, or, where there are enough of them, each by one, which then waits for no other.
  void run_large(const std::vector<Part>& large) const {
    const int64_t count = large.size(), threads = at::get_num_threads();
    const auto run = [&](int64_t i) { run_gathered(large[i].expert, large[i].slots, large[i].rows); };
    if (count >= 2 * threads) {
      parallel_queue(count, threads, run);
    } else {
      for (int64_t i = 0; i < count; ++i) run(i);
    }
  }

  void run_gathered(int64_t expert, const int64_t* slots, int64_t rows) const {
    at::Tensor x = empty_cpu({rows, k_}, x_.scalar_type());
    char* const gathered = static_cast<char*>(x.mutable_data_ptr());
    parallel_rows(rows, k_, [&](int64_t begin, int64_t end) {
      gather(slots + begin, end - begin, gathered + begin * k_ * size_);
    });
    const auto bias = bias_.defined() ? std::optional<at::Tensor>(bias_.select(0, expert)) : std::nullopt;
    const at::Tensor weight = weight_.select(0, expert);
    const at::Tensor out = order_ == Order::of_one_row      ? own_linear(x, weight.contiguous(), bias, order_)
                           : linear_widens(x.scalar_type()) ? fastest_linear(x, weight, bias)
                                                            : torch_linear(x, weight, bias);
    const char* const result = static_cast<const char*>(out.const_data_ptr());
    parallel_rows(rows, n_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(out_at(slots[i], 0), result + i * n_ * size_, n_ * size_);
      }
    });
  }

  const at::Tensor& x_;
  const at::Tensor& weight_;
  const at::Tensor bias_;
  char* const out_;
  const int64_t slots_a_row_, n_, k_, size_;
  const DType dtype_;
  const Order order_;
  Layout layout_;
  const LinearKernels& linear_ = LB_KERNELS(linear_kernels);
  const ExpertsKernels& experts_ = LB_KERNELS(experts_kernels);
};

}  // namespace

at::Tensor experts_linear_cpu(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const at::Tensor& index) {
  check_experts_linear(x, weight, bias, index);
  if (x.size(-1) == 0) {
    return experts_linear_cpu(one_zero_column(x), one_zero_column(weight), bias, index);
  }
  const Groups groups = group("experts_linear", index, weight.size(0));
  at::Tensor out = empty_cpu({index.size(0), index.size(1), weight.size(1)}, x.scalar_type());
  if (out.numel() == 0) return out;
  const auto rows = x.expect_contiguous();
  ExpertsLinear(*rows, weight, bias, index.size(1), out).run(groups);
  return out;
}

namespace {

at::Tensor experts_combine_cpu(const at::Tensor& y, const at::Tensor& scores) {
  check_experts_combine(y, scores);
  at::Tensor out = empty_cpu({y.size(0), y.size(2)}, y.scalar_type());
  if (out.numel() == 0) return out;
  if (y.size(1) == 0) return out.zero_();
  const auto rows = y.expect_contiguous();
  const auto contiguous = scores.expect_contiguous();
  const auto& kernels = LB_KERNELS(experts_kernels);
  const int64_t slots = y.size(1);
  std::vector<float> converted;
  CombineArgs args;
  args.y = rows->const_data_ptr();
  if (scores.scalar_type() == at::kFloat) {
    args.scores = contiguous->const_data_ptr<float>();
  } else {
    converted.resize(scores.numel());
    kernels.to_float(dtype_of(scores), contiguous->const_data_ptr(), scores.numel(), converted.data());
    args.scores = converted.data();
  }
  args.out = out.mutable_data_ptr();
  args.slots = slots;
  args.n = y.size(2);
  const DType dtype = dtype_of(y);
  parallel_rows(out.numel(), std::max<int64_t>(slots, 1),
                [&](int64_t begin, int64_t end) { kernels.combine(dtype, args, begin, end); });
  return out;
}

}  // namespace

Groups group(const char* op, const at::Tensor& index, int64_t experts) {
  const auto contiguous = index.expect_contiguous();
  const int64_t* ids = contiguous->const_data_ptr<int64_t>();
  const int64_t count = index.numel();
  Groups groups{std::vector<int64_t>(experts + 2), std::vector<int64_t>(count)};
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] <= experts, "liteboost::", op, ": index must be 0 .. ", experts,
                      " for ", experts, " experts (", experts, " for none), got ", ids[i],
                      "; check the router");
    if (ids[i] < experts) ++groups.first[ids[i] + 2];
  }
  for (int64_t e = 2; e < experts + 2; ++e) groups.first[e] += groups.first[e - 1];
  int64_t none = groups.first[experts + 1];
  for (int64_t i = 0; i < count; ++i) {
    groups.order[ids[i] < experts ? groups.first[ids[i] + 1]++ : none++] = i;
  }
  return groups;
}

}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("experts_linear", &liteboost::experts_linear_cpu);
  m.impl("experts_combine", &liteboost::experts_combine_cpu);
}
