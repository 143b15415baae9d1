"""Level 1 on an NPU: cos and sin of the next token are looked up, not computed, while ``generate`` decodes.

A rotary embedding module launches seven operators for the one position of a token (ten in bf16). The modules
known here compute each position by itself, so their own results for all positions, made once, are a table; a
lookup gives the same bits. It needs a bound of the positions that is known on the host: the one that
`npu_generate` notes at the position ids that ``generate`` makes. In a recorded step (`program`) the table is
a constant, and before every run it is asked whether it is still right and long enough.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..engine.fingerprint import Opaque, fingerprint
from ..kv_cache import buffers
from ..program.state import RECORDABLE
from ..report import report
from .npu_generate import BELOW

#: Digests of the forward methods, without their decorators, that compute each position by itself.
BODIES = frozenset(
    {
        "4d69b69e0a079d2b",  # Llama and most others
        "818c61ab0191579f",  # a table a layer type (Gemma 3)
        "219a95057f054944",  # in fp32 whatever the model's dtype (OLMo, Ernie 4.5)
        "be9d0830b503e2c2",  # both (OLMo 3)
        "a8a4f2ddc58a0532",  # pairs beside each other (Cohere, BLT)
        "1e1317681ac19ad2",  # half as wide (GPT-OSS)
    }
)
#: Tables grow by doubling from this many positions.
SHORTEST = 256


@dataclass(frozen=True)
class _Table:
    cos: torch.Tensor
    sin: torch.Tensor
    made_from: tuple[Any, ...]
    held: tuple[Any, ...]  # buffers and their memory, so that nothing else takes their identity or address

    def is_right(self, module: torch.nn.Module, position_ids: torch.Tensor) -> bool:
        """Whether ``module`` would give these rows, and has them for all positions."""
        return 0 < getattr(position_ids, BELOW, 0) <= self.cos.shape[0] and self.made_from == _state(module)


_tables: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, _Table]] = weakref.WeakKeyDictionary()
#: The same object every time a model generates, so that a recorded step sees it unchanged, behind what it
#: stands for.
_forwards: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def sampling(original: Any) -> Any:
    """``_sample`` whose model's rotary embeddings look up positions with a known bound."""

    @functools.wraps(original)
    def _sample(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "npu":
            return original(self, *args, **kwargs)
        with looked_up(self):
            return original(self, *args, **kwargs)

    return _sample


@contextmanager
def looked_up(model: torch.nn.Module) -> Iterator[None]:
    """Serve the known rotary embeddings of ``model`` from tables inside the block."""
    served = [module for module in model.modules() if _is_known(module)]
    for module in served:
        if _forwards.get(module, (None,))[0] is not type(module).forward:
            _forwards[module] = type(module).forward, _looking_up(weakref.ref(module), type(module).forward)
        module.forward = _forwards[module][1]
    try:
        yield
    finally:
        for module in served:
            vars(module).pop("forward", None)


def _is_known(module: torch.nn.Module) -> bool:
    if "forward" in vars(module) or not hasattr(module, "rope_type"):
        return False
    kinds = module.rope_type.values() if isinstance(module.rope_type, dict) else (module.rope_type,)
    # These exchange their frequencies by the longest position of a call.
    if any("dynamic" in str(kind) or kind == "longrope" for kind in kinds):
        return False
    return _has_known_body(type(module).forward)


@functools.lru_cache(maxsize=256)
def _has_known_body(forward: Callable[..., Any]) -> bool:
    try:
        return fingerprint(inspect.unwrap(forward)).digest in BODIES
    except Opaque:
        return False


def _looking_up(of_module: Callable[[], torch.nn.Module], of_class: Callable[..., Any]) -> Callable[..., Any]:
    counter = report.counter("npu.generate_rotary")

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *layer_type: Any, **named: Any) -> Any:
        module = of_module()
        original = functools.partial(of_class, module)
        below = getattr(position_ids, BELOW, 0)
        if not below or torch.compiler.is_compiling() or x.device != position_ids.device:
            return original(x, position_ids, *layer_type, **named)
        if any(buffer is not None and buffer.is_inference() for buffer in module._buffers.values()):
            counter.count_fallback(
                "buffers made in inference mode, which do not tell when they are written to"
            )
            return original(x, position_ids, *layer_type, **named)
        recorder = buffers.recorder()
        # A recorded step has the table, not how it is made.
        with nullcontext() if recorder is None else _disable_current_modes():
            table = _table(module, original, x, below, layer_type, named)
        if recorder is not None and not recorder.require(
            position_ids, functools.partial(table.is_right, module)
        ):
            return original(x, position_ids, *layer_type, **named)
        if recorder is not None:
            recorder.hold(table.cos, table.sin)
        counter.count_served()
        look_up = torch.nn.functional.embedding
        return look_up(position_ids, table.cos), look_up(position_ids, table.sin)

    # Nothing of it may hold the module: it is kept beside it.
    functools.update_wrapper(forward, of_class)
    del forward.__wrapped__
    setattr(forward, RECORDABLE, True)
    return forward


def _table(
    module: torch.nn.Module,
    original: Callable[..., Any],
    x: torch.Tensor,
    below: int,
    layer_type: tuple[Any, ...],
    named: dict[str, Any],
) -> _Table:
    """The module's own results for positions 0 to at least ``below``, as its buffers are now."""
    tables = _tables.setdefault(module, {})
    key = (x.dtype, x.device, layer_type, *named.items())
    made_from = _state(module)
    found = tables.get(key)
    if found is None or found.cos.shape[0] < below or found.made_from != made_from:
        length = max(SHORTEST, 1 << (below - 1).bit_length())
        every = torch.arange(length, device=x.device)[None]
        cos, sin = original(x, every, *layer_type, **named)
        # Other streams will read it, none of which waits for this one.
        torch.get_device_module(x.device).current_stream(x.device).synchronize()
        found = tables[key] = _Table(
            cos[0].contiguous(), sin[0].contiguous(), made_from, tuple(_held(module))
        )
    return found


def _state(module: torch.nn.Module) -> tuple[Any, ...]:
    """What a table depends on: buffers, their memory, how often they were written to, and the scalings."""
    buffers = tuple(
        (name, id(buffer), buffer._version, buffer.data_ptr())
        for name, buffer in module._buffers.items()
        if buffer is not None
    )
    return buffers + tuple(
        (name, value) for name, value in vars(module).items() if name.endswith("attention_scaling")
    )


def _held(module: torch.nn.Module) -> Iterator[Any]:
    for buffer in module._buffers.values():
        if buffer is not None:
            yield buffer
            yield buffer.untyped_storage()  # its own: ``buffer.data = other`` lets go of it
