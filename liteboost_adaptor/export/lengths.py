"""Which program is right for which number of tokens: each is tried in advance, with what the cache will keep.

What a cache keeps follows from how many tokens it holds. So a runner needs no conditions, only a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ExportError
from .recorded import Number, Recorded, State

#: Programs for prompts, and for steps. A forward that needs more does something else for each length.
MOST = 24
#: The length that a program is recorded at first: one that is no size of a model.
_TYPICAL = 37


@dataclass
class Table:
    """Programs and for how many tokens each is right.

    Attributes:
        ranges: (first, last, index of the program), in order: of prompts how long they are, of steps how many
            tokens lie before.
    """

    programs: list[Recorded] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    _values: dict[tuple[int, int], set[tuple[str, int]]] = field(default_factory=dict)

    def add(self, length: int, index: int, values: list[int]) -> None:
        """Note that a program is right for ``length``, the next one, and with which numbers."""
        if self.ranges and self.ranges[-1][2] == index:
            self.ranges[-1] = (self.ranges[-1][0], length, index)
        else:
            self.ranges.append((length, length, index))
        for at, value in enumerate(values):
            # A number is as long as what was seen, or always the same.
            ways = {("seen", value - length), ("constant", value)}
            former = self._values.get((index, at))
            self._values[index, at] = ways if former is None else former & ways

    def kept_number(self, index: int, at: int, number: Number) -> tuple[str, int]:
        """How a runner knows a ``number`` that the cache keeps: ``seen`` or ``constant``, and what is added.

        Raises:
            ExportError: It follows neither from the number of tokens, nor is it always the same.
        """
        ways = self._values[index, at]
        if not ways:
            raise ExportError(f"its cache keeps {number.name}, which counts in a way of its own")
        return min(ways)


@dataclass(frozen=True)
class Tables:
    """The programs of a model.

    Attributes:
        longest: Tokens that a cache holds.
        prompts, steps: Of prompts of 1 to ``longest`` tokens, and for one token behind 1 to ``longest - 1``.
        last: What the cache keeps at last.
    """

    longest: int
    prompts: Table
    steps: Table
    last: State


def tables(record: Callable[[int, int], tuple[Recorded, State]], longest: int) -> Tables:
    """Record programs until there is one for every length.

    Args:
        record: Of (tokens before, tokens) the call as a program, and what the cache keeps before it.
        longest: Tokens that a cache holds.

    Raises:
        ExportError: Too many are needed, or what a cache keeps does not follow from the number of tokens.
    """
    prompts = Table()
    program, start = record(0, 1)
    prompts.programs.append(program)
    if longest > _TYPICAL:
        prompts.programs.append(record(0, _TYPICAL)[0])
    states: list[State] = [start]
    for length in range(1, longest + 1):
        index, values = _right(prompts, record, start, 0, length, longest)
        prompts.add(length, index, values)
        states.append(prompts.programs[index].after(start, values))
    steps = Table()
    for seen in range(1, longest):
        index, values = _right(steps, record, states[seen], seen, 1, longest)
        steps.add(seen, index, values)
        after = steps.programs[index].after(states[seen], values)
        if after != states[seen + 1]:
            names = [name for name, value in after.items() if value != states[seen + 1].get(name)]
            raise ExportError(
                f"its cache keeps {names[0]} otherwise behind a prompt of {seen + 1} tokens than "
                "behind as many that came one by one"
            )
    return Tables(longest, prompts, steps, states[longest])


def _right(
    table: Table,
    record: Callable[[int, int], tuple[Recorded, State]],
    state: State,
    seen: int,
    count: int,
    longest: int,
) -> tuple[int, list[int]]:
    """A program for such a call, recorded if there is none, by index, and its numbers."""
    recent = [table.ranges[-1][2]] if table.ranges else []
    for index in [*recent, *range(len(table.programs))]:
        values = table.programs[index].values(state, seen, count, longest)
        if values is not None:
            return index, values
    what = f"one token behind {seen}" if seen else f"a prompt of {count}"
    if len(table.programs) == MOST:
        raise ExportError(
            f"its forward does something else for so many lengths that {MOST} programs do not "
            f"cover them (next: {what}); export it with fewer --max-tokens"
        )
    program, found = record(seen, count)
    table.programs.append(program)
    values = program.values(state, seen, count, longest)
    if values is None or not _agree(state, found):
        raise ExportError(f"what its cache keeps before {what} does not follow from that number")
    return len(table.programs) - 1, values


def _agree(expected: State, found: State) -> bool:
    """Whether a cache keeps what was expected: sizes and numbers."""
    return all(expected.get(name) == value for name, value in found.items())
