"""From what was recorded to the text of a program (``kernels/program/program.h``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .cpu_passes import plain_view, share_out
from .npu_passes import OF_A_RUN, merge, with_joined_appends
from .passes import improve, slots_read
from .phases import BEFORE, CAPTURED, Phases
from .recording import Appended, Call, CannotLower, Expected, Length, Slot, is_foreign
from .tensors import writes

if TYPE_CHECKING:
    from .record import Recorder


class Writer:
    """Writes the program of one recording; ``may_move``: whether weights may be given other memory.

    Attributes:
        constants: Tensors the program holds.
        arguments: Names of the call's tensors, which a run is given first.
        kept: What is kept, ``(holder, name)``, given next.
        appended: Those of `kept` that grow; a run is given their memory behind `kept`, and how far it is
            written behind the symbols' values.
        symbols: As sympy has them.
        returned: What is new in the holders, in the order in which it follows the results of the call.
        phases: What of the program a graph can be made of.
    """

    def __init__(self, recorder: Recorder, results: list[torch.Tensor], may_move: bool) -> None:
        self.recording = recorder.recording
        self._shapes = shapes = recorder.shapes()
        changed = [value.number for value in recorder.changed.values() if isinstance(value, Slot)]
        #: Passes and views go by the sizes that tensors have at the end of the step.
        self._keeps_forms = not self.recording.is_reformed
        if self._keeps_forms:
            returned = [*map(recorder.slot_of, results), *changed]
            improve(self.recording, shapes, returned)
            share_out(self.recording)
            merge(self.recording, shapes, returned, may_move)
        self._lines: list[tuple[str, list[int], str]] = []
        self.phases = Phases()
        self._slots: dict[int, int] = {}
        self._count = 0
        self._made: set[int] = set()
        calls = self.recording.calls
        self.constants = list(self.recording.constants.values())
        for slot in self.recording.constants:
            self._slots[slot] = self._new()
            self.phases.stays(self._slots[slot])
        self.arguments = list(self.recording.inputs)
        for slot in self.recording.inputs.values():
            self._slots[slot] = self._new()
        self.appended = {(c.holder, c.name): c for c in calls if isinstance(c, Appended)}
        if len(self.appended) != sum(isinstance(c, Appended) for c in calls):
            raise CannotLower("a tensor is appended to twice")
        read = {slot for c in calls if isinstance(c, Call) for slot in slots_read(c)}
        held = self.recording.held
        self.kept = [key for key, slot in held.items() if key in self.appended or slot in read]
        self._slots.update((held[key], self._new()) for key in self.kept)
        self._memory = {key: self._new() for key in self.appended}
        for memory in self._memory.values():
            self.phases.stays(memory)
        self.symbols = recorder.symbols.all()
        self._symbols: dict[Any, int] = {symbol: self._new() for symbol in self.symbols}
        self._end = {key: self._new() for key in self.appended}
        self._check_inputs(recorder)
        self._has_written = self._has_called_foreign = False
        self._places: dict[Any, int] = {}
        for call in with_joined_appends(calls, shapes) if self._keeps_forms else calls:
            match call:
                case (keys, values):
                    self._append_both(keys, values, recorder)
                case Appended():
                    self._append(call, recorder)
                case Expected():
                    self._expect(call)
                case Call() if self._is_made(call) and (view := plain_view(call, shapes)):
                    self._view(call, view)
                case Call():
                    self._call(call)
        self._slots.update((alias, self._slots[slot]) for alias, slot in self.recording.aliases.items())
        self.results = [self._slots[recorder.slot_of(tensor)] for tensor in results]
        for key, value in recorder.changed.items():
            if (
                isinstance(value, Slot)
                and key not in self.appended
                and not recorder.begins
                and not _keeps_shape(recorder.before[key[0]].get(key[1]), shapes[value.number])
            ):
                raise CannotLower(f"what the cache keeps as {key[1]} grows in a way of its own")
        self.returned = [key for key, value in recorder.changed.items() if isinstance(value, Slot)]
        self.results += [self._slots[recorder.changed[key].number] for key in self.returned]

    def _check_inputs(self, recorder: Recorder) -> None:
        """What must be so of what a run is given."""
        self._start = {}
        for slot in (*self.recording.inputs.values(), *(self.recording.held[key] for key in self.kept)):
            tensor = self.recording.tensors[slot]
            is_checked = slot not in self.recording.of_any_size
            sizes = [n if type(n) is int and is_checked else -1 for n in (*tensor.shape, *tensor.stride())]
            dtype, made = _DTYPES.get(tensor.dtype), self._slots[slot]
            if dtype is None:
                raise CannotLower(f"takes {tensor.dtype}")
            self.phases.given(made, not is_checked or _grows(tensor))
            self._line(
                f"like {made} {dtype} {tensor.device} {tensor.dim()} {' '.join(map(str, sizes))}", [made]
            )
        for index, place in recorder.symbols.places:
            key = place.holder, place.name
            match place.kind:
                case "input":
                    slot = self._slots[self.recording.inputs[place.name]]
                case "length" if key in self.kept:
                    slot = self._slots[self.recording.held[key]]
                case "capacity" if key in self.appended:
                    slot = self._memory[key]
                case _:
                    continue
            self._line(f"size {slot} {place.dim} {self._symbols[self.symbols[index]]}", [slot])
        for key, call in self.appended.items():
            self._start[key] = self._new()
            held, memory = self._slots[self.recording.held[key]], self._memory[key]
            count = str(call.count)
            if isinstance(call.count, Length):
                count = f"y {self._number(call.count.expression)}"
            self._line(
                f"kv_buffer {held} {memory} {call.dim} {self._end[key]} {count} -> {self._start[key]}",
                [held, memory],
            )

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _line(self, text: str, reads: list[int], phase: str = BEFORE) -> None:
        self._lines.append((text, reads, phase))

    def _append(self, call: Appended, recorder: Recorder) -> None:
        memory, new, where = self._appended_to(call, recorder)
        self._slots[call.result] = made = self._new()
        self.phases.refuse("keys and values are appended by copies, each time to another place")
        self._line(f"append {memory} {where} {new} {call.dim} -> {made}", [memory, new], CAPTURED)

    def _append_both(self, keys: Appended, values: Appended, recorder: Recorder) -> None:
        both = [self._appended_to(call, recorder) for call in (keys, values)]
        memories = [memory for memory, _, _ in both]
        # Layers of one kind write to one place: those of a window have another than those of all tokens.
        kind = tuple(recorder.before[keys.holder])
        former, places = self._places.get(kind, -1), self._new()
        self._places[kind] = places
        at = " ".join(f"{memory} {where}" for memory, _, where in both)
        before = [former] if former >= 0 else []
        self._line(f"places {at} {former} -> {places}", [*memories, *before])
        self.phases.stays(places)
        written = " ".join(f"{memory} {where} {new}" for memory, new, where in both)
        reads = [slot for memory, new, _ in both for slot in (memory, new)]
        phase = self.phases.captured(reads, [])
        self._line(f"both {written} {places}", [*reads, places], phase)
        for call, (memory, _, where) in zip((keys, values), both, strict=True):
            self._slots[call.result] = made = self._new()
            self.phases.appended(made)
            self._line(f"part {memory} {where} {call.count} {call.dim} -> {made}", [memory])

    def _appended_to(self, call: Appended, recorder: Recorder) -> tuple[int, int, str]:
        """Memory, what is new, and where it is written."""
        key = call.holder, call.name
        length = self._symbols[recorder.symbols.length_of(key)]
        return self._memory[key], self._slots[call.new], f"y {self._start[key]} y {length}"

    def _expect(self, expected: Expected) -> None:
        if self._has_written:
            # A run that stops here is made again by the original, on what it has not changed.
            raise CannotLower("decides by a value behind a write to what is kept")
        if self._has_called_foreign:
            raise CannotLower("decides by a value behind an operator that is not torch's")
        self.phases.refuse("it decides by values of the device")
        slot = self._slots[expected.slot]
        self._line(f"expect {slot} {int(expected.value)}", [slot])

    def _is_made(self, call: Call) -> bool:
        """Whether what it looks at was made in this run, and lies as it did."""
        return (
            self._keeps_forms
            and bool(call.args)
            and isinstance(call.args[0], Slot)
            and call.args[0].number in self._made
        )

    def _view(self, call: Call, view: list[int]) -> None:
        source, made = self._slots[call.args[0].number], self._new()
        self._slots[call.results[0]] = made
        self._made.add(call.results[0])
        phase = self.phases.of_view(source, made)
        self._line(f"alias {source} {' '.join(map(str, view))} -> {made}", [source], phase)

    def _call(self, call: Call) -> None:
        schema = call.function._schema
        reads: list[int] = []
        self._has_called_foreign |= is_foreign(call.function)
        self._has_written |= writes(call.function) and call.function.name() not in OF_A_RUN
        named = {argument.name: at for at, argument in enumerate(schema.arguments)}
        given = [*enumerate(call.args), *((named[name], value) for name, value in call.kwargs.items())]
        values = " ".join(f"{at} {self._value(value, reads)}" for at, value in given)
        results = [self._new() for _ in schema.returns]
        if call.is_list:
            parts = [self._new() for _ in call.results]
        else:
            parts = results
        self._slots.update(zip(call.results, parts, strict=True))
        self._made.update(call.results)
        name, overload = call.function.name().split(".")[0], call.function._overloadname
        made = [*results, *parts] if call.is_list else results
        grows = any(_grows(self._shapes[slot]) for slot in call.results if slot in self._shapes)
        phase = self.phases.of_call(call, reads, made, grows)
        self._line(
            f"op {name} {overload} {len(given)} {values} -> {' '.join(map(str, results))}", reads, phase
        )
        if call.is_list:
            for at, part in enumerate(parts):
                self._line(f"item {results[0]} {at} -> {part}", [results[0]], phase)

    def _value(self, value: Any, reads: list[int]) -> str:
        if isinstance(value, Slot):
            if value.number not in self._slots:
                raise CannotLower("reads what is appended to, as it was before")
            reads.append(self._slots[value.number])
            return f"t {reads[-1]}"
        if isinstance(value, Length):
            return f"y {self._number(value.expression)}"
        if isinstance(value, list | tuple):
            return " ".join([f"[ {len(value)}", *(self._value(each, reads) for each in value)])
        return constant(value)

    def _number(self, expression: Any) -> int:
        """The slot of a number, computed from symbols."""
        if expression in self._symbols:
            return self._symbols[expression]
        word = _ARITHMETIC.get(type(expression).__name__)
        if word is not None:
            left = self._operand(expression.args[0])
            for other in expression.args[1:]:
                made = self._new()
                self._line(f"{word} {left} {self._operand(other)} -> {made}", [])
                left = f"y {made}"
            self._symbols[expression] = made
            return made
        raise CannotLower(f"computes {expression}")

    def _operand(self, expression: Any) -> str:
        return f"i {int(expression)}" if expression.is_Integer else f"y {self._number(expression)}"

    def text(self) -> str:
        """The lines, each followed by what nobody reads behind it."""
        last: dict[int, int] = {}
        for at, (_, reads, _) in enumerate(self._lines):
            last.update(dict.fromkeys(reads, at))
        inputs = len(self.arguments) + len(self.kept) + len(self.appended)
        numbers = len(self.symbols) + len(self.appended)
        kept = set(self.results) | set(range(len(self.constants) + inputs + numbers))
        dropped: dict[int, dict[str, list[int]]] = {}
        for slot, at in last.items():
            if slot not in kept:
                dropped.setdefault(at, {}).setdefault(self.phases.of_drop(slot), []).append(slot)
        lines, phases = [f"slots {inputs} {numbers} {self._count}"], ""
        for at, (line, _, phase) in enumerate(self._lines):
            lines.append(line)
            phases += phase
            for of_drop, slots in dropped.get(at, {}).items():
                lines.append(" ".join(["drop", *map(str, sorted(slots))]))
                phases += of_drop
        lines.append(_listed("return", self.results))
        if not self.phases.fault:
            copied = self.phases.copied(self.results)
            named = {"statics": self.phases.statics, "fixed": self.phases.fixed, "copied": copied}
            lines += [f"phases {phases}", *(_listed(*each) for each in named.items())]
        return "\n".join(lines)


def _listed(word: str, slots: list[int]) -> str:
    return " ".join([word, *map(str, slots)])


def _grows(tensor: torch.Tensor) -> bool:
    """Whether a size of it is another in the next step."""
    return any(type(size) is not int for size in tensor.shape)


def _keeps_shape(before: Any, after: torch.Tensor) -> bool:
    """Whether what is kept next will be what a run is given next."""
    return isinstance(before, torch.Tensor) and str([*before.shape]) == str([*after.shape])


#: Of sympy's classes and torch's own.
_ARITHMETIC = {"Add": "add", "Mul": "mul", "FloorDiv": "floordiv", "Max": "max", "Min": "min"}


def constant(value: Any) -> str:
    """A value of a call that is the same in every run."""
    match value:
        case None:
            return "n"
        case bool():
            return f"b {int(value)}"
        case int():
            return f"i {value}"
        case float():
            return f"f {value!r}"
        case str():
            return f"s {len(value.encode())}:{value}"
        case torch.device():
            return f"d {value}"
    numbers: dict[Any, int] = _DTYPES | _FORMATS | {torch.strided: 0}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format) and value in numbers:
        return f"i {numbers[value]}"
    raise CannotLower(f"hands on a {type(value).__name__}")


#: c10::ScalarType, c10::MemoryFormat
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
}
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}
