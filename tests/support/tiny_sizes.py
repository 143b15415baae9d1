"""Sizes of tiny models: one table of rules by field name, and what such rules cannot know."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re

# ---------------------------------------------------------------------------------------------------
# canonical tiny sizes
# ---------------------------------------------------------------------------------------------------
FFN, MOE_FFN, VOCAB, EXPERTS, TOP_K = 96, 48, 256, 4, 2
MAX_POSITIONS = 256
WINDOW = 8
MAX_LAYERS = 6


class _Drop:
    """Marker: leave the field out and let the Config class compute it."""


DROP = _Drop()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What tests vary.

    Attributes:
        exact: Use these head counts also where a family's own are smaller.
    """

    head_dim: int = 16
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 64
    exact: bool = False

    @property
    def unrotated(self) -> int:
        """The part without rotation of latent attention's heads; the part with it is half a ``head_dim``."""
        return self.head_dim // 2 if self.exact else self.head_dim

    def query_heads(self, default, cfg):
        if not isinstance(default, int) or default <= 0:
            return default
        return self.heads if self.exact else min(self.heads, default)

    def grouped_heads(self, default, cfg):
        """Grouped-query attention wherever the family allows it; latent attention needs one a query head."""
        if default == 1 and not self.exact:
            return 1
        if "kv_lora_rank" in field_names(type(cfg)) or first(cfg, "kv_lora_rank") is not None:
            return DROP if default is None else self.heads
        return self.kv_heads

    def optional_grouped_heads(self, default, cfg):
        """Of families that group only in some of their layouts (Falcon, MPT)."""
        if self.exact:
            return self.kv_heads
        return self.heads if default is not None else DROP


DEFAULT = Sizes()


def _unless_none(value):
    return lambda default, cfg: default if default is None else value


def _unless_list(value):
    return lambda default, cfg: default if isinstance(default, (list, tuple)) else value


def _at_most(value):
    return lambda default, cfg: default if default is None else min(default, value)


def _token_id(default, cfg):
    if isinstance(default, (list, tuple)):
        return type(default)(_token_id(d, cfg) for d in default)
    return default if default is None or default < 0 else 3 + default % 29


@functools.cache
def rules(size: Sizes) -> list:
    """(regular expression for the whole field name, tiny value or function(default, default_config))."""
    table = [*_decoder_rules(size), *_other_rules(size)]
    return [(re.compile(pattern), value) for pattern, value in table]


def _decoder_rules(size: Sizes) -> list:
    return [
        # vocabulary and special tokens
        (r"vocab_size|decoder_vocab_size|vocab_size_per_layer_input", VOCAB),
        (r"unpadded_vocab_size", _unless_none(VOCAB)),
        (r"pad_token_id", _unless_none(0)),
        (r"bos_token_id", _unless_none(1)),
        (r"eos_token_id", lambda d, c: d if d is None else [2] if isinstance(d, list) else 2),
        (r".*_token_(id|index)|mask_index|unk_index", _token_id),
        (r"type_vocab_size|task_type_vocab_size", _at_most(4)),
        # depth
        (
            r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_(en|de)coder_layers|num_blocks|depth"
            r"|num_global_layers|conf_num_hidden_layers|vision_layers",
            _at_most(2),
        ),
        (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", _at_most(1)),
        (r"num_mtp_layers|num_nextn_predict_layers", lambda d, c: d if d is None else 0),
        # width
        (
            r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|hidden_size_global|word_embed_proj_dim|lru_width"
            r"|attention_hidden_size|dim_model_base|projector_(in|out)put_dim|out_hidden_size|embed_dim_text"
            r"|(in|out)put_embedding_size|output_proj_dims|cross_attention_hidden_size|vision_output_dim",
            _unless_none(size.hidden),
        ),
        (r"embedding_size", lambda d, c: size.hidden if d == first(c, "hidden_size") else size.hidden // 2),
        (
            r"(decoder_|encoder_)?(intermediate_size|ffn_dim|d_ff|d_inner|dff|dim_ff|mlp_dim|feed_forward_size)"
            r"|ffn_hidden_size|n_inner|intermediate_size_mlp|dense_intermediate_size|prefix_dense_intermediate_size",
            _unless_none(FFN),
        ),
        (
            r"(moe_|shared_|shared_expert_|moe_shared_expert_)(intermediate_size|ffn_hidden_size)|expert_ffn_hidden_size",
            lambda d, c: d if not d else MOE_FFN,
        ),
        # attention heads
        (
            r"num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads|attention_heads|num_(de|en)coder_attention_heads"
            r"|index_n_heads|swa_num_attention_heads|conf_num_attention_heads|indexer_n_heads|linear_num_heads",
            size.query_heads,
        ),
        (r"num_key_value_heads|swa_num_key_value_heads|swa_num_kv_heads", size.grouped_heads),
        (r"num_kv_heads|kv_n_heads", size.optional_grouped_heads),
        (r"head_dim", size.head_dim),
        (
            r"dim_head|d_head|d_kv|kv_channels|attention_head_size|v_head_dim|swa_head_dim"
            r"|swa_v_head_dim|global_head_dim|linear_(key_|value_)?head_dim|index_head_dim|indexer_head_dim",
            _unless_none(size.head_dim),
        ),
        (r"attention_head_dim", _unless_none(size.head_dim)),
        (r"(swa_)?qk_nope_head_dim", _unless_none(size.unrotated)),
        (r"qk_rope_head_dim|rotary_dim", _unless_none(size.head_dim // 2)),
        (r"qk_head_dim", DROP),
        (
            r"q_lora_rank|kv_lora_rank|o_lora_rank|hc_lowrank|laurel_rank|adapter_rank|gated_norm_rank|moe_latent_size",
            lambda d, c: d if not d else min(d, 32),
        ),
        (r"o_groups", _at_most(2)),
        (r"query_pre_attn_scalar", size.head_dim),
        (r"linear_num_key_heads", _at_most(2)),
        (r"linear_num_value_heads", _at_most(4)),
        (
            r"sliding_window|sliding_window_size|attention_window_size|local_attention|attention_chunk_size|keep_window_size"
            r"|local_attention_window_len|window_size",
            lambda d, c: d if not d else WINDOW,
        ),
        (r"index_topk", 8),
        (r"index_topk_blocks", 2),
        (r"index_block_size", 8),
    ]


def _other_rules(size: Sizes) -> list:
    return [
        # mixture of experts
        (
            r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num",
            lambda d, c: d if not d else EXPERTS,
        ),
        (
            r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts|num_experts_per_token",
            lambda d, c: TOP_K if d is None else min(d, TOP_K),
        ),
        (r"n_group|topk_group", lambda d, c: d if d is None else 1),
        (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", _at_most(1)),
        (r"router_hidden_size", 32),
        # state-space and linear attention
        (r"mamba_n_heads|mamba_num_heads", 8),
        # Eight of them are twice the hidden size.
        (r"mamba_d_head|mamba_head_dim", _unless_none(size.hidden // 4)),
        (r"mamba_d_ssm", _unless_none(2 * size.hidden)),
        (r"mamba_d_state|state_size|ssm_state_size", 16),
        (r"mamba_dt_rank|time_step_rank", 8),
        (r"mamba_n_groups|n_groups|mamba_ngroups", _at_most(1)),
        (r"mamba_chunk_size|chunk_size", lambda d, c: d if not d or d < 0 else 8),
        # positions
        (
            r"max_position_embeddings|n_positions|max_seq_len|n_ctx|context_length|max_target_positions"
            r"|original_max_position_embeddings|max_source_positions",
            _unless_none(MAX_POSITIONS),
        ),
        (r"floor_scale|rel_extent|log_scaling_n_floor", _unless_none(64)),
        # vision / audio towers of composite configurations
        (r"image_size|crop_size", _unless_list(32)),
        (r"patch_size", _unless_list(8)),
        (r"text_hidden_size|embed_dim", lambda d, c: size.hidden if isinstance(d, int) else d),
        (r"index_kpool", _at_most(4)),
        (r"num_position_embeddings", 64),
        (r"hidden_size_per_layer_input", 16),
        # dropout off, spread-out initialisation
        (
            r".*(dropout|pdrop|layerdrop|dropout_prob|dropout_rate|dropout_p)",
            lambda d, c: d if d is None else type(d)(0),
        ),
        (r"initializer_range|init_std", 0.1),
    ]


@functools.cache
def overrides(size: Sizes) -> dict[str, dict]:
    """What the rules cannot know. Keys are model types; nested dicts address sub-configurations."""
    return _text_overrides(size) | _recurrent_overrides(size) | _composite_overrides(size)


def _text_overrides(size: Sizes) -> dict[str, dict]:
    blt_part = {
        "hidden_size": size.hidden,
        "hidden_size_global": 2 * size.hidden,
        "vocab_size": 260,
        "num_key_value_heads": size.heads,
    }
    return {
        "blt": {
            "vocab_size": 260,
            "encoder_hash_byte_group_vocab": 64,
            "encoder_hash_byte_group_size": [2, 3],
            "patch_size": 4,
            "patcher_config": blt_part,
            "encoder_config": blt_part,
            "decoder_config": blt_part,
            "global_config": {"hidden_size": 2 * size.hidden, "num_key_value_heads": size.heads},
        },
        "cohere_compass_text": _cohere_compass_text(size),
        "dbrx": {
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": size.kv_heads, "clip_qkv": 8.0},
            "ffn_config": {"moe_top_k": TOP_K},
        },
        "dory": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
        },
        "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "dots3_note_text": _dots3_text(size),
        "gemma3n_text": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        "flint": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_only_layers": [0],
        },
        "gemma4_text": _gemma4_text(size)
        | {
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "moe_intermediate_size": MOE_FFN,
        },
        "gemma4_unified_text": _gemma4_text(size),
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "granitemoe_swa": {"shared_intermediate_size": MOE_FFN},
        "granitemoeshared": {"shared_intermediate_size": MOE_FFN},
        "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["hybrid_sliding", "hybrid"]},
        "longcat_flash": {"head_dim": size.head_dim // 2},
        "minimax_m3_vl_text": {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        "nemotron": {"num_key_value_heads": size.kv_heads},
        "qwen4_exp_text": _qwen4_text(size),
        "roc_bert": {
            "pronunciation_vocab_size": 64,
            "shape_vocab_size": 64,
            "pronunciation_embed_dim": 32,
            "shape_embed_dim": 32,
        },
        "xmod": {"default_language": "en_XX"},
        "stablelm": {"qk_layernorm": True},
    }


def _recurrent_overrides(size: Sizes) -> dict[str, dict]:
    """Of families with state-space, recurrent or hashed layers."""
    return {
        "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": size.hidden // 4},
        "granitemoehybrid": {
            "position_embedding_type": "rope",
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": size.hidden // 4,
        },
        "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1},
        "lfm2": {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "full_attn_idxs": DROP,
        },
        "lfm2_moe": {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
        "mamba2": {"num_heads": 8, "head_dim": size.hidden // 4},
        "recurrent_gemma": {"num_hidden_layers": 3},
        "reformer": {
            "axial_pos_embds_dim": [size.hidden // 2, size.hidden // 2],
            "axial_pos_shape": [16, 16],
            "attn_layers": ["local", "lsh"],
            "num_hidden_layers": 2,
            "lsh_attn_chunk_length": 8,
            "local_attn_chunk_length": 8,
            "num_buckets": 4,
            "hash_seed": 1,
        },
        "xlstm": {"hidden_size": 2 * size.hidden, "embedding_dim": 2 * size.hidden},
        "zamba2": {"use_mem_rope": True},
        "zamba": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "attention_hidden_size": 2 * size.hidden,
            "attention_head_dim": 2 * size.hidden // size.heads,
        },
    }


def _composite_overrides(size: Sizes) -> dict[str, dict]:
    """Of configurations that hold others, one for the text."""
    gemma4_assistant_text = _gemma4_text(size) | {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    mrope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    return {
        "apertus1p5": {
            "vision_config": {
                "codebook_size": 64,
                "base_channels": 32,
                "latent_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
            },
            "audio_config": {"codebook_size": 64, "codebook_dim": size.hidden},
            "image_token_id": 5,
            "audio_token_id": 6,
            "image_token_offset": 64,
            "audio_token_offset": 128,
        },
        "hy_v4_vl": {"text_config": {"rope_parameters": mrope | {"mrope_section": [2, 1, 1]}}},
        "dots3_note": {
            "text_config": _dots3_text(size),
            "vision_config": {
                "adapter_in_dim": size.hidden,
                "adapter_out_dim": size.hidden,
                "pyramid_num_routed": [-1, 2],
                "num_hidden_layers": 2,
                "mlp_layer_types": DROP,
            },
            "audio_config": {"adapter_input_size": size.hidden, "adapter_out_dim": size.hidden},
        },
        "gemma4": {"text_config": _gemma4_text(size)},
        "gemma4_unified": {"text_config": _gemma4_text(size)},
        "gemma4_assistant": {"backbone_hidden_size": size.hidden, "text_config": gemma4_assistant_text},
        "gemma4_unified_assistant": {
            "backbone_hidden_size": size.hidden,
            "text_config": gemma4_assistant_text,
        },
        "qwen4_exp": {"text_config": _qwen4_text(size)},
        **{
            name: {"text_config": {"rope_parameters": mrope}}
            for name in (
                *("cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl"),
                *("paddleocr_vl", "qwen2_vl", "qwen2_5_vl"),
            )
        },
        "chameleon": {"vocabulary_map": {"<image>": 4}},
        "cohere_compass": {"text_config": _cohere_compass_text(size)},
        "ernie4_5_vl_moe": {
            "text_config": {
                "moe_intermediate_size": [MOE_FFN, MOE_FFN],
                "rope_parameters": mrope | {"mrope_section": [3, 3, 2]},
            }
        },
        "glm4v_moe": {"text_config": {"rope_parameters": mrope | {"mrope_section": [2, 1, 1]}}},
        "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
        "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
        "qwen2_5_omni_thinker": {"vision_start_token_id": 5, "text_config": {"rope_parameters": mrope}},
        "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
        "step3p7": {"text_config": {"sliding_window": WINDOW}},
        "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    }


def _gemma4_text(size: Sizes) -> dict:
    return {"global_head_dim": 2 * size.head_dim}


def _qwen4_text(size: Sizes) -> dict:
    return {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": size.head_dim,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": size.hidden,
        "ngram_vocab_size_base": 64,
        "eos_token_id": 2,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
    }


def _dots3_text(size: Sizes) -> dict:
    return {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.unrotated + size.head_dim // 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": size.unrotated,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        "sliding_window": WINDOW,
        "shared_experts_intermediate_size": MOE_FFN,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": size.unrotated + size.head_dim // 2,
        "swa_qk_nope_head_dim": size.unrotated,
        "swa_v_head_dim": size.head_dim,
    }


def _cohere_compass_text(size: Sizes) -> dict:
    return {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            },
        },
    }


#: Families whose Config class refuses its own defaults: arguments for the default configuration.
DEFAULT_KWARGS = {
    "gemma4_assistant": {
        "text_config": overrides(DEFAULT)["gemma4_assistant"]["text_config"] | {"model_type": "gemma4_text"}
    }
}

#: Families whose causal-LM class takes one part of the composite configuration.
CONFIG_PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}


def field_names(config_class: type) -> list[str]:
    """Names of a configuration's fields: of a dataclass, or before transformers 5.4 of the constructor."""
    if dataclasses.is_dataclass(config_class):
        return [f.name for f in dataclasses.fields(config_class)]
    parameters = inspect.signature(config_class.__init__).parameters.values()
    return [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]


def first(cfg, *names):
    for name in names:
        value = raw(cfg, name)
        if value is not None:
            return value
    return None


def raw(cfg, name):
    try:
        return cfg.__dict__[name] if name in cfg.__dict__ else getattr(cfg, name, None)
    except Exception:  # noqa: BLE001 - properties of configurations raise all kinds of errors
        return None
