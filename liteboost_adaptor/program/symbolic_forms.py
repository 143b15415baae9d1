"""What operators make of symbolic sizes: computed once for arguments of the same forms, as layers have them.

torch computes every size, stride and condition anew with sympy, about a millisecond for an operator. What an
operator makes of sizes is decided by the forms of its arguments alone, so those of the second layer are those
of the first, and have been noted as conditions with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .recording import is_foreign
from .symbolic_tensor import SymbolicTensor
from .tensors import writes


def _contiguous_copy(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Of a cast, without the question whether ``x`` is contiguous, where the result is in any case."""
    if kwargs.keys() != {"dtype", "memory_format"} or kwargs["memory_format"] != torch.contiguous_format:
        return torch.ops.aten._to_copy.default(x, **kwargs)
    return x.new_empty(x.shape, dtype=kwargs["dtype"])


#: Operators that torch computes no symbolic sizes for, or asks more for than it needs, and what does.
_IN_SYMBOLS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.constant_pad_nd.default: torch._refs.constant_pad_nd,
    torch.ops.aten._to_copy.default: _contiguous_copy,
    torch.ops.aten.baddbmm.default: lambda added, one, other, **_: torch.bmm(one, other),
}
#: They ask how much memory there is behind a tensor, which its form does not say.
_OF_MEMORY = (torch.ops.aten.as_strided, torch.ops.aten.set_, torch.ops.aten.resize_)
#: Of torch, which reports at length what it computes no symbolic sizes for: the status says it.
_log = logging.getLogger("torch._subclasses.fake_tensor")


class SymbolicForms:
    """Those of one recording.

    Args:
        fakes: The mode in which operators compute with symbols.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        #: By form: of tensors without symbols, and one for all results of that form.
        self._plain: dict[Any, torch.Tensor] = {}
        self._of_form: dict[Any, Any] = {}
        self._made: dict[Any, list[Any]] = {}

    def results(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """What ``func`` makes of arguments, some with symbols: tensors that have sizes and no values.

        Raises:
            Exception: torch computes no symbolic sizes for it.
        """
        key = self._key(func, args, kwargs)
        if key is None:
            return self._computed(func, args, kwargs)
        if key not in self._made:
            made = self._computed(func, args, kwargs)
            self._made[key] = [self._of_form.setdefault(form_of(one), one) for one in made]
        return self._made[key]

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """By what results are kept; None where they may depend on more."""
        # A kernel of somebody else's may ask for anything.
        if is_foreign(func) or func.overloadpacket in _OF_MEMORY:
            return None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        # Layers may keep what they have in one memory, one behind the other.
        has_offsets = makes_views(func)
        try:
            key = func, form_of(args, has_offsets), form_of(tuple(kwargs.items()), has_offsets), modes
            hash(key)
        except TypeError:  # what has no hash, and what has no strides
            return None
        return key

    def _computed(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        lies_anywhere = not makes_views(func) and func.overloadpacket not in _OF_MEMORY
        stood_for: dict[int, Any] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = value.shaped if type(value) is SymbolicTensor else self._fake(value, lies_anywhere)
            if writes(func) and stood_for.setdefault(id(found), value) is not value:
                return self._of_the_form_of(found)  # torch refuses to write to what it reads
            return found

        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        is_silent, _log.disabled = _log.disabled, True
        try:
            with self._fakes:
                made = _IN_SYMBOLS.get(func, func)(*args, **kwargs)
        finally:
            _log.disabled = is_silent
        return list(made) if isinstance(made, list | tuple) else [made]

    def _fake(self, value: torch.Tensor, lies_anywhere: bool) -> torch.Tensor:
        """What stands for a tensor without symbols."""
        is_plain = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
        if not (is_plain and lies_anywhere):
            return self._fakes.from_tensor(value, static_shapes=True)
        form = form_of(value, has_offsets=False)
        if form not in self._plain:  # of which torch would make the memory that it lies in, too: 2 ms
            self._plain[form] = self._of_the_form_of(value)
        return self._plain[form]

    def _of_the_form_of(self, value: torch.Tensor) -> torch.Tensor:
        # As it was made: what was made in inference mode may not be written to outside of it.
        with torch.inference_mode(value.is_inference()), self._fakes:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def form_of(value: Any, has_offsets: bool = True) -> Any:
    """What of an argument, or of a result, decides the sizes of what is made of it.

    Args:
        has_offsets: Whether it matters where in its memory a tensor without symbols begins.

    Raises:
        TypeError: A tensor is not strided.
    """
    if type(value) is SymbolicTensor:
        value, has_offsets = value.shaped, True
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"a tensor of layout {value.layout} has no strides")
        numbers = *value.shape, *value.stride(), value.storage_offset() if has_offsets else 0
        kind = value.dtype, value.device, value.layout, value.requires_grad, value.is_inference()
        return torch.Tensor, tuple(map(form_of, numbers)), kind
    if isinstance(value, torch.SymInt):
        return torch.SymInt, value.node._expr
    if isinstance(value, list | tuple):
        return type(value), tuple(form_of(each, has_offsets) for each in value)
    return type(value), value


@functools.cache
def makes_views(func: Any) -> bool:
    """Whether results of ``func`` may be parts of its arguments; what it writes to and returns is that."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
