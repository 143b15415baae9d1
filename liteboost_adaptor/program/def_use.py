"""Who makes and who reads what in a recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from .passes import Step, is_slot, slots_read
from .recording import Call, Recording


class DefUse:
    """Who makes and who reads a slot of a recording."""

    def __init__(self, calls: list[Step], recording: Recording, returned: Iterable[int]) -> None:
        self.at = {id(call): at for at, call in enumerate(calls)}
        self.mutable = [
            at
            for at, call in enumerate(calls)
            if not isinstance(call, Call) or call.function._schema.is_mutable
        ]
        self._makers: dict[int, list[Call]] = {}
        self._readers: dict[int, list[Step]] = {}
        self._kept = {*returned, *recording.aliases, *recording.aliases.values()}
        for call in calls:
            for slot in slots_read(call):
                self._readers.setdefault(slot, []).append(call)
            if isinstance(call, Call):
                for slot in call.results:
                    self._makers.setdefault(slot, []).append(call)

    def maker(self, value: Any, *functions: Any) -> Call | None:
        """The only call that makes a slot, if it is one of ``functions``."""
        makers = self._makers.get(value.number, []) if is_slot(value) else []
        return makers[0] if len(makers) == 1 and makers[0].function in functions else None

    def readers(self, slot: int) -> list[Call]:
        return [call for call in self._readers.get(slot, []) if isinstance(call, Call)]

    def is_inside(self, calls: list[Call], last: Iterable[int]) -> bool:
        """Whether nobody else reads what they make, but for ``last``, or changes anything between them."""
        own = {id(call) for call in calls}
        made = {slot for call in calls for slot in call.results} - set(last)
        if made & self._kept or any(
            id(call) not in own for slot in made for call in self._readers.get(slot, [])
        ):
            return False
        places = [self.at[id(call)] for call in calls]
        others = {at for at in self.mutable if at not in places}
        return not any(min(places) < at < max(places) for at in others)

    def is_unwritten(self, first: Call, slots: Iterable[int]) -> bool:
        """Whether nothing is written between ``first`` and who reads one of ``slots`` last."""
        places = [self.at[id(each)] for slot in slots for each in self._readers.get(slot, [])]
        return not any(self.at[id(first)] < at < max(places, default=0) for at in self.mutable)


def casts() -> list[Any]:
    """What casts to another dtype: torch's operator, and torch_npu's own, by which 2.9.0 makes every cast."""
    own = getattr(torch.ops.npu, "_npu_dtype_cast", None)
    return [torch.ops.aten._to_copy.default, *([] if own is None else [own.default])]


def as_torch_casts(call: Call) -> Call:
    """``call`` with torch's operator where it is torch_npu's cast: to compare, not to run."""
    if call.function not in casts()[1:]:
        return call
    return replace(call, function=casts()[0], args=call.args[:1], kwargs={"dtype": call.args[1]})


def is_npu(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain tensor on an NPU, of sizes that are numbers."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "npu"


def memories(slots: Iterable[int], shapes: dict[int, torch.Tensor]) -> set[int]:
    """Identities of the storages of what was in the slots."""
    return {memory_of(shapes[slot]) for slot in slots if slot in shapes}


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of the storage of a tensor that was in a slot."""
    return getattr(tensor, "actual", tensor).untyped_storage()._cdata
