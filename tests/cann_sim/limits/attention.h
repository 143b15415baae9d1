// Parts of the limits of inference attention.
#pragma once
#include "../ops/attention.h"
#include "checks.h"

namespace sim {

/// The longest of the sequences whose lengths, or sums of lengths, are given.
int64_t longest(const Inference& a, IA lengths, bool cumulative);
/// Rows of the longest query; packed layouts have no axis that tells.
int64_t rows_of(const Inference& a);

/// The tilings of FusedInferAttentionScore: FusedInferAttentionScore's own, those of IncreFlashAttention and
/// PromptFlashAttention, and the one for packed tokens.
enum class Tiling { fused, incremental, prompt, split_fuse };
Tiling tiling_of(const Inference& a);

/// What packed layouts (TND, NTD) ask for.
void check_packed(const Inference& a);
/// Keys and values, plain or in blocks, and the lengths of sequences.
void check_keys(const Inference& a);
void check_mask(const Inference& a);
/// pseShift.
void check_bias(const Inference& a);
void check_sinks(const Inference& a);
/// Keys and values of 8 bits, and their scales.
void check_integers(const Inference& a);

}  // namespace sim
