"""What belongs to the process and user code may change: noted before a program, put back behind it."""

from __future__ import annotations

import decimal
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from transformers import activations, cache_utils, masking_utils, modeling_rope_utils, modeling_utils
from transformers.integrations import sdpa_attention
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

_FAMILIES = (modeling_llama, modeling_mistral, modeling_qwen3, modeling_gpt2)
_MODULES = (
    F,
    torch,
    cache_utils,
    masking_utils,
    modeling_rope_utils,
    sdpa_attention,
    activations,
    *_FAMILIES,
)
_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.nn.Linear, torch.nn.Embedding)
_MISSING = object()


def _namespaces() -> Iterator[Any]:
    yield from _MODULES
    yield from _CLASSES
    for module in (cache_utils, *_FAMILIES):
        names = (value for value in vars(module).values() if isinstance(value, type))
        yield from (value for value in names if value.__module__ == module.__name__)


def _tables() -> list[Any]:
    """Dicts that functions are registered in."""
    return [
        modeling_utils.AttentionInterface._global_mapping,
        modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping,
        masking_utils.AttentionMaskInterface._global_mapping,
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping,
        modeling_rope_utils.ROPE_INIT_FUNCTIONS,
        *(
            getattr(nn_module, name)
            for name in vars(nn_module)
            if name.endswith("_hooks") and "_global" in name
        ),
    ]


@contextmanager
def as_found() -> Iterator[None]:
    """Whatever the block sets for the process is put back."""
    spaces = [(space, dict(vars(space))) for space in dict.fromkeys(_namespaces())]
    tables = [(table, dict(table)) for table in _tables()]
    environment, filters = dict(os.environ), list(warnings.filters)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    profile, recursion = sys.getprofile(), sys.getrecursionlimit()
    fills, mkldnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.mkldnn.enabled
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    arithmetic = decimal.getcontext().copy()
    try:
        yield
    finally:
        if sys.getprofile() is not profile:
            sys.setprofile(profile if callable(profile) else None)
        sys.setrecursionlimit(recursion)
        for space, names in spaces:
            _put_back(space, names)
        for table, entries in tables:
            if dict(table) != entries:
                table.clear()
                table.update(entries)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        warnings.filters[:] = filters
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.backends.mkldnn.enabled = mkldnn
        decimal.setcontext(arithmetic)
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        torch.set_rng_state(seeds[2])


def _put_back(space: Any, names: dict[str, Any]) -> None:
    now = dict(vars(space))
    for name, value in names.items():
        if now.get(name, _MISSING) is not value:
            setattr(space, name, value)
    if isinstance(space, type):  # a module may load more of itself in between
        for name in now.keys() - names.keys():
            if not (name.startswith("__") or name.startswith("_abc_")):
                delattr(space, name)
