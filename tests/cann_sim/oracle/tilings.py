"""The aclnn call that a tiling is of.

Unit tests of a tiling describe an operator of the graph engine: its inputs, outputs and attributes in the
order of its definition (``op_host/*_def.cpp``). Each row says which of them the arguments of the aclnn
function are:

    i0, o0      the input, the output at this place     [i1]   a list of it      #i5    its values
    @name=x     the attribute, or x where it is not given        null   no argument
    -i3, -@name no argument: what the aclnn function does not have, and what must not be given
    i1~name     the input, seen transposed where the attribute is true (it is stored the other way round)
"""

from __future__ import annotations

import ast
from typing import Any

from .tokens import Unreadable
from .values import ParameterSet, Tensor, Vector

_ATTENTION = (
    "i0 [i1] [i2] i3 i4 #i5 #i6 i7 i8 i9 i10 i11 i12 i13 i14 i15 i16 i17 i18 i19 i20"
    " i21 i22 #i23 i24 i25 i26 i27 i28"
    " @num_heads=1 @scale=1.0 @pre_tokens=2147483647 @next_tokens=2147483647 @input_layout='BSH'"
    " @num_key_value_heads=0 @sparse_mode=0 @inner_precise=1"
    " @block_size=0 @antiquant_mode=0 @softmax_lse_flag=False @key_antiquant_mode=0"
    " @value_antiquant_mode=0 @query_quant_mode=0 o0 o1"
)
# Lengths of packed sequences (inputs 8 and 9) are aclnnFlashAttentionVarLenScore's.
_TRAINING = (
    "i0 i1 i2 i3 i4 i5 i6 null -i8 -i9 @scale_value=1.0 @keep_prob=1.0 @pre_tockens=2147483647"
    " @next_tockens=2147483647"
    " @head_num=1 @input_layout='BSH' @inner_precise=0 @sparse_mode=0 o0 o1 o2 o3"
)
_GATING = (
    "i0 i1 @k=1 @k_group=1 @group_count=1 @group_select_mode=0 @renorm=0 @norm_type=0 @out_flag=False"
    " @routed_scaling_factor=1.0 @eps=1e-20 o0 o1 o2"
)
_GROUPED = (
    "[i0] [i1~transpose_weight] [i2] [i3] [i4] [i5] [i6] [i8] i7 null null null @split_item=0 @group_type=-1"
    " @group_list_type=0 @act_type=0 -@tuning_config [o0] null null"
)
_ROUTING = (
    "i0 i1 @active_num=0 @expert_capacity=0 @expert_num=0 @drop_pad_mode=0"
    " @expert_tokens_count_or_cumsum_flag=0"
    " @expert_tokens_before_capacity_flag=False o0 o1 o2 o3"
)
_WEIGHT_QUANT = (
    "i0~transpose_x i1~transpose_weight i2~transpose_weight i3~transpose_weight i4 i5 i6 @group_size=0 o0"
)
_TILINGS = {
    "RmsNorm": ("aclnnRmsNorm", "i0 i1 @epsilon=1e-6 o0 o1"),
    "GemmaRmsNorm": ("aclnnGemmaRmsNorm", "i0 i1 @epsilon=1e-6 o0 o1"),
    "AddRmsNorm": ("aclnnAddRmsNorm", "i0 i1 i2 @epsilon=1e-6 o0 o1 o2"),
    "AddLayerNorm": ("aclnnAddLayerNorm",
        "i0 i1 i2 i3 i4 @epsilon=1e-5 @additional_output=False o0 o1 o2 o3"),
    "AddRmsNormDynamicQuant": ("aclnnAddRmsNormDynamicQuant",
        "i0 i1 i2 i3 i4 -i5 @epsilon=1e-6 o0 o1 o2 o3 o4"),
    "DynamicQuant": ("aclnnDynamicQuant", "i0 i1 -i2 o0 o1"),
    "SwiGlu": ("aclnnSwiGlu", "i0 @dim=-1 o0"),
    "ClippedSwiglu": ("aclnnClippedSwiglu",
        "i0 i1 @dim=-1 @alpha=1.702 @limit=7.0 @bias=1.0 @interleaved=True o0"),
    "ApplyRotaryPosEmb": ("aclnnApplyRotaryPosEmbV2", "i0 i1 i2 i3 @layout=1 @rotary_mode='half'"),
    "RotaryPositionEmbedding": ("aclnnRotaryPositionEmbedding", "i0 i1 i2 -i3 @mode=0 o0"),
    "ScatterPaKvCache": (
        "aclnnScatterPaKvCache",
        "i0 i1 i2 i3 i4 i5 i6 i7 @cache_mode='Norm' @scatter_mode='None' @strides=[1,1] @offsets=[0,0]",
    ),
    "MoeGatingTopK": ("aclnnMoeGatingTopK", _GATING),
    "MoeInitRoutingV2": ("aclnnMoeInitRoutingV2", _ROUTING),
    "GroupedMatmul": ("aclnnGroupedMatmulV4", _GROUPED),
    "FusedInferAttentionScore": ("aclnnFusedInferAttentionScoreV4", _ATTENTION),
    "FlashAttentionScore": ("aclnnFlashAttentionScore", _TRAINING),
    "WeightQuantBatchMatmulV2": ("aclnnWeightQuantBatchMatmulV2", _WEIGHT_QUANT),
    "QuantBatchMatmulV3": (
        "aclnnQuantMatmulV4",
        "i0 i1 i2 i3 i5 i4 @transpose_x1=False @transpose_x2=False o0",
    ),
    "QuantBatchMatmulV4": (
        "aclnnQuantMatmulV5",
        "i0 i1 i3 i4 i5 i6 i7 i8 i2 -i9 @transpose_x1=False @transpose_x2=False @group_size=0 o0",
    ),
    "ChunkGatedDeltaRule": ("aclnnChunkGatedDeltaRule", "i0 i1 i2 i3 i4 i5 i6 @scale_value=1.0 o0 o1"),
    "RecurrentGatedDeltaRule": (
        "aclnnRecurrentGatedDeltaRule",
        "i0 i1 i2 i3 i4 i5 i6 i7 i8 i9 @scale_value=1.0 o0",
    ),
}  # fmt: skip


def operator_of(tiling: str) -> str:
    """The aclnn function of a tiling, or its own name where none is known here."""
    return _TILINGS.get(tiling, (tiling, ""))[0]


def tilings() -> list[str]:
    return sorted(_TILINGS)


def arguments_of(of: ParameterSet) -> list[Any]:
    """The arguments of the aclnn call; those of a call that a test makes itself are what they are."""
    if of.operator not in _TILINGS:
        return of.arguments
    if of.operator == "QuantBatchMatmulV3" and of.soc == "310P" and of.inputs[1].format.endswith("ND"):
        # TransposeAndTransDataForInputs of aclnn_quant_matmul_v4.cpp (ops-nn, 8.5.0 to 9.1.0).
        raise Unreadable("x2 in ND, which on a 310P the aclnn function casts to FRACTAL_NZ first")
    parts = _TILINGS[of.operator][1].split()
    for part in parts:
        if part.startswith("-@") and any(of.attributes.get(part[2:]) or []):
            raise Unreadable(f"{part[2:]}, which the aclnn function does not have")
        if part.startswith("-i") and _argument(of, part[1:]) is not None:
            raise Unreadable(f"input {part[2:]}, which the aclnn function does not have")
    return [_argument(of, part) for part in parts if part[0] != "-"]


def _argument(of: ParameterSet, part: str) -> Any:
    if part == "null":
        return None
    if part[0] == "@":
        name, default = part[1:].split("=")
        given = (value for key, value in of.attributes.items() if key == name or key.endswith(f"_{name}"))
        return next(given, ast.literal_eval(default))
    if part[0] == "[":
        one = _argument(of, part[1:-1])
        return one if one is None or isinstance(one, Vector) else Vector([one])
    if part[0] == "#":
        tensor = _argument(of, part[1:])
        if tensor is not None and tensor.data is None and any(tensor.shape):
            raise Unreadable("lengths whose values the test does not give")
        return None if tensor is None else Vector(tensor.data or [])
    name, _, transposed = part.partition("~")
    tensors = of.inputs if name[0] == "i" else of.outputs
    tensor = tensors[int(name[1:])] if int(name[1:]) < len(tensors) else None
    if isinstance(tensor, Vector):
        return Vector(_seen(of, one, transposed) for one in tensor)
    return _seen(of, tensor, transposed) if tensor else None


def _seen(of: ParameterSet, tensor: Tensor, transposed: str) -> Tensor:
    """A tensor as a caller of aclnn has it, transposed where the attribute is true."""
    tensor = _given(tensor)
    if not transposed or not of.attributes.get(transposed):
        return tensor
    # On a 310P a weight in FRACTAL_NZ, and what goes with it, is given as it is stored.
    return tensor if of.soc == "310P" and of.inputs[1].format.endswith("FRACTAL_NZ") else _transposed(tensor)


def _given(of: Tensor) -> Tensor:
    """A tensor of a tiling by its shape alone."""
    if of.storage and len(of.shape) == len(of.storage) == 1 and of.shape != of.storage:
        # Tables of GroupedMatmul write the rows and the columns of y, which its tiling does not read, so.
        return Tensor([*of.shape, *of.storage], of.dtype, of.format)
    blocked = of.format.endswith("FRACTAL_NZ")
    if not blocked and of.storage and of.storage != of.shape:
        raise Unreadable(f"a tensor of shape {of.shape} stored as {of.storage}")
    if blocked and of.storage == of.shape and len(of.shape) >= 4:  # only its blocks are told
        *batch, outer, inner, rows, columns = of.shape
        return Tensor(
            [*batch, inner * rows, outer * columns], of.dtype, of.format, None, of.offset, of.storage
        )
    return of


def _transposed(of: Tensor) -> Tensor:
    """The other way round, over the same memory."""
    if len(of.shape) < 2:
        return of
    *batch, rows, columns = of.shape
    strides = [1] * len(of.shape)
    for k in range(len(of.shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * of.shape[k + 1]
    strides[-1], strides[-2] = strides[-2], strides[-1]
    return Tensor([*batch, columns, rows], of.dtype, of.format, strides, of.offset, of.storage, of.data)
