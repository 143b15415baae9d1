"""The models programs are written around: heirs of transformers' own, and one that is wholly the user's."""

from __future__ import annotations

from .idiom import EMBEDDED, LAYER, LOGITS

#: Heirs of a family with full attention, one with windows, one without rotary embedding, and remote code.
BASES = ("llama", "qwen3", "mistral", "gpt2", "own")

_PRELUDE = """\
import abc, array, builtins, collections, contextlib, contextvars, copy, ctypes, dataclasses, enum, functools
import gc, heapq, importlib, io, itertools, json, logging, math, operator, os, pickle, queue, random, re
import string, struct, sys, threading, time, types, typing, warnings, weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
import transformers
from transformers import cache_utils, masking_utils, modeling_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel
"""

_SIZES = (
    "vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, "
    "max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False, "
    "num_hidden_layers={layers}"
)
_FAMILIES = {
    "llama": ("Llama", _SIZES + ", head_dim=8", "self.model.layers[0]"),
    "qwen3": ("Qwen3", _SIZES + ", head_dim=8", "self.model.layers[0]"),
    "mistral": ("Mistral", _SIZES + ", head_dim=8, sliding_window=24", "self.model.layers[0]"),
    "gpt2": (
        "GPT2",
        "vocab_size=64, n_embd=32, n_inner=48, n_head=4, n_positions=256, initializer_range=0.2, "
        "bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, n_layer={layers}",
        "self.transformer.h[0]",
    ),
}

_FAMILY = """
from transformers import {family}Config, {family}{head} as Base
from transformers.models.{module} import modeling_{module} as modeling


def configuration():
    return {family}Config({sizes})
"""

_OWN = """
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.llama import modeling_llama as modeling


def configuration():
    return LlamaConfig({sizes})


class OwnNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling, self.is_causal = 8, 8**-0.5, True
        self.num_key_value_groups, self.attention_dropout = 2, 0.0
        self.q_proj = nn.Linear(32, 32, bias=False)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16, bias=False)
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states, mask, past_key_values):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        k, v = past_key_values.update(k, v, self.layer_idx)
        named = self.config._attn_implementation
        attend = eager_attention_forward if named == "eager" else ALL_ATTENTION_FUNCTIONS[named]
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous())


class OwnLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn, self.mlp = OwnAttention(config, layer_idx), OwnMLP(config)
        self.input_layernorm, self.post_attention_layernorm = OwnNorm(32), OwnNorm(32)

    def forward(self, x, mask, past_key_values):
        x = x + self.self_attn(self.input_layernorm(x), mask, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class Base(PreTrainedModel, GenerationMixin):
    config_class = LlamaConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([OwnLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = OwnNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.2)

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=None, output_hidden_states=None, **kwargs):
        if past_key_values is None:
            past_key_values = DynamicCache()
        seen = past_key_values.get_seq_length()
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask,
                                  past_key_values=past_key_values, position_ids=position_ids)
        x = x + self.positions(position_ids)
        states = (x,)
        for layer in self.layers:
            x = layer(x, mask, past_key_values)
            states += (x,)
        logits = self.lm_head(self.norm(x))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values,
                                      hidden_states=states if output_hidden_states else None)
"""

_MODEL = """
class Site(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
{init_layer}
    def forward(self, x):
{layer}        return self.inner(x)


class Model(Base):
    def __init__(self, config):
        super().__init__(config)
{host}{init_outer}        self.eval()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, use_cache=None, return_dict=None, **kwargs):
        ids, cache = input_ids, past_key_values
{embedded}        own = {{name: kwargs[name] for name in {passed} if name in kwargs}}
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                              past_key_values=past_key_values, inputs_embeds=inputs_embeds,
                              use_cache=use_cache, **own)
        x = out.logits
{logits}        out.logits = x
        return out.to_tuple() if return_dict is False else out


"""
_EMBED = """\
x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
"""
_PASSED = ("output_hidden_states", "token_type_ids")


def module_text(base: str, layers: int, parts: dict[str, str]) -> str:
    """The module with ``parts`` woven in: text by site, ``init SITE`` and ``module``."""
    if base == "own":
        text, host = _OWN.format(sizes=_SIZES.format(layers=layers)), "self.layers[0]"
    else:
        family, sizes, host = _FAMILIES[base]
        head = "LMHeadModel" if base == "gpt2" else "ForCausalLM"
        text = _FAMILY.format(head=head, family=family, module=base, sizes=sizes.format(layers=layers))
    has_layer = parts[LAYER] or parts[f"init {LAYER}"]
    embedded = parts[EMBEDDED] and _EMBED + parts[EMBEDDED] + "input_ids, inputs_embeds = None, x\n"
    passed = _PASSED if base == "gpt2" else _PASSED[:1]
    model = _MODEL.format(
        init_layer=_at(parts[f"init {LAYER}"], 2),
        layer=_at(parts[LAYER], 2),
        host=_at(f"{host}.mlp = Site({host}.mlp)\n" if has_layer else "", 2),
        init_outer=_at(parts[f"init {EMBEDDED}"] + parts[f"init {LOGITS}"], 2),
        embedded=_at(embedded, 2),
        logits=_at(parts[LOGITS], 2),
        passed=passed,
    )
    return _PRELUDE + text + "\n\n" + parts["module"] + model


def _at(text: str, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" if line else "\n" for line in text.splitlines())
