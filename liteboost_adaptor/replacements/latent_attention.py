"""Multi-head latent attention (MLA): a decode step over the compressed cache, which is not expanded.

The cache holds one latent row and one rotated row for each token; ``kv_b_proj`` makes the keys and values
of every head of them, anew in each step and for the whole cache. For one query it is cheaper to multiply
the query by the key half of that weight (to absorb it), to attend to the latent rows as to one key head, and
to multiply what comes out by the value half. Several queries attend to expanded keys, as in the original, but
where a few are to have the bits of one (`absorb`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..eligibility import AnyModule, unserved
from ..report import CallCounter, report
from .linear import layer_unserved, weight_and_bias

ops = torch.ops.liteboost
#: Of the operator on an NPU: kv_lora_rank and what is rotated, and numbers of query heads.
_NPU_SIZES, _NPU_HEADS = (512, 64), (1, 2, 4, 8, 16, 32, 64, 128)
#: New tokens that attend to compressed keys at most, as one does: more than one where bits must not depend on
#: how many tokens a step has, and whether a prompt is such a step. See `absorb`.
_absorbed, _absorbs_prompts = 1, False
#: The same number for steps of one thread, as its attribute ``tokens``. See `absorb_here`.
_here = threading.local()
Expand = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Latents:
    """The compressed keys and values of one attention call.

    Attributes:
        latent: ``[batch, 1, kv_len, kv_lora_rank]``.
        rotated: ``[batch, 1, kv_len, rope_dim]``, the part of a key that all heads share.
    """

    def __init__(self, module: AnyModule, latent: torch.Tensor, rotated: torch.Tensor) -> None:
        self.module, self.latent, self.rotated = module, latent, rotated
        self._expanded: tuple[torch.Tensor, torch.Tensor] | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of every head, expanded when somebody reads them."""
        module, (batch, _, length, _) = self.module, self.latent.shape
        key_size = module.qk_nope_head_dim + module.qk_rope_head_dim
        outputs = weight_and_bias(module.kv_b_proj)[0].shape[0]
        heads = outputs // (module.qk_nope_head_dim + module.v_head_dim)
        shapes = ((batch, heads, length, size) for size in (key_size, module.v_head_dim))
        key, value = (LatentKVTensor(self, which, shape) for which, shape in enumerate(shapes))
        return key, value

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[batch, num_heads, kv_len, head_dim]`` and values of every head, made at most once."""
        if self._expanded is None:
            module = self.module
            batch, _, length, _ = self.latent.shape
            both = ops.linear(self.latent, *weight_and_bias(module.kv_b_proj))
            both = both.view(batch, length, -1, module.qk_nope_head_dim + module.v_head_dim).transpose(1, 2)
            unrotated, value = torch.split(both, [module.qk_nope_head_dim, module.v_head_dim], dim=-1)
            key = both.new_empty(*both.shape[:-1], module.qk_nope_head_dim + module.qk_rope_head_dim)
            key[..., : module.qk_nope_head_dim].copy_(unrotated)
            key[..., module.qk_nope_head_dim :].copy_(self.rotated)
            self._expanded = key, value
        return self._expanded

    def can_attend(self, query: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether `attend` takes these: one token, or a few, of keys that nobody has expanded."""
        if query.ndim != 4 or self._expanded is not None:
            return False
        tokens = query.shape[2]
        is_step = mask is not None or (_absorbs_prompts and tokens <= self.latent.shape[2])
        most = max(_absorbed, getattr(_here, "tokens", 1))
        if tokens != 1 and (tokens > most or not is_step or not query.is_cpu):
            return False
        if weight_and_bias(self.module.kv_b_proj)[1] is not None:
            return False
        return query.is_cpu or (mask is None and self._is_served_on_npu(query))

    def _is_served_on_npu(self, query: torch.Tensor) -> bool:
        """Whether an operator takes these sizes."""
        if query.device.type != "npu" or not hasattr(ops, "_npu_latent_attention"):
            return False
        sizes = self.latent.shape[-1], self.rotated.shape[-1]
        if sizes != _NPU_SIZES or query.shape[1] not in _NPU_HEADS or query.dtype == torch.float32:
            return False
        return not _is_310p()

    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scaling: float, is_causal: bool
    ) -> torch.Tensor:
        """What ``[batch, num_heads, tokens, head_dim]`` find: as `torch.ops.liteboost.attention`."""
        module, heads = self.module, query.shape[1]
        latent, shared = self.latent, self.rotated
        if is_causal:  # of a static cache, what lies behind a prompt has not been written yet
            latent, shared = latent[:, :, : query.shape[2]], shared[:, :, : query.shape[2]]
        unrotated, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        weight = weight_and_bias(module.kv_b_proj)[0].view(heads, -1, latent.shape[-1])
        of_keys, of_values = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        absorbed = ops.head_linear(unrotated, of_keys.mT)
        if query.is_cpu:
            queries, keys = torch.cat([absorbed, rotated], -1), torch.cat([latent, shared], -1)
            mixed = ops.attention(queries, keys, latent, mask, scaling, is_causal)
        else:
            mixed = ops._npu_latent_attention(absorbed, rotated, latent, shared, scaling)
        return ops.head_linear(mixed.transpose(1, 2), of_values).transpose(1, 2)


class LatentKVTensor(torch.Tensor):
    """Keys or values of every head, compressed. Our attention reads them so; any operator, expanded."""

    latents: Latents
    which: int

    @staticmethod
    def __new__(cls, latents: Latents, which: int, shape: tuple[int, ...]) -> LatentKVTensor:
        latent = latents.latent
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=latent.dtype, device=latent.device)
        made.latents, made.which = latents, which
        return made

    #: Functions of Python are not looked at: what reaches the dispatcher is.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # a C function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has the C function of Tensor itself
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*pytree.tree_map(expanded_kv, args), **pytree.tree_map(expanded_kv, kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override] # torch's has no types
        return f"LatentKVTensor({expanded_kv(self)!r})"


def absorb_here(tokens: int) -> None:
    """Have at least ``tokens`` new tokens of a step do so in this thread."""
    _here.tokens = tokens


def absorb(tokens: int, prompts: bool) -> None:
    """Have up to ``tokens`` new tokens of a step, or of a prompt, attend to compressed keys, on a CPU."""
    # Of the process, as the kernels' number of rows is.
    global _absorbed, _absorbs_prompts
    _absorbed, _absorbs_prompts = tokens, prompts


def expanded_kv(tensor: Any) -> Any:
    """``tensor``, or the keys or values of every head where it stands for them."""
    return tensor.latents.expanded()[tensor.which] if type(tensor) is LatentKVTensor else tensor


def expand_kv(original: Expand, counter: CallCounter) -> Callable[..., Any]:
    """``expand_kv`` of MLA modules. Where our sdpa attention is the reader, it may read them compressed."""
    of_layers = report.counter("linear.call")

    def forward(self: AnyModule, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        reason = unserved(latent, rotated) or layer_unserved(self.kv_b_proj, latent)
        if reason:
            counter.count_fallback(reason)
            return original(self, latent, rotated)
        counter.count_served()
        of_layers.count_served()
        latents = Latents(self, latent, rotated)
        return latents.tensors() if _is_read_by_ours(self) else latents.expanded()

    return forward


@functools.cache  # a step that is recorded may not ask
def _is_310p() -> bool:
    return ops._npu_soc().startswith("Ascend310P")


def _is_read_by_ours(module: AnyModule) -> bool:
    if torch.compiler.is_compiling() or module.config._attn_implementation != "sdpa":
        return False
    entry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS["sdpa"]
    return hasattr(entry, "__liteboost_original__")
