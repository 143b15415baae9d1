"""Every family over head sizes, grouped heads, lengths, dtypes, levels, seeds: a pairwise covering design."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import liteboost_adaptor

from . import families, numbers, tiny_models
from .families_choices import SLACK, Choices, safe

FILE = Path(__file__).resolve().parents[2] / "docs" / "family_matrix.tsv"

HEAD_SIZES = (16, 64, 80, 96, 128, 256)
#: Query heads a key and value head -> heads and kv heads, in the order they are tried.
RATIOS = {"1:1": ("2/2", "4/4", "1/1"), "4:1": ("8/2", "4/1"), "8:1": ("8/1", "16/2")}
#: What configurations call the number of heads.
COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "attention_heads",
)
LENGTHS = (1, 7, 63, 129)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = (1, 2)
SEEDS = (0, 1, 2)
STEPS = 4

TOLERANCE = 2e-5
OK, UNDECIDED, WRONG, NO_ORIGINAL = "ok", "undecided", "WRONG", "the original raises"


class OriginalRaises(Exception):
    """The unpatched model does not run in this dtype."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is varied of one model; ``head_dim`` 0 is the family's own attention, where it expresses none.

    ``heads`` is "heads/kv heads".
    """

    family: str
    head_dim: int
    heads: str
    length: int
    dtype: str
    level: int
    seed: int

    def build(self, seed: int) -> torch.nn.Module:
        if not self.head_dim:
            return tiny_models.build(self.family, seed)
        return _build(self.family, self.head_dim, self.heads, seed)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a cell showed.

    Attributes:
        error: In fp32 the largest difference over the largest logit; else our distance from fp32 over the
            original's own.
        kept: Share of the positions that were compared; the others hang on a choice too close to call.
        verdict: ``ok``; ``undecided`` where no position was compared; ``the original raises``; or ``WRONG``.
    """

    cell: Cell
    error: float
    kept: float
    verdict: str

    def __str__(self) -> str:
        found = f"{self.error:.1e}", f"{self.kept:.0%}", self.verdict
        return "\t".join([*map(str, dataclasses.astuple(self.cell)), *found])


@dataclasses.dataclass(frozen=True)
class Part:
    """Squared distances from fp32 over the positions that are compared, and how many these are.

    ``floor`` is what one rounding of the logits may make.
    """

    ours: float
    own: float
    floor: float
    kept: int
    positions: int


def covering(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Rows in which every pair of values of two factors occurs; greedy, always the same."""
    names = list(factors)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    used: Counter[tuple[str, Any]] = Counter()

    def gain(row: dict[str, Any], name: str, value: Any) -> tuple[int, int]:
        return len(_pairs({**row, name: value}) & missing), -used[name, value]

    while missing:
        row = dict(min(missing, key=str))
        for name in names:
            if name not in row:
                row[name] = max(factors[name], key=functools.partial(gain, row, name))
        row = {name: row[name] for name in names}
        missing -= _pairs(row)
        used.update(row.items())
        yield row


def _pairs(row: dict[str, Any]) -> set[tuple[Any, Any]]:
    return set(itertools.permutations(row.items(), 2))


def cells(family: str) -> tuple[list[Cell], dict[str, str]]:
    """The design of a family, and the values it cannot express with the reasons."""
    head_sizes, heads, refused = expressible(family)
    return [Cell(family, **row) for row in _design(head_sizes, heads)], refused


@functools.cache
def _design(head_sizes: tuple[int, ...], heads: tuple[str, ...]) -> list[dict[str, Any]]:
    factors = {"length": LENGTHS, "head_dim": head_sizes, "dtype": tuple(DTYPES), "heads": heads}
    return list(covering(factors | {"level": LEVELS, "seed": SEEDS}))


def sample(family: str, turn: int) -> Cell:
    """A cell, by turns in fp32 and in 16 bits, of the design of a family that expresses everything.

    With attention that this family cannot express, it has the family's own.
    """
    rows = [row for row in _design(HEAD_SIZES, tuple(RATIOS)) if (row["dtype"] == "fp32") == (turn % 2 == 0)]
    row = rows[turn // 2 % len(rows)]
    heads = next((one for one in RATIOS[row["heads"]] if not _why_not(family, row["head_dim"], one)), "")
    return Cell(family, **row | {"heads": heads, "head_dim": row["head_dim"] if heads else 0})


def expressible(family: str) -> tuple[tuple[int, ...], tuple[str, ...], dict[str, str]]:
    """Head sizes and heads that the family's configuration can express, as its attention's calls show.

    And what it cannot, with the reasons.
    """
    refused: dict[str, str] = {}
    heads: dict[str, str] = {}
    for ratio, candidates in RATIOS.items():
        reasons = {}
        for candidate in candidates:
            reasons[candidate] = _why_not(family, 64, candidate)
            if not reasons[candidate]:
                heads[ratio] = candidate
                break
        else:
            refused[ratio] = reasons[candidates[0]]
    if not heads:
        reason = next(iter(refused.values()))
        return (0,), ("",), {**{str(size): reason for size in HEAD_SIZES}, **refused}
    some = next(iter(heads.values()))
    reasons = {size: _why_not(family, size, some) for size in HEAD_SIZES}
    refused |= {str(size): reason for size, reason in reasons.items() if reason}
    return tuple(size for size in HEAD_SIZES if not reasons[size]), tuple(heads.values()), refused


def _counts(heads: str) -> tuple[int, int]:
    return tuple(map(int, heads.split("/")))


def _build(family: str, head_dim: int, heads: str, seed: int = 0) -> torch.nn.Module:
    return tiny_models.build(family, seed, tiny_models.sizes(family, head_dim, *_counts(heads)))


@functools.cache
def _has_heads(family: str) -> bool:
    """Whether the small model of the family has attention; larger ones without take long to initialise."""
    model = tiny_models.build(family)
    if _attention_shapes(model):
        return True
    text = model.config.get_text_config(decoder=True)
    return not {*vars(text), *text.attribute_map}.isdisjoint(COUNTS)


def _why_not(family: str, head_dim: int, heads: str) -> str:
    """Why a model of the family has not this attention, or an empty string."""
    if not _has_heads(family):
        return "no attention heads"
    try:
        model = _build(family, head_dim, heads)
        seen = _attention_shapes(model)
    except Exception as fault:  # noqa: BLE001 - whatever a configuration class has against a value
        return f"{type(fault).__name__}: {str(fault).strip().splitlines()[-1].strip()[:100]}"
    if not seen:
        return _why_not_by_config(model.config.get_text_config(decoder=True), head_dim, *_counts(heads))
    if (head_dim, *_counts(heads)) in seen:
        return ""
    return "has " + ", ".join(f"{q}/{kv} heads of {size}" for size, q, kv in sorted(seen))


def _why_not_by_config(text: Any, head_dim: int, heads: int, kv_heads: int) -> str:
    """For attention that calls no function of transformers: what the configuration says."""
    if heads not in [getattr(text, name, None) for name in COUNTS]:
        return "no attention heads"
    if kv_heads != heads:
        return "no grouped heads"
    sizes = [getattr(text, name, None) for name in (*tiny_models.HEAD_SIZES, "d_head")]
    size = next((size for size in sizes if size), None) or text.hidden_size // heads
    return "" if size == head_dim else f"heads of {size}"


def _attention_shapes(model: torch.nn.Module) -> set[tuple[int, int, int]]:
    """(head size, heads, kv heads) of the calls that attention functions of transformers get."""
    seen: set[tuple[int, int, int]] = set()

    def observe(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("sdpa_attention_forward", "eager_attention_forward"):
            query, key = frame.f_locals.get("query"), frame.f_locals.get("key")
            if isinstance(query, torch.Tensor) and query.ndim == 4:
                seen.add((query.shape[-1], query.shape[1], key.shape[1]))

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        families.prefill(model, families.inputs_of(model, 4, (0,)))
    finally:
        sys.setprofile(before)
    return seen


def run(cell: Cell) -> Result:
    """Build the cell's model and compare it with and without us, prefill and cached decode."""
    if cell.dtype == "fp32":
        return _run_fp32(cell)
    # What one seed decides by bad luck is decided by several together.
    parts: list[Part] = []
    for seed in (cell.seed, *range(10, 15)):
        try:
            parts.append(_low_precision(cell, seed))
        except OriginalRaises as fault:
            return Result(cell, math.nan, math.nan, f"{NO_ORIGINAL}: {fault}")
        result = _together(cell, parts)
        if result.verdict == OK:
            break
    return result


def _together(cell: Cell, parts: list[Part]) -> Result:
    ours, own, floor, kept, positions = map(sum, zip(*map(dataclasses.astuple, parts), strict=True))
    if not kept:
        return Result(cell, math.nan, 0.0, UNDECIDED)
    is_near = math.sqrt(ours) <= max(SLACK * math.sqrt(own), math.sqrt(floor))
    return Result(cell, math.sqrt(ours / max(own, 1e-60)), kept / positions, OK if is_near else WRONG)


def paddings(length: int) -> tuple[int, ...]:
    return (0, length // 2, length // 4)


def _run_fp32(cell: Cell) -> Result:
    model = cell.build(cell.seed)
    plain = families.inputs_of(model, cell.length, (0, 0), cell.seed)
    padded = families.inputs_of(model, cell.length, paddings(cell.length), cell.seed)
    expected = families.prefill(model, plain)
    tokens, steps = families.decode(model, padded, STEPS)
    with liteboost_adaptor.patched(model, level=cell.level):
        found = families.prefill(model, plain)
        _, found_steps = families.decode(model, padded, STEPS, forced=tokens)
    best = steps.topk(2, dim=-1).values
    certain = best[..., 0] - best[..., 1] > 2 * TOLERANCE * steps.abs().max()
    # Of the logits: codebook models write other tokens than the likeliest.
    same = torch.equal(found_steps.argmax(-1)[certain], steps.argmax(-1)[certain])
    error = max(numbers.relative(found, expected), numbers.relative(found_steps, steps))
    return Result(cell, error, 1.0, OK if error <= TOLERANCE and same else WRONG)


def _low_precision(cell: Cell, seed: int) -> Part:
    """Ours and the original in 16 bits against the original in fp32, the same weights and tokens."""
    dtype = DTYPES[cell.dtype]
    model = families.cast(cell.build(seed), dtype)
    plain = families.inputs_of(model, cell.length, (0, 0), seed)
    padded = families.inputs_of(model, cell.length, paddings(cell.length), seed)

    exact = Run(families.cast(model, torch.float32), plain, padded, None)
    families.cast(model, dtype)
    try:
        own = Run(model, plain, padded, exact.tokens)
    except RuntimeError as fault:
        raise OriginalRaises(str(fault).splitlines()[0]) from fault
    with liteboost_adaptor.patched(model, level=cell.level):
        ours = logits_with(model, plain, padded, exact.tokens)
    kept = hangs_on_no_close_choice(exact, own, cell.length) & own.logits.isfinite().all(-1)
    wanted = exact.logits[kept].double()
    return Part(
        ours=float((ours[kept].double() - wanted).norm() ** 2),
        own=float((own.logits[kept].double() - wanted).norm() ** 2),
        floor=float((numbers.ULP[dtype] * wanted.norm()) ** 2),
        kept=int(kept.sum()),
        positions=kept.numel(),
    )


class Run:
    """Logits of the unpatched model, the tokens of its steps, and the choices it made."""

    def __init__(
        self,
        model: torch.nn.Module,
        plain: dict[str, Any],
        padded: dict[str, Any],
        tokens: torch.Tensor | None,
    ) -> None:
        with Choices(model) as self.decode_choices:
            self.tokens, steps = families.decode(model, padded, STEPS, forced=tokens)
        with Choices(model) as self.prefill_choices:
            prefill = families.prefill(model, plain)
        self.outputs = prefill.flatten(0, 1), steps.flatten(0, 1)
        self.logits = torch.cat(self.outputs)


def logits_with(
    model: torch.nn.Module, plain: dict[str, Any], padded: dict[str, Any], tokens: torch.Tensor
) -> torch.Tensor:
    _, steps = families.decode(model, padded, STEPS, forced=tokens)
    return torch.cat([families.prefill(model, plain).flatten(0, 1), steps.flatten(0, 1)])


def hangs_on_no_close_choice(exact: Run, own: Run, length: int) -> torch.Tensor:
    """Which rows of the logits rounding cannot have made another function's."""
    rows = len(paddings(length))
    parts = (
        safe(exact.prefill_choices.made, own.prefill_choices.made, 2, length),
        safe(exact.decode_choices.made, own.decode_choices.made, rows, length, STEPS)[:, -STEPS:],
    )
    # Codebooks: several rows of logits for one of tokens.
    repeats = [len(out) // part.numel() for part, out in zip(parts, exact.outputs, strict=True)]
    return torch.cat([part.flatten().repeat_interleave(n) for part, n in zip(parts, repeats, strict=True)])


_COLUMNS = (*(field.name for field in dataclasses.fields(Cell)), "error", "kept", "verdict")


def not_expressible(family: str, value: str, reason: str) -> str:
    """The line of a value that a family's configuration cannot express."""
    column = 1 + (value in RATIOS)
    cells = [family, *[""] * (len(_COLUMNS) - 2), f"not expressible: {reason}"]
    cells[column] = value
    return "\t".join(cells)


def write(lines: dict[str, list[str]]) -> None:
    """Write the results of every family, in the order of the library's mapping."""
    text = ["\t".join(_COLUMNS), *(line for family in families.buildable() for line in lines[family])]
    FILE.write_text("\n".join(text) + "\n", encoding="utf-8")
