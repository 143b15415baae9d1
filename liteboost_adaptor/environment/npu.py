"""What torch_npu and transformers leave undone on an NPU, as fixes that can be undone.

Those of level 0 are for a program to run and to be right; those of level 1 save launches between two tokens.

A fix acts once the module it changes is imported, there is an NPU, and the user has not turned it off. Every
fix is a row of the status.
"""

from __future__ import annotations

import fnmatch
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Settings
from ..engine.undo_stack import UndoStack
from ..report import APPLIED, DISABLED, FAILED, IDLE, Listed, Outcome, report
from . import ascend, cuda_names, npu_generate, npu_masks, npu_rotary


@dataclass(frozen=True)
class Fix:
    """One thing that is put right on an NPU.

    Attributes:
        id: As `LITEBOOST_DISABLE` names it.
        title: What it is good for.
        module: The module after whose import it can act.
        install: Puts it in force until the stack is undone.
        unfit: Why it is not needed or cannot be had here, or None.
        level: The lowest level at which it acts.
    """

    id: str
    title: str
    module: str
    install: Callable[[UndoStack], Any]
    unfit: Callable[[], str | None] = lambda: None
    level: int = 0


def _hccl(stack: UndoStack) -> None:
    mapping = sys.modules["transformers.distributed.utils"].DISTRIBUTED_BACKEND_MAP
    stack.set_item(mapping, "npu", "hccl", "DISTRIBUTED_BACKEND_MAP['npu']")


def _hccl_unfit() -> str | None:
    mapping = getattr(sys.modules["transformers.distributed.utils"], "DISTRIBUTED_BACKEND_MAP", None)
    if mapping is None:
        return "this transformers has no map of backends"
    return "transformers knows npu" if "npu" in mapping else None


def _biases(stack: UndoStack) -> None:
    stack.set_attribute(
        "transformers.integrations.sdpa_attention", "_is_torch_npu_available", lambda original: False
    )


def _biases_unfit() -> str | None:
    module = sys.modules["transformers.integrations.sdpa_attention"]
    known = getattr(module, "_is_torch_npu_available", False)
    return None if known else "this transformers does not convert masks"


def _masks(stack: UndoStack) -> None:
    stack.set_attribute("torch.nn.functional", "scaled_dot_product_attention", npu_masks.rewriting)


def _gelu(stack: UndoStack) -> None:
    # aten::gelu of torch_npu calls aclnnGelu, which has no argument for the approximation.
    def gelu(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return torch.ops.npu.npu_gelu(self, approximate=approximate)

    def gelu_backward(
        grad_output: torch.Tensor, self: torch.Tensor, *, approximate: str = "none"
    ) -> torch.Tensor:
        return torch.ops.npu.npu_gelu_backward(grad_output, self, approximate=approximate)

    stack.add_kernels("aten", "PrivateUse1", {"gelu": gelu, "gelu_backward": gelu_backward})


def _gelu_unfit() -> str | None:
    missing = ascend.missing_operators(("aclnnGeluV2", "aclnnGeluBackwardV2"))
    return f"CANN has no {', '.join(missing)}" if missing else None


def _polar(stack: UndoStack) -> None:
    # Complex rotary tables (DeepSeek-V2, Llama 4) are made by it.
    def polar(abs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        parts = torch.stack((abs * angle.cos(), abs * angle.sin()), dim=-1)
        return torch.view_as_complex(parts)

    stack.add_kernels("aten", "PrivateUse1", {"polar": polar})


def _polar_unfit() -> str | None:
    return None if ascend.missing_operators(("aclnnPolar",)) else "CANN has aclnnPolar"


def _cuda_unfit() -> str | None:
    return "there is a CUDA device" if torch.cuda.is_available() else None


def _generate_stop(stack: UndoStack) -> None:
    stack.set_attribute(_CRITERIA, "StoppingCriteriaList.__call__", npu_generate.stopping)
    if hasattr(sys.modules[_GENERATE], "StopCheck"):  # before, `_sample` itself asks for the largest
        stack.set_attribute(_GENERATE, "StopCheck.__call__", npu_generate.stop_check)


def _generate_positions(stack: UndoStack) -> None:
    inside: list[int] = []
    ours = {
        "_sample": functools.partial(npu_generate.sampling, inside=inside),
        "_prepare_position_ids_for_generation": npu_generate.first_positions,
        "_update_model_kwargs_for_generation": functools.partial(npu_generate.next_positions, inside=inside),
    }
    for name, make in ours.items():
        stack.set_attribute(_GENERATE, f"GenerationMixin.{name}", make)


def _generate_positions_unfit() -> str | None:
    mixin = sys.modules[_GENERATE].GenerationMixin
    known = hasattr(mixin, "_prepare_position_ids_for_generation")
    return None if known else "this transformers makes position ids in another place"


def _generate_rotary(stack: UndoStack) -> None:
    stack.set_attribute(_GENERATE, "GenerationMixin._sample", npu_rotary.sampling)


def _generate_mask(stack: UndoStack) -> None:
    mapping = sys.modules["transformers.masking_utils"].AttentionMaskInterface._global_mapping
    ours = {"sdpa": npu_generate.decoding_mask, "eager": npu_generate.text_mask}
    for name, make in ours.items():
        stack.set_item(mapping, name, make(mapping[name]), f"AttentionMaskInterface['{name}']")


_CRITERIA = "transformers.generation.stopping_criteria"
_GENERATE = "transformers.generation.utils"

FIXES = (
    Fix("npu.cuda", "cuda in a script leads to the NPU", "torch_npu", cuda_names.install, _cuda_unfit),
    Fix("npu.masks", "boolean masks in the shapes that NPU attention takes", "torch_npu", _masks),
    Fix("npu.gelu", "gelu(approximate='tanh') is the tanh form", "torch_npu", _gelu, _gelu_unfit),
    Fix("npu.polar", "torch.polar where CANN has no operator for it", "torch_npu", _polar, _polar_unfit),
    Fix(
        "npu.biases",
        "additive attention biases are added, not turned into a boolean mask",
        "transformers.integrations.sdpa_attention",
        _biases,
        _biases_unfit,
    ),
    Fix(
        "npu.hccl",
        "torch.distributed's hccl for transformers' parallel models",
        "transformers.distributed.utils",
        _hccl,
        _hccl_unfit,
    ),
    Fix(
        "npu.generate_stop",
        "one operator and one copy a token tell whether generate is done",
        _GENERATE,
        _generate_stop,
        level=1,
    ),
    Fix(
        "npu.generate_positions",
        "generate makes the next position alone",
        _GENERATE,
        _generate_positions,
        _generate_positions_unfit,
        level=1,
    ),
    Fix(
        "npu.generate_rotary",
        "cos and sin of the next position are looked up",
        _GENERATE,
        _generate_rotary,
        level=1,
    ),
    Fix(
        "npu.generate_mask",
        "the mask of one token is the padding",
        "transformers.masking_utils",
        _generate_mask,
        level=1,
    ),
)


class Fixes:
    """Which fixes are in force. One instance, `fixes`, serves the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._settings: Settings | None = None
        self._is_dismissed = False
        self._stacks: dict[str, UndoStack] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._imported: set[str] = set()

    def imported(self, module: str, settings: Settings) -> None:
        """What the import hooks do: put in force what can be, unless the user has said `undo`."""
        self._imported.add(module)
        if not self._is_dismissed:
            self.start(self._settings or settings)

    def start(self, settings: Settings) -> None:
        """Put every fix in force that can be, and take back those that ``settings`` turn off."""
        with self._lock:
            self._settings, self._is_dismissed = settings, False
            if not is_npu_there():
                return
            if any(_turned_off(fix, settings) for fix in FIXES if fix.id in self._stacks):
                self._take_back_all()  # two may have changed the same function: last first
            for fix in FIXES:
                if fix.id not in self._stacks and fix.module in self._imported:
                    self._consider(fix, _turned_off(fix, settings))

    def stop(self) -> list[str]:
        """Take everything back. Returns a sentence for each thing that someone else has changed since."""
        with self._lock:
            self._is_dismissed = True
            return self._take_back_all()

    def rows(self) -> Iterator[Listed]:
        """A row for every fix, where torch_npu is in use."""
        if "torch_npu" in sys.modules:
            for fix in FIXES:
                reason = _turned_off(fix, self._settings) if self._settings else ""
                yield Listed(fix.id, fix.title, DISABLED if reason else IDLE, reason)

    def _consider(self, fix: Fix, is_off: str) -> None:
        reason = "" if is_off else fix.unfit()
        if is_off:
            self._note(Outcome(fix.id, DISABLED, fix.module, is_off))
        elif reason:
            self._note(Outcome(fix.id, IDLE, fix.module, reason))
        else:
            self._install(fix)

    def _install(self, fix: Fix) -> None:
        stack = UndoStack()
        try:
            fix.install(stack)
        except Exception as fault:  # noqa: BLE001 - recorded; the program goes on as without us
            stack.undo_all()
            self._note(Outcome(fix.id, FAILED, fix.module, f"{type(fault).__name__}: {fault}"))
            return
        self._stacks[fix.id] = stack
        self._note(Outcome(fix.id, APPLIED, fix.module))

    def _note(self, outcome: Outcome) -> None:
        former = self._outcomes.pop(outcome.rule, None)
        if former:
            report.remove(former)
        self._outcomes[outcome.rule] = outcome
        report.add(outcome)

    def _take_back_all(self) -> list[str]:
        left = [sentence for stack in reversed(self._stacks.values()) for sentence in stack.undo_all()]
        self._stacks.clear()
        for outcome in self._outcomes.values():
            report.remove(outcome)
        self._outcomes.clear()
        return left


def _turned_off(fix: Fix, settings: Settings) -> str:
    for glob in settings.disable:
        if fnmatch.fnmatchcase(fix.id, glob):
            return f"turned off by LITEBOOST_DISABLE={glob}"
    if fix.level > settings.level:
        return f"needs level {fix.level}, level {settings.level} is set"
    return ""


def is_npu_there() -> bool:
    """Whether torch_npu is in use and finds an NPU."""
    return "torch_npu" in sys.modules and hasattr(torch, "npu") and torch.npu.is_available()


fixes = Fixes()
