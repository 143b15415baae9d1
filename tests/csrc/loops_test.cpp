#include "loops.h"

#include "common/isa.h"
#include "testing.h"

int main() {
  // Tiles are there for a process that has asked for them, as this does.
  liteboost::detect_isa();
  testing::test_norm();
  testing::test_rope();
  testing::test_activation();
  testing::test_linear();
  testing::test_quantized_linear();
  testing::test_int8_linear();
  testing::test_experts();
  testing::test_attention();
  testing::test_int8_attention();
  testing::test_sparse_attention();
  testing::test_delta_rule();
  testing::test_causal_conv();
  testing::test_head_linear();
  testing::test_quantize_weight();
  testing::test_batch_invariant();
  return testing::report("loops_test");
}
