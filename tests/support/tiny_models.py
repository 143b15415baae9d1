"""Tiny random-weight models for every causal-LM family that transformers ships.

    families()                  -> list of model_type strings (the keys of MODEL_FOR_CAUSAL_LM_MAPPING)
    tiny_config(model_type)     -> a configuration object small enough for CPU tests
    build(model_type, seed)     -> model in eval mode, float32, deterministic random weights
    example_inputs(model)       -> keyword arguments for forward() and generate()

The tiny configuration is derived from the family's own Config class: every field of the (nested)
configuration dataclass is looked up by *name* in one table of rules (`tiny_sizes`); lists with one entry
per layer are cut down to a few layers that still show every kind of layer the family has.

The weights are random but not the library's default initialisation: one-dimensional parameters
(norm weights, biases) get noise, because a norm weight of exactly one and a bias of exactly zero hide
many mistakes (for instance `1 + w` against `w`), and matrices are drawn with a spread that keeps the
logits well separated, so that greedy decoding does not depend on rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import re

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.configuration_utils import PretrainedConfig as PreTrainedConfig  # 4.57's spelling, kept
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from .tiny_sizes import (
    CONFIG_PART,
    DEFAULT,
    DEFAULT_KWARGS,
    DROP,
    MAX_LAYERS,
    Sizes,
    field_names,
    first,
    overrides,
    raw,
    rules,
)


# ---------------------------------------------------------------------------------------------------
# configuration
# ---------------------------------------------------------------------------------------------------
def families() -> list[str]:
    """Model types with an entry in the library's causal-LM mapping."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_families() -> list[str]:
    """Model types with an entry in the library's image-text mapping and none in the causal one."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in families()]


def _own_fields(cfg) -> list[str]:
    common = set(field_names(PreTrainedConfig))
    return [name for name in field_names(type(cfg)) if name not in common or name == "is_decoder"]


_DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _layer_sample(cfg) -> tuple[list[int] | None, list[str]]:
    """Layer indices that show every combination of per-layer settings, and the names of those settings."""
    depth = first(cfg, *_DEPTH_NAMES)
    if not isinstance(depth, int) or depth < 2:
        return None, []
    names = []
    for name in _own_fields(cfg):
        value = raw(cfg, name)
        if isinstance(value, (list, tuple)) and len(value) == depth:
            names.append(name)
    if not names:
        return None, []
    keys = list(zip(*[[repr(v) for v in raw(cfg, n)] for n in names], strict=True))
    picked, seen = [], set()
    for i, key in enumerate(keys):
        if key not in seen and len(picked) < MAX_LAYERS:
            seen.add(key)
            picked.append(i)
    for i in range(depth):  # at least two layers
        if len(picked) < 2 and i not in picked:
            picked.append(i)
    return sorted(picked), names


def _tiny_kwargs(cfg, sizes: Sizes) -> dict:
    picked, per_layer = _layer_sample(cfg)
    # Configurations that are no dataclasses lack a pad token, or name one beyond a tiny vocabulary.
    kwargs = {} if dataclasses.is_dataclass(cfg) else {"pad_token_id": 0}
    for name in _own_fields(cfg):
        default = raw(cfg, name)
        if isinstance(default, PreTrainedConfig):
            kwargs[name] = _tiny_kwargs(default, sizes) | {"model_type": default.model_type}
            continue
        if name in per_layer:
            kwargs[name] = type(default)(_per_layer_value(name, default[i], cfg, sizes) for i in picked)
            continue
        if isinstance(default, (bool, str)):
            continue
        for pattern, rule in rules(sizes):
            if not pattern.fullmatch(name):
                continue
            value = rule(default, cfg) if callable(rule) else rule
            if name in _DEPTH_NAMES and picked:
                value = len(picked)
            if value is not DROP:
                kwargs[name] = value
            break
    return kwargs


def _per_layer_value(name, value, cfg, sizes: Sizes):
    for pattern, tiny in rules(sizes):
        if (
            pattern.fullmatch(re.sub(r"_per_layer$", "", name))
            and isinstance(value, int)
            and not isinstance(value, bool)
        ):
            return tiny(value, cfg) if callable(tiny) else tiny
    return value


def _merge(base: dict, extra: dict) -> dict:
    out = dict(base)
    for key, value in extra.items():
        if value is DROP:
            out.pop(key, None)
        elif isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _merge(out[key], value)
        else:
            out[key] = value
    return out


def tiny_config(model_type: str, sizes: Sizes = DEFAULT) -> PreTrainedConfig:
    """A configuration of `model_type` that builds a model of well under five million parameters."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**copy.deepcopy(DEFAULT_KWARGS.get(model_type, {})))
    kwargs = _merge(_tiny_kwargs(default, sizes), overrides(sizes).get(model_type, {}))
    if "is_decoder" in field_names(config_class):
        kwargs["is_decoder"] = True
    config = config_class(**copy.deepcopy(kwargs))
    return getattr(config, CONFIG_PART[model_type]) if model_type in CONFIG_PART else config


def model_class(model_type: str) -> type:
    """The causal-LM class the library maps `model_type` to."""
    import transformers

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _from_config(model_type: str, sizes: Sizes = DEFAULT, **kwargs):
    config = tiny_config(model_type, sizes)
    if model_type in CONFIG_PART:
        return model_class(model_type)._from_config(config, **kwargs)
    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    return auto.from_config(config, **kwargs)


# ---------------------------------------------------------------------------------------------------
# models
# ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def _perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    persistent = model.state_dict()
    done = set()
    tensors = list(model.named_parameters()) + [
        (n, b) for n, b in model.named_buffers() if n in persistent and n.endswith("bias")
    ]
    for _, tensor in tensors:
        if tensor.data_ptr() in done or not tensor.is_floating_point():
            continue
        done.add(tensor.data_ptr())
        if tensor.ndim == 1:  # norm weights, biases, per-head scalars
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * 0.1)
        elif tensor.ndim == 2 and min(tensor.shape) > 1:
            spread = tensor.std().item()
            if 0.0 < spread < 0.05:  # families with their own, narrower initialisation
                tensor.mul_(0.1 / spread)


def build(model_type: str, seed: int = 0, sizes: Sizes = DEFAULT, **from_config_kwargs) -> torch.nn.Module:
    """A tiny float32 model of `model_type` in eval mode; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _from_config(model_type, sizes, dtype=torch.float32, **from_config_kwargs)
    _perturb(model, seed)
    if sizes is not DEFAULT:
        _narrow(model)
    return model.eval()


@torch.no_grad()
def _narrow(model: torch.nn.Module) -> None:
    """Let the spread of wide matrices fall with their width, or attention saturates and amplifies noise."""
    done = set()
    for parameter in model.parameters():
        width = parameter.shape[-1] if parameter.ndim > 1 else 0
        if width > Sizes.hidden and parameter.data_ptr() not in done:
            done.add(parameter.data_ptr())
            parameter.mul_((Sizes.hidden / width) ** 0.5)


def example_inputs(model, batch: int = 2, length: int = 12, padding: int = 0, seed: int = 0) -> dict:
    """Random token ids (and whatever else the family cannot run without).

    `padding` masks that many positions at the left of the first row.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(32, vocab, (batch, length), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :padding] = 0
    extra = EXTRA_INPUTS.get(model.config.model_type)
    return extra(model, inputs, generator) if extra else inputs


def _codebook_inputs(model, inputs, generator):
    rows = inputs["input_ids"].shape[0] * model.num_codebooks
    ids = torch.randint(
        32, model.config.vocab_size, (rows, inputs["input_ids"].shape[1]), generator=generator
    )
    return {"input_ids": ids}


def _without_cache(model, inputs, generator):
    return inputs | {"use_cache": False}


def _shared_cache_inputs(model, inputs, generator):
    """Draft heads read hidden states and the last key/value states of the model they draft for."""
    text = model.config.get_text_config()
    batch, length = inputs["input_ids"].shape
    states = {}
    for layer_type in dict.fromkeys(text.layer_types):
        layer = text.per_layer_config[text.layer_types.index(layer_type)]
        shape = (batch, layer.num_key_value_heads, length, layer.head_dim)
        states[layer_type] = (
            torch.randn(shape, generator=generator),
            torch.randn(shape, generator=generator),
        )
    embeds = torch.randn(batch, 1, 2 * model.config.backbone_hidden_size, generator=generator)
    return {
        "inputs_embeds": embeds,
        "shared_kv_states": states,
        "position_ids": torch.full((batch, 1), length - 1),
    }


EXTRA_INPUTS: dict = {
    "blt": _without_cache,
    "musicgen_decoder": _codebook_inputs,
    "musicgen_melody_decoder": _codebook_inputs,
    # Of releases that can build them: `version_smoke`.
    "gemma4_assistant": _shared_cache_inputs,
    "gemma4_unified_assistant": _shared_cache_inputs,
}


@torch.no_grad()
def generate(model, inputs: dict, new_tokens: int = 8):
    """Greedy decoding of exactly `new_tokens` tokens, whatever the family's generation defaults are."""
    settings = greedy_settings(model, new_tokens)
    model.generation_config = settings
    out = model.generate(**inputs, generation_config=settings)
    return out.sequences.flatten(0, -2)[:, -new_tokens:]


def greedy_settings(model, new_tokens: int) -> GenerationConfig:
    """Greedy decoding of so many tokens, without what families do by default beside it."""
    base = model.generation_config
    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=base.pad_token_id if base.pad_token_id is not None else 0,
        bos_token_id=base.bos_token_id,
        decoder_start_token_id=base.decoder_start_token_id if base.decoder_start_token_id is not None else 1,
    )


#: Fields of a text configuration that make the head size independent of the hidden size.
HEAD_SIZES = {"head_dim", "qk_nope_head_dim", "attention_head_size", "dim_head", "kv_channels"}
#: Families with such a field whose output projection takes the hidden size all the same.
_HIDDEN_IS_HEADS = {"helium"}


def sizes(model_type: str, head_dim: int, heads: int, kv_heads: int) -> Sizes:
    """Sizes with this attention; hidden states as narrow as the family's configuration allows."""
    text = tiny_config(model_type).get_text_config(decoder=True)
    is_free = HEAD_SIZES.intersection(field_names(type(text)))
    hidden = Sizes.hidden if is_free and model_type not in _HIDDEN_IS_HEADS else heads * head_dim
    if model_type in ("zamba", "zamba2"):  # attention runs on two hidden states side by side
        hidden = heads * head_dim // 2
    return Sizes(head_dim=head_dim, heads=heads, kv_heads=kv_heads, hidden=hidden, exact=True)
