"""A composed program: which model, how it is called, which idioms; as source text, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from hypothesis import strategies as st

from . import bases
from .idiom import LOGITS, SITES, Idiom, catalogue

#: Steps of one token behind the prompt.
STEPS = 60
STYLES = ("keywords", "mask", "positions", "positional", "tuple", "hidden", "embeds")
#: Autocast, in one block around all steps and in one around each.
AUTOCAST, AUTOCAST_STEPS = "autocast", "autocast of each step"
#: Dtypes and quantizations.
FORMS = ("float32", "bfloat16", "kv8", "w8a16", AUTOCAST, AUTOCAST_STEPS)
CACHES = ("plain", "config", "model's own")
_VALUES = (0.5, 2.0, -1.0, 0.25, 1.5)


@dataclass(frozen=True)
class Choice:
    """One idiom of a program.

    Attributes:
        idiom: Its name.
        at, until: Steps before which it acts, and takes that back.
        value, number: What stands for ``@v`` and ``@i``.
        site: Where in the model it is.
    """

    idiom: str
    at: int
    until: int
    value: float
    number: int
    site: str


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        base: One of `bases.BASES`.
        layers, rows: Of the model, of a batch.
        style: How steps are called.
        cache: Who makes it.
        inference: Whether under ``inference_mode``, else under ``no_grad``.
        choices: What is woven in.
        shadows: Whether replays are compared with the original as they run, which hides some faults.
        form: Of weights and cache; but for the first, only runs on our ops are compared with each other.
    """

    base: str
    layers: int
    rows: int
    style: str
    cache: str
    inference: bool
    choices: tuple[Choice, ...]
    shadows: bool = False
    form: str = FORMS[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Program:
        """What `to_dict` gave."""
        return cls(**{**values, "choices": tuple(Choice(**choice) for choice in values["choices"])})

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def only(self, kept: tuple[Choice, ...]) -> Program:
        """The same with fewer idioms."""
        return replace(self, choices=kept)

    def idioms(self) -> list[Idiom]:
        return [catalogue()[choice.idiom] for choice in self.choices]

    def source(self) -> str:
        """The text of the module that holds model and user code."""
        parts = {place: "" for place in ("module", *SITES, *(f"init {site}" for site in SITES))}
        functions, table = "", []
        for number, choice in enumerate(self.choices):
            texts = _filled(catalogue()[choice.idiom], choice, number)
            if texts["module"]:
                parts["module"] += texts["module"] + "\n\n"
            parts[choice.site] += texts["forward"] and texts["forward"] + "\n"
            parts[f"init {choice.site}"] += texts["init"] and texts["init"] + "\n"
            for place in ("between", "back", "each", "after", "end"):
                if texts[place]:
                    functions += f"def {place}_{number}(model, user):\n{_indented(texts[place], 1)}\n\n"
                    table.append(f"({place!r}, {choice.at}, {choice.until}, {place}_{number})")
            if texts["wrap"]:
                functions += f"def wrap_{number}(inner, model, user):\n{_indented(texts['wrap'], 1)}\n\n"
                table.append(f"('wrap', {choice.at}, {choice.until}, wrap_{number})")
        table_text = f"ACTIONS = [{', '.join(table)}]\n"
        return bases.module_text(self.base, self.layers, parts) + functions + table_text


def _filled(idiom: Idiom, choice: Choice, number: int) -> dict[str, str]:
    places = ("module", "init", "forward", "between", "back", "each", "after", "wrap", "end")
    filled = {}
    for place in places:
        text = getattr(idiom, place).replace("@n", str(number)).replace("@i", str(choice.number))
        filled[place] = text.replace("@v", repr(choice.value))
    return filled


def _indented(text: str, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" for line in text.splitlines())


def bases_of(name: str) -> tuple[str, ...]:
    """Models an idiom is for."""
    return catalogue()[name].bases or bases.BASES


def alone(name: str, base: str, at: int = 20) -> Program:
    """An idiom by itself, which acts when steps have long been replayed."""
    choice = Choice(name, at, at + 12, 0.5, 1, catalogue()[name].sites[0])
    return Program(base, 1, 1, "keywords", "plain", False, (choice,))


def choices(base: str, names: list[str]) -> st.SearchStrategy[Choice]:
    """One idiom of ``names`` that is for ``base``, with its parameters."""
    fitting = [name for name in names if base in bases_of(name)]
    return st.sampled_from(fitting).flatmap(_parameters)


def _parameters(name: str) -> st.SearchStrategy[Choice]:
    idiom = catalogue()[name]
    # Most changes come when a step has been recorded and has served; some before.
    at = st.one_of(st.integers(8, 40), st.integers(0, 50))
    return st.builds(
        lambda at, count, value, number, site: Choice(name, at, at + count, value, number, site),
        at,
        st.integers(1, 20),
        st.sampled_from(_VALUES),
        st.integers(0, 3),
        st.sampled_from(idiom.sites) if idiom.forward else st.just(LOGITS),
    )


def _in_order(drawn: list[Choice]) -> tuple[Choice, ...]:
    """What runs side by side is alone: it would reach the state of others in any order."""
    return tuple(next(([each] for each in drawn if catalogue()[each.idiom].concurrent), drawn))


def programs(names: list[str] | None = None, most: int = 4) -> st.SearchStrategy[Program]:
    """Programs of one to ``most`` idioms of ``names``, or of all."""
    known = sorted(catalogue()) if names is None else names

    def of_base(base: str) -> st.SearchStrategy[Program]:
        return st.builds(
            Program,
            base=st.just(base),
            layers=st.sampled_from((1, 1, 1, 2)),
            rows=st.sampled_from((1, 1, 2)),
            style=st.sampled_from(STYLES[:1] * 8 + STYLES),
            cache=st.sampled_from(CACHES),
            inference=st.booleans(),
            shadows=st.booleans(),
            form=st.sampled_from(FORMS[:1] * 8 + FORMS),
            choices=st.lists(choices(base, known), min_size=1, max_size=most).map(_in_order),
        )

    return st.sampled_from(bases.BASES).flatmap(of_base)
