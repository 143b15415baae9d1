#include "head_linear/head_linear.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

template <typename T>
void one_size(int inputs, int outputs, bool outputs_side_by_side) {
  std::mt19937 random(static_cast<unsigned>(inputs * 1000 + outputs));
  constexpr int kBatch = 2, kHeads = 2, kRows = 1;
  Array<T> x(kBatch * kHeads * kRows * inputs), weight(kHeads * inputs * outputs);
  Array<T> out(kBatch * kHeads * kRows * outputs);
  x.fill(random, 2.0);
  weight.fill(random, 1.0);
  HeadLinearArgs args{};
  args.x = x.data();
  args.weight = weight.data();
  args.out = out.data();
  args.batch = kBatch;
  args.heads = kHeads;
  args.rows = kRows;
  args.inputs = inputs;
  args.outputs = outputs;
  args.x_strides[0] = kHeads * kRows * inputs;
  args.x_strides[1] = kRows * inputs;
  args.x_strides[2] = inputs;
  args.weight_stride = inputs * outputs;
  args.output_step = outputs_side_by_side ? 1 : inputs;
  args.input_step = outputs_side_by_side ? outputs : 1;
  args.dtype = dtype_of<T>();
  // In two ranges that meet in the middle of a head.
  const int split = outputs / 2;
  LB_ISA::head_linear_kernels.run(args, 0, split);
  LB_ISA::head_linear_kernels.run(args, split, kHeads * outputs);
  for (int row = 0; row < kBatch * kHeads; ++row) {
    for (int o = 0; o < outputs; ++o) {
      double want = 0.0, size = 0.0;
      for (int i = 0; i < inputs; ++i) {
        const int64_t at = row % kHeads * args.weight_stride + o * args.output_step + i * args.input_step;
        const double product = static_cast<double>(x[row * inputs + i]) * weight[static_cast<int>(at)];
        want += product;
        size += std::fabs(product);
      }
      check_close<T>("head_linear", inputs, o, out[row * outputs + o], want, size);
    }
  }
  check(out.intact(), "head_linear margin", inputs, outputs, 0, 0);
}

}  // namespace

void test_head_linear() {
  for (const int outputs : {1, 5, 16, 40, 131}) {
    for (int inputs = 1; inputs <= 70; inputs += 3) {
      for (const bool side_by_side : {false, true}) {
        one_size<float>(inputs, outputs, side_by_side);
        one_size<bf16>(inputs, outputs, side_by_side);
        one_size<f16>(inputs, outputs, side_by_side);
      }
    }
  }
}

}  // namespace testing
