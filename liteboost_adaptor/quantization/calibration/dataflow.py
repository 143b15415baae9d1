"""Which linear layers read the output of which norm, seen in a forward pass: by what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import QuantizationError

#: What takes values out of tensors; any other call that gives no tensor only looks at shapes and the like.
_VALUES = (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)
#: What gives the same channels in another arrangement of rows, or the very tensor where it is so already.
_ARRANGES = (Tensor.view, Tensor.reshape, Tensor.contiguous, torch.reshape)
_CONVERTS = (Tensor.to, Tensor.type_as, Tensor.float, Tensor.contiguous, Tensor.type)


@dataclass
class NormReaders:
    """What reads the output of a norm.

    Attributes:
        norm: Its name.
        layers: Names of the linear layers that read it.
        reason: Why a scale cannot be moved from the norm to them, or an empty string.
    """

    norm: str
    layers: list[str] = field(default_factory=list)
    reason: str = ""


@contextmanager
def original_code(model: torch.nn.Module) -> Iterator[None]:
    """``model`` computes by the code it was written in, and nothing is kept for gradients."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = model.training
    for parameter in trainable:
        parameter.requires_grad_(False)
    model.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():  # in grad mode no rule serves
            yield
    finally:
        model.train(training)
        for parameter in trainable:
            parameter.requires_grad_(True)


def read(model: torch.nn.Module, input_ids: Tensor) -> None:
    """Run ``model`` over tokens; one with an encoder writes the same behind its start token.

    Raises:
        QuantizationError: It needs something else.
    """
    given = {"input_ids": input_ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        start = getattr(model.config, "decoder_start_token_id", None)
        first = input_ids[:, :1] if start is None else torch.full_like(input_ids[:, :1], start)
        given["decoder_input_ids"] = torch.cat([first, input_ids[:, :-1]], 1)
    try:
        model(**given)
    except Exception as fault:
        raise QuantizationError(
            f"a text is read with the model, and {type(model).__name__} does not run on one alone "
            f"({type(fault).__name__}: {fault}): quantize it without calibrate="
        ) from fault


def trace(
    model: torch.nn.Module, input_ids: Tensor, layers: dict[str, torch.nn.Linear]
) -> tuple[list[NormReaders], dict[str, str]]:
    """Run ``model`` once and see what reads what.

    Args:
        model: With the code it was written in (`original_code`).
        input_ids: ``[1, tokens]``; a few tokens are enough.
        layers: The linear layers to look at, by name.

    Returns:
        What reads each norm whose output a linear layer reads, among it whoever calls one of the models in
        ``model``; and for each linear layer that ran, the first one that read the same tensor.
    """
    from transformers import PreTrainedModel

    norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
    recorder = _CallRecorder()
    outputs: dict[str, list[Tensor]] = {name: [] for name in norms}
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    with ExitStack() as stack:
        for name, module in norms.items():
            handle = module.register_forward_hook(lambda _, __, out, kept=outputs[name]: _keep(kept, (out,)))
            stack.callback(handle.remove)
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(
                lambda _, given, kept=inputs[name]: _keep(kept, given[:1])
            )
            stack.callback(handle.remove)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                stack.callback(part.register_forward_hook(recorder.note_returned).remove)
        stack.enter_context(recorder)
        read(model, input_ids)
    return _readers(recorder, outputs, layers), _shared(inputs)


def _is_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.nn.Parameter) and weight.dim() == 1 and not list(module.children())


def _keep(kept: list[Tensor], values: tuple[Any, ...]) -> None:
    kept.extend(value for value in values if isinstance(value, Tensor))


class _CallRecorder(TorchFunctionMode):
    """Notes the calls that each tensor is an argument of, and which model returns it, by their ids.

    Keeps all tensors, so that no id is given twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, list[tuple[Any, tuple[Any, ...], Any]]] = {}
        self.returned: dict[int, str] = {}
        self._kept: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_read = func in _VALUES or next(_tensors((result,)), None) is not None
        if not is_read:
            return result
        given = (*args, *(kwargs or {}).values())
        self._kept.append((given, result))
        for tensor in _tensors(given):
            self.calls.setdefault(id(tensor), []).append((func, given, result))
        return result

    def note_returned(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        """A hook of ``model``."""
        self.returned |= {id(each): type(model).__name__ for each in _tensors((output,))}

    def arrangements(self, tensor: Tensor) -> Iterator[Tensor]:
        """``tensor``, and its rows in another arrangement."""
        yield tensor
        for func, _, result in self.calls.get(id(tensor), ()):
            if result is not tensor and _is_arranged(func, tensor, result):
                yield from self.arrangements(result)

    def uses(self, tensor: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The calls that read ``tensor`` and do not just arrange its rows."""
        for func, given, result in self.calls.get(id(tensor), ()):
            if not _is_arranged(func, tensor, result):
                yield func, given


def _is_arranged(func: Any, tensor: Tensor, result: Any) -> bool:
    if func in _CONVERTS and result is tensor:
        return True
    return func in _ARRANGES and result.dim() > 0 and result.shape[-1] == tensor.shape[-1]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _readers(
    recorder: _CallRecorder, outputs: dict[str, list[Tensor]], layers: dict[str, torch.nn.Linear]
) -> list[NormReaders]:
    names = {id(layer.weight): name for name, layer in layers.items()}
    found = []
    for norm, tensors in outputs.items():
        reader = NormReaders(norm)
        arranged = [each for tensor in tensors for each in recorder.arrangements(tensor)]
        for each in arranged:
            if id(each) in recorder.returned:
                reader.reason = f"{recorder.returned[id(each)]} returns its output"
        for func, given in (use for each in arranged for use in recorder.uses(each)):
            is_linear = func is F.linear and isinstance(given[1], Tensor)
            if is_linear and id(given[1]) in names:
                name = names[id(given[1])]
                reader.layers.append(name)
                if len(recorder.calls[id(given[1])]) > 1:
                    reader.reason = reader.reason or f"the weight of {name} is read elsewhere, too"
            else:
                what = "a layer that stays as it is" if is_linear else getattr(func, "__name__", str(func))
                reader.reason = reader.reason or f"its output is read by {what}, too"
        if reader.layers:
            if len(tensors) > 1:
                reader.reason = "it runs more than once"
            found.append(reader)
    return found


def _shared(inputs: dict[str, list[Tensor]]) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, tensors in inputs.items():
        if tensors:
            found[name] = first.setdefault(id(tensors[0]), name) if len(tensors) == 1 else name
    return found
