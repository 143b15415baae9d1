"""A text that a model reads before it is quantised, and what is made of what its layers saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError
from . import gptq
from .choices import Choice
from .dataflow import Reader, original_code, trace
from .rounding import Quantized, quantize
from .scaling import Moved, Statistics, search, smooth, without

#: Tokens of a block, and how many blocks of the text are read.
BLOCK, BLOCKS = 256, 64
#: Tokens that show which layer reads which norm.
_TRACED = 8

#: (what is at work, steps done, of so many)
Progress = Callable[[str, int, int], None]


@dataclass
class Calibration:
    """What calibrating a model has found.

    Attributes:
        columns: By the name of a layer, what its weight's columns are multiplied by before they are rounded.
        parameters: By their names, parameters of norms that have given those factors up.
        grams: By the name of a layer, the sum of outer products of its inputs, for GPTQ.
        kept: (norm, reason) of those whose layers are rounded without a scale.
    """

    columns: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    grams: dict[str, Tensor] = field(default_factory=dict)
    kept: list[tuple[str, str]] = field(default_factory=list)

    def scaled(self, name: str, weight: Tensor) -> Tensor:
        """The weight of layer ``name`` as it is rounded."""
        columns = self.columns.get(name)
        return weight if columns is None else weight.float() * columns

    def quantize(self, choice: Choice, weight: Tensor) -> Quantized:
        """The weight of a layer, rounded. Raises as `rounding.quantize` does."""
        assert choice.scheme is not None
        if choice.experts is not None:
            return choice.experts.quantize(weight, choice.scheme, choice.name)
        weight = self.scaled(choice.name, choice.matrix(weight))
        gram = self.grams.get(choice.name)
        if gram is None:
            return quantize(weight, choice.scheme, choice.name)
        return gptq.quantize(weight, choice.scheme, gram, choice.name)


def blocks_of(model: torch.nn.Module, text: str, trust_remote_code: bool = False) -> Tensor:
    """The file ``text`` as tokens of the model's tokenizer, ``[blocks, tokens]``.

    Args:
        trust_remote_code: Whether Python code beside the model may run, as where the model's own has.

    Raises:
        QuantizationError: There is no such file, no tokenizer beside the model, or too little text.
    """
    from transformers import AutoTokenizer

    path = Path(text)
    if not path.is_file():
        raise QuantizationError(f"calibrate must be a file with a text, found {text!r}")
    try:
        trusted = trust_remote_code or getattr(type(model), "is_remote_code", bool)()
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=trusted)
    except (OSError, ValueError) as fault:
        raise QuantizationError(
            f"a text is read with the model's tokenizer, and {model.name_or_path!r} has none: {fault}"
        ) from fault
    encoded = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    count = min(BLOCKS, len(encoded) // BLOCK)
    if not count:
        raise QuantizationError(
            f"calibrate must be a text of at least {BLOCK} tokens, found {len(encoded)} in {text}"
        )
    return torch.tensor(encoded[: count * BLOCK]).view(count, BLOCK)


def calibrate(
    model: torch.nn.Module,
    blocks: Tensor,
    method: str | None,
    made: list[Choice],
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Read ``blocks`` with ``model``, and choose scales by what its layers see. Changes nothing.

    Args:
        model: In floating point, on the CPU.
        blocks: ``[blocks, tokens]``.
        method: One of `config.METHODS`; only ``"gptq"`` makes a difference here.
        made: What becomes of the model's layers.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise QuantizationError(
            "a model that is divided over processes cannot be calibrated: quantise the checkpoint first "
            "(python -m liteboost_adaptor quantize --calibrate), and load that"
        )
    # Experts are rounded to nearest, for which tokens each has is the router's, and so are transposed layers.
    chosen = {
        choice.name: choice
        for choice in made
        if choice.scheme is not None and choice.experts is None and not choice.is_transposed
    }
    layers = {name: choice.layer for name, choice in chosen.items()}
    with original_code(model):
        flow = trace(model, blocks[:1, :_TRACED], layers)
        seen = _statistics(model, blocks, layers, flow.shared, progress)
    result = Calibration()
    for at, reader in enumerate(flow.readers):
        progress(reader.norm, at, len(flow.readers))
        moved = _moved(model, reader, chosen, seen, flow.shared)
        if isinstance(moved, str):
            result.kept.append((reader.norm, f"its layers are rounded without a scale: {moved}"))
            continue
        result.parameters |= {f"{reader.norm}.{name}": value for name, value in moved.parameters.items()}
        result.columns |= dict.fromkeys(reader.layers, moved.scales)
    if method == "gptq":
        _add_grams(result, layers, flow.shared, seen)
    return result


def _add_grams(
    result: Calibration,
    layers: dict[str, torch.nn.Linear],
    shared: dict[str, str],
    seen: dict[str, Statistics],
) -> None:
    for name in layers:
        if name not in shared or not seen[shared[name]].rows:
            result.kept.append((name, "it has read nothing of the text: rounded to nearest"))
            continue
        gram, columns = seen[shared[name]].gram, result.columns.get(name)
        result.grams[name] = gram if columns is None else gram / columns.outer(columns)


def _statistics(
    model: torch.nn.Module,
    blocks: Tensor,
    layers: dict[str, torch.nn.Linear],
    shared: dict[str, str],
    progress: Progress,
) -> dict[str, Statistics]:
    """Of the inputs of every layer that was the first to read one."""
    seen = {name: Statistics.of(layers[name].in_features) for name in sorted(set(shared.values()))}

    def hook(of: Statistics) -> Any:
        return lambda _, arguments: of.add(arguments[0])

    with ExitStack() as stack:
        for name, statistics in seen.items():
            stack.callback(layers[name].register_forward_pre_hook(hook(statistics)).remove)
        for at, block in enumerate(blocks):
            progress("reading the text", at, len(blocks))
            model(input_ids=block[None].to(model.device), use_cache=False)
    return seen


def _moved(
    model: torch.nn.Module,
    reader: Reader,
    chosen: dict[str, Choice],
    seen: dict[str, Statistics],
    shared: dict[str, str],
) -> Moved | str:
    """A norm without a scale that its layers take on, or why not."""
    if reader.reason:
        return reader.reason
    schemes = [chosen[name].scheme for name in reader.layers]
    weights = [chosen[name].layer.weight.detach() for name in reader.layers]
    statistics = seen[shared[reader.layers[0]]]
    if all(scheme.rounds_activations for scheme in schemes):
        scales = smooth(weights, statistics)
    else:
        scales = search(weights, schemes, statistics)
    moved = without(model.get_submodule(reader.norm), scales)
    return "its weight is not a factor of its output" if moved is None else moved
