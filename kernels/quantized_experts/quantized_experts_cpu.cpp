#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/batch_invariant.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "experts/experts_cpu.h"
#include "quantized_experts/quantized_experts.h"
#include "quantized_experts/quantized_experts_checks.h"
#include "quantized_linear/quantized_linear_cpu.h"

namespace liteboost {
namespace {

// Bytes of weight that a thread takes at a time, and below which another is not worth waking.
constexpr int64_t kGrainBytes = 64 << 10;
// Rows of one expert that are packed together, and bytes of packed x after which what is there is computed.
constexpr int64_t kPartRows = 128;
constexpr int64_t kPortionBytes = 16 << 20;

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of x for one expert, among those of one portion.
struct Part {
  int64_t expert;
  const int64_t* slots;  // of the result, and of x where it has one row a slot
  int64_t rows;
  int64_t packed;  // bytes into packed x
  int64_t made;    // rows into what is computed beside the result
};

class ExpertsTiles {
 public:
  ExpertsTiles(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
               const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
               int64_t slots, at::Tensor& out)
      : x_(x),
        tiles_(tiles),
        scales_(scales),
        zero_points_(zero_points),
        bias_(bias),
        results_(out),
        out_(static_cast<char*>(out.mutable_data_ptr())),
        // One row of x a token serves all of its slots.
        slots_a_row_(x.dim() == 2 ? slots : 1),
        n_(out.size(2)),
        k_(x.size(-1)),
        size_(x.element_size()),
        tiles_an_expert_(n_ / kTile),
        tile_bytes_(tiles.size(1) * tiles.size(2)),
        dtype_(dtype_of(x)),
        order_(order_of(x.size(0))) {}

  void run(const Groups& groups) {
    const int64_t experts = tiles_.size(0) / tiles_an_expert_;
    std::vector<Part> parts, large;
    int64_t bytes = 0, made = 0;
    const auto finish = [&] {
      run_parts(parts, bytes, made);
      parts.clear();
      bytes = made = 0;
    };
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t* slots = groups.order.data() + groups.first[e];
      const int64_t rows = groups.first[e + 1] - groups.first[e];
      if (order_ == Order::fastest && !uses_int_dot(x_.scalar_type(), n_, rows)) {
        large.push_back({e, slots, rows, 0, 0});
        continue;
      }
      for (int64_t row = 0; row < rows; row += kPartRows) {
        const int64_t count = std::min(rows - row, kPartRows);
        parts.push_back({e, slots + row, count, bytes, made});
        bytes += aligned(kernels_.packed_bytes(dtype_, weight_of(e), count));
        made += count > 1 ? count : 0;  // one row is computed where it belongs
        if (bytes >= kPortionBytes) finish();
      }
    }
    finish();
    for (const Part& part : large) run_large(part);
    if (not_finite_) redo_not_finite(groups);
    // Slots without an expert.
    for (size_t i = groups.first[experts]; i < groups.order.size(); ++i) {
      std::memset(out_ + groups.order[i] * n_ * size_, 0, n_ * size_);
    }
  }

 private:
  const char* x_row(int64_t slot) const {
    return static_cast<const char*>(x_.const_data_ptr()) + slot / slots_a_row_ * k_ * size_;
  }
  char* out_row(int64_t slot) const { return out_ + slot * n_ * size_; }

  QuantizedTiles weight_of(int64_t expert) const {
    const int64_t first = expert * tiles_an_expert_, scales = first * scales_.size(1) * kTile;
    return {static_cast<const char*>(tiles_.const_data_ptr()) + first * tile_bytes_,
            static_cast<const char*>(scales_.const_data_ptr()) + scales * scales_.element_size(),
            zero_points_ ? zero_points_->const_data_ptr<uint8_t>() + scales : nullptr,
            n_,
            k_,
            scales_.size(1),
            tiles_.scalar_type() == at::kChar ? 8 : 4,
            dtype_of(scales_),
            false,
            order_};
  }

  void gather(const int64_t* slots, int64_t rows, char* to) const {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * k_ * size_, x_row(slots[i]), k_ * size_);
  }
  void scatter(const int64_t* slots, int64_t rows, const char* from) const {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(out_row(slots[i]), from + i * n_ * size_, n_ * size_);
  }

  void pack(const Part& part, char* to) const {
    if (part.rows == 1) return kernels_.pack(dtype_, weight_of(part.expert), x_row(part.slots[0]), 1, to);
    std::vector<char> gathered(part.rows * k_ * size_);
    gather(part.slots, part.rows, gathered.data());
    kernels_.pack(dtype_, weight_of(part.expert), gathered.data(), part.rows, to);
  }

  void run_parts(const std::vector<Part>& parts, int64_t bytes, int64_t made_rows) const {
    if (parts.empty()) return;
    const c10::DataPtr packed = c10::GetCPUAllocator()->allocate(std::max<int64_t>(bytes, 64));
    const c10::DataPtr made = c10::GetCPUAllocator()->allocate(std::max<int64_t>(made_rows * n_ * size_, 64));
    char* const x = static_cast<char*>(packed.get());
    char* const rows_made = static_cast<char*>(made.get());
    const int64_t count = parts.size();
    int64_t rows = 0;
    for (const Part& part : parts) rows += part.rows;
    parallel_rows(count, rows * k_ / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack(parts[i], x + parts[i].packed);
    });
    const int64_t width = std::min(tiles_an_expert_, std::max<int64_t>(1, kGrainBytes / tile_bytes_));
    const int64_t panels = (tiles_an_expert_ + width - 1) / width;
    // A few rows are worth the reading of their weight; beyond that, each costs as much again.
    const int64_t work = (count + rows / 4) * tiles_an_expert_ * tile_bytes_;
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), 1 + work / kGrainBytes);
    parallel_queue(count * panels, threads, [&](int64_t i) {
      const Part& part = parts[i / panels];
      const int64_t begin = i % panels * width;
      char* out = part.rows == 1 ? out_row(part.slots[0]) : rows_made + part.made * n_ * size_;
      run_panel(part, x + part.packed, out, begin, std::min(begin + width, tiles_an_expert_));
    });
    parallel_rows(count, made_rows * n_ / count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (parts[i].rows == 1) continue;
        scatter(parts[i].slots, parts[i].rows, rows_made + parts[i].made * n_ * size_);
      }
    });
  }

  // The outputs of tiles [begin, end) of one expert, for all rows of a part.
  void run_panel(const Part& part, const char* x, char* out, int64_t begin, int64_t end) const {
    QuantizedLinearArgs args{};
    args.weight = weight_of(part.expert);
    args.packed_x = x;
    args.bias =
        bias_ ? static_cast<const char*>(bias_->const_data_ptr()) + part.expert * n_ * size_ : nullptr;
    args.out = out;
    args.rows = part.rows;
    args.out_stride = n_;
    args.not_finite = &not_finite_;
    kernels_.run(dtype_, args, begin, end);
  }

  // Rows whose outputs are not all finite once more, as the layers that they are: linear_packed knows what they give.
  void redo_not_finite(const Groups& groups) const {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::Tensor is_finite = at::isfinite(results_).all(2);
    const bool* const finite = is_finite.const_data_ptr<bool>();
    for (int64_t e = 0; e < tiles_.size(0) / tiles_an_expert_; ++e) {
      std::vector<int64_t> slots;
      for (int64_t i = groups.first[e]; i < groups.first[e + 1]; ++i) {
        if (!finite[groups.order[i]]) slots.push_back(groups.order[i]);
      }
      // Not more at once than have the bits of one.
      const int64_t count = static_cast<int64_t>(slots.size());
      const int64_t step = order_ == Order::of_one_row ? batch_invariant_rows() : count;
      for (int64_t i = 0; i < count; i += step)
        run_large({e, slots.data() + i, std::min(step, count - i), 0, 0});
    }
  }

  // An expert with so many rows that parts of its weight are dequantized, by all threads.
  void run_large(const Part& part) const {
    const at::Tensor x = empty_cpu({part.rows, k_}, x_.scalar_type());
    gather(part.slots, part.rows, static_cast<char*>(x.mutable_data_ptr()));
    const int64_t first = part.expert * tiles_an_expert_;
    const auto own = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, tiles_an_expert_); };
    std::optional<at::Tensor> zeros, bias;
    if (zero_points_) zeros = own(*zero_points_);
    if (bias_) bias = bias_->select(0, part.expert);
    const at::Tensor made = linear_packed_cpu(x, own(tiles_), own(scales_), zeros, bias, n_);
    scatter(part.slots, part.rows, static_cast<const char*>(made.const_data_ptr()));
  }

  const at::Tensor& x_;
  const at::Tensor& tiles_;
  const at::Tensor& scales_;
  const std::optional<at::Tensor>& zero_points_;
  const std::optional<at::Tensor>& bias_;
  const at::Tensor results_;  // [tokens, slots, n]
  char* const out_;
  mutable bool not_finite_ = false;
  const int64_t slots_a_row_, n_, k_, size_, tiles_an_expert_, tile_bytes_;
  const DType dtype_;
  const Order order_;
  const QuantizedLinearKernels& kernels_ = LB_KERNELS(quantized_linear_kernels);
};

std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? std::optional<at::Tensor>(tensor->contiguous()) : std::nullopt;
}

at::Tensor experts_packed_cpu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                              const std::optional<at::Tensor>& zero_points,
                              const std::optional<at::Tensor>& bias, const at::Tensor& index,
                              int64_t out_features) {
  check_experts_packed(x, tiles, scales, zero_points, bias, index, out_features);
  const Groups groups = group("experts_packed", index, tiles.size(0) / (out_features / kTile));
  at::Tensor out = empty_cpu({index.size(0), index.size(1), out_features}, x.scalar_type());
  if (out.numel() == 0) return out;
  const at::Tensor rows = x.contiguous(), weights = tiles.contiguous(), factors = scales.contiguous();
  const std::optional<at::Tensor> zeros = contiguous(zero_points), added = contiguous(bias);
  ExpertsTiles(rows, weights, factors, zeros, added, index.size(1), out).run(groups);
  return out;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("experts_packed", &liteboost::experts_packed_cpu); }
