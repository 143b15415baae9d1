"""Names of modules and attributes that can be sharded. Data only; `layout` decides by shapes and code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Names of the children of an attention module.

    Attributes:
        query, key, value: Projections, or all three the same where they are one.
        output: Projection of the result; ``../`` begins the name of one beside the module.
        fused: ``"parts"`` where queries, keys and values follow each other, ``"heads"`` where those of one
            head do, ``"groups"`` where those of one head of keys and values do.
    """

    query: str
    key: str
    value: str
    output: str
    fused: str = ""

    @property
    def projections(self) -> tuple[str, ...]:
        """Without repetition."""
        return tuple(dict.fromkeys((self.query, self.key, self.value)))


ATTENTION = (
    *(
        Attention("q_proj", "k_proj", "v_proj", output)
        for output in ("o_proj", "out_proj", "dense", "c_proj")
    ),
    Attention("query", "key", "value", "../output.dense"),
    Attention("q_lin", "k_lin", "v_lin", "out_lin"),
    Attention("Wq", "Wk", "Wv", "dense"),
    Attention("qkv_proj", "qkv_proj", "qkv_proj", "o_proj", "parts"),
    Attention("c_attn", "c_attn", "c_attn", "c_proj", "parts"),
    Attention("query_key_value", "query_key_value", "query_key_value", "dense", "heads"),
)


@dataclass(frozen=True)
class LatentAttention:
    """Names of the children of multi-head latent attention: what widens to heads, and the output."""

    wide: tuple[str, ...]
    output: str


LATENT = (
    LatentAttention(("q_b_proj", "kv_b_proj"), "o_proj"),
    LatentAttention(("q_proj", "kv_b_proj"), "o_proj"),
)


@dataclass(frozen=True)
class FeedForward:
    """Names of the layers of an MLP; ``halves``: gate and up are the two halves of one."""

    wide: tuple[str, ...]
    narrow: str
    halves: bool = False


FEED_FORWARD = (
    FeedForward(("gate_proj", "up_proj"), "down_proj"),
    FeedForward(("gate_up_proj",), "down_proj", halves=True),
    FeedForward(("up_proj",), "down_proj"),
    FeedForward(("w1", "w3"), "w2"),
    FeedForward(("wi_0", "wi_1"), "wo"),
    FeedForward(("wi",), "wo"),
    FeedForward(("input_linear",), "output_linear", halves=True),
    FeedForward(("fc1",), "fc2"),
    FeedForward(("c_fc",), "c_proj"),
    FeedForward(("fc_in",), "fc_out"),
    FeedForward(("lin1",), "lin2"),
    FeedForward(("dense_h_to_4h",), "dense_4h_to_h"),
    FeedForward(("intermediate.dense",), "output.dense"),
)

#: Attributes of attention modules that count heads, and those that count heads of keys and values.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
#: How many heads share one of keys and values.
GROUPS = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
#: Size of a head.
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "qk_head_dim")
#: Of all heads together.
WIDTHS = (
    "embed_dim",
    "all_head_size",
    "hidden_size",
    "split_size",
    "attention_hidden_size",
    "inner_dim",
    "dim",
)
#: Norms of queries and keys, for each head or over all heads.
HEAD_NORMS = ("q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
#: One number a head.
SINKS = ("sinks", "sink", "attention_sink_bias", "s_aux")
#: Flags of a module that say how its projection is fused, where there are several ways; the first counts.
FUSED_BY = (("new_decoder_architecture", "groups"), ("multi_query", "parts"))
#: Sizes of an expert.
EXPERT_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")
#: Arguments of an attention's forward that hold something for each head.
BY_HEAD = ("alibi", "position_bias", "relative_position")
