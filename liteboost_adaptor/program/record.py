"""Record what a model's forward does for one more token, while it does it.

The step runs as ever, on real tensors, and every operator it calls is noted. Lengths of the cache are symbols
while it runs: tensors that grow have symbolic sizes, and what Python decides by a size is noted as a
condition. So the operators do what the forward does wherever the conditions hold. A truth value that Python
reads from a tensor is noted, too, and read again by every run. A step that reads other values of tensors back
into Python runs to its end, but makes no recording.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..eligibility import is_plain_type
from ..kv_cache import buffers
from ..kv_cache.int8_tensor import Int8KVTensor, dequantized_kv
from .caches import PARTS
from .casts import KeptCasts, is_made_by_autocast
from .execution import unobserved
from .operators import drops_nothing, is_composite, is_sized_by_values, is_sized_unseen
from .recording import (
    MOVED,
    SHORT,
    Appended,
    Call,
    CannotLower,
    Expected,
    Length,
    Place,
    Recording,
    Slot,
    is_foreign,
)
from .symbolic_forms import SymbolicForms
from .symbolic_tensor import SymbolicTensor, real_of
from .symbols import Symbols
from .tensors import FORM, Known, Written, attribute, memory, place, writes, written_by

ours = torch.ops.liteboost

_READS_ONE = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
_MISSING = object()
_RANDOM = torch.Tag.nondeterministic_seeded
_DATA_DEPENDENT = torch.Tag.data_dependent_output


class Recorder(TorchDispatchMode):
    """Notes what runs in its block, on a cache whose layers have buffers.

    Attributes:
        recording: The outcome.
        symbols: For lengths that are others in every run.
        requirements: What must be so of an argument, by name, before every run.
        written: What the step has written to tensors that were there before.
        told: (tensor that was there before, attribute that others may change, what Python was told).
        numbers_allowed: Whether the function that runs is known to make tensors of Python's numbers alone:
            then one that no operator has made is no result of anything. `SCALARS`: only those without
            dimensions.
        is_tainted: Whether what ran may not be what runs without symbols.
        cast_by_autocast: Slots of what autocast may have cast.
        begins: Whether what is recorded fills a cache: what it appends to has no memory yet, and what it
            makes of that is what the cache keeps.
    """

    SCALARS = "scalars"

    def __init__(
        self, owns: list[dict[Any, Any]], numbers: Collection[str], known: Known, begins: bool = False
    ) -> None:
        """
        Args:
            owns: What keeps the tensors of the cache.
            numbers: Attributes of these that count.
            known: All tensors that may be constants of the step.
        """
        super().__init__()
        self.recording = Recording()
        self.written = Written()
        self.numbers_allowed: bool | str = False
        self.is_tainted = False
        self.begins = begins
        self._known = known
        self._kept_casts = KeptCasts(known.all())
        self.cast_by_autocast: set[int] = set()
        self._owns = owns
        self.symbols = Symbols()
        self._slots: dict[int, int] = {}
        self._made: dict[Any, int] = {}
        self._alive: list[Any] = []
        self._symbolic_forms = SymbolicForms(self.symbols.fakes)
        self._forms: dict[tuple[Any, ...], torch.Tensor] = {}
        self.before: list[dict[str, Any]] = []
        self.told: list[tuple[torch.Tensor, str, Any]] = []
        self.requirements: list[tuple[str, Callable[[torch.Tensor], bool]]] = []
        self._numbers = numbers

    def input(self, name: str, tensor: torch.Tensor, growing: Sequence[int] | None = ()) -> torch.Tensor:
        """What stands for the argument ``name``.

        Args:
            growing: Dimensions along which its size is another in every run; None: any of its sizes and
                strides may be others, no other size depends on them, and what the step writes to it is
                written again by whoever makes the step anew.
        """
        slot = self.recording.inputs[name] = self._slot(tensor)
        self.recording.tensors[slot] = tensor
        if growing is None:
            self.recording.of_any_size.add(slot)
            self.written.disregard(tensor)
        if not growing:
            return tensor
        if any(tensor.size(dim) < 2 for dim in growing):
            self.recording.fault = SHORT
            return tensor
        lengths = {dim: self.symbols.of(tensor.size(dim), Place("input", name, dim=dim)) for dim in growing}
        made = self.recording.tensors[slot] = self._tracked(tensor, lengths)
        return made

    def number(self, name: str, value: int) -> Any:
        """What stands for the argument ``name``, a number that is another one in every run."""
        return self.symbols.of(value, Place("argument", name))

    def require(self, argument: torch.Tensor, holds: Callable[[torch.Tensor], bool]) -> bool:
        """What is recorded is right only where ``holds(argument)``; False where no argument is that tensor.

        It is asked before every run, on the host: it must not read values.
        """
        for name, slot in self.recording.inputs.items():
            if self.recording.tensors[slot] is argument:
                self.requirements.append((name, holds))
                return True
        return False

    def tell(self, tensor: torch.Tensor, name: str, value: Any) -> bool:
        """Python was told ``value`` for the attribute ``name``: whether a run can see that it still is so."""
        real = real_of(tensor)
        if self.written.is_own(real):
            return type(tensor) is not SymbolicTensor  # what the step has made is made anew
        if self.require(tensor, lambda given: attribute(given, name) == value):
            return not isinstance(value, torch.Tensor)
        if self._known.find(real) is None:
            return False
        self.told.append((real, name, value))
        return True

    def tell_form(self, tensor: torch.Tensor) -> None:
        """Python was told how ``tensor`` lies in memory: what was there before has to lie so in every run."""
        if isinstance(tensor, torch.Tensor) and type(tensor) is not SymbolicTensor:
            known = self._known.find(tensor)
            if known is not None and not any(each is known and name == FORM for each, name, _ in self.told):
                self.told.append((known, FORM, attribute(known, FORM)))

    def hold(self, *tensors: torch.Tensor) -> None:
        """``tensors`` of ours are constants of the step: whoever made them knows when they are right."""
        self._known.add(tensors)

    def __enter__(self) -> Recorder:
        """What the layers keep has symbolic sizes from here on."""
        with unobserved():
            for at, own in enumerate(self._owns):
                self._hold_layer(at, own)
                self.before.append(dict(own))
        return super().__enter__()

    def _hold_layer(self, at: int, own: dict[Any, Any]) -> None:
        grown = own.get(buffers.BUFFERS, {})
        for name, value in list(own.items()):
            if isinstance(value, torch.Tensor):
                slot = self.recording.held[at, name] = self._slot(value)
                self.recording.tensors[slot] = value
                if (noted := grown.get(name)) is not None:
                    self._hold_length(at, own, name, noted)
            elif type(value) is int and name in self._numbers and value > 1:
                own[name] = self.symbols.of(value, Place("number", name, at))

    def _hold_length(self, at: int, own: dict[str, Any], name: str, noted: Any) -> None:
        """What is kept as ``name`` has symbols for its length, and for that of the memory it lies in."""
        value, dim = own[name], noted.dim
        is_appended = isinstance(noted, buffers.KVBuffer)
        if value.size(dim) < 2 or not (is_appended or value.is_contiguous()):
            # What an encoder's output was made into is then as long in every run.
            self.recording.fault = SHORT if is_appended else self.recording.fault
            return
        length = capacity = self.symbols.of(value.size(dim), Place("length", name, at, dim))
        if is_appended:
            capacity = self.symbols.of(noted.memory.size(dim), Place("capacity", name, at, dim))
        slot = self.recording.held[at, name]
        own[name] = self.recording.tensors[slot] = self._tracked(value, {dim: length}, {dim: capacity})

    def __exit__(self, *fault: Any) -> None:
        """What is kept is real again; `changed` is known."""
        super().__exit__(*fault)
        if fault[0] is not None:
            return
        self.changed: dict[tuple[int, Any], Any] = {}
        for at, (own, before) in enumerate(zip(self._owns, self.before, strict=True)):
            for name, value in list(own.items()):
                if name in (buffers.BUFFERS, *PARTS):
                    continue
                if before.get(name, _MISSING) is not value:
                    self.changed[at, name] = self._noted(value)
                own[name] = (
                    pytree.tree_map(real_of, value) if type(value) in (tuple, list) else real_of(value)
                )

    def append(self, held: Any, layer: Any, name: str, new: torch.Tensor, dim: int) -> Any:
        """What `kv_cache.buffers` does for an append, and a note of it."""
        if self.begins:
            return torch.cat([held, new], dim=dim)
        with unobserved():
            return self._noted_append(held, layer, name, new, dim)

    def _noted_append(self, held: Any, layer: Any, name: str, new: torch.Tensor, dim: int) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            mine = vars(layer).setdefault(buffers.BUFFERS, {})
            buffer = mine.get(name)
            real = buffers.in_place(layer, mine, real_of(held), name, real_of(new), dim)
            if real is None:
                real = torch.cat([real_of(held), real_of(new)], dim=dim)
                mine[name] = buffers.Prompt(real.untyped_storage()._cdata, dim)  # as `grown` notes it
            if mine.get(name) is not buffer or not isinstance(buffer, buffers.KVBuffer):
                self.recording.fault = MOVED
                return real
        at = next(index for index, each in enumerate(self._owns) if each is vars(layer))
        is_kept = type(held) is SymbolicTensor and self._slots.get(
            id(held.actual)
        ) == self.recording.held.get((at, name))
        others = [size for along, size in enumerate(new.shape) if along != dim]
        if not is_kept or not all(type(size) is int for size in others):
            self.recording.fault = self.recording.fault or "appends to something else than what a layer keeps"
            return real
        capacity = self.symbols.known(mine[name].memory.size(dim))
        made = self._tracked(real, {dim: held.shape[dim] + new.shape[dim]}, {dim: capacity})
        count = self._noted(new.size(dim))
        self.recording.calls.append(Appended(at, name, self.slot_of(new), dim, count, self._slot(real)))
        return made

    def _tracked(
        self, real: torch.Tensor, lengths: dict[int, Any], capacities: dict[int, Any] | None = None
    ) -> SymbolicTensor:
        """``real`` with symbols for some sizes, in memory that has others: see `Symbols.shaped`."""
        capacities = lengths if capacities is None else capacities
        # Symbols are multiplied once for all layers.
        named = [(dim, _expression(lengths[dim]), _expression(capacities[dim])) for dim in lengths]
        form = (real.shape, real.stride(), *named, real.dtype, real.device)
        with _disable_current_modes():
            if form not in self._forms:
                self._forms[form] = self.symbols.shaped(real, lengths, capacities)
            made = SymbolicTensor(real, self._forms[form])
        self._alive.append(made)
        return made

    def _slot(self, real: torch.Tensor) -> int:
        found = self._slots.get(id(real))
        if found is None:
            found = self._slots[id(real)] = self.recording.new()
            self._alive.append(real)
        return found

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as it is, where it has symbolic sizes."""
        return real_of(tensor)

    def shapes(self) -> dict[int, torch.Tensor]:
        """Slot -> what is in it, with symbolic sizes if it has some."""
        found = {self._slots[id(each)]: each for each in self._alive if type(each) is not SymbolicTensor}
        tracked = (each for each in self._alive if type(each) is SymbolicTensor)
        return found | {
            self._slots[id(each.actual)]: each for each in tracked if id(each.actual) in self._slots
        }

    def slot_of(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor; one that no call made is a constant."""
        real = tensor.actual if type(tensor) is SymbolicTensor else tensor
        if id(real) not in self._slots and (made := self._made.get(memory(real))) is not None:
            # torch hands on another object for what the call made (`make_variable` of factories).
            self._slots[id(real)] = made
            self._alive.append(real)
        if id(real) not in self._slots:
            self._note_constant(real)
        return self._slots[id(real)]

    def _note_constant(self, real: torch.Tensor) -> None:
        """A tensor that no operator of the step has made."""
        if not is_plain_type(type(real)):
            self.recording.fault = f"holds a {type(real).__name__}"
        known = self._known.find(real)
        slot = self._slot(real)
        if known is not None:
            self.recording.constants[slot] = known
        elif (parameter := self._kept_casts.parameter_of(real)) is not None:
            arguments = Slot(self.slot_of(parameter)), real.dtype
            self.recording.calls.append(Call(ours._autocast_weight.default, arguments, {}, [slot]))
        elif self.numbers_allowed == self.SCALARS and not real.dim():
            self.recording.constants[slot] = real  # what an operator makes of a number is seen by nobody else
        elif self.numbers_allowed is True:
            # A new one in every run, for the step may write to it.
            values = self.recording.new()
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.recording.constants[values] = real.clone()
            self.recording.calls.append(Call(torch.ops.aten.clone.default, (Slot(values),), {}, [slot]))
        else:
            self.recording.constants[slot] = real
            shape = "x".join(map(str, real.shape))
            self.recording.fault = (
                self.recording.fault or f"takes a tensor of shape [{shape}] that no operator has made"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unobserved():
            if torch.is_inference_mode_enabled() and is_composite(func):
                # Under no_grad it is taken apart before: what reads values is seen in its parts.
                with _mode_on(self):
                    return func.decompose(*args, **(kwargs or {}))
            return self._noted_call(func, args, kwargs or {})

    def _noted_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs))
        if any(type(value) is Int8KVTensor for value in flat):
            self.recording.fault = f"reads the values of a cache of integers ({func})"
            flat = [real_of(dequantized_kv(value)) for value in flat]
        if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in flat):
            self.is_tainted = True  # what Python has computed by a length is no length
            self.recording.fault = (
                self.recording.fault or f"computes with a length in floating point ({func})"
            )
        is_symbolic = any(type(value) is SymbolicTensor or isinstance(value, torch.SymInt) for value in flat)
        real_args, real_kwargs = pytree.tree_unflatten([real_of(value) for value in flat], structure)
        former: list[tuple[torch.Tensor, Any, Any]] = []
        if writes(func):
            self.written.about_to(func, real_args, real_kwargs)
            written = written_by(func, real_args, real_kwargs)
            former = [(each, place(each), memory(each)) for each in written]
        if is_foreign(func):
            self.written.about_to_call_foreign(map(real_of, flat))
        result = func(*real_args, **real_kwargs)
        outputs = result if isinstance(result, list | tuple) else [result]
        self.written.made(outputs, map(real_of, flat))
        self._note_forms(func, former, is_symbolic)
        if self.recording.fault:
            return result
        if func in _READS_ONE and type(result) is bool and real_args[0].is_cpu:
            self.recording.calls.append(Expected(self.slot_of(flat[0]), result))
            return result
        if func in _READS_ONE or _DATA_DEPENDENT in func.tags or is_sized_by_values(func, args):
            self.recording.fault = f"reads values ({func})"
            return result
        if is_sized_unseen(func, outputs):
            self.recording.fault = f"makes a tensor whose size its values may decide ({func})"
            return result
        if _RANDOM in func.tags and not drops_nothing(func, args, kwargs):
            self.recording.fault = f"draws random numbers ({func})"
            return result
        noted_args, noted_kwargs = pytree.tree_unflatten([self._noted(value) for value in flat], structure)
        if is_symbolic:
            try:
                result, outputs = self._with_symbols(func, args, kwargs, result, outputs)
            except Exception as fault:  # noqa: BLE001 - the step goes on as ever, and makes no recording
                words = str(fault).splitlines() or [""]
                self.recording.fault = (
                    f"has no symbolic sizes ({func}): {type(fault).__name__}: {words[0][:80]}"
                )
                return result
        slots = [self._slot(real_of(one)) if isinstance(one, torch.Tensor) else -1 for one in outputs]
        self._made.update(
            (memory(one), slot) for one, slot in zip(outputs, slots, strict=True) if type(one) is torch.Tensor
        )
        if any(slot < 0 for slot in slots):
            self.recording.fault = f"returns no tensor ({func})"
        if is_made_by_autocast(func):
            self.cast_by_autocast.update(slots)
        call = Call(func, noted_args, noted_kwargs, slots, isinstance(result, list))
        self.recording.calls.append(call)
        return result

    def _note_forms(self, func: Any, former: list[tuple[torch.Tensor, Any, Any]], is_symbolic: bool) -> None:
        """``func`` has written to tensors: what is known of the ``former`` form of each holds no more."""
        for tensor, lay, shown in former:
            if place(tensor) == lay:
                continue
            self.recording.is_reformed = True
            self._made.pop(shown, None)
            if (slot := self._slots.get(id(tensor))) is not None:
                self._made[memory(tensor)] = slot
            if is_symbolic:
                self.is_tainted = True  # what stands for the tensor goes on as it was made
                self.recording.fault = (
                    self.recording.fault or f"changes the form of a tensor with symbolic sizes ({func})"
                )

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Slot(self.slot_of(value))
        if isinstance(value, torch.SymInt):
            return Length(value.node._expr)
        return value

    def _with_symbols(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: Any) -> Any:
        """The results with symbolic sizes where they have some."""
        fakes = self._symbolic_forms.results(func, args, kwargs)
        if any(isinstance(one, torch.Tensor) and (one.is_conj() or one.is_neg()) for one in outputs):
            # What stands for it would not be resolved by torch before an operator reads it.
            self.is_tainted = True
            raise CannotLower("a view that conjugates or negates")
        made = []
        for real, one in zip(outputs, fakes, strict=True):
            if isinstance(one, torch.Tensor) and any(
                isinstance(n, torch.SymInt) for n in (*one.shape, *one.stride())
            ):
                made.append(SymbolicTensor(real, one))
                self._alive.append(made[-1])
            else:
                made.append(real)
        if not isinstance(result, list | tuple):
            return made[0], made
        return type(result)(made), made


def _expression(length: Any) -> Any:
    return length.node._expr if isinstance(length, torch.SymInt) else length


@contextmanager
def _mode_on(mode: TorchDispatchMode) -> Iterator[None]:
    """``mode`` on again, inside of what it has been called for."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)
