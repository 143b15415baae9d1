"""The arguments of a step: what of them must be the same for a program to serve it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from .. import eligibility
from ..kv_cache.names import KV_CACHES
from . import ragged
from .caches import appended_layers, keeps_tokens

#: The argument that is what an encoder has made.
_ENCODED = "encoder_outputs"
#: Arguments that have a size for how much has been seen, by the model or by the encoder beside it, and how
#: many dimensions they have.
_RANKS = {"attention_mask": 2, "decoder_attention_mask": 2, f"{_ENCODED}.last_hidden_state": 3}
#: Along which of them that is.
GROWING: dict[str, tuple[int, ...]] = dict.fromkeys(_RANKS, (1,))
#: Arguments that are a cache; the last one is ours.
CACHES = (*KV_CACHES, "cache_params", ragged.NAME)
#: Arguments that are the tokens of a call, or their embeddings. Beside those of a decoder, which come first,
#: the others are an encoder's.
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
#: Those of them that are tokens.
_IDS = ("decoder_input_ids", "input_ids")
#: Arguments whose last dimension is as long as a row has new tokens.
_OF_TOKENS = frozenset(
    {
        *(*_IDS, "position_ids", "decoder_position_ids", "cache_position"),
        *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
    }
)
#: Arguments that are numbers of new tokens: of how many logits are wanted.
_NUMBERS = ("logits_to_keep", "num_logits_to_keep")
#: So many new tokens a row has at most in a step that is recorded: of more, arithmetic takes the time.
MOST_TOKENS = 16
#: Stands in `kinds` for a number of new tokens above one: a program serves any.
_SEVERAL = "several"
ON_DEVICE = "several tokens of a row are recorded on a CPU only"
#: What we ourselves write on tensors begins so; who reads it is asked before every run.
_OURS = "_liteboost_"


@dataclass(frozen=True)
class Fields:
    """Stands for an argument whose tensors are arguments of their own: see `flat`.

    Attributes:
        cls: Of transformers' outputs.
        names: Those of its tensors; all other fields are ``None``.
        empty: Names of these.
    """

    cls: type[OrderedDict[str, Any]]
    names: tuple[str, ...]
    empty: tuple[str, ...]

    def built(self, tensors: dict[str, Any]) -> Any:
        """One with ``tensors``, by name."""
        made: Any = self.cls.__new__(self.cls)
        for name in self.names:
            OrderedDict.__setitem__(made, name, tensors[name])
        vars(made).update(dict.fromkeys(self.empty), **tensors)
        return made


def flat(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` where each tensor of ``encoder_outputs`` is one: ``encoder_outputs.last_hidden_state``.

    An output that holds more than tensors stays what it is.
    """
    outputs = kwargs.get(_ENCODED)
    if not isinstance(outputs, OrderedDict) or type(outputs).__module__ != "transformers.modeling_outputs":
        return kwargs
    tensors, own = dict(outputs), vars(outputs)
    empty = tuple(name for name in own if name not in tensors)
    is_plain = all(own.get(name) is value and type(value) is torch.Tensor for name, value in tensors.items())
    if not is_plain or any(own[name] is not None for name in empty):
        return kwargs
    fields = Fields(type(outputs), tuple(tensors), empty)
    return {**kwargs, _ENCODED: fields, **{f"{_ENCODED}.{name}": each for name, each in tensors.items()}}


def nested(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `flat` has made ``given`` of."""
    fields = given.get(_ENCODED)
    if not isinstance(fields, Fields):
        return given
    tensors = {name: given[f"{_ENCODED}.{name}"] for name in fields.names}
    kept = {name: value for name, value in given.items() if not name.startswith(f"{_ENCODED}.")}
    return {**kept, _ENCODED: fields.built(tensors)}


def tokens(kwargs: dict[str, Any]) -> Any:
    """The tokens of a call, or their embeddings; of a decoder's beside an encoder those of the decoder."""
    return kwargs.get(_tokens_name(kwargs))


def cache_name(kwargs: dict[str, Any]) -> str:
    """The argument that is a cache, or an empty string."""
    return next((name for name in CACHES if kwargs.get(name) is not None), "")


def kinds(kwargs: dict[str, Any], parameters: Container[str]) -> Any:
    """What of a call's arguments must be the same for a program to serve it, or ``None`` where none can.

    Args:
        kwargs: As `flat` gives them.
        parameters: Names that the forward has parameters for. Others may be any object: see `stand_in`.
    """
    ids, cache = tokens(kwargs), kwargs.get(cache_name(kwargs))
    if (
        _tokens_name(kwargs) not in _IDS
        or type(ids) is not torch.Tensor
        or ids.dim() != 2
        or cache is None
        or ids.device.type not in eligibility.DEVICES
    ):
        return None
    count = ids.shape[1]
    if count != 1 and (ids.device.type != "cpu" or not _are_several(count, cache)):
        return None
    found: list[Any] = []
    names: dict[int, str] = {}
    for name, value in kwargs.items():
        if value is None or value is True or value is False:
            found += (name, value)
        elif type(value) is torch.Tensor:
            if value.__dict__ and not all(name.startswith(_OURS) for name in value.__dict__):
                return None  # what somebody has written on it is for the forward to read
            shape: tuple[Any, ...] = value.shape
            if name in _RANKS:
                if len(shape) != _RANKS[name]:
                    return None
                shape = (shape[0], *shape[2:])
            elif count != 1 and _is_of_tokens(name, value, count):
                shape = (*shape[:-1], _SEVERAL)
            # One tensor that is handed in twice has one slot.
            found += (name, shape, value.dtype, names.setdefault(id(value), name))
        elif value is cache:
            layers = appended_layers(cache)
            if layers is None:
                return None
            found += (name, type(cache), len(layers))
        elif type(value) is Fields:
            found += (name, value)
        elif type(value) in (int, float, str):
            is_count = count != 1 and _is_count(name, value, count)
            kept = _SEVERAL if is_count else value.hex() if type(value) is float else value
            found += (name, type(value), kept)
        elif name not in parameters and not isinstance(value, torch.Tensor):
            found += (name, type(value))
        else:
            return None
    return tuple(found)


def is_passed_on(kwargs: dict[str, Any], name: str) -> bool:
    """Whether the argument, of a call that has `kinds`, is an object which no forward may read."""
    value = kwargs[name]
    is_cache = value is kwargs[cache_name(kwargs)]
    understood = (torch.Tensor, bool, int, float, str, Fields)
    return value is not None and not is_cache and type(value) not in understood


def is_decode_step(kwargs: dict[str, Any]) -> bool:
    """Whether a call is for one more token of each row, with a cache, or for a few behind what it keeps."""
    ids, name = tokens(kwargs), cache_name(kwargs)
    if not name or not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        return False
    return ids.shape[1] == 1 or _are_several(ids.shape[1], kwargs[name])


def growing(given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Along which dimensions which argument has another size in every run: see `Recorder.input`.

    An argument without dimensions is a number that is another one in every run.
    """
    count, found = tokens(given).shape[1], dict(GROWING)
    if count == 1:
        return found
    for name, value in given.items():
        if type(value) is torch.Tensor and _is_of_tokens(name, value, count):
            found[name] = (value.dim() - 1,)
        elif _is_count(name, value, count):
            found[name] = ()
    return found


def _are_several(count: int, cache: Any) -> bool:
    """Whether ``count`` new tokens of a row are several behind others: a prompt is no step."""
    return 1 < count <= MOST_TOKENS and keeps_tokens(cache)


def _is_of_tokens(name: str, value: torch.Tensor, count: int) -> bool:
    return name in _OF_TOKENS and value.dim() > 0 and value.shape[-1] == count


def _is_count(name: str, value: Any, count: int) -> bool:
    return name in _NUMBERS and type(value) is int and value == count


def _tokens_name(kwargs: dict[str, Any]) -> str:
    return next((name for name in _TOKENS if kwargs.get(name) is not None), "")


def fault(kwargs: dict[str, Any]) -> str:
    """Why a decode step has no `kinds`."""
    name, cache = _tokens_name(kwargs), kwargs[cache_name(kwargs)]
    if name not in _IDS:
        return f"its token is given as {name}"
    ids = kwargs[name]
    if ids.dim() != 2:
        return f"{name} of {ids.dim()} dimensions"
    if ids.shape[1] > 1 and ids.device.type != "cpu":
        return ON_DEVICE
    if appended_layers(cache) is None:
        return f"a cache without a list of layers ({type(cache).__name__})"
    for name, value in kwargs.items():
        if type(value) is torch.Tensor:
            if name in _RANKS and value.dim() != _RANKS[name]:
                return f"{name} of {value.dim()} dimensions"
            if not all(each.startswith(_OURS) for each in value.__dict__):
                return f"{name} with attributes"
        elif value is not cache and value is not None and type(value) not in (bool, int, float, str, Fields):
            return f"{name} is given as a {type(value).__name__}"
    return f"on {ids.device.type}"


def dense(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with contiguous tensors: how a slice of a growing tensor lies is different at each step."""
    if all([type(value) is not torch.Tensor or value.is_contiguous() for value in kwargs.values()]):
        return kwargs
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(id(value), value.contiguous()) if type(value) is torch.Tensor else value
        for name, value in kwargs.items()
    }
