"""Cases of the table with NaN and infinities in their arguments, and what an op must make of them.

What is compared first is of which class each element of a result is: NaN, infinite with its sign, or finite.
That must be as the reference gives it, in the arguments' dtypes or in float64: the two differ where a sum
overflows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.bounds import double, exact, ops
from fuzz.cases.activation import exact_activation
from fuzz.cases.attention import largest_of
from fuzz.run import copy_of
from fuzz.table import Case, describe, load, op
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.delta_rule import recurrent_gated_delta_rule
from liteboost_adaptor.ops.int8_attention import SCALE_BYTES, dequantized, quantize_kv
from liteboost_adaptor.ops.linear import linear

VALUES = (math.nan, math.inf, -math.inf)
PLACES = st.sampled_from(["element", "element", "row", "column", "some", "all"])
#: Ops whose `value` meets probabilities of keys that are hidden from some queries.
MIX_VALUES = ("attention", "attention_part", "int8_attention", "paged_attention", "block_sparse_attention")
#: Of the ops whose keys and values are rows of integers.
INT8_ROWS = {"int8_attention": ("key", "value")}
#: Keys that a kernel takes or leaves out together.
BLOCK_KEYS = 128
#: How far a finite element may be off, of its size and of the largest one: other tests hold ops to less.
FAR = 2.0**-5
#: Of a probability, the logarithm below which kernels may take it for 0.
LEAST_LOG = 80.0


@dataclass(repr=False)
class Spoiled:
    """Arguments of the op ``name``, and where numbers that are not finite were put among them."""

    name: str
    arguments: dict[str, Any]
    isa: str
    spots: list[str]

    def __repr__(self) -> str:
        return f"{self.name}({describe(self.arguments)}) with {', '.join(self.spots)}, {self.isa}"


def run(name: str, cases: int, number: int) -> int:
    """Check about ``cases`` cases of op ``name`` drawn from seed ``number``, each spoiled in every way.

    Returns:
        How many spoiled calls were checked.
    """
    checked = 0

    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @seed(number)
    @given(every_way(name))
    def one(ways: list[Spoiled]) -> None:
        nonlocal checked
        for spoiled in ways:
            check(spoiled)
            checked += 1

    one()
    return checked


@st.composite
def every_way(draw: DrawFn, name: str) -> list[Spoiled]:
    """A case of the table, each of its float arguments spoiled by each value, and two of them at once."""
    torch.manual_seed(draw(st.integers(0, 2**31 - 1)))
    case: Case = draw(load()[name])
    names = [key for key, value in case.arguments.items() if _holds_floats(name, key, value)]
    ways = [[(key, value)] for key in names for value in VALUES]
    if names:
        ways.append([(draw(st.sampled_from(names)), draw(st.sampled_from(VALUES))) for _ in range(2)])
    return [_spoiled(draw, name, case, way) for way in ways]


def _spoiled(draw: DrawFn, name: str, case: Case, way: list[tuple[str, float]]) -> Spoiled:
    arguments = {key: _own(value) for key, value in case.arguments.items()}
    result = Spoiled(name, arguments, draw(st.sampled_from(torch.ops.liteboost._isas())), [])
    for key, value in way:
        place = draw(PLACES)
        if key in INT8_ROWS.get(name, ()):
            # What quantize_kv makes of each value.
            chosen = _where(draw, arguments[key][..., 0], place)
            arguments[key][..., -SCALE_BYTES:][chosen] = torch.tensor([math.nan]).view(torch.int8)
        else:
            tensor = arguments[key]
            # In place, where several elements may be one place in memory.
            for at in _where(draw, tensor, place).nonzero().tolist():
                tensor[tuple(at)] = value
        result.spots.append(f"{value} in {place} of {key}")
    return result


def _own(value: Any) -> Any:
    return copy_of(value) if isinstance(value, Tensor) else value


def _holds_floats(name: str, key: str, value: object) -> bool:
    if not isinstance(value, Tensor) or not value.numel():
        return False
    return value.is_floating_point() or key in INT8_ROWS.get(name, ())


def _where(draw: DrawFn, tensor: Tensor, place: str) -> Tensor:
    """A mask of the places of ``tensor`` to spoil."""
    chosen = torch.zeros(tensor.shape, dtype=torch.bool)
    if place == "all" or not tensor.dim():
        return ~chosen
    if place == "some":
        return torch.rand(tensor.shape) < 0.2
    at = [draw(st.integers(0, n - 1)) for n in tensor.shape]
    free = {"element": None, "row": tensor.dim() - 1, "column": max(tensor.dim() - 2, 0)}[place]
    chosen[tuple(slice(None) if dim == free else i for dim, i in enumerate(at))] = True
    return chosen


def check(spoiled: Spoiled) -> None:
    """Raise AssertionError for an element of another class than the reference's, or far from it."""
    torch.ops.liteboost._limit_isa(spoiled.isa)
    try:
        results = _outputs(spoiled, op(spoiled.name))
    finally:
        torch.ops.liteboost._limit_isa("")
    for i, (result, allowed) in enumerate(zip(results, _expected(spoiled), strict=True)):
        if not result.is_floating_point():
            assert torch.equal(result, allowed[0]), spoiled
            continue
        right = torch.stack([_agree(result, each) for each in allowed]).any(0)
        if i == 0 and spoiled.name in MIX_VALUES and not right.all():
            # Hidden values may reach a row as 0 * NaN or be left out, as torch's own does with blocks.
            seen = _of_seen_values(spoiled)
            right |= _agree(result, seen)
            # A probability that is rounded to 0 makes NaN of an infinity.
            right |= result.isnan() & seen.isinf() & _may_underflow(spoiled.arguments)
        if spoiled.name in MIX_VALUES and not right.all():
            right |= _agree(result, _without_hidden_blocks(spoiled)[i])
        if not right.all():
            first = tuple((~right).nonzero()[0].tolist())
            wanted = ", ".join(str(each[first].item()) for each in allowed)
            raise AssertionError(
                f"{spoiled}: output {i}: {int((~right).sum())} of {right.numel()} elements are wrong; at "
                f"{first} {result[first].item()} instead of {wanted}"
            )


def _outputs(
    spoiled: Spoiled, function: Callable[..., Any], change: Callable[[Any], Any] = lambda value: value
) -> list[Tensor]:
    """All that ``function`` gives for the arguments, each changed by ``change`` and in memory of its own."""
    arguments = {key: change(_own(value)) for key, value in spoiled.arguments.items()}
    return ops()[spoiled.name].outputs(function(**arguments), arguments)


def _expected(spoiled: Spoiled) -> list[list[Tensor]]:
    """What may be right, of each output: the reference's in the arguments' dtypes, and in float64."""
    oracle = ORACLES.get(spoiled.name, ops()[spoiled.name].reference)
    found = [_outputs(spoiled, oracle), _outputs(spoiled, oracle, double)]
    if spoiled.name in UNCANCELLED:
        found.append(_outputs(spoiled, UNCANCELLED[spoiled.name], double))
    return [list(each) for each in zip(*found, strict=True)]


def _agree(result: Tensor, want: Tensor) -> Tensor:
    """Where both are of one class, and close where that is finite."""
    found, want = result.double(), want.double()
    finite = want[want.isfinite()].abs()
    largest = finite.max() if finite.numel() else 0.0
    close = (found - want).abs() <= FAR * (want.abs() + largest) + 1e-6
    if not result.dtype.is_floating_point:
        return found == want
    # A finite number beyond the dtype of the result is infinite there.
    most = torch.finfo(result.dtype).max
    overflow = want.isfinite() & (want.abs() > most * (1 - FAR)) & (found == want.sign() * math.inf)
    return close | (found == want) | (found.isnan() & want.isnan()) | overflow


def _of_seen_values(spoiled: Spoiled) -> Tensor:
    """What an op that mixes values gives where those that a query does not see are left out, in float64."""
    value = spoiled.arguments["value"]
    has_rows = "value" in INT8_ROWS.get(spoiled.name, ())
    numbers = dequantized(value, torch.float32) if has_rows else value

    def mixed(chosen: Tensor) -> Tensor:
        """How much of the chosen values there is in each output."""
        ones = chosen.to(numbers.dtype)
        return exact(spoiled.name, {**spoiled.arguments, "value": quantize_kv(ones) if has_rows else ones})[0]

    spots = ~numbers.isfinite()
    hidden = spots.all(-1, keepdim=True) if has_rows else spots
    result = exact(spoiled.name, {**spoiled.arguments, "value": value.masked_fill(hidden, 0)})[0]
    high, low = mixed(numbers == math.inf) > 0, mixed(numbers == -math.inf) > 0
    result = result.masked_fill(high, math.inf).masked_fill(low, -math.inf)
    return result.masked_fill((high & low) | (mixed(numbers.isnan()) > 0), math.nan)


def _without_hidden_blocks(spoiled: Spoiled) -> list[Tensor]:
    """What an op gives that leaves out the keys and values that a bool mask hides from a row, in float64.

    Kernels leave out whole blocks: only for rows that see no key, and where there is more than one block.
    """
    arguments, results = spoiled.arguments, exact(spoiled.name, spoiled.arguments)
    mask, key = arguments.get("mask"), arguments["key"]
    if mask is None or mask.dtype != torch.bool:
        return results
    batch, heads, rows = arguments["query"].shape[:3]
    mask, group = mask.expand(batch, heads, rows, key.shape[2]), heads // key.shape[1]
    for b, h, q in itertools.product(range(batch), range(heads), range(rows)):
        seen = mask[b, h, q] & _in_window(arguments, q)
        if seen.all() or (seen.any() and len(seen) <= BLOCK_KEYS):
            continue
        one: dict[str, Any] = {**arguments, "query": arguments["query"][b : b + 1, h : h + 1]}
        for name in ("key", "value"):
            of_head = arguments[name][b : b + 1, h // group : h // group + 1]
            one[name] = of_head.masked_fill(~mask[b, h, q][:, None], 0)
        one["mask"] = mask[b : b + 1, h : h + 1]
        if (sinks := arguments.get("sinks")) is not None:
            one["sinks"] = sinks[h : h + 1] if sinks.dim() == 1 else sinks[b : b + 1, h : h + 1]
        for result, found in zip(results, exact(spoiled.name, one), strict=True):
            result[b, q, h] = found[0, q, 0]
    return results


def _in_window(arguments: dict[str, Any], row: int) -> Tensor:
    """Which keys causality and the window show to a query."""
    rows, keys = arguments["query"].shape[2], arguments["key"].shape[2]
    last = row + keys - rows if arguments.get("is_causal") else keys
    window = arguments.get("sliding_window") or keys + rows
    at = torch.arange(keys)
    return (at <= last) & (at > last - window)


def _may_underflow(arguments: dict[str, Any]) -> bool:
    """Whether finite logits may be so far apart that a kernel rounds a probability to 0."""
    query, key = arguments["query"], arguments["key"]
    if key.dtype == torch.int8:
        key = dequantized(key, torch.float32)
    norms = [largest_of(double(each).nan_to_num(0, 0, 0).norm(dim=-1)) for each in (query, key)]
    mask = arguments.get("mask")
    spread = 2 * abs(arguments["scaling"]) * norms[0] * norms[1]
    if mask is not None and mask.is_floating_point():
        spread += 2 * largest_of(double(mask)[double(mask).abs() < 1e4])
    return spread > LEAST_LOG


def _token_by_token(*, initial_state: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """What `chunk_gated_delta_rule` is defined as.

    Its reference's chunks multiply what a token does not see by 0, and subtract logarithms of decays.
    """
    key, value = arguments["key"], arguments["value"]
    if initial_state is not None:
        state = initial_state.clone(memory_format=torch.contiguous_format)  # no element in two places
    else:
        dtype = torch.promote_types(value.dtype, torch.float32)
        state = value.new_zeros(len(value), value.shape[2], key.shape[3], value.shape[3], dtype=dtype)
    return recurrent_gated_delta_rule(**arguments, state=state), state


def _gated(
    gate: Tensor,
    up: Tensor,
    activation: str,
    alpha: float,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """`gated_activation` by activations that do not cancel to 0, which an infinite ``up`` would make NaN."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return exact_activation(gate, activation, alpha) * (up + up_offset)


def _activation(x: Tensor, activation: str, alpha: float) -> Tensor:
    return exact_activation(x, activation, alpha)


def _gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    **rest: Any,
) -> Tensor:
    return _gated(linear(x, gate_weight, gate_bias), linear(x, up_weight, up_bias), **rest)


#: Of ops whose reference is not what says how NaN and infinities travel.
ORACLES: dict[str, Callable[..., Any]] = {"chunk_gated_delta_rule": _token_by_token}
#: What may be right, too.
UNCANCELLED: dict[str, Callable[..., Any]] = {
    "activation": _activation,
    "gated_activation": _gated,
    "gated_linear": _gated_linear,
}
