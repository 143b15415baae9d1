"""What a script has done to a model since it was sharded: ranks that have done different things unshard it.

A script may hook, patch or edit its model on one rank only, or on each in another way, and call all with the
same inputs. Shards of different models would be added up without an error. So when ranks synchronize, each
brings what is no longer as it was when the model was sharded: hooks and functions with what they close over,
classes, constants of modules, parameters and buffers.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...huggingface.runtime import PRIVATE

#: Where a model keeps what it was like.
BEFORE = f"{PRIVATE}before"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (bool, int, float, str, complex, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
#: Numbers of the largest tensor that is compared, and how deep values in values are.
_MOST_NUMBERS, _DEEPEST = 1 << 16, 4
#: Elements that are looked at of larger ones.
_SAMPLES = 64
_CHANGED = "changed"
#: What is new on a module and runs in its calls.
_RUNS = re.compile(r"hooks of |\.forward$")


@dataclass(frozen=True)
class Compared:
    """What of a model ranks compare.

    Attributes:
        sharded: Names of parameters of which each rank has a shard.
        once: Of those that one rank has and the others have not.
        may_part: Whether ranks that differ go on by themselves. Where a difference is an error, numbers and
            containers that a function keeps, and attributes that modules did not have, are not compared: what
            a script counts or times may differ.
        has_replicas: Whether some ranks work on other rows. What a forward notes on modules differs then, so
            neither buffers nor attributes are compared.
    """

    sharded: Container[str]
    once: Container[str]
    may_part: bool
    has_replicas: bool


def remember(model: nn.Module, compared: Compared) -> None:
    """Note what ``model`` is like now."""
    vars(model)[BEFORE] = (compared, dict(_state(model, compared)))


def edits(model: nn.Module) -> dict[str, str]:
    """What is another than when it was noted, and what it is now; compared over the ranks."""
    if BEFORE not in vars(model):
        return {}
    compared, before = vars(model)[BEFORE]
    now = dict(_state(model, compared))
    found = {name: value for name, value in now.items() if before.get(name) != value}
    if not compared.may_part:
        found = {name: value for name, value in found.items() if name in before or _RUNS.search(name)}
    found |= {name: "" for name in before.keys() - now.keys()}
    return {name: value if isinstance(value, str) else _CHANGED for name, value in found.items()}


def differences(own: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names of what two ranks have changed in different ways."""
    return sorted(name for name in {*own, *theirs} if own.get(name) != theirs.get(name))


def _state(model: nn.Module, compared: Compared) -> Iterator[tuple[str, Any]]:
    """(what it is, text), or what only this rank compares where it is no text."""
    is_deep = compared.may_part
    noted = _FUNCTIONS if compared.has_replicas else (*_PLAIN, *_FUNCTIONS)
    for name, module in model.named_modules():
        path = name or type(model).__qualname__
        yield f"class of {path}", type(module).__qualname__
        for table in _HOOKS:
            hooks = getattr(module, table).values()
            if hooks:
                yield f"{table[1:]} of {path}", _text([*hooks], is_deep)
        for key, value in list(vars(module).items()):
            if not key.startswith("_") and isinstance(value, noted):
                yield f"{path}.{key}", _text(value, is_deep)
        for key, buffer in module._buffers.items():
            if buffer is not None and not compared.has_replicas:
                # Those of quantized layers are sharded where they have specs.
                yield f"{path}.{key}", _kept(buffer, "specs" in vars(module))
    for name, parameter in model.named_parameters():
        if name not in compared.once:
            yield name, _kept(parameter, name in compared.sharded)


def _kept(tensor: Tensor, is_sharded: bool) -> Any:
    """What is compared of a parameter or buffer.

    Shards differ from rank to rank: that one has changed is all that ranks have in common. Of large tensors
    some elements are looked at, and how often they were written to: ``.data`` counts no writes.
    """
    if not is_sharded and tensor.dim() <= 1:
        return _text(tensor)
    kept = (_sample(tensor), 0 if tensor.is_inference() else tensor._version)
    return (id(tensor), *kept) if is_sharded else _text(list(kept))


def _sample(tensor: Tensor) -> Any:
    """Some elements, at equal distances."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES]
    return sample.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _text(value: Any, is_deep: bool = True) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(value, _DEEPEST, is_deep):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any, depth: int, is_deep: bool) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    if type(value) in _PLAIN:
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield f"{tuple(value.shape)}{value.dtype}".encode()
        if value.numel() <= _MOST_NUMBERS and not value.is_meta and value.layout is torch.strided:
            yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, nn.Module) or depth == 0:
        return
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each, depth - 1, is_deep)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield str(key).encode()
            yield from _parts(each, depth - 1, is_deep)
    else:
        for each in _held(value, is_deep):
            yield from _parts(each, depth - 1, is_deep)


def _held(value: Any, is_deep: bool) -> Iterator[Any]:
    """What a function or another object computes with."""
    if isinstance(value, functools.partial):
        yield from (value.func, list(value.args), value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        yield from (value.__module__, value.__qualname__, code.co_code, list(map(repr, code.co_names)))
        yield [each for each in code.co_consts if type(each) in _PLAIN]
        yield from (value.__defaults__, value.__kwdefaults__)
        closed_over = map(_contents, value.__closure__ or ())
        yield [each for each in closed_over if is_deep or isinstance(each, Tensor)]
        named = (value.__globals__.get(name) for name in code.co_names)
        yield [each for each in named if isinstance(each, (*_PLAIN, Tensor))]
    elif type(value).__module__ != "builtins" and not isinstance(value, type):
        own = getattr(value, "__dict__", {}).items()
        yield {key: each for key, each in own if isinstance(each, Tensor) or (is_deep and _is_compared(each))}


def _is_compared(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, Tensor, list, tuple, dict))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is bound later
        return None
