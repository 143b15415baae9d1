"""Discrete choices inside models (experts, keys of sparse attention), and which of them rounding may turn.

A choice is an index that is read, or a comparison, of computed numbers. A rounding may turn one that was
close, and then another function is computed, there and, by attention, at every later position.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_COMPARISONS = (_aten.gt, _aten.ge, _aten.lt, _aten.le)
#: Choices of other kinds; no family makes one.
_NOT_NOTED = (_aten.kthvalue, _aten.median, _aten.mode, _aten.multinomial)

#: Our numbers may be so many times as far from exact ones as the original's.
SLACK = 1.5


@dataclasses.dataclass
class Choice:
    """One call that chooses: ``scores`` of ``[..., candidates]``, of which the ``count`` largest are taken.

    A ``count`` of 0 stands for their whole order.

    Attributes:
        forward: In which call of the model, counted from 0.
        positions: How many positions that call computes.
        is_read: Whether its result was used as an index or condition; a largest *value* is continuous.
    """

    forward: int
    positions: int
    scores: torch.Tensor
    count: int
    is_read: bool = False

    @property
    def gaps(self) -> torch.Tensor:
        """Distances between the last candidate taken and the first one not; infinite where one is masked."""
        ranked = _unmasked(self.scores).sort(dim=-1, descending=True).values
        gaps = (ranked[..., :-1] - ranked[..., 1:]).nan_to_num(torch.inf, torch.inf)
        return gaps[..., self.count - 1] if self.count else gaps.amin(-1)

    def errors(self, rounded: Choice) -> torch.Tensor:
        """Largest differences of the scores from those of the same choice in another dtype."""
        differences = (rounded.scores - self.scores).abs()
        return torch.where(_unmasked(self.scores).isfinite(), differences, 0.0).amax(-1)


def _unmasked(scores: torch.Tensor) -> torch.Tensor:
    """Minus infinity for every number that says *not to be taken*."""
    return scores.masked_fill(scores <= torch.finfo(torch.float32).min / 2, -torch.inf)


class Choices(TorchDispatchMode):
    """Notes the choices that a model makes in its forward, in the order they are made.

    What chooses: ``topk``, ``sort``, ``max``, ``min``, ``argmax`` and ``argmin`` whose index is read, and
    comparisons of floats that are read by anything but ``where`` (which puts functions together that meet).
    Not what ``generate`` chooses between the calls: tokens are compared by themselves, or forced.
    """

    sees_liteboost_ops = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._forwards = 0
        self._is_inside = False
        self._noted: list[Choice] = []
        #: The results of choices, which are kept alive so that they are known again.
        self._results: dict[int, tuple[torch.Tensor, Choice]] = {}

    @property
    def made(self) -> list[Choice]:
        return [choice for choice in self._noted if choice.is_read]

    def __enter__(self) -> Choices:
        self._hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end),
        ]
        return super().__enter__()

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"]
        self._positions = tokens.shape[-1]
        self._is_inside = True

    def _end(self, *_: Any) -> None:
        self._is_inside = False
        self._forwards += 1
        self._results.clear()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_inside:
            return func(*args, **kwargs)
        op = func.overloadpacket
        if op is not _aten.where:
            for argument in tree_leaves((args, kwargs)):
                if id(argument) in self._results:
                    self._results[id(argument)][1].is_read = True
        out = func(*args, **kwargs)
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].is_floating_point():
            self._note(op, args, kwargs, out)
        return out

    def _note(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if op in _NOT_NOTED:
            raise NotImplementedError(f"a choice by {op}: note it in {__name__}")
        found = _choice(op, args, kwargs)
        if found is None:
            return
        scores, count = found
        if scores.shape[-1] > max(count, 1) and scores.numel():
            choice = Choice(self._forwards, self._positions, scores.float(), count)
            result = out if isinstance(out, torch.Tensor) else out[1]
            self._noted.append(choice)
            self._results[id(result)] = result, choice


def _choice(op: Any, args: tuple, kwargs: dict) -> tuple[torch.Tensor, int] | None:
    """Scores whose last dimension are the candidates, and how many are taken; None where nothing is."""
    scores = args[0]
    if op in _COMPARISONS:
        both = scores.float(), torch.as_tensor(args[1], dtype=torch.float32)
        return torch.stack(torch.broadcast_tensors(*both), dim=-1), 1
    if op is _aten.topk:
        count, dim = args[1], args[2] if len(args) > 2 else kwargs.get("dim", -1)
        is_largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
    elif op is _aten.sort:
        count, dim, is_largest = 0, args[1] if len(args) > 1 else kwargs.get("dim", -1), True
    elif op in (_aten.max, _aten.min, _aten.argmax, _aten.argmin):
        if op in (_aten.max, _aten.min) and (len(args) < 2 or isinstance(args[1], torch.Tensor)):
            return None  # by value, or of two tensors
        count, dim = 1, args[1] if len(args) > 1 else kwargs.get("dim")
        is_largest = op in (_aten.max, _aten.argmax)
        if dim is None:
            scores, dim = scores.flatten(), -1
    else:
        return None
    return (scores if is_largest else -scores).movedim(dim, -1), count


def safe(exact: list[Choice], rounded: list[Choice], rows: int, length: int, calls: int = 1) -> torch.Tensor:
    """Which positions hang on no choice, there or before, that rounding may turn.

    What rounding does to the scores of a choice is measured on the unpatched model, as the largest
    difference between the scores that it has in fp32 (``exact``) and in 16 bits (``rounded``): at this very
    choice or, where that is more, at half of the positions that are safe so far. Each of two scores may move
    so far, and ours `SLACK` times that; what is further apart is not turned by rounding. Scores that both
    runs have exactly are constants. Nothing here depends on our run.

    Args:
        rows: Rows of the batch.
        length: Positions of the first call of the model.
        calls: How often the model is called; every later call adds a position.

    Returns:
        ``[rows, length + calls - 1]``.
    """
    is_safe = torch.ones(rows, length + calls - 1, dtype=torch.bool)
    for choice, other in zip(exact, rounded, strict=True):
        errors = choice.errors(other)
        at_positions = -_located(choice, -errors, is_safe.shape, length)[is_safe]
        measured = at_positions[at_positions > 0]
        if len(measured):
            reach = 2 * SLACK * errors.clamp_min(measured.median())
            is_clear = (choice.gaps >= reach) | (errors == 0)
            close = _located(choice, is_clear.float(), is_safe.shape, length) == 0
            is_safe &= ~close.cummax(dim=1).values
    return is_safe


def _located(choice: Choice, values: torch.Tensor, shape: torch.Size, length: int) -> torch.Tensor:
    """The smallest value at each position, infinite where the choice's call of the model does not compute."""
    found = torch.full(shape, torch.inf)
    end = length + choice.forward
    found[:, end - choice.positions : end] = _by_position(values, shape[0], choice.positions)
    return found


def _by_position(values: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """The smallest value at each position; of a whole row, or of all, where the shape does not say which."""
    shape = tuple(values.shape)
    if shape[:1] == (rows * length,):
        found = [values.reshape(rows, length, -1)]
    elif shape[:1] == (rows,):
        dims = [dim for dim, size in enumerate(shape) if dim and size == length]
        # As many heads as positions: whichever it is.
        found = [values.movedim(dim, 1).reshape(rows, length, -1) for dim in dims]
        found = found or [values.reshape(rows, 1, -1)]
    else:
        found = [values.reshape(1, 1, -1)]
    return torch.stack([value.amin(-1).expand(rows, length) for value in found]).amin(0)
