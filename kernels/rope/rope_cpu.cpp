#include <torch/library.h>

#include <memory>
#include <tuple>

#include "common/parallel.h"
#include "common/tensors.h"
#include "rope/rope_checks.h"

namespace liteboost {
namespace {

// `tensor` itself where its channels are adjacent, else a contiguous copy kept alive by `holder`.
const at::Tensor& adjacent(const at::Tensor& tensor, at::Tensor& holder) {
  if (tensor.stride(-1) == 1 || tensor.size(-1) <= 1) return tensor;
  holder = tensor.contiguous();
  return holder;
}

RopeTensor rope_tensor(const at::Tensor& tensor, at::Tensor& out, int64_t seq_dim, int64_t head_dim) {
  RopeTensor result{};
  if (tensor.numel() == 0) return result;  // no heads, and no address to count from
  result.data = tensor.const_data_ptr();
  result.out = out.mutable_data_ptr();
  result.heads = tensor.size(head_dim);
  result.batch_stride = tensor.stride(0);
  result.seq_stride = tensor.stride(seq_dim);
  result.head_stride = tensor.stride(head_dim);
  result.out_batch_stride = out.stride(0);
  result.out_seq_stride = out.stride(seq_dim);
  result.out_head_stride = out.stride(head_dim);
  return result;
}

// The stride between the tables of two sequences; 0 where all share one.
int64_t batch_stride(const at::Tensor& table) {
  return table.dim() == 3 && table.size(0) > 1 && table.numel() > 0 ? table.stride(0) : 0;
}

int64_t seq_stride(const at::Tensor& table) { return table.numel() > 0 ? table.stride(-2) : 0; }

std::tuple<at::Tensor, at::Tensor> rope_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                            const at::Tensor& sin, int64_t unsqueeze_dim,
                                            c10::string_view layout, int64_t rotary_dim) {
  RopeArgs args;
  args.layout = check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  at::Tensor q_out = empty_cpu(q.sizes(), q.scalar_type()), k_out = empty_cpu(k.sizes(), k.scalar_type());
  if (q_out.numel() == 0 && k_out.numel() == 0) return {std::move(q_out), std::move(k_out)};

  const int64_t seq_dim = unsqueeze_dim == 1 ? 2 : 1, head_dim = 3 - seq_dim;
  at::Tensor q_copy, k_copy, cos_copy, sin_copy;
  args.q = rope_tensor(adjacent(q, q_copy), q_out, seq_dim, head_dim);
  args.k = rope_tensor(adjacent(k, k_copy), k_out, seq_dim, head_dim);
  const at::Tensor& cos_rows = adjacent(cos, cos_copy);
  const at::Tensor& sin_rows = adjacent(sin, sin_copy);
  args.cos = cos_rows.const_data_ptr();
  args.sin = sin_rows.const_data_ptr();
  args.seq_len = q.size(seq_dim);
  args.head_dim = q.size(3);
  args.rotary_dim = rotary_dim == 0 ? cos.size(-1) : rotary_dim;
  args.cos_batch_stride = batch_stride(cos_rows);
  args.cos_seq_stride = seq_stride(cos_rows);
  args.sin_batch_stride = batch_stride(sin_rows);
  args.sin_seq_stride = seq_stride(sin_rows);
  args.dtype = dtype_of(q);
  args.table_dtype = dtype_of(cos);
  args.half_tables = cos.size(-1) != args.rotary_dim;

  const auto run = LB_KERNELS(rope_kernels).rope;
  const int64_t work = (args.q.heads + args.k.heads) * args.head_dim;
  parallel_rows(q.size(0) * args.seq_len, work, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[2 * args.rotary_dim]);
    run(args, scratch.get(), begin, end);
  });
  return {std::move(q_out), std::move(k_out)};
}

void turn_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin,
              int64_t unsqueeze_dim, c10::string_view layout, int64_t rotary_dim) {
  const auto [q_out, k_out] = rope_cpu(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim);
  q.copy_(q_out);
  k.copy_(k_out);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("rope", &liteboost::rope_cpu);
  m.impl("rope_", &liteboost::turn_cpu);
}
