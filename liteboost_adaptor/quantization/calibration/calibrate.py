"""Calibration: a sample text is read, and scales are chosen by the activations that it causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...errors import QuantizationError
from ..layers.target import QuantTarget
from ..schemes import QuantizedTensor, quantize
from . import gptq
from .dataflow import NormReaders, original_code, read, trace
from .scaling import ActivationStatistics, ScaledNorm, divide_scales, search, smooth

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
        refused: (norm, reason) of those whose layers are rounded without a scale.
    """

    columns: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    grams: dict[str, Tensor] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def scaled(self, name: str, weight: Tensor) -> Tensor:
        """The weight of layer ``name`` as it is rounded."""
        columns = self.columns.get(name)
        return weight if columns is None else weight.float() * columns

    def quantize(self, target: QuantTarget, weight: Tensor) -> QuantizedTensor:
        """The weight of a layer, rounded. Raises as `rounding.quantize` does."""
        assert target.scheme is not None
        if target.experts is not None:
            return target.experts.quantize(weight, target.scheme, target.name)
        weight = self.scaled(target.name, target.matrix(weight))
        gram = self.grams.get(target.name)
        if gram is None:
            return quantize(weight, target.scheme, target.name)
        return gptq.quantize(weight, target.scheme, gram, target.name)


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
    targets: list[QuantTarget],
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Read ``blocks`` with ``model``, and choose scales by what its layers see. Changes nothing.

    Args:
        model: In floating point, on the CPU.
        blocks: ``[blocks, tokens]``.
        method: One of `config.METHODS`; only ``"gptq"`` makes a difference here.
        targets: What becomes of the model's weights.

    Raises:
        QuantizationError: The model is sharded, or does not run on a text alone.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise QuantizationError(
            "a model that is sharded cannot be calibrated: quantize the checkpoint first "
            "(python -m liteboost_adaptor quantize --calibrate), and load that"
        )
    # Experts are rounded to nearest, for which tokens each has is the router's, and so are transposed layers.
    calibrated = {
        target.name: target
        for target in targets
        if target.scheme is not None and target.experts is None and not target.is_transposed
    }
    layers = {name: target.layer for name, target in calibrated.items()}
    with original_code(model):
        norms, shared = trace(model, blocks[:1, :_TRACED], layers)
        statistics = _statistics(model, blocks, layers, shared, progress)
    result = Calibration()
    for at, readers in enumerate(norms):
        progress(readers.norm, at, len(norms))
        scaled = _scaled_norm(model, readers, calibrated, statistics)
        if isinstance(scaled, str):
            result.refused.append((readers.norm, f"its layers are rounded without a scale: {scaled}"))
            continue
        result.parameters |= {f"{readers.norm}.{name}": value for name, value in scaled.parameters.items()}
        result.columns |= dict.fromkeys(readers.layers, scaled.scales)
    if method == "gptq":
        _add_grams(result, layers, statistics)
    return result


def _add_grams(
    result: Calibration, layers: Iterable[str], statistics: dict[str, ActivationStatistics]
) -> None:
    for name in layers:
        if name not in statistics or not statistics[name].rows:
            result.refused.append((name, "it has read nothing of the text: rounded to nearest"))
            continue
        gram, columns = statistics[name].gram, result.columns.get(name)
        result.grams[name] = gram if columns is None else gram / columns.outer(columns)


def _statistics(
    model: torch.nn.Module,
    blocks: Tensor,
    layers: dict[str, torch.nn.Linear],
    shared: dict[str, str],
    progress: Progress,
) -> dict[str, ActivationStatistics]:
    """Of the inputs of every layer; one for all that read the same (``shared``, see `dataflow.trace`)."""
    first = {name: ActivationStatistics.of(layers[name].in_features) for name in sorted(set(shared.values()))}
    with ExitStack() as stack:
        for name, statistics in first.items():
            handle = layers[name].register_forward_pre_hook(lambda _, given, of=statistics: of.add(given[0]))
            stack.callback(handle.remove)
        for at, block in enumerate(blocks):
            progress("reading the text", at, len(blocks))
            read(model, block[None].to(model.device))
    return {name: first[source] for name, source in shared.items()}


def _scaled_norm(
    model: torch.nn.Module,
    readers: NormReaders,
    targets: dict[str, QuantTarget],
    statistics: dict[str, ActivationStatistics],
) -> ScaledNorm | str:
    """A norm without a scale that its layers take on, or why not."""
    if readers.reason:
        return readers.reason
    schemes = [targets[name].scheme for name in readers.layers]
    weights = [targets[name].layer.weight.detach() for name in readers.layers]
    seen = statistics[readers.layers[0]]
    if all(scheme.is_w8a8 for scheme in schemes):
        scales = smooth(weights, seen)
    else:
        scales = search(weights, schemes, seen)
    scaled = divide_scales(model.get_submodule(readers.norm), scales)
    return "its weight is not a factor of its output" if scaled is None else scaled
