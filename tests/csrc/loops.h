// The loops of each family, every length from 0 beyond four vectors, against plain double arithmetic.
#pragma once

namespace testing {

// Four vectors of the widest instruction set is where the unrolled loops begin.
constexpr int kMaxLength = 4 * 16 + 19;

void test_norm();
void test_rope();
void test_activation();
void test_linear();
void test_quantized_linear();
void test_int8_linear();
void test_experts();
void test_attention();
void test_int8_attention();
void test_sparse_attention();
void test_delta_rule();
void test_causal_conv();
void test_head_linear();
void test_quantize_weight();
void test_batch_invariant();

}  // namespace testing
